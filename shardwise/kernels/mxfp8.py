# SPDX-License-Identifier: Apache-2.0
"""MXFP8 encoding and decoding in one pass over memory, with the bits that ``precision/fp8.py``
defines.

::

    x [rows, columns]                       one program: 32 rows, `strips` strips of 32 columns
      32 rows | strip | strip | strip |     tile [strips, 32, 32], loaded once
                                            largest magnitude over the last axis: row scales;
                                            over the middle axis: column scales

The strips are the first axis because Triton gives neighbouring threads the last axis, then the
first axis. So a warp covers part of a row, and most of the 32 rows of a column are in one thread.

Magnitudes are compared as integers (a bf16 without its sign), so a NaN is larger than every number.
Values are scaled in fp32 by powers of two, exactly. The hardware casts to e4m3 if it can
(``native``); other devices, and Triton's interpreter, use integer arithmetic.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run

Planes = Mapping[tuple[int, int], tuple[Tensor, Tensor]]  # by block: codes, scales


@dataclass(frozen=True, kw_only=True)
class StripTile:
    """The work of one program: 32 rows of ``strips`` strips of 32 columns."""

    strips: int
    warps: int
    registers: int | None = None  # limit for each thread; None: the compiler's choice


# Measured on an H200: more warps divide the rows of a
# column and exchange values through shared memory, which halves the speed of a column plane.
TILES = {
    "both": StripTile(strips=4, warps=2),
    "row": StripTile(strips=8, warps=8),
    "column": StripTile(strips=4, warps=2),
}
DECODE_TILE = StripTile(strips=8, warps=8)


@triton.jit
def bf16_bits(raw, wide: tl.constexpr):
    """The bits of values rounded to bf16, in the upper half of int32. ``raw``: the bits of fp32
    values if ``wide``, else of bf16."""
    if wide:
        magnitude = raw & 0x7FFFFFFF
        nearest = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & 0x7FFF0000
        # Infinities and NaN are not rounded. Each makes its block NaN, so infinity stands for all.
        bits = tl.where(magnitude >= 0x7F800000, 0x7F800000, nearest) | (raw & -0x80000000)
    else:
        bits = raw.to(tl.int32) << 16
    return bits


@triton.jit
def scale_and_inverse(largest):
    """Scale bytes, and 2^(127 - scale) in fp32, for blocks whose largest magnitude has these bits.

    Rounding up is one addition: 0x1FFFFF carries into the exponent if 1.m is above 1.75.
    """
    undefined = largest >= 0x7F800000
    exponent = tl.minimum(largest, 0x7F800000) + 0x1FFFFF
    exponent = tl.maximum(exponent >> 23, 8)
    inverse = tl.where(undefined, 0x7FC00000, (262 - exponent) << 23)
    scale = tl.where(undefined, 255, exponent - 8)
    return scale.to(tl.uint8), inverse.to(tl.float32, bitcast=True)


@triton.jit
def to_codes(values, inverse, native: tl.constexpr):
    """e4m3 of ``values · inverse``, to nearest even; 0x7F for NaN. Nothing is above 448."""
    scaled = values * inverse
    if native:
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        exponent = magnitude >> 23
        significand = (magnitude & 0x7FFFFF) | 0x800000
        # 4 of 24 bits remain; below 2^-6 (exponent 121) one bit less for each power, down to none.
        shift = 20 + tl.minimum(tl.maximum(121 - exponent, 0), 5)
        even = (significand >> shift) & 1
        nearest = (significand + ((1 << (shift - 1)) - 1) + even) >> shift
        nearest += tl.maximum(exponent - 121, 0) * 8  # a carry increases the exponent correctly
        nearest |= (bits >> 24) & 0x80
        codes = tl.where(magnitude > 0x7F800000, 0x7F, nearest).to(tl.uint8)
    return codes


@triton.jit
def from_codes(codes, native: tl.constexpr):
    """fp32 of e4m3 codes."""
    if native:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        # The fields of e4m3, moved to the places of fp32's fields, are the value times 2^(7-127),
        # also for subnormals.
        small = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        nan = (bits & 0x7F) == 0x7F
        values = tl.where(nan, float("nan"), small * 1.329227995784916e36)  # 2^120
    return values


@triton.jit(do_not_specialize_on_alignment=["row_codes_ptr", "column_codes_ptr"])
def _encode_kernel(
    x_ptr, row_codes_ptr, row_scales_ptr, column_codes_ptr, column_scales_ptr, columns,
    wide: tl.constexpr, row: tl.constexpr, column: tl.constexpr, native: tl.constexpr,
    even: tl.constexpr, vector: tl.constexpr, strips: tl.constexpr,
):  # fmt: skip
    width = columns // 32
    tiles = tl.cdiv(width, strips)
    band = (tl.program_id(0) // tiles).to(tl.int64)  # of 32 rows
    first = (tl.program_id(0) % tiles) * strips
    line = tl.arange(0, 32)[None, :, None]
    strip = first + tl.arange(0, strips)[:, None, None]
    lane = tl.arange(0, 32)[None, None, :]
    # Offsets inside a band have 32 bits, which halves the registers for addresses.
    start = band * 32 * columns
    place = line * columns + strip * 32 + lane  # [strips, 32, 32]
    if even:
        raw = tl.load(x_ptr + start + place)
    else:
        raw = tl.load(x_ptr + start + place, mask=strip < width, other=0)
    bits = bf16_bits(raw, wide)
    values = bits.to(tl.float32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    inside = strip < width

    if row:
        largest = tl.max(magnitudes, axis=2, keep_dims=True)  # [strips, 32, 1]
        scale, inverse = scale_and_inverse(largest)
        codes = to_codes(values, inverse, native)
        scale_target = row_scales_ptr + band * 32 * width + (line * width + strip)
        target = tl.multiple_of(row_codes_ptr + start + place, [1, 1, vector])
        tl.store(target, codes, mask=None if even else inside)
        tl.store(scale_target, scale, mask=None if even else inside)
    if column:
        largest = tl.max(magnitudes, axis=1, keep_dims=True)  # [strips, 1, 32]
        scale, inverse = scale_and_inverse(largest)
        codes = to_codes(values, inverse, native)
        scale_target = column_scales_ptr + band * columns + (strip * 32 + lane)
        target = tl.multiple_of(column_codes_ptr + start + place, [1, 1, vector])
        tl.store(target, codes, mask=None if even else inside)
        tl.store(scale_target, scale, mask=None if even else inside)


@triton.jit(do_not_specialize_on_alignment=["codes_ptr"])
def _decode_kernel(
    codes_ptr, scales_ptr, out_ptr, columns,
    high: tl.constexpr, native: tl.constexpr, even: tl.constexpr, vector: tl.constexpr,
    strips: tl.constexpr,
):  # fmt: skip
    width = columns // 32
    tiles = tl.cdiv(width, strips)
    band = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * strips
    line = tl.arange(0, 32)[None, :, None]
    strip = first + tl.arange(0, strips)[:, None, None]
    lane = tl.arange(0, 32)[None, None, :]
    start = band * 32 * columns
    place = line * columns + strip * 32 + lane  # [strips, 32, 32]
    # One scale for each row and each strip, or for 32 rows and each column.
    if high == 1:
        scale_source = scales_ptr + band * 32 * width + (line * width + strip)
    else:
        scale_source = scales_ptr + band * columns + (strip * 32 + lane)
    source = tl.multiple_of(codes_ptr + start + place, [1, 1, vector])
    if even:
        code = tl.load(source)
        scale = tl.load(scale_source).to(tl.int32)
    else:
        code = tl.load(source, mask=strip < width, other=0)
        scale = tl.load(scale_source, mask=strip < width, other=0).to(tl.int32)
    factor = tl.where(scale == 255, 0x7FC00000, scale << 23)
    factor = tl.where(scale == 0, 0x00400000, factor).to(tl.float32, bitcast=True)
    result = (from_codes(code, native) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + start + place, result, mask=None if even else strip < width)


@functools.cache
def casts_natively(device: torch.device) -> bool:
    """Whether the device has casts to e4m3: NVIDIA, compute capability 8.9 and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _vector(*codes: Tensor) -> int:
    """The number of codes that a thread loads or stores at once.

    8, not the 16 that would fit: so a thread has 8 neighbours in the 16-bit tensor, too, and no
    tile goes through shared memory between load and store.
    """
    return 8 if all(plane.data_ptr() % 8 == 0 for plane in codes) else 1


