# SPDX-License-Identifier: Apache-2.0
"""What a matrix optimizer adds to a step: Newton-Schulz on the owners, and pieces on their way.

    stored   rank 0 | A 0-3 | B 0-1 |    rank 1 | B 2-7 |       owners   A: 0    B: 1
    there    B 0-1 from 0 to 1, back again, and to the other replicas where there are any

Routes, owners, rounds and costs are those of ``shardwise.optim``: the same functions, given layouts
instead of tensors. A matrix has one owner, so with fewer matrices than ranks some have nothing to
do, and the step takes as long as the busiest: that is the balance.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from shardwise.comm import Call
from shardwise.optim.muon import muon
from shardwise.optim.ownership import Ownership, assign_owners, update_order
from shardwise.optim.presets import cost, price
from shardwise.optim.routing import Routed
from shardwise.optim.split import Matrix, matrices_of, stored_matrices
from shardwise.placements import REPLICATE, SHARD, Placement, shard_range
from shardwise.report.footprint import Mesh
from shardwise.report.units import PlannedGroup

ELEMENT = 4  # bytes of an element on the wire, which carries fp32
Place = tuple[PlannedGroup, int]  # a group and an index in it


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


@dataclass(frozen=True, eq=False)
class Fleet:
    """Matrices that are cut over the same ranks, and who computes which."""

    routes: list[Routed]
    mesh: Mesh  # ranks that hold the same experts, where they are experts
    ep: int  # how many such meshes there are, side by side
    placements: Sequence[Placement]
    plan: Ownership

    def by_rank(self, figures: Mapping[tuple[int, int], int]) -> list[int]:
        """What each rank of the whole world has of figures by (replica, rank)."""
        own = [
            figures.get(self.mesh.joint(self.placements, rank), 0)
            for rank in range(self.mesh.num_ranks)
        ]
        return [figure for figure in own for _ in range(self.ep)]

    @property
    def flops(self) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        for cargo, owner in zip(self.plan.matrices, self.plan.owners, strict=True):
            found[owner] += _flops(cargo.shapes)
        return found


def summed(lists: Iterable[Sequence[int]]) -> list[int]:
    """By rank, of figures by rank."""
    return [sum(figures) for figures in zip(*lists, strict=True)]


def orthogonalisation(fleets: Sequence[Fleet], rank: int) -> Orthogonalisation:
    """``rank``: whose collectives are told."""
    flops = summed(fleet.by_rank(fleet.flops) for fleet in fleets)
    loads = summed(fleet.by_rank(fleet.plan.loads) for fleet in fleets)
    busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
    return Orthogonalisation(
        num_matrices=sum(f.ep * len(matrix.shapes) for f in fleets for matrix in f.plan.matrices),
        num_ranks=len(loads),
        total=sum(flops),
        busiest=flops[busiest],
        idlest=flops[idlest],
        balance=sum(loads) / (loads[busiest] * len(loads)) if loads[busiest] else 1.0,
        calls=Counter(
            call
            for fleet in fleets
            for call in exchange_calls(
                fleet.plan,
                fleet.mesh,
                fleet.placements,
                *fleet.mesh.joint(fleet.placements, rank // fleet.ep),
            )
        ),
    )


@cache
def _flops(shapes: tuple[tuple[int, int], ...]) -> int:
    settings = muon()
    return sum(cost(rows, cols, settings.polynomial, settings.form) for rows, cols in shapes)


def taken(routes: Sequence[Routed]) -> list[Routed]:
    """What the matrix optimizer takes, in its order."""
    return [one for one in routes if one.route.kind == "matrix" and one.parameter.requires_grad]


def fleets_of(
    routes: Sequence[Routed],
    places: Mapping[int, Place],
    ep_of: Mapping[int, int],
    mesh: Mesh,
    placements: Sequence[Placement],
    *,
    measured: bool = False,
    buffers: Mapping[int, Hashable] | None = None,
) -> list[Fleet]:
    """As ``optim/matrices.py`` makes them; ``ep_of`` is by id of the parameter."""
    found: dict[int, list[Routed]] = {}
    for one in taken(routes):
        found.setdefault(ep_of[id(one.parameter)], []).append(one)
    fleets = []
    for ep, members in found.items():
        ranks = mesh.without(ep)
        owned = owners_of(members, places, ranks, placements, measured=measured, buffers=buffers)
        fleets.append(Fleet(members, ranks, ep, placements, owned))
    return fleets


def owners_of(
    routes: Sequence[Routed],
    places: Mapping[int, Place],
    mesh: Mesh,
    placements: Sequence[Placement],
    *,
    measured: bool = False,
    buffers: Mapping[int, Hashable] | None = None,
) -> Ownership:
    """Who computes which matrix, as ``sw.optimizer(model, matrix=sw.muon(...))`` plans it.

    ``places`` are by id of the parameter; ``measured``: on GPUs that the kernels serve;
    ``buffers``, by id of the parameter: those that are gathered as soon as they are updated.
    """
    settings = muon()
    priced = partial(price, polynomial=settings.polynomial, form=settings.form, measured=measured)
    shards = mesh.num_shards(placements)
    rank_of = ranks_of(mesh, placements, SHARD)
    known: dict[Any, list[Matrix]] = {}
    cargo: list[Matrix] = []
    found = [one.parameter for one in taken(routes)]
    waves = [0] * len(found)
    if buffers is not None:
        waves = update_order([buffers[id(p)] for p in found], [p.numel() for p in found])
    for position, one in enumerate(taken(routes)):
        group, index = places[id(one.parameter)]
        key = (id(group), index, one.route.split, one.route.flat)
        if key not in known:  # layers that are alike are cut alike
            layout = group.layout
            pieces = [
                (rank_of[shard], *layout.piece(index, shard)) for shard in layout.holders(index)
            ]
            grain = layout.items[index].grain
            known[key] = stored_matrices(
                matrices_of(one.route.shape_of(one.parameter.shape), one.route.split),
                pieces,
                priced,
                pinned=grain.kind == "tensor" and grain.count == 1,
            )
        cargo += [
            replace(parcel, name=one.name + parcel.name, parameter=position, order=waves[position])
            for parcel in known[key]
        ]
    return assign_owners(cargo, shards, mesh.num_ranks // shards)


def exchange_calls(
    plan: Ownership, mesh: Mesh, placements: Sequence[Placement], replica: int, rank: int
) -> list[Call]:
    """The all-to-alls that one rank issues in a step: there and back for every round in which
    anything of its replica travels, then once to the other replicas."""
    shards = _joint(mesh, placements, SHARD)
    replicas = _joint(mesh, placements, REPLICATE)
    held = _Held()
    calls = []
    for members in plan.rounds:
        here = [index for index in members if plan.owners[index][0] == replica]
        there = back = share = 0
        travels = False
        for index in here:
            parcel, owner = plan.matrices[index], plan.owners[index][1]
            mine, remote = held.by(parcel, rank), parcel.numel - held.by(parcel, owner)
            travels = travels or remote > 0
            there += 0 if owner == rank else mine
            back += remote if owner == rank else 0
            share += mine
        if plan.num_shards > 1 and travels:
            calls += [Call("all_to_all", *shards, ELEMENT * sent) for sent in (there, back)]
        if plan.num_replicas > 1:
            shared = ELEMENT * share * (plan.num_replicas - 1)
            calls.append(Call("all_to_all", *replicas, shared))
    return calls


def heaviest(fleets: Sequence[Fleet]) -> int:
    """The rank that sends most between shards."""
    sent = summed(fleet.by_rank(_sent(fleet.plan)) for fleet in fleets)
    return sent.index(max(sent))


def _sent(plan: Ownership) -> Counter[tuple[int, int]]:
    """Elements that each (replica, rank) sends there and back."""
    held = _Held()
    sent: Counter[tuple[int, int]] = Counter()
    alike: Counter[tuple[int, int]] = Counter()  # parcels of one replica that are cut alike
    for parcel, (replica, owner) in zip(plan.matrices, plan.owners, strict=True):
        own = held.by(parcel, owner)
        alike[replica, id(parcel.pieces)] += 1
        sent[replica, owner] += parcel.numel - 2 * own  # what it sends back, less what it keeps
    for (replica, cut), count in alike.items():
        for holder, numel in held.cuts[cut].items():
            sent[replica, holder] += count * numel
    return sent


class _Held:
    """How much of a parcel each rank stores; looked up once for parcels that are cut alike."""

    def __init__(self) -> None:
        self.cuts: dict[int, dict[int, int]] = {}

    def by(self, parcel: Matrix, rank: int) -> int:
        known = self.cuts.get(id(parcel.pieces))
        if known is None:
            known = self.cuts[id(parcel.pieces)] = Counter()
            for holder, low, high in parcel.pieces:
                known[holder] += high - low
        return known.get(rank, 0)


def _joint(mesh: Mesh, placements: Sequence[Placement], wanted: Placement) -> tuple[str, int]:
    """The axes of one placement as one: its name and size, as ``Ranks.joint`` makes it."""
    chosen = [axis for axis, placement in enumerate(placements) if placement == wanted]
    size = 1
    for axis in chosen:
        size *= mesh.sizes[axis]
    return "+".join(mesh.names[axis] for axis in chosen), size


def ranks_of(mesh: Mesh, placements: Sequence[Placement], wanted: Placement) -> dict[int, int]:
    """By place: the rank on the joint axis of one placement. Ranks count the inner axis fastest,
    places (of shards, of replicas) the outer one."""
    sizes = [size for size, p in zip(mesh.sizes, placements, strict=True) if p == wanted]
    every, count = [SHARD] * len(sizes), math.prod(sizes)
    coordinates = itertools.product(*(range(size) for size in sizes))
    return {
        shard_range(every, sizes, coordinate, count)[0]: rank
        for rank, coordinate in enumerate(coordinates)
    }
