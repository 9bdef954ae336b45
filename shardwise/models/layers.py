# SPDX-License-Identifier: Apache-2.0
"""Layers of the reference model: RMSNorm, attention inside documents, and rotary positions.

torch fuses `rms_norm` on GPUs; on a CPU it is a chain of ten small operations whose gradients make
twice as many passes over memory as needed, which is a tenth of a small model's step.

Rotary positions rotate queries and keys by an angle that grows with the position. Channel i of a
head rotates with channel i + width/2 (the two halves of the head, the convention of Llama weights
in the Hugging Face layout), once in 2 pi theta^(2i/width) tokens.

A window of packed text holds several documents, each begun by the token that ended the one before:
a model that is asked to go on from that token alone begins a text. Positions need not begin anew in
each document, because rotary attention depends on distances alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.models.gpt_config import GPTConfig, RopeScaling


class RMSNorm(nn.RMSNorm):
    """``hidden / sqrt(mean(hidden^2) + eps) * weight`` over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        plain = x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32
        plain = plain and not isinstance(x, DTensor)
        if not plain or not torch.is_grad_enabled():
            return super().forward(x)
        return _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]


class _Norm(torch.autograd.Function):
    """With unit = x * scale, the gradient of x is scale * (g w - unit * mean(g w unit))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale  # length sqrt(width)
        ctx.save_for_backward(unit, scale, weight)
        normed: Tensor = unit * weight
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        product = (grad * unit).flatten(0, -2)  # [rows, width]
        mean = (product @ weight).view_as(scale) / unit.shape[-1]
        of_x = torch.addcmul(grad * weight, unit, mean, value=-1).mul_(scale)
        return of_x, product.sum(0), None


def documents_mask(tokens: Tensor, end: int | None) -> Tensor | None:
    """Which keys a query sees where each token ``end`` begins a document: [batch, 1, query, key].

    ``None``: all before it. So it is where there is no such token, which only a CPU can ask about
    without waiting.
    """
    if end is None:
        return None
    begins = tokens == end
    if tokens.device.type == "cpu" and not begins.any():
        return None
    number = begins.cumsum(1)  # of the document that a token is in: [batch, context]
    same = number[:, :, None] == number[:, None, :]
    return same.tril_().unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention [batch, context, heads, width] inside the documents of
    :func:`documents_mask`; several query heads may share a key head."""
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [batch, heads, context, width]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)


class Rotary:
    """The table of a model's angles, computed when it is first asked for on a device.

    The table is no buffer: `to_empty`, which gives a model from the meta device memory but no
    values, would leave the contents of a buffer undefined.
    """

    def __init__(self, config: GPTConfig) -> None:
        self.context = config.context
        self.width = config.head_width
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def table(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Cosines, and sines with the signs that :func:`rotate` needs: [2, length, 1, width]."""
        key = (device, dtype)
        if key not in self._tables:
            # Angles are computed in fp32 for any dtype: position 100,000 is not exact in bf16.
            positions = torch.arange(self.context, dtype=torch.float32, device=device)
            angles = torch.outer(positions, self._frequencies(device))  # [context, width / 2]
            cos, sin = angles.cos(), angles.sin()
            table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
            self._tables[key] = table.unsqueeze(2).to(dtype)  # [2, context, 1, width]
        return self._tables[key][:, :length]

    def _frequencies(self, device: torch.device) -> Tensor:
        channels = torch.arange(0, self.width, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / self.theta ** (channels / self.width)  # [width / 2]
        return frequencies if self.scaling is None else stretch(frequencies, self.scaling)


def stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies for a context ``factor`` times as long; see :class:`RopeScaling`."""
    cycles = scaling.original_context * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((cycles - low) / (high - low)).clamp(0, 1)  # 1: unchanged, 0: stretched
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """``heads`` [batch, context, heads, width] rotated by ``table`` [2, context, 1, width].

    With halves (a, b) the result is (a cos - b sin, b cos + a sin); rolling by half the width
    swaps the halves and the table holds the signs, which saves negating and joining copies.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * table[0], swapped, table[1])
