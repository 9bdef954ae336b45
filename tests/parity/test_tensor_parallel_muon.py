# SPDX-License-Identifier: Apache-2.0
"""Muon on matrices that tensor parallelism cut into tiles, in its three forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from tests.ranks import on_ranks
from tests.tensor_parallel import (
    assert_close,
    batches,
    bucketed,
    data_rank,
    grid,
    muon_of,
    one_process,
    sharded,
    tiled,
    train,
    whole,
)

STEPS = 2  # the second has momentum


def one_unit(mesh: Any, placements: sw.Placements) -> nn.Module:
    """Matrices beside an embedding whose tiles are uneven. In one buffer with it they would lie
    otherwise on each rank of tp, and these would plan different exchanges."""
    model = sw.fully_shard(tiled(mesh), mesh=mesh, placements=placements)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.cut.pieces for p in model.blocks.parameters()])
    assert all(pieces == everyone[0] for pieces in everyone)
    return model


WAYS: list[tuple[Any, tuple[int, ...], sw.Placements]] = [
    (sharded, (2, 2), sw.zero(3)),
    (one_unit, (2, 2), sw.zero(3)),
    (sharded, (2, 2), sw.zero(1)),
    (bucketed, (2, 2), sw.zero(0)),
    (bucketed, (2, 2), sw.zero(2)),
    (sharded, (2, 1, 2), sw.hsdp()),
    (sharded, (2, 1, 2), sw.hfsdp()),
]
# The form with most messages goes every way; each way has one of the other two beside it.
WAYS_OF = {"distributed": range(7), "duplicated": (0, 2, 4, 6), "blockwise": (0, 1, 3, 5)}


def everywhere(mode: str) -> list[list[dict[str, Tensor]]]:
    """The same training under the strategies of a 2 x 2 and a 2 x 1 x 2 mesh."""
    optimize = partial(muon_of, tensor_parallel=mode)
    found = []
    for wrap, sizes, placements in (WAYS[number] for number in WAYS_OF[mode]):
        mesh = grid(*sizes)
        model = wrap(mesh, placements)
        found.append(train(model, optimize(model), batches(STEPS, 2, data_rank(mesh))))
    return found


def assert_same_bits(runs: list[list[dict[str, Tensor]]]) -> None:
    first, *others = runs
    for other in others:
        for mine, its in zip(other, first, strict=True):
            assert not [name for name in mine if not torch.equal(mine[name], its[name])]


@pytest.mark.cpu_only("16 bits: other kernels serve matrices that travel than those that stay")
@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
@on_ranks(4)
def test_exact_forms_are_those_of_one_process(rank: int, world_size: int, mode: str) -> None:
    runs = everywhere(mode)
    assert_same_bits(runs)
    assert_close(runs[0], one_process(muon_of, STEPS, 2))


@on_ranks(4)
def test_blockwise_is_muon_on_tiles(rank: int, world_size: int) -> None:
    """As on torch's DTensors of tensor parallelism alone, which see all batches here."""
    runs = everywhere("blockwise")
    assert_same_bits(runs)
    model = tiled(grid(2, 2))
    optimizer = muon_of(model, tensor_parallel="blockwise")
    assert_close(runs[0], train(model, optimizer, batches(STEPS, 2)))
    with pytest.raises(AssertionError):
        assert_close(runs[0], one_process(muon_of, STEPS, 2))


class Attention(nn.Module):
    """Query, key and value in one matrix, heads one after another: [heads, 3, head, width]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.qkv(x).tanh())


@on_ranks(4)
def test_a_split_within_tiles(rank: int, world_size: int) -> None:
    """Six matrices of 4 rows, three on each rank of tp: whole there, so no tile is gathered."""
    mesh = grid(2, 2)

    def built(over: Any) -> tuple[nn.Module, Any]:
        model = Attention()
        sw.route(model, split={"qkv.weight": sw.Split.heads(6)})
        if over is not None:
            plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            sw.fully_shard(model, mesh=mesh)
        return model, sw.optimizer(model, matrix=sw.muon(lr=0.1), elementwise=sw.adamw())

    ours, alone = built(mesh), built(None)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for model, optimizer in (ours, alone):
        for _ in range(2):
            model(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), its in zip(ours[0].named_parameters(), alone[0].parameters(), strict=True):
        near = 2e-4 if mine.device.type == "cpu" else 2e-3  # a GPU orthogonalises in 16 bits
        assert torch.allclose(whole(mine), its, atol=near), name
