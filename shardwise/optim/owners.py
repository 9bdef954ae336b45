# SPDX-License-Identifier: Apache-2.0
"""Who computes which matrix, and what travels for it: arithmetic alone, the same on every rank.

Parcels (whole matrices) are stored in pieces over ``num_shards`` ranks, and that ``num_replicas``
times over. Each parcel gets one owner, a rank of one replica:

    stored            rank 0 | A 0-3 | B 0-1 |      rank 1 | B 2-7 | C 0-3 |
    owners            A: 0 (holds it all)     B: 1     C: 0
    there             B 0-1: 0 to 1     C: 1 to 0          and back again, the same way
    replicas          r0 computes A and C, r1 computes B; then each hands its rows to the others

Bytes that a rank sends each way for evenly cut matrices of P elements: (N-1)/N^2 P b / R. Nothing
travels where the owner holds everything: one rank, or a layout of whole tensors.

Owners are balanced by the cost of Newton-Schulz, dearest first, to the least loaded rank; a rank
that already holds a parcel's largest piece keeps it while that does not unbalance the load. Parcels
of one shape are neighbours in a round, so an owner batches them.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

KEEP_BALANCE = 1.05  # the load, over the mean, up to which a holder keeps what it holds
SLOT_BYTES = 256 << 20  # of one owner's parcels in one round; two rounds are in flight


@dataclass(frozen=True)
class Cargo:
    """One parcel: where its pieces lie (rank, [lo, hi) within the parcel), and what it costs."""

    name: str
    numel: int
    pieces: tuple[tuple[int, int, int], ...]
    cost: int
    key: tuple[int, ...]  # parcels of equal keys have matrices of equal shapes
    pinned: bool = False  # the layout keeps it whole on purpose: its holder computes it


@dataclass(frozen=True)
class Plan:
    """Owners, and rounds of parcels that are exchanged and computed together."""

    cargo: tuple[Cargo, ...]
    num_shards: int
    num_replicas: int
    owners: tuple[tuple[int, int], ...]  # (replica, rank on the shard axis), by parcel
    rounds: tuple[tuple[int, ...], ...]

    def sends(self, index: int) -> list[tuple[int, int, int]]:
        """(rank, lo, hi): the pieces of a parcel that are not with its owner."""
        owner = self.owners[index][1]
        return [piece for piece in self.cargo[index].pieces if piece[0] != owner]

    @cached_property
    def moves(self) -> bool:
        """Whether anything travels between shards at all."""
        return any(self.sends(index) for index in range(len(self.cargo)))

    def sent(self, replica: int, rank: int) -> tuple[int, int]:
        """Elements that a rank sends there, and back, over the shard axis in one step."""
        there = back = 0
        for index, (home, owner) in enumerate(self.owners):
            if home != replica:
                continue
            for holder, lo, hi in self.sends(index):
                there += (hi - lo) * (holder == rank)
                back += (hi - lo) * (owner == rank)
        return there, back

    def shared(self, replica: int, rank: int) -> int:
        """Elements that a rank sends to the other replicas in one step."""
        held = sum(
            hi - lo
            for index, (home, _) in enumerate(self.owners)
            if home == replica
            for holder, lo, hi in self.cargo[index].pieces
            if holder == rank
        )
        return held * (self.num_replicas - 1)

    @cached_property
    def loads(self) -> dict[tuple[int, int], int]:
        """The cost that each owner has."""
        found = {
            (replica, rank): 0
            for replica in range(self.num_replicas)
            for rank in range(self.num_shards)
        }
        for cargo, owner in zip(self.cargo, self.owners, strict=True):
            found[owner] += cargo.cost
        return found

    @cached_property
    def digest(self) -> str:
        """Equal on ranks that will issue the same collectives with the same sizes."""
        text = repr((self.cargo, self.num_shards, self.num_replicas, self.owners, self.rounds))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_owners(
    cargo: Sequence[Cargo],
    num_shards: int,
    num_replicas: int = 1,
    *,
    slot_bytes: int | None = None,
    width: int = 4,
) -> Plan:
    """Choose an owner for every parcel, and cut the work into rounds."""
    slot_bytes = SLOT_BYTES if slot_bytes is None else slot_bytes
    owners = _assign(cargo, num_shards, num_replicas)
    order = sorted(range(len(cargo)), key=lambda index: (cargo[index].key, index))
    rounds: list[tuple[int, ...]] = []
    current: list[int] = []
    filled: dict[tuple[int, int], int] = {}
    for index in order:
        owner, nbytes = owners[index], cargo[index].numel * width
        if current and filled.get(owner, 0) and filled[owner] + nbytes > slot_bytes:
            rounds.append(tuple(current))
            current, filled = [], {}
        current.append(index)
        filled[owner] = filled.get(owner, 0) + nbytes
    if current:
        rounds.append(tuple(current))
    return Plan(tuple(cargo), num_shards, num_replicas, owners, tuple(rounds))


def _assign(
    cargo: Sequence[Cargo], num_shards: int, num_replicas: int
) -> tuple[tuple[int, int], ...]:
    """Dearest first to the least loaded, a holder first where that keeps the balance."""
    workers = num_shards * num_replicas
    limit = sum(parcel.cost for parcel in cargo) * KEEP_BALANCE / workers
    loads = [0] * workers  # by replica * num_shards + rank
    heap = [(0, worker) for worker in range(workers)]
    owners: list[tuple[int, int]] = [(0, 0)] * len(cargo)

    def give(index: int, worker: int) -> None:
        owners[index] = divmod(worker, num_shards)
        loads[worker] += cargo[index].cost
        heapq.heappush(heap, (loads[worker], worker))

    def least_replica(rank: int) -> int:
        return min(range(num_replicas), key=lambda r: (loads[r * num_shards + rank], r))

    order = sorted(range(len(cargo)), key=lambda i: (not cargo[i].pinned, -cargo[i].cost, i))
    for index in order:
        parcel = cargo[index]
        holder = max(parcel.pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))[0]
        worker = least_replica(holder) * num_shards + holder
        while heap[0][0] != loads[heap[0][1]]:  # out of date: a newer entry follows
            heapq.heappop(heap)
        fits = loads[worker] + parcel.cost <= limit or loads[worker] == heap[0][0]
        give(index, worker if parcel.pinned or fits else heap[0][1])
    return tuple(owners)
