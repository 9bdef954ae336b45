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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.core import comm
from shardwise.core.division import Evenly, divide_evenly
from shardwise.core.memory import counted
from shardwise.core.tensor import ShardedTensor
from shardwise.optim.ownership import WIDTH, Ownership
from shardwise.optim.storage import Sharding, local_of, pieces_of


def evenly_is_cheaper(plan: Ownership, width: int) -> bool:
    """Whether even parts cost less than whole matrices, in bytes that the busiest rank receives
    from other replicas: gradients and weights in fp32, results in ``width`` bytes."""
    replicas = plan.num_replicas
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
    divisions: dict[int, Evenly] = field(default_factory=dict)  # by parameter
    # By buffer: its parameters, the elements of a replica.
    buffers: list[tuple[list[int], int]] = field(default_factory=list)

    def gather(self, wanted: set[int], parameters: Sequence[ShardedTensor]) -> None:
        """Bring every replica's part of the new weights of ``wanted`` to all replicas, a buffer at
        a time (collective)."""
        for members, chunk in self.buffers:
            flat = [local_of(parameters[position]).view(-1) for position in members]
            if not any(map(len, flat)) or wanted.isdisjoint(members):
                continue
            updated = []
            for position, weight in zip(members, flat, strict=True):
                cut, first = parameters[position].cut, parameters[position].cut.piece[0]
                begin, end = cut.divided(self.divisions[position]).piece
                updated.append(weight[begin - first : end - first] if end else weight[:0])
            part = torch.cat([*updated, flat[0].new_zeros(chunk - sum(map(len, updated)))])
            whole = counted(part.new_empty(self.replicas.size * chunk), "receive")
            comm.all_gather(whole, part, self.replicas).wait()
            # Several axes: divisions have another order.
            order = sorted(range(len(self.places)), key=self.places.__getitem__)
            if order != sorted(order):
                whole = whole.view(-1, chunk)[order].view(-1)
            lengths = list(map(len, flat))
            torch._foreach_copy_(flat, list(whole[: sum(lengths)].split(lengths)))


def spread_evenly(sharding: Sharding, parameters: Sequence[ShardedTensor]) -> Spread:
    """Divide parameters evenly between the replicas of their sharding, which has several."""
    shards, replicas = sharding.axis(sharding.sharded), sharding.axis(sharding.replicated)
    assert replicas is not None
    shard_places = sharding.places(sharding.sharded)
    places = sharding.places(sharding.replicated)
    pairs = zip(sharding.sharded, sharding.replicated, strict=True)
    joined = replace(sharding, sharded=tuple(cuts or copies for cuts, copies in pairs))
    spread = Spread(joined, replicas, places)
    members_of: dict[Any, list[int]] = {}  # by buffer
    for position, parameter in enumerate(parameters):
        members_of.setdefault((id(parameter.buffer), parameter.dtype), []).append(position)
    for members in members_of.values():
        members.sort(key=lambda n: parameters[n].cut.layout.starts[parameters[n].cut.index])
        placed = [
            [(shard_places[rank], low, high) for rank, low, high in pieces_of(parameters[position])]
            for position in members
        ]
        divided = divide_evenly(placed, len(shard_places), len(places))
        spread.divisions |= zip(members, divided, strict=True)
        here = shard_places[shards.rank if shards is not None else 0]
        spread.buffers.append((members, divided[0].chunks[here]))
    return spread
