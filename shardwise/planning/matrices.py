# SPDX-License-Identifier: Apache-2.0
"""A matrix optimizer's work over all ranks: its balance, and the rank that sends most.

A matrix has one owner, so with fewer matrices than ranks some ranks have nothing to do. The step
takes as long as on the busiest rank. The balance is the mean load relative to the largest load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from shardwise.core.placements import ranks_by
from shardwise.optim.matrix_group import MatrixGroup
from shardwise.optim.ownership import Ownership
from shardwise.optim.storage import Sharding


@dataclass(frozen=True, kw_only=True)
class MatrixWork:
    """The work of one optimizer step, over all ranks."""

    num_matrices: int
    num_whole: int  # matrices that lie whole on one rank
    balance: float  # 1.0: all ranks compute equally long

    def __str__(self) -> str:
        return (
            f"Matrix optimizer: {self.num_matrices:,} matrices, {self.num_whole:,} of them whole "
            f"on one rank; mean load of a rank {100 * self.balance:.1f} % of the busiest's"
        )


def work_of(groups: Sequence[MatrixGroup], num_ranks: int) -> MatrixWork:
    loads = _by_rank(groups, num_ranks, lambda plan: plan.loads)
    counts = [0, 0]
    for group in groups:
        # With spread experts, this rank's matrices are a part of all.
        copies = num_ranks // math.prod(group.sharding.sizes)
        for matrix in group.exchange.ownership.matrices:
            counts[0] += copies * len(matrix.shapes)
            counts[1] += copies * len(matrix.shapes) * (len(matrix.pieces) == 1)
    balance = sum(loads) / (max(loads) * num_ranks) if max(loads) else 1.0
    return MatrixWork(num_matrices=counts[0], num_whole=counts[1], balance=balance)


def heaviest(groups: Sequence[MatrixGroup], num_ranks: int) -> int:
    """The rank that sends most between shards and replicas. It receives as much, because the second
    half of an exchange reverses the first half."""
    sent = _by_rank(groups, num_ranks, _sent)
    return sent.index(max(sent))


Figures = Mapping[tuple[int, int], int]  # by (replica, rank on the shard axis)


def _by_rank(
    groups: Sequence[MatrixGroup], num_ranks: int, figures: Callable[[Ownership], Figures]
) -> list[int]:
    """The figure of every rank of the world, summed over the groups."""
    found = [
        by_rank(group.sharding, figures(group.exchange.ownership), num_ranks) for group in groups
    ]
    return [sum(of_a_rank) for of_a_rank in zip(*found, strict=True)]


def by_rank(sharding: Sharding, figures: Figures, num_ranks: int) -> list[int]:
    """The figure of every rank of the world; neighbours with different experts have the same."""
    places = ranks_by(sharding.sizes, sharding.sharded)
    return [figures.get(place, 0) for place in places for _ in range(num_ranks // len(places))]


def _sent(plan: Ownership) -> Figures:
    """Elements that each (replica, rank) sends, to owners and back."""
    cuts: dict[int, NDArray[numpy.int64]] = {}  # elements on each rank, for matrices cut alike
    computed = numpy.zeros((plan.num_replicas, plan.num_shards), numpy.int64)
    sent = numpy.zeros_like(computed)
    for matrix, (replica, owner) in zip(plan.matrices, plan.owners, strict=True):
        cut = cuts.get(id(matrix.pieces))
        if cut is None:
            holders, low, high = numpy.array(matrix.pieces).reshape(-1, 3).T
            cut = numpy.bincount(holders, high - low, plan.num_shards).astype(numpy.int64)
            cuts[id(matrix.pieces)] = cut
        computed[replica] += cut
        sent[replica, owner] += matrix.numel - 2 * cut[owner]  # a rank keeps its own elements
    sent += computed
    if plan.num_replicas > 1:  # gradients to other replicas, updates to all other replicas
        sent += computed.sum(0) - computed + (plan.num_replicas - 1) * computed
    rows = enumerate(sent.tolist())
    return {(replica, rank): numel for replica, row in rows for rank, numel in enumerate(row)}
