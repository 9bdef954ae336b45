# SPDX-License-Identifier: Apache-2.0
"""What changes where replicas take turns at matrices: gradients, momenta, and whose they are.

    all_reduce dp_outer, all of the shard    -->    all_reduce dp_outer, what is no matrix
                                                    all_to_all dp_outer, matrices of the others
    momenta beside every shard               -->    beside the shards of one replica each

Owners differ between layers that are alike, and so do ranks: figures are of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.comm import Call
from shardwise.optim.owners import Plan
from shardwise.optim.routing import Routed
from shardwise.placements import REPLICATE, SHARD, Placements, Turns, shard_range, turn_spans
from shardwise.report.exchange import Place, ranks_of, taken
from shardwise.report.footprint import Footprint, Mesh, room_of
from shardwise.report.units import Owner, PlannedGroup


def turns_of(
    routes: Sequence[Routed], plan: Plan, mesh: Mesh, placements: Placements
) -> dict[int, Turns]:
    """By id of the parameter; nothing where nobody is replicated."""
    if plan.num_replicas == 1:
        return {}
    rank_of = ranks_of(mesh, placements.main, REPLICATE)
    return {
        id(one.parameter): tuple(plan.turns[position][rank_of[p]] for p in range(len(rank_of)))
        for position, one in enumerate(taken(routes))
    }


def coordinate_of(mesh: Mesh, placements: Placements, replica: int, rank: int) -> tuple[int, ...]:
    """Of a rank on the mesh, by its ranks on the joint axes of replicas and of shards."""
    found = [0] * len(mesh.sizes)
    joint = {REPLICATE: replica, SHARD: rank}
    for axis in reversed(range(len(mesh.sizes))):
        placement = placements.main[axis]
        joint[placement], found[axis] = divmod(joint[placement], mesh.sizes[axis])
    return tuple(found)


def joint_of(mesh: Mesh, placements: Placements, number: int) -> tuple[int, int]:
    """(replica, rank): the reverse, of a rank's number in the world."""
    joint = {REPLICATE: 0, SHARD: 0}
    rest, stride = number, mesh.num_ranks
    for size, placement in zip(mesh.sizes, placements.main, strict=True):
        stride //= size
        position, rest = divmod(rest, stride)
        joint[placement] = joint[placement] * size + position
    return joint[REPLICATE], joint[SHARD]


def footprints(
    root: Owner,
    groups: Mapping[Owner, Sequence[PlannedGroup]],
    places: Mapping[int, Place],
    turns: Mapping[int, Turns],
    mesh: Mesh,
    placements: Placements,
    coordinate: Sequence[int],
) -> dict[Owner, list[Footprint]]:
    """Of every unit's groups on one rank."""
    found = {}
    for owner in root.tree():
        mine: dict[int, dict[int, Turns]] = {}
        for one in owner.found:
            if id(one.parameter) in turns:
                group, index = places[id(one.parameter)]
                mine.setdefault(id(group), {})[index] = turns[id(one.parameter)]
        found[owner] = [
            _turned(group, mine[id(group)], mesh, placements, coordinate)
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
    plan: Plan, per_shard: Sequence[int], widths: Sequence[int], mesh: Mesh, placements: Placements
) -> int:
    """Optimizer state of the rank that holds most. ``per_shard``: that of everything else;
    ``widths``, by matrix parameter: bytes of an element's."""
    place_of = {rank: place for place, rank in ranks_of(mesh, placements.main, SHARD).items()}
    held = [[0] * plan.num_shards for _ in range(plan.num_replicas)]
    for cargo, (replica, _) in zip(plan.cargo, plan.owners, strict=True):
        for rank, lo, hi in cargo.pieces:
            held[replica][place_of[rank]] += (hi - lo) * widths[cargo.parameter]
    return max(own + rest for mine in held for own, rest in zip(mine, per_shard, strict=True))
