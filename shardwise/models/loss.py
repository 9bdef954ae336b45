# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model: the cross-entropy of the head's logits, which are not kept.

    hidden [N, C] --chunks of rows--> logits [n, V] --> loss, gradient of the logits [n, V]
                                                    --> gradient of hidden, sum for the head

The logits of a microbatch are its largest tensor: 16 x 2048 tokens and 50,000 words make 6.6 GB in
fp32, and their gradient has the same size. So rows are processed in chunks, and forward computes
the gradients of each chunk while its logits exist: three products, as in the plain loss. Backward
only scales these gradients. An evaluation (``torch.no_grad``) computes the logits alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.precision.fp8_weight import Coded

IGNORED = -100  # a target that is not scored
CHUNK = 1 << 28  # logits of one chunk: 512 MiB in bf16, and their gradient

Softmax = Callable[..., tuple[Tensor, Tensor | None]]  # see softmax_and_gradient


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    z_coefficient: float = 0.0,
    chunk: int = CHUNK,
    softmax: Softmax | None = None,
) -> Tensor:
    """The mean cross-entropy of ``hidden @ head.T`` over scored targets, in fp32.

    Equal to the loss of whole logits to rounding. 0, not nan, where no target is scored.

    Args:
        hidden: [..., C]; ``targets``: [...], -100 where a target is not scored; ``head``: [V, C].
        z_coefficient: weight of the squared logarithm of the softmax's denominator, which keeps
            logits from drifting.
        chunk: the largest number of logits at a time. Without ``softmax``, fewer logits are
            computed whole; the logits of a quantised head are always computed whole.
        softmax: a compiled :func:`softmax_and_gradient`, or None.
    """
    rows, answers = hidden.flatten(0, -2), targets.flatten()
    scored = (answers != IGNORED).sum().clamp(min=1)
    few = rows.shape[0] * head.shape[0] <= chunk and softmax is None
    if few or isinstance(head, Coded):  # a quantised head computes its own products
        logits = F.linear(rows, head).float()
        total = F.cross_entropy(logits, answers, ignore_index=IGNORED, reduction="sum")
        if z_coefficient:
            squares = logits.logsumexp(-1).square()
            total = total + z_coefficient * squares.where(answers != IGNORED, 0).sum()
        return total / scored
    pieces = -(-rows.shape[0] * head.shape[0] // chunk)
    size = -(-rows.shape[0] // pieces)
    step = softmax or softmax_and_gradient
    learns = torch.is_grad_enabled()  # a Function's forward does not see it
    return _Chunked.apply(  # type: ignore[no-any-return, no-untyped-call]
        rows, head, answers, scored, z_coefficient, size, step, learns
    )


def softmax_and_gradient(
    logits: Tensor,
    targets: Tensor,
    scored: Tensor,
    z_coefficient: float,
    learns: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The loss of a chunk, divided by ``scored``, and its gradient for the logits, in their dtype
    (``learns``)."""
    x = logits.float()  # [n, V]
    counts = (targets != IGNORED).unsqueeze(1)  # [n, 1]
    index = targets.clamp(min=0).unsqueeze(1)
    denominator = x.logsumexp(-1, keepdim=True)  # [n, 1], a logarithm
    losses = denominator - x.gather(1, index) + z_coefficient * denominator.square()
    loss = losses.where(counts, 0).sum() / scored
    if not learns:
        return loss, None
    answer = torch.arange(x.shape[1], device=x.device) == index  # [n, V]
    chances = (x - denominator).exp() * (1 + 2 * z_coefficient * denominator)
    gradient = (chances - answer.float()) * (counts / scored)
    return loss, gradient.to(logits.dtype)


class _Chunked(torch.autograd.Function):
    """Forward computes the gradients of the loss. Backward scales them by its incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        targets: Tensor,
        scored: Tensor,
        z_coefficient: float,
        size: int,
        softmax: Softmax,
        learns: bool,
    ) -> Tensor:
        of_rows = torch.empty_like(rows) if learns and ctx.needs_input_grad[0] else None
        # Summed over the chunks in fp32, for any dtype of the head.
        of_head = None
        if learns and ctx.needs_input_grad[1]:
            of_head = torch.zeros_like(head, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        for begin in range(0, rows.shape[0], size):
            part = slice(begin, begin + size)
            loss, gradient = softmax(
                F.linear(rows[part], head), targets[part], scored, z_coefficient, learns
            )
            total += loss
            if of_rows is not None:
                assert gradient is not None
                torch.mm(gradient, head, out=of_rows[part])
            if of_head is not None:
                assert gradient is not None
                _add_product(of_head, gradient.t(), rows[part])
            del gradient
        ctx.save_for_backward(of_rows, of_head)
        ctx.head_dtype = head.dtype
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_rows, of_head = ctx.saved_tensors
        if of_rows is not None:
            of_rows = of_rows * grad.to(of_rows.dtype)
        if of_head is not None:
            scaled = torch.empty_like(of_head, dtype=ctx.head_dtype)
            of_head = torch.mul(of_head, grad, out=scaled)
        return of_rows, of_head, None, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, summed in fp32."""
    if a.is_meta:  # a plan has no values, and torch 2.11 has no such product on the meta device
        return
    if a.device.type == "cpu":  # there is no CPU kernel for 16-bit factors and fp32 sums
        a, b = a.to(total.dtype), b.to(total.dtype)
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
