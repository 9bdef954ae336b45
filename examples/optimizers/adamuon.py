# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: the orthogonalised sign of the momentum, divided by the root of its second moment.

    python examples/optimizers/adamuon.py
    torchrun --nproc-per-node 2 examples/optimizers/adamuon.py

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
def adamuon(
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    momentum: float = 0.95,
    eps: float = 1e-8,
) -> Tensor:
    """AdaMuon (Si et al. 2025, arXiv:2507.11005): the orthogonalised sign of the momentum, divided
    by the root of its second moment, and scaled to an RMS of 0.2 lr."""
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
        state["second"] = torch.zeros_like(gradient)
    buffer = state["momentum"].mul_(momentum).add_(gradient)
    update = orthogonalise(buffer.sign())
    second = state["second"].lerp_(update.square(), 1 - momentum)
    update = update / (second.sqrt() + eps)
    norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
    return 0.2 * lr * math.sqrt(gradient[0].numel()) * update / (norm + eps)


def main() -> float:
    return train(adamuon(lr=0.02))


if __name__ == "__main__":
    main()
