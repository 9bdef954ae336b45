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

Matrices are exchanged in rounds, so small that the memory of a step stays within a budget. An owner
takes its matrices shape by shape, so that it computes long batches. Each owner begins with another
shape, so that every rank stores a part of each round:

    round         0      1      2      3
    owner 0     | A A  | A A  | B B  | B B  |
    owner 1     | B B  | B B  | A A  | A A  |
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.optim.split import Matrix, Piece

LOAD_TOLERANCE = 1.05  # up to this multiple of the mean load, a rank owns what it stores
DIVIDE_SHARE = 0.25  # a parameter that costs more than this share of a replica's load is divided
NUM_COMPARED = 8  # how many equally loaded replicas are compared by what they store
ROUND_BYTES = 256 << 20  # the most bytes of one owner's matrices in one round
LEAST_STEP_BYTES = 16 << 20  # less memory is not worth more rounds
COMPUTED = 4  # how many copies of a matrix its computation holds, by default: input and workspace
SAVES = 1.1  # where no number of rounds is enough, more rounds must save this factor of memory
WIDTH = 4  # bytes per element of a matrix to compute

Load = Counter[tuple[int, int]]  # elements or bytes, by (replica, rank)


@dataclass(frozen=True)
class Ownership:
    """The owner of every matrix, and rounds of matrices that are exchanged together."""

    matrices: tuple[Matrix, ...]
    num_shards: int
    num_replicas: int
    owners: tuple[tuple[int, int], ...]  # (replica, rank on the shard axis), by matrix
    rounds: tuple[tuple[int, ...], ...]

    step_bytes: int = 0  # the memory that one step may take on a rank, beside states
    work: tuple[int, ...] = ()  # by matrix: the bytes that its computation takes
    result_width: int = WIDTH  # bytes per element of a result

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


