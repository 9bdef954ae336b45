# SPDX-License-Identifier: Apache-2.0
"""Split: how a fused weight is divided into matrices, which are orthogonalised separately.

Orthogonalising a fused weight as one matrix mixes parts that the layer keeps separate: query and
key, gate and up, one expert and the next. One pattern describes every common fusion: blocks of
``sizes`` rows (or columns), repeated to the end of the dimension.

    Split.stacked(4, 2, 2)       | q q q q | k k | v v |                  3 matrices
    Split.interleaved(2)         | g u g u g u g u |                      gate and up, row by row
    Split.grouped(2, 2, 1, 1)    | q q k v | q q k v |                    per query group
    Split.heads(4)               | h0 h0 | h1 h1 | h2 h2 | h3 h3 |        4 equal blocks
    Split.heads(4, dim=1)        the same over columns (an attention output projection)

Leading dimensions are a batch: ``[experts, out, in]`` holds a matrix for each expert, and all are
split in the same way.

One rank owns a :class:`Matrix`: a contiguous run of rows of the parameter. A stacked block is one
Matrix. Interleaved blocks share one Matrix, and the owner separates them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from shardwise.core.division import Piece as Piece  # (rank on the shard axis, low, high)
from shardwise.core.layout import Shape


@dataclass(frozen=True, kw_only=True)
class Split:
    """Blocks of ``sizes`` along ``dim``, repeated; or ``parts`` equal blocks."""

    sizes: tuple[int, ...] = ()
    parts: int = 0
    dim: int = 0
    groups: int = 0  # how often ``sizes`` repeat; 0: to the end of the dimension

    def __post_init__(self) -> None:
        counts = all(isinstance(size, int) and size > 0 for size in self.sizes)
        if bool(self.sizes) == (self.parts > 0) or not counts or self.dim not in (0, 1):
            raise ValueError(
                f"a split needs either sizes of 1 or more rows, or parts, along dim 0 (rows) or 1 "
                f"(columns): sizes={self.sizes}, parts={self.parts}, dim={self.dim}"
            )

    @staticmethod
    def stacked(*sizes: int, dim: int = 0) -> Split:
        """Blocks one after another, once: ``stacked(q_rows, k_rows, v_rows)``."""
        return Split(sizes=tuple(sizes), dim=dim, groups=1)

    @staticmethod
    def interleaved(parts: int, *, dim: int = 0) -> Split:
        """Row ``i`` belongs to block ``i % parts``: gate and up, row by row."""
        return Split(sizes=(1,) * parts, dim=dim)

    @staticmethod
    def grouped(groups: int, *sizes: int) -> Split:
        """The blocks of every query group side by side: ``grouped(groups, q, k, v)``, with the rows
        of one group. Each block, gathered over the groups, is one matrix."""
        return Split(sizes=tuple(sizes), groups=groups)

    @staticmethod
    def heads(count: int, *, dim: int = 0) -> Split:
        """``count`` equal blocks, each a matrix: per-head Muon, equal halves."""
        return Split(parts=count, dim=dim)

    def problem(self, shape: Shape) -> str | None:
        """Why a parameter of this shape cannot be split in this way, or None."""
        length, lines = shape[-2 + self.dim], ("rows", "columns")[self.dim]
        total = self.parts or sum(self.sizes) * (self.groups or 1)
        if length % total or (self.groups and total != length):
            return f"{length} {lines} do not divide into {self}"
        return None

    def resolved(self, shape: Shape) -> tuple[int, tuple[int, ...]]:
        """(how often the blocks repeat, their sizes) for a matrix of this shape."""
        length = shape[-2 + self.dim]
        if self.parts:
            return 1, (length // self.parts,) * self.parts
        return length // sum(self.sizes), self.sizes

    def within(self, shape: Shape, dim: int, count: int, block: int) -> tuple[Split, bool] | None:
        """The split of one of ``count`` equal blocks of tensor parallelism along ``dim``, and
        whether the matrices in it are whole; None if a matrix would be cut unevenly.

            heads(4) over 2 blocks           | h0 h1 | h2 h3 |         whole, two in each
            stacked(4, 2, 2) over 2          | q q q q | k k v v |     whole, one and two
            interleaved(2) over 2            | g u g u | g u g u |     each cut into two halves
            any split, along the other dim                             each cut like the weight
        """
        if dim != self.dim:
            return self, False
        repeats, sizes = self.resolved(shape)
        if repeats > 1:
            groups = self.groups // count
            inside = repeats % count == 0
            return (Split(sizes=sizes, dim=dim, groups=groups), False) if inside else None
        step = shape[-2 + dim] // count
        bounds = [0, *itertools.accumulate(sizes)]
        if any(step * number not in bounds for number in range(count)):
            return None
        first, end = bounds.index(step * block), bounds.index(step * (block + 1))
        return Split(sizes=sizes[first:end], dim=dim, groups=1), True

    def __str__(self) -> str:
        where = ", dim=1" if self.dim else ""
        if self.parts:
            return f"heads({self.parts}{where})"
        if set(self.sizes) == {1} and not self.groups:
            return f"interleaved({len(self.sizes)}{where})"
        groups = f"{self.groups} x " if self.groups > 1 else ""
        return f"stacked({groups}{', '.join(map(str, self.sizes))}{where})"


@dataclass(frozen=True)
class Matrix:
    """The unit of ownership: elements [start, start + rows * cols) of a parameter.

    Without ``sizes`` the elements are one matrix [rows, cols]. Otherwise blocks of ``sizes`` repeat
    ``groups`` times along ``dim``, and the repeats of each block form one matrix.

    The fields from ``name`` on contain the place and the cost of the matrix; ownership.py assigns
    owners by them alone.
    """

    start: int
    rows: int
    cols: int
    groups: int = 1
    sizes: tuple[int, ...] = ()
    dim: int = 0
    name: str = ""
    parameter: int = -1  # the position of the parameter; -1: the matrix is the whole parameter
    pieces: tuple[Piece, ...] = ()  # in order, with elements counted from ``start``
    cost: int = 0
    pinned: bool = False  # the layout stores it whole on purpose, on the rank that owns it

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The (rows, columns) of all matrices in it that are orthogonalised."""
        if not self.sizes:
            return ((self.rows, self.cols),)
        if self.dim == 0:
            return tuple((self.groups * size, self.cols) for size in self.sizes)
        return tuple((self.rows, self.groups * size) for size in self.sizes)

    def take(self, whole: Tensor) -> list[Tensor]:
        """The matrices of :attr:`shapes` in ``whole`` [rows, cols], as views where possible."""
        if not self.sizes:
            return [whole]
        blocks = self._blocks(whole)
        return [block.reshape(shape) for block, shape in zip(blocks, self.shapes, strict=True)]

    def put(self, whole: Tensor, index: int, value: Tensor) -> None:
        """Write one of the matrices that :meth:`take` returns to its place in ``whole``."""
        if not self.sizes:
            whole.copy_(value)
            return
        block = self._blocks(whole)[index]
        block.copy_(value.reshape(block.shape))

    def _blocks(self, whole: Tensor) -> list[Tensor]:
        if self.dim == 0:  # [rows, cols] -> [groups, sum of sizes, cols]
            seen = whole.view(self.groups, sum(self.sizes), self.cols)
            return list(seen.split(self.sizes, dim=1))
        seen = whole.view(self.rows, self.groups, sum(self.sizes))
        return list(seen.split(self.sizes, dim=2))


