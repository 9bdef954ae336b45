# SPDX-License-Identifier: Apache-2.0
"""fp8 in blocks of 128: weights in 128x128; activations along rows and columns, in one pass.

::

    x [tokens, features]            one program: 128 tokens x 128 features, loaded once
      largest of each row      -->  codes  [tokens, features]   scales [features/128, tokens]
      of each column, turned   -->  turned [features, tokens]   scales [tokens/128, features]
      or of the tile, turned   -->  turned [features, tokens]   scales [features/128, tokens/128]

Both operands of an fp8 product have the summed dimension innermost. So the gradient of a weight,
which sums over tokens, reads turned (transposed) codes. Registers hold a tile with two neighbours
of a row in a word of 32 bits, and four tokens in one thread: their codes are one word, which is
turned.

The bits are those of ``precision/fp8.py``. Zeros fill the last tile past the last token. Features
and sides of weights are multiples of 16; if they are no multiples of 128, the last tiles are
partial (``ragged``).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run
from shardwise.kernels.mxfp8 import bf16_bits, casts_natively, to_codes

WIDE = 128


@triton.jit
def block_scale(largest, native: tl.constexpr = False):
    """fp32 scales and their inverses, for blocks whose largest magnitudes have these bits (bf16 in
    the upper half)."""
    # 0x0D800000: 2^-100. A NaN or an infinity makes the scale of its block NaN.
    known = tl.maximum(largest, 0x0D800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest >= 0x7F800000, float("nan"), known * 0.002232142956927419)
    if native:  # the same bits, without the check for subnormals, which do not occur
        inverse = tl.inline_asm_elementwise(
            "{.reg .f32 y, e; rcp.approx.ftz.f32 y, $1; fma.rn.f32 e, $1, y, 0fBF800000;"
            " neg.f32 e, e; fma.rn.f32 $0, y, e, y;}",
            "=f,f", [scale], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return scale, inverse


@triton.jit
def _load_words(ptr, token, stride, tokens, pairs, even: tl.constexpr, ragged: tl.constexpr):
    pair = tl.arange(0, 64)[None, :]
    ptr += token * stride + pair
    if ragged:
        words = tl.load(ptr, mask=(token < tokens) & (pair < pairs), other=0)
    elif even:
        words = tl.load(ptr)
    else:
        words = tl.load(ptr, mask=token < tokens, other=0)
    return words


@triton.jit
def load_tile(ptr, stride, tokens, even: tl.constexpr, pairs=64, ragged: tl.constexpr = False):
    """Four tensors of words [32, 64], each word two neighbours in bf16: the tokens 0, 4, 8, ... of
    a tile; 1, 5, 9, ...; and so on. Words past ``tokens`` are zeros, and if ``ragged``, past
    ``pairs``. Rows are ``stride`` words apart."""
    token = 4 * tl.arange(0, 32)[:, None]
    return (
        _load_words(ptr, token, stride, tokens, pairs, even, ragged),
        _load_words(ptr, token + 1, stride, tokens, pairs, even, ragged),
        _load_words(ptr, token + 2, stride, tokens, pairs, even, ragged),
        _load_words(ptr, token + 3, stride, tokens, pairs, even, ragged),
    )


@triton.jit
def low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _larger(first, second, native: tl.constexpr = True):
    """The larger magnitudes of two words of two bf16 each; if ``native``, with any sign."""
    if native:
        words = tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [first, second], tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        lower = tl.maximum(first & 0x7FFF, second & 0x7FFF)
        words = lower | tl.maximum(first & 0x7FFF0000, second & 0x7FFF0000)
    return words


@triton.jit
def _largest(words, axis: tl.constexpr, native: tl.constexpr):
    if native:
        words = tl.reduce(words, axis, _larger, keep_dims=True)
    else:
        lower = tl.max(words & 0x7FFF, axis, keep_dims=True)
        words = lower | tl.max(words & 0x7FFF0000, axis, keep_dims=True)
    return words


@triton.jit
def _two(first, second, native: tl.constexpr):
    """Codes of two values, as one word."""
    if native:  # Triton 3.6 makes wrong words of codes of its own casts
        codes = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [first, second], tl.int16,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, second = to_codes(first, 1.0, False), to_codes(second, 1.0, False)
        codes = first.to(tl.int16) | (second.to(tl.int16) << 8)
    return codes


@triton.jit
def _write_rows(
    a, b, ptr, place, step, inside, scales_ptr, native: tl.constexpr
):  # fmt: skip
    """Write codes and scales of two rows; returns their largest magnitudes as one word, which
    halves the exchanges between threads."""
    even, odd = (a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536)
    largest = _largest(_larger(even, odd, native), 1, native)
    scale, inverse = block_scale((largest << 16) & 0x7FFF0000, native)
    tl.store(ptr + place, _two(low(a) * inverse, high(a) * inverse, native), mask=inside)
    tl.store(scales_ptr, scale)
    scale, inverse = block_scale(largest & 0x7FFF0000, native)
    tl.store(ptr + place + step, _two(low(b) * inverse, high(b) * inverse, native), mask=inside)
    tl.store(scales_ptr + 1, scale)
    return largest


@triton.jit
def _turned(a, b, c, d, inverse, native: tl.constexpr):
    """Codes of four neighbouring tokens as one word, turned."""
    codes = _two(a * inverse, b * inverse, native).to(tl.int32) & 0xFFFF
    return tl.trans(codes | (_two(c * inverse, d * inverse, native).to(tl.int32) << 16))


@triton.jit
def write_tile(
    a, b, c, d, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, band, strip, padded, total,
    rows: tl.constexpr, columns: tl.constexpr, square: tl.constexpr, native: tl.constexpr,
    pairs=64, ragged: tl.constexpr = False,
):  # fmt: skip
    """Write planes of a tile that :func:`load_tile` returned; ``rows`` and ``columns`` choose them.
    If ``ragged``, the tile has ``pairs`` pairs of features."""
    quad, pair = tl.arange(0, 32)[:, None], tl.arange(0, 64)[None, :]
    inside = pair < pairs if ragged else None
    if rows:
        # Offsets inside a tile have 32 bits, which halves the registers for addresses.
        codes_ptr += band.to(tl.int64) * 64 * total + strip * 64
        scales_ptr += strip.to(tl.int64) * padded + band * 128 + 4 * quad
        step = total // 2
        place = 4 * quad * step + pair
        left = _write_rows(a, b, codes_ptr, place, step, inside, scales_ptr, native)
        place += 2 * step
        right = _write_rows(c, d, codes_ptr, place, step, inside, scales_ptr + 2, native)
    if columns:
        quarter = padded // 4
        turned_ptr += strip.to(tl.int64) * 128 * quarter + band * 32
        if square:
            words = _largest(_larger(left, right, native), 0, native)
            words = _larger(words, words >> 16, False)
            scale, first = block_scale(words << 16, native)
            second = first
            corner = strip * (padded // 128) + band + tl.zeros([1, 1], tl.int32)
            tl.store(turned_scales_ptr + corner, scale)
        else:
            words = _larger(_larger(a, b, native), _larger(c, d, native), native)
            words = _largest(words, 0, native)
            turned_scales_ptr += band.to(tl.int64) * total + strip * 128 + 2 * pair
            scale, first = block_scale((words << 16) & 0x7FFF0000, native)
            tl.store(turned_scales_ptr, scale, mask=inside)
            scale, second = block_scale(words & 0x7FFF0000, native)
            tl.store(turned_scales_ptr + 1, scale, mask=inside)
        at = tl.trans(2 * pair * quarter) + tl.trans(quad)
        inside = tl.trans(pair) < pairs if ragged else None
        even = _turned(low(a), low(b), low(c), low(d), first, native)
        tl.store(turned_ptr + at, even, mask=inside)
        odd = _turned(high(a), high(b), high(c), high(d), second, native)
        tl.store(turned_ptr + quarter + at, odd, mask=inside)


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded, features,
    rows: tl.constexpr, columns: tl.constexpr, square: tl.constexpr, native: tl.constexpr,
    even: tl.constexpr, ragged: tl.constexpr,
):  # fmt: skip
    strips, stride = tl.cdiv(features, 128), features // 2
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    x_ptr += band.to(tl.int64) * 128 * stride + strip * 64
    pairs = features // 2 - strip * 64
    a, b, c, d = load_tile(x_ptr, stride, tokens - band * 128, even, pairs, ragged)
    write_tile(
        a, b, c, d, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, band, strip, padded,
        features, rows, columns, square, native, pairs, ragged,
    )  # fmt: skip


@triton.jit
def to_words(first, second, native: tl.constexpr):
    """fp32 values of even and odd features, as words of two bf16."""
    if native:
        words = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        lower = bf16_bits(first.to(tl.int32, bitcast=True), True) >> 16
        words = (lower & 0xFFFF) | bf16_bits(second.to(tl.int32, bitcast=True), True)
    return words


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, scales_ptr, tiles_ptr, count, rows, columns, stride,
    listed: tl.constexpr, wide: tl.constexpr, native: tl.constexpr, ragged: tl.constexpr,
):  # fmt: skip
    """Two neighbours of a row are read together, and their codes written."""
    tile = tl.program_id(0)
    one = tl.zeros([1, 1], tl.int32)  # versions of Triton store a reduced scalar differently
    if listed:  # tiles of many matrices: see ``list_tiles``
        start = tl.multiple_of(tl.load(tiles_ptr + tile), 64)
        into = tl.multiple_of(tl.load(tiles_ptr + count + tile), 64)
        number = tl.load(tiles_ptr + 2 * count + tile)
        columns = tl.multiple_of(tl.load(tiles_ptr + 3 * count + tile).to(tl.int32), 16)
        rows = tl.load(tiles_ptr + 4 * count + tile).to(tl.int32)
        pairs = tl.load(tiles_ptr + 5 * count + tile).to(tl.int32) // 2
    else:
        strips = tl.cdiv(columns, 128)
        band, strip = tile // strips, tile % strips
        start = band.to(tl.int64) * 128 * columns + strip * 128
        into, number = start, band * stride + strip
        rows, pairs = rows - band * 128, columns // 2 - strip * 64
    line, pair = tl.arange(0, 128)[:, None], tl.arange(0, 64)[None, :]
    place = line * (columns // 2) + pair
    inside = (line < rows) & (pair < pairs) if ragged else None
    words = tl.load(x_ptr + start // 2 + place, mask=inside, other=0 if ragged else None)
    if wide:
        first, second = words.to(tl.int32), (words >> 32).to(tl.int32)
        first, second = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
        words = to_words(first, second, native)
    largest = _largest(_largest(words, 1, native), 0, native)
    largest = (_larger(largest, largest >> 16, False) & 0x7FFF) << 16
    scale, inverse = block_scale(largest, native)
    codes = _two(low(words) * inverse, high(words) * inverse, native)
    tl.store(codes_ptr + into // 2 + place, codes, mask=inside)
    tl.store(scales_ptr + number + one, scale)


@triton.jit
def _turn_kernel(
    codes_ptr, scales_ptr, out_ptr, out_scales_ptr, rows, columns, stride, ragged: tl.constexpr
):  # fmt: skip
    strips = tl.cdiv(columns, 128)
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    line, lane = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    left, right = rows - band * 128, columns - strip * 128
    inside = (line < left) & (lane < right) if ragged else None
    place = band.to(tl.int64) * 128 * columns + strip * 128 + line * columns + lane
    tile = tl.load(codes_ptr + place, mask=inside)
    start = strip.to(tl.int64) * 128 * rows + band * 128
    inside = (line < right) & (lane < left) if ragged else None
    tl.store(out_ptr + start + line * rows + lane, tl.trans(tile), mask=inside)
    scale = tl.load(scales_ptr + band * stride + strip)
    tl.store(out_scales_ptr + strip * tl.cdiv(rows, 128) + band, scale)


def _pairs(x: Tensor) -> Tensor:
    return x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)


def quantise(
    x: Tensor,  # [tokens, features], contiguous bf16; features a multiple of 16
    planes: tuple[Tensor, Tensor] | None,  # uint8 [padded, features], fp32 [features / 128, padded]
    turned: tuple[Tensor, Tensor] | None,  # uint8 [features, padded], fp32 [padded / 128, features]
    *,
    square: bool = False,  # of turned, with both: fp32 [features / 128, padded / 128]
) -> None:
    """Fill the given planes; ``padded``: the number of tokens, rounded up to a multiple of 128."""
    assert not square or planes, "the rows find the largest magnitude of a tile"
    tokens, features = x.shape
    padded = -(-tokens // WIDE) * WIDE
    if not tokens:
        return
    codes, scales = (planes[0].view(torch.int16), planes[1]) if planes else (x, x)
    others, other_scales = (turned[0].view(torch.int32), turned[1]) if turned else (x, x)
    # Warps: measured on an H200 with 4, 8 and 16, and with fewer registers, which takes longer.
    run(
        _quantise_kernel, (padded // WIDE * triton.cdiv(features, WIDE),),
        x.view(torch.int32), codes, scales, others, other_scales, tokens, padded, features,
        rows=planes is not None, columns=turned is not None, square=square,
        native=casts_natively(x.device), even=tokens == padded,
        ragged=features % WIDE > 0, num_warps=8 if square else 4,
    )  # fmt: skip


class Matrix(NamedTuple):
    """The place of a matrix in flat tensors of values and of codes, in elements."""

    rows: int
    columns: int
    start: int
    into: int
    scale: int = 0  # the place of its first scale
    step: int = 0  # from a row of scales to the next; 0: as many as there are


class Tiles(NamedTuple):
    """The tiles of many matrices, for one launch."""

    # int64 [6, n]: the places of a tile's first value, first code and scale, the columns of its
    # matrix, and the numbers of rows and columns from the tile to the end of the matrix.
    entries: Tensor
    ragged: bool  # whether any tiles are partial


def list_tiles(matrices: Sequence[Matrix], device: torch.device) -> Tiles:
    """The tiles of some matrices in flat tensors."""
    entries = []
    for rows, columns, start, into, first_scale, step in matrices:
        bands, strips = -(-rows // WIDE), -(-columns // WIDE)
        number = torch.arange(bands * strips)
        band, strip = number // strips, number % strips
        inside = (band * columns + strip) * WIDE
        scale = first_scale + band * (step or strips) + strip
        left = rows - band * WIDE, columns - strip * WIDE
        wide = torch.full_like(number, columns)
        entries.append(torch.stack([start + inside, into + inside, scale, wide, *left]))
    return Tiles(
        torch.cat(entries, 1).to(device),
        any(matrix.rows % WIDE or matrix.columns % WIDE for matrix in matrices),
    )


def encode(
    x: Tensor,  # [rows, columns], contiguous, bf16 or fp32; both multiples of 16
    codes: Tensor,  # uint8 [rows, columns]
    scales: Tensor,  # fp32 [rows / 128, columns / 128], rounded up; rows may have any stride
    *,
    tiles: Tiles | None = None,
) -> None:
    """Encode one matrix, or ``tiles`` of many matrices in flat tensors."""
    if tiles is None:
        (rows, columns), stride, count = x.shape, scales.stride(0), scales.numel()
        ragged = bool(rows % WIDE or columns % WIDE)
    else:
        rows = columns = stride = WIDE  # not used: each tile is listed with its numbers
        count, ragged = tiles.entries.shape[1], tiles.ragged
    if not count:
        return
    run(
        _encode_kernel, (count,),
        _pairs(x), codes.view(torch.int16), scales, x if tiles is None else tiles.entries,
        count, rows, columns, stride,
        listed=tiles is not None, wide=x.dtype == torch.float32,
        native=casts_natively(x.device), ragged=ragged, num_warps=16,
    )  # fmt: skip


def turn(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The transposes of uint8 [rows, columns], and of the scales of its blocks, in new memory."""
    rows, columns = codes.shape
    out = codes.new_empty(columns, rows)
    out_scales = scales.new_empty(scales.shape[1], scales.shape[0])
    run(
        _turn_kernel, (scales.numel(),), codes, scales, out, out_scales, rows, columns,
        scales.stride(0), ragged=bool(rows % WIDE or columns % WIDE), num_warps=8,
    )  # fmt: skip
    return out, out_scales
