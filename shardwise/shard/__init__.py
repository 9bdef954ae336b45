# SPDX-License-Identifier: Apache-2.0
"""Sharded modules: the two public verbs, and the engine that runs them."""
