# SPDX-License-Identifier: Apache-2.0
"""Ownership: which rank orthogonalises which matrix. Pure arithmetic, equal on every rank.

Matrices are stored in pieces over ``num_shards`` ranks, in ``num_replicas`` copies. Every matrix
has one owner, a rank of one replica:

    stored            rank 0 | A 0-3 | B 0-1 |      rank 1 | B 2-7 | C 0-3 |
    owners            A: 0 (stores it whole)     B: 1     C: 0
    to owners         B 0-1: 0 to 1     C: 1 to 0          and the results go back the same way
    replicas          r0 computes A and C, r1 computes B; then each sends its rows to the others

With N ranks and R replicas, a rank sends (N-1)/N^2 P b / R bytes each way for evenly cut matrices
of P elements of b bytes. Nothing is sent for a matrix that its owner stores whole: with one rank,
or in a layout of whole tensors.

A parameter goes to one replica whole, so that its gradient is reduced to that replica alone. Only a
parameter that is a large part of a replica's work is divided between replicas, a run of matrices
for each. Then the matrices of a replica are divided between its ranks. Both assignments balance the
cost of Newton-Schulz: the most expensive first, to the least loaded. The rank that stores the
largest piece of a matrix owns it, as long as the load stays balanced.

Matrices are exchanged in rounds of ``ROUND_BYTES`` for each owner, which bounds the memory of a
step. An owner takes its matrices shape by shape, so that it computes long batches. Each owner
begins with another shape, so that every rank stores a part of each round:

    round         0      1      2      3
    owner 0     | A A  | A A  | B B  | B B  |
    owner 1     | B B  | B B  | A A  | A A  |
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.optim.split import Matrix, Piece

LOAD_TOLERANCE = 1.05  # up to this multiple of the mean load, a rank owns what it stores
DIVIDE_SHARE = 0.25  # a parameter that costs more than this share of a replica's load is divided
NUM_COMPARED = 8  # how many equally loaded replicas are compared by what they store
ROUND_BYTES = 256 << 20  # of one owner's matrices in one round, in fp32
WIDTH = 4  # bytes per element of a matrix to compute


@dataclass(frozen=True)
class Ownership:
    """The owner of every matrix, and rounds of matrices that are exchanged together."""

    matrices: tuple[Matrix, ...]
    num_shards: int
    num_replicas: int
    owners: tuple[tuple[int, int], ...]  # (replica, rank on the shard axis), by matrix
    rounds: tuple[tuple[int, ...], ...]

    def remote_pieces(self, index: int) -> list[Piece]:
        """The pieces of a matrix that its owner does not store."""
        owner = self.owners[index][1]
        return [piece for piece in self.matrices[index].pieces if piece[0] != owner]

    @cached_property
    def needs_exchange(self) -> bool:
        """Whether any owner lacks a piece."""
        return any(self.remote_pieces(index) for index in range(len(self.matrices)))

    @cached_property
    def loads(self) -> dict[tuple[int, int], int]:
        """The cost of each owner's matrices."""
        ranks = range(self.num_shards)
        loads = {(replica, rank): 0 for replica in range(self.num_replicas) for rank in ranks}
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += matrix.cost
        return loads

    @cached_property
    def replica_ranges(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """By parameter: the elements [lo, hi) that each replica computes; (0, 0) for none."""
        ranges_of: dict[int, list[tuple[int, int]]] = {}
        for matrix, (replica, _) in zip(self.matrices, self.owners, strict=True):
            ranges = ranges_of.setdefault(matrix.parameter, [(0, 0)] * self.num_replicas)
            lo, hi = ranges[replica]
            end = matrix.start + matrix.numel
            ranges[replica] = (min(lo, matrix.start), max(hi, end)) if hi else (matrix.start, end)
        return {parameter: tuple(ranges) for parameter, ranges in ranges_of.items()}

    @cached_property
    def digest(self) -> str:
        """A hash that is equal on ranks that will issue the same collectives of the same sizes."""
        text = repr((self.matrices, self.num_shards, self.num_replicas, self.owners, self.rounds))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def assign_owners(matrices: Sequence[Matrix], num_shards: int, num_replicas: int = 1) -> Ownership:
    """Choose an owner for every matrix, and divide the work into rounds."""
    owners: list[tuple[int, int]] = [(0, 0)] * len(matrices)
    for replica, members in enumerate(_assign_replicas(matrices, num_replicas)):
        for index, rank in _assign_ranks(matrices, members, num_shards).items():
            owners[index] = (replica, rank)
    members_of: dict[tuple[int, int], list[int]] = {}
    for index, owner in enumerate(owners):
        members_of.setdefault(owner, []).append(index)
    rounds = _cut(matrices, members_of, num_shards, num_replicas * num_shards)
    return Ownership(tuple(matrices), num_shards, num_replicas, tuple(owners), rounds)


def _num_rounds(matrices: Sequence[Matrix], members_of: dict[tuple[int, int], list[int]]) -> int:
    """Rounds of ``ROUND_BYTES`` for each owner, but no more than each owner has work for."""
    costs_of = [[matrices[index].cost for index in own] for own in members_of.values()]
    numels = (sum(matrices[index].numel for index in own) for own in members_of.values())
    least = min([sum(costs) // max(costs) for costs in costs_of], default=0)
    return min(least, -(-WIDTH * max(numels, default=0) // ROUND_BYTES))


def _cut(
    matrices: Sequence[Matrix],
    members_of: dict[tuple[int, int], list[int]],
    num_shards: int,
    num_owners: int,
) -> tuple[tuple[int, ...], ...]:
    """The rounds. An owner has about the same work in each, and half as much again in the last
    round, which no other round follows. ``members_of``: the matrices of each owner."""
    count = _num_rounds(matrices, members_of)
    rounds: list[list[int]] = [[] for _ in range(count)]
    for (replica, rank), indices in members_of.items():
        cost = sum(matrices[index].cost for index in indices)
        numel = sum(matrices[index].numel for index in indices)
        ordered = sorted(indices, key=lambda index: (matrices[index].shapes, index))
        begin = len(indices) * (replica * num_shards + rank) // num_owners
        # Work counts half by cost and half by elements. All of it is 2 * cost * numel.
        before = 0
        for number, index in enumerate(ordered[begin:] + ordered[:begin]):
            work = matrices[index].cost * numel + matrices[index].numel * cost
            at = (2 * count + 1) * (2 * before + work) // (8 * cost * numel)
            rounds[number if len(indices) <= count else min(at, count - 1)].append(index)
            before += work
    return tuple(tuple(sorted(indices)) for indices in rounds if indices)


def _assign_replicas(matrices: Sequence[Matrix], num_replicas: int) -> list[list[int]]:
    """The matrices of each replica: the most expensive parameters first, to the least loaded.

    Of equally loaded replicas, the run goes to the one that has the fewest elements of the ranks
    that store the run, so that the bytes between replicas are as even as the work.
    """
    if num_replicas == 1:
        return [list(range(len(matrices)))]
    assigned: list[list[int]] = [[] for _ in range(num_replicas)]
    stored: list[Counter[int]] = [Counter() for _ in range(num_replicas)]  # elements, by rank
    heap = [(0, replica) for replica in range(num_replicas)]
    used_by: dict[int, set[int]] = {}  # replicas, by the first matrix of a parameter
    runs = [
        (-sum(matrices[index].cost for index in run), run[0], first, run)
        for first, run in _runs(matrices, num_replicas)
    ]
    for minus_cost, _, first, run in sorted(runs):
        used = used_by.setdefault(first, set())  # a replica computes one run of a parameter
        skipped: list[tuple[int, int]] = []
        equal: list[tuple[int, int]] = []
        while heap and len(equal) < NUM_COMPARED and not (equal and heap[0][0] > equal[0][0]):
            entry = heapq.heappop(heap)
            (skipped if entry[1] in used else equal).append(entry)
        pieces = [piece for index in run for piece in matrices[index].pieces]
        overlap = {
            replica: sum(stored[replica][rank] for rank, _, _ in pieces) for _, replica in equal
        }
        load, replica = min(equal, key=lambda entry: (overlap[entry[1]], entry[1]))
        for entry in skipped + equal:
            heapq.heappush(heap, (load - minus_cost, replica) if entry[1] == replica else entry)
        used.add(replica)
        assigned[replica] += run
        for rank, lo, hi in pieces:
            stored[replica][rank] += hi - lo
    return assigned


def _runs(matrices: Sequence[Matrix], num_replicas: int) -> list[tuple[int, list[int]]]:
    """(first matrix of the parameter, run) of neighbouring matrices that one replica computes: a
    whole parameter, or a part of a parameter that costs too much for one replica."""
    share = sum(matrix.cost for matrix in matrices) / num_replicas
    parameters: list[list[int]] = []
    for index, matrix in enumerate(matrices):
        if parameters and matrices[parameters[-1][0]].parameter == matrix.parameter >= 0:
            parameters[-1].append(index)
        else:
            parameters.append([index])
    runs = []
    for members in parameters:
        divided = sum(matrices[index].cost for index in members) > DIVIDE_SHARE * share
        count = min(len(members), num_replicas) if divided else 1
        bounds = [len(members) * number // count for number in range(count + 1)]
        runs += [(members[0], members[bounds[n] : bounds[n + 1]]) for n in range(count)]
    return runs


def _assign_ranks(
    matrices: Sequence[Matrix], members: Sequence[int], num_shards: int
) -> dict[int, int]:
    """The owners of one replica's matrices. The most expensive is assigned first, to the rank that
    stores most of it if that keeps the balance, else to the least loaded rank."""
    limit = sum(matrices[index].cost for index in members) * LOAD_TOLERANCE / num_shards
    loads = [0] * num_shards
    heap = [(0, rank) for rank in range(num_shards)]
    owners: dict[int, int] = {}
    holders: dict[int, int] = {}  # by id of the pieces, which matrices that are cut alike share
    for index in sorted(members, key=lambda i: (not matrices[i].pinned, -matrices[i].cost, i)):
        matrix = matrices[index]
        key = id(matrix.pieces)
        if key not in holders:
            largest = max(matrix.pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))
            holders[key] = largest[0]
        holder = holders[key]
        while heap[0][0] != loads[heap[0][1]]:  # an outdated entry: the rank has a newer one
            heapq.heappop(heap)
        fits = loads[holder] + matrix.cost <= limit or loads[holder] == heap[0][0]
        owners[index] = rank = holder if matrix.pinned or fits else heap[0][1]
        loads[rank] += matrix.cost
        heapq.heappush(heap, (loads[rank], rank))
    return owners
