# SPDX-License-Identifier: Apache-2.0
"""Divisions between replicas: each element goes to one, and even parts are even."""

from __future__ import annotations

import random

import pytest

from shardwise.core.division import (
    CHUNK,
    ByMatrix,
    Evenly,
    divide_evenly,
    equal_parts,
    replica_shares,
)
from shardwise.core.placements import REPLICATE, SHARD


def test_what_a_reduction_over_replicas_brings_where() -> None:
    """A mesh of 2 x 2 replicas and one shard: A whole to one of four, B in two runs, C to all."""
    main, sizes = (REPLICATE, REPLICATE, SHARD), (2, 2, 1)
    pieces = [(0, 6, 0), (2, 8, 6), (0, 3, 12), (0, 0, 0)]
    # Replicas as shards count: (outer, inner) = (0, 0), (1, 0), (0, 1), (1, 1).
    divisions = {
        0: ByMatrix(((0, 0), (0, 6), (0, 0), (0, 0))),
        1: ByMatrix(((0, 5), (0, 0), (0, 0), (5, 9))),
        3: ByMatrix(()),
    }
    found = {
        (axis, outer, inner): replica_shares(
            pieces, divisions, main, sizes, (outer, inner, 0), axis
        )
        for axis in (0, 1)
        for outer in (0, 1)
        for inner in (0, 1)
    }
    assert all(shares.shared == [(12, 15)] for shares in found.values())
    for outer in (0, 1):
        for inner in (0, 1):  # the inner axis comes first: nothing has been reduced before it
            shares = found[1, outer, inner]
            assert (shares.divided, shares.sizes) == ([(0, 12)], [9, 3])
            assert shares.mine == [[(0, 9)], [(9, 12)]][inner]
    for outer in (0, 1):
        mine = [[(6, 9)], [(0, 6)]][outer]
        assert found[0, outer, 0] == ([(12, 15)], [(6, 9), (0, 6)], [3, 6], mine, False)
        assert found[0, outer, 1].sizes == [0, 3]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8, 100, 4096])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_even_parts_hold_each_element_once_and_none_holds_more(
    num_replicas: int, num_shards: int
) -> None:
    random.seed(num_replicas)
    pieces, sizes = [], [random.randint(1, 3000) for _ in range(6)]
    for size in sizes:
        bounds = [0, *sorted(random.randint(0, size) for _ in range(num_shards - 1)), size]
        pieces.append([(s, bounds[s], bounds[s + 1]) for s in range(num_shards)])
    found = divide_evenly(pieces, num_shards, num_replicas)
    held = [[0] * num_replicas for _ in range(num_shards)]
    for division, stored, size in zip(found, pieces, sizes, strict=True):
        seen = [0] * size
        for shard, low, high in stored:
            listed = dict(division.parts(shard, low, high))
            for replica in range(num_replicas):
                begin, end = division.part(replica, shard, low, high)
                assert listed.get(replica, (0, 0)) == (begin, end)
                held[shard][replica] += end - begin
                for element in range(begin, end):
                    seen[element] += 1
        assert seen == [1] * size
    for shard, parts in enumerate(held):
        total = sum(high - low for one in pieces for s, low, high in one if s == shard)
        assert sum(parts) == total
        assert max(parts) <= total / num_replicas + CHUNK
        # In order, and short only at the end: what a reduce-scatter of a padded buffer brings.
        assert equal_parts(parts)


def test_a_buffer_in_even_parts_is_reduced_from_few_spans() -> None:
    """However many replicas there are: neighbours are one span."""
    found = divide_evenly([[(0, 0, 4000)], [(0, 0, 6000)]], 1, 512)
    pieces = [(0, 4000, 0), (0, 100, 4000), (0, 6000, 4100)]
    shares = replica_shares(pieces, {0: found[0], 2: found[1]}, (REPLICATE,), (512,), (200,), 0)
    assert shares.shared == [(4000, 4100)]
    assert shares.divided == [(0, 4000), (4100, 10100)]
    assert shares.mine == [(6500, 6532)] and shares.even
    assert found[1] == Evenly(512, (32,), (4000,))
