# SPDX-License-Identifier: Apache-2.0
"""Muon's settings, and its arithmetic as pure functions over lists of pieces.

    momentum      ema   m = mu m + (1 - mu) g        sum   m = mu m + g
    Nesterov            g and m, mixed once more in the same way
    orthogonalise       the whole matrix (newton_schulz), times a scale that depends on its shape
    weight decay        decoupled, with the plain lr, before the update; "cautious": only where the
                        update agrees with the weight's sign

All but the orthogonalisation works element by element, so it runs on any piece of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shardwise.core.memory import held
from shardwise.kernels import newton_schulz
from shardwise.kernels.ahead import planned
from shardwise.kernels.forms import Polynomial, choose, num_grams
from shardwise.kernels.packed import Packed
from shardwise.kernels.tables import Matrices
from shardwise.optim.presets import DEFAULT, Form, polynomial_of
from shardwise.optim.settings import range_problems
from shardwise.words import choice_problems

MomentumForm = Literal["ema", "sum"]

# The factor on the learning rate of a matrix [out, in]. Other libraries use other names.
SCALES = {
    "spectral": lambda out, in_: math.sqrt(max(1.0, out / in_)),  # torch's "original"
    "match_rms_adamw": lambda out, in_: 0.2 * math.sqrt(max(out, in_)),  # Moonlight's
    "unit_rms": lambda out, in_: math.sqrt(out / in_),  # inputs of RMS 1 change outputs by RMS lr
    "none": lambda out, in_: 1.0,
}


@dataclass(frozen=True)
class MuonSettings:
    """Settings of Muon for the matrices of a model; ``sw.muon(...)`` is this class.

    A parameter group of the optimizer, and with it a checkpoint, holds these fields under the same
    names.

    Args:
        lr: the learning rate; ``scale`` decides the size of the update that it multiplies.
        momentum_form: "ema" (torch) or "sum" (Moonlight): the same updates, with buffers that
            differ by ``1 / (1 - momentum)``. Saved in checkpoints; buffers are converted on load.
        decay: "cautious" decays only where the update has the weight's sign.
        preset: nonic, polar_express, s4, you, keller, cubic, or a :class:`Polynomial`.
        form: of the iteration, direct or gram; "auto" takes the cheaper one for each shape.
        scale: "spectral" sqrt(max(1, out/in)), "match_rms_adamw" 0.2 sqrt(max(out, in)),
            "unit_rms" sqrt(out/in), or "none"; for the shape of the whole matrix.
        wire: the dtype of matrices between ranks; "fp16" (scaled by powers of two) halves the
            bytes and rounds.
        tensor_parallel: for weights cut by tensor parallelism: whole matrices on every rank
            ("duplicated", exact), Gram matrices summed over ranks ("distributed", exact up to
            rounding), or each rank's block alone ("blockwise", another optimizer).
        replicas: ranks that store the same shards divide the matrices and "spread" the results
            (one replica stores each gradient and momentum, and about as much is sent as an
            all-reduce of gradients would send), or every replica "repeat"s all work.
        step_bytes: the memory that a step may take on a rank beside states. It bounds how many
            matrices are exchanged and computed at a time; at least one is. None: states and step
            together take no more than AdamW's states.
    """

    kind: ClassVar[str] = "matrix"

    lr: float = 0.02
    _: KW_ONLY
    momentum: float = 0.95
    momentum_form: MomentumForm = "ema"
    nesterov: bool = True
    weight_decay: float = 0.0
    decay: Literal["plain", "cautious"] = "plain"
    preset: str | Polynomial = DEFAULT
    form: Form = "auto"
    scale: Literal["spectral", "match_rms_adamw", "unit_rms", "none"] = "spectral"
    wire: Literal["fp32", "fp16"] = "fp32"
    tensor_parallel: Literal["duplicated", "distributed", "blockwise"] = "duplicated"
    replicas: Literal["spread", "repeat"] = "spread"
    step_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = range_problems(self) + choice_problems(self)
        try:
            polynomial_of(self.preset)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("sw.muon(...) cannot work: " + "; ".join(problems))

    @property
    def polynomial(self) -> Polynomial:
        return polynomial_of(self.preset)


# Settings that decide how a step is computed, not its result. A load leaves them unchanged.
MACHINE_SETTINGS = ("wire", "replicas", "tensor_parallel", "momentum_form", "step_bytes")
muon = MuonSettings


def scale_of(rule: str, rows: int, cols: int) -> float:
    """The factor on an orthogonal [rows, cols] update."""
    return SCALES[rule](rows, cols)


def update_momentum(
    buffers: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]
) -> list[Tensor]:
    """Advance the momentum buffers in place; returns the updates to orthogonalise.

    Gradients are only read. The updates are new memory, because they are normalised in place, which
    must not change the momentum. ``group`` holds the settings, here and below.
    """
    momentum, nesterov = group["momentum"], group["nesterov"]
    if group["momentum_form"] == "ema":
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


def apply_update(weights: list[Tensor], updates: list[Tensor], group: Mapping[str, Any]) -> None:
    """``weights`` -= lr * updates, decayed, in place."""
    lr, weight_decay = float(group["lr"]), group["weight_decay"]
    if weight_decay and group["decay"] == "cautious":
        for weight, update in zip(weights, updates, strict=True):
            agrees = (weight * update > 0).to(weight.dtype)
            weight.addcmul_(weight, agrees, value=-lr * weight_decay)
    elif weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_add_(weights, updates, alpha=-lr)


# ------------------------------------------------------------------------------ by Triton kernels


def kernels_fit(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can work on these tensors: fp32 on a GPU that they were written for."""
    plain = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return plain and newton_schulz.uses_kernels(tensors[0].device)


