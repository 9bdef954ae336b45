# SPDX-License-Identifier: Apache-2.0
"""Optimizers that need whole matrices, on parameters that are sharded over ranks."""
