# SPDX-License-Identifier: Apache-2.0
"""Other people's software, each in a small file that is imported when it is asked for."""