def encode(
    x: Tensor,  # [rows, columns], contiguous, bf16 or fp32
    planes: Planes,
    *,
    native: bool | None = None,
    tile: StripTile | None = None,
) -> None:
    """Fill ``planes``, a row plane, a column plane, or both."""
    rows, columns = x.shape
    wide = x.dtype == torch.float32
    raw = x.view(torch.int32 if wide else torch.int16)
    native = casts_natively(x.device) if native is None else native
    row, column = (1, 32) in planes, (32, 1) in planes
    if not (row or column):
        return
    chosen = tile or TILES["both" if row and column else "row" if row else "column"]
    first, second = planes.get((1, 32), (raw, raw)), planes.get((32, 1), (raw, raw))
    strips = min(chosen.strips, triton.next_power_of_2(columns // 32))
    grid = (rows // 32 * triton.cdiv(columns // 32, strips),)
    run(
        _encode_kernel, grid,
        raw, *first, *second, columns, wide=wide, row=row, column=column, native=native,
        even=columns // 32 % strips == 0, vector=_vector(first[0], second[0]), strips=strips,
        num_warps=chosen.warps, maxnreg=chosen.registers,
    )  # fmt: skip


def decode(
    codes: Tensor,  # [rows, columns]
    scales: Tensor,
    block: tuple[int, int],
    out: Tensor,  # [rows, columns], contiguous, bf16 or fp32
    *,
    native: bool | None = None,
    tile: StripTile | None = None,
) -> None:
    rows, columns = codes.shape
    chosen = tile or DECODE_TILE
    strips = min(chosen.strips, triton.next_power_of_2(columns // 32))
    grid = (rows // 32 * triton.cdiv(columns // 32, strips),)
    run(
        _decode_kernel, grid,
        codes, scales, out, columns, high=block[0],
        native=casts_natively(codes.device) if native is None else native,
        even=columns // 32 % strips == 0, vector=_vector(codes), strips=strips,
        num_warps=chosen.warps, maxnreg=chosen.registers,
    )  # fmt: skip
