# SPDX-License-Identifier: Apache-2.0
"""Momentum, Nesterov, norm, cast and pack: from gradients to the matrices to orthogonalise or send.

::

    grads  g0 g1 g2 ..   anywhere in memory, fp32 or bf16            accumulate   to the wire
    state  m0 m1 m2 ..   fp32, updated in place          ------>     pack         to fp16 values

Both read each value once. ``accumulate`` writes the momentum (after Nesterov) of pieces of any
length to their places in a send buffer. ``pack`` writes whole matrices of one shape into a
``Packed`` batch, like ``normalise`` of the output of ``accumulate``. The power of two that fp16
needs is guessed from a sample; after a bad guess the values are written again.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run
from shardwise.kernels.normalise import CHUNK, PASS, SAMPLE, SETTLE, guess_from, pack_by, settle
from shardwise.kernels.normalise import reference as normalised
from shardwise.kernels.packed import BLOCK, Packed
from shardwise.kernels.tables import addresses

WIRE = tl.constexpr(0)  # a fourth kind of work, beside SAMPLE, PASS and SETTLE
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def reference(
    grad: Tensor,
    state: Tensor,
    *,
    beta: float,
    nesterov: bool,
    clip: Tensor | None = None,
) -> Tensor:
    """Update ``state`` in place and return the momentum in fp32: the definition of the kernels."""
    weight = 1 - beta
    scaled = grad.float() if clip is None else grad.float() * clip[0]
    if clip is None or not clip[1]:
        state.copy_(beta * state + weight * scaled)
    return beta * state + weight * scaled if nesterov else state.clone()


def pack_reference(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    *,
    beta: float,
    nesterov: bool = True,
    clip: Tensor | None = None,
) -> Packed:
    """:func:`pack` by definition, on any device."""
    momenta = [
        reference(grad, state, beta=beta, nesterov=nesterov, clip=clip)
        for grad, state in zip(grads, states, strict=True)
    ]
    return normalised(torch.stack(momenta))


@triton.jit
def _momentum_kernel(
    table_ptr, clip_ptr, count, beta, weight, values_ptr, samples_ptr, partials_ptr, inverse_ptr,
    sampled, stride, chunks, columns, values_columns, values_numel, clipped: tl.constexpr,
    grad_type: tl.constexpr, out_type: tl.constexpr, work: tl.constexpr,
    nesterov: tl.constexpr, aligned: tl.constexpr, rim: tl.constexpr,
    block: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """WIRE: update and write out; SAMPLE, PASS, SETTLE: like ``_normalise_kernel``.

    Fused multiply-adds are explicit, because the compiler might choose them differently in
    different kernels.
    """
    adds_up: tl.constexpr = (work == SAMPLE) | (work == PASS)
    packs: tl.constexpr = (work == PASS) | (work == SETTLE)
    piece = tl.program_id(1).to(tl.int64)
    grad_ptr = tl.load(table_ptr + piece).to(tl.pointer_type(grad_type))
    state_ptr = tl.load(table_ptr + count + piece).to(tl.pointer_type(tl.float32))
    # The wire's table has a third row of addresses, so its lengths are in the fourth.
    length = tl.load(table_ptr + (3 if work == WIRE else 2) * count + piece)
    if work == WIRE:
        out_ptr = tl.load(table_ptr + 2 * count + piece).to(tl.pointer_type(out_type))
        if aligned:
            out_ptr = tl.multiple_of(out_ptr, 16)
    if aligned:
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        state_ptr = tl.multiple_of(state_ptr, 16)
        length = tl.multiple_of(length, 16)
    factor, moved = 1.0, length
    if clipped:
        factor = tl.load(clip_ptr)
        moved = tl.where(tl.load(clip_ptr + 1) == 0.0, length, 0)
    if aligned:
        moved = tl.multiple_of(moved, 16)
    first = tl.program_id(0).to(tl.int64) * stride
    extent = chunk
    scale = 1.0
    if work == PASS:
        scale = guess_from(samples_ptr, piece, sampled).to(tl.float32)
    if work == SETTLE:
        scale, good = settle(
            samples_ptr, partials_ptr, inverse_ptr, piece, length, sampled, chunks, width
        )
        extent = tl.where(good, 0, stride)
    total = tl.zeros((block,), dtype=tl.float64)
    for start in tl.range(0, extent, block):
        place = first + start + tl.arange(0, block)
        mask = place < length
        state = tl.load(state_ptr + place, mask=mask, other=0.0)
        grad = tl.zeros((block,), dtype=tl.float32)
        if work != SETTLE or nesterov:
            grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
            if clipped:
                grad = grad * factor
            grad = weight * grad
        if work != SETTLE:  # where the state has moved already
            state = tl.fma(state, beta, grad)
            if work != SAMPLE:
                tl.store(state_ptr + place, state, mask=place < moved)
        ahead = tl.fma(state, beta, grad) if nesterov else state
        if work == WIRE:
            tl.store(out_ptr + place, ahead.to(out_type), mask=mask)
        if adds_up:
            wide = ahead.to(tl.float64)
            total += wide * wide
        if packs:
            if rim:
                target = place // columns * values_columns + place % columns
            else:
                target = place
            rounded = (ahead * scale).to(out_type)
            tl.store(values_ptr + piece * values_numel + target, rounded, mask=mask)
    if adds_up:
        sums_ptr = samples_ptr if work == SAMPLE else partials_ptr
        place = piece * tl.num_programs(0) + tl.program_id(0)
        tl.store(sums_ptr + place, tl.sum(total, axis=0))


def accumulate(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    beta: float,
    nesterov: bool = True,
    clip: Tensor | None = None,
) -> None:
    """Write the momentum of every piece, rounded to its ``out`` (fp32, bf16 or fp16); one pass.

    ``clip`` [2]: the factor of the gradients; and 1 if states must not change, else 0.
    """
    weight = 1 - beta
    if not grads:
        return
    table = addresses([grads, states, outs])
    chunks = -(-table.longest // CHUNK)
    entries = table.entries
    run(
        _momentum_kernel, (chunks, len(grads)),
        entries, entries if clip is None else clip, len(grads), beta, weight,
        entries, entries, entries, entries, 1, CHUNK, 1, 1, 1, 1, clipped=clip is not None,
        grad_type=TYPES[grads[0].dtype], out_type=TYPES[outs[0].dtype], work=WIRE.value,
        nesterov=nesterov, aligned=table.aligned, rim=False,
        block=BLOCK, chunk=CHUNK, width=1, num_warps=8,
    )  # fmt: skip


def pack(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    *,
    beta: float,
    nesterov: bool = True,
    dtype: torch.dtype = torch.float16,
    clip: Tensor | None = None,
) -> Packed:
    """Pack matrices of one shape like ``pack_reference``; fp32 instead of fp16 is for tests.

    ``clip``: see :func:`accumulate`.
    """
    weight = 1 - beta
    first = grads[0]
    table, (rows, columns) = addresses([grads, states]), first.shape
    entries = table.entries
    given = (entries, entries if clip is None else clip, len(grads), beta, weight)
    return pack_by(
        _momentum_kernel, given, (len(grads), rows, columns), first.device, dtype,
        clipped=clip is not None, grad_type=TYPES[first.dtype], out_type=TYPES[dtype],
        nesterov=nesterov, aligned=table.aligned,
    )  # fmt: skip
