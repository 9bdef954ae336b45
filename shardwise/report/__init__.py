# SPDX-License-Identifier: Apache-2.0
"""The page of a run, and the recording of one step."""
