# SPDX-License-Identifier: Apache-2.0
"""Unpack, weight decay and update in one pass over the weights.

::

    w = w - decay·w - step·o        plain: everywhere
                                    cautious: decay only where the update also shrinks w (o·w > 0)

``o`` is read from the padded batch of the orthogonaliser, or from pieces that owners sent back.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run
from shardwise.kernels.momentum import TYPES
from shardwise.kernels.normalise import CHUNK
from shardwise.kernels.packed import BLOCK, padded
from shardwise.kernels.tables import addresses

Decay = Literal["plain", "cautious"]


def reference(
    weight: Tensor, update: Tensor, *, step: float, decay: float, rule: Decay = "plain"
) -> Tensor:
    """The update by definition, in fp32; ``decay`` is learning rate times weight decay."""
    w, o = weight.float(), update.float()
    shrink = torch.full_like(w, decay) if rule == "plain" else decay * (o * w > 0)
    return (w - shrink * w - step * o).to(weight.dtype)


@triton.jit
def _update_kernel(
    table_ptr, values_ptr, clip_ptr, count, step, decay, columns, values_columns, values_numel,
    clipped: tl.constexpr,
    weight_type: tl.constexpr, update_type: tl.constexpr, batched: tl.constexpr,
    cautious: tl.constexpr, aligned: tl.constexpr, rim: tl.constexpr,
    block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1).to(tl.int64)
    weight_ptr = tl.load(table_ptr + piece).to(tl.pointer_type(weight_type))
    length = tl.load(table_ptr + (1 if batched else 2) * count + piece)
    if batched:
        update_ptr = values_ptr + piece * values_numel
    else:
        update_ptr = tl.load(table_ptr + count + piece).to(tl.pointer_type(update_type))
        if aligned:
            update_ptr = tl.multiple_of(update_ptr, 16)
    if aligned:
        weight_ptr = tl.multiple_of(weight_ptr, 16)
    if clipped:
        length = tl.where(tl.load(clip_ptr + 1) == 0.0, length, 0)
    if aligned:
        length = tl.multiple_of(length, 16)
    for start in tl.range(0, chunk, block):
        place = tl.program_id(0).to(tl.int64) * chunk + start + tl.arange(0, block)
        mask = place < length
        if rim:
            source = place // columns * values_columns + place % columns
        else:
            source = place
        w = tl.load(weight_ptr + place, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(update_ptr + source, mask=mask, other=0.0).to(tl.float32)
        shrink = tl.where(o * w > 0.0, decay, 0.0) if cautious else decay
        w = w - shrink * w - step * o
        tl.store(weight_ptr + place, w.to(weight_type), mask=mask)


def apply(
    weights: Sequence[Tensor],
    updates: Tensor | Sequence[Tensor],
    *,
    step: float,
    decay: float = 0.0,
    rule: Decay = "plain",
    clip: Tensor | None = None,
) -> None:
    """Update ``weights`` in place by ``updates``: a packed batch [n, rows, columns], or pieces.

    ``clip`` [2]: if its second number is 1, weights do not change; see ``momentum.accumulate``.
    """
    if not weights:
        return
    batched = isinstance(updates, Tensor)
    if isinstance(updates, Tensor):
        table = addresses([weights])
        values = updates
        (rows, columns), update_type = weights[0].shape, updates.dtype
        assert updates.shape == (len(weights), padded(rows), padded(columns)), updates.shape
        numel = updates.shape[1] * updates.shape[2]
    else:
        table = addresses([weights, updates])
        values = table.entries
        columns, update_type, numel = 1, updates[0].dtype, 1
    values_columns = values.shape[2] if batched else 1
    run(
        _update_kernel, (-(-table.longest // CHUNK), len(weights)),
        table.entries, values, table.entries if clip is None else clip,
        len(weights), step, decay, columns, values_columns, numel, clipped=clip is not None,
        weight_type=TYPES[weights[0].dtype], update_type=TYPES[update_type], batched=batched,
        cautious=rule == "cautious", aligned=table.aligned, rim=values_columns != columns,
        block=BLOCK, chunk=CHUNK, num_warps=8,
    )  # fmt: skip
