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

A parameter goes to one replica whole, so that its gradient need not be reduced anywhere else; one
that is a good part of a replica's work is cut between its matrices, a run of them each. Then the
parcels of a replica go to its ranks. Both are balanced by the cost of Newton-Schulz, dearest first,
to the least loaded; a rank that already holds a parcel's largest piece keeps it while that does not
unbalance the load. Parcels of one shape are neighbours in a round, so an owner batches them.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

KEEP_BALANCE = 1.05  # the load, over the mean, up to which a holder keeps what it holds
CUT_SHARE = 0.25  # of a replica's load: what costs more is cut between its matrices
EQUALS = 8  # how many equally loaded replicas are compared further
SLOT_BYTES = 256 << 20  # of one owner's parcels in one round; two rounds are in flight
WAVES = 8  # of a step whose weights are gathered as they are updated


@dataclass(frozen=True)
class Cargo:
    """One parcel: where its pieces lie (rank, [lo, hi) within the parcel), and what it costs."""

    name: str
    numel: int
    pieces: tuple[tuple[int, int, int], ...]
    cost: int
    key: tuple[int, ...]  # parcels of equal keys have matrices of equal shapes
    pinned: bool = False  # the layout keeps it whole on purpose: its holder computes it
    parameter: int = -1  # what it is part of; -1: a parameter of its own
    start: int = 0  # where it begins there
    wave: int = 0  # those of earlier waves come in earlier rounds


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
    def turns(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """By parameter: the elements [lo, hi) of it that each replica computes."""
        found: dict[int, list[tuple[int, int]]] = {}
        for cargo, (replica, _) in zip(self.cargo, self.owners, strict=True):
            turns = found.setdefault(cargo.parameter, [(0, 0)] * self.num_replicas)
            lo, hi = turns[replica]
            end = cargo.start + cargo.numel
            turns[replica] = (min(lo, cargo.start), max(hi, end)) if hi else (cargo.start, end)
        return {parameter: tuple(turns) for parameter, turns in found.items()}

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
    order = sorted(range(len(cargo)), key=lambda i: (cargo[i].wave, cargo[i].key, i))
    rounds: list[tuple[int, ...]] = []
    current: list[int] = []
    filled: dict[tuple[int, int], int] = {}
    for index in order:
        owner, nbytes = owners[index], cargo[index].numel * width
        full = bool(filled.get(owner, 0)) and filled[owner] + nbytes > slot_bytes
        if current and (full or cargo[current[-1]].wave != cargo[index].wave):
            rounds.append(tuple(current))
            current, filled = [], {}
        current.append(index)
        filled[owner] = filled.get(owner, 0) + nbytes
    if current:
        rounds.append(tuple(current))
    return Plan(tuple(cargo), num_shards, num_replicas, owners, tuple(rounds))


def waves_of(buffers: Sequence[Hashable], sizes: Sequence[int]) -> list[int]:
    """The wave of each parameter, by its buffer and its size, where buffers are gathered as soon as
    they are updated.

    Those of a buffer come together, buffers in the order of the model, which forward will read them
    in: the first can be gathered while the next is computed. A wave is about an eighth of it all,
    so that an owner still batches.
    """
    total_of: dict[Hashable, int] = {}
    for buffer, size in zip(buffers, sizes, strict=True):
        total_of[buffer] = total_of.get(buffer, 0) + size
    total, before = sum(sizes), 0
    wave_of = {}
    for buffer, size in total_of.items():
        wave_of[buffer] = WAVES * before // total
        before += size
    return [wave_of[buffer] for buffer in buffers]


def _assign(
    cargo: Sequence[Cargo], num_shards: int, num_replicas: int
) -> tuple[tuple[int, int], ...]:
    """A replica for every parcel, then a rank of it."""
    owners: list[tuple[int, int]] = [(0, 0)] * len(cargo)
    for replica, members in enumerate(_spread(cargo, num_replicas)):
        for index, rank in _ranks(cargo, members, num_shards).items():
            owners[index] = (replica, rank)
    return tuple(owners)


def _spread(cargo: Sequence[Cargo], num_replicas: int) -> list[list[int]]:
    """The parcels of each replica: dearest parameters first to the least loaded.

    Of equally loaded ones, that which has least of the ranks' pieces yet: what replicas send each
    other is then as even as the work.
    """
    if num_replicas == 1:
        return [list(range(len(cargo)))]
    found: list[list[int]] = [[] for _ in range(num_replicas)]
    held: list[dict[int, int]] = [{} for _ in range(num_replicas)]  # elements, by rank
    heap = [(0, replica) for replica in range(num_replicas)]
    taken: dict[int, set[int]] = {}  # replicas, by the first parcel of the parameter they have
    runs = [
        (-sum(cargo[index].cost for index in run), run[0], first, run)
        for first, run in _runs(cargo, num_replicas)
    ]
    for minus_cost, _, first, run in sorted(runs):
        used = taken.setdefault(first, set())  # a replica has one run of a parameter
        passed: list[tuple[int, int]] = []
        equal: list[tuple[int, int]] = []
        while heap and len(equal) < EQUALS and not (equal and heap[0][0] > equal[0][0]):
            entry = heapq.heappop(heap)
            (passed if entry[1] in used else equal).append(entry)
        pieces = [piece for index in run for piece in cargo[index].pieces]
        there = {
            replica: sum(held[replica].get(rank, 0) for rank, _, _ in pieces)
            for _, replica in equal
        }
        load, replica = min(equal, key=lambda entry: (there[entry[1]], entry[1]))
        for entry in passed + equal:
            heapq.heappush(heap, (load - minus_cost, replica) if entry[1] == replica else entry)
        used.add(replica)
        found[replica] += run
        for rank, lo, hi in pieces:
            held[replica][rank] = held[replica].get(rank, 0) + hi - lo
    return found


def _runs(cargo: Sequence[Cargo], num_replicas: int) -> list[tuple[int, list[int]]]:
    """Neighbouring parcels that stay together, with the first of their parameter: all of it, or a
    part where it costs so much that replicas would be unequal."""
    share = sum(parcel.cost for parcel in cargo) / num_replicas
    parameters: list[list[int]] = []
    for index, parcel in enumerate(cargo):
        if parameters and cargo[parameters[-1][0]].parameter == parcel.parameter >= 0:
            parameters[-1].append(index)
        else:
            parameters.append([index])
    runs = []
    for members in parameters:
        dear = sum(cargo[index].cost for index in members) > CUT_SHARE * share
        count = min(len(members), num_replicas) if dear else 1
        bounds = [len(members) * number // count for number in range(count + 1)]
        runs += [(members[0], members[bounds[n] : bounds[n + 1]]) for n in range(count)]
    return runs


def _ranks(cargo: Sequence[Cargo], members: Sequence[int], num_shards: int) -> dict[int, int]:
    """The owners of one replica's parcels: dearest first to the least loaded, a holder first where
    that keeps the balance."""
    limit = sum(cargo[index].cost for index in members) * KEEP_BALANCE / num_shards
    loads = [0] * num_shards
    heap = [(0, rank) for rank in range(num_shards)]
    owners: dict[int, int] = {}
    holders: dict[int, int] = {}  # by id of the pieces: parcels that are cut alike share theirs
    for index in sorted(members, key=lambda i: (not cargo[i].pinned, -cargo[i].cost, i)):
        parcel = cargo[index]
        key = id(parcel.pieces)
        if key not in holders:
            most = max(parcel.pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))
            holders[key] = most[0]
        holder = holders[key]
        while heap[0][0] != loads[heap[0][1]]:  # out of date: a newer entry follows
            heapq.heappop(heap)
        fits = loads[holder] + parcel.cost <= limit or loads[holder] == heap[0][0]
        owners[index] = rank = holder if parcel.pinned or fits else heap[0][1]
        loads[rank] += parcel.cost
        heapq.heappush(heap, (loads[rank], rank))
    return owners
