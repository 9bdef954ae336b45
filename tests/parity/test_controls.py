# SPDX-License-Identifier: Apache-2.0
"""Negative controls of invariants whose tests have none of their own: each plants one mistake in
the engine and sees the test of the invariant fail. docs/promises.md lists them all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.loading import _Load, write
from shardwise.optim import ownership
from shardwise.shard.group import Group
from shardwise.shard.model import Model
from tests.comm.planning import assert_planned
from tests.comm.test_counts import assert_the_next_ahead, check_order
from tests.contract.test_nothing_left import nothing_left
from tests.faults.test_checkpoint_files import make_late, refuse, save_both
from tests.memory.helpers import Books
from tests.memory.test_bytes import make
from tests.models import loss_of, tokens
from tests.parity.programs import CONTEXTS
from tests.ranks import RanksFailed, on_ranks, run_ranks
from tests.unit import test_exchange

Patch = pytest.MonkeyPatch


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


def without_a_gradient(rank: int, world_size: int) -> None:
    with CONTEXTS["left behind"]():
        nothing_left(rank, world_size, "zero3", "none")


def test_a_gradient_left_behind_is_seen() -> None:
    """I10."""
    with pytest.raises(RanksFailed, match="AssertionError"):
        run_ranks(without_a_gradient, 2)


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
        if self.main.flat.is_meta and (not skipped or self is skipped[0]):
            skipped.append(self)
            return
        gather(self, flow)

    monkeypatch.setattr(Group, "gather", sometimes)
    with pytest.raises(AssertionError):
        assert_planned(2, "plain", "zero3", [("fp32", 1, "adamw")])
    assert skipped
