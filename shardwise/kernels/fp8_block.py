# SPDX-License-Identifier: Apache-2.0
"""fp8 in blocks of 128: weights in 128x128, activations along rows and columns in one pass.

::

    x [tokens, features]            one program: 128 tokens x 128 features, loaded once
      largest of each row      -->  codes  [tokens, features]   scales [features/128, tokens]
      of each column, turned   -->  turned [features, tokens]   scales [tokens/128, features]

Both operands of an fp8 product have the summed dimension innermost, so the weight's gradient, which
sums over tokens, reads turned codes. A tile is read twice, the second time out of the cache, a
part at a time: few registers, so that several programs share a processor and some load while others
compute. Two neighbours of a row are one word of 32 bits.

The bits are those of ``precision/fp8.py``. Tokens past the last fill up the last tile as zeros.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.mxfp8 import bf16_bits, casts_natively, scale_and_inverse, to_codes

WIDE = 128


class Tile(NamedTuple):
    """How a tile of 128 x 128 is worked on: first some tokens at a time, then some features."""

    warps: int
    tokens: int = 64
    pairs: int = 16  # of features
    registers: int | None = None  # limit for each thread; None: the compiler's choice


# `python -m benchmarks.fp8_steps` tries all of them for both planes; the first is used.
TILES = (
    Tile(warps=4, tokens=128, pairs=32),
    Tile(warps=4, tokens=64, pairs=64),
    Tile(warps=4, tokens=64, pairs=32),
    Tile(warps=2, tokens=32, pairs=16),
    Tile(warps=8),
    Tile(warps=4, tokens=32, pairs=16),
    Tile(warps=4, tokens=64, pairs=16),
    Tile(warps=8, tokens=128, pairs=16),
    Tile(warps=8, tokens=64, pairs=32),
    Tile(warps=8, tokens=128, pairs=64),
    Tile(warps=16, tokens=128, pairs=64),
)
ENCODE_TILE = Tile(warps=16, registers=64)


@triton.jit
def _scale(largest, rceil: tl.constexpr):
    """fp32 scales and their inverses for magnitudes with these bits (bf16 as the upper half)."""
    if rceil:
        byte, inverse = scale_and_inverse(largest, True)
        bits = tl.where(byte == 0, 0x00400000, byte.to(tl.int32) << 23)
        scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        # 0x0D800000: 2^-100. NaN and infinities mark their block.
        known = tl.maximum(largest, 0x0D800000).to(tl.float32, bitcast=True)
        scale = tl.where(largest >= 0x7F800000, float("nan"), known * 0.002232142956927419)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return scale, inverse


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded, features,
    rows: tl.constexpr, columns: tl.constexpr, rceil: tl.constexpr, native: tl.constexpr,
    even: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    strips = features // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    # 64 bits where the tile begins, 32 inside it: half the registers for addresses.
    start = band.to(tl.int64) * 64 * features + strip * 64
    if rows:
        for part in range(128 // high):
            token, pair = part * high + tl.arange(0, high)[:, None], tl.arange(0, 64)[None, :]
            place = token * (features // 2) + pair
            if even:  # words of two bf16: of an even feature, then of an odd one
                raw = tl.load(x_ptr + start + place)
            else:
                raw = tl.load(x_ptr + start + place, mask=band * 128 + token < tokens, other=0)
            largest = tl.maximum((raw << 16) & 0x7FFF0000, raw & 0x7FFF0000)
            scale, inverse = _scale(tl.max(largest, axis=1, keep_dims=True), rceil)
            first = (raw << 16).to(tl.float32, bitcast=True)
            second = (raw & -65536).to(tl.float32, bitcast=True)
            if native:  # two at once; Triton 3.6 joins codes of its own casts into wrong words
                words = tl.inline_asm_elementwise(
                    "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "=h,f,f",
                    [second * inverse, first * inverse], dtype=tl.int16, is_pure=True, pack=1,
                )  # fmt: skip
            else:
                first = to_codes(first, inverse, True, False)
                second = to_codes(second, inverse, True, False)
                words = first.to(tl.int16) | (second.to(tl.int16) << 8)
            tl.store(codes_ptr + start + place, words)
            tl.store(scales_ptr + strip.to(tl.int64) * padded + band * 128 + token, scale)
    if columns:
        into = turned_ptr + strip.to(tl.int64) * 128 * padded + band * 128
        scales = turned_scales_ptr + band.to(tl.int64) * features + strip * 128
        for part in range(64 // wide):  # the tile again, out of the cache
            token, pair = tl.arange(0, 128)[:, None], part * wide + tl.arange(0, wide)[None, :]
            place = token * (features // 2) + pair
            if even:
                raw = tl.load(x_ptr + start + place)
            else:
                raw = tl.load(x_ptr + start + place, mask=band * 128 + token < tokens, other=0)
            turned = tl.trans(raw)  # [wide, 128]
            place = tl.trans(pair * 2 * padded) + tl.trans(token)
            scale, inverse = _scale(tl.max((turned << 16) & 0x7FFF0000, 1, keep_dims=True), rceil)
            tl.store(scales + tl.trans(pair * 2), scale)
            codes = to_codes((turned << 16).to(tl.float32, bitcast=True), inverse, True, native)
            tl.store(into + place, codes)
            scale, inverse = _scale(tl.max(turned & 0x7FFF0000, 1, keep_dims=True), rceil)
            tl.store(scales + tl.trans(pair * 2) + 1, scale)
            codes = to_codes((turned & -65536).to(tl.float32, bitcast=True), inverse, True, native)
            tl.store(into + padded + place, codes)


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, scales_ptr, columns,
    wide: tl.constexpr, rceil: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    strips = columns // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    start = band.to(tl.int64) * 128 * columns + strip * 128
    place = tl.arange(0, 128)[:, None] * columns + tl.arange(0, 128)[None, :]
    bits = bf16_bits(tl.load(x_ptr + start + place), wide)
    largest = tl.max(tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True), axis=0, keep_dims=True)
    scale, inverse = _scale(largest, rceil)
    codes = to_codes(bits.to(tl.float32, bitcast=True), inverse, True, native)
    tl.store(codes_ptr + start + place, codes)
    # One element, as a block: a scalar of a reduction is not stored alike by every Triton.
    tl.store(scales_ptr + tl.program_id(0) + tl.zeros([1, 1], tl.int32), scale)


@triton.jit
def _turn_kernel(codes_ptr, out_ptr, rows, columns):
    strips = columns // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    line, lane = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    tile = tl.load(
        codes_ptr + band.to(tl.int64) * 128 * columns + strip * 128 + line * columns + lane
    )
    start = strip.to(tl.int64) * 128 * rows + band * 128
    tl.store(out_ptr + start + line * rows + lane, tl.trans(tile))


def _raw(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def quantise(
    x: Tensor,  # [tokens, features], contiguous bf16; features a multiple of 128
    planes: tuple[Tensor, Tensor] | None,  # uint8 [padded, features], fp32 [features / 128, padded]
    turned: tuple[Tensor, Tensor] | None,  # uint8 [features, padded], fp32 [padded / 128, features]
    *,
    rounding: str = "exact",
    native: bool | None = None,
    tile: Tile = TILES[0],
) -> None:
    """Fill the planes that are given; ``padded``: the tokens, up to a multiple of 128."""
    tokens, features = x.shape
    padded = -(-tokens // WIDE) * WIDE
    if not tokens:
        return
    codes, scales = (planes[0].view(torch.int16), planes[1]) if planes else (x, x)
    _quantise_kernel[(padded // WIDE * (features // WIDE),)](
        x.view(torch.int32), codes, scales, *(turned or (x, x)), tokens, padded, features,
        rows=planes is not None, columns=turned is not None,
        rceil=rounding == "rceil", native=casts_natively(x.device) if native is None else native,
        even=tokens == padded, high=tile.tokens, wide=tile.pairs, num_warps=tile.warps,
        maxnreg=tile.registers,
    )  # fmt: skip


def encode(
    x: Tensor,  # [rows, columns], contiguous, bf16 or fp32; both multiples of 128
    codes: Tensor,  # uint8 [rows, columns]
    scales: Tensor,  # fp32 [rows / 128, columns / 128]
    *,
    rounding: str = "exact",
    native: bool | None = None,
    tile: Tile = ENCODE_TILE,
) -> None:
    rows, columns = x.shape
    _encode_kernel[(rows // WIDE * (columns // WIDE),)](
        _raw(x), codes, scales, columns, wide=x.dtype == torch.float32,
        rceil=rounding == "rceil", native=casts_natively(x.device) if native is None else native,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip


def turn(codes: Tensor) -> Tensor:
    """The transpose of uint8 [rows, columns], both multiples of 128, as memory of its own."""
    rows, columns = codes.shape
    out = torch.empty(columns, rows, dtype=codes.dtype, device=codes.device)
    _turn_kernel[(rows // WIDE * (columns // WIDE),)](codes, out, rows, columns, num_warps=8)
    return out
