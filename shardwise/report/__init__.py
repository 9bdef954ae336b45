# SPDX-License-Identifier: Apache-2.0
"""The page of a run, the recording of one step, and what a wrapped model holds."""
