# SPDX-License-Identifier: Apache-2.0
"""Dion: a low-rank update, by one step of a power iteration on the momentum.

    python examples/optimizers/dion.py
    torchrun --nproc-per-node 2 examples/optimizers/dion.py

The function sees whole matrices, [n, rows, cols]; ``train`` (in common.py) shards a small model
over all ranks and trains it.
"""

from __future__ import annotations

import math

import torch
from common import train
from torch import Tensor

import shardwise as sw


@sw.matrix_optimizer
def dion(
    gradient: Tensor,
    state: dict[str, Tensor],
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


def main() -> float:
    return train(dion(lr=0.02))


if __name__ == "__main__":
    main()