def update_momentum_by_kernels(
    buffers: list[Tensor],
    grads: list[Tensor],
    places: list[Tensor],
    group: Mapping[str, Any],
    clip: Tensor | None = None,
) -> None:
    """:func:`update_momentum` in one pass that also clips the gradients and writes the updates to
    ``places``."""
    if planned(buffers[0]):
        return
    from shardwise.kernels.momentum import accumulate

    accumulate(grads, buffers, places, clip=clip, **_momentum_rule(group))


def packed(values: Tensor) -> Packed:
    """Matrices [count, rows, cols] in fp16, as kernels orthogonalise them."""
    if planned(values):
        count, rows, columns = values.shape
        norms = values.new_empty(count)
        return Packed(values=values.half(), inverse_norms=norms, rows=rows, columns=columns)
    from shardwise.kernels.normalise import normalise

    return normalise(values)


def orthogonalise(batch: Packed, polynomial: Polynomial) -> Tensor:
    """The orthogonal factors [count, rows, cols] in fp16; the batch is consumed."""
    if planned(batch.values):
        return batch.values
    return batch.unpadded(newton_schulz.orthogonalise_packed(batch, polynomial))


def apply_update_by_kernels(
    weights: Sequence[Tensor],
    updates: list[Tensor] | Tensor,
    group: Mapping[str, Any],
    clip: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """:func:`apply_update` in one pass; the updates are multiplied by ``scale``."""
    if planned(weights[0]):
        return
    from shardwise.kernels.update import apply

    lr = float(group["lr"])
    decay = lr * group["weight_decay"]
    apply(weights, updates, step=lr * scale, decay=decay, rule=group["decay"], clip=clip)


def step_by_kernels(
    grads: Matrices,
    momenta: Matrices,
    weights: Matrices,
    group: Mapping[str, Any],
    polynomial: Polynomial,
    scale: float,
    most_bytes: int,
    clip: Tensor | None = None,
) -> None:
    """One step of whole matrices [rows, cols] of one shape and parameter group, in three passes,
    as many at a time as ``most_bytes`` of memory allow.

    pack             momentum, Nesterov, norm, cast; from gradients into an fp16 batch
    orthogonalise    the batch, in place
    apply            scale, decay and update; from the batch into the weights
    """
    rows, cols = weights.rows, weights.columns
    if not (only_planned := planned(weights[0])):
        from shardwise.kernels.momentum import pack

    form = None if group["form"] == "auto" else group["form"]
    most = max(1, most_bytes // workspace_bytes(1, rows, cols, polynomial, True))
    num_parts = -(-len(weights) // most)
    size = -(-len(weights) // num_parts)
    for first in range(0, len(weights), size):
        part = slice(first, first + size)
        with held(workspace_bytes(len(weights[part]), rows, cols, polynomial, True), "step"):
            if only_planned:
                continue
            packed = pack(grads[part], momenta[part], clip=clip, **_momentum_rule(group))
            updates = newton_schulz.orthogonalise_packed(packed, polynomial, form)
            apply_update_by_kernels(weights[part], updates, group, clip, scale)


def workspace_bytes(
    count: int, rows: int, cols: int, polynomial: Polynomial, by_kernels: bool
) -> int:
    """The bytes that the orthogonalisation of ``count`` matrices takes. Kernels: a batch in fp16, a
    workspace of the same size, and Gram matrices. Else: results in fp32, and the workspace of one
    matrix."""
    if not by_kernels:
        return 4 * (count + 6) * rows * cols
    grams = num_grams(polynomial, choose(rows, cols, polynomial)) * min(rows, cols) ** 2
    return 2 * count * (2 * rows * cols + grams)


def _momentum_rule(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of momentum under the names of the kernels' arguments."""
    return {
        "beta": group["momentum"],
        "rule": group["momentum_form"],
        "nesterov": group["nesterov"],
    }
