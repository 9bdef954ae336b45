# SPDX-License-Identifier: Apache-2.0
"""Momentum, Nesterov, norm, cast and pack: from gradients to what is orthogonalised or sent.

::

    grads  g0 g1 g2 ..   anywhere in memory, fp32 or bf16            accumulate   one pass: the wire
    state  m0 m1 m2 ..   fp32, updated in place          ------>     pack         two passes: fp16

``accumulate`` writes the momentum (after Nesterov) of pieces of any length to their places in a
send buffer. ``pack`` writes whole matrices of one shape into a ``Packed`` batch: the power of two
that fp16 needs is known only once all of a matrix has been seen, so a first pass updates the state
and adds up squares, and a second one scales and casts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.normalise import BLOCK, CHUNK, scale_from
from shardwise.kernels.packed import Packed, empty_values, scale_reference
from shardwise.kernels.tables import addresses

# ema: m = beta·m + (1 - beta)·g; sum: m = beta·m + g. Nesterov looks one such step ahead.
Rule = Literal["ema", "sum"]

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def gradient_weight(beta: float, rule: Rule) -> float:
    if rule not in get_args(Rule):
        raise ValueError(f"momentum rule {rule!r}: choose from {', '.join(get_args(Rule))}")
    return 1 - beta if rule == "ema" else 1.0


def reference(grad: Tensor, state: Tensor, *, beta: float, rule: Rule, nesterov: bool) -> Tensor:
    """The definition: updates ``state`` in place, returns what goes on, in fp32."""
    weight = gradient_weight(beta, rule)
    state.copy_(beta * state + weight * grad.float())
    return beta * state + weight * grad.float() if nesterov else state.clone()


def pack_reference(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    *,
    beta: float,
    rule: Rule = "ema",
    nesterov: bool = True,
) -> Packed:
    rows, columns = grads[0].shape
    moved = torch.stack([
        reference(grad, state, beta=beta, rule=rule, nesterov=nesterov)
        for grad, state in zip(grads, states, strict=True)
    ])  # fmt: skip
    scale, inverse = scale_reference(moved.double().square().sum((1, 2)), rows * columns)
    values = empty_values(len(grads), rows, columns, grads[0].device)
    packed = Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)
    packed.unpadded(values).copy_(moved * scale[:, None, None])
    return packed


@triton.jit
def _momentum_kernel(
    table_ptr, values_ptr, partials_ptr, inverse_ptr, count, beta, weight,
    columns, values_columns, values_numel,
    grad_type: tl.constexpr, out_type: tl.constexpr, phase: tl.constexpr,
    nesterov: tl.constexpr, aligned: tl.constexpr, rim: tl.constexpr,
    block: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """phase 0: update and write out; 1: update and add up squares; 2: scale and write values."""
    piece = tl.program_id(1).to(tl.int64)
    grad_ptr = tl.load(table_ptr + piece).to(tl.pointer_type(grad_type))
    state_ptr = tl.load(table_ptr + count + piece).to(tl.pointer_type(tl.float32))
    # Phase 0 has a third row of addresses, so its lengths are in the fourth.
    length = tl.load(table_ptr + (3 if phase == 0 else 2) * count + piece)
    if phase == 0:
        out_ptr = tl.load(table_ptr + 2 * count + piece).to(tl.pointer_type(out_type))
        if aligned:
            out_ptr = tl.multiple_of(out_ptr, 16)
    if aligned:
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        state_ptr = tl.multiple_of(state_ptr, 16)
        length = tl.multiple_of(length, 16)
    scale = 1.0
    if phase == 2:
        scale, inverse = scale_from(partials_ptr, piece, length, tl.num_programs(0), width)
        if tl.program_id(0) == 0:
            tl.store(inverse_ptr + piece, inverse)
    total = tl.zeros((block,), dtype=tl.float64)
    for start in tl.range(0, chunk, block):
        place = tl.program_id(0).to(tl.int64) * chunk + start + tl.arange(0, block)
        mask = place < length
        state = tl.load(state_ptr + place, mask=mask, other=0.0)
        grad = tl.zeros((block,), dtype=tl.float32)
        if phase != 2 or nesterov:
            grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if phase != 2:
            state = beta * state + weight * grad
            tl.store(state_ptr + place, state, mask=mask)
        ahead = beta * state + weight * grad if nesterov else state
        if phase == 0:
            tl.store(out_ptr + place, ahead.to(out_type), mask=mask)
        elif phase == 1:
            wide = ahead.to(tl.float64)
            total += wide * wide
        else:
            if rim:
                target = place // columns * values_columns + place % columns
            else:
                target = place
            rounded = (ahead * scale).to(out_type)
            tl.store(values_ptr + piece * values_numel + target, rounded, mask=mask)
    if phase == 1:
        partial = partials_ptr + piece * tl.num_programs(0) + tl.program_id(0)
        tl.store(partial, tl.sum(total, axis=0))


def accumulate(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    beta: float,
    rule: Rule = "ema",
    nesterov: bool = True,
) -> None:
    """Momentum of every piece, rounded into its ``out`` (fp32, bf16 or fp16); one pass."""
    weight = gradient_weight(beta, rule)
    if not grads:
        return
    table = addresses([grads, states, outs])
    chunks = -(-table.longest // CHUNK)
    entries = table.entries
    _momentum_kernel[(chunks, len(grads))](
        entries, entries, entries, entries, len(grads), beta, weight, 1, 1, 1,
        grad_type=TYPES[grads[0].dtype], out_type=TYPES[outs[0].dtype], phase=0,
        nesterov=nesterov, aligned=table.aligned, rim=False,
        block=BLOCK, chunk=CHUNK, width=1, num_warps=8,
    )  # fmt: skip


def pack(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    *,
    beta: float,
    rule: Rule = "ema",
    nesterov: bool = True,
    dtype: torch.dtype = torch.float16,
) -> Packed:
    """``pack_reference`` of matrices of one shape; fp32 instead of fp16 is for tests."""
    weight = gradient_weight(beta, rule)
    shapes = {tuple(grad.shape) for grad in grads}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"matrices of shapes {sorted(shapes)}: a batch takes one 2-D shape")
    rows, columns = grads[0].shape
    device = grads[0].device
    table = addresses([grads, states])
    values = empty_values(len(grads), rows, columns, device, dtype)
    chunks = -(-table.longest // CHUNK)
    partials = torch.empty(len(grads), chunks, device=device, dtype=torch.float64)
    inverse = torch.empty(len(grads), device=device, dtype=torch.float32)
    for phase in (1, 2):
        _momentum_kernel[(chunks, len(grads))](
            table.entries, values, partials, inverse, len(grads), beta, weight,
            columns, values.shape[2], values.shape[1] * values.shape[2],
            grad_type=TYPES[grads[0].dtype], out_type=TYPES[dtype], phase=phase,
            nesterov=nesterov, aligned=table.aligned, rim=values.shape[2] != columns,
            block=BLOCK, chunk=CHUNK, width=triton.next_power_of_2(chunks), num_warps=8,
        )  # fmt: skip
    return Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)
