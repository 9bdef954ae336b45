# SPDX-License-Identifier: Apache-2.0
"""AdamW and a clip in one pass: each value of weights, gradients and states is read once.

torch's fused kernel with a scale also writes the scaled gradients back: 8 transfers of fp32 instead
of 7 for each element, in dozens of launches instead of one or two.
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
from shardwise.kernels.muon import TYPES
from shardwise.kernels.tables import addresses

BLOCK = 2048  # elements that a program holds at a time
CHUNK = 8 * BLOCK  # elements of a program


def step_rates(
    steps: Tensor, *, lr: float | Tensor, betas: tuple[float, float], weight_decay: float
) -> Tensor:
    """[3, n], for the steps [n] of pieces, counted from 1: the learning rate, corrected for the
    bias of the average; the factor that corrects the root of the squares; the factor of decay."""
    number = steps.double()
    size, root = lr / (1 - betas[0] ** number), (1 - betas[1] ** number).rsqrt()
    return torch.stack([size, root, torch.ones_like(size) * (1 - lr * weight_decay)]).float()


@triton.jit
def _adamw_kernel(
    table_ptr, rates_ptr, clip_ptr, count, beta_1, beta_2, fresh_1, fresh_2, eps,
    grad_type: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1).to(tl.int64)
    weight_ptr = tl.load(table_ptr + piece).to(tl.pointer_type(tl.float32))
    grad_ptr = tl.load(table_ptr + count + piece).to(tl.pointer_type(grad_type))
    average_ptr = tl.load(table_ptr + 2 * count + piece).to(tl.pointer_type(tl.float32))
    square_ptr = tl.load(table_ptr + 3 * count + piece).to(tl.pointer_type(tl.float32))
    length = tl.load(table_ptr + 4 * count + piece)
    factor = tl.load(clip_ptr)
    length = tl.where(tl.load(clip_ptr + 1) == 0.0, length, 0)
    if aligned:
        weight_ptr, grad_ptr = tl.multiple_of(weight_ptr, 16), tl.multiple_of(grad_ptr, 16)
        average_ptr, square_ptr = tl.multiple_of(average_ptr, 16), tl.multiple_of(square_ptr, 16)
        length = tl.multiple_of(length, 16)
    size = tl.load(rates_ptr + piece)
    root = tl.load(rates_ptr + count + piece)
    keep = tl.load(rates_ptr + 2 * count + piece)
    for start in tl.range(0, chunk, block):
        place = tl.program_id(0).to(tl.int64) * chunk + start + tl.arange(0, block)
        mask = place < length
        g = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32) * factor
        m = tl.load(average_ptr + place, mask=mask, other=0.0) * beta_1 + g * fresh_1
        v = tl.load(square_ptr + place, mask=mask, other=0.0) * beta_2 + g * g * fresh_2
        w = tl.load(weight_ptr + place, mask=mask, other=0.0) * keep
        tl.store(average_ptr + place, m, mask=mask)
        tl.store(square_ptr + place, v, mask=mask)
        w -= size * m / (tl.sqrt(v) * root + eps)
        tl.store(weight_ptr + place, w, mask=mask)


def fits(*pieces: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these weights, gradients, averages and squares."""
    weights, grads, averages, squares = pieces
    wide = all(piece.dtype == torch.float32 for piece in (*weights, *averages, *squares))
    known = all(grad.dtype in TYPES for grad in grads)
    return wide and known and all(piece.is_contiguous() for column in pieces for piece in column)


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: Tensor,
) -> None:
    """Update all pieces in place, like torch's AdamW with clipped gradients, and count the steps.

    ``clip`` [2]: the factor of the gradients; and 1 if nothing may change, else 0.
    """
    # A list: torch would treat a single tensor as a scalar, and read it on the host.
    torch._foreach_add_(list(steps), [1 - clip[1]] * len(steps))
    columns = (weights, grads, averages, squares)
    # A launch has as many programs for each piece as the longest piece needs, so short pieces have
    # a launch of their own.
    rows = zip(weights, grads, strict=True)
    kinds = [(weight.numel() > CHUNK, grad.dtype) for weight, grad in rows]
    for kind in dict.fromkeys(kinds):
        chosen = [index for index, other in enumerate(kinds) if other == kind]
        table = addresses([[column[index] for index in chosen] for column in columns])
        numbers = torch.stack([steps[index] for index in chosen])
        rates = step_rates(numbers, lr=lr, betas=betas, weight_decay=weight_decay)
        run(
            _adamw_kernel, (-(-table.longest // CHUNK), len(chosen)),
            table.entries, rates, clip, len(chosen), *betas, 1 - betas[0], 1 - betas[1], eps,
            grad_type=TYPES[kind[1]], aligned=table.aligned, block=BLOCK, chunk=CHUNK, num_warps=8,
        )  # fmt: skip
