# SPDX-License-Identifier: Apache-2.0
"""Imported last by the process that ranks are forked from: its objects are never collected, so a
collection in a rank does not touch, and thereby copy, their memory."""

import gc

from tests.products import keep_one_product

keep_one_product()
gc.collect()
gc.freeze()
