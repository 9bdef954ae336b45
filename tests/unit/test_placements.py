# SPDX-License-Identifier: Apache-2.0
"""Which placement lists can work, and which shards a rank holds under them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch.distributed.tensor as torch_placements

from shardwise.core.placements import (
    PARTIAL,
    REPLICATE,
    SHARD,
    STRATEGIES,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    as_placement,
    hfsdp,
    hsdp,
    shard_range,
    steps,
    zero,
)

EVERY = (REPLICATE, PARTIAL, SHARD)


def is_legal(compute: Placement, grad: Placement, main: Placement) -> bool:
    """One axis by itself, written as a table: what is kept sharded must be sharded in main."""
    return (str(compute), str(grad), str(main)) in {
        ("R", "Partial", "R"),
        ("R", "Partial", "S"),
        ("R", "S", "S"),
        ("S", "Partial", "S"),
        ("S", "S", "S"),
    }


def test_one_axis_lists_are_legal_exactly_as_the_table_says() -> None:
    legal = 0
    for compute, grad, main in itertools.product(EVERY, repeat=3):
        if is_legal(compute, grad, main):
            legal += 1
            assert Placements(compute=[compute], grad=[grad], main=[main]).num_axes == 1
        else:
            with pytest.raises(ValueError, match="cannot work"):
                Placements(compute=[compute], grad=[grad], main=[main])
    assert legal == 5


def test_two_axis_lists_are_legal_where_each_axis_is_and_shards_are_a_suffix() -> None:
    legal = 0
    pairs = list(itertools.product(EVERY, repeat=2))
    for compute, grad, main in itertools.product(pairs, repeat=3):
        suffix = all(
            values != (SHARD, values[1]) or values[1] == SHARD for values in (compute, grad, main)
        )
        if suffix and all(is_legal(*axis) for axis in zip(compute, grad, main, strict=True)):
            legal += 1
            assert Placements(compute=compute, grad=grad, main=main).num_axes == 2
        else:
            with pytest.raises(ValueError, match="cannot work"):
                Placements(compute=compute, grad=grad, main=main)
    assert legal == 14


def test_torch_placements_are_understood() -> None:
    assert as_placement(torch_placements.Replicate()) == Replicate()
    assert as_placement(torch_placements.Partial()) == Partial()
    assert as_placement(torch_placements.Shard(0)) == Shard()
    with pytest.raises(ValueError, match="only Shard\\(0\\) exists"):
        as_placement(torch_placements.Shard(1))
    with pytest.raises(ValueError, match="'S' is no placement"):
        as_placement("S")


def test_placements_are_values() -> None:
    assert hash(zero(3)) == hash(zero(3))
    assert len({zero(0), zero(1), zero(2), zero(3), hsdp(), hfsdp(), zero(0)}) == 6
    assert str(hfsdp()) == "Placements(compute=[R, S], grad=[Partial, S], main=[S, S])"


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 2), (2, 3), (3, 1), (2, 2, 3)])
@pytest.mark.parametrize("finer", [1, 2])
def test_shards_of_all_ranks_cover_the_buffer_once_and_a_gather_joins_neighbours(
    sizes: tuple[int, ...], finer: int
) -> None:
    num_shards = math.prod(sizes) * finer
    ranks = list(itertools.product(*(range(size) for size in sizes)))
    for sharded in range(len(sizes) + 1):
        placements = [REPLICATE] * (len(sizes) - sharded) + [SHARD] * sharded
        held = {rank: shard_range(placements, sizes, rank, num_shards) for rank in ranks}
        copies = math.prod(sizes[: len(sizes) - sharded])
        covered = sorted(
            shard for first, count in held.values() for shard in range(first, first + count)
        )
        assert covered == sorted(list(range(num_shards)) * copies)
        if not sharded:
            continue
        # Undo the outermost sharded axis: ranks in its order must hold neighbours in that order.
        axis = len(sizes) - sharded
        wider = placements.copy()
        wider[axis] = REPLICATE
        for rank in ranks:
            peers = [(*rank[:axis], peer, *rank[axis + 1 :]) for peer in range(sizes[axis])]
            joined = [shard for peer in peers for shard in range(held[peer][0], sum(held[peer]))]
            first, count = shard_range(wider, sizes, rank, num_shards)
            assert joined == list(range(first, first + count))


# ------------------------------------------------------------------------------ steps


def suffix_placements(num_axes: int) -> list[tuple[Placement, ...]]:
    """Every list whose sharded axes are the inner ones."""
    return [
        placements
        for placements in itertools.product((REPLICATE, PARTIAL, SHARD), repeat=num_axes)
        if [value == SHARD for value in placements]
        == sorted(value == SHARD for value in placements)
    ]


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_steps_lead_there_and_keep_the_shards_a_suffix(num_axes: int) -> None:
    allowed = {(SHARD, REPLICATE), (PARTIAL, SHARD), (PARTIAL, REPLICATE)}
    walked = 0
    for here, there in itertools.product(suffix_placements(num_axes), repeat=2):
        pairs = {pair for pair in zip(here, there, strict=True) if pair[0] != pair[1]}
        if not pairs <= allowed:
            with pytest.raises(AssertionError):
                steps(here, there)
            continue
        current = list(here)
        for axis, before, after in steps(here, there):
            assert current[axis] == before != after
            current[axis] = after
            sharded = [value == SHARD for value in current]
            assert sharded == sorted(sharded), (here, there, current)
            walked += 1
        assert tuple(current) == there
    assert walked >= 3 * num_axes


def test_the_steps_of_each_strategy() -> None:
    """(axis, where to), for a gather of main weights and for a whole reduction of gradients."""
    found = {}
    for name, placements in STRATEGIES.items():
        everywhere = (REPLICATE,) * len(placements.main)
        partial = (PARTIAL,) * len(placements.main)
        gathers = [(axis, str(to)) for axis, _, to in steps(placements.main, everywhere)]
        inside = [(axis, str(to)) for axis, _, to in steps(partial, placements.grad)]
        outside = [(axis, str(to)) for axis, _, to in steps(placements.grad, placements.main)]
        found[name] = (gathers, inside, outside)
    assert found == {
        "zero0": ([], [], [(0, "R")]),
        "zero1": ([(0, "R")], [], [(0, "S")]),
        "zero2": ([(0, "R")], [(0, "S")], []),
        "zero3": ([(0, "R")], [(0, "S")], []),
        "hsdp": ([(1, "R")], [(1, "S")], [(0, "R")]),
        "hfsdp": ([(0, "R"), (1, "R")], [(1, "S")], [(0, "S")]),
    }
