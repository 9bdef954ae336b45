# SPDX-License-Identifier: Apache-2.0
"""Reductions between replicas that divide a buffer: some spans go to all, others to one replica.

parts of one size     one reduce-scatter: what a rank receives does not grow with the replicas
parts of any sizes    one all-to-all of exact sizes, summed by the receiver
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise import comm
from shardwise.division import Shares, Span
from shardwise.memory import counted


def reduce_shares(
    flat: Tensor, shares: Shares, link: comm.Axis, divisor: float | None
) -> Iterator[comm.Pending]:
    """Reduce in place: the shared spans to every rank, the divided ones to one rank each. The
    memory of those that go elsewhere is undefined afterwards."""
    if shares.shared:
        packed = _pack(flat, shares.shared)
        yield comm.all_reduce(packed, link, divisor=divisor)
        _unpack(flat, shares.shared, packed)
    if not shares.divided:
        return
    if shares.even:
        length = shares.sizes[0]
        packed = _pack(flat, shares.divided, link.size * length)
        mine = packed.view(link.size, length)[link.rank]
        yield comm.reduce_scatter(mine, packed, link, divisor=divisor)
    else:
        packed = _pack(flat, shares.divided)
        mine = counted(packed.new_empty(shares.sizes[link.rank]), "receive")
        yield comm.reduce_parts(mine, packed, shares.sizes, link, divisor=divisor)
    _unpack(flat, shares.mine, mine)


def _pack(flat: Tensor, spans: Sequence[Span], length: int = 0) -> Tensor:
    """The spans of a buffer one after another, in memory of their own; zeros up to ``length``."""
    views = [flat[begin:end] for begin, end in spans]
    missing = length - sum(map(len, views))
    if missing > 0:
        views.append(flat.new_zeros(missing))
    return counted(torch.cat(views), "receive")


def _unpack(flat: Tensor, spans: Sequence[Span], packed: Tensor) -> None:
    if spans:
        views = [flat[begin:end] for begin, end in spans]
        lengths = [len(view) for view in views]
        torch._foreach_copy_(views, list(packed[: sum(lengths)].split(lengths)))
