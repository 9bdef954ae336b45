# SPDX-License-Identifier: Apache-2.0
"""The table of a checkpoint: which rank's file holds which elements of which tensor.

A tensor is cut into tiles (tensor parallelism cuts some by columns; without it there is one), and
each tile, row by row, into consecutive pieces in the files of some ranks. Pieces that are alike are
one run, so the table has a few numbers for each tensor, for any number of ranks:

    weight [8, 100] over 4 ranks       elements 0-149   150-399   400-649   650-799
                                       in the file of rank 0      rank 1    rank 2    rank 3
    runs   (rank 0, 150 elements), (ranks 1, 2: 250 elements each), (rank 3, 150 elements)

The numbers are results: no reader repeats the packing that led to them. The pieces of a tile cannot
overlap, and leave nothing out if their lengths add up to the tile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from shardwise.checkpoint.errors import shown
from shardwise.core.layout import Box, Shape, boxes_of

MAX_DIMENSIONS = 64
_TOO_MANY = 1 << 62  # elements or bytes
_MAX_CUT_DIMENSIONS = 10


class Run(NamedTuple):
    """``number`` pieces of ``length`` elements in the files of ``rank``, ``rank + step``, ..., all
    of that ``times`` times, each time ``shift`` ranks further."""

    rank: int
    step: int
    length: int
    number: int
    shift: int = 0
    times: int = 1

    @property
    def num_elements(self) -> int:
        return self.length * self.number * self.times

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest rank."""
        steps, shifts = self.step * (self.number - 1), self.shift * (self.times - 1)
        low = self.rank + min(steps, 0) + min(shifts, 0)
        return low, self.rank + max(steps, 0) + max(shifts, 0)


class Saved(NamedTuple):
    """A saved piece: the elements [low, high) of a tile, in the file of a rank."""

    rank: int
    low: int
    high: int


