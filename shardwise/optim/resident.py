# SPDX-License-Identifier: Apache-2.0
"""Matrices that never travel, on a GPU with kernels: three passes instead of a dozen.

    pack             momentum, Nesterov, norm, cast; straight from gradients into an fp16 batch
    orthogonalise    the batch, in place
    apply            scale, decay and update; straight from the batch into the weights

A parameter is resident where this rank owns and holds every matrix of it that it holds any of, and
no replica waits for the result. What is left goes through the exchange; there the same kernels
replace the passes before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.forms import choose, num_grams
from shardwise.optim.newton_schulz import Preset, has_kernels

BATCH_ELEMENTS = 1 << 29  # of one batch: 1 GiB in fp16, and as much again to work in


@dataclass(eq=False)
class Piece:
    """One whole matrix that is here: views of the gradient, the momentum and the weight."""

    grad: Tensor
    momentum: Tensor
    weight: Tensor


def kernels_serve(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can work on these: fp32 on a GPU that they were written for."""
    first = tensors[0]
    plain = all(one.dtype == torch.float32 and one.is_contiguous() for one in tensors)
    return plain and has_kernels(first.device)


def hold_workspace(count: int, rows: int, cols: int, preset: Preset) -> None:
    """In a plan: take, for a moment, the memory of an iteration of ``count`` matrices: a batch in
    fp16, as much to work in, and Gram matrices."""
    form = choose(rows, cols, preset.polynomial)
    grams = num_grams(preset.polynomial, form) * min(rows, cols) ** 2
    torch.empty(count * (2 * rows * cols + grams), dtype=torch.float16, device="meta")


def step(pieces: Sequence[Piece], group: dict[str, Any], preset: Preset, scale: float) -> None:
    """One step of matrices [rows, cols] of one shape and one parameter group."""
    if not pieces[0].weight.is_meta:
        from shardwise.kernels.momentum import pack
        from shardwise.kernels.newton_schulz import orthogonalise_packed
        from shardwise.kernels.update import apply

    polynomial = preset.polynomial
    lr = float(group["lr"])
    most = max(1, BATCH_ELEMENTS // pieces[0].weight.numel())
    for first in range(0, len(pieces), most):
        part = pieces[first : first + most]
        if part[0].weight.is_meta:
            rows, cols = part[0].weight.shape
            hold_workspace(len(part), rows, cols, preset)
            continue
        packed = pack(
            [piece.grad for piece in part],
            [piece.momentum for piece in part],
            beta=group["momentum"],
            rule=group["momentum_form"],
            nesterov=group["nesterov"],
        )
        form = None if group["form"] == "auto" else group["form"]
        updates = orthogonalise_packed(packed, polynomial, form)
        apply(
            [piece.weight for piece in part],
            updates,
            step=lr * scale,
            decay=lr * group["weight_decay"],
            rule=group["decay"],
        )


def accumulate(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    momentum: float,
    form: Any,
    nesterov: bool,
) -> list[Tensor]:
    """``muon.update_momentum`` in one pass."""
    updates = [torch.empty_like(buffer) for buffer in buffers]
    if updates[0].is_meta:
        return updates
    from shardwise.kernels import momentum as kernel

    kernel.accumulate(grads, buffers, updates, beta=momentum, rule=form, nesterov=nesterov)
    return updates


def apply_update(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    decay: Any,
) -> None:
    """``muon.apply_update`` in one pass."""
    if weights[0].is_meta:
        return
    from shardwise.kernels.update import apply

    apply(weights, updates, step=lr, decay=lr * weight_decay, rule=decay)
