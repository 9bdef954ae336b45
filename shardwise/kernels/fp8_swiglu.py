# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and its gradient, written as fp8 codes in both orientations: see ``fp8_block.py``.

::

    forward     gate, up       ->  h = silu(gate) · up      rows in 1x128, turned in 128x128
    backward    dh, gate, up   ->  dgate, dup               rows in 1x128, turned in 1x128

A tile of 128 x 128 is computed once for each orientation, the second time out of the cache: the
memory takes longer than either. Values are computed in fp32 and rounded to bf16 before they become
codes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.fp8_block import (
    WIDE,
    Tile,
    block_scale,
    row_largest,
    write_rows,
    write_turned,
)
from shardwise.kernels.grouped import interpreted
from shardwise.kernels.grouped_activation import sigmoid
from shardwise.kernels.launch import run
from shardwise.kernels.mxfp8 import bf16_bits

Planes = Sequence[Tensor]  # codes, scales, turned, turned scales
FORWARD_TILE = Tile(warps=4, tokens=64, pairs=32)
BACKWARD_TILE = Tile(warps=4, tokens=32, pairs=32)


@triton.jit
def _words(first, second, assembly: tl.constexpr):
    """fp32 values of an even and an odd feature, as words of two bf16."""
    if assembly:
        words = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        low = bf16_bits(first.to(tl.int32, bitcast=True), True) >> 16
        words = (low & 0xFFFF) | bf16_bits(second.to(tl.int32, bitcast=True), True)
    return words


@triton.jit
def _low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _values(
    dh_ptr, gate_ptr, up_ptr, place, gate_stride, up_stride, stride, token, inside,
    back: tl.constexpr, even: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    """The words of h twice, or of the gradients of gate and of up. ``place``: of the first token;
    rows lie ``stride`` words apart."""
    if even:
        gate = tl.load(gate_ptr + token * gate_stride + place)
        up = tl.load(up_ptr + token * up_stride + place)
    else:
        gate = tl.load(gate_ptr + token * gate_stride + place, mask=inside, other=0)
        up = tl.load(up_ptr + token * up_stride + place, mask=inside, other=0)
    low, high = sigmoid(_low(gate), assembly), sigmoid(_high(gate), assembly)
    if back:
        if even:
            dh = tl.load(dh_ptr + token * stride + place)
        else:
            dh = tl.load(dh_ptr + token * stride + place, mask=inside, other=0)
        second = _words(_low(dh) * _low(gate) * low, _high(dh) * _high(gate) * high, assembly)
        first = _words(
            _low(dh) * _low(up) * low * (1.0 + _low(gate) * (1.0 - low)),
            _high(dh) * _high(up) * high * (1.0 + _high(gate) * (1.0 - high)),
            assembly,
        )
    else:
        first = _words(_low(gate) * low * _low(up), _high(gate) * high * _high(up), assembly)
        second = first
    return first, second


@triton.jit
def _kernel(
    dh_ptr, gate_ptr, up_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded,
    features, gate_stride, up_stride, back: tl.constexpr, gate_first: tl.constexpr,
    rceil: tl.constexpr, even: tl.constexpr, assembly: tl.constexpr, high: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    strips = features // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    total = features
    mine, other = strip, strip  # the strips that the first and the second value are written to
    if back:
        total = 2 * features
        mine += 0 if gate_first else strips
        other += strips if gate_first else 0
    dh_ptr += band.to(tl.int64) * 64 * features + strip * 64
    gate_ptr += band.to(tl.int64) * 128 * gate_stride + strip * 64
    up_ptr += band.to(tl.int64) * 128 * up_stride + strip * 64
    codes_ptr += band.to(tl.int64) * 64 * total
    turned_ptr += band * 128
    whole = tl.zeros([1, 1], tl.int32)  # the largest of the tile
    for part in range(128 // high):
        token, pair = part * high + tl.arange(0, high)[:, None], tl.arange(0, 64)[None, :]
        first, second = _values(
            dh_ptr, gate_ptr, up_ptr, pair, gate_stride, up_stride, features // 2, token,
            band * 128 + token < tokens, back, even, assembly,
        )  # fmt: skip
        largest = row_largest(first)
        whole = tl.maximum(whole, tl.max(largest, axis=0, keep_dims=True))
        place = token * (total // 2) + pair
        at = scales_ptr + band * 128 + token
        write_rows(
            first, largest, codes_ptr + mine * 64, place, at + mine.to(tl.int64) * padded, rceil,
            assembly,
        )  # fmt: skip
        if back:
            write_rows(
                second, row_largest(second), codes_ptr + other * 64, place,
                at + other.to(tl.int64) * padded, rceil, assembly,
            )  # fmt: skip
    scale, inverse = block_scale(whole, rceil)
    if not back:
        # A name of its own: Triton takes a variable from before a loop for one of the loop.
        corner = strip * (padded // 128) + band + tl.zeros([1, 1], tl.int32)
        tl.store(turned_scales_ptr + corner, scale)
    for part in range(64 // wide):  # the tile again, out of the cache
        token, pair = tl.arange(0, 128)[:, None], part * wide + tl.arange(0, wide)[None, :]
        first, second = _values(
            dh_ptr, gate_ptr, up_ptr, pair, gate_stride, up_stride, features // 2, token,
            band * 128 + token < tokens, back, even, assembly,
        )  # fmt: skip
        place = tl.trans(pair * 2 * padded) + tl.trans(token)
        at = turned_scales_ptr + band.to(tl.int64) * total + tl.trans(pair * 2)
        write_turned(
            first, turned_ptr + mine.to(tl.int64) * 128 * padded, place, padded, at + mine * 128,
            inverse, not back, rceil, assembly,
        )  # fmt: skip
        if back:
            write_turned(
                second, turned_ptr + other.to(tl.int64) * 128 * padded, place, padded,
                at + other * 128, inverse, False, rceil, assembly,
            )  # fmt: skip


def forward(
    gate: Tensor,  # bf16 [tokens, features], rows contiguous; features a multiple of 128
    up: Tensor,
    planes: Planes,  # of ``fp8_block.quantise``, turned in 128x128
    *,
    rounding: str = "exact",
    tile: Tile | None = None,
) -> None:
    """Fill the planes of silu(gate) · up."""
    _run((gate, gate, up), planes, tile or FORWARD_TILE, rounding, False, True)


def backward(
    dh: Tensor,  # bf16 [tokens, features], contiguous
    gate: Tensor,
    up: Tensor,
    planes: Planes,  # of ``fp8_block.quantise`` of 2 · features, turned in 1x128
    *,
    gate_first: bool = True,
    rounding: str = "exact",
    tile: Tile | None = None,
) -> None:
    """Fill the planes of the gradients of gate and up, side by side."""
    _run((dh, gate, up), planes, tile or BACKWARD_TILE, rounding, True, gate_first)


def _run(
    sources: Sequence[Tensor], planes: Planes, tile: Tile, rounding: str, back: bool, first: bool
) -> None:
    tokens, features = sources[0].shape
    padded = -(-tokens // WIDE) * WIDE
    if not tokens:
        return
    codes, *others = planes
    strides = [source.stride(0) // 2 for source in sources[1:]]
    run(
        _kernel, (padded // WIDE * (features // WIDE),),
        *(source.view(torch.int32) for source in sources), codes.view(torch.int16), *others,
        tokens, padded, features, *strides, back=back, gate_first=first,
        rceil=rounding == "rceil", even=tokens == padded, assembly=not interpreted(),
        high=tile.tokens, wide=tile.pairs, num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
