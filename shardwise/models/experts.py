# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: a router sends each token to a few of many SwiGLU feed-forwards.

    tokens      t0      t1      t2          chosen: t0 -> {0, 2}, t1 -> {0, 1}, t2 -> {2, 1}
    sorted      t0 t1 | t1 t2 | t0 t2       one row per token and choice, expert by expert
    ends            2       4       6       where each expert's rows end
    experts     one grouped product per weight, all experts at once
    sorted back, weighted by the router, summed over each token's choices

Counts of tokens per expert stay on the device: nothing waits for the host. Rows move by
permutations, whose gradients are permutations too, so sums have one order and every run one result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.config import GPTConfig


class Experts(nn.Module):
    """The feed-forward of a block as ``num_experts`` experts with a softmax top-k router."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.experts_per_token = config.experts_per_token
        width = config.expert_width
        self.router = nn.Linear(config.dim, self.num_experts, bias=False)
        self.gate = nn.Parameter(torch.empty(self.num_experts, width, config.dim))
        self.up = nn.Parameter(torch.empty(self.num_experts, width, config.dim))
        self.down = nn.Parameter(torch.empty(self.num_experts, config.dim, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, context, dim] -> the same, and how unevenly the tokens were spread."""
        tokens = hidden.flatten(0, 1)  # [tokens, dim]
        # The router decides in fp32: bf16 would tie experts that differ.
        chances = self.router(tokens).float().softmax(-1)  # [tokens, experts]
        weights, chosen = chances.topk(self.experts_per_token, -1)  # [tokens, choices] both
        weights = weights / weights.sum(-1, keepdim=True)

        in_order, order = chosen.flatten().sort(stable=True)  # [tokens * choices] both
        experts = torch.arange(self.num_experts, device=order.device)
        ends = torch.searchsorted(in_order, experts, right=True).int()  # [experts]

        rows = _Spread.apply(tokens, order, self.experts_per_token)  # type: ignore[no-untyped-call]
        inner = F.silu(grouped_linear(rows, self.gate, ends)) * grouped_linear(rows, self.up, ends)
        rows = grouped_linear(inner, self.down, ends)  # [tokens * choices, dim]
        rows = _SortBack.apply(rows, order)  # type: ignore[no-untyped-call]
        rows = rows.unflatten(0, chosen.shape)  # [tokens, choices, dim]
        mixed = (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1)  # [tokens, dim]
        return mixed.view_as(hidden), unevenness(chances, ends)


def unevenness(chances: Tensor, ends: Tensor) -> Tensor:
    """Sum over experts of (share of tokens x mean chance), scaled so that an even spread gives 0.

    The gradient reaches the router through the chances and pushes those of busy experts down.
    """
    num_experts = chances.shape[-1]
    counts = ends.diff(prepend=ends.new_zeros(1))  # [experts]
    shares = counts.to(chances.dtype) / ends[-1]
    return num_experts * (shares * chances.mean(0)).sum() - 1


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [rows, in] of expert e, which end at ``ends[e]``, times ``weight[e]`` [out, in].

    One grouped product where torch can; a loop of plain ones, which needs the counts on the host,
    where rows are not multiples of 16 bytes.
    """
    if rows.is_meta:  # no values and no counts: one product has the same shapes and FLOPs
        return F.linear(rows, weight[0])
    if all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:]):
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    return looped_linear(rows, weight, ends)


def looped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """What :func:`grouped_linear` computes, one expert after another."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(rows.split(sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


class _Spread(torch.autograd.Function):
    """Each token's row, once for every choice, in the order of the experts.

    torch's own gradient of an indexed read adds rows in whatever order threads come; here a
    token's gradients lie side by side again before they are summed.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        rows = torch.empty_like(grad).index_copy_(0, order, grad)
        return rows.unflatten(0, (-1, ctx.choices)).sum(1), None, None


class _SortBack(torch.autograd.Function):
    """Rows in the order of the experts put back in the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None
