# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and its gradient as fp8 codes in both orientations: see ``fp8_codes.py``.

::

    SwiGLU      gate, up            ->  h = silu(gate) · up      rows in 1x128, turned in 128x128
    gradients   dh, gate, up        ->  dgate; dup               rows in 1x128, turned in 1x128

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

from shardwise.kernels.fp8_codes import WIDE, high, load_tile, low, to_words, write_tile
from shardwise.kernels.grouped import interpreted
from shardwise.kernels.grouped_activation import sigmoid
from shardwise.kernels.launch import multiprocessors, run

# A program of backward computes many tiles and loads ahead; forward has a program for each tile. On
# an H200, 16384x14336: backward takes 625 us (torch's gradient and then the quantiser 545 and 580);
# with 16 warps 742, with two stages and twice the programs 817, with one stage 945 to 1290.
STAGES, WARPS = 3, 8


@triton.jit
def _h(gate, up, assembly: tl.constexpr):
    even = low(gate) * sigmoid(low(gate), assembly) * low(up)
    return to_words(even, high(gate) * sigmoid(high(gate), assembly) * high(up), assembly)


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, tokens, padded,
    features, gate_stride, up_stride, even: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    strips = features // 128
    band, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    start, left = band.to(tl.int64) * 128, tokens - band * 128
    gate = load_tile(gate_ptr + start * gate_stride + strip * 64, gate_stride, left, even)
    up = load_tile(up_ptr + start * up_stride + strip * 64, up_stride, left, even)
    write_tile(
        _h(gate[0], up[0], assembly), _h(gate[1], up[1], assembly), _h(gate[2], up[2], assembly),
        _h(gate[3], up[3], assembly), codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, band,
        strip, padded, features, True, True, True, assembly,
    )  # fmt: skip


@triton.jit
def _of_gate(dh, gate, up, sigma):
    return dh * up * sigma * (1.0 + gate * (1.0 - sigma))


@triton.jit
def _gradients(dh, gate, up, assembly: tl.constexpr):
    """The words of the gradients of gate and of up."""
    lower, upper = sigmoid(low(gate), assembly), sigmoid(high(gate), assembly)
    even = _of_gate(low(dh), low(gate), low(up), lower)
    of_gate = to_words(even, _of_gate(high(dh), high(gate), high(up), upper), assembly)
    return of_gate, to_words(low(dh) * low(gate) * lower, high(dh) * high(gate) * upper, assembly)


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr, gate_ptr, up_ptr,
    gate_codes_ptr, gate_scales_ptr, gate_turned_ptr, gate_turned_scales_ptr,
    up_codes_ptr, up_scales_ptr, up_turned_ptr, up_turned_scales_ptr,
    tokens, padded, features, gate_stride, up_stride, tiles,
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
            a, b, c, d, gate_codes_ptr, gate_scales_ptr, gate_turned_ptr, gate_turned_scales_ptr,
            band, strip, padded, features, True, True, False, assembly,
        )  # fmt: skip
        write_tile(
            a2, b2, c2, d2, up_codes_ptr, up_scales_ptr, up_turned_ptr, up_turned_scales_ptr,
            band, strip, padded, features, True, True, False, assembly,
        )  # fmt: skip


Planes = Sequence[Tensor]  # those of ``fp8_block.quantise``


def swiglu(gate: Tensor, up: Tensor, planes: Planes) -> None:
    """Fill the planes of silu(gate) · up, turned in 128x128. ``gate`` and ``up``: bf16 [tokens,
    features]; features are a multiple of 128, and rows are contiguous."""
    if tiles := _tiles(gate):
        arguments = (*_words(gate, up), *_raw(planes), *_sizes(gate, up))
        run(_swiglu_kernel, (tiles,), *arguments, **_constants(gate), num_warps=16)


def swiglu_backward(
    dh: Tensor,  # contiguous
    gate: Tensor,
    up: Tensor,
    of_gate: Planes,
    of_up: Planes,
) -> None:
    """Fill the planes of the gradients of gate and of up, turned in 1x128."""
    if tiles := _tiles(gate):
        arguments = (*_words(dh, gate, up), *_raw(of_gate), *_raw(of_up), *_sizes(gate, up), tiles)
        constants = _constants(gate) | {"stages": STAGES, "num_warps": WARPS}
        programs = min(tiles, multiprocessors(gate.device))
        run(_swiglu_backward_kernel, (programs,), *arguments, **constants)


def _tiles(gate: Tensor) -> int:
    return -(-gate.shape[0] // WIDE) * (gate.shape[1] // WIDE)


def _words(*sources: Tensor) -> list[Tensor]:
    return [source.view(torch.int32) for source in sources]


def _raw(planes: Planes) -> tuple[Tensor, ...]:
    codes, scales, turned, turned_scales = planes
    return codes.view(torch.int16), scales, turned.view(torch.int32), turned_scales


def _sizes(gate: Tensor, up: Tensor) -> tuple[int, ...]:
    """Tokens, tokens with padding, features, and the strides of rows in words."""
    tokens, features = gate.shape
    padded = -(-tokens // WIDE) * WIDE
    return tokens, padded, features, gate.stride(0) // 2, up.stride(0) // 2


def _constants(gate: Tensor) -> dict[str, int]:
    even = gate.shape[0] % WIDE == 0
    return {"even": even, "assembly": not interpreted()}
