# SPDX-License-Identifier: Apache-2.0
"""SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

The first step sets the basis and changes no weight, as in the authors' code. Later bases come from
one step of a power iteration (QR), every ``frequency`` steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.optim.matrix_function import State, matrix_optimizer


@matrix_optimizer
def soap(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = 0.95,
    frequency: int = 10,
    eps: float = 1e-8,
) -> Tensor:
    """Adam's update of the rotated gradient, rotated back."""
    grams = {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}
    if not state:
        state["count"] = gradient.new_zeros(len(gradient))
        state["mean"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for side, gram in grams.items():
            state[side] = (1 - shampoo_beta) * gram
            # Largest eigenvalues first.
            state[f"{side}_basis"] = torch.linalg.eigh(gram).eigenvectors.flip(-1).contiguous()
        return torch.zeros_like(gradient)
    state["count"] += 1
    count = state["count"][:, None, None].double()  # of each matrix: one may have missed a step
    left, right = state["left_basis"], state["right_basis"]
    mean = state["mean"].lerp_(gradient, 1 - betas[0])
    second = state["second"].lerp_((left.mT @ gradient @ right).square(), 1 - betas[1])
    corrected = second.sqrt() / ((1 - betas[1] ** count) ** 0.5).to(second.dtype) + eps
    update: Tensor = left.mT @ mean @ right / (1 - betas[0] ** count).to(mean.dtype) / corrected
    update = left @ update @ right.mT
    for side, gram in grams.items():
        state[side].lerp_(gram, 1 - shampoo_beta)
    due = (state["count"] % frequency == 0).nonzero().flatten()
    if len(due):
        part = {name: value[due] for name, value in state.items()}
        _turn(part, "left", dim=-2)
        _turn(part, "right", dim=-1)
        for name, value in part.items():
            state[name][due] = value
    return lr * update


def _turn(state: State, side: str, dim: int) -> None:
    """Bring a basis closer to the eigenvectors; the second moments keep their directions."""
    gram, basis = state[side], state[f"{side}_basis"]
    sizes = (basis.mT @ gram @ basis).diagonal(dim1=-2, dim2=-1)
    order = sizes.argsort(dim=-1, descending=True)
    basis = basis.gather(-1, order[:, None, :].expand_as(basis))
    shape = order[:, :, None] if dim == -2 else order[:, None, :]
    state["second"] = state["second"].gather(dim, shape.expand_as(state["second"]))
    state[f"{side}_basis"] = torch.linalg.qr(gram @ basis).Q.contiguous()
