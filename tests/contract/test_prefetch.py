# SPDX-License-Identifier: Apache-2.0
"""Which weights are gathered ahead: the next unit's, or those that a list names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    Block,
    assert_at_rest,
    assert_gradients_equal,
    average_gradients,
    check_backward,
    pair,
    raised,
    transient_bytes,
    vector_loss,
    vectors,
    wrap,
)
from tests.ranks import on_ranks


class Watched(nn.Module):
    """A block that notes how much is gathered while it computes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(sw.ledger.current["compute"])
        x = self.inner(x)
        if x.requires_grad:
            x.register_hook(self.note)
        return x * 1  # the unit's own hook is on this one, so that ours runs after it

    def note(self, grad: Tensor) -> None:
        self.seen.append(sw.ledger.current["compute"])


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Watched() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def watch(net: Any, rank: int) -> tuple[list[int], list[int]]:
    """Units whole while each block computes: forward, then backward (both in order of blocks)."""
    base = transient_bytes()["compute"]
    for block in net.blocks:
        block.seen.clear()
    vector_loss(net, rank).backward()
    seen = [[nbytes - base for nbytes in block.seen] for block in net.blocks]
    assert all(len(entry) == 2 for entry in seen)
    unit = min(entry[0] for entry in seen)
    assert unit > 0
    forward = [round(entry[0] / unit) for entry in seen]
    return forward, [round(entry[1] / unit) for entry in seen]


@on_ranks(2)
def test_the_next_unit_is_gathered_ahead_both_ways(rank: int, world_size: int) -> None:
    net, plain = pair(Chain)
    wrap(net, world_size)
    before = transient_bytes()
    for _ in range(3):
        forward, backward = watch(net, rank)
        assert forward == [2, 2, 2, 2, 1], "itself and the next one, none behind the last"
        assert max(backward) <= 2, backward
        assert backward[-1] == 2, "itself and the one before it"
        average_gradients(plain, vector_loss, world_size)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)


@on_ranks(2)
def test_lists_decide_what_is_gathered_ahead(rank: int, world_size: int) -> None:
    net, plain = pair(Chain)
    wrap(net, world_size)
    before = transient_bytes()
    blocks = list(net.blocks)
    watch(net, rank)
    net.zero_grad()
    for position, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 3])
        block.set_modules_to_backward_prefetch(blocks[max(position - 2, 0) : position][::-1])
    for _ in range(2):
        forward, backward = watch(net, rank)
        assert forward == [3, 3, 3, 2, 1], "itself and two ahead"
        assert backward == [1, 2, 3, 3, 3]
        average_gradients(plain, vector_loss, world_size)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)
    for block in blocks:
        block.set_modules_to_forward_prefetch([])
        block.set_modules_to_backward_prefetch([])
    forward, backward = watch(net, rank)
    assert forward == [1] * 5 and backward == [1] * 5, "an empty list: nothing ahead"


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_useless_lists_cost_no_correctness(rank: int, world_size: int, strategy: str) -> None:
    """Lists that name what comes late, came already, or never comes: slower, never wrong."""
    net, plain = pair(Chain)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    blocks = list(net.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[4], blocks[0]])
    blocks[3].set_modules_to_forward_prefetch([blocks[0]])
    blocks[2].set_modules_to_backward_prefetch([blocks[4], blocks[3]])
    for _ in range(2):
        check_backward(net, plain, vector_loss, rank, world_size)
        assert_at_rest(net, before)


@on_ranks(2)
def test_lists_take_wrapped_modules_only(rank: int, world_size: int) -> None:
    net = wrap(Chain(), world_size)
    plain = nn.Linear(2, 2)
    messages = [
        raised(lambda: net.set_modules_to_forward_prefetch([plain]), ValueError),
        raised(lambda: net.set_modules_to_backward_prefetch([plain]), ValueError),
    ]
    assert all("Linear" in message for message in messages)


@on_ranks(2)
def test_a_pass_without_gradients_holds_two_units_and_leaves_none(
    rank: int, world_size: int
) -> None:
    net = wrap(Chain(), world_size)
    base = transient_bytes()["compute"]
    with torch.no_grad():
        net(vectors(rank))
    seen = [block.seen[-1] - base for block in net.blocks]
    assert max(seen) <= 2 * min(seen), seen
    assert transient_bytes()["compute"] == base
