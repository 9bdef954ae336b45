# SPDX-License-Identifier: Apache-2.0
"""The table of a checkpoint: which rank's file holds which elements of which tensor.

A tensor is cut into tiles (tensor parallelism and experts cut some; without them there is one), and
each tile, row by row, into consecutive pieces in the files of a list of ranks, its *holders*.
Pieces of one length are a run, so a tensor takes a few numbers, for any number of ranks:

    weight [8, 100] over 4 ranks       elements 0-149   150-399   400-649   650-799
                                       in the file of rank 0      rank 1    rank 2    rank 3
    runs   (holder 0, 150 elements), (from holder 1: 250 elements, 2 times), (holder 3, 150)

The numbers are results: no reader repeats the packing that led to them. The pieces of a tile cannot
overlap, and leave nothing out if their lengths add up to the tile. Saving makes the table;
``Table.parts`` is the walk over it that loading, verifying and exporting share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.errors import shown
from shardwise.checkpoint.values import dtype_name, dtype_of
from shardwise.core.layout import Box, Shape, boxes_of

_MAX_DIMENSIONS = 64
_TOO_MANY = 1 << 62  # elements or bytes
Key = tuple[str, str]  # a parameter or buffer, and the key of a state of it ("": itself)


def key_text(key: Key) -> str:
    """The name of a tensor in files and messages."""
    name, state = key
    return f"optimizer.state.{name}.{state}" if state else f"model.{name}"


class Run(NamedTuple):
    """``number`` pieces of ``length`` elements, of ``holder`` and those that follow it."""

    holder: int
    length: int
    number: int


def runs_of(pieces: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """The runs of consecutive pieces, (holder, elements) each. Empty pieces are left out."""
    runs: list[Run] = []
    for holder, length in pieces:
        last = runs[-1] if runs else None
        if last and (last.holder + last.number, last.length) == (holder, length):
            runs[-1] = last._replace(number=last.number + 1)
        elif length:
            runs.append(Run(holder, length, 1))
    return tuple(runs)


class Tile(NamedTuple):
    """A box of a tensor, and its pieces."""

    offsets: Shape
    sizes: Shape
    group: int  # the number of its list of holders in the table
    runs: tuple[Run, ...]

    def pieces(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """(holder, begin, end) of the pieces with elements of [low, high)."""
        at = 0
        for run in self.runs:
            first = max(0, (low - at) // run.length)
            last = min(run.number, -(-(high - at) // run.length))
            for number in range(first, last):
                begin = at + number * run.length
                yield run.holder + number, begin, begin + run.length
            at += run.length * run.number


@dataclass(frozen=True)
class Entry:
    """A saved tensor."""

    dtype: torch.dtype
    shape: Shape
    tiles: tuple[Tile, ...]

    @property
    def nbytes(self) -> int:
        """The bytes in files, as far as the tiles say."""
        return sum(math.prod(tile.sizes) for tile in self.tiles) * self.dtype.itemsize

    def experts_among(self, first: int, count: int) -> int:
        """How many of these experts have a part of the tensor: frozen ones have no states."""
        spans = {(tile.offsets[0], tile.offsets[0] + tile.sizes[0]) for tile in self.tiles}
        ends = ((max(first, low), min(first + count, high)) for low, high in spans)
        return sum(max(0, high - low) for low, high in ends)


class Part(NamedTuple):
    """A box of a tensor that lies in a piece, one element after the other."""

    rank: int  # in the file of this rank
    name: str  # of the piece in that file
    numel: int  # elements of the whole piece
    first: int  # the first element of the box in the piece
    offsets: Shape  # of the box in the tensor
    sizes: Shape


@dataclass
class Table:
    """The saved tensors, or those that a rank describes. Lists of holders are written once."""

    groups: list[tuple[int, ...]] = field(default_factory=list)
    entries: dict[Key, Entry] = field(default_factory=dict)

    def add(self, key: Key, dtype: torch.dtype, shape: Shape, tiles: Sequence[Tile]) -> None:
        """Add tiles of a tensor."""
        known = self.entries[key].tiles if key in self.entries else ()
        self.entries[key] = Entry(dtype, shape, (*known, *tiles))

    @property
    def alike(self) -> dict[Entry, list[Key]]:
        """The tensors of each kind: a weight and its states are often alike."""
        found: dict[Entry, list[Key]] = {}
        for key, entry in self.entries.items():
            found.setdefault(entry, []).append(key)
        return found

    def parts(self, key: Key, offsets: Shape, sizes: Shape) -> Iterator[Part]:
        """The parts that may have elements of a box of a tensor."""
        entry = self.entries[key]
        for tile in entry.tiles:
            low = high = 0
            for mine, length, begin, size in zip(
                tile.offsets, tile.sizes, offsets, sizes, strict=True
            ):
                first, last = max(mine, begin) - mine, min(mine + length, begin + size) - mine - 1
                if first > last:
                    break
                low, high = low * length + first, high * length + last
            else:
                for holder, begin, end in tile.pieces(low, high + 1):
                    name, at = piece_name(key, entry.shape, tile, begin, end), 0
                    for inside, sides in boxes_of(tile.sizes, begin, end):
                        place = tuple(map(sum, zip(tile.offsets, inside, strict=True)))
                        rank = self.groups[tile.group][holder]
                        yield Part(rank, name, end - begin, at, place, sides)
                        at += math.prod(sides)

    def check(self, num_ranks: int, with_gaps: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` unless the pieces make whole tensors. Of the parameters
        ``with_gaps``, the states of some experts may be missing."""
        if not all(0 <= rank < num_ranks for ranks in self.groups for rank in ranks):
            raise ValueError(f"a rank that is none of {num_ranks}")
        for entry, keys in self.alike.items():
            gaps = all(state and name in with_gaps for name, state in keys)
            boxes = [(tile.offsets, tile.sizes) for tile in entry.tiles]
            problem = covering_problem(entry.shape, boxes, gaps)
            for tile in entry.tiles:
                if sum(run.length * run.number for run in tile.runs) != math.prod(tile.sizes):
                    problem = "its pieces are not as long as their tile"
                last = max((run.holder + run.number for run in tile.runs), default=0)
                if max(last, sum(run.number for run in tile.runs)) > len(self.groups[tile.group]):
                    problem = "it has more pieces than there are holders"
            if problem:
                raise ValueError(f"{shown(key_text(keys[0]))}: {problem}")

    # ------------------------------------------------------------------ JSON

    def to_json(self) -> dict[str, Any]:
        tensors = [
            [dtype_name(entry.dtype), entry.shape, entry.tiles, keys]
            for entry, keys in self.alike.items()
        ]
        return {"groups": self.groups, "tensors": tensors}

    @staticmethod
    def from_json(value: Any) -> Table:
        """The inverse; raises what unpacking raises."""
        table = Table([_sizes(ranks) for ranks in value["groups"]])
        for dtype, shape, tiles, keys in value["tensors"]:
            found = []
            for offsets, sizes, group, runs in tiles:
                [group] = _sizes([group])
                table.groups[group]  # raises if there is none
                many = tuple(Run(*_sizes(run)) for run in runs)
                if not all(run.length and run.number for run in many):
                    raise ValueError("a run without elements")
                found.append(Tile(_sizes(offsets), _sizes(sizes), group, many))
            entry = Entry(dtype_of(dtype, "a tensor"), _sizes(shape), tuple(found))
            if len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= _TOO_MANY:
                raise ValueError("the shape of no tensor")
            for name, state in keys:
                if {type(name), type(state)} != {str} or (name, state) in table.entries:
                    raise ValueError(f"{shown(name)} is no name of a tensor, or stands there twice")
                table.entries[name, state] = entry
        return table


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or {*map(type, value)} - {int}:
        raise TypeError(f"{shown(value)} in the place of numbers")
    if value and not 0 <= min(value) <= max(value) < _TOO_MANY:
        raise ValueError("a number that is too large, or below 0")
    return tuple(value)


