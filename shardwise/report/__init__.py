# SPDX-License-Identifier: Apache-2.0
"""What a run will take, and what it looked like: plans, pictures, one page of HTML."""
