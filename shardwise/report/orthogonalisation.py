# SPDX-License-Identifier: Apache-2.0
"""A matrix optimizer's plan over all ranks: work, balance, momenta, who sends most.

A matrix has one owner, so with fewer matrices than ranks some have nothing to do, and the step
takes as long as the busiest: that is the balance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy
from numpy.typing import NDArray

from shardwise.optim.matrix_group import MatrixGroup
from shardwise.optim.muon import MuonSettings
from shardwise.optim.ownership import Ownership
from shardwise.optim.presets import cost
from shardwise.optim.storage import Sharding
from shardwise.placements import ranks_by

Figures = Mapping[tuple[int, int], int]  # by (replica, rank on the shard axis)


@dataclass(frozen=True, kw_only=True)
class Orthogonalisation:
    """The work of one optimizer step, over all ranks."""

    num_matrices: int
    num_ranks: int
    total: int  # FLOPs of all ranks together
    busiest: int
    idlest: int
    balance: float  # 1.0: every rank computes as long as the busiest one
    num_whole: int  # matrices that lie whole on one rank
    whole_price: str = ""  # what it would cost to have all of them whole, where that is a choice


def orthogonalisation(groups: Sequence[MatrixGroup], num_ranks: int) -> Orthogonalisation:
    flops = summed([by_rank(group.sharding, _flops(group), num_ranks) for group in groups])
    loads = summed([by_rank(group.sharding, ownership(group).loads, num_ranks) for group in groups])
    busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
    return Orthogonalisation(
        num_matrices=_count(groups, num_ranks, whole=False),
        num_whole=_count(groups, num_ranks, whole=True),
        num_ranks=num_ranks,
        total=sum(flops),
        busiest=flops[busiest],
        idlest=flops[idlest],
        balance=sum(loads) / (loads[busiest] * num_ranks) if loads[busiest] else 1.0,
    )


def _count(groups: Sequence[MatrixGroup], num_ranks: int, *, whole: bool) -> int:
    """All matrices, or those that lie whole on one rank."""
    return sum(
        num_ranks // num_holders(group.sharding) * len(matrix.shapes)
        for group in groups
        for matrix in ownership(group).matrices
        if not whole or len(matrix.pieces) == 1
    )


def ownership(group: MatrixGroup) -> Ownership:
    return group.exchange.ownership


def num_holders(sharding: Sharding) -> int:
    """How many ranks the matrices are spread over: fewer than all where experts are spread too."""
    return math.prod(sharding.sizes)


def by_rank(sharding: Sharding, figures: Figures, num_ranks: int) -> list[int]:
    """The figure of every rank of the world; neighbours that hold different experts have the
    same."""
    places = ranks_by(sharding.sizes, sharding.sharded)
    own = [figures.get(place, 0) for place in places]
    return [figure for figure in own for _ in range(num_ranks // len(own))]


def summed(lists: Iterable[Sequence[int]]) -> list[int]:
    """The sums, by rank, of figures by rank."""
    return [sum(figures) for figures in zip(*lists, strict=True)]


def _flops(group: MatrixGroup) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for matrix, owner in zip(ownership(group).matrices, ownership(group).owners, strict=True):
        found[owner] += _flops_of(matrix.shapes)
    return found


@cache
def _flops_of(shapes: tuple[tuple[int, int], ...]) -> int:
    """The FLOPs of matrices of these (rows, columns)."""
    settings = MuonSettings()
    return sum(cost(rows, cols, settings.polynomial, settings.form) for rows, cols in shapes)


def momenta(group: MatrixGroup, tensors: int) -> Counter[tuple[int, int]]:
    """Bytes of momenta on each (replica, rank), of which ``tensors`` belong to a matrix."""
    widths = [tensors * one.parameter.itemsize for one in group.members]
    held: Counter[tuple[int, int]] = Counter()
    for matrix, (replica, _) in zip(
        ownership(group).matrices, ownership(group).owners, strict=True
    ):
        for rank, lo, hi in matrix.pieces:
            held[replica, rank] += (hi - lo) * widths[matrix.parameter]
    return held


def heaviest(groups: Sequence[MatrixGroup], num_ranks: int) -> int:
    """The rank that sends most between shards and replicas. It receives as much: what a rank
    sends on one leg of an exchange it receives on the other."""
    sent = summed([by_rank(group.sharding, _sent(ownership(group)), num_ranks) for group in groups])
    return sent.index(max(sent))


def _sent(plan: Ownership) -> Figures:
    """Elements that each (replica, rank) sends there and back."""
    cuts: dict[int, NDArray[numpy.int64]] = {}  # what each rank stores of matrices cut alike
    computed = numpy.zeros((plan.num_replicas, plan.num_shards), numpy.int64)
    sent = numpy.zeros_like(computed)
    for matrix, (replica, owner) in zip(plan.matrices, plan.owners, strict=True):
        cut = cuts.get(id(matrix.pieces))
        if cut is None:
            holders, low, high = numpy.array(matrix.pieces).reshape(-1, 3).T
            cut = numpy.bincount(holders, high - low, plan.num_shards).astype(numpy.int64)
            cuts[id(matrix.pieces)] = cut
        computed[replica] += cut
        sent[replica, owner] += matrix.numel - 2 * cut[owner]  # what it sends, less what it keeps
    sent += computed
    if plan.num_replicas > 1:  # gradients to other replicas, updates to all of them
        sent += computed.sum(0) - computed + (plan.num_replicas - 1) * computed
    rows = enumerate(sent.tolist())
    return {(replica, rank): numel for replica, row in rows for rank, numel in enumerate(row)}
