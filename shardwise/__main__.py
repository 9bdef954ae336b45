# SPDX-License-Identifier: Apache-2.0
"""``python -m shardwise``: the command, for an environment whose scripts are not on the path."""

from shardwise.cli import main

main()
