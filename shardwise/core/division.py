# SPDX-License-Identifier: Apache-2.0
"""Division: which elements of a parameter each replica works on. Values and arithmetic only.

Replicas store the same weights. If an optimizer divides the work on a parameter between replicas,
the gradient is reduced to the replica that needs it, and the states are stored there only:

    ByMatrix    each replica has whole matrices       r0 | A | B |      r1 | C |       r2 |   |
    Evenly      each replica has an equal part        r0 | A  B|        r1 |B  C|      r2 |C  |

Replicas are counted as in ``shard_range`` (the outer axis fastest), and so are shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardwise.core.placements import SHARD, Placement, num_shards, shard_range

Span: TypeAlias = tuple[int, int]  # [begin, end) of a rank's part of a buffer
Piece: TypeAlias = tuple[int, int, int]  # (rank, low, high): elements [low, high) are stored there
CHUNK = 16  # elements; an even part is a multiple, so that it starts aligned for vector loads


@dataclass(frozen=True)
class ByMatrix:
    """A range [low, high) of elements for each replica; (0, 0) for none."""

    ranges: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.ranges)

    def parts(self, shard: int, low: int, high: int) -> list[tuple[int, Span]]:
        """(replica, its range) for each replica with some of the elements [low, high), which
        ``shard`` stores."""
        spans = (_overlap(begin, end, low, high) for begin, end in self.ranges)
        return [(replica, span) for replica, span in enumerate(spans) if any(span)]

    def part(self, replica: int, shard: int, low: int, high: int) -> Span:
        """The range of one replica; (0, 0) for none."""
        begin, end = self.ranges[replica]
        return _overlap(begin, end, low, high)


@dataclass(frozen=True)
class Evenly:
    """Equal parts of a shard's elements of several parameters, one after another: the first
    ``chunks[shard]`` elements belong to the first replica, and so on. The elements of this
    parameter begin at ``offsets[shard]``."""

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
        return _overlap(begin, begin + chunk, low, high)


Division: TypeAlias = ByMatrix | Evenly


def _overlap(begin: int, end: int, low: int, high: int) -> Span:
    begin, end = max(begin, low), min(end, high)
    return (begin, end) if begin < end else (0, 0)


def divide_evenly(
    pieces: Sequence[Sequence[Piece]], num_shards: int, num_replicas: int
) -> list[Evenly]:
    """Divide the parameters of one buffer between replicas, shard by shard. ``pieces``: for each
    parameter, in the buffer's order, the pieces that shards store."""
    totals = [0] * num_shards
    offsets = []
    for pieces_of_one in pieces:
        offsets.append(tuple(totals))
        for shard, low, high in pieces_of_one:
            totals[shard] += high - low
    chunks = tuple(max(1, -(-total // (num_replicas * CHUNK))) * CHUNK for total in totals)
    return [Evenly(num_replicas, chunks, offset) for offset in offsets]


# ------------------------------------------------------------------------------ reductions


class Shares(NamedTuple):
    """The spans of a rank's part that a reduction over an axis of replicas brings to each rank."""

    shared: list[Span]  # go to every rank of the axis
    divided: list[Span]  # go to one rank each; the spans of the first rank come first
    sizes: list[int]  # the elements of the divided spans of each rank
    mine: list[Span]  # the divided spans of this rank
    even: bool  # whether one reduce-scatter can bring the divided spans, with padding at the end


def replica_shares(
    pieces: Sequence[tuple[int, int, int]],
    divisions: Mapping[int, Division],
    main: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    axis: int,
) -> Shares:
    """The shares of the ranks of one axis of replicas.

    ``pieces``: for each item (low, high, offset), the elements [low, high) that this rank holds,
    which begin at ``offset`` of the buffer. Axes of replicas inside this one were reduced over
    before:

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
    even = all(isinstance(division, Evenly) for division in divisions.values())
    return Shares(shared, divided, lengths, parts[coordinate[axis]], even and equal_parts(lengths))


def equal_parts(sizes: Sequence[int]) -> bool:
    """Whether these are the sizes of equal parts of a buffer, apart from a shorter end."""
    ends = [min(sizes[0] * number, sum(sizes)) for number in range(len(sizes) + 1)]
    return list(sizes) == [end - begin for begin, end in itertools.pairwise(ends)]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The spans, in order, with adjacent spans joined into one."""
    result: list[Span] = []
    for begin, end in spans:
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result