def matrices_of(shape: Shape, split: Split | None) -> tuple[Matrix, ...]:
    """The matrices of a parameter ``[..., out, in]``, in order; together they cover it."""
    rows, cols = shape[-2:]
    groups, sizes = (1, (rows,)) if split is None else split.resolved(shape)
    matrices: list[Matrix] = []
    for number in range(prod(shape[:-2])):
        start = number * rows * cols
        if split is None or (groups == 1 and split.dim == 0):
            for size in sizes:
                matrices.append(Matrix(start, size, cols))
                start += size * cols
        else:
            matrices.append(Matrix(start, rows, cols, groups, sizes, split.dim))
    return tuple(matrices)


def stored_matrices(
    matrices: Sequence[Matrix],
    pieces: Sequence[Piece],
    cost: Callable[[int, int], int],
    *,
    name: str = "",
    **facts: Any,
) -> list[Matrix]:
    """The matrices of one parameter with pieces, costs and other ``facts``. Matrices and pieces are
    sorted by element."""
    found: list[Matrix] = []
    first = 0
    for number, matrix in enumerate(matrices):
        start, end = matrix.start, matrix.start + matrix.numel
        while first < len(pieces) and pieces[first][2] <= start:
            first += 1
        stored = []
        for rank, lo, hi in pieces[first:]:
            if lo >= end:
                break
            stored.append((rank, max(lo, start) - start, min(hi, end) - start))
        changes: dict[str, Any] = {
            "name": name if len(matrices) == 1 else f"{name}[{number}]",
            "pieces": tuple(stored),
            "cost": sum(cost(rows, cols) for rows, cols in matrix.shapes),
        }
        found.append(replace(matrix, **changes, **facts))
    return found
