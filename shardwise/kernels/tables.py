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
    all lists share. The pieces of a list have one dtype.

    Tables are cached by their addresses, so the table of buffers that stay in place is copied to
    the device once.
    """
    rows: list[numpy.ndarray] = []
    for column in columns:
        if isinstance(column, Matrices):
            pieces, pointers = column.flats, column.addresses
            lengths = numpy.full(len(column), column.rows * column.columns, numpy.int64)
        else:
            pieces = column
            pointers = numpy.array([piece.data_ptr() for piece in column], numpy.int64)
            lengths = numpy.array([piece.numel() for piece in column], numpy.int64)
        assert all(piece.is_contiguous() for piece in pieces), "kernels walk pieces by address"
        assert len({piece.dtype for piece in pieces}) == 1, "one dtype for each list"
        assert not rows or len(rows[0]) == len(pointers), "lists of as many pieces"
        rows.append(pointers)
    rows.append(lengths)
    return _table(b"".join(row.tobytes() for row in rows), len(rows), pieces[0].device)


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
