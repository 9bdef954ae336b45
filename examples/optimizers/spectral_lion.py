# SPDX-License-Identifier: Apache-2.0
"""Lion's two averages, orthogonalised where Lion takes the sign.

    python examples/optimizers/spectral_lion.py
    torchrun --nproc-per-node 2 examples/optimizers/spectral_lion.py

The function sees whole matrices, [n, rows, cols]; ``train`` (in common.py) shards a small model
over all ranks and trains it.
"""

from __future__ import annotations

import math

import torch
from common import train
from torch import Tensor

import shardwise as sw
from shardwise.optim.functions import orthogonalise


@sw.matrix_optimizer
def spectral_lion(
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
) -> Tensor:
    """Lion's two averages (Chen et al. 2023, arXiv:2302.06675), orthogonalised where Lion takes the
    sign, and scaled like Scion's update."""
    if not state:
        state["mean"] = torch.zeros_like(gradient)
    update = state["mean"].lerp(gradient, 1 - betas[0])
    state["mean"].lerp_(gradient, 1 - betas[1])
    rows, cols = gradient.shape[-2:]
    return lr * math.sqrt(rows / cols) * orthogonalise(update)


def main() -> float:
    return train(spectral_lion(lr=0.02))


if __name__ == "__main__":
    main()
