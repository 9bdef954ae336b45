# SPDX-License-Identifier: Apache-2.0
"""MXFP8 weights as a program meets them: read late, written, printed, copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.models import mesh_for
from tests.ranks import run_ranks

WIDTH = 64


def shard(model: nn.Module, world_size: int, format: str = "mxfp8") -> nn.Module:
    placements = sw.zero(3)
    return sw.fully_shard(
        model,
        placements=placements,
        mesh=mesh_for(placements, world_size),
        precision=sw.Precision(weights=format, reduce="fp32"),
    )


# ------------------------------------------------------------------------------- versions


class Recomputed(nn.Module):
    """Notes what each pass computes with; the second one is inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        self.seen.append(self.linear.weight.detach().float())
        return self.linear(x).tanh()


def recompute_after_a_change(rank: int, world_size: int, format: str) -> float:
    model = shard(Recomputed(), world_size, format)
    larger = {name: 4 * value for name, value in sw.full_state_dict(model).items()}
    loss = model(torch.ones(2, WIDTH)).float().sum()
    sw.load_full_state_dict(model, larger)
    loss.backward()
    before, after = model.seen
    return float(after.norm() / before.norm())


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "mxfp8_2d"])
def test_a_recomputation_reads_the_version_that_backward_reads(format: str) -> None:
    assert run_ranks(recompute_after_a_change, 2, format) == [4.0, 4.0]
