# SPDX-License-Identifier: Apache-2.0
"""Views of a ShardedTensor that share its memory: everything that keeps elements in their order.

    p.view(-1), p.unsqueeze(0)     the same elements under another shape
    p[3], p[2:5], p.chunk(2)       a run of them

A piece is a run of elements, so such a view has one too, on some ranks an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from shardwise.cut import Cut

Span = tuple[int, tuple[int, ...]]  # the first element, and the shape


def spans(name: str, shape: Sequence[int], given: dict[str, Any]) -> list[Span] | None:
    """The runs of elements that a view operation gives; None where it gives no run."""
    if not shape or given.get("step", 1) != 1:
        return None
    if name in _SHAPES:
        changed = _SHAPES[name](list(shape), given)
        return None if changed is None else [(0, tuple(changed))]
    if given.get("dim", 0) % len(shape):
        return None
    rows, row = shape[0], prod(shape[1:])
    if name == "select":
        return [(given["index"] % rows * row, tuple(shape[1:]))]
    if name == "unbind":
        return [(first * row, tuple(shape[1:])) for first in range(rows)]
    if name == "slice":
        start, end, _ = slice(given.get("start"), given.get("end")).indices(rows)
        ranges = [(start, max(start, end))]
    elif name == "split":
        size = given["split_size"]
        ranges = [(first, min(first + size, rows)) for first in range(0, rows, size)]
    else:
        ends = [sum(given["split_sizes"][: n + 1]) for n in range(len(given["split_sizes"]))]
        ranges = list(zip([0, *ends], ends, strict=False))
    if any(first == last for first, last in ranges):
        return None  # a tensor without elements has no layout
    return [(first * row, (last - first, *shape[1:])) for first, last in ranges]


def _squeezed(shape: list[int], given: dict[str, Any]) -> list[int] | None:
    dims = given.get("dim", range(len(shape)))
    dims = [dims] if isinstance(dims, int) else dims
    gone = {dim % len(shape) for dim in dims}
    return [size for dim, size in enumerate(shape) if size != 1 or dim not in gone]


def _unsqueezed(shape: list[int], given: dict[str, Any]) -> list[int]:
    where = given["dim"] % (len(shape) + 1)
    return [*shape[:where], 1, *shape[where:]]


def _viewed(shape: list[int], given: dict[str, Any]) -> list[int] | None:
    size = given.get("size", given.get("shape"))
    if not isinstance(size, (list, tuple)):
        return None  # another dtype
    known = prod(one for one in size if one != -1)
    return [prod(shape) // known if one == -1 else one for one in size]


_SHAPES: dict[str, Callable[[list[int], dict[str, Any]], list[int] | None]] = {
    "view": _viewed,
    "_unsafe_view": _viewed,
    "reshape": _viewed,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
}
VIEWS = {*_SHAPES, "select", "slice", "split", "split_with_sizes", "unbind"}


def viewed(cut: Cut, span: Span, local: Any) -> tuple[Any, Cut]:
    """The local piece of a view, and its cut."""
    first, shape = span
    part = cut.viewed(first, shape)
    (lo, hi), begin = part.piece, cut.piece[0] - first
    if lo == hi:
        return local.new_empty(part.local_shape), part
    return local.reshape(-1)[lo - begin : hi - begin].view(part.local_shape), part
