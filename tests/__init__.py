# SPDX-License-Identifier: Apache-2.0

from tests import new_engine as new_engine  # the scratch of issue 41: see there
