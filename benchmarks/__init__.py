# SPDX-License-Identifier: Apache-2.0
"""Speed and memory against torch's own systems. Start with ``python -m benchmarks.fsdp --help``."""
