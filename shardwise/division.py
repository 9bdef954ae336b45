# SPDX-License-Identifier: Apache-2.0
"""Division: which elements of a parameter each replica works on. Values and arithmetic alone.

Replicas store the same weights. Where an optimizer has them divide the work on a parameter, its
gradient is reduced to the replica that needs it, and its states are stored there alone:

    ByMatrix    each replica has whole matrices       r0 | A | B |      r1 | C |       r2 |   |
    Evenly      each has as much as every other       r0 | A  B|        r1 |B  C|      r2 |C  |

Replicas are counted as ``shard_range`` counts (the outer axis fastest), and shards likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardwise.placements import SHARD, Placement, num_shards, shard_range

Span: TypeAlias = tuple[int, int]  # [begin, end) of a rank's part of a buffer
Piece: TypeAlias = tuple[int, int, int]  # (rank, low, high): elements [low, high) are stored there
CHUNK = 16  # elements: an even part is a multiple, so that it starts where vector loads like it


@dataclass(frozen=True)
class ByMatrix:
    """A range [low, high) of elements for each replica, (0, 0) for none."""

    ranges: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.ranges)

    def parts(self, shard: int, low: int, high: int) -> list[tuple[int, Span]]:
        """(replica, its range) of the elements [low, high), which ``shard`` stores."""
        found = enumerate(self.ranges)
        return [(replica, (max(begin, low), min(end, high))) for replica, (begin, end) in found
                if max(begin, low) < min(end, high)]  # fmt: skip

    def part(self, replica: int, shard: int, low: int, high: int) -> Span:
        """The range of one replica; (0, 0) for none."""
        begin, end = max(self.ranges[replica][0], low), min(self.ranges[replica][1], high)
        return (begin, end) if begin < end else (0, 0)


@dataclass(frozen=True)
class Evenly:
    """Equal parts of what a shard stores of several parameters, one after another: the first
    ``chunks[shard]`` elements for the first replica, and so on. This parameter's begin at
    ``offsets[shard]`` among them."""

    num_replicas: int
    chunks: tuple[int, ...]
    offsets: tuple[int, ...]

    def __len__(self) -> int:
        return self.num_replicas

    def parts(self, shard: int, low: int, high: int) -> list[tuple[int, Span]]:
        if low >= high:
            return []
        chunk, offset = self.chunks[shard], self.offsets[shard]
        first, last = offset // chunk, (offset + high - low - 1) // chunk
        return [(r, self.part(r, shard, low, high)) for r in range(first, last + 1)]

    def part(self, replica: int, shard: int, low: int, high: int) -> Span:
        chunk = self.chunks[shard]
        begin = low + replica * chunk - self.offsets[shard]
        begin, end = max(begin, low), min(begin + chunk, high)
        return (begin, end) if begin < end else (0, 0)


Division: TypeAlias = ByMatrix | Evenly


def divide_evenly(
    pieces: Sequence[Sequence[Piece]], num_shards: int, num_replicas: int
) -> list[Evenly]:
    """Divide parameters of one buffer between replicas, shard by shard. ``pieces``: the shards that
    store each parameter, in the buffer's order."""
    totals = [0] * num_shards
    offsets = []
    for held in pieces:
        offsets.append(tuple(totals))
        for shard, low, high in held:
            totals[shard] += high - low
    chunks = tuple(max(1, -(-total // (num_replicas * CHUNK))) * CHUNK for total in totals)
    return [Evenly(num_replicas, chunks, one) for one in offsets]


# ------------------------------------------------------------------------------ reductions


class Shares(NamedTuple):
    """The spans of a rank's part that a reduction over an axis of replicas brings to each rank."""

    shared: list[Span]  # to every rank of the axis
    divided: list[Span]  # to one rank each: all of them, those of the first rank first
    sizes: list[int]  # of the latter, by rank
    mine: list[Span]  # of the latter, this rank's
    even: bool  # whether a reduce-scatter of them brings them, padded a little at the end


def replica_shares(
    pieces: Sequence[tuple[int, int, int]],
    divisions: Mapping[int, Division],
    main: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    axis: int,
) -> Shares:
    """The shares of the ranks of one axis of replicas.

    ``pieces``, by item: the elements [low, high) that are here, from ``offset`` of the buffer on.
    Axes of replicas inside this one have been reduced over already:

        ranges of A B C D    at (outer, inner) (0, 0) (1, 0) (0, 1) (1, 1)
        inner axis, at 0     | A B | C D |  ->  | A B |
        outer axis, at 0     | A | B |      ->  | A |
    """
    replicated = [a for a, placement in enumerate(main) if placement != SHARD]
    shard = shard_range(main, sizes, coordinate, num_shards(main, sizes))[0]
    shared: list[Span] = []
    parts: list[list[Span]] = [[] for _ in range(sizes[axis])]
    for index, (low, high, offset) in enumerate(pieces):
        if low >= high:
            continue
        if index not in divisions:
            shared.append((offset, offset + high - low))
            continue
        for replica, (begin, end) in divisions[index].parts(shard, low, high):
            rest, place = replica, {}
            for a in replicated:
                rest, place[a] = divmod(rest, sizes[a])
            if all(place[a] == coordinate[a] for a in replicated if a > axis):
                parts[place[axis]].append((offset + begin - low, offset + end - low))
    parts = [joined(sorted(part)) for part in parts]
    lengths = [sum(end - begin for begin, end in part) for part in parts]
    divided = joined(span for part in parts for span in part)
    alike = all(isinstance(one, Evenly) for one in divisions.values()) and equal_parts(lengths)
    return Shares(shared, divided, lengths, parts[coordinate[axis]], alike)


def equal_parts(sizes: Sequence[int]) -> bool:
    """Whether these are the sizes of equal parts of a buffer that ends within the last ones."""
    ends = [min(sizes[0] * number, sum(sizes)) for number in range(len(sizes) + 1)]
    return list(sizes) == [end - begin for begin, end in itertools.pairwise(ends)]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same spans, in order, with neighbours that touch made one."""
    found: list[Span] = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