def piece_name(key: Key, shape: Shape, tile: Tile, begin: int, end: int) -> str:
    """``model.weight`` for a whole tensor, else ``model.weight@150``: the piece whose first element
    is number 150 of the tensor."""
    if end - begin == math.prod(shape):
        return key_text(key)
    place, stride, low = 0, 1, begin
    dims = zip(reversed(shape), reversed(tile.offsets), reversed(tile.sizes), strict=True)
    for length, offset, size in dims:
        low, at = divmod(low, size)
        place, stride = place + (offset + at) * stride, stride * length
    return f"{key_text(key)}@{place}"


def covering_problem(shape: Shape, boxes: Sequence[Box], gaps: bool = False) -> str | None:
    """The reason why boxes do not cover a tensor exactly once, or None. They must be a grid, as
    mesh axes make it:

    +-----+---+         dimension 0 is cut at 0, 2, 6; dimension 1 at 0, 5, 8;
    +-----+---+         and there is one box for each pair of intervals
    |     |   |
    +-----+---+
    """
    if not math.prod(shape):
        return "it has pieces, and no elements" if boxes else None
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return "a piece has other dimensions than the tensor"
    spans: list[set[tuple[int, int]]] = [set() for _ in shape]
    for offsets, sizes in boxes:
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            spans[dim].add((offset, offset + size))
    for dim, end in enumerate(shape):
        chain = [(0, 0), *sorted(spans[dim]), (end, end)]
        holes = [after[0] - before[1] for before, after in pairwise(chain)]
        if min(holes) < 0 or (max(holes) > 0 and not (gaps and dim == 0)):
            return f"its pieces do not follow each other along dimension {dim}"
    if not len({offsets for offsets, _ in boxes}) == len(boxes) == math.prod(map(len, spans)):
        return "its pieces leave elements out, or hold some twice"
    return None
