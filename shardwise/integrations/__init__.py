# SPDX-License-Identifier: Apache-2.0
"""Adapters for other libraries, each in a small file that is imported on demand."""
