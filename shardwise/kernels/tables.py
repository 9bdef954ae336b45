# SPDX-License-Identifier: Apache-2.0
"""Addresses of many tensors in one device tensor, so that one launch serves them all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes of the widest load; lengths of pieces should be multiples of it, too


class Matrices(Sequence[Tensor]):
    """Equal contiguous matrices inside flat tensors: a sequence of [rows, columns] views.

    Kernels need addresses alone. Views are made on demand, because a thousand views (the experts of
    a model) take the host longer than the device takes for the whole step.
    """

    def __init__(
        self, flats: Sequence[Tensor], offsets: Sequence[numpy.ndarray], rows: int, columns: int
    ) -> None:
        """``offsets``: where the matrices in each of ``flats`` begin, in elements."""
        self.flats, self.rows, self.columns = flats, rows, columns
        self.offsets = numpy.concatenate(offsets)
        # By matrix: the number of its flat tensor.
        self.places = numpy.repeat(numpy.arange(len(flats)), list(map(len, offsets)))

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, key: int) -> Tensor: ...
    @overload
    def __getitem__(self, key: slice) -> Matrices: ...
    def __getitem__(self, key: int | slice) -> Tensor | Matrices:
        if isinstance(key, slice):
            part = Matrices([], [self.offsets[key]], self.rows, self.columns)
            part.flats, part.places = self.flats, self.places[key]
            return part
        begin = int(self.offsets[key])
        flat: Tensor = self.flats[self.places[key]][begin : begin + self.rows * self.columns]
        return flat.view(self.rows, self.columns)

    @property
    def addresses(self) -> numpy.ndarray:
        """The address of each matrix: [n] int64."""
        bases = numpy.array([flat.data_ptr() for flat in self.flats], numpy.int64)
        places: numpy.ndarray = bases[self.places] + self.offsets * self.flats[0].element_size()
        return places


@dataclass(frozen=True, kw_only=True)
class Table:
    """Addresses or lengths of pieces, as int64 [k, n]: row k belongs to list k of pieces."""

    entries: Tensor
    aligned: bool  # every address and length allows the widest loads
    longest: int


def addresses(columns: Sequence[Sequence[Tensor]]) -> Table:
    """One row of addresses for each list of pieces in ``columns``, then one row of lengths, which
    must be equal.

    Tables are cached by their addresses, so the table of buffers that stay in place is copied to
    the device once.
    """
    lengths = [_lengths(column) for column in columns]
    problems = []
    if any(not numpy.array_equal(lengths[0], other) for other in lengths):
        problems = [
            f"piece {index}: {list(map(int, numels))} elements; they must agree"
            for index, numels in enumerate(zip(*lengths, strict=True))
            if len(set(numels)) > 1
        ]
    for position, column in enumerate(columns):
        pieces = column.flats if isinstance(column, Matrices) else column
        problems += [
            f"piece {index} of list {position} is not contiguous: kernels walk it by address"
            for index, piece in enumerate(pieces)
            if not piece.is_contiguous()
        ]
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) > 1:
            problems.append(f"list {position} mixes {sorted(map(str, dtypes))}: one dtype a call")
    if problems:
        raise ValueError("; ".join(problems))
    rows = [*map(_pointers, columns), lengths[0]]
    return _table(b"".join(row.tobytes() for row in rows), len(rows), columns[0][0].device)


def _lengths(column: Sequence[Tensor]) -> numpy.ndarray:
    if isinstance(column, Matrices):
        return numpy.full(len(column), column.rows * column.columns, numpy.int64)
    return numpy.array([piece.numel() for piece in column], numpy.int64)


def _pointers(column: Sequence[Tensor]) -> numpy.ndarray:
    if isinstance(column, Matrices):
        return column.addresses
    return numpy.array([piece.data_ptr() for piece in column], numpy.int64)


@functools.lru_cache(maxsize=256)
def _table(numbers: bytes, num_rows: int, device: torch.device) -> Table:
    rows = numpy.frombuffer(numbers, numpy.int64).reshape(num_rows, -1)
    host = torch.from_numpy(rows.copy())
    if device.type == "cuda":
        host = host.pin_memory()
    return Table(
        entries=host.to(device, non_blocking=True),
        aligned=not bool((rows % ALIGNMENT).any()),
        longest=int(rows[-1].max()),
    )
