# SPDX-License-Identifier: Apache-2.0
"""The formats in which weights, gradients and activations are kept."""

from shardwise.precision.mxfp8_tensor import MXFP8Tensor
from shardwise.precision.policy import Precision

__all__ = ["MXFP8Tensor", "Precision"]
