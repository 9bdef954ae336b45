# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of Muon, as pure functions over lists of pieces; and its settings.

    momentum      ema   m = mu m + (1 - mu) g        sum   m = mu m + g
    Nesterov            g and m mixed the same way once more
    orthogonalise       the whole matrix (newton_schulz), times a scale that its shape decides
    weight decay        decoupled, with the plain lr, before the update; or only where the update
                        agrees with the weight's sign ("cautious")

Everything but the orthogonalisation works element by element, so it runs on whatever piece of a
parameter a rank holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwise.optim.newton_schulz import DEFAULT, Form, Preset, preset_of

MomentumForm = Literal["ema", "sum"]
Scale = Literal["spectral", "match_rms_adamw", "unit_rms", "none"]
Wire = Literal["fp32", "fp16"]
TensorParallel = Literal["duplicated", "distributed", "blockwise"]

# The names mean different things elsewhere. The factor on the learning rate, by matrix [out, in]:
SCALES = {
    "spectral": lambda out, in_: math.sqrt(max(1.0, out / in_)),  # torch's "original"
    "match_rms_adamw": lambda out, in_: 0.2 * math.sqrt(max(out, in_)),  # Moonlight's
    "unit_rms": lambda out, in_: math.sqrt(out / in_),  # inputs of RMS 1 change outputs by RMS lr
    "none": lambda out, in_: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """What ``sw.muon(...)`` returns: a value, checked."""

    lr: float = 0.02
    momentum: float = 0.95
    momentum_form: MomentumForm = "ema"
    nesterov: bool = True
    weight_decay: float = 0.0
    decay: Literal["plain", "cautious"] = "plain"
    preset: str | Preset = DEFAULT
    form: Form = "auto"
    scale: Scale = "spectral"
    wire: Wire = "fp32"
    tensor_parallel: TensorParallel = "duplicated"
    replicas: Literal["spread", "repeat"] = "spread"

    def __post_init__(self) -> None:
        problems = []
        if not self.lr >= 0:
            problems.append(f"lr={self.lr!r} must be 0 or more")
        if not 0 <= self.momentum < 1:
            problems.append(f"momentum={self.momentum!r} must be in [0, 1)")
        if not self.weight_decay >= 0:
            problems.append(f"weight_decay={self.weight_decay!r} must be 0 or more")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                problems.append(
                    f"{name}={getattr(self, name)!r} is unknown; use {', '.join(values)}"
                )
        try:
            preset_of(self.preset)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("sw.muon(...) cannot work: " + "; ".join(problems))

    @property
    def polynomials(self) -> Preset:
        return preset_of(self.preset)


_CHOICES = {
    "momentum_form": ("ema", "sum"),
    "decay": ("plain", "cautious"),
    "form": ("auto", "direct", "gram"),
    "scale": tuple(SCALES),
    "wire": ("fp32", "fp16"),
    "tensor_parallel": ("duplicated", "distributed", "blockwise"),
    "replicas": ("spread", "repeat"),
}


def muon(
    lr: float = 0.02,
    *,
    momentum: float = 0.95,
    momentum_form: MomentumForm = "ema",
    nesterov: bool = True,
    weight_decay: float = 0.0,
    decay: Literal["plain", "cautious"] = "plain",
    preset: str | Preset = DEFAULT,
    form: Form = "auto",
    scale: Scale = "spectral",
    wire: Wire = "fp32",
    tensor_parallel: TensorParallel = "duplicated",
    replicas: Literal["spread", "repeat"] = "spread",
) -> MuonSettings:
    """Muon for the matrices of a model.

    Args:
        lr: of an update whose size the ``scale`` decides.
        momentum_form: "ema" (torch) or "sum" (Moonlight): the same updates, buffers that differ by
            ``1 / (1 - momentum)``. Kept in checkpoints, converted on load.
        decay: "cautious" decays only where the update has the weight's sign.
        preset: nonic, polar_express, s4, you, keller, cubic, or a :class:`Preset`.
        form: of the iteration, direct or gram; "auto" takes the cheaper one for each shape.
        scale: "spectral" sqrt(max(1, out/in)), "match_rms_adamw" 0.2 sqrt(max(out, in)),
            "unit_rms" sqrt(out/in), or "none"; of the whole matrix as orthogonalised.
        wire: what matrices travel in between ranks; "fp16" (scaled by powers of two) halves the
            bytes and rounds.
        tensor_parallel: what to do with weights cut by tensor parallelism: whole matrices on every
            rank ("duplicated", exact), Gram matrices summed over ranks ("distributed", exact up to
            rounding), or each rank's block for itself ("blockwise", another optimizer).
        replicas: ranks that hold the same shards take turns at the matrices and "spread" the
            result (their gradients and momenta lie with the one whose turn it is, and no more is
            sent than the all-reduce of gradients would), or all "repeat" all of it.
    """
    return MuonSettings(
        lr=lr,
        momentum=momentum,
        momentum_form=momentum_form,
        nesterov=nesterov,
        weight_decay=weight_decay,
        decay=decay,
        preset=preset,
        form=form,
        scale=scale,
        wire=wire,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
    )


def scale_of(rule: str, rows: int, cols: int) -> float:
    """The factor on an orthogonal [rows, cols] update."""
    return SCALES[rule](rows, cols)


def update_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    *,
    momentum: float,
    form: MomentumForm,
    nesterov: bool,
) -> list[Tensor]:
    """Advance the momentum buffers in place; the updates to orthogonalise, in new memory.

    Grads are only read, and no update aliases a buffer: whoever normalises it in place (others did)
    would destroy the momentum.
    """
    if not buffers:
        return []
    if form == "ema":
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        if nesterov:
            return list(torch._foreach_lerp(grads, buffers, momentum))
    else:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
        if nesterov:
            return list(torch._foreach_add(grads, buffers, alpha=momentum))
    return [buffer.clone() for buffer in buffers]


def convert_momentum(buffer: Tensor, momentum: float, source: str, target: str) -> None:
    """Rewrite a buffer of one momentum form as the other, in place."""
    if source == target:
        return
    if target == "sum":
        buffer.div_(1 - momentum)
    else:
        buffer.mul_(1 - momentum)


def apply_update(
    weights: list[Tensor],
    updates: list[Tensor],
    *,
    lr: float,
    weight_decay: float,
    decay: str,
) -> None:
    """``weights`` -= lr * updates, decayed, in place."""
    if not weights:
        return
    if weight_decay and decay == "cautious":
        for weight, update in zip(weights, updates, strict=True):
            agrees = (weight * update > 0).to(weight.dtype)
            weight.addcmul_(weight, agrees, value=-lr * weight_decay)
    elif weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_add_(weights, updates, alpha=-lr)
