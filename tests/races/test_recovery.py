# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around a gather: no room for it, messages that fail, a stream being captured."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import comm
from shardwise.memory import Block, TracePool
from shardwise.shard.unit import Unit
from tests.models import Model, loss_of, make_model, mesh_of, shard_model, tokens
from tests.races.checker import Checker
from tests.races.helpers import NUM_RANKS, backward, make, name_memory, posing
from tests.ranks import run_ranks

# --------------------------------------------------------------------------------- memory is taken


def first_of_two(model: Model) -> Any:
    """A layer whose whole weights share their home with those of a later one."""
    pool = model.layers[0]._shardwise_unit.runtime.source
    assert isinstance(pool, TracePool) and pool.planned
    homes: dict[int, Any] = {}
    for layer in model.layers:
        [group] = layer._shardwise_unit.groups
        home = pool._homes[group.whole.block]
        if id(home) in homes:
            return homes[id(home)]
        homes[id(home)] = layer
    raise AssertionError("no two layers share a home")


def test_weights_gathered_ahead_make_room_outside_of_the_gather_lane() -> None:
    """Whoever gives its memory up waits for the compute lane, which has no name on another."""
    evicted: list[str] = []
    evict = Unit.evict

    def noting(unit: Unit) -> None:
        evicted.append(unit.name)
        evict(unit)

    with posing() as meshes, Checker() as checker, patch.object(Unit, "evict", noting):
        model = make(meshes, "zero3", memory="trace")
        name_memory(checker, model)
        for _ in range(2):
            backward(model)
            model.zero_grad()
        first = first_of_two(model)
        loss = loss_of(model, tokens(0, 0, 0, NUM_RANKS))
        first.unshard(async_op=True)
        assert first._shardwise_unit.groups[0].fresh and not evicted
        loss.backward()
    assert first._shardwise_unit.name in evicted
    assert checker.races == []


def test_who_is_evicted_is_told_before_the_memory_is_taken() -> None:
    """In the pool itself: ``acquire`` never asks anybody, ``make_room`` does."""
    pool = TracePool()
    one, other = (Block(64, torch.float32, torch.device("cpu"), "compute") for _ in range(2))
    for block in (one, other):
        block.release(pool)
    for block in (one, other):
        block.acquire(pool)
        block.release(pool)
    pool.step_done()
    assert pool._homes[one] is pool._homes[other]
    one.acquire(pool)
    one.evict = lambda: one.release(pool)
    other.viewed = lambda: True
    with pytest.raises(RuntimeError, match="the same home"):
        other.acquire(pool)
    assert one.live
    pool.make_room(other)
    assert not one.live
    other.acquire(pool)
    assert other.live


# ------------------------------------------------------------------------------ messages that fail


class Failing:
    """A gather whose messages come damaged, and which says so."""

    def __init__(self, pending: comm.Pending, out: Tensor) -> None:
        self._pending, self._out, self._waited = pending, out, False

    def wait(self) -> None:
        if self._waited:  # as of a Pending: it says so once
            return
        self._waited = True
        self._pending.wait()
        self._out.fill_(77)
        raise RuntimeError("all_gather failed: connection closed by peer")


FORMATS: dict[str, sw.Precision] = {
    "bf16": sw.Precision(weights="bf16"),
    "mxfp8": sw.Precision(weights="mxfp8"),
    "mxfp8_2d": sw.Precision(weights="mxfp8_2d"),
}


def fail_once(rank: int, world_size: int, stage: int, format: str, failing: int) -> None:
    model = make_model(width=64, depth=2)
    shard_model(model, sw.zero(stage), mesh_of(world_size), precision=FORMATS[format])
    batch = tokens(0, 0, rank, world_size)
    with torch.no_grad():
        expected = model(batch)
        for parameter in model.parameters():
            parameter.mul_(1)  # so that weights which are kept are gathered anew
    count, gather = 0, comm.all_gather

    def all_gather(out: Tensor, shard: Tensor, group: Any) -> Any:
        nonlocal count
        count += 1
        pending = gather(out, shard, group)
        return Failing(pending, out) if count == failing else pending

    refused = pytest.raises(RuntimeError, match="connection closed by peer")
    with patch.object(comm, "all_gather", all_gather), torch.no_grad(), refused:
        model(batch)
    assert count >= failing
    model.reset_iter_state()
    with torch.no_grad():
        assert torch.equal(model(batch), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gather_that_failed_has_gathered_nothing(stage: int, format: str) -> None:
    for failing in (1, 2, 3):
        run_ranks(fail_once, 2, stage, format, failing)


# ------------------------------------------------------------------------------------- CUDA graphs


def test_a_capture_is_refused_by_name() -> None:
    with posing() as meshes, patch("torch.cuda.is_current_stream_capturing", lambda: True):
        model = make(meshes, "zero3")
        backward(model)  # on a CPU there is nothing to capture
        for unit in (model, *model.layers):
            unit._shardwise_unit.runtime.lanes.device = torch.device("cuda")
        with pytest.raises(RuntimeError, match=r"forward of 'Model' .* CUDA graph"):
            model(tokens(0))
        with pytest.raises(RuntimeError, match=r"'layers.1' .* CUDA graph"):
            model.layers[1].unshard()
        with pytest.raises(RuntimeError, match=r"forward of 'layers.1' .* CUDA graph"):
            model.layers[1](torch.randn(2, 32))
