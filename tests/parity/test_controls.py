# SPDX-License-Identifier: Apache-2.0
"""Negative controls of invariants whose tests have none of their own: each plants one mistake in
the engine and sees the test of the invariant fail. docs/promises.md lists them all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.loading import _Load, write
from shardwise.optim import ownership
from shardwise.shard.gradient import Gradients
from shardwise.shard.group import Group
from shardwise.shard.model import Model
from shardwise.shard.parameter import CodedLeaf
from tests.comm.planning import assert_planned
from tests.comm.test_counts import assert_the_next_ahead, check_order
from tests.contract.test_nothing_left import nothing_left
from tests.faults.test_checkpoint_files import make_late, refuse, save_both
from tests.memory.helpers import Books
from tests.memory.test_bytes import make
from tests.models import loss_of, tokens
from tests.parity.test_bitwise import check_schedules
from tests.parity.test_mxfp8 import check_on_and_off
from tests.parity.test_scaling import check_divisors
from tests.ranks import RanksFailed, on_ranks, run_ranks
from tests.unit import test_exchange

Patch = pytest.MonkeyPatch


def scaled_twice(patch: Patch) -> None:
    once: Any = Gradients._divisor.fget  # type: ignore[attr-defined]
    patch.setattr(Gradients, "_divisor", property(lambda self: 2 * (once(self) or 1.0)))


def sent_by_format(patch: Patch) -> None:
    """Gradients of weights in fp8 travel in a dtype of their own."""
    followed = Gradients.follow

    def follow(self: Gradients, main: Any, sharded: Any, leaves: Any, dtype: Any, *of: Any) -> None:
        wide = any(isinstance(leaf, CodedLeaf) for leaf in leaves)
        followed(self, main, sharded, leaves, torch.float64 if wide else dtype, *of)

    patch.setattr(Gradients, "follow", follow)


def left_behind(patch: Patch) -> None:
    """The gradient of each group's first parameter is packed and never published."""
    published = Gradients._publish

    def publish(self: Gradients, flow: Any, ready: Any, came: list[bool]) -> None:
        published(self, flow, ready, [False, *came[1:]])

    patch.setattr(Gradients, "_publish", publish)


def written_by_two(patch: Patch) -> None:
    """Memory from the trace pool is written while another reads it."""
    packed = Gradients._pack

    def pack(self: Gradients) -> None:
        packed(self)
        if self.pool is not None and self._flat is not None:
            self._flat[:1] += 2**-20

    patch.setattr(Gradients, "_pack", pack)


def not_ahead(patch: Patch) -> None:
    """No unit is gathered before it is needed."""
    patch.setattr(Model, "_prefetch", staticmethod(lambda *_: None))


def written_early(patch: Patch) -> None:
    """A load writes weights before the modules have taken their extra states."""
    offer = _Load._offer
    patch.setattr(_Load, "_offer", lambda self: (write(self.copies), offer(self)))


def failing(
    rank: int, world_size: int, plant: Callable[[Patch], None], check: Any, *of: Any
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return check(rank, world_size, *of)


@pytest.mark.parametrize(
    ("plant", "check", "of"),
    [
        (scaled_twice, check_divisors, (sw.zero(3), {1: None})),  # I4
        (sent_by_format, check_on_and_off, ("zero3", "adamw", "mxfp8")),  # I5
        (written_by_two, check_schedules, ("zero3",)),  # I8
        (left_behind, nothing_left, ("zero3", "none")),  # I10
    ],
    ids=["I4", "I5", "I8", "I10"],
)
def test_a_planted_mistake_is_seen(plant: Any, check: Any, of: tuple[Any, ...]) -> None:
    with pytest.raises(RanksFailed, match="AssertionError"):
        run_ranks(failing, 2, plant, check, *of)


def test_an_order_without_gathers_ahead_is_seen() -> None:
    """I2."""
    with pytest.raises(AssertionError):
        assert_the_next_ahead(run_ranks(failing, 2, not_ahead, check_order))


def test_a_load_that_writes_before_it_is_accepted_is_seen(tmp_path: Path) -> None:
    """I14."""
    run_ranks(save_both, 2, str(tmp_path / "saved"))
    make_late(tmp_path / "saved" / "adamw", tmp_path)
    of = str(tmp_path), "zero3", "adamw", True
    for found in run_ranks(failing, 2, written_early, refuse, *of):
        assert not all(unchanged for _, _, unchanged in found.values())


def test_replicas_that_do_not_share_the_work_are_seen(monkeypatch: Patch) -> None:
    """I12: one replica owns every matrix."""

    def first_alone(matrices: Sequence[Any], num_replicas: int) -> list[list[int]]:
        return [list(range(len(matrices))), *([] for _ in range(num_replicas - 1))]

    monkeypatch.setattr(ownership, "_assign_replicas", first_alone)
    with pytest.raises(AssertionError):
        test_exchange.test_replicas_share_the_work_and_hand_their_rows_on(8, 4)


@on_ranks(2)
def test_memory_that_something_still_refers_to_is_seen(rank: int, world_size: int) -> None:
    """I6."""
    books = Books()
    gc.disable()
    try:
        model = make("zero3", world_size)
        loss_of(model, tokens(0, 0, rank, world_size)).backward()
        kept = model._shardwise_unit.groups
        del model
        assert books() != {}
        del kept
        assert books() == {}
    finally:
        gc.enable()


def test_a_plan_that_skips_a_gather_is_seen(monkeypatch: Patch) -> None:
    """I9 and I13: a plan is a dry run of the engine. One that gathers less is found out."""
    gather, skipped = Group.gather, list[Group]()

    def sometimes(self: Group, flow: Any) -> None:
        if self.main.flat.is_meta and not skipped:
            skipped.append(self)
            return
        gather(self, flow)

    monkeypatch.setattr(Group, "gather", sometimes)
    with pytest.raises(AssertionError):
        assert_planned(2, "plain", "zero3", [("fp32", 1)])
    assert skipped
