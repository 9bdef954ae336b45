# SPDX-License-Identifier: Apache-2.0
"""Muon: the orthogonalised momentum. The rule that all others can be copied from.

    before     momentum m = mu m + (1 - mu) g; Nesterov mixes g and m once more in the same way
    compute    the orthogonal factor of the whole matrix, times a scale that depends on its shape
    after      decoupled weight decay with the plain lr ("cautious": only where the update agrees
               with the weight's sign), then weights -= lr * updates

Each hook runs by torch, or by Triton kernels on GPUs that have them. In a plan, tensors are on the
meta device: kernels are left out, and the memory that they would take is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shardwise.core.memory import counted, held
from shardwise.kernels import newton_schulz
from shardwise.kernels.polynomials import DEFAULT, Polynomial, polynomial_of
from shardwise.kernels.tables import Matrices
from shardwise.optim.blocks import Blocks
from shardwise.optim.exchange import KIND
from shardwise.optim.rules import Rule, State, Step, range_problems
from shardwise.words import choice_problems

# The factor on the learning rate of a matrix [out, in].
SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda out, in_: math.sqrt(max(1.0, out / in_)),  # Keller Jordan's, and torch's
    "match_rms_adamw": lambda out, in_: 0.2 * math.sqrt(max(out, in_)),  # Moonshot's, and torch's
    "unit_rms_norm": lambda out, in_: math.sqrt(out / in_),  # inputs of RMS 1 move outputs by lr
    "max_side": lambda out, in_: math.sqrt(max(out, in_)),  # Megatron's "spectral"
    "none": lambda out, in_: 1.0,
}
# Settings that decide how a step is computed, not its result. A load leaves them unchanged.
MACHINE_SETTINGS = ("tensor_parallel",)


@dataclass(frozen=True)
class MuonSettings(Rule):
    """Muon for the matrices of a model; ``sw.muon(...)`` is this class.

    Args:
        lr: the learning rate; ``scale`` decides the size of the update that it multiplies.
        decay: "cautious" decays only where the update has the weight's sign.
        preset: the polynomials of Newton-Schulz: nonic, polar_express, keller, or a
            :class:`Polynomial`.
        scale: "original" sqrt(max(1, out/in)), "match_rms_adamw" 0.2 sqrt(max(out, in)),
            "unit_rms_norm" sqrt(out/in), "max_side" sqrt(max(out, in)), or "none"; for the shape
            of the whole matrix.
        tensor_parallel: for weights cut by tensor parallelism: whole matrices, divided among the
            ranks ("duplicated", exact), Gram matrices summed over ranks ("distributed", exact up to
            rounding), or each rank's block alone ("blockwise", another optimizer).
    """

    kind: ClassVar[str] = "matrix"
    row_states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    has_kernels: ClassVar[bool] = True

    lr: float = 0.02
    _: KW_ONLY
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    decay: Literal["plain", "cautious"] = "plain"
    preset: str | Polynomial = DEFAULT
    scale: Literal["original", "match_rms_adamw", "unit_rms_norm", "max_side", "none"] = "original"
    tensor_parallel: Literal["duplicated", "distributed", "blockwise"] = "duplicated"

    def __post_init__(self) -> None:
        problems = range_problems(self)
        if self.scale in ("spectral", "spectral_norm"):
            problems.append(
                f"scale={self.scale!r} means sqrt(max(1, out/in)) to some libraries and "
                f"sqrt(max(out, in)) to others (Megatron): say 'original' for the first, "
                f"'max_side' for the second, or 'unit_rms_norm' for sqrt(out/in)"
            )
        else:
            problems += choice_problems(self)
        try:
            polynomial_of(self.preset)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("sw.muon(...) cannot work: " + "; ".join(problems))

    @property
    def polynomial(self) -> Polynomial:
        return polynomial_of(self.preset)

    @property
    def exchange(self) -> Any:
        return type(self), self.tensor_parallel

    def factor(self, rows: int, cols: int, settings: Mapping[str, Any]) -> float:
        return SCALES[settings["scale"]](rows, cols)

    def before(
        self,
        gradients: list[Tensor],
        states: dict[str, list[Tensor]],
        places: list[Tensor],
        step: Step,
    ) -> None:
        buffers, settings = states["momentum_buffer"], step.settings
        if step.by_kernels:
            if not buffers[0].is_meta:
                from shardwise.kernels.muon import accumulate

                beta, nesterov = settings["momentum"], settings["nesterov"]
                accumulate(gradients, buffers, places, beta=beta, nesterov=nesterov, clip=step.clip)
            return
        torch._foreach_lerp_(buffers, gradients, 1 - settings["momentum"])
        if settings["nesterov"]:
            mixed = torch._foreach_lerp(gradients, buffers, settings["momentum"])
            buffers = [counted(update, KIND) for update in mixed]
        torch._foreach_copy_(places, buffers)

    def compute(self, batch: Tensor, state: State, step: Step) -> Tensor:
        count, rows, cols = batch.shape
        polynomial = polynomial_of(step.settings["preset"])
        nbytes = workspace_bytes(count, rows, cols, polynomial, step.by_kernels)
        if step.narrow:
            if not (planned := batch.is_meta):
                from shardwise.kernels.muon import normalise

                packed = normalise(batch)
            updates = batch.half() if planned else packed.values
            del batch  # its memory is free for the workspace
            with held(nbytes, KIND):
                if planned:
                    return updates
                return packed.unpadded(newton_schulz.orthogonalise_packed(packed, polynomial))
        with held(nbytes, KIND):
            if batch.is_meta:
                return torch.empty_like(batch)
            updates = newton_schulz.orthogonalise(batch, polynomial).float()
            return updates.mul_(self.factor(rows, cols, step.settings))

    def compute_blocks(self, batch: Tensor, blocks: Blocks, step: Step) -> Tensor:
        polynomial = polynomial_of(step.settings["preset"])
        factor = self.factor(*blocks.whole_shape(*batch.shape[1:]), step.settings)
        return blocks.orthogonalise(batch, polynomial).mul_(factor)

    def after(self, weights: list[Tensor], updates: list[Tensor], step: Step) -> None:
        settings = step.settings
        if step.by_kernels:
            _apply(weights, updates, step, step.scale)
            return
        lr, weight_decay = float(settings["lr"]), settings["weight_decay"]
        if weight_decay and settings["decay"] == "cautious":
            for weight, update in zip(weights, updates, strict=True):
                agrees = (weight * update > 0).to(weight.dtype)
                weight.addcmul_(weight, agrees, value=-lr * weight_decay)
        elif weight_decay:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, updates, alpha=-lr)

    def whole(
        self,
        gradients: Matrices,
        states: dict[str, Matrices],
        weights: Matrices,
        most_bytes: int,
        step: Step,
    ) -> None:
        """In three passes: pack (momentum, Nesterov, norm and cast, from gradients into an fp16
        batch), orthogonalise (the batch, in place), apply (from the batch into the weights)."""
        rows, cols, settings = weights.rows, weights.columns, step.settings
        polynomial, momenta = polynomial_of(settings["preset"]), states["momentum_buffer"]
        most = max(1, most_bytes // workspace_bytes(1, rows, cols, polynomial, True))
        num_parts = -(-len(weights) // most)
        size = -(-len(weights) // num_parts)
        for first in range(0, len(weights), size):
            part = slice(first, first + size)
            with held(workspace_bytes(len(weights[part]), rows, cols, polynomial, True), KIND):
                if weights[0].is_meta:
                    continue
                from shardwise.kernels.muon import pack

                beta, nesterov = settings["momentum"], settings["nesterov"]
                given = gradients[part], momenta[part]
                packed = pack(*given, beta=beta, nesterov=nesterov, clip=step.clip)
                updates = newton_schulz.orthogonalise_packed(packed, polynomial)
                _apply(weights[part], updates, step, self.factor(rows, cols, settings))


muon = MuonSettings


def _apply(
    weights: Sequence[Tensor], updates: list[Tensor] | Tensor, step: Step, factor: float
) -> None:
    """Decay and update by a kernel in one pass; the updates are multiplied by ``factor``."""
    if weights[0].is_meta:
        return
    from shardwise.kernels.muon import apply

    settings = step.settings
    lr = float(settings["lr"])
    decay = lr * settings["weight_decay"]
    apply(weights, updates, step=lr * factor, decay=decay, rule=settings["decay"], clip=step.clip)


def workspace_bytes(
    count: int, rows: int, cols: int, polynomial: Polynomial, by_kernels: bool
) -> int:
    """The bytes that the orthogonalisation of ``count`` matrices takes. Kernels: a batch in fp16, a
    workspace of the same size, and Gram matrices. Else: results in fp32, and the workspace of one
    matrix."""
    if not by_kernels:
        return 4 * (count + 6) * rows * cols
    return 2 * count * (2 * rows * cols + polynomial.grams * min(rows, cols) ** 2)
