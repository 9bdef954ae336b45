# SPDX-License-Identifier: Apache-2.0
"""Small matrices: Newton-Schulz of one matrix in one program, with one launch for a batch.

::

    read X in slices -> R = X·Xᵀ, on chip          iterations [0, restart) give Q, on chip
    read X in slices -> Y = Q·X, R = Y·Yᵀ          iterations [restart, end) give Q'
    read X in slices -> Y = Q·X, store Q'·Y        Y is computed twice and never stored

Heads, routers and adapters have a short side of 128 or less. With separate products, launches would
take most of the time. This is the Gram form with the rounding of ``iterate.gram``, except that
products over the short side are summed in one piece.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.forms import GRAM_SCALE, VALUE_SCALE, Polynomial
from shardwise.kernels.launch import run
from shardwise.kernels.packed import Packed


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _polynomials(
    gram, table_ptr, begin, end, rescale, gram_scale, value_scale, size: tl.constexpr
):  # fmt: skip
    """Q, the product of the polynomials of iterations [begin, end)."""
    dtype = gram.dtype
    index = tl.arange(0, size)
    identity = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    q = identity.to(dtype)
    for step in tl.range(begin, end):
        row = table_ptr + 6 * step
        r = gram.to(tl.float32) * (rescale / gram_scale)
        squared = _dot(gram, gram) * (rescale * rescale / (gram_scale * gram_scale))
        if tl.load(row + 5) != 0.0:  # of fourth degree in R: the square of this square
            inner = squared + tl.load(row + 4) * r + tl.load(row + 3) * identity
            inner = (inner * value_scale).to(dtype)
            squared = _dot(inner, inner) / (value_scale * value_scale)
        z = tl.load(row + 2) * squared + tl.load(row + 1) * r + tl.load(row) * identity
        z = z.to(dtype)
        q = _dot(q, z).to(dtype)
        half = _dot(gram, z).to(dtype)
        gram = (_dot(half, z) * rescale).to(dtype)
        rescale = tl.full((), 1.0, dtype=tl.float32)
    return q


@triton.jit
def _block_kernel(
    values_ptr, inverse_ptr, out_ptr, table_ptr,
    short, long, short_stride, long_stride, matrix_stride, restart, steps, safety,
    gram_scale: tl.constexpr, value_scale: tl.constexpr,
    size: tl.constexpr, slice_width: tl.constexpr, schatten: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    dtype = values_ptr.dtype.element_ty
    inverse = tl.load(inverse_ptr + matrix)
    row = tl.arange(0, size)
    column = tl.arange(0, slice_width)
    base = matrix * matrix_stride + row[:, None] * short_stride

    acc = tl.zeros((size, size), dtype=tl.float32)
    for start in tl.range(0, long, slice_width):
        place = start + column
        mask = (row[:, None] < short) & (place[None, :] < long)
        x = tl.load(values_ptr + base + place[None, :] * long_stride, mask=mask, other=0.0)
        acc += _dot(x, x.T)
    acc *= inverse * inverse * gram_scale
    # 1 / bound on the largest singular value, squared: of the norm, or of the Gram's own norm.
    rescale = 1.0 / (safety * safety)
    if schatten:
        norm = tl.sqrt(tl.sum(acc * acc)) / gram_scale
        rescale = tl.where(norm > 0.0, rescale / norm, 0.0)
    q = _polynomials(acc.to(dtype), table_ptr, 0, restart, rescale, gram_scale, value_scale, size)
    first = inverse * tl.sqrt(rescale)
    if restart == steps:
        for start in tl.range(0, long, slice_width):
            place = start + column
            mask = (row[:, None] < short) & (place[None, :] < long)
            offset = base + place[None, :] * long_stride
            x = tl.load(values_ptr + offset, mask=mask, other=0.0)
            tl.store(out_ptr + offset, (_dot(q, x) * first).to(dtype), mask=mask)
    else:
        acc = tl.zeros((size, size), dtype=tl.float32)
        for start in tl.range(0, long, slice_width):
            place = start + column
            mask = (row[:, None] < short) & (place[None, :] < long)
            x = tl.load(values_ptr + base + place[None, :] * long_stride, mask=mask, other=0.0)
            y = (_dot(q, x) * (first * value_scale)).to(dtype)
            acc += _dot(y, y.T)
        acc *= gram_scale / (value_scale * value_scale)
        one = tl.full((), 1.0, dtype=tl.float32)
        last = _polynomials(
            acc.to(dtype), table_ptr, restart, steps, one, gram_scale, value_scale, size
        )
        for start in tl.range(0, long, slice_width):
            place = start + column
            mask = (row[:, None] < short) & (place[None, :] < long)
            offset = base + place[None, :] * long_stride
            x = tl.load(values_ptr + offset, mask=mask, other=0.0)
            y = (_dot(q, x) * (first * value_scale)).to(dtype)
            tl.store(out_ptr + offset, (_dot(last, y) / value_scale).to(dtype), mask=mask)


def newton_schulz_block(packed: Packed, polynomial: Polynomial, table: Tensor) -> Tensor:
    """The result in the layout of ``packed.values``; ``table`` is [steps, 6] fp32 on its device."""
    values = packed.values
    count, rows, columns = values.shape
    tall = rows > columns
    short, long = (columns, rows) if tall else (rows, columns)
    size = max(16, triton.next_power_of_2(short))
    out = values.new_empty(values.shape)
    short_stride, long_stride = (1, columns) if tall else (columns, 1)
    run(
        _block_kernel, (count,),
        values, packed.inverse_norms, out, table,
        short, long, short_stride, long_stride, rows * columns,
        polynomial.first_steps("block"), polynomial.steps, polynomial.safety,
        gram_scale=GRAM_SCALE, value_scale=VALUE_SCALE, size=size, slice_width=64,
        schatten=polynomial.norm == "schatten4", num_warps=8 if size > 64 else 4, num_stages=3,
    )  # fmt: skip
    return out
