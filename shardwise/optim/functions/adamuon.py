# SPDX-License-Identifier: Apache-2.0
"""AdaMuon (Si et al. 2025, arXiv:2507.11005): Muon of signs, each element with an adaptive rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.optim.functions.muon import orthogonalise
from shardwise.optim.matrix_function import State, matrix_optimizer


@matrix_optimizer
def adamuon(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    momentum: float = 0.95,
    eps: float = 1e-8,
    steps: int = 5,
) -> Tensor:
    """The orthogonalised sign of the momentum over the root of its second moment; RMS 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient)
    buffer = state["momentum"].mul_(momentum).add_(gradient)
    update = orthogonalise(buffer.sign(), steps)
    second = state["second"].lerp_(update.square(), 1 - momentum)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)
