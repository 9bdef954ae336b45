# SPDX-License-Identifier: Apache-2.0
"""Layers of the reference model: RMSNorm, attention inside documents, and rotary positions.

torch fuses `rms_norm` on GPUs. On a CPU it is a chain of ten small operations, whose gradients make
twice as many passes over memory as needed: a tenth of a small model's step.

Rotary positions rotate queries and keys by an angle that grows with the position. Channel i of a
head rotates with channel i + width/2 (the two halves of the head, the convention of Llama weights
in the Hugging Face layout), once in 2 pi theta^(2i/width) tokens.

A window of packed text holds several documents. Each begins with the token that ended the document
before, so a model that gets this token alone begins a text. Positions need not begin anew in each
document, because rotary attention depends on distances alone. On a GPU FlexAttention skips blocks
of keys that no query sees, and applies the mask only in blocks where documents meet:

    documents 0 0 0 1 | 1 1 1 1 | 1 1 1 2    in blocks of 4 tokens
    queries   0 0 0 1   part                 part: the mask decides token by token
              1 1 1 1   part  part           all:  every query sees every key
              1 1 1 2   part  part  part
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

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


Call = Callable[..., Tensor]  # called with a function and its inputs


def call_once(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``."""
    return function(*inputs)


def call_again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``. A compiled graph keeps the inputs and computes the result again in
    backward. Without compilation the result is kept, because autograd has to save it anyway."""
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return function(*inputs)
    again = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return again  # type: ignore[no-any-return]


def norm_again(norm: Call, x: Tensor) -> Tensor:
    """``norm(x)`` of an :class:`RMSNorm`, computed again like :func:`call_again`, except for the
    scale of each row, which is kept. (Without the scale, the weight's gradient would need one more
    pass over all gradients.) Values are the same, gradients are the same to rounding."""
    plain = isinstance(norm, RMSNorm) and not isinstance(x, DTensor)
    if not (plain and torch.compiler.is_compiling()):
        return call_again(norm, x)
    scale = (x.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt()  # type: ignore[attr-defined]
    return call_again(_scaled, x, scale, norm.weight)  # type: ignore[attr-defined]


def _scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * scale * weight).to(x.dtype)


Mask = Tensor | BlockMask  # dense: [batch, 1, query, key]
BLOCK = 128  # queries, and keys, of one block of a BlockMask


def documents_mask(tokens: Tensor, end: int | None, *, always: bool = False) -> Mask | None:
    """The keys that each query sees, if each token ``end`` begins a document.

    ``None``: a query sees its own key and all keys before. This is the result if there is no such
    token, but only on a CPU, because on a GPU the host would wait for this fact. With ``always``
    (for compiled blocks) there is always a mask.
    """
    if end is None:
        return None
    begins = tokens == end
    if tokens.device.type == "cpu" and not always and not begins.any():
        return None
    number = begins.cumsum(1, dtype=torch.int32)  # the document of each token: [B, T]
    if tokens.device.type == "cuda" and tokens.shape[1] % BLOCK == 0:
        return document_blocks(number)
    same = number[:, :, None] == number[:, None, :]
    return same.tril_().unsqueeze(1)


def document_blocks(number: Tensor) -> BlockMask:
    """The mask for FlexAttention. ``number`` [batch, context]: the document of each token."""
    number = number.contiguous()
    blocks = number.unflatten(1, (-1, BLOCK))  # [batch, blocks, BLOCK]
    first, last = blocks[..., 0], blocks[..., -1]  # numbers do not decrease
    before = torch.ones(blocks.shape[1], blocks.shape[1], dtype=torch.bool, device=number.device)
    seen = (last[:, None, :] >= first[:, :, None]) & before.tril()  # [batch, query, key]
    whole = (first[:, None, :] == last[:, :, None]) & before.tril(-1)

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The number of key blocks for each query block, and their places in order."""
        blocks = blocks.unsqueeze(1)  # [batch, 1, query, key]
        places = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), places.int()

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (number[batch, query] == number[batch, key])

    return BlockMask.from_kv_blocks(
        *ordered(seen & ~whole), *ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=sees
    )


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)  # else it stores all scores


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Attention [batch, context, heads, width] to the keys of :func:`documents_mask`; without a
    mask to all keys up to a query's own. Several query heads may share a key head."""
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # [batch, heads, ...]
    options: dict[str, Any] = {"enable_gqa": q.shape[2] != k.shape[2]}
    if isinstance(mask, BlockMask):
        flex = q.device.type == "cuda" and not torch.compiler.is_compiling()
        mix = _compiled_flex_attention() if flex else flex_attention
        return mix(*heads, block_mask=mask, **options).transpose(1, 2)  # type: ignore[no-any-return]
    options |= {"attn_mask": mask, "is_causal": mask is None}
    return F.scaled_dot_product_attention(*heads, **options).transpose(1, 2)


class Rotary:
    """The table of a model's angles, computed at the first use on a device.

    The table is no buffer, because `to_empty` would leave the contents of a buffer undefined.
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
            # Angles are always computed in fp32: position 100,000 is not exact in bf16.
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

    With halves (a, b) the result is (a cos - b sin, b cos + a sin). Rolling by half the width swaps
    the halves, and the table holds the signs, so no copies are negated or joined.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * table[0], swapped, table[1])
