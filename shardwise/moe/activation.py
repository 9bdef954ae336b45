# SPDX-License-Identifier: Apache-2.0
"""Activation: the function between an expert's two matrices, and the order of gate and up.

    gated            h = g·σ(alpha·g) · (u + offset)       g, u clamped first where there is a limit
    squared ReLU     h = max(z, 0)²

    stacked (block 0)          | g g g g g g | u u u u u u |
    interleaved by block 2     | g g | u u | g g | u u | g g | u u |

All paths round at the same places: ``z`` is rounded to the dtype of the activations before it is
read, the activation is computed in fp32 from the rounded ``z``, and ``h = act(z)·p`` is rounded
once. Backward recomputes from the saved ``z``, so kernels, torch and recomputation agree up to the
order of sums inside the products. At the boundary of a clamp the gradient passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwise.kernels.grouped import ActivationNumbers
from shardwise.words import bound_problems, choice_problems


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation. The functions below build one, with explicit numbers."""

    kind: Literal["gated", "squared_relu"] = "gated"
    alpha: float = 1.0
    limit: float | None = None  # the gate is clamped from above, the up on both sides
    offset: float = 0.0

    def __post_init__(self) -> None:
        problems = choice_problems(self) + bound_problems(self, 0, "limit", above=True)
        if not math.isfinite(self.alpha) or not math.isfinite(self.offset):
            problems.append(f"alpha={self.alpha} and offset={self.offset} must be finite")
        if self.kind == "squared_relu" and (self.alpha, self.limit, self.offset) != (1, None, 0):
            problems.append("squared ReLU takes no alpha, limit or offset")
        if problems:
            raise ValueError("this activation cannot work: " + "; ".join(problems))

    @property
    def gated(self) -> bool:
        return self.kind == "gated"

    @property
    def inputs_per_output(self) -> int:
        """The number of columns of ``z`` that make one column of ``h``."""
        return 2 if self.gated else 1


@dataclass(frozen=True)
class Form:
    """The activation between the two products, and the order of gate and up before it."""

    activation: Activation
    block: int

    @property
    def numbers(self) -> ActivationNumbers:
        """The arguments of the kernels."""
        return {
            "gated": self.activation.gated,
            "alpha": self.activation.alpha,
            "limit": self.activation.limit,
            "offset": self.activation.offset,
            "block": self.block,
        }


def swiglu() -> Activation:
    return Activation()


def clamped_swiglu(*, limit: float) -> Activation:
    return Activation(limit=limit)


def clamped_quick_geglu(*, alpha: float, limit: float, offset: float) -> Activation:
    """The activation of gpt-oss, which uses alpha 1.702, limit 7 and offset 1."""
    return Activation(alpha=alpha, limit=limit, offset=offset)


def squared_relu() -> Activation:
    return Activation(kind="squared_relu")


# ------------------------------------------------------------------------------ gate and up


def check_block(block: int | None, width: int = 0) -> None:
    """Raise where gate and up, ``width`` rows each, cannot be interleaved by ``block``."""
    if block is not None and (type(block) is not int or block < 0):
        raise ValueError(f"gate_up_block={block!r}: give a whole number of rows, or 0 (stacked)")
    if block and width % block:
        raise ValueError(
            f"gate_up_block={block} does not divide {width}, the number of rows of gate and of up: "
            f"choose 0 (stacked) or a divisor of {width}"
        )


def split_gate_up(value: Tensor, block: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The gate and the up of ``value``, each half as long along ``dim``."""
    length = value.shape[dim]
    if block == 0:
        gate, up = value.chunk(2, dim)
        return gate, up
    check_block(block, length // 2)
    dim %= value.dim()
    gate, up = value.unflatten(dim, (length // (2 * block), 2, block)).unbind(dim + 1)
    return gate.flatten(dim, dim + 1), up.flatten(dim, dim + 1)


def join_gate_up(gate: Tensor, up: Tensor, block: int, dim: int = -1) -> Tensor:
    """The inverse of :func:`split_gate_up`."""
    if block == 0:
        return torch.cat([gate, up], dim)
    check_block(block, gate.shape[dim])
    dim %= gate.dim()
    blocks = (gate.shape[dim] // block, block)
    pairs = [part.unflatten(dim, blocks) for part in (gate, up)]
    return torch.stack(pairs, dim + 1).flatten(dim, dim + 2)


def convert_gate_up(value: Tensor, stored: int, wanted: int, dim: int = -1) -> Tensor:
    """``value`` (weights, biases or optimizer states) with gate and up in the order ``wanted``."""
    if stored == wanted:
        return value
    return join_gate_up(*split_gate_up(value, stored, dim), wanted, dim)


# ------------------------------------------------------------------------------ the definition


def wide(value: Tensor) -> Tensor:
    """``value`` in the dtype of sums and activations: fp32, or float64 for float64."""
    return value if value.dtype == torch.float64 else value.float()


def activate(z: Tensor, p: Tensor, form: Form) -> Tensor:
    """``act(z)·p`` [rows, width], in fp32 inside; z [rows, columns], p [rows] fp32."""
    return (_forward(wide(z), form) * p[:, None]).to(z.dtype)


def _forward(z: Tensor, form: Form) -> Tensor:
    activation = form.activation
    if not activation.gated:
        return z.clamp(min=0).square()
    gate, up = split_gate_up(z, form.block)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.offset)


def activate_backward(
    dh: Tensor, z: Tensor, p: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """``dz``, the recomputed ``h = act(z)·p``, and ``dp``, the row sums of ``dh·act(z)``."""
    activation, dh32, z32 = form.activation, wide(dh), wide(z)
    scaled = dh32 * p[:, None]
    if not activation.gated:
        positive = z32.clamp(min=0)
        act = positive.square()
        dz = scaled * 2 * positive
    else:
        gate, up = split_gate_up(z32, form.block)
        passes_gate = passes_up = None
        if activation.limit is not None:
            limit = activation.limit
            passes_gate, passes_up = gate <= limit, up.abs() <= limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigma = torch.sigmoid(activation.alpha * gate)
        swish, shifted = gate * sigma, up + activation.offset
        act = swish * shifted
        d_gate = scaled * shifted * (sigma + activation.alpha * swish * (1 - sigma))
        d_up = scaled * swish
        if passes_gate is not None and passes_up is not None:
            d_gate, d_up = d_gate * passes_gate, d_up * passes_up
        dz = join_gate_up(d_gate, d_up, form.block)
    return dz.to(z.dtype), (act * p[:, None]).to(z.dtype), (dh32 * act).sum(-1)
