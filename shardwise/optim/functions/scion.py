# SPDX-License-Identifier: Apache-2.0
"""Scion (Pethick et al. 2025, arXiv:2502.07529) and a Lion of spectra: steps of the spectral norm.

Both move by the orthogonal matrix that is nearest to an average of gradients, of the length at
which inputs of RMS 1 change outputs by RMS lr.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.optim.functions.muon_variants import orthogonalise
from shardwise.optim.matrix_function import State, matrix_optimizer


@matrix_optimizer
def scion(
    gradient: Tensor, state: State, *, lr: float, alpha: float = 0.1, steps: int = 5
) -> Tensor:
    """The unconstrained form: an average of gradients, and the step that is steepest for it."""
    if not state:
        state["mean"] = gradient.clone()
    mean = state["mean"].lerp_(gradient, alpha)
    rows, cols = gradient.shape[-2:]
    return lr * math.sqrt(rows / cols) * orthogonalise(mean, steps)


@matrix_optimizer
def spectral_lion(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    steps: int = 5,
) -> Tensor:
    """Lion's two averages (Chen et al. 2023, arXiv:2302.06675), orthogonal in the place of sign."""
    if not state:
        state["mean"] = torch.zeros_like(gradient)
    update = state["mean"].lerp(gradient, 1 - betas[0])
    state["mean"].lerp_(gradient, 1 - betas[1])
    rows, cols = gradient.shape[-2:]
    return lr * math.sqrt(rows / cols) * orthogonalise(update, steps)
