# SPDX-License-Identifier: Apache-2.0
"""Reductions between replicas that divide a buffer: some spans go to all, others to one replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise import comm
from shardwise.memory import counted
from shardwise.placements import Span


def reduce_spans(
    flat: Tensor,
    shared: Sequence[Span],
    parts: Sequence[Sequence[Span]],
    link: comm.Axis,
    divisor: float | None,
) -> Iterator[comm.Pending]:
    """Reduce in place: the ``shared`` spans to every rank, ``parts[rank]`` to each rank alone."""
    if shared:
        yield from _reduce_shared(flat, shared, link, divisor)
    if any(parts):
        yield from _reduce_parts(flat, parts, link, divisor)


def _reduce_shared(
    flat: Tensor, spans: Sequence[Span], link: comm.Axis, divisor: float | None
) -> Iterator[comm.Pending]:
    packed = _pack(flat, spans)
    yield comm.all_reduce(packed, link, divisor=divisor)
    _unpack(flat, spans, packed)


def _reduce_parts(
    flat: Tensor, parts: Sequence[Sequence[Span]], link: comm.Axis, divisor: float | None
) -> Iterator[comm.Pending]:
    """Reduce to each rank its own part; the memory of the other parts is undefined afterwards."""
    packed = _pack(flat, [span for part in parts for span in part])
    sizes = [sum(end - begin for begin, end in part) for part in parts]
    mine = counted(packed.new_empty(sizes[link.rank]), "receive")
    yield comm.reduce_parts(mine, packed, sizes, link, divisor=divisor)
    _unpack(flat, parts[link.rank], mine)


def _pack(flat: Tensor, spans: Sequence[Span]) -> Tensor:
    """The spans of a buffer one after another, in memory of their own."""
    return counted(torch.cat([flat[begin:end] for begin, end in spans]), "receive")


def _unpack(flat: Tensor, spans: Sequence[Span], packed: Tensor) -> None:
    if spans:
        views = [flat[begin:end] for begin, end in spans]
        torch._foreach_copy_(views, list(packed.split([len(view) for view in views])))
