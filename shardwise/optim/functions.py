# SPDX-License-Identifier: Apache-2.0
"""Matrix optimizers as functions, to read, copy and change: ``ANY[name](lr=...)``.

A function gets the gradients of n matrices of one shape, [n, rows, cols], and returns what is
subtracted from the weights. ``state`` is empty in the first step. The owner of a matrix stores its
state and calls the function; see matrix_function.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.optim.matrix_function import State, matrix_optimizer


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately U V' of each matrix [n, rows, cols] = U S V', by a quintic Newton-Schulz
    iteration."""
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
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the orthogonalised
    momentum.

    ``sw.muon`` is the same optimizer with other polynomials, fast kernels, and momentum that is
    stored like the weights."""
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
    """NorMuon (Li et al. 2025, arXiv:2510.05491): an orthogonal update. Each row is divided by a
    running average of its root mean square, and the update is scaled to an RMS of 0.2 lr."""
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
    """AdaMuon (Si et al. 2025, arXiv:2507.11005): the orthogonalised sign of the momentum, divided
    by the root of its second moment, and scaled to an RMS of 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient)
    buffer = state["momentum"].mul_(momentum).add_(gradient)
    update = orthogonalise(buffer.sign(), steps)
    second = state["second"].lerp_(update.square(), 1 - momentum)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)


@matrix_optimizer
def scion(
    gradient: Tensor, state: State, *, lr: float, alpha: float = 0.1, steps: int = 5
) -> Tensor:
    """Scion (Pethick et al. 2025, arXiv:2502.07529), unconstrained: the steepest step in spectral
    norm for an average of gradients. Inputs of RMS 1 change outputs by RMS lr."""
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
    """Lion's two averages (Chen et al. 2023, arXiv:2302.06675), orthogonalised where Lion takes the
    sign, and scaled like Scion's update."""
    if not state:
        state["mean"] = torch.zeros_like(gradient)
    update = state["mean"].lerp(gradient, 1 - betas[0])
    state["mean"].lerp_(gradient, 1 - betas[1])
    rows, cols = gradient.shape[-2:]
    return lr * math.sqrt(rows / cols) * orthogonalise(update, steps)


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
    """Dion (Ahn et al. 2025, arXiv:2504.05295): P Q' of the momentum's largest directions. One step
    of a power iteration finds them, starting from the last right factor. The directions that the
    update leaves out stay in the momentum."""
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
    """Shampoo (Gupta et al. 2018, arXiv:1802.09568): L^-1/4 M R^-1/4 of the momentum M, scaled to
    the norm of Adam's update (Shi et al. 2023, arXiv:2309.06497)."""
    grams = {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}
    if not state:
        state["count"] = gradient.new_zeros(len(gradient))
        state["mean"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for side, gram in grams.items():
            state[side], state[f"{side}_root"] = torch.zeros_like(gram), torch.zeros_like(gram)
    state["count"] += 1
    count = state["count"][:, None, None].double()  # by matrix: some may have missed steps
    due = ((state["count"] == 1) | (state["count"] % frequency == 0)).nonzero().flatten()
    mean = state["mean"].lerp_(gradient, 1 - betas[0])
    second = state["second"].lerp_(gradient.square(), 1 - betas[1])
    adam = mean / (1 - betas[0] ** count).to(mean.dtype)
    adam = adam / ((second / (1 - betas[1] ** count).to(second.dtype)).sqrt() + eps)
    for side, gram in grams.items():
        state[side].lerp_(gram, 1 - betas[1])
        if len(due):
            state[f"{side}_root"][due] = _inverse_root(state[side][due], damping)
    update = state["left_root"] @ mean @ state["right_root"]
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    length: Tensor = torch.linalg.matrix_norm(adam, keepdim=True)
    return lr * update * (length / (norm + 1e-30))


def _inverse_root(gram: Tensor, damping: float) -> Tensor:
    """The inverse fourth root of positive semi-definite matrices [n, m, m]."""
    eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues = eigenvalues.clamp_min(0.0)
    eigenvalues = eigenvalues + damping * eigenvalues[:, -1:].clamp_min(1e-30)
    root: Tensor = (vectors * eigenvalues.pow(-0.25)[:, None, :]) @ vectors.mT
    return root


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
    """SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in Shampoo's eigenbasis.

    The first step sets the basis and changes no weight, as in the authors' code. Every
    ``frequency`` steps, one step of a power iteration (QR) improves the basis."""
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
    count = state["count"][:, None, None].double()  # by matrix: some may have missed steps
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
        due_state = {name: value[due] for name, value in state.items()}
        _improve_basis(due_state, "left", dim=-2)
        _improve_basis(due_state, "right", dim=-1)
        for name, value in due_state.items():
            state[name][due] = value
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


_FUNCTIONS = (muon, normuon, adamuon, soap, shampoo, dion, scion, spectral_lion)
ANY = {function.name: function for function in _FUNCTIONS}
