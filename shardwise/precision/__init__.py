# SPDX-License-Identifier: Apache-2.0
"""In which formats weights, gradients and activations are kept."""

from shardwise.precision.policy import Precision

__all__ = ["Precision"]
