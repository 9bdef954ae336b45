# SPDX-License-Identifier: Apache-2.0
"""Scion: the steepest step in spectral norm for an average of gradients.

    python examples/optimizers/scion.py
    torchrun --nproc-per-node 2 examples/optimizers/scion.py

The function sees whole matrices, [n, rows, cols]; ``train`` (in common.py) shards a small model
over all ranks and trains it.
"""

from __future__ import annotations

import math

from common import train
from torch import Tensor

import shardwise as sw
from shardwise.optim.functions import orthogonalise


@sw.matrix_optimizer
def scion(gradient: Tensor, state: dict[str, Tensor], *, lr: float, alpha: float = 0.1) -> Tensor:
    """Scion (Pethick et al. 2025, arXiv:2502.07529), unconstrained: the steepest step in spectral
    norm for an average of gradients. Inputs of RMS 1 change outputs by RMS lr."""
    if not state:
        state["mean"] = gradient.clone()
    mean = state["mean"].lerp_(gradient, alpha)
    rows, cols = gradient.shape[-2:]
    return lr * math.sqrt(rows / cols) * orthogonalise(mean)


def main() -> float:
    return train(scion(lr=0.02))


if __name__ == "__main__":
    main()
