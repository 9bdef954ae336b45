# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for one matrix, and two
that add adaptive rates to it: NorMuon and AdaMuon.

``sw.muon`` is the same optimizer with momentum stored like the weights, other polynomials and its
own kernels; this file is for reading, copying and changing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.optim.matrix_function import State, matrix_optimizer


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """About U V' of each matrix [n, rows, cols] = U S V', by a quintic Newton-Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x.bfloat16() if x.is_cuda else x.float()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


@matrix_optimizer
def muon(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
) -> Tensor:
    """Momentum, made orthogonal."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
    buffer = state["momentum"].lerp_(gradient, 1 - momentum)
    update = gradient.lerp(buffer, momentum) if nesterov else buffer
    rows, cols = gradient.shape[-2:]
    return lr * math.sqrt(max(1.0, rows / cols)) * orthogonalise(update, steps)


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
    """NorMuon (Li et al. 2025, arXiv:2510.05491): an orthogonal update, each row over its root mean
    square so far; of RMS 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient[:, :, :1])  # [n, rows, 1]
    buffer = state["momentum"].lerp_(gradient, 1 - momentum)
    update = orthogonalise(buffer, steps)
    second = state["second"].lerp_(update.square().mean(-1, keepdim=True), 1 - beta2)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)


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
    """AdaMuon (Si et al. 2025, arXiv:2507.11005): the orthogonalised sign of the momentum over the
    root of its second moment; RMS 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient)
    buffer = state["momentum"].mul_(momentum).add_(gradient)
    update = orthogonalise(buffer.sign(), steps)
    second = state["second"].lerp_(update.square(), 1 - momentum)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)
