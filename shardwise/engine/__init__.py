# SPDX-License-Identifier: Apache-2.0
"""The new engine (issue 41), beside ``shardwise.shard`` until it takes its place."""
