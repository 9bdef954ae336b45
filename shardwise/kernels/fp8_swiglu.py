# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and its gradient, written as fp8 codes in both orientations: see ``fp8_block.py``.

::

    forward     gate, up       ->  h = silu(gate) · up      rows in 1x128, turned in 128x128
    backward    dh, gate, up   ->  dgate, dup               rows in 1x128, turned in 1x128

Values are computed once, in fp32, and rounded to bf16 before they become codes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.fp8_block import WIDE, high, load_tile, low, write_tile
from shardwise.kernels.grouped import interpreted
from shardwise.kernels.grouped_activation import sigmoid
from shardwise.kernels.launch import run
from shardwise.kernels.mxfp8 import bf16_bits
from shardwise.kernels.symmetric import multiprocessors

# Tiles of which backward loads some ahead; forward has a program for each tile. On an H200, of
# 16384x14336: backward 740 us, where torch's and the quantiser after it took 545 and 580; the first
# form of this kernel 756, with two stages 911, with a program for each tile 794 to 1295.
STAGES = 3


@triton.jit
def _words(first, second, assembly: tl.constexpr):
    """fp32 values of an even and an odd feature, as words of two bf16."""
    if assembly:
        words = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        lower = bf16_bits(first.to(tl.int32, bitcast=True), True) >> 16
        words = (lower & 0xFFFF) | bf16_bits(second.to(tl.int32, bitcast=True), True)
    return words


@triton.jit
def _h(gate, up, assembly: tl.constexpr):
    even = low(gate) * sigmoid(low(gate), assembly) * low(up)
    return _words(even, high(gate) * sigmoid(high(gate), assembly) * high(up), assembly)


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded,
    features, gate_stride, up_stride, rceil: tl.constexpr, even: tl.constexpr,
    assembly: tl.constexpr,
):  # fmt: skip
    strips = features // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    start, left = band.to(tl.int64) * 128, tokens - band * 128
    gate = load_tile(gate_ptr + start * gate_stride + strip * 64, gate_stride, left, even)
    up = load_tile(up_ptr + start * up_stride + strip * 64, up_stride, left, even)
    write_tile(
        _h(gate[0], up[0], assembly), _h(gate[1], up[1], assembly), _h(gate[2], up[2], assembly),
        _h(gate[3], up[3], assembly), codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, band,
        strip, padded, features, True, True, True, rceil, assembly,
    )  # fmt: skip


@triton.jit
def _of_gate(dh, gate, up, sigma):
    return dh * up * sigma * (1.0 + gate * (1.0 - sigma))


@triton.jit
def _gradients(dh, gate, up, assembly: tl.constexpr):
    """The words of the gradients of gate and of up."""
    lower, upper = sigmoid(low(gate), assembly), sigmoid(high(gate), assembly)
    even = _of_gate(low(dh), low(gate), low(up), lower)
    of_gate = _words(even, _of_gate(high(dh), high(gate), high(up), upper), assembly)
    return of_gate, _words(low(dh) * low(gate) * lower, high(dh) * high(gate) * upper, assembly)


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr, gate_ptr, up_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded,
    features, gate_stride, up_stride, tiles, gate_first: tl.constexpr, rceil: tl.constexpr,
    even: tl.constexpr, assembly: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    strips, stride = features // 128, features // 2
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=stages):
        band, strip = tile // strips, tile % strips
        start, left = band.to(tl.int64) * 128, tokens - band * 128
        gate = load_tile(gate_ptr + start * gate_stride + strip * 64, gate_stride, left, even)
        up = load_tile(up_ptr + start * up_stride + strip * 64, up_stride, left, even)
        dh = load_tile(dh_ptr + start * stride + strip * 64, stride, left, even)
        a, a2 = _gradients(dh[0], gate[0], up[0], assembly)
        b, b2 = _gradients(dh[1], gate[1], up[1], assembly)
        c, c2 = _gradients(dh[2], gate[2], up[2], assembly)
        d, d2 = _gradients(dh[3], gate[3], up[3], assembly)
        write_tile(
            a, b, c, d, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, band,
            strip if gate_first else strip + strips, padded, 2 * features, True, True, False,
            rceil, assembly,
        )  # fmt: skip
        write_tile(
            a2, b2, c2, d2, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, band,
            strip + strips if gate_first else strip, padded, 2 * features, True, True, False,
            rceil, assembly,
        )  # fmt: skip


def swiglu(
    sources: Sequence[Tensor],
    planes: Sequence[Tensor],
    *,
    gate_first: bool = True,
    rounding: str = "exact",
) -> None:
    """Fill the planes of ``fp8_block.quantise``.

    Args:
        sources: gate and up, or dh, gate and up: bf16 [tokens, features], rows contiguous, those of
            dh one after another; features a multiple of 128.
        planes: of silu(gate) · up, turned in 128x128; or of the gradients of gate and up, side by
            side, turned in 1x128.
        gate_first: whether the gradient of gate is the first of the two.
    """
    tokens, features = sources[0].shape
    padded = -(-tokens // WIDE) * WIDE
    if not tokens:
        return
    codes, scales, turned, turned_scales = planes
    *_, gate, up = words = [source.view(torch.int32) for source in sources]
    arguments = (
        *words, codes.view(torch.int16), scales, turned.view(torch.int32), turned_scales,
        tokens, padded, features, gate.stride(0), up.stride(0),
    )  # fmt: skip
    tiles = padded // WIDE * (features // WIDE)
    constants = {"rceil": rounding == "rceil", "even": tokens == padded, "num_warps": 16}
    constants["assembly"] = not interpreted()
    if len(sources) == 2:
        run(_swiglu_kernel, (tiles,), *arguments, **constants)
    else:
        constants |= {"gate_first": gate_first, "stages": STAGES}
        programs = min(tiles, multiprocessors(gate.device))
        run(_swiglu_backward_kernel, (programs,), *arguments, tiles, **constants)
