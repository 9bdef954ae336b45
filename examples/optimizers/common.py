# SPDX-License-Identifier: Apache-2.0
"""Trains a small model, sharded over the ranks of this job, by an optimizer of matrices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw


def train(matrix: Any, steps: int = 20) -> float:
    """The loss after training; fails if it did not fall to half."""
    mesh = sw.init_mesh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 1))
    sw.fully_shard(model, mesh=mesh, placements=sw.zero(3))
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))
    inputs = torch.randn(64, 32)  # the same on every rank
    targets = inputs[:, :4].sum(1, keepdim=True).sin()
    losses = []
    for _ in range(steps):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} after {steps} steps")
    assert losses[-1] < losses[0] / 2, losses
    return losses[-1]
