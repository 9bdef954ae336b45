# SPDX-License-Identifier: Apache-2.0
"""Plans of a run, pictures of it, one page of HTML."""