def assign_owners(
    matrices: Sequence[Matrix],
    num_shards: int,
    num_replicas: int = 1,
    *,
    step_bytes: int | None = None,
    work: Callable[[Matrix], int] | None = None,
    result_width: int = WIDTH,
) -> Ownership:
    """Choose an owner for every matrix, and divide the work into rounds.

    ``step_bytes``: the memory that one step may take on a rank; a round has at least one matrix of
    each owner. None: the bytes by which AdamW's two states, stored like the weights, exceed one
    momentum that replicas divide, but not so many rounds that owners have nothing to do in some.
    ``work``: the bytes that the computation of a matrix takes; ``result_width``: the bytes per
    element of a result.
    """
    stored = WIDTH * sum(matrix.numel for matrix in matrices) // num_shards
    default = max(LEAST_STEP_BYTES, 2 * stored - stored // num_replicas)
    owners: list[tuple[int, int]] = [(0, 0)] * len(matrices)
    for replica, members in enumerate(_assign_replicas(matrices, num_replicas)):
        for index, rank in _assign_ranks(matrices, members, num_shards).items():
            owners[index] = (replica, rank)
    plan = Ownership(
        tuple(matrices),
        num_shards,
        num_replicas,
        tuple(owners),
        (),
        step_bytes or default,
        tuple(work(m) if work else COMPUTED * WIDTH * m.numel for m in matrices),
        result_width,
    )
    return replace(plan, rounds=_rounds(plan, idle=step_bytes is not None))


def _rounds(plan: Ownership, *, idle: bool) -> tuple[tuple[int, ...], ...]:
    """Matrices that are exchanged together: as few rounds as the memory of a step allows.

    ``idle``: whether owners may have nothing to do in some rounds. If not, and no number of rounds
    is enough, further rounds must save memory.
    """
    matrices = plan.matrices
    members: dict[tuple[int, int], list[int]] = {}
    for index in range(len(matrices)):
        members.setdefault(plan.owners[index], []).append(index)
    if not members:
        return ()
    owned = [[matrices[index] for index in indices] for indices in members.values()]
    count = max(-(-WIDTH * sum(m.numel for m in group) // ROUND_BYTES) for group in owned)
    busy = [sum(m.cost for m in group) // max(m.cost for m in group) for group in owned]
    limit = max(map(len, owned)) if idle else min(busy)
    if count >= limit:  # there is no choice, and no need to compute the peak
        return tuple(_cut(plan, members, limit))
    tried: list[tuple[int, list[tuple[int, ...]]]] = []  # (peak, rounds)
    while not tried or (tried[-1][0] > plan.step_bytes and count < limit):
        count = count + 1 + count // 8 if tried else count
        candidate = _cut(plan, members, min(count, limit))
        tried.append((_peak(plan, candidate), candidate))
    enough = plan.step_bytes if idle else max(plan.step_bytes, SAVES * min(tried)[0])
    return tuple(next((cut for peak, cut in tried if peak <= enough), tried[-1][1]))


def _cut(
    plan: Ownership, members: dict[tuple[int, int], list[int]], count: int
) -> list[tuple[int, ...]]:
    """``count`` rounds in which each owner has about the same work, and half as much again in the
    last round, which no other round follows. An owner of ``count`` matrices or fewer has one in
    each of the first rounds. ``members``: the matrices of each owner."""
    matrices, num_owners = plan.matrices, plan.num_replicas * plan.num_shards
    rounds: list[list[int]] = [[] for _ in range(count)]
    for (replica, rank), indices in members.items():
        cost = sum(matrices[index].cost for index in indices)
        numel = sum(matrices[index].numel for index in indices)
        ordered = sorted(indices, key=lambda index: (matrices[index].shapes, index))
        begin = len(indices) * (replica * plan.num_shards + rank) // num_owners
        # Work counts half by cost and half by elements. All of it is 2 * cost * numel.
        before = 0
        for number, index in enumerate(ordered[begin:] + ordered[:begin]):
            work = matrices[index].cost * numel + matrices[index].numel * cost
            at = (2 * count + 1) * (2 * before + work) // (8 * cost * numel)
            rounds[number if len(indices) <= count else min(at, count - 1)].append(index)
            before += work
    return [tuple(sorted(indices)) for indices in rounds if indices]


def _peak(plan: Ownership, rounds: Sequence[Sequence[int]]) -> int:
    """The peak memory of ``Exchange.run``, in bytes, on the rank that needs most.

    While round k is computed, round k + 1 goes to its owners, round k - 1 comes back, and round
    k - 2 goes to replicas.
    """
    none: Load = Counter()
    computed: list[Load] = []  # by round: the bytes that computations take
    travels: list[Load] = []  # by round: elements that are sent, received, or kept by their owner
    shared: list[Load] = []  # by round: elements that replicas hold, send and receive
    for members in rounds:
        owned, moved, mine, stored = Load(), Load(), Load(), Counter[int]()
        for index in members:
            replica, owner = plan.owners[index]
            owned[replica, owner] += plan.work[index]
            for rank, lo, hi in plan.matrices[index].pieces:
                moved[replica, rank] += hi - lo
                if rank != owner:
                    moved[replica, owner] += hi - lo
                mine[replica, rank] += hi - lo
                stored[rank] += hi - lo
        others = Load({(-1, rank): numel for rank, numel in stored.items()})
        for (replica, rank), numel in mine.items():
            others[replica, rank] = plan.num_replicas * numel + stored[rank] - numel
        computed.append(owned)
        travels.append(moved)
        shared.append(others if plan.num_replicas > 1 else none)
    if not plan.needs_exchange and plan.num_replicas == 1:  # rounds do not overlap
        return max(max(owned.values()) for owned in computed)

    def at(loads: list[Load], number: int) -> Load:
        return loads[number] if 0 <= number < len(loads) else none

    peak = 0
    for number in range(len(rounds) + 1):
        going, back = at(travels, number + 1), at(travels, number - 1)
        now, recent, last = at(computed, number), at(shared, number - 1), at(shared, number - 2)
        for worker in {*going, *now, *back, *recent, *last}:
            absent = (-1, worker[1])  # the entry of replicas that compute nothing of this rank's
            returned = max(back[worker], recent.get(worker, recent[absent]))
            returned += last.get(worker, last[absent])
            peak = max(peak, WIDTH * going[worker] + now[worker] + plan.result_width * returned)
    return peak


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
