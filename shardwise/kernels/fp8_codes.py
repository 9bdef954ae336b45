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
and sides of weights are multiples of 128.
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
def _load_words(ptr, token, stride, tokens, even: tl.constexpr):
    ptr += token * stride + tl.arange(0, 64)[None, :]
    if even:
        words = tl.load(ptr)
    else:
        words = tl.load(ptr, mask=token < tokens, other=0)
    return words


@triton.jit
def load_tile(ptr, stride, tokens, even: tl.constexpr):
    """Four tensors of words [32, 64], each word two neighbours in bf16: the tokens 0, 4, 8, ... of
    a tile; 1, 5, 9, ...; and so on. Words past ``tokens`` are zeros. Rows are ``stride`` words
    apart."""
    token = 4 * tl.arange(0, 32)[:, None]
    return (
        _load_words(ptr, token, stride, tokens, even),
        _load_words(ptr, token + 1, stride, tokens, even),
        _load_words(ptr, token + 2, stride, tokens, even),
        _load_words(ptr, token + 3, stride, tokens, even),
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
def _write_rows(a, b, ptr, place, step, scales_ptr, native: tl.constexpr):
    """Write codes and scales of two rows; returns their largest magnitudes as one word, which
    halves the exchanges between threads."""
    even, odd = (a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536)
    largest = _largest(_larger(even, odd, native), 1, native)
    scale, inverse = block_scale((largest << 16) & 0x7FFF0000, native)
    tl.store(ptr + place, _two(low(a) * inverse, high(a) * inverse, native))
    tl.store(scales_ptr, scale)
    scale, inverse = block_scale(largest & 0x7FFF0000, native)
    tl.store(ptr + place + step, _two(low(b) * inverse, high(b) * inverse, native))
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
):  # fmt: skip
    """Write planes of a tile that :func:`load_tile` returned; ``rows`` and ``columns`` choose."""
    quad, pair = tl.arange(0, 32)[:, None], tl.arange(0, 64)[None, :]
    if rows:
        # Offsets inside a tile have 32 bits, which halves the registers for addresses.
        codes_ptr += band.to(tl.int64) * 64 * total + strip * 64
        scales_ptr += strip.to(tl.int64) * padded + band * 128 + 4 * quad
        step = total // 2
        place = 4 * quad * step + pair
        left = _write_rows(a, b, codes_ptr, place, step, scales_ptr, native)
        place += 2 * step
        right = _write_rows(c, d, codes_ptr, place, step, scales_ptr + 2, native)
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
            tl.store(turned_scales_ptr, scale)
            scale, second = block_scale(words & 0x7FFF0000, native)
            tl.store(turned_scales_ptr + 1, scale)
        at = tl.trans(2 * pair * quarter) + tl.trans(quad)
        even = _turned(low(a), low(b), low(c), low(d), first, native)
        tl.store(turned_ptr + at, even)
        odd = _turned(high(a), high(b), high(c), high(d), second, native)
        tl.store(turned_ptr + quarter + at, odd)


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded, features,
    rows: tl.constexpr, columns: tl.constexpr, square: tl.constexpr, native: tl.constexpr,
    even: tl.constexpr,
):  # fmt: skip
    strips, stride = features // 128, features // 2
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    x_ptr += band.to(tl.int64) * 128 * stride + strip * 64
    a, b, c, d = load_tile(x_ptr, stride, tokens - band * 128, even)
    write_tile(
        a, b, c, d, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, band, strip, padded,
        features, rows, columns, square, native,
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
    x_ptr, codes_ptr, scales_ptr, tiles_ptr, count, columns,
    listed: tl.constexpr, wide: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    """Two neighbours of a row are read together, and their codes written."""
    tile = tl.program_id(0)
    one = tl.zeros([1, 1], tl.int32)  # versions of Triton store a reduced scalar differently
    if listed:  # tiles of many matrices: see ``list_tiles``
        start = tl.multiple_of(tl.load(tiles_ptr + tile), 128)
        number = tl.load(tiles_ptr + count + tile)
        columns = tl.multiple_of(tl.load(tiles_ptr + 2 * count + tile).to(tl.int32), 128)
    else:
        strips = columns // 128
        start = (tile // strips).to(tl.int64) * 128 * columns + tile % strips * 128
        number = tile
    place = tl.arange(0, 128)[:, None] * (columns // 2) + tl.arange(0, 64)[None, :]
    words = tl.load(x_ptr + start // 2 + place)
    if wide:
        first, second = words.to(tl.int32), (words >> 32).to(tl.int32)
        first, second = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
        words = to_words(first, second, native)
    largest = _largest(_largest(words, 1, native), 0, native)
    largest = (_larger(largest, largest >> 16, False) & 0x7FFF) << 16
    scale, inverse = block_scale(largest, native)
    codes = _two(low(words) * inverse, high(words) * inverse, native)
    tl.store(codes_ptr + start // 2 + place, codes)
    tl.store(scales_ptr + number + one, scale)


@triton.jit
def _turn_kernel(codes_ptr, scales_ptr, out_ptr, out_scales_ptr, rows, columns):
    strips = columns // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    line, lane = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    place = band.to(tl.int64) * 128 * columns + strip * 128 + line * columns + lane
    tile = tl.load(codes_ptr + place)
    start = strip.to(tl.int64) * 128 * rows + band * 128
    tl.store(out_ptr + start + line * rows + lane, tl.trans(tile))
    scale = tl.load(scales_ptr + tl.program_id(0))
    tl.store(out_scales_ptr + strip * (rows // 128) + band, scale)


def _pairs(x: Tensor) -> Tensor:
    return x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)


def quantise(
    x: Tensor,  # [tokens, features], contiguous bf16; features a multiple of 128
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
        _quantise_kernel, (padded // WIDE * (features // WIDE),),
        x.view(torch.int32), codes, scales, others, other_scales, tokens, padded, features,
        rows=planes is not None, columns=turned is not None, square=square,
        native=casts_natively(x.device), even=tokens == padded, num_warps=8 if square else 4,
    )  # fmt: skip


class Matrix(NamedTuple):
    """A matrix in flat tensors: its sides, and the places of its first element and scale."""

    rows: int
    columns: int
    start: int
    scale: int


def list_tiles(matrices: Sequence[Matrix], device: torch.device) -> Tensor:
    """The tiles of some matrices, for one launch: int64 [3, n], the places of the first element and
    of the scale of each tile, and the columns of its matrix."""
    entries = []
    for rows, columns, start, scale in matrices:
        strips = columns // WIDE
        number = torch.arange(rows // WIDE * strips)
        inside = (number // strips * columns + number % strips) * WIDE
        wide = torch.full_like(number, columns)
        entries.append(torch.stack([start + inside, scale + number, wide]))
    return torch.cat(entries, 1).to(device)


def encode(
    x: Tensor,  # [rows, columns], contiguous, bf16 or fp32; both multiples of 128
    codes: Tensor,  # uint8 [rows, columns]
    scales: Tensor,  # fp32 [rows / 128, columns / 128], contiguous
    *,
    tiles: Tensor | None = None,
) -> None:
    """Encode one matrix, or ``tiles`` of many matrices in flat tensors."""
    count = scales.numel() if tiles is None else tiles.shape[1]
    if not count:
        return
    run(
        _encode_kernel, (count,),
        _pairs(x), codes.view(torch.int16), scales, x if tiles is None else tiles, count,
        x.shape[-1] if tiles is None else WIDE,
        listed=tiles is not None, wide=x.dtype == torch.float32,
        native=casts_natively(x.device), num_warps=16,
    )  # fmt: skip


def turn(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The transposes of uint8 [rows, columns], and of the scales of its blocks, in new memory."""
    rows, columns = codes.shape
    out = codes.new_empty(columns, rows)
    out_scales = scales.new_empty(scales.shape[1], scales.shape[0])
    grid = (scales.numel(),)
    run(_turn_kernel, grid, codes, scales, out, out_scales, rows, columns, num_warps=8)
    return out, out_scales
