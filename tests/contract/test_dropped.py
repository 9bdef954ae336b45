# SPDX-License-Identifier: Apache-2.0
"""One rank drops what units gave, or uses a part of one; others run them once more in backward. All
issue the same collectives in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import Call
from shardwise.layout import ELEMENT
from shardwise.moe import GroupedMLP, swiglu
from tests.contract.helpers import (
    assert_at_rest,
    assert_gradients_equal,
    full,
    options_for,
    pair,
    ranks_for,
    transient_bytes,
)
from tests.ranks import on_ranks, run_ranks

WIDTH = 32  # whole blocks
WHERE = ("nowhere", "inside", "around", "around two")


def again(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh())
        self.last = nn.Linear(2 * WIDTH, WIDTH)
        self.inside = self.partly = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.partly:
            return x
        return self.last(again(self.part, x) if self.inside else self.part(x))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.exit = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, where: str, drops: bool) -> Tensor:
        for block in self.blocks:
            block.inside = where == "inside"
        self.blocks[2].partly = drops and where == "partly"
        drops = drops and where != "partly"
        around = where == "around"
        x = again(self.blocks[0], self.entry(x)) if around else self.blocks[0](self.entry(x))
        if where == "around two":
            y = self.blocks[3](again(nn.Sequential(self.blocks[1], self.blocks[2]), x))
        else:
            y = x
            for block in self.blocks[1:4]:
                y = again(block, y) if around else block(y)
        x = x if drops else x + y
        x = again(self.blocks[4], x) if around else self.blocks[4](x)
        return self.exit(x)


def dropped(
    rank: int, world_size: int, strategy: str, weights: str, kept: int | None, cut: bool
) -> list[Call]:
    torch.manual_seed(0)
    net = Dropping()
    options = options_for(strategy, world_size)
    options |= {"unused_parameters": "zeros", "grain": ELEMENT if cut else None}
    options["precision"] = sw.Precision(weights=weights, reduce="fp32")
    for block in net.blocks:
        sw.fully_shard(block, **options, reshard_after_forward=kept)
    sw.fully_shard(net, **options)
    before = transient_bytes()
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
    grads: dict[str, list[Tensor]] = {}
    gathered: dict[str, int] = {}
    issued: list[Call] = []
    for where in (*WHERE, "partly", "nowhere"):
        net.zero_grad()
        with sw.comm.record() as calls:
            net(x, where, rank == 1).float().square().mean().backward()
        issued += calls
        assert_at_rest(net, before)
        gathered[where] = sum(call.nbytes for call in calls if call.operation == "all_gather")
        grads[where] = [full(parameter.grad).clone() for parameter in net.parameters()]
    assert len(grads["nowhere"]) == 34 and all(grad.abs().max() > 0 for grad in grads["nowhere"])
    for where in WHERE[1:]:
        assert all(map(torch.equal, grads[where], grads["nowhere"])), where
        more = gathered[where] > gathered["nowhere"]
        by_codes = weights == "mxfp8_rowcol" and not cut
        assert more == by_codes, "a second plane is gathered where one is not both"
    return issued


@pytest.mark.parametrize(
    ("strategy", "weights", "kept", "cut"),
    [("zero3", weights, None, False) for weights in ("bf16", "mxfp8_rowcol", "mxfp8_2d")]
    + [("hfsdp", "mxfp8_rowcol", None, False)]
    + [("zero3", "mxfp8_rowcol", None, True), ("zero3", "mxfp8_rowcol", 2, False)],
)
def test_ranks_whose_backward_passes_units_by_issue_what_others_do(
    strategy: str, weights: str, kept: int | None, cut: bool
) -> None:
    world_size = 4 if kept else ranks_for(strategy)
    first, *others = run_ranks(dropped, world_size, strategy, weights, kept, cut)
    assert len(first) > 100 and all(calls == first for calls in others)


# ------------------------------------------------------------------------------- several calls

Route = Callable[[Any, Tensor, bool], Tensor]


class Routed(nn.Module):
    """Each call says which path forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, route: Route, x: Tensor, drops: bool) -> Tensor:
        return self.exit(route(self.blocks, self.entry(x), drops))


def once(blocks: Any, x: Tensor, drops: bool) -> Tensor:
    x = blocks[1](blocks[0](x))
    y = blocks[2](x)
    return blocks[4](blocks[3](x if drops else x + y))


def all_calls(blocks: Any, x: Tensor, drops: bool) -> Tensor:
    """One unit twice, and two modules under one unit."""
    x = blocks[1](blocks[0](x))
    y = blocks[4](blocks[3](blocks[2](blocks[2](x).tanh())))
    return x if drops else x + y


def one_call(blocks: Any, x: Tensor, drops: bool) -> Tensor:
    """The same, and what comes in between is used by everybody."""
    x = blocks[2](blocks[3](blocks[0](x)))
    x = blocks[1](x)
    y = blocks[4](blocks[2](x))
    return x if drops else x + y


def nested(blocks: Any, x: Tensor, drops: bool) -> Tensor:
    """A checkpoint inside a checkpoint."""
    x = blocks[0](x)
    y = again(lambda z: blocks[2](again(blocks[1], z)), x)
    return blocks[4](blocks[3](x if drops else x + y))


def loss_of(net: Any, route: Route, rank: int, step: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return net(route, x, rank == 1).square().mean()


def several(rank: int, world_size: int, kept: bool, frozen: bool) -> list[Call]:
    net, plain = pair(Routed)
    options = options_for("zero3", world_size) | {"unused_parameters": "zeros"}
    for part in (*net.blocks[:3], list(net.blocks[3:]), net):
        sw.fully_shard(part, **options)
    net.set_reshard_after_backward(not kept)
    for model in (net, plain):
        model.blocks[2].requires_grad_(not frozen)
    issued: list[Call] = []

    def compare(losses: Callable[[Any, int], list[Tensor]]) -> None:
        net.zero_grad()
        plain.zero_grad()
        with sw.comm.record() as calls:
            for loss in losses(net, rank):
                loss.backward(retain_graph=True)
        issued.extend(calls)
        for each in range(world_size):
            for loss in losses(plain, each):
                (loss / world_size).backward(retain_graph=True)
        assert_gradients_equal(net, plain)
        for part in (*net.blocks, net):
            assert not part._shardwise_unit.expects_backward

    # Frozen, a unit goes to rest between two calls, so ranks that pass it by cannot follow.
    for route in (once, nested) if frozen else (once, nested, all_calls, one_call):
        compare(lambda model, each, route=route: [loss_of(model, route, each, 0)])
    if not kept:  # what is gathered once serves two graphs, as long as they are one backward's
        compare(lambda model, each: [loss_of(model, once, each, 0), loss_of(model, once, each, 1)])
    if not frozen:
        compare(lambda model, each: [loss_of(model, once, each, 0) + loss_of(model, once, each, 1)])
    compare(lambda model, each: [loss_of(model, once, each, 2)])
    return issued


@pytest.mark.parametrize(("kept", "frozen"), [(False, False), (True, False), (False, True)])
def test_units_that_ran_more_than_once_are_passed_by_once(kept: bool, frozen: bool) -> None:
    first, second = run_ranks(several, 2, kept, frozen)
    assert len(first) > 50 and first == second


# ------------------------------------------------------------------------------- delayed


class Delayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedMLP(
            2, WIDTH, WIDTH, activation=swiglu(), delay_weight_gradient=True, path="loop"
        )
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
