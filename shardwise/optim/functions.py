# SPDX-License-Identifier: Apache-2.0
"""NorMuon and SOAP as functions, to read, copy and change: ``ANY[name](lr=...)``.

A function gets the gradients of n matrices of one shape, [n, rows, cols], and returns what is
subtracted from the weights. ``state`` is empty in the first step. The owner of a matrix stores its
state and calls the function; see matrix_function.py. ``examples/optimizers`` has more of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.kernels import newton_schulz
from shardwise.kernels.polynomials import polynomial_of
from shardwise.optim.matrix_function import matrix_optimizer
from shardwise.optim.rules import State


def orthogonalise(matrices: Tensor, preset: str = "keller") -> Tensor:
    """Approximately U V' of each matrix [n, rows, cols] = U S V', by Newton-Schulz."""
    return newton_schulz.orthogonalise(matrices, polynomial_of(preset)).to(matrices.dtype)


@matrix_optimizer
def normuon(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    momentum: float = 0.95,
    beta2: float = 0.95,
    eps: float = 1e-8,
) -> Tensor:
    """NorMuon (Li et al. 2025, arXiv:2510.05491): an orthogonal update. Each row is divided by a
    running average of its root mean square, and the update is scaled to an RMS of 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient[:, :, :1])  # [n, rows, 1]
    buffer = state["momentum"].lerp_(gradient, 1 - momentum)
    update = orthogonalise(buffer)
    second = state["second"].lerp_(update.square().mean(-1, keepdim=True), 1 - beta2)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)


@matrix_optimizer
def soap(
    gradient: Tensor,
    state: State,
    *,
    lr: float,
    step: int = 1,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = 0.95,
    frequency: int = 10,
    eps: float = 1e-8,
) -> Tensor:
    """SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in Shampoo's eigenbasis.

    The first step sets the basis and changes no weight, as in the authors' code. Every
    ``frequency`` steps, one step of a power iteration (QR) improves the basis."""
    grams = {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}
    if not state:
        state["mean"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for side, gram in grams.items():
            state[side] = (1 - shampoo_beta) * gram
            # Largest eigenvalues first.
            state[f"{side}_basis"] = torch.linalg.eigh(gram).eigenvectors.flip(-1).contiguous()
        return torch.zeros_like(gradient)
    count = step - 1  # of averages: the first step has none
    left, right = state["left_basis"], state["right_basis"]
    mean = state["mean"].lerp_(gradient, 1 - betas[0])
    second = state["second"].lerp_((left.mT @ gradient @ right).square(), 1 - betas[1])
    corrected = second.sqrt() / (1 - betas[1] ** count) ** 0.5 + eps
    update: Tensor = left.mT @ mean @ right / (1 - betas[0] ** count) / corrected
    update = left @ update @ right.mT
    for side, gram in grams.items():
        state[side].lerp_(gram, 1 - shampoo_beta)
    if count % frequency == 0:
        _improve_basis(state, "left", dim=-2)
        _improve_basis(state, "right", dim=-1)
    return lr * update


def _improve_basis(state: State, side: str, dim: int) -> None:
    """Sort a basis by eigenvalue, largest first, and bring it closer to the eigenvectors. The
    second moments, whose dimension ``dim`` it spans, are sorted in the same way."""
    gram, basis = state[side], state[f"{side}_basis"]
    eigenvalues = (basis.mT @ gram @ basis).diagonal(dim1=-2, dim2=-1)
    order = eigenvalues.argsort(dim=-1, descending=True)
    basis = basis.gather(-1, order[:, None, :].expand_as(basis))
    index = order[:, :, None] if dim == -2 else order[:, None, :]
    state["second"] = state["second"].gather(dim, index.expand_as(state["second"]))
    state[f"{side}_basis"] = torch.linalg.qr(gram @ basis).Q.contiguous()


ANY = {function.name: function for function in (normuon, soap)}
