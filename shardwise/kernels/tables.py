# SPDX-License-Identifier: Apache-2.0
"""Addresses of many tensors in one device tensor, so that one launch serves them all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes of the widest load; also the elements a piece should be a multiple of


@dataclass(frozen=True, kw_only=True)
class Table:
    """Addresses or lengths of pieces as int64: row k of ``entries`` [k, n] is column k."""

    entries: Tensor
    aligned: bool  # every address and length allows the widest loads
    longest: int


def addresses(columns: Sequence[Sequence[Tensor]]) -> Table:
    """One row of addresses for each of ``columns``, then one row of lengths, which must agree.

    Cached by address: the table of buffers that stay in place is copied to the device once.
    """
    lengths = tuple(piece.numel() for piece in columns[0])
    problems = [
        f"piece {index}: {[column[index].numel() for column in columns]} elements; they must agree"
        for index in range(len(lengths))
        if len({column[index].numel() for column in columns}) > 1
    ]
    problems += [
        f"piece {index} of list {position} is not contiguous: kernels walk it by address"
        for position, column in enumerate(columns)
        for index, piece in enumerate(column)
        if not piece.is_contiguous()
    ]
    problems += [
        f"list {position} mixes {sorted({str(piece.dtype) for piece in column})}: one dtype a call"
        for position, column in enumerate(columns)
        if len({piece.dtype for piece in column}) > 1
    ]
    if problems:
        raise ValueError("; ".join(problems))
    pointers = tuple(tuple(piece.data_ptr() for piece in column) for column in columns)
    return _table(pointers, lengths, columns[0][0].device)


@functools.lru_cache(maxsize=256)
def _table(
    pointers: tuple[tuple[int, ...], ...], lengths: tuple[int, ...], device: torch.device
) -> Table:
    rows = (*pointers, lengths)
    host = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()
    return Table(
        entries=host.to(device, non_blocking=True),
        aligned=all(number % ALIGNMENT == 0 for row in rows for number in row),
        longest=max(lengths),
    )
