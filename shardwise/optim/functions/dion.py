# SPDX-License-Identifier: Apache-2.0
"""Dion (Ahn et al. 2025, arXiv:2504.05295): an orthonormal update of low rank, with error feedback.

One step of a power iteration from the last right factor, in place of Newton-Schulz.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.optim.matrix_function import State, matrix_optimizer


@matrix_optimizer
def dion(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    momentum: float = 0.95,
    rank_fraction: float = 0.25,
    eps: float = 1e-8,
) -> Tensor:
    """P Q' of the momentum's largest directions; what it leaves out stays in the momentum."""
    count, rows, cols = gradient.shape
    if not state:
        rank = max(1, round(rank_fraction * min(rows, cols)))
        start = torch.randn(cols, rank, generator=torch.Generator().manual_seed(0))
        state["momentum"] = torch.zeros_like(gradient)
        state["right"] = start.to(gradient).expand(count, cols, rank).contiguous()
    buffer = state["momentum"].add_(gradient)
    left: Tensor = torch.linalg.qr(buffer @ state["right"]).Q  # [n, rows, rank]
    right = buffer.mT @ left
    buffer -= (1 - momentum) * left @ right.mT
    state["right"] = right / (torch.linalg.vector_norm(right, dim=-2, keepdim=True) + eps)
    return lr * math.sqrt(rows / cols) * left @ state["right"].mT
