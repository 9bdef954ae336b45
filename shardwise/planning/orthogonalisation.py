# SPDX-License-Identifier: Apache-2.0
"""A matrix optimizer's work over all ranks: FLOPs, balance, momenta, bytes sent.

A matrix has one owner, so with fewer matrices than ranks some ranks have nothing to do. The step
takes as long as on the busiest rank. The balance is the mean load relative to the largest load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy
from numpy.typing import NDArray

from shardwise.core.placements import ranks_by
from shardwise.kernels.polynomials import cost
from shardwise.optim.matrix_group import MatrixGroup
from shardwise.optim.muon import MuonSettings
from shardwise.optim.ownership import Ownership
from shardwise.optim.storage import Sharding

Figures = Mapping[tuple[int, int], int]  # by (replica, rank on the shard axis)


@dataclass(frozen=True, kw_only=True)
class Orthogonalisation:
    """The work of one optimizer step, over all ranks."""

    num_matrices: int
    num_ranks: int
    total: int  # FLOPs of all ranks together
    busiest: int
    idlest: int
    balance: float  # 1.0: all ranks compute equally long
    num_whole: int  # matrices that lie whole on one rank


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
    """The number of all matrices, or of the matrices that lie whole on one rank."""
    return sum(
        num_ranks // num_holders(group.sharding) * len(matrix.shapes)
        for group in groups
        for matrix in ownership(group).matrices
        if not whole or len(matrix.pieces) == 1
    )


def ownership(group: MatrixGroup) -> Ownership:
    return group.exchange.ownership


def num_holders(sharding: Sharding) -> int:
    """The number of ranks that share the matrices; for spread experts, a part of all ranks."""
    return math.prod(sharding.sizes)


def by_rank(sharding: Sharding, figures: Figures, num_ranks: int) -> list[int]:
    """The figure of every rank of the world; neighbours with different experts have the same."""
    places = ranks_by(sharding.sizes, sharding.sharded)
    return [figures.get(place, 0) for place in places for _ in range(num_ranks // len(places))]


def summed(lists: Iterable[Sequence[int]]) -> list[int]:
    """The sum of several lists of figures by rank."""
    return [sum(figures) for figures in zip(*lists, strict=True)]


def _flops(group: MatrixGroup) -> Counter[tuple[int, int]]:
    flops: Counter[tuple[int, int]] = Counter()
    for matrix, owner in zip(ownership(group).matrices, ownership(group).owners, strict=True):
        flops[owner] += _flops_of(matrix.shapes)
    return flops


@cache
def _flops_of(shapes: tuple[tuple[int, int], ...]) -> int:
    """The FLOPs for matrices with these (rows, columns)."""
    settings = MuonSettings()
    return sum(cost(rows, cols, settings.polynomial) for rows, cols in shapes)


def momenta(group: MatrixGroup, tensors: int) -> Counter[tuple[int, int]]:
    """Bytes of momenta on each (replica, rank), with so many tensors for a matrix."""
    widths = [tensors * member.parameter.itemsize for member in group.members]
    nbytes: Counter[tuple[int, int]] = Counter()
    plan = ownership(group)
    for matrix, (replica, _) in zip(plan.matrices, plan.owners, strict=True):
        for rank, lo, hi in matrix.pieces:
            nbytes[replica, rank] += (hi - lo) * widths[matrix.parameter]
    return nbytes


def heaviest(groups: Sequence[MatrixGroup], num_ranks: int) -> int:
    """The rank that sends most between shards and replicas. It receives as much, because the second
    half of an exchange reverses the first half."""
    sent = summed([by_rank(group.sharding, _sent(ownership(group)), num_ranks) for group in groups])
    return sent.index(max(sent))


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
