# SPDX-License-Identifier: Apache-2.0
"""NorMuon (Li et al. 2025, arXiv:2510.05491): Muon whose rows get an adaptive rate each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.optim.functions.muon import orthogonalise
from shardwise.optim.matrix_function import State, matrix_optimizer


@matrix_optimizer
def normuon(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    momentum: float = 0.95,
    beta2: float = 0.95,
    eps: float = 1e-8,
    steps: int = 5,
) -> Tensor:
    """An orthogonal update, each row over its root mean square so far; of RMS 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient[:, :, :1])  # [n, rows, 1]
    buffer = state["momentum"].lerp_(gradient, 1 - momentum)
    update = orthogonalise(buffer, steps)
    second = state["second"].lerp_(update.square().mean(-1, keepdim=True), 1 - beta2)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)
