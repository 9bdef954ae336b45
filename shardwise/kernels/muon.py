# SPDX-License-Identifier: Apache-2.0
"""The passes of a Muon step before and after the products; each reads and writes a value once.

::

    grads  g0 g1 g2 ..   anywhere in memory, fp32 or bf16           accumulate   to a send buffer
    state  m0 m1 m2 ..   fp32, updated in place          ------>    pack         to fp16 values

    batch [n, rows, columns] received by an owner        ------>    normalise    to fp16 values

    w = w - decay·w - step·o        plain: everywhere    <------    apply        from fp16 values,
        cautious: decay only where o·w > 0                                       or rows sent back

``pack`` and ``normalise`` make a ``Packed`` batch, of any float dtype, in three launches:

    sample    sums of squares [n, SAMPLES] fp64: a power of two, guessed
    pass      values [n, rows', columns'] fp16, sums [n, chunks] fp64
    settle    inverse norms [n]; values again where the guess was bad

Settle is always launched, because only the device knows whether a guess was bad. It nearly always
returns at once. Sums are fp64, in which the square of an fp32 gradient neither overflows nor
vanishes. The shape of a matrix alone decides how it is sampled and cut into chunks, and sums have a
fixed order, so the scale of a matrix is the same in every batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run
from shardwise.kernels.packed import (
    BLOCK,
    LARGEST_NORM,
    LEAST_RMS,
    SAMPLES,
    Packed,
    empty_values,
    padded,
    sample_size,
    sample_stride,
    scale_reference,
)
from shardwise.kernels.tables import addresses

CHUNK = 8 * BLOCK  # elements of a program
SETTLERS = 16  # programs per matrix that check its guess
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# The work of a launch: write momenta out, or one of the three that make a packed batch.
WIRE, SAMPLE, PASS, SETTLE = (tl.constexpr(number) for number in range(4))
_SAMPLES = tl.constexpr(SAMPLES)
_LARGEST_SUM = tl.constexpr(LARGEST_NORM**2)
_LEAST_MEAN = tl.constexpr(LEAST_RMS**2)


# ------------------------------------------------------------------------------ definitions


def momentum_reference(
    grad: Tensor, state: Tensor, *, beta: float, nesterov: bool, clip: Tensor | None = None
) -> Tensor:
    """Update ``state`` in place and return the momentum in fp32: the definition of the kernel."""
    weight = 1 - beta
    scaled = grad.float() if clip is None else grad.float() * clip[0]
    if clip is None or not clip[1]:
        state.copy_(beta * state + weight * scaled)
    return beta * state + weight * scaled if nesterov else state.clone()


def normalise_reference(batch: Tensor) -> Packed:
    """Pack by definition, on any device."""
    count, rows, columns = batch.shape
    scale, inverse = scale_reference(batch)
    values = empty_values(count, rows, columns, batch.device)
    packed = Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)
    packed.unpadded(values).copy_(batch.float() * scale[:, None, None])
    return packed


def apply_reference(
    weight: Tensor, update: Tensor, *, step: float, decay: float, rule: str = "plain"
) -> Tensor:
    """The update by definition, in fp32; ``decay`` is learning rate times weight decay."""
    w, o = weight.float(), update.float()
    shrink = torch.full_like(w, decay) if rule == "plain" else decay * (o * w > 0)
    return (w - shrink * w - step * o).to(weight.dtype)


# ------------------------------------------------------------------------------ before


@triton.jit
def power_of_two(mean_square):
    """The power of two that brings the rms into [1, 2), in fp64; 1 for 0."""
    exponent = ((mean_square.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
    halved = tl.minimum(tl.maximum(exponent >> 1, -126), 126)  # >> is floor, for negatives too
    halved = tl.where(mean_square == 0.0, 0, halved)
    return ((1023 - halved) << 52).to(tl.float64, bitcast=True)


@triton.jit
def guess_from(samples_ptr, matrix, sampled):
    """The power of two of a matrix, guessed from its sample."""
    sums = tl.load(samples_ptr + matrix * _SAMPLES + tl.arange(0, _SAMPLES))
    return power_of_two(tl.sum(sums, axis=0) / sampled)


@triton.jit
def settle(
    samples_ptr, partials_ptr, inverse_ptr, matrix, numel, sampled, chunks, width: tl.constexpr
):  # fmt: skip
    """(power of two, whether the guess was good) of a matrix that was read whole; see
    ``scale_reference``."""
    place = tl.arange(0, width)
    partials = tl.load(partials_ptr + matrix * chunks + place, mask=place < chunks, other=0.0)
    total = tl.sum(partials, axis=0)
    mean = total / numel
    guess = guess_from(samples_ptr, matrix, sampled)
    fits = total * guess * guess <= _LARGEST_SUM  # never true of a NaN or an infinity
    serves = mean * guess * guess >= _LEAST_MEAN
    good = (total == 0.0) | (fits & serves)
    scale = tl.where(good, guess, power_of_two(mean))
    if tl.program_id(0) == 0:
        inverse = tl.where(total == 0.0, 0.0, 1.0 / (tl.sqrt(total) * scale))
        tl.store(inverse_ptr + matrix, inverse.to(tl.float32))
    return scale.to(tl.float32), good


@triton.jit
def _momentum_kernel(
    table_ptr, clip_ptr, count, beta, weight, values_ptr, samples_ptr, partials_ptr, inverse_ptr,
    sampled, stride, chunks, columns, values_columns, values_numel, clipped: tl.constexpr,
    grad_type: tl.constexpr, out_type: tl.constexpr, work: tl.constexpr, moves: tl.constexpr,
    nesterov: tl.constexpr, aligned: tl.constexpr, rim: tl.constexpr,
    block: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """``moves``: gradients and states, by a table of addresses and lengths. Else the first argument
    is a batch [n, count] of values, which are packed as they are.

    Fused multiply-adds are explicit, because the compiler might choose them differently in
    different kernels.
    """
    adds_up: tl.constexpr = (work == SAMPLE) | (work == PASS)
    packs: tl.constexpr = (work == PASS) | (work == SETTLE)
    piece = tl.program_id(1).to(tl.int64)
    if moves:
        grad_ptr = tl.load(table_ptr + piece).to(tl.pointer_type(grad_type))
        state_ptr = tl.load(table_ptr + count + piece).to(tl.pointer_type(tl.float32))
        # The wire's table has a third row of addresses, so its lengths are in the fourth.
        length = tl.load(table_ptr + (3 if work == WIRE else 2) * count + piece)
    else:
        grad_ptr = table_ptr + piece * count
        length = count
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
        if moves:
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
        else:
            ahead = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
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
        moves=True, grad_type=TYPES[grads[0].dtype], out_type=TYPES[outs[0].dtype], work=WIRE.value,
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
    """``normalise_reference`` of the momenta of matrices of one shape; fp32 instead of fp16 is for
    tests. ``clip``: see :func:`accumulate`."""
    weight = 1 - beta
    table, first = addresses([grads, states]), grads[0]
    entries = table.entries
    given = (entries, entries if clip is None else clip, len(grads), beta, weight)
    return _packed(
        given, (len(grads), *first.shape), first.device, dtype,
        clipped=clip is not None, grad_type=TYPES[first.dtype], moves=True, nesterov=nesterov,
        aligned=table.aligned,
    )  # fmt: skip


def normalise(batch: Tensor, dtype: torch.dtype = torch.float16) -> Packed:
    """Pack like ``normalise_reference``; fp32 instead of fp16 is for tests."""
    batch = batch.contiguous()
    count, rows, columns = batch.shape
    return _packed(
        (batch, batch, rows * columns, 0.0, 0.0), (count, rows, columns), batch.device, dtype,
        clipped=False, grad_type=tl.float32, moves=False, nesterov=False, aligned=False,
    )  # fmt: skip


def _packed(
    given: tuple[Any, ...],
    shape: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    **constants: Any,
) -> Packed:
    """Pack matrices of ``shape`` [n, rows, columns]. ``given``: the kernel's first arguments."""
    count, rows, columns = shape
    numel = rows * columns
    values = empty_values(count, rows, columns, device, dtype)
    chunks, share = -(-numel // CHUNK), -(-numel // (SETTLERS * BLOCK)) * BLOCK
    samples = torch.empty(count, SAMPLES, device=device, dtype=torch.float64)
    partials = torch.empty(count, chunks, device=device, dtype=torch.float64)
    inverse = torch.empty(count, device=device, dtype=torch.float32)
    # (work, programs per matrix, distance between their first elements, elements of each, width);
    # SETTLE computes its elements from the distance.
    for work, programs, stride, chunk, width in (
        (SAMPLE.value, SAMPLES, sample_stride(numel), BLOCK, 1),
        (PASS.value, chunks, CHUNK, CHUNK, 1),
        (SETTLE.value, -(-numel // share), share, BLOCK, triton.next_power_of_2(chunks)),
    ):
        run(
            _momentum_kernel, (programs, count), *given, values, samples, partials, inverse,
            sample_size(numel), stride, chunks,
            columns, values.shape[2], values.shape[1] * values.shape[2],
            work=work, rim=values.shape[2] != columns,
            out_type=TYPES[dtype], block=BLOCK, chunk=chunk, width=width, num_warps=8,
            **constants,
        )  # fmt: skip
    return Packed(values=values, inverse_norms=inverse, rows=rows, columns=columns)


# ------------------------------------------------------------------------------ after


@triton.jit
def _update_kernel(
    table_ptr, values_ptr, clip_ptr, count, step, decay, columns, values_columns, values_numel,
    clipped: tl.constexpr,
    weight_type: tl.constexpr, update_type: tl.constexpr, batched: tl.constexpr,
    cautious: tl.constexpr, aligned: tl.constexpr, rim: tl.constexpr,
    block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1).to(tl.int64)
    weight_ptr = tl.load(table_ptr + piece).to(tl.pointer_type(weight_type))
    length = tl.load(table_ptr + (1 if batched else 2) * count + piece)
    if batched:
        update_ptr = values_ptr + piece * values_numel
    else:
        update_ptr = tl.load(table_ptr + count + piece).to(tl.pointer_type(update_type))
        if aligned:
            update_ptr = tl.multiple_of(update_ptr, 16)
    if aligned:
        weight_ptr = tl.multiple_of(weight_ptr, 16)
    if clipped:
        length = tl.where(tl.load(clip_ptr + 1) == 0.0, length, 0)
    if aligned:
        length = tl.multiple_of(length, 16)
    for start in tl.range(0, chunk, block):
        place = tl.program_id(0).to(tl.int64) * chunk + start + tl.arange(0, block)
        mask = place < length
        if rim:
            source = place // columns * values_columns + place % columns
        else:
            source = place
        w = tl.load(weight_ptr + place, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(update_ptr + source, mask=mask, other=0.0).to(tl.float32)
        shrink = tl.where(o * w > 0.0, decay, 0.0) if cautious else decay
        w = w - shrink * w - step * o
        tl.store(weight_ptr + place, w.to(weight_type), mask=mask)


def apply(
    weights: Sequence[Tensor],
    updates: Tensor | Sequence[Tensor],
    *,
    step: float,
    decay: float = 0.0,
    rule: Literal["plain", "cautious"] = "plain",
    clip: Tensor | None = None,
) -> None:
    """Update ``weights`` in place by ``updates``: a packed batch [n, rows, columns], or pieces.

    ``clip`` [2]: if its second number is 1, weights do not change; see :func:`accumulate`.
    """
    if not weights:
        return
    batched = isinstance(updates, Tensor)
    if isinstance(updates, Tensor):
        table = addresses([weights])
        values = updates
        (rows, columns), update_type = weights[0].shape, updates.dtype
        assert updates.shape == (len(weights), padded(rows), padded(columns)), updates.shape
        numel = updates.shape[1] * updates.shape[2]
    else:
        table = addresses([weights, updates])
        values = table.entries
        columns, update_type, numel = 1, updates[0].dtype, 1
    values_columns = values.shape[2] if batched else 1
    run(
        _update_kernel, (-(-table.longest // CHUNK), len(weights)),
        table.entries, values, table.entries if clip is None else clip,
        len(weights), step, decay, columns, values_columns, numel, clipped=clip is not None,
        weight_type=TYPES[weights[0].dtype], update_type=TYPES[update_type], batched=batched,
        cautious=rule == "cautious", aligned=table.aligned, rim=values_columns != columns,
        block=BLOCK, chunk=CHUNK, num_warps=8,
    )  # fmt: skip
