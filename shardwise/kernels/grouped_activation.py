# SPDX-License-Identifier: Apache-2.0
"""The activation between two grouped products: one pass over the rows for forward, and one for
backward.

    forward    z (+ bias, in place), p        ->  h
    backward   dh, z, p                       ->  dz, h again (over dh), dp

One program computes whole rows, so ``dp``, a sum along the row, has a fixed order and needs no
atomics. ``moe/activation.py`` is the definition: fp32 inside, from the rounded ``z``.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.grouped import ActivationNumbers, interpreted
from shardwise.kernels.launch import run

# The most columns of h that a program of backward holds at once (512 to 2048 measured: 4.0 to 3.7
# TB/s).
_CHUNK = 512


# ``assembly`` is False only in Triton's interpreter, which does not support assembly. No product
# runs during an epilogue, so each of its instructions costs time. Special functions cost most: 16
# run per cycle, but 128 of other instructions. A conversion to bf16 is a special function, unless
# it converts two values, which the compiler uses only for results that are not read again. A
# division is one special function and ten other instructions.


@triton.jit
def rounded(value, dtype: tl.constexpr, assembly: tl.constexpr):
    """``value`` in ``dtype``, two at a time."""
    if assembly and dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [value], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        result = value.to(dtype)
    return result


@triton.jit
def sigmoid(x, assembly: tl.constexpr):
    """1 / (1 + exp(-x)), in four instructions. Subnormals of exp are flushed to zero: they do not
    change the sum with 1."""
    if assembly:
        result = tl.inline_asm_elementwise(
            """
            {
                .reg .f32 t;
                mul.f32 t, $1, 0fBFB8AA3B;
                ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=f,f", [x], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = 1.0 / (1.0 + tl.exp(-x))
    return result


@triton.jit
def at_most(value, limit):
    """The smaller value. NaN stays NaN, as in torch, so a broken weight shows in the output."""
    return tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_least(value, limit):
    return tl.maximum(value, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def act_forward(
    gate, up, gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    assembly: tl.constexpr,
):  # fmt: skip
    """act(z) in fp32; of ``gate`` alone if not ``gated``."""
    # One return, at the end: Triton also compiles the code after a return in a constexpr branch.
    if gated:
        if limit is not None:
            gate = at_most(gate, limit)
            up = at_most(at_least(up, -limit), limit)
        if offset != 0:
            up += offset
        act = gate * sigmoid(alpha * gate, assembly) * up
    else:
        positive = at_least(gate, 0.0)
        act = positive * positive
    return act


@triton.jit
def act_backward(
    scaled, gate, up, gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr,
    offset: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    """act(z), and the gradients of gate and up from its gradient ``scaled``, in fp32."""
    if gated:
        if limit is not None:
            beyond_gate = gate > limit
            beyond_up = tl.abs(up) > limit
            gate = at_most(gate, limit)
            up = at_most(at_least(up, -limit), limit)
        sigma = sigmoid(alpha * gate, assembly)
        swish = gate * sigma
        shifted = up + offset
        act = swish * shifted
        d_gate = scaled * shifted * (sigma + alpha * swish * (1.0 - sigma))
        d_up = scaled * swish
        if limit is not None:
            d_gate = tl.where(beyond_gate, 0.0, d_gate)
            d_up = tl.where(beyond_up, 0.0, d_up)
    else:
        positive = at_least(gate, 0.0)
        act = positive * positive
        d_gate = scaled * 2.0 * positive
        d_up = d_gate
    return act, d_gate, d_up


@triton.jit
def places(columns, width, block: tl.constexpr, gated: tl.constexpr):
    """The places of the gate and the up of each column of h in a row of z."""
    if not gated:
        gate, up = columns, columns
    elif block == 0:
        gate, up = columns, columns + width
    else:
        gate = columns // block * (2 * block) + columns % block
        up = gate + block
    return gate, up


@triton.jit
def _forward_kernel(
    z_ptr, p_ptr, h_ptr, bias_ptr, expert_ptr, num_rows, width,
    gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    block: tl.constexpr, rows: tl.constexpr, chunk: tl.constexpr, has_bias: tl.constexpr,
    assembly: tl.constexpr,
):  # fmt: skip
    # The order begins with the rows that the product wrote last, which may still be in L2, and ends
    # with the rows that the next product reads first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    chunks = tl.cdiv(width, chunk)
    row = program // chunks * rows + tl.arange(0, rows)
    columns = program % chunks * chunk + tl.arange(0, chunk)
    inside = (row < num_rows)[:, None] & (columns < width)[None, :]
    z_width = width * 2 if gated else width
    z_row = z_ptr + row.to(tl.int64)[:, None] * z_width
    gate_at, up_at = places(columns, width, block, gated)
    p = tl.load(p_ptr + row, mask=row < num_rows, other=0.0)
    gate = tl.load(z_row + gate_at[None, :], mask=inside, other=0.0)
    up = gate
    if gated:
        up = tl.load(z_row + up_at[None, :], mask=inside, other=0.0)
    if has_bias:
        expert = tl.load(expert_ptr + row, mask=row < num_rows, other=0)
        b_row = bias_ptr + expert.to(tl.int64)[:, None] * z_width
        bias = tl.load(b_row + gate_at[None, :], mask=inside, other=0.0)
        gate = (gate.to(tl.float32) + bias.to(tl.float32)).to(z_ptr.dtype.element_ty)
        tl.store(z_row + gate_at[None, :], gate, mask=inside)
        if gated:
            bias = tl.load(b_row + up_at[None, :], mask=inside, other=0.0)
            up = (up.to(tl.float32) + bias.to(tl.float32)).to(z_ptr.dtype.element_ty)
            tl.store(z_row + up_at[None, :], up, mask=inside)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    h = act_forward(gate, up, gated, alpha, limit, offset, assembly)
    h = (h * p[:, None]).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row.to(tl.int64)[:, None] * width + columns[None, :], h, mask=inside)


@triton.jit
def _backward_kernel(
    dh_ptr, z_ptr, p_ptr, dz_ptr, h_ptr, dp_ptr, num_rows, width,
    gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    block: tl.constexpr, chunk: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_width = width * 2 if gated else width
    p = tl.load(p_ptr + row)
    total = tl.zeros((chunk,), dtype=tl.float32)
    for first in range(0, width, chunk):
        columns = first + tl.arange(0, chunk)
        inside = columns < width
        gate_at, up_at = places(columns, width, block, gated)
        dh = tl.load(dh_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(z_ptr + row * z_width + gate_at, mask=inside, other=0.0).to(tl.float32)
        up = gate
        if gated:
            up = tl.load(z_ptr + row * z_width + up_at, mask=inside, other=0.0).to(tl.float32)
        act, d_gate, d_up = act_backward(dh * p, gate, up, gated, alpha, limit, offset, assembly)
        if gated:
            d_up = d_up.to(dz_ptr.dtype.element_ty)
            tl.store(dz_ptr + row * z_width + up_at, d_up, mask=inside)
        d_gate = d_gate.to(dz_ptr.dtype.element_ty)
        tl.store(dz_ptr + row * z_width + gate_at, d_gate, mask=inside)
        tl.store(h_ptr + row * width + columns, (act * p).to(h_ptr.dtype.element_ty), mask=inside)
        total += dh * act
    tl.store(dp_ptr + row, tl.sum(total))


def _chunk_for(width: int, most: int = _CHUNK) -> int:
    return int(min(most, max(16, triton.next_power_of_2(width))))


def forward(
    z: Tensor,  # [rows, width or 2·width]; a bias is added in place
    p: Tensor,  # [rows] fp32
    *,
    bias: Tensor | None = None,  # [experts, columns of z]
    expert: Tensor | None = None,  # [rows], with a bias
    chunk: int = 1024,
    elements: int = 2048,
    **act: Unpack[ActivationNumbers],
) -> Tensor:
    """h [rows, width]. A program computes ``elements`` elements, ``chunk`` of each row."""
    num_rows = len(z)
    width = z.shape[1] // 2 if act["gated"] else z.shape[1]
    h = torch.empty(num_rows, width, dtype=z.dtype, device=z.device)
    if num_rows == 0:
        return h
    chunk = _chunk_for(width, chunk)
    rows = max(1, elements // chunk)
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(width, chunk)
    run(
        _forward_kernel, (programs,),
        z, p, h, z if bias is None else bias, p if expert is None else expert,
        num_rows, width, **act, rows=rows, chunk=chunk, has_bias=bias is not None,
        assembly=not interpreted(), num_warps=4,
    )  # fmt: skip
    return h


def backward(
    dh: Tensor,  # [rows, width]; overwritten by h
    z: Tensor,
    p: Tensor,
    **act: Unpack[ActivationNumbers],
) -> tuple[Tensor, Tensor, Tensor]:
    """dz like z, h like dh (in the same memory), dp [rows] fp32."""
    num_rows, width = dh.shape
    dz = torch.empty_like(z)
    dp = torch.empty(num_rows, dtype=torch.float32, device=z.device)
    if num_rows:
        chunk = _chunk_for(width)
        run(
            _backward_kernel, (num_rows,),
            dh, z, p, dz, dh, dp, num_rows, width, **act,
            chunk=chunk, assembly=not interpreted(), num_warps=4,
        )  # fmt: skip
    return dz, dh, dp
