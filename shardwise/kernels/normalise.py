# SPDX-License-Identifier: Apache-2.0
"""From a batch in any float dtype to ``Packed``: two passes, one for the norms, one for the cast.

::

    batch [n, rows, columns] --squares--> partial sums [n, chunks] fp64
                             --scale----> values [n, rows', columns'] fp16, inverse norms [n]

fp64 sums: the square of an fp32 gradient neither overflows nor vanishes. A matrix is cut into
chunks by its shape alone and the partial sums are added in one fixed order, so its scale is the
same in every batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.packed import Packed, empty_values, scale_reference

BLOCK = 4096  # elements a program holds at a time
CHUNK = 8 * BLOCK  # elements a program walks


def reference(batch: Tensor) -> Packed:
    """The definition; any device."""
    count, rows, columns = batch.shape
    sums = batch.double().square().sum((1, 2))
    scale, inverse = scale_reference(sums, rows * columns)
    values = empty_values(count, rows, columns, batch.device)
    packed = Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)
    packed.unpadded(values).copy_(batch.float() * scale[:, None, None])
    return packed


@triton.jit
def scale_from(partials_ptr, matrix, numel, chunks, width: tl.constexpr):
    """``scale_reference`` of one matrix: (power of two, 1 / norm)."""
    place = tl.arange(0, width)
    partials = tl.load(partials_ptr + matrix * chunks + place, mask=place < chunks, other=0.0)
    total = tl.sum(partials, axis=0)
    mean = total / numel.to(tl.float64)
    exponent = ((mean.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
    halved = tl.minimum(tl.maximum(exponent >> 1, -126), 126)  # >> is floor, for negatives too
    halved = tl.where(total == 0.0, 0, halved)
    scale = ((1023 - halved) << 52).to(tl.float64, bitcast=True)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / (tl.sqrt(total) * scale))
    return scale.to(tl.float32), inverse.to(tl.float32)


@triton.jit
def _squares_kernel(batch_ptr, partials_ptr, numel, block: tl.constexpr, chunk: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    total = tl.zeros((block,), dtype=tl.float64)
    for start in tl.range(0, chunk, block):
        place = tl.program_id(0) * chunk + start + tl.arange(0, block)
        x = tl.load(batch_ptr + matrix * numel + place, mask=place < numel, other=0.0)
        x = x.to(tl.float64)
        total += x * x
    tl.store(partials_ptr + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _scale_kernel(
    batch_ptr, values_ptr, partials_ptr, inverse_ptr,
    numel, columns, values_columns, values_numel,
    block: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr, rim: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0)
    scale, inverse = scale_from(partials_ptr, matrix, numel, chunks, width)
    if tl.program_id(0) == 0:
        tl.store(inverse_ptr + matrix, inverse)
    for start in tl.range(0, chunk, block):
        place = tl.program_id(0) * chunk + start + tl.arange(0, block)
        x = tl.load(batch_ptr + matrix * numel + place, mask=place < numel, other=0.0)
        x = x.to(tl.float32) * scale
        if rim:
            target = place // columns * values_columns + place % columns
        else:
            target = place
        values = values_ptr + matrix * values_numel + target
        tl.store(values, x.to(values_ptr.dtype.element_ty), mask=place < numel)


def normalise(batch: Tensor, dtype: torch.dtype = torch.float16) -> Packed:
    """``reference(batch)``, by two kernels; fp32 instead of fp16 is for tests."""
    batch = batch.contiguous()
    count, rows, columns = batch.shape
    numel = rows * columns
    values = empty_values(count, rows, columns, batch.device, dtype)
    chunks = -(-numel // CHUNK)
    partials = torch.empty(count, chunks, device=batch.device, dtype=torch.float64)
    inverse = torch.empty(count, device=batch.device, dtype=torch.float32)
    _squares_kernel[(chunks, count)](batch, partials, numel, block=BLOCK, chunk=CHUNK, num_warps=8)
    _scale_kernel[(chunks, count)](
        batch,
        values,
        partials,
        inverse,
        numel,
        columns,
        values.shape[2],
        values.shape[1] * values.shape[2],
        block=BLOCK,
        chunk=CHUNK,
        width=triton.next_power_of_2(chunks),
        rim=values.shape[2] != columns,
        num_warps=8,
    )
    return Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)
