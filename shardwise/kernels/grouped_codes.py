# SPDX-License-Identifier: Apache-2.0
"""Rows of experts as fp8 codes: the activation that writes them, and their turn (transpose) for dW.

::

    forward     z, p       ->  h                      a program: whole rows, so that each has
    backward    dh, z, p   ->  dz, h again, dp        one scale, a power of two

    turn        codes [rows, columns]  ->  [columns, blocks of 128 rows of one expert each]

        rows     | expert 0 .... | expert 2 .. | expert 3 ........... |   (1 has none)
        turned   | 0     | 0   00| 2        000| 3     | 3     | 3 000|   zeros to the end

The gradient of a weight sums over rows, and both operands of an fp8 product have the summed
dimension innermost. Scales of rows cannot be factored out of that sum. So the product of a row's
two scales, divided by the largest such product of the expert, is multiplied into the codes of one
side. All scales are powers of two, so this rounds only values below the normal numbers of e4m3.

Values are rounded to bf16 before they become codes, as in the separate passes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.fp8_codes import WIDE, block_scale
from shardwise.kernels.grouped import ActivationNumbers, interpreted, max_blocks
from shardwise.kernels.grouped_activation import act_backward, act_forward, places, rounded
from shardwise.kernels.grouped_fc1 import first_row
from shardwise.kernels.launch import run
from shardwise.kernels.mxfp8 import bf16_bits, from_codes, to_codes

WIDEST = 8192  # the most columns of h: a program holds whole rows in registers

Coded = tuple[Tensor, Tensor]  # uint8 [rows, columns], fp32 [rows]


@triton.jit
def _load(ptr, place, inside):
    """bf16 values as fp32, converted by their bits, because the interpreter has no bf16."""
    raw = tl.load(ptr + place, mask=inside, other=0)
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bits(value, assembly: tl.constexpr):
    """The bits of fp32 values rounded to bf16, as the upper half of int32."""
    if assembly:
        bits = rounded(value, tl.bfloat16, True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        bits = bf16_bits(value.to(tl.int32, bitcast=True), True)
    return bits


@triton.jit
def _largest(bits):
    return tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True)


@triton.jit
def _codes(bits, inverse, native: tl.constexpr):
    return to_codes(bits.to(tl.float32, bitcast=True), inverse, native)


@triton.jit
def _forward_kernel(
    z_ptr, p_ptr, codes_ptr, scales_ptr, num_rows, width,
    gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    block: tl.constexpr, high: tl.constexpr, wide: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    # The order begins with the rows that the product wrote last, which may still be in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = program * high + tl.arange(0, high)[:, None]
    column = tl.arange(0, wide)[None, :]
    inside = (row < num_rows) & (column < width)
    start = row.to(tl.int64) * (width * 2 if gated else width)
    gate_at, up_at = places(column, width, block, gated)
    gate = _load(z_ptr, start + gate_at, inside)
    up = gate
    if gated:
        up = _load(z_ptr, start + up_at, inside)
    p = tl.load(p_ptr + row, mask=row < num_rows, other=0.0)
    bits = _bits(act_forward(gate, up, gated, alpha, limit, offset, assembly) * p, assembly)
    bits = tl.where(inside, bits, 0)  # an activation with an offset may be other than 0 for 0
    scale, inverse = block_scale(_largest(bits), True)
    place = row.to(tl.int64) * width + column
    tl.store(codes_ptr + place, _codes(bits, inverse, assembly), mask=inside)
    tl.store(scales_ptr + row, scale, mask=row < num_rows)


@triton.jit
def _part(
    dh_ptr, z_ptr, p, start, column, width: tl.constexpr,
    gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    block: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    """For some columns: their part of dp; the bits of h and of the gradients of gate and up; and
    the largest magnitudes of h and of both gradients."""
    inside = column < width  # a constant if all columns are inside
    gate_at, up_at = places(column, width, block, gated)
    dh = _load(dh_ptr, start + column, inside)
    start *= 2 if gated else 1
    gate = _load(z_ptr, start + gate_at, inside)
    up = gate
    if gated:
        up = _load(z_ptr, start + up_at, inside)
    act, d_gate, d_up = act_backward(dh * p, gate, up, gated, alpha, limit, offset, assembly)
    dp = tl.sum(tl.where(inside, dh * act, 0.0), axis=1, keep_dims=True)
    h = tl.where(inside, _bits(act * p, assembly), 0)
    first = tl.where(inside, _bits(d_gate, assembly), 0)
    second = tl.where(inside, _bits(d_up, assembly), 0) if gated else first
    largest = tl.maximum(_largest(first), _largest(second)) if gated else _largest(first)
    return dp, h, first, second, _largest(h), largest


@triton.jit
def _write(
    dz_ptr, h_ptr, h, first, second, start, column, h_inverse, inverse, width: tl.constexpr,
    gated: tl.constexpr, block: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    inside = column < width
    gate_at, up_at = places(column, width, block, gated)
    tl.store(h_ptr + start + column, _codes(h, h_inverse, assembly), mask=inside)
    start *= 2 if gated else 1
    tl.store(dz_ptr + start + gate_at, _codes(first, inverse, assembly), mask=inside)
    if gated:
        tl.store(dz_ptr + start + up_at, _codes(second, inverse, assembly), mask=inside)


@triton.jit
def _backward_kernel(
    dh_ptr, z_ptr, p_ptr, dz_ptr, dz_scales_ptr, h_ptr, h_scales_ptr, dp_ptr, num_rows,
    gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    block: tl.constexpr, width: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    rest: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    """Columns are computed in two parts, each a power of two: 768 as 512 and 256, not as 1024."""
    row = tl.program_id(0) * high + tl.arange(0, high)[:, None]
    row = tl.minimum(row, num_rows - 1)  # past the last row, compute it again: the same values
    p = tl.load(p_ptr + row)
    start = row.to(tl.int64) * width
    column = tl.arange(0, wide)[None, :]
    dp, h, first, second, h_largest, largest = _part(
        dh_ptr, z_ptr, p, start, column, width, gated, alpha, limit, offset, block, assembly
    )
    if rest:
        beyond = wide + tl.arange(0, rest)[None, :]
        more, h_2, first_2, second_2, h_largest_2, largest_2 = _part(
            dh_ptr, z_ptr, p, start, beyond, width, gated, alpha, limit, offset, block, assembly
        )
        dp += more
        h_largest, largest = tl.maximum(h_largest, h_largest_2), tl.maximum(largest, largest_2)
    tl.store(dp_ptr + row, dp)
    h_scale, h_inverse = block_scale(h_largest, True)
    tl.store(h_scales_ptr + row, h_scale)
    scale, inverse = block_scale(largest, True)
    tl.store(dz_scales_ptr + row, scale)
    _write(
        dz_ptr, h_ptr, h, first, second, start, column, h_inverse, inverse, width, gated, block,
        assembly,
    )  # fmt: skip
    if rest:
        _write(
            dz_ptr, h_ptr, h_2, first_2, second_2, start, beyond, h_inverse, inverse, width, gated,
            block, assembly,
        )  # fmt: skip


@triton.jit
def _fold_kernel(
    a_ptr, b_ptr, ends_ptr, factors_ptr, largest_ptr, first_ptr, blocks_ptr, num_experts,
    experts: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Program e writes, for expert e, the factors of its rows, the largest product of scales, the
    number of its first block, and its number for each of its blocks."""
    expert = tl.program_id(0)
    index = tl.arange(0, experts)
    ends = tl.load(ends_ptr + index, mask=index < num_experts, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index < num_experts), other=0)
    counts = tl.where(index < num_experts, (ends - starts + 127) // 128, 0)
    first = tl.sum(tl.where(index < expert, counts, 0))
    count = tl.sum(tl.where(index == expert, counts, 0))
    tl.store(first_ptr + expert, first)
    if expert == num_experts - 1:
        tl.store(first_ptr + num_experts, first + count)
    lane = tl.arange(0, chunk)
    for low in range(0, count, chunk):
        tl.store(blocks_ptr + first + low + lane, expert, mask=low + lane < count)
    begin = first_row(ends_ptr, expert)
    end = tl.load(ends_ptr + expert)
    most = tl.full((chunk,), 0x00800000, tl.int32)  # 2^-126; NaN is larger than every number
    for low in range(begin, end, chunk):
        row = low + lane
        a = tl.load(a_ptr + row, mask=row < end, other=0.0)
        b = tl.load(b_ptr + row, mask=row < end, other=0.0)
        most = tl.maximum(most, (a * b).to(tl.int32, bitcast=True))
    largest = tl.max(most, axis=0).to(tl.float32, bitcast=True)
    tl.store(largest_ptr + expert, largest)
    for low in range(begin, end, chunk):
        row = low + lane
        a = tl.load(a_ptr + row, mask=row < end, other=0.0)
        b = tl.load(b_ptr + row, mask=row < end, other=0.0)
        tl.store(
            factors_ptr + row,
            tl.div_rn(a * b, tl.zeros((chunk,), tl.float32) + largest),
            mask=row < end,
        )


@triton.jit
def _turn_kernel(
    codes_ptr, factors_ptr, ends_ptr, first_ptr, blocks_ptr, out_ptr, columns, room, num_experts,
    scaled: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    strip, number = tl.program_id(0), tl.program_id(1)
    if number < tl.load(first_ptr + num_experts):
        expert = tl.load(blocks_ptr + number)
        row = first_row(ends_ptr, expert) + (number - tl.load(first_ptr + expert)) * 128
        row += tl.arange(0, 128)[:, None]
        lane = strip * 128 + tl.arange(0, 128)[None, :]
        inside = (row < tl.load(ends_ptr + expert)) & (lane < columns)
        codes = tl.load(codes_ptr + row.to(tl.int64) * columns + lane, mask=inside, other=0)
        if scaled:
            factor = tl.load(factors_ptr + row, mask=row < tl.load(ends_ptr + expert), other=0.0)
            codes = to_codes(from_codes(codes, native), factor, native)
        line = strip * 128 + tl.arange(0, 128)[:, None]
        place = line.to(tl.int64) * room + number * 128 + tl.arange(0, 128)[None, :]
        tl.store(out_ptr + place, tl.trans(codes), mask=line < columns)


def backward_sizes(width: int) -> dict[str, int]:
    """Rows of a program, the two parts of its columns, and its warps. On an H200, 131072 rows of
    768 columns and 65536 rows of 2048 take 230 and 313 us, the fastest of eight and of five
    choices; with columns padded to a power of two and masked, 324 and 369 us."""
    wide = 1 << width.bit_length() - 1
    rest = int(triton.next_power_of_2(width - wide)) if width > wide else 0
    warps = 1 << (max(wide + rest, 512) // 512).bit_length() - 1
    return {"high": max(1, 512 // wide), "wide": wide, "rest": rest, "num_warps": warps}


def _rows_at_once(width: int) -> tuple[int, int, int]:
    """Rows of a forward program, its columns, and its warps. On an H200 the fastest of ten choices
    for 768 columns, and as fast as any for 2048."""
    wide = int(triton.next_power_of_2(width))
    return max(1, 2048 // wide), wide, max(4, wide // 512)


def forward(
    z: Tensor,  # [rows, width or 2·width] bf16
    p: Tensor,  # [rows] fp32
    **act: Unpack[ActivationNumbers],
) -> Coded:
    """The codes of h [rows, width], at most ``WIDEST`` columns."""
    num_rows = len(z)
    width = z.shape[1] // 2 if act["gated"] else z.shape[1]
    codes, scales = _empty(z, width)
    if num_rows:
        high, wide, warps = _rows_at_once(width)
        run(
            _forward_kernel, (triton.cdiv(num_rows, high),),
            z.view(torch.int16), p, codes, scales, num_rows, width, **act,
            high=high, wide=wide, assembly=not interpreted(), num_warps=warps,
        )  # fmt: skip
    return codes, scales


def backward(
    dh: Tensor,  # [rows, width] bf16
    z: Tensor,
    p: Tensor,
    **act: Unpack[ActivationNumbers],
) -> tuple[Coded, Coded, Tensor]:
    """The codes of dz (like z) and of h (like dh), and dp [rows] fp32."""
    num_rows, width = dh.shape
    dz, h = _empty(z, z.shape[1]), _empty(dh, width)
    dp = torch.empty(num_rows, dtype=torch.float32, device=z.device)
    if num_rows:
        sizes = backward_sizes(width)
        run(
            _backward_kernel, (triton.cdiv(num_rows, sizes["high"]),),
            dh.view(torch.int16), z.view(torch.int16), p, *dz, *h, dp, num_rows, **act,
            width=width, assembly=not interpreted(), **sizes,
        )  # fmt: skip
    return dz, h, dp


def _empty(x: Tensor, columns: int) -> Coded:
    codes = torch.empty(len(x), columns, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(len(x), dtype=torch.float32, device=x.device)


class Folded:
    """Turned rows of two sides, from which the gradient of a weight is computed."""

    def __init__(self, a: Coded, b: Coded, ends: Tensor) -> None:
        num_rows, experts = len(a[0]), len(ends)
        most = max_blocks(num_rows, experts, WIDE)
        self.factors = torch.empty(num_rows, dtype=torch.float32, device=ends.device)
        self.scales = torch.empty(experts, dtype=torch.float32, device=ends.device)
        self.first = torch.empty(experts + 1, dtype=torch.int32, device=ends.device)
        blocks = torch.empty(most, dtype=torch.int32, device=ends.device)
        run(
            _fold_kernel, (experts,),
            a[1], b[1], ends, self.factors, self.scales, self.first, blocks, experts,
            experts=triton.next_power_of_2(experts), chunk=1024, num_warps=4,
        )  # fmt: skip
        self.left = self._turned(a[0], ends, blocks, False)
        self.right = self._turned(b[0], ends, blocks, True)

    def _turned(self, codes: Tensor, ends: Tensor, blocks: Tensor, scaled: bool) -> Tensor:
        columns, room = codes.shape[1], len(blocks) * WIDE
        out = torch.empty(columns, room, dtype=torch.uint8, device=codes.device)
        run(
            _turn_kernel, (triton.cdiv(columns, WIDE), len(blocks)),
            codes, self.factors, ends, self.first, blocks, out, columns, room, len(ends),
            scaled=scaled, native=not interpreted(), num_warps=8,
        )  # fmt: skip
        return out
