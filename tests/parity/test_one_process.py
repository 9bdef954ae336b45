# SPDX-License-Identifier: Apache-2.0
"""Every strategy trains as one process does: losses and parameters to 1e-5."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from tests.models import STRATEGIES, make_model, mesh_of, ranks_for, shard_model
from tests.parity.helpers import (
    STEPS,
    assert_close_to_reference,
    every_two_axis_placements,
    full_parameters,
    make_sharded,
    reference,
    train,
)
from tests.ranks import on_ranks, run_ranks

# (microbatches, set_to_none, optimizer): each strategy meets each choice, and every pair of choices
# is in one of the rows.
FULL = [
    [(1, True, "adamw"), (3, False, "sgd")],
    [(1, False, "adamw"), (3, True, "sgd")],
    [(1, True, "sgd"), (3, False, "adamw")],
]
FEW = [(3, False, "adamw"), (3, True, "sgd")]


def check_recipes(
    rank: int,
    world_size: int,
    placements: sw.Placements,
    recipes: list[tuple[int, bool, str]],
) -> int:
    for microbatches, set_to_none, optimizer in recipes:
        model = make_sharded(placements, world_size)
        losses = train(
            model,
            rank,
            world_size,
            microbatches=microbatches,
            set_to_none=set_to_none,
            optimizer=optimizer,
        )
        assert_close_to_reference(model, losses, microbatches, optimizer)
    return len(recipes)


# Of two axes (1, 1), (2, 1), (1, 3), (2, 2). With one rank nothing is sent, whatever the strategy;
# on three and four ranks all stages have the bits of zero3 (test_bitwise).
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [(strategy, ranks_for(strategy)) for strategy in STRATEGIES]
    + [("zero3", 3), ("zero3", 4), ("hfsdp", 2), ("hfsdp", 3)]
    + [("zero1", 1), ("zero3", 1), ("hfsdp", 1)],
)
def test_strategies_train_as_one_process(strategy: str, world_size: int) -> None:
    row = [*STRATEGIES].index(strategy) % len(FULL)
    recipes = FULL[row] if world_size == ranks_for(strategy) else FEW
    done = run_ranks(check_recipes, world_size, STRATEGIES[strategy], recipes)
    assert done == [len(recipes)] * world_size


@pytest.mark.parametrize("number", range(12))
def test_every_other_two_axis_placement_trains_as_one_process(number: int) -> None:
    """All that are legal; two of the 14 have names and stand above. One microbatch is the last of
    three."""
    placements = [p for p in every_two_axis_placements() if p not in STRATEGIES.values()]
    assert len(placements) == 12
    assert run_ranks(check_recipes, 4, placements[number], [(3, False, "adamw")]) == [1] * 4


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 2, 2)])
@on_ranks(4)
def test_three_axes_train_as_one_process(
    rank: int, world_size: int, sizes: tuple[int, ...]
) -> None:
    shard, whole, partial = sw.Shard(), sw.Replicate(), sw.Partial()
    placements = sw.Placements(
        compute=[whole, whole, shard], grad=[partial, partial, shard], main=[whole, shard, shard]
    )
    for microbatches in (1, 3):
        model = shard_model(make_model(depth=2), placements, mesh_of(*sizes))
        losses = train(model, rank, world_size, microbatches=microbatches)
        assert_close_to_reference(model, losses, microbatches, "adamw")


@on_ranks(2)
def test_a_wrong_batch_or_a_lost_step_is_noticed(rank: int, world_size: int) -> None:
    """Negative control: one rank that trains on other data, and one lost step, are both seen."""
    model = make_sharded(sw.zero(3), world_size)
    losses = train(model, 1, world_size)  # rank 0's batch is lost
    with pytest.raises(AssertionError):
        assert_close_to_reference(model, losses, 1, "adamw")
    model = make_sharded(sw.zero(3), world_size)
    train(model, rank, world_size, steps=STEPS - 1)
    expected = reference(1, "adamw")[0]
    found = full_parameters(model)
    assert all((found[name] - expected[name]).abs().max() > 1e-4 for name in expected)


def check_unevenness(rank: int, world_size: int) -> list[int]:
    model = make_sharded(sw.zero(3), world_size)
    return [parameter.to_local().numel() for parameter in model.parameters()]


def test_the_model_of_these_tests_is_cut_unevenly() -> None:
    """Else the tests above would prove nothing about rows that do not divide."""
    held = torch.tensor(run_ranks(check_unevenness, 4))
    assert (held == 0).any(), "a rank that owns nothing of a parameter"
    assert (held.amax(0) != held.amin(0)).any(), "pieces of different lengths"
    whole = torch.tensor([parameter.numel() for parameter in make_model(depth=2).parameters()])
    assert torch.equal(held.sum(0), whole)
