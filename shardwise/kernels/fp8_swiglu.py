# SPDX-License-Identifier: Apache-2.0
"""silu(gate) · up as fp8 codes in both orientations, rows in 1x128 and turned in 128x128: see
``fp8_block.py``.

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
# On an H200, of 16384x14336: 426 us, five other tiles took 452 to 539; in a step 448 instead of 583
# for torch's SwiGLU and the quantiser after it. For the gradients of gate and up such a kernel
# took as long (1126) as torch's and the quantiser.
TILE = Tile(warps=8, tokens=64, pairs=64)


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
    gate_ptr, up_ptr, place, gate_stride, up_stride, token, inside, even: tl.constexpr,
    assembly: tl.constexpr,
):  # fmt: skip
    """The words of h; rows lie ``gate_stride`` and ``up_stride`` words apart."""
    if even:
        gate = tl.load(gate_ptr + token * gate_stride + place)
        up = tl.load(up_ptr + token * up_stride + place)
    else:
        gate = tl.load(gate_ptr + token * gate_stride + place, mask=inside, other=0)
        up = tl.load(up_ptr + token * up_stride + place, mask=inside, other=0)
    low, high = sigmoid(_low(gate), assembly), sigmoid(_high(gate), assembly)
    return _words(_low(gate) * low * _low(up), _high(gate) * high * _high(up), assembly)


@triton.jit
def _kernel(
    gate_ptr, up_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded,
    features, gate_stride, up_stride, rceil: tl.constexpr, even: tl.constexpr,
    assembly: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    strips = features // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    gate_ptr += band.to(tl.int64) * 128 * gate_stride + strip * 64
    up_ptr += band.to(tl.int64) * 128 * up_stride + strip * 64
    codes_ptr += band.to(tl.int64) * 64 * features + strip * 64
    turned_ptr += strip.to(tl.int64) * 128 * padded + band * 128
    scales_ptr += strip.to(tl.int64) * padded + band * 128
    whole = tl.zeros([1, 1], tl.int32)  # the largest of the tile
    for part in range(128 // high):
        token, pair = part * high + tl.arange(0, high)[:, None], tl.arange(0, 64)[None, :]
        inside = band * 128 + token < tokens
        words = _values(
            gate_ptr, up_ptr, pair, gate_stride, up_stride, token, inside, even, assembly
        )
        largest = row_largest(words)
        whole = tl.maximum(whole, tl.max(largest, axis=0, keep_dims=True))
        place = token * (features // 2) + pair
        write_rows(words, largest, codes_ptr, place, scales_ptr + token, rceil, assembly)
    scale, inverse = block_scale(whole, rceil)
    # A name of its own: Triton takes a variable from before a loop for one of the loop.
    corner = strip * (padded // 128) + band + tl.zeros([1, 1], tl.int32)
    tl.store(turned_scales_ptr + corner, scale)
    for part in range(64 // wide):  # the tile again, out of the cache
        token, pair = tl.arange(0, 128)[:, None], part * wide + tl.arange(0, wide)[None, :]
        inside = band * 128 + token < tokens
        words = _values(
            gate_ptr, up_ptr, pair, gate_stride, up_stride, token, inside, even, assembly
        )
        place = tl.trans(pair * 2 * padded) + tl.trans(token)
        write_turned(
            words, turned_ptr, place, padded, turned_scales_ptr, inverse, True, rceil, assembly
        )


def swiglu(
    gate: Tensor,  # bf16 [tokens, features], rows contiguous; features a multiple of 128
    up: Tensor,
    planes: Planes,  # of ``fp8_block.quantise``, turned in 128x128
    *,
    rounding: str = "exact",
    tile: Tile = TILE,
) -> None:
    """Fill the planes of silu(gate) · up."""
    tokens, features = gate.shape
    padded = -(-tokens // WIDE) * WIDE
    if not tokens:
        return
    codes, *others = planes
    run(
        _kernel, (padded // WIDE * (features // WIDE),),
        gate.view(torch.int32), up.view(torch.int32), codes.view(torch.int16), *others,
        tokens, padded, features, gate.stride(0) // 2, up.stride(0) // 2,
        rceil=rounding == "rceil", even=tokens == padded, assembly=not interpreted(),
        high=tile.tokens, wide=tile.pairs, num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