class Tile(NamedTuple):
    """A box of a tensor, and the runs of pieces that it is cut into."""

    offsets: Shape
    sizes: Shape
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def pieces(self, low: int, high: int) -> Iterator[Saved]:
        """The saved pieces with elements of [low, high)."""
        begin = 0
        for run in self.runs:
            first = max(0, (low - begin) // run.length)
            last = min(run.number * run.times, -(-(high - begin) // run.length))
            for index in range(first, last):
                time, place = divmod(index, run.number)
                at = begin + index * run.length
                rank = run.rank + time * run.shift + place * run.step
                yield Saved(rank, at, at + run.length)
            begin += run.num_elements

    def boxes(self, saved: Saved) -> list[tuple[Box, int]]:
        """The boxes of the tensor that a piece is, in order, each with its first element."""
        found, at = [], 0
        for offsets, sizes in boxes_of(self.sizes, saved.low, saved.high):
            begins = tuple(a + b for a, b in zip(self.offsets, offsets, strict=True))
            found.append(((begins, sizes), at))
            at += math.prod(sizes)
        return found

    def overlap(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Saved]:
        """The saved pieces that may have elements of a box of the tensor."""
        low, high = 0, 0
        dims = zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        for mine, length, begin, size in dims:
            first, last = max(mine, begin) - mine, min(mine + length, begin + size) - mine - 1
            if first > last:
                return
            low, high = low * length + first, high * length + last
        yield from self.pieces(low, high + 1)


@dataclass(frozen=True)
class Entry:
    """A saved tensor."""

    shape: Shape
    dtype: torch.dtype
    tiles: tuple[Tile, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def first_element(self, tile: Tile, low: int) -> int:
        """The number in the tensor of element ``low`` of a tile."""
        return first_element(self.shape, tile.offsets, tile.sizes, low)

    def piece_name(self, key: str, tile: Tile, saved: Saved) -> str:
        """The name of a piece in the file of its rank."""
        first = self.first_element(tile, saved.low)
        return piece_name(key, first, saved.high - saved.low == self.numel)


def first_element(shape: Shape, offsets: Shape, sizes: Shape, low: int) -> int:
    """The number in a tensor of element ``low`` of a box."""
    place, stride = 0, 1
    for length, offset, size in zip(
        reversed(shape), reversed(offsets), reversed(sizes), strict=True
    ):
        low, at = divmod(low, size) if size else (low, 0)
        place, stride = place + (offset + at) * stride, stride * length
    return place


def piece_name(key: str, first: int, whole: bool) -> str:
    """``weight`` for a whole tensor, else ``weight@150``: its piece that begins at element 150."""
    return key if whole else f"{key}@{first}"


# ------------------------------------------------------------------------------ making a table


def runs_of(
    ranks: Sequence[int] | numpy.ndarray, lengths: Sequence[int] | numpy.ndarray
) -> list[Run]:
    """The runs of consecutive pieces. Empty pieces are left out."""
    where, sizes = numpy.asarray(ranks, numpy.int64), numpy.asarray(lengths, numpy.int64)
    where, sizes = where[sizes > 0], sizes[sizes > 0]
    steps, unlike = numpy.diff(where), numpy.diff(sizes) != 0
    turns = unlike.copy()
    turns[1:] |= steps[1:] != steps[:-1]
    breaks = [*numpy.flatnonzero(turns).tolist(), len(where) - 1]
    runs, first = [], 0
    for last in breaks:  # the piece after which a run may end
        if last < first or (last == first < len(unlike) and not unlike[first]):
            continue  # the first step of a run is none that differs
        step = int(steps[first]) if last > first else 0
        runs.append(Run(int(where[first]), step, int(sizes[first]), last + 1 - first))
        first = last + 1
    return _repeated(runs)


def _repeated(runs: Iterable[Run]) -> list[Run]:
    """Runs that differ in their ranks alone, by equal shifts, as one."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1][1:4] == run[1:4] and run.times == 1:
            last = found[-1]
            shift = run.rank - (last.rank + last.shift * (last.times - 1))
            if last.times == 1 or shift == last.shift:
                found[-1] = last._replace(shift=shift, times=last.times + 1)
                continue
        found.append(run)
    return found


def joined(shape: Shape, tiles: list[Tile]) -> tuple[Tile, ...]:
    """The tiles in order; those that are whole rows of the tensor, one after the other, as one."""
    tiles = sorted(tiles, key=lambda tile: tile.offsets)
    if len(tiles) < 2 or any(tile.sizes[1:] != shape[1:] for tile in tiles):
        return tuple(tiles)
    ends = [tile.offsets[0] + tile.sizes[0] for tile in tiles]
    if [tile.offsets[0] for tile in tiles] != [0, *ends[:-1]] or ends[-1] != shape[0]:
        return tuple(tiles)
    runs = _repeated(run for tile in tiles for run in tile.runs)
    return (Tile((0,) * len(shape), shape, tuple(runs)),)


def problem_of(entry: Entry, num_ranks: int) -> str | None:
    """The reason why an entry is no whole tensor in the files of ``num_ranks`` ranks, or None."""
    for tile in entry.tiles:
        held = sum(run.num_elements for run in tile.runs)
        if sum(run.number * run.times for run in tile.runs) > num_ranks:
            return f"it has more pieces than there are ranks, {num_ranks}"
        if held != tile.numel:
            return f"its pieces hold {held} of {tile.numel} elements"
        for run in tile.runs:
            low, high = run.ends
            if low < 0 or high >= num_ranks:
                return f"it names the rank {low if low < 0 else high} of {num_ranks}"
    return tiling_problem(entry.shape, [(tile.offsets, tile.sizes) for tile in entry.tiles])


def tiling_problem(shape: Shape, boxes: list[Box]) -> str | None:
    """The reason why boxes do not cover a tensor exactly once, or None.

    The boxes must have as many elements as the tensor, none outside, none in two boxes. The last
    check uses corners, in time linear in the number of boxes. A corner counts +1 if it is the high
    end of its box in an even number of dimensions, else -1. The running totals of these numbers
    along all dimensions are how often each element is covered. So the corners of the boxes must add
    up to the corners of the whole tensor.

        +-----+-----+         inner corners cancel: +1 and -1 of neighbours
        |     |     |
        +-----+-----+
    """
    for offsets, sizes in boxes:
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > end for offset, size, end in zip(offsets, sizes, shape, strict=True)
        ):
            return f"a piece at {list(offsets)} of {list(sizes)} lies outside {list(shape)}"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"its pieces hold {covered} of {math.prod(shape)} elements"
    boxes = [box for box in boxes if math.prod(box[1])]
    cut = [dim for dim, end in enumerate(shape) if any(sizes[dim] != end for _, sizes in boxes)]
    if len(cut) > _MAX_CUT_DIMENSIONS:
        return f"it is cut along {len(cut)} dimensions, {_MAX_CUT_DIMENSIONS} can be checked"
    whole = ((0,) * len(shape), shape)
    sums: dict[tuple[int, ...], int] = {}
    for sign, (offsets, sizes) in ((-1, whole), *((1, box) for box in boxes)):
        ends = (((offsets[d], 1), (offsets[d] + sizes[d], -1)) for d in cut)
        for corner in itertools.product(*ends):
            key = tuple(place for place, _ in corner)
            sums[key] = sums.get(key, 0) + sign * math.prod(low for _, low in corner)
    odd = [key for key, total in sums.items() if total]
    return f"two pieces hold the elements around {list(min(odd))}" if covered and odd else None


# ------------------------------------------------------------------------------ JSON


def to_json(entry: Entry, dtype: str) -> list[Any]:
    tiles = [[tile.offsets, tile.sizes, _runs_json(tile.runs)] for tile in entry.tiles]
    return [dtype, entry.shape, tiles]


def _runs_json(runs: Iterable[Run]) -> list[list[int]]:
    return [list(run if run.times > 1 else run[:4]) for run in runs]


def tiles_from(values: Any) -> tuple[Tile, ...]:
    """The tiles in the JSON of an entry or of a rank's part; raises what unpacking raises."""
    tiles = []
    for offsets, sizes, runs in values:
        found = tuple(_run(*run) for run in runs)
        tiles.append(Tile(shape_from(offsets), shape_from(sizes), found))
    return tuple(tiles)


def _run(rank: Any, step: Any, length: Any, number: Any, shift: Any = 0, times: Any = 1) -> Run:
    run = Run(rank, step, length, number, shift, times)
    if any(type(value) is not int or abs(value) >= _TOO_MANY for value in run):
        raise TypeError(f"{shown(run)} in the place of numbers")
    if min(length, number, times) < 1:
        raise ValueError("a run without elements")
    return run


def shape_from(value: Any) -> Shape:
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        raise TypeError(f"{shown(value)} in the place of a shape")
    if any(type(size) is not int or not 0 <= size < _TOO_MANY for size in value):
        raise TypeError("no size in a shape")
    if math.prod(size or 1 for size in value) >= _TOO_MANY:
        raise ValueError(f"{value} is the shape of no tensor")
    return tuple(value)
