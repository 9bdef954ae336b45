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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.errors import shown
from shardwise.core.layout import Box, Shape, boxes_of

_MAX_DIMENSIONS = 64
_TOO_MANY = 1 << 62  # elements
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

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
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


class Entry(NamedTuple):
    """A saved tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


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
    """The saved tensors, or those that a rank describes. Lists of holders, and entries that are
    alike (a weight's and its states'), are written once."""

    groups: list[tuple[int, ...]]
    alike: list[tuple[Entry, list[tuple[str, str]]]]

    @staticmethod
    def of(groups: Iterable[tuple[int, ...]], entries: Iterable[tuple[Key, Entry]]) -> Table:
        alike: dict[Entry, list[Key]] = {}
        for key, entry in entries:
            alike.setdefault(entry, []).append(key)
        return Table([*groups], [*alike.items()])

    def as_json(self) -> dict[str, Any]:
        """The fields, for ``typed`` to read; a dtype is its name."""
        return {"groups": self.groups, "alike": self.alike}

    @cached_property
    def entries(self) -> dict[Key, Entry]:
        return {key: entry for entry, keys in self.alike for key in keys}

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

    def check(self, num_ranks: int, num_bytes: int) -> None:
        """Raise a ``ValueError`` unless the pieces make whole tensors, of so many bytes at most."""
        if not all(rank < num_ranks for ranks in self.groups for rank in ranks):
            raise ValueError(f"a rank that is none of {num_ranks}")
        if len(self.entries) < sum(len(keys) for _, keys in self.alike):
            raise ValueError("a tensor stands there twice")
        for entry, keys in self.alike:
            if problem := self._problem(entry):
                raise ValueError(f"{shown(key_text(keys[0]) if keys else '')}: {problem}")
            num_bytes -= len(keys) * math.prod(entry.shape) * entry.dtype.itemsize
        if num_bytes < 0:
            raise ValueError("more bytes of tensors than of files")

    def _problem(self, entry: Entry) -> str | None:
        shape = entry.shape
        if len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= _TOO_MANY:
            return "the shape of no tensor"
        for tile in entry.tiles:
            last = max((run.holder + run.number for run in tile.runs), default=0)
            number = sum(run.number for run in tile.runs)
            if max(last, number) > len(self.groups[tile.group]):
                return "it has more pieces than there are holders"
            if sum(run.length * run.number for run in tile.runs) != math.prod(tile.sizes):
                return "its pieces are not as long as their tile"
            if not all(run.length and run.number for run in tile.runs):
                return "a run without elements"
        return covering_problem(shape, [(tile.offsets, tile.sizes) for tile in entry.tiles])


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


def covering_problem(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """The reason why boxes do not cover a tensor exactly once, or None. They must be a grid, as
    mesh axes make it:

    +-----+---+         dimension 0 is cut at 0, 2, 6; dimension 1 at 0, 5, 8;
    +-----+---+         and there is one box for each pair of intervals
    |     |   |
    +-----+---+
    """
    if not math.prod(shape):
        return "it has pieces, and no elements" if boxes else None
    if any(len(side) != len(shape) for box in boxes for side in box):
        return "a piece has other dimensions than the tensor"
    number = 1
    for dim, end in enumerate(shape):
        spans = sorted({(offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in boxes})
        if [0, *(high for _, high in spans)] != [*(low for low, _ in spans), end]:
            return f"its pieces do not follow each other along dimension {dim}"
        number *= len(spans)
    if not len({offsets for offsets, _ in boxes}) == len(boxes) == number:
        return "its pieces leave elements out, or hold some twice"
    return None
