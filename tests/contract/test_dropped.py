# SPDX-License-Identifier: Apache-2.0
"""One rank drops what units gave, or uses a part of one; others run them once more in backward. All
issue the same collectives in the same order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import Call
from shardwise.layout import ELEMENT
from tests.contract.helpers import assert_at_rest, full, options_for, ranks_for, transient_bytes
from tests.ranks import run_ranks

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
        by_codes = weights == "mxfp8" and not cut
        assert more == by_codes, "a second plane is gathered where one is not both"
    return issued


@pytest.mark.parametrize(
    ("strategy", "weights", "kept", "cut"),
    [(s, w, None, False) for s in ("zero3", "hfsdp") for w in ("bf16", "mxfp8", "mxfp8_2d")]
    + [("zero3", "mxfp8", None, True), ("zero3", "mxfp8", 2, False)],
)
def test_ranks_whose_backward_passes_units_by_issue_what_others_do(
    strategy: str, weights: str, kept: int | None, cut: bool
) -> None:
    world_size = 4 if kept else ranks_for(strategy)
    first, *others = run_ranks(dropped, world_size, strategy, weights, kept, cut, timeout=60)
    assert len(first) > 100 and all(calls == first for calls in others)
