# SPDX-License-Identifier: Apache-2.0
"""What the plan of a matrix optimizer says about all ranks: work, balance, momenta, who sends most.

A matrix has one owner, so with fewer matrices than ranks some have nothing to do, and the step
takes as long as the busiest: that is the balance. The collectives are those that one rank issued.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardwise.comm import Call
from shardwise.optim.matrices import Fleet
from shardwise.optim.muon import muon
from shardwise.optim.newton_schulz import cost
from shardwise.optim.owners import Plan as Ownership
from shardwise.optim.storage import Home

Figures = Mapping[tuple[int, int], int]  # by (replica, rank on the shard axis)


@dataclass(frozen=True, kw_only=True)
class Orthogonalisation:
    """The work of one optimizer step, over all ranks, and the collectives of one of them."""

    num_matrices: int
    num_ranks: int
    total: int  # FLOPs of all ranks together
    busiest: int
    idlest: int
    balance: float  # 1.0: every rank computes as long as the busiest one
    calls: Counter[Call] = field(repr=False, default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        names = ("num_matrices", "num_ranks", "total", "busiest", "idlest", "balance")
        return {name: getattr(self, name) for name in names}


def orthogonalisation(
    fleets: Sequence[Fleet], calls: Counter[Call], num_ranks: int
) -> Orthogonalisation:
    flops = summed([by_rank(fleet.home, _flops(fleet), num_ranks) for fleet in fleets])
    loads = summed([by_rank(fleet.home, ownership(fleet).loads, num_ranks) for fleet in fleets])
    busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
    return Orthogonalisation(
        num_matrices=sum(
            num_ranks // num_holders(fleet.home) * len(cargo.key) // 2
            for fleet in fleets
            for cargo in ownership(fleet).cargo
        ),
        num_ranks=num_ranks,
        total=sum(flops),
        busiest=flops[busiest],
        idlest=flops[idlest],
        balance=sum(loads) / (loads[busiest] * num_ranks) if loads[busiest] else 1.0,
        calls=calls,
    )


def ownership(fleet: Fleet) -> Ownership:
    return fleet.exchange.plan


def num_holders(home: Home) -> int:
    """How many ranks the matrices are spread over: fewer than all where experts are spread too."""
    return math.prod(home.sizes)


def by_rank(home: Home, figures: Figures, num_ranks: int) -> list[int]:
    """The figure of every rank of the world; neighbours that hold different experts have the
    same."""
    own = []
    for rank in range(num_holders(home)):
        place = {True: 0, False: 0}  # on the joint axes of shards and of replicas
        rest = num_holders(home)
        for size, sharded in zip(home.sizes, home.sharded, strict=True):
            rest //= size
            place[sharded] = place[sharded] * size + rank // rest % size
        own.append(figures.get((place[False], place[True]), 0))
    return [figure for figure in own for _ in range(num_ranks // len(own))]


def summed(lists: Iterable[Sequence[int]]) -> list[int]:
    """The sums, by rank, of figures by rank."""
    return [sum(figures) for figures in zip(*lists, strict=True)]


def _flops(fleet: Fleet) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for cargo, owner in zip(ownership(fleet).cargo, ownership(fleet).owners, strict=True):
        found[owner] += _flops_of(cargo.key)
    return found


@cache
def _flops_of(sides: tuple[int, ...]) -> int:
    """The FLOPs of matrices of these (rows, columns, rows, columns, ...)."""
    settings = muon()
    pairs = zip(sides[::2], sides[1::2], strict=True)
    return sum(cost(rows, cols, settings.polynomials, settings.form) for rows, cols in pairs)


def momenta(fleet: Fleet, tensors: int) -> Counter[tuple[int, int]]:
    """Bytes of momenta on each (replica, rank), of which ``tensors`` belong to a matrix."""
    widths = [tensors * matrix.parameter.itemsize for matrix in fleet.matrices]
    held: Counter[tuple[int, int]] = Counter()
    for cargo, (replica, _) in zip(ownership(fleet).cargo, ownership(fleet).owners, strict=True):
        for rank, lo, hi in cargo.pieces:
            held[replica, rank] += (hi - lo) * widths[cargo.parameter]
    return held


def heaviest(fleets: Sequence[Fleet], num_ranks: int) -> int:
    """The rank that sends most between shards."""
    sent = summed([by_rank(fleet.home, _sent(ownership(fleet)), num_ranks) for fleet in fleets])
    return sent.index(max(sent))


def _sent(plan: Ownership) -> Counter[tuple[int, int]]:
    """Elements that each (replica, rank) sends there and back."""
    cuts: dict[int, Counter[int]] = {}  # what each rank stores of parcels that are cut alike
    sent: Counter[tuple[int, int]] = Counter()
    alike: Counter[tuple[int, int]] = Counter()
    for parcel, (replica, owner) in zip(plan.cargo, plan.owners, strict=True):
        cut = cuts.get(id(parcel.pieces))
        if cut is None:
            cut = cuts[id(parcel.pieces)] = Counter()
            for holder, low, high in parcel.pieces:
                cut[holder] += high - low
        alike[replica, id(parcel.pieces)] += 1
        sent[replica, owner] += parcel.numel - 2 * cut[owner]  # what it sends, less what it keeps
    for (replica, key), count in alike.items():
        for holder, numel in cuts[key].items():
            sent[replica, holder] += count * numel
    return sent
