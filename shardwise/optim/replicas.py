# SPDX-License-Identifier: Apache-2.0
"""Replicas that divide the matrices of an optimizer between them, by one of two rules.

    by matrix   each replica computes whole matrices: it receives their gradients from all others
                and sends them the updates. A rank sends as much as an all-reduce would, as long as
                there are enough matrices to divide them evenly.
    evenly      replicas act as shards for the time of a step. Gradients are reduce-scattered
                between them, rows go to the owners of matrices and back over all ranks at once, and
                each replica's part of the new weights is all-gathered. A rank sends as much as an
                all-reduce would, and twice its share of the matrices, however many replicas there
                are.

The sizes of matrices alone decide which rule costs less between replicas.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.core.division import Evenly, Span, divide_evenly
from shardwise.core.memory import counted
from shardwise.core.placements import ranks_by
from shardwise.core.tensor import ShardedTensor
from shardwise.optim.ownership import WIDTH, Ownership
from shardwise.optim.split import Piece
from shardwise.optim.storage import Sharding, pieces_of


def evenly_is_cheaper(plan: Ownership) -> bool:
    """Whether even parts cost less than whole matrices, in bytes that the busiest rank receives
    from other replicas: gradients and weights in fp32, results in ``plan.result_width``."""
    replicas, width = plan.num_replicas, plan.result_width
    stored: Counter[int] = Counter()  # by shard
    parts: Counter[tuple[int, int]] = Counter()  # by replica and shard
    for matrix, (replica, _) in zip(plan.matrices, plan.owners, strict=True):
        for rank, low, high in matrix.pieces:
            stored[rank] += high - low
            parts[replica, rank] += high - low
    by_matrix = max(
        WIDTH * (replicas - 1) * part + width * (stored[rank] - part)
        for (_, rank), part in parts.items()
    )
    largest = max(matrix.numel for matrix in plan.matrices)
    owned = max(largest, sum(stored.values()) / (replicas * plan.num_shards))
    most = max(stored.values()) / replicas
    evenly = WIDTH * (2 * (replicas - 1) * most + owned) + width * most
    return evenly < by_matrix


@dataclass(eq=False)
class Spread:
    """Parameters of one Sharding, divided evenly between their replicas."""

    sharding: Sharding  # in which the replicas are shards
    replicas: comm.Axis
    places: list[int]  # by rank of ``replicas``: its number in a division
    # By parameter: its division; the elements that each rank updates; the part of this rank's
    # elements that this rank updates.
    divisions: dict[int, Evenly] = field(default_factory=dict)
    pieces: list[tuple[Piece, ...]] = field(default_factory=list)
    mine: list[Span] = field(default_factory=list)
    # By buffer: its parameters, the elements of a replica.
    buffers: list[tuple[list[int], int]] = field(default_factory=list)

    def take(self, position: int, flat: Tensor) -> Tensor:
        """The part of a flat tensor that this rank updates."""
        low, high = self.mine[position]
        return flat if len(flat) == high - low else flat[low:high]

    def gather(self, positions: Iterable[int], weights: Sequence[Tensor]) -> None:
        """Bring every replica's part of the new weights to all replicas, a buffer at a time
        (collective). ``weights``: what this rank stores of all parameters."""
        wanted = set(positions)
        for members, chunk in self.buffers:
            flat = [weights[position].view(-1) for position in members]
            if not any(map(len, flat)) or wanted.isdisjoint(members):
                continue
            updated = list(map(self.take, members, flat))
            part = torch.cat([*updated, flat[0].new_zeros(chunk - sum(map(len, updated)))])
            whole = counted(part.new_empty(self.replicas.size * chunk), "receive")
            comm.all_gather(whole, part, self.replicas).wait()
            # Several axes: divisions have another order.
            order = sorted(range(len(self.places)), key=self.places.__getitem__)
            if order != sorted(order):
                whole = whole.view(-1, chunk)[order].view(-1)
            lengths = list(map(len, flat))
            torch._foreach_copy_(flat, list(whole[: sum(lengths)].split(lengths)))


def spread_evenly(sharding: Sharding, parameters: Sequence[Tensor]) -> Spread:
    """Divide parameters evenly between the replicas of their sharding, which has several."""
    shards, replicas = sharding.axis(sharding.sharded), sharding.axis(sharding.replicated)
    assert replicas is not None
    shard_places = sharding.places(sharding.sharded)
    places = sharding.places(sharding.replicated)
    flags = list(zip(sharding.sharded, sharding.replicated, strict=True))
    joined = replace(sharding, sharded=tuple(cuts or copies for cuts, copies in flags))
    spread = Spread(joined, replicas, places)
    # The rank on the joint axis of shards and replicas, by (rank of the shards, number of the
    # replica).
    sizes = itertools.compress(sharding.sizes, joined.sharded)
    ranks = ranks_by(list(sizes), list(itertools.compress(sharding.sharded, joined.sharded)))
    joint = {(shard, places[replica]): rank for rank, (replica, shard) in enumerate(ranks)}
    shard, replica = shards.rank if shards is not None else 0, places[replicas.rank]
    stored = [pieces_of(parameter) for parameter in parameters]
    members_of: dict[Any, list[int]] = {}  # by buffer
    for position, parameter in enumerate(parameters):
        assert isinstance(parameter, ShardedTensor)
        members_of.setdefault((id(parameter.buffer), parameter.dtype), []).append(position)
    for members in members_of.values():
        members.sort(key=lambda position: _start(parameters[position]))
        placed = [
            [(shard_places[rank], low, high) for rank, low, high in stored[position]]
            for position in members
        ]
        divided = divide_evenly(placed, len(shard_places), len(places))
        spread.divisions |= zip(members, divided, strict=True)
        spread.buffers.append((members, divided[0].chunks[shard_places[shard]]))
    # Parameters that are alike share the stored pieces, and so the pieces to update. The dictionary
    # keeps the stored pieces alive, whose id is part of the key.
    known: dict[Any, tuple[Sequence[Piece], tuple[Piece, ...]]] = {}
    for position, stored_pieces in enumerate(stored):
        division, key = spread.divisions[position], (id(stored_pieces), spread.divisions[position])
        if key not in known:
            updated = (
                (joint[rank, number], *span)
                for rank, low, high in stored_pieces
                for number, span in division.parts(shard_places[rank], low, high)
            )
            known[key] = stored_pieces, tuple(updated)
        spread.pieces.append(known[key][1])
        here = ((low, high) for rank, low, high in stored_pieces if rank == shard)
        low, high = next(here, (0, 0))
        begin, end = division.part(replica, shard_places[shard], low, high)
        spread.mine.append((begin - low, end - low) if begin < end else (0, 0))
    return spread


def _start(parameter: Any) -> int:
    """The offset of a parameter in its buffer."""
    return int(parameter.cut.layout.starts[parameter.cut.index])
