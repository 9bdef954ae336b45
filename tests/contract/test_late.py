# SPDX-License-Identifier: Apache-2.0
"""Gradients that come late, or on some ranks alone: all ranks issue the same collectives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.comm import Call
from shardwise.moe import GroupedMLP, swiglu
from tests.contract.helpers import (
    assert_gradients_equal,
    options_for,
    pair,
)
from tests.ranks import on_ranks, run_ranks

WIDTH = 32  # whole blocks
# ------------------------------------------------------------------------------- delayed


class Delayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedMLP(2, WIDTH, WIDTH, activation=swiglu(), delay_weight_gradient=True)
        self.exit = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, len(x)], dtype=torch.int32)
        return self.exit(self.experts(x, ends, torch.ones(len(x))))


@on_ranks(2)
def test_buckets_wait_for_gradients_that_no_graph_knows_of(rank: int, world_size: int) -> None:
    net, plain = pair(Delayed)
    options = options_for("zero1", world_size) | {"unused_parameters": "zeros"}
    sw.data_parallel(net, **options, bucket_mb=0.005)
    plain.experts.delay_weight_gradient = False
    for model, ranks in ((net, [rank]), (plain, range(world_size))):
        for each in ranks:
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(each))
            loss = model(x.requires_grad_()).square().mean()  # so that a gate is there
            (loss / len(ranks)).backward()
    net.experts.backward_dw()
    assert_gradients_equal(net, plain)


# ------------------------------------------------------------------------------- entries


class Pair(nn.ModuleList):
    def forward(self, x: Tensor, partly: bool) -> Tensor:
        return self[0](x) if partly else self[0](x) + self[1](x)


class Entries(nn.Module):
    """Units whose inputs need no gradient, of which one rank uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.ModuleList(
            Pair([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(4)
        )
        self.exit = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, partly: bool) -> Tensor:
        total = torch.zeros(len(x), WIDTH)
        for number, entry in enumerate(self.entries):
            total = total + entry(x, partly and number == 2)
        return self.exit(total)


def entered(rank: int, world_size: int) -> list[Call]:
    net, plain = pair(Entries)
    options = options_for("zero3", world_size) | {"unused_parameters": "zeros"}
    for part in (*net.entries, net):
        sw.fully_shard(part, **options)
    with sw.comm.record() as calls:
        net(torch.full((3, WIDTH), 1.0 + rank), rank == 1).square().mean().backward()
    for each in range(world_size):
        loss = plain(torch.full((3, WIDTH), 1.0 + each), each == 1).square().mean()
        (loss / world_size).backward()
    assert_gradients_equal(net, plain)
    return calls


def test_units_that_are_used_in_part_reduce_when_others_do() -> None:
    first, second = run_ranks(entered, 2)
    assert len(first) > 12 and first == second
