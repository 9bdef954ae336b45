# SPDX-License-Identifier: Apache-2.0
"""Shampoo (Gupta et al. 2018, arXiv:1802.09568), its norm grafted from Adam (Shi et al. 2023,
arXiv:2309.06497). Each matrix's preconditioners, and the work on them, lie on its owner."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.optim.matrix_function import State, matrix_optimizer


@matrix_optimizer
def shampoo(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    frequency: int = 10,
    eps: float = 1e-8,
    damping: float = 1e-6,
) -> Tensor:
    """L^-1/4 G R^-1/4 of the momentum, as long as Adam's update would be."""
    if not state:
        state["count"] = gradient.new_zeros(len(gradient))
        state["mean"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for side, gram in (("left", gradient @ gradient.mT), ("right", gradient.mT @ gradient)):
            state[side], state[f"{side}_root"] = torch.zeros_like(gram), torch.zeros_like(gram)
    state["count"] += 1
    count = state["count"][:, None, None].double()  # of each matrix: one may have missed a step
    due = ((state["count"] == 1) | (state["count"] % frequency == 0)).nonzero().flatten()
    mean = state["mean"].lerp_(gradient, 1 - betas[0])
    second = state["second"].lerp_(gradient.square(), 1 - betas[1])
    adam = mean / (1 - betas[0] ** count).to(mean.dtype)
    adam = adam / ((second / (1 - betas[1] ** count).to(second.dtype)).sqrt() + eps)
    for side, gram in (("left", gradient @ gradient.mT), ("right", gradient.mT @ gradient)):
        state[side].lerp_(gram, 1 - betas[1])
        if len(due):
            state[f"{side}_root"][due] = _inverse_root(state[side][due], damping)
    update = state["left_root"] @ mean @ state["right_root"]
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    length: Tensor = torch.linalg.matrix_norm(adam, keepdim=True)
    return lr * update * (length / (norm + 1e-30))


def _inverse_root(gram: Tensor, damping: float) -> Tensor:
    """The inverse fourth root of positive matrices [n, m, m]."""
    sizes, vectors = torch.linalg.eigh(gram)
    sizes = sizes.clamp_min(0.0)
    sizes = sizes + damping * sizes[:, -1:].clamp_min(1e-30)
    root: Tensor = (vectors * sizes.pow(-0.25)[:, None, :]) @ vectors.mT
    return root
