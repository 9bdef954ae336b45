# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), for one matrix.

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
