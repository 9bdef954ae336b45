# SPDX-License-Identifier: Apache-2.0
"""Mistakes of one rank are named on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core import comm, streams
from shardwise.debugging import debug
from tests.contract.helpers import STRATEGIES, WIDTH, logged, raised, ranks_for, vector_loss, wrap
from tests.ranks import on_ranks, run_ranks


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.idle = nn.Parameter(torch.ones(WIDTH))
        self.order, self.uses_idle = (0, 1, 2), False

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = x + self.blocks[number](x).tanh()
        return x * self.idle if self.uses_idle else x


def skips(net: Any, optimizer: Any, rank: int) -> None:
    net.order = (0, 1, 2) if rank == 0 else (0, 2)
    vector_loss(net, rank).backward()
    optimizer.step()


def steps_alone(net: Any, optimizer: Any, rank: int) -> None:
    vector_loss(net, rank).backward()
    if rank:
        optimizer.step()
    vector_loss(net, rank).backward()


def lacks_a_gradient(net: Any, optimizer: Any, rank: int) -> None:
    net.uses_idle = rank == 0
    vector_loss(net, rank).backward()
    optimizer.step()


def writes_nan(net: Any, optimizer: Any, rank: int) -> None:
    vector_loss(net, rank).backward()
    if rank == 1:
        net.blocks[2].bias.grad.to_local().fill_(float("nan"))
    optimizer.step()


def writes_to_one_replica(net: Any, optimizer: Any, rank: int) -> None:
    vector_loss(net, rank).backward()
    if rank == 0:  # which holds all of this weight
        net.blocks[1].weight.to_local().mul_(2)
    optimizer.step()


MISTAKES: dict[Callable[..., None], str] = {
    skips: "blocks.2",
    steps_alone: "SGD.step()",
    lacks_a_gradient: "'idle' got no gradient on ranks [1",
    writes_nan: "gradient of 'blocks.2.bias': ",
}


def run(rank: int, world_size: int, strategy: str, mistake: Callable[..., None]) -> str:
    net = wrap(Blocks(), world_size, strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with debug(net):
            mistake(net, optimizer, rank)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "hsdp"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_some_ranks_is_named_on_all(
    mistake: Callable[..., None], strategy: str
) -> None:
    found = run_ranks(run, ranks_for(strategy), strategy, mistake, fresh=True)
    assert len(set(found)) == 1 and MISTAKES[mistake] in found[0], found


@pytest.mark.parametrize("strategy", ["zero0", "hsdp"])
def test_replicas_that_differ_are_named_on_all_ranks(strategy: str) -> None:
    found = run_ranks(run, ranks_for(strategy), strategy, writes_to_one_replica, fresh=True)
    assert len(set(found)) == 1 and "replicas of 'blocks.1.weight' differ" in found[0], found


def from_the_environment(rank: int, world_size: int) -> str:
    os.environ["SHARDWISE_DEBUG"] = "1"  # after the import, before the first forward
    net = wrap(Blocks(), world_size, "zero3")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return raised(lambda: writes_nan(net, optimizer, rank), RuntimeError)


def test_the_environment_switches_debug_on() -> None:
    for message in run_ranks(from_the_environment, 2, fresh=True):
        assert MISTAKES[writes_nan] in message


@pytest.mark.parametrize("strategy", [*STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_debug_changes_no_bit_and_leaves_nothing(rank: int, world_size: int, strategy: str) -> None:
    results = []
    for context in (nullcontext(), "debug"):
        torch.manual_seed(3)
        net: Any = wrap(Blocks(), world_size, strategy)
        optimizer = sw.optimizer(net, matrix=sw.muon(), elementwise=sw.adamw())
        with logged() as texts, debug(net) if context == "debug" else nullcontext():
            for step in range(2):
                vector_loss(net, rank, step).backward()
                optimizer.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert ("no rank has a gradient for 'idle'" in str(texts)) is (
            context == "debug" and not rank
        )
        results.append([p.to_local().clone() for p in net.parameters()])
    assert all(map(torch.equal, *results))
    assert comm.observer is None and streams.announce is None


@on_ranks(2)
def test_ranges_have_the_names_of_units(rank: int, world_size: int) -> None:
    net = wrap(Blocks(), world_size)
    with debug(net), torch.profiler.profile() as profile:
        vector_loss(net, rank).backward()
    names = {event.key for event in profile.key_averages()}
    assert {"blocks.1: gather for forward", "blocks.1: reduce gradients"} <= names
