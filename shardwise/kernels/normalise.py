# SPDX-License-Identifier: Apache-2.0
"""Pack a batch of any float dtype: each matrix is sampled, then read once.

::

    batch [n, rows, columns] --sample--> sums of squares [n, SAMPLES] fp64: a power of two, guessed
                             --pass----> values [n, rows', columns'] fp16, sums [n, chunks] fp64
                             --settle--> inverse norms [n]; values again where the guess was bad

The third kernel is always launched, because only the device knows whether a guess was bad. It
nearly always returns at once. Sums are fp64, in which the square of an fp32 gradient neither
overflows nor vanishes. The shape of a matrix alone decides how it is sampled and cut into chunks,
and sums have a fixed order, so the scale of a matrix is the same in every batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run
from shardwise.kernels.packed import (
    BLOCK,
    LARGEST_NORM,
    LEAST_RMS,
    SAMPLES,
    Packed,
    empty_values,
    sample_size,
    sample_stride,
    scale_reference,
)

CHUNK = 8 * BLOCK  # elements of a program
SETTLERS = 16  # programs per matrix that check its guess

# The work of the three kernels.
SAMPLE, PASS, SETTLE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_SAMPLES = tl.constexpr(SAMPLES)
_LARGEST_SUM = tl.constexpr(LARGEST_NORM**2)
_LEAST_MEAN = tl.constexpr(LEAST_RMS**2)


def reference(batch: Tensor) -> Packed:
    """Pack by definition, on any device."""
    count, rows, columns = batch.shape
    scale, inverse = scale_reference(batch)
    values = empty_values(count, rows, columns, batch.device)
    packed = Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)
    packed.unpadded(values).copy_(batch.float() * scale[:, None, None])
    return packed


@triton.jit
def power_of_two(mean_square):
    """The power of two that brings the rms into [1, 2), in fp64; 1 for 0."""
    exponent = ((mean_square.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
    halved = tl.minimum(tl.maximum(exponent >> 1, -126), 126)  # >> is floor, for negatives too
    halved = tl.where(mean_square == 0.0, 0, halved)
    return ((1023 - halved) << 52).to(tl.float64, bitcast=True)


@triton.jit
def guess_from(samples_ptr, matrix, sampled):
    """The power of two of a matrix, guessed from its sample."""
    sums = tl.load(samples_ptr + matrix * _SAMPLES + tl.arange(0, _SAMPLES))
    return power_of_two(tl.sum(sums, axis=0) / sampled)


@triton.jit
def settle(
    samples_ptr, partials_ptr, inverse_ptr, matrix, numel, sampled, chunks, width: tl.constexpr
):  # fmt: skip
    """(power of two, whether the guess was good) of a matrix that was read whole; see
    ``scale_reference``."""
    place = tl.arange(0, width)
    partials = tl.load(partials_ptr + matrix * chunks + place, mask=place < chunks, other=0.0)
    total = tl.sum(partials, axis=0)
    mean = total / numel
    guess = guess_from(samples_ptr, matrix, sampled)
    fits = total * guess * guess <= _LARGEST_SUM  # never true of a NaN or an infinity
    serves = mean * guess * guess >= _LEAST_MEAN
    good = (total == 0.0) | (fits & serves)
    scale = tl.where(good, guess, power_of_two(mean))
    if tl.program_id(0) == 0:
        inverse = tl.where(total == 0.0, 0.0, 1.0 / (tl.sqrt(total) * scale))
        tl.store(inverse_ptr + matrix, inverse.to(tl.float32))
    return scale.to(tl.float32), good


@triton.jit
def _normalise_kernel(
    batch_ptr, numel, values_ptr, samples_ptr, partials_ptr, inverse_ptr,
    sampled, stride, chunks, columns, values_columns, values_numel,
    work: tl.constexpr, rim: tl.constexpr,
    block: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * stride
    extent = chunk
    scale = 1.0
    if work == PASS:
        scale = guess_from(samples_ptr, matrix, sampled).to(tl.float32)
    if work == SETTLE:
        scale, good = settle(
            samples_ptr, partials_ptr, inverse_ptr, matrix, numel, sampled, chunks, width
        )
        extent = tl.where(good, 0, stride)
    total = tl.zeros((block,), dtype=tl.float64)
    for start in tl.range(0, extent, block):
        place = first + start + tl.arange(0, block)
        mask = place < numel
        x = tl.load(batch_ptr + matrix * numel + place, mask=mask, other=0.0).to(tl.float32)
        if work != SETTLE:
            wide = x.to(tl.float64)
            total += wide * wide
        if work != SAMPLE:
            if rim:
                target = place // columns * values_columns + place % columns
            else:
                target = place
            rounded = (x * scale).to(values_ptr.dtype.element_ty)
            tl.store(values_ptr + matrix * values_numel + target, rounded, mask=mask)
    if work != SETTLE:
        sums_ptr = samples_ptr if work == SAMPLE else partials_ptr
        place = matrix * tl.num_programs(0) + tl.program_id(0)
        tl.store(sums_ptr + place, tl.sum(total, axis=0))


def pack_by(
    kernel: Any,
    given: tuple[Any, ...],
    shape: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    **constants: Any,
) -> Packed:
    """Pack matrices of ``shape`` [n, rows, columns] by three launches of a kernel: SAMPLE, PASS,
    SETTLE. ``given``: the kernel's first arguments."""
    count, rows, columns = shape
    numel = rows * columns
    values = empty_values(count, rows, columns, device, dtype)
    chunks, share = -(-numel // CHUNK), -(-numel // (SETTLERS * BLOCK)) * BLOCK
    samples = torch.empty(count, SAMPLES, device=device, dtype=torch.float64)
    partials = torch.empty(count, chunks, device=device, dtype=torch.float64)
    inverse = torch.empty(count, device=device, dtype=torch.float32)
    # (work, programs per matrix, distance between their first elements, elements of each, width);
    # SETTLE computes its elements from the distance.
    for work, programs, stride, chunk, width in (
        (SAMPLE.value, SAMPLES, sample_stride(numel), BLOCK, 1),
        (PASS.value, chunks, CHUNK, CHUNK, 1),
        (SETTLE.value, -(-numel // share), share, BLOCK, triton.next_power_of_2(chunks)),
    ):
        run(
            kernel, (programs, count), *given, values, samples, partials, inverse,
            sample_size(numel), stride, chunks,
            columns, values.shape[2], values.shape[1] * values.shape[2],
            work=work, rim=values.shape[2] != columns,
            block=BLOCK, chunk=chunk, width=width, num_warps=8, **constants,
        )  # fmt: skip
    return Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)


def normalise(batch: Tensor, dtype: torch.dtype = torch.float16) -> Packed:
    """Pack by three kernels, like ``reference``; fp32 instead of fp16 is for tests."""
    batch = batch.contiguous()
    count, rows, columns = batch.shape
    given = (batch, rows * columns)
    return pack_by(_normalise_kernel, given, (count, rows, columns), batch.device, dtype)
