# SPDX-License-Identifier: Apache-2.0
"""What changes where replicas take turns at matrices: gradients, momenta, and whose they are.

    all_reduce dp_outer, all of the shard    -->    all_reduce dp_outer, what is no matrix
                                                    all_to_all dp_outer, matrices of the others
    momenta beside every shard               -->    beside the shards of one replica each

Owners differ between layers that are alike, and so do ranks: figures are of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.comm import Call
from shardwise.placements import REPLICATE, Placements, Turns, shard_range, turn_spans
from shardwise.report.exchange import Fleet, Place, ranks_of, summed
from shardwise.report.footprint import Footprint, Mesh, room_of
from shardwise.report.units import Owner, PlannedGroup, PlannedUnit, optimizer_bytes


def turns_of(fleets: Sequence[Fleet]) -> dict[int, Turns]:
    """By id of the parameter; nothing where nobody is replicated."""
    found = {}
    for fleet in fleets:
        if fleet.plan.num_replicas == 1:
            continue
        rank_of = ranks_of(fleet.mesh, fleet.placements, REPLICATE)
        for position, one in enumerate(fleet.routes):
            turns = fleet.plan.replica_ranges[position]
            found[id(one.parameter)] = tuple(turns[rank_of[p]] for p in range(len(rank_of)))
    return found


def footprints(
    root: Owner,
    groups: Mapping[Owner, Sequence[PlannedGroup]],
    places: Mapping[int, Place],
    turns: Mapping[int, Turns],
    mesh: Mesh,
    placements: Placements,
    rank: int,
) -> dict[Owner, list[Footprint]]:
    """Of every unit's groups on one rank."""
    found = {}
    for owner in root.tree():
        ranks = mesh.without(owner.ep)
        coordinate = ranks.coordinate(rank // owner.ep)
        mine: dict[int, dict[int, Turns]] = {}
        for one in owner.found:
            if id(one.parameter) in turns:
                group, index = places[id(one.parameter)]
                mine.setdefault(id(group), {})[index] = turns[id(one.parameter)]
        found[owner] = [
            _turned(group, mine[id(group)], ranks, placements, coordinate)
            if id(group) in mine
            else group.footprint
            for group in groups[owner]
        ]
    return found


def _turned(
    group: PlannedGroup,
    turns: Mapping[int, Turns],
    mesh: Mesh,
    placements: Placements,
    coordinate: Sequence[int],
) -> Footprint:
    layout, size = group.layout, group.footprint
    wire = size.packed // layout.numel
    shard, _ = shard_range(placements.main, mesh.sizes, coordinate, layout.num_shards)
    pieces = [(*layout.piece(index, shard), 0) for index in range(len(layout.items))]
    calls: list[Call] = []
    room: list[int] = []
    packing: list[int] = []
    for call, needed in zip(size.reduce[True], size.room[True], strict=True):
        if call.operation != "all_reduce":
            calls.append(call)
            room.append(needed)
            packing.append(0)
            continue
        axis = mesh.names.index(call.axis)
        spans, parts = turn_spans(pieces, turns, placements.main, mesh.sizes, coordinate, axis)
        shared = wire * sum(end - begin for begin, end in spans)
        sizes = [wire * sum(end - begin for begin, end in part) for part in parts]
        if shared:
            calls.append(replace(call, nbytes=shared))
            room.append(shared + room_of(calls[-1], wire))
            packing.append(shared)
        if any(sizes):
            own = sizes[coordinate[axis]]
            calls.append(Call("all_to_all", call.axis, call.size, sum(sizes) - own))
            room.append(sum(sizes) + own + call.size * own)
            packing.append(room[-1])
    return replace(
        size,
        reduce={False: size.reduce[False], True: tuple(calls)},
        room={False: size.room[False], True: tuple(room)},
        packing={False: (), True: tuple(packing)},
    )


def state_bytes(
    units: Sequence[PlannedUnit],
    states: tuple[int, int],
    mesh: Mesh,
    placements: Placements,
    fleets: Sequence[Fleet],
    places: Mapping[int, Place],
) -> list[int]:
    """Optimizer state on each rank. ``states``: tensors of a matrix, and of any other parameter;
    ``fleets``: those whose replicas take turns, so that a matrix has its state on one of them."""
    found = [fleet.by_rank(_momenta(fleet, states[0], places)) for fleet in fleets]
    apart = {fleet.ep for fleet in fleets}
    for ep in sorted({unit.ep for unit in units if unit.groups}):
        ranks, counted = mesh.without(ep), (0 if ep in apart else states[0], states[1])
        beside = optimizer_bytes([unit for unit in units if unit.ep == ep], counted)
        own = [beside[ranks.shard(placements.main, rank)] for rank in range(ranks.num_ranks)]
        found.append([nbytes for nbytes in own for _ in range(ep)])
    return summed(found)


def _momenta(fleet: Fleet, tensors: int, places: Mapping[int, Place]) -> Counter[tuple[int, int]]:
    """Bytes on each (replica, rank)."""
    widths = [tensors * places[id(one.parameter)][0].dtype.itemsize for one in fleet.routes]
    held: Counter[tuple[int, int]] = Counter()
    for cargo, (replica, _) in zip(fleet.plan.matrices, fleet.plan.owners, strict=True):
        for rank, lo, hi in cargo.pieces:
            held[replica, rank] += (hi - lo) * widths[cargo.parameter]
    return held
