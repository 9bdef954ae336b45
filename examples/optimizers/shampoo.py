# SPDX-License-Identifier: Apache-2.0
"""Shampoo: the momentum between inverse fourth roots of its running Gram matrices.

    python examples/optimizers/shampoo.py
    torchrun --nproc-per-node 2 examples/optimizers/shampoo.py

The function sees whole matrices, [n, rows, cols]; ``train`` (in common.py) shards a small model
over all ranks and trains it.
"""

from __future__ import annotations

import torch
from common import train
from torch import Tensor

import shardwise as sw


@sw.matrix_optimizer
def shampoo(
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    step: int = 1,
    betas: tuple[float, float] = (0.9, 0.95),
    frequency: int = 10,
    eps: float = 1e-8,
    damping: float = 1e-6,
) -> Tensor:
    """Shampoo (Gupta et al. 2018, arXiv:1802.09568): L^-1/4 M R^-1/4 of the momentum M, scaled to
    the norm of Adam's update (Shi et al. 2023, arXiv:2309.06497)."""
    grams = {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}
    if not state:
        state["mean"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for side, gram in grams.items():
            state[side], state[f"{side}_root"] = torch.zeros_like(gram), torch.zeros_like(gram)
    mean = state["mean"].lerp_(gradient, 1 - betas[0])
    second = state["second"].lerp_(gradient.square(), 1 - betas[1])
    adam = mean / (1 - betas[0] ** step)
    adam = adam / ((second / (1 - betas[1] ** step)).sqrt() + eps)
    for side, gram in grams.items():
        state[side].lerp_(gram, 1 - betas[1])
        if step == 1 or step % frequency == 0:
            state[f"{side}_root"].copy_(_inverse_root(state[side], damping))
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


def main() -> float:
    return train(shampoo(lr=0.02))


if __name__ == "__main__":
    main()
