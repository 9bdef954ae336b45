# SPDX-License-Identifier: Apache-2.0
"""fp8 in blocks of 128: weights in 128x128, activations along rows and columns in one pass.

::

    x [tokens, features]            one program: 128 tokens x 128 features, loaded once
      largest of each row      -->  codes  [tokens, features]   scales [features/128, tokens]
      of each column, turned   -->  turned [features, tokens]   scales [tokens/128, features]
      or of the tile, turned   -->  turned [features, tokens]   scales [features/128, tokens/128]

Both operands of an fp8 product have the summed dimension innermost, so the weight's gradient, which
sums over tokens, reads turned codes. A tile is read twice, the second time out of the cache, a
part at a time: few registers, so that several programs share a processor and some load while others
compute. Two neighbours of a row are one word of 32 bits.

The bits are those of ``precision/fp8.py``. Tokens past the last fill up the last tile as zeros.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run
from shardwise.kernels.mxfp8 import bf16_bits, casts_natively, scale_and_inverse, to_codes

WIDE = 128


class Tile(NamedTuple):
    """How a tile of 128 x 128 is worked on: first some tokens at a time, then some features."""

    warps: int
    tokens: int = 64
    pairs: int = 16  # of features
    registers: int | None = None  # limit for each thread; None: the compiler's choice


# `python -m benchmarks.fp8_steps` tries all of them for both planes. On an H200 eight others, of 2
# to 16 warps, came to 32 to 72 % of a copy, and these to 77.6, 77.0 and 71.6 %. The first is the
# fastest where tiles are turned with one scale, the second, by 13 to 16 %, with one for each line;
# of parts that lie side by side (query, key, value; gate, up) the first, by 5 to 7 %.
TILES = (
    Tile(warps=4, tokens=128, pairs=32),
    Tile(warps=4, tokens=64, pairs=64),
    Tile(warps=4, tokens=64, pairs=32),
)
LINES_TILE = TILES[1]
ENCODE_TILE = Tile(warps=16, registers=64)


@triton.jit
def block_scale(largest, rceil: tl.constexpr):
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
def row_largest(raw):
    """The largest magnitudes of rows of words."""
    largest = tl.maximum((raw << 16) & 0x7FFF0000, raw & 0x7FFF0000)
    return tl.max(largest, axis=1, keep_dims=True)


@triton.jit
def write_rows(raw, largest, ptr, place, scales_ptr, rceil: tl.constexpr, native: tl.constexpr):
    """Write codes and scales of rows of 64 words, of two bf16 each: of an even feature, then of an
    odd one."""
    scale, inverse = block_scale(largest, rceil)
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
    tl.store(ptr + place, words)
    tl.store(scales_ptr, scale)


@triton.jit
def write_turned(
    raw, ptr, place, padded, scales_ptr, inverse, square: tl.constexpr, rceil: tl.constexpr,
    native: tl.constexpr,
):  # fmt: skip
    """Write the words of 128 tokens turned; each line has a scale, or all share ``inverse``.
    ``place``: from ``ptr``, in 32 bits, which take half the registers of addresses."""
    turned = tl.trans(raw)  # [pairs, 128]
    first, second = turned << 16, turned & -65536
    if not square:
        scale, inverse = block_scale(tl.max(first & 0x7FFF0000, 1, keep_dims=True), rceil)
        tl.store(scales_ptr, scale)
    codes = to_codes(first.to(tl.float32, bitcast=True), inverse, True, native)
    tl.store(ptr + place, codes)
    if not square:
        scale, inverse = block_scale(tl.max(second & 0x7FFF0000, 1, keep_dims=True), rceil)
        tl.store(scales_ptr + 1, scale)
    codes = to_codes(second.to(tl.float32, bitcast=True), inverse, True, native)
    tl.store(ptr + padded + place, codes)


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded, features, total,
    rows: tl.constexpr, columns: tl.constexpr, square: tl.constexpr, rceil: tl.constexpr,
    native: tl.constexpr, even: tl.constexpr, alone: tl.constexpr, high: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    strips = features // 128
    if alone:
        total = features
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    # 64 bits where the tile begins, 32 inside it: half the registers for addresses.
    start = band.to(tl.int64) * 64 * features + strip * 64
    into_codes = codes_ptr + band.to(tl.int64) * 64 * total + strip * 64
    whole = tl.zeros([1, 1], tl.int32)  # the largest of the tile
    if rows:
        for part in range(128 // high):
            token, pair = part * high + tl.arange(0, high)[:, None], tl.arange(0, 64)[None, :]
            place = token * (features // 2) + pair
            if even:  # words of two bf16: of an even feature, then of an odd one
                raw = tl.load(x_ptr + start + place)
            else:
                raw = tl.load(x_ptr + start + place, mask=band * 128 + token < tokens, other=0)
            largest = row_largest(raw)
            if square:
                whole = tl.maximum(whole, tl.max(largest, axis=0, keep_dims=True))
            write_rows(
                raw, largest, into_codes, token * (total // 2) + pair,
                scales_ptr + strip.to(tl.int64) * padded + band * 128 + token, rceil, native,
            )  # fmt: skip
    if columns:
        into = turned_ptr + strip.to(tl.int64) * 128 * padded + band * 128
        scales = turned_scales_ptr + band.to(tl.int64) * total + strip * 128
        inverse = 0.0
        if square:
            scale, inverse = block_scale(whole, rceil)
            # A name of its own: Triton takes a variable from before a loop for one of the loop.
            corner = strip * (padded // 128) + band + tl.zeros([1, 1], tl.int32)
            tl.store(turned_scales_ptr + corner, scale)
        for part in range(64 // wide):  # the tile again, out of the cache
            token, pair = tl.arange(0, 128)[:, None], part * wide + tl.arange(0, wide)[None, :]
            place = token * (features // 2) + pair
            if even:
                raw = tl.load(x_ptr + start + place)
            else:
                raw = tl.load(x_ptr + start + place, mask=band * 128 + token < tokens, other=0)
            write_turned(
                raw, into, tl.trans(pair * 2 * padded) + tl.trans(token), padded,
                scales + tl.trans(pair * 2), inverse, square, rceil, native,
            )  # fmt: skip


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, scales_ptr, largest_ptr, tiles_ptr, count, columns, listed: tl.constexpr,
    measures: tl.constexpr, shared: tl.constexpr, wide: tl.constexpr, rceil: tl.constexpr,
    native: tl.constexpr,
):  # fmt: skip
    """``measures``: write the largest magnitude of each tile, no codes; ``shared``: read it."""
    tile = tl.program_id(0)
    one = tl.zeros([1, 1], tl.int32)  # a scalar of a reduction is not stored alike by every Triton
    if listed:  # tiles of many matrices: see ``list_tiles``
        start = tl.multiple_of(tl.load(tiles_ptr + tile), 128)
        into = tl.multiple_of(tl.load(tiles_ptr + count + tile), 128)
        number = tl.load(tiles_ptr + 2 * count + tile)
        columns = tl.multiple_of(tl.load(tiles_ptr + 3 * count + tile).to(tl.int32), 128)
    else:
        strips = columns // 128
        start = (tile // strips).to(tl.int64) * 128 * columns + tile % strips * 128
        into, number = start, tile
    place = tl.arange(0, 128)[:, None] * columns + tl.arange(0, 128)[None, :]
    bits = bf16_bits(tl.load(x_ptr + start + place), wide)
    if shared:
        largest = tl.load(largest_ptr + tile + one)
    else:
        largest = tl.max(tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True), axis=0, keep_dims=True)
    if measures:
        tl.store(largest_ptr + tile + one, largest)
    else:
        scale, inverse = block_scale(largest, rceil)
        codes = to_codes(bits.to(tl.float32, bitcast=True), inverse, True, native)
        tl.store(codes_ptr + into + place, codes)
        tl.store(scales_ptr + number + one, scale)


@triton.jit
def _turn_kernel(codes_ptr, scales_ptr, out_ptr, out_scales_ptr, rows, columns):
    strips = columns // 128
    matrix = tl.program_id(1).to(tl.int64) * rows * columns
    codes_ptr, out_ptr = codes_ptr + matrix, out_ptr + matrix
    scales_ptr, out_scales_ptr = scales_ptr + matrix // 16384, out_scales_ptr + matrix // 16384
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    line, lane = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    tile = tl.load(
        codes_ptr + band.to(tl.int64) * 128 * columns + strip * 128 + line * columns + lane
    )
    start = strip.to(tl.int64) * 128 * rows + band * 128
    tl.store(out_ptr + start + line * rows + lane, tl.trans(tile))
    tl.store(out_scales_ptr + strip * (rows // 128) + band, tl.load(scales_ptr + tl.program_id(0)))


def _raw(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def quantise(
    x: Tensor,  # [tokens, features], contiguous bf16; features a multiple of 128
    planes: tuple[Tensor, Tensor] | None,  # uint8 [padded, features], fp32 [features / 128, padded]
    turned: tuple[Tensor, Tensor] | None,  # uint8 [features, padded], fp32 [padded / 128, features]
    *,
    square: bool = False,  # of turned, with both: fp32 [features / 128, padded / 128]
    rounding: str = "exact",
    native: bool | None = None,
    tile: Tile | None = None,
) -> None:
    """Fill the planes that are given, which may be the part of x in wider ones; ``padded``: the
    tokens, up to a multiple of 128."""
    assert not square or planes, "the first pass finds the largest of a tile"
    tokens, features = x.shape
    padded = -(-tokens // WIDE) * WIDE
    if not tokens:
        return
    codes, scales = (planes[0].view(torch.int16), planes[1]) if planes else (x, x)
    total = features
    if planes or turned:
        total = planes[0].stride(0) if planes else turned[1].stride(0)  # type: ignore[index]
    if tile is None:
        tile = TILES[0] if square or turned is None or total != features else LINES_TILE
    run(
        _quantise_kernel, (padded // WIDE * (features // WIDE),),
        x.view(torch.int32), codes, scales, *(turned or (x, x)), tokens, padded, features, total,
        rows=planes is not None, columns=turned is not None, square=square,
        rceil=rounding == "rceil", native=casts_natively(x.device) if native is None else native,
        even=tokens == padded, alone=total == features, high=tile.tokens, wide=tile.pairs,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip


class Matrix(NamedTuple):
    """The place of a matrix in flat tensors, of values and of codes, in elements."""

    rows: int
    columns: int
    start: int
    into: int  # a multiple of 128 x 128: the scales of a matrix begin at ``into / 128 / 128``
    shared: bool = False  # whether all its blocks have one scale

    def cut(self, count: int) -> list[Matrix]:
        """The ``count`` equal matrices, one below another, that this is, each with one scale."""
        rows, size = self.rows // count, self.rows // count * self.columns
        return [
            Matrix(rows, self.columns, self.start + at, self.into + at, True)
            for at in range(0, count * size, size)
        ]


class Tiles(NamedTuple):
    """The tiles of many matrices, for one launch."""

    entries: Tensor  # int64 [4, n]: the first value of a tile, its first code, its scale, columns
    owners: Tensor | None  # int64 [n]: tiles of one number share a scale; None: each has its own


def list_tiles(matrices: Sequence[Matrix], device: torch.device) -> Tiles:
    found, owners, first = [], [], 0
    for rows, columns, start, into, shared in matrices:
        bands, strips = rows // WIDE, columns // WIDE
        number = torch.arange(bands * strips)
        inside = number // strips * WIDE * columns + number % strips * WIDE
        wide = torch.full_like(number, columns)
        found.append(torch.stack([start + inside, into + inside, into // WIDE**2 + number, wide]))
        owners.append(first + (torch.zeros_like(number) if shared else number))
        first += bands * strips
    some = any(matrix.shared for matrix in matrices)
    return Tiles(torch.cat(found, 1).to(device), torch.cat(owners).to(device) if some else None)


def encode(
    x: Tensor,  # [rows, columns], contiguous, bf16 or fp32; both multiples of 128
    codes: Tensor,  # uint8 [rows, columns]
    scales: Tensor,  # fp32 [rows / 128, columns / 128]
    *,
    tiles: Tiles | None = None,
    rounding: str = "exact",
    native: bool | None = None,
    tile: Tile = ENCODE_TILE,
) -> None:
    """Encode one matrix, or ``tiles`` of many that lie in flat tensors."""
    columns, count = WIDE, 0 if tiles is None else tiles.entries.shape[1]
    if tiles is None:
        columns, count = x.shape[1], x.numel() // WIDE**2
    if not count:
        return
    owners = None if tiles is None else tiles.owners
    largest = x if owners is None else x.new_empty(count, dtype=torch.int32)
    for measures in (True, False) if owners is not None else (False,):
        run(
            _encode_kernel, (count,),
            _raw(x), codes, scales, largest, x if tiles is None else tiles.entries, count, columns,
            listed=tiles is not None, measures=measures,
            shared=owners is not None and not measures, wide=x.dtype == torch.float32,
            rceil=rounding == "rceil",
            native=casts_natively(x.device) if native is None else native,
            num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
        if measures and owners is not None:
            every = torch.zeros_like(largest).scatter_reduce_(0, owners, largest, "amax")
            largest = every[owners]


def turn(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The transposes of uint8 [..., rows, columns], both multiples of 128, and of the scales of its
    blocks, as memory of their own."""
    *many, rows, columns = codes.shape
    out, out_scales = (
        each.new_empty(*many, *each.shape[-1:], *each.shape[-2:-1]) for each in (codes, scales)
    )
    grid = (rows // WIDE * (columns // WIDE), math.prod(many))
    run(_turn_kernel, grid, codes, scales, out, out_scales, rows, columns, num_warps=8)
    return out, out_scales


@triton.jit
def _rows_kernel(
    x_ptr, codes_ptr, scales_ptr, rows, columns, high: tl.constexpr, wide: tl.constexpr,
    rceil: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * high + tl.arange(0, high)[:, None]
    lane = tl.arange(0, wide)[None, :]
    inside = (line < rows) & (lane < columns)
    place = line.to(tl.int64) * columns + lane
    bits = bf16_bits(tl.load(x_ptr + place, mask=inside, other=0), False)
    scale, inverse = block_scale(tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True), rceil)
    codes = to_codes(bits.to(tl.float32, bitcast=True), inverse, True, native)
    tl.store(codes_ptr + place, codes, mask=inside)
    tl.store(scales_ptr + line, scale, mask=line < rows)


def quantise_rows(
    x: Tensor,  # [rows, columns], contiguous bf16
    codes: Tensor,  # uint8 [rows, columns]
    scales: Tensor,  # fp32 [rows]
    *,
    rounding: str = "exact",
    native: bool | None = None,
) -> None:
    """One scale for each row."""
    rows, columns = x.shape
    wide = triton.next_power_of_2(columns)
    high = max(1, 8192 // wide)
    if rows:
        run(
            _rows_kernel, (triton.cdiv(rows, high),),
            x.view(torch.int16), codes, scales, rows, columns, high=high, wide=wide,
            rceil=rounding == "rceil",
            native=casts_natively(x.device) if native is None else native, num_warps=8,
        )  # fmt: skip
