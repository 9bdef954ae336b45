# SPDX-License-Identifier: Apache-2.0
"""Router: which experts each token goes to, with what weight, and how evenly tokens are spread.

    scores    softmax or sigmoid of x·Wᵀ, in fp32                        [tokens, experts]
    chosen    the k highest of scores + bias (the bias chooses, it does not weigh)
    weights   the scores of the chosen; normalised to sum to ``scale``, or scaled alone

Three ways to keep experts evenly busy, free to combine: a load-balance loss, whose gradient pushes
down the scores of busy experts; a bias that is moved after each step, without any loss; a capacity
that drops a token's choice where its expert is full. The z-loss keeps logits small.

Losses are means over this rank's tokens, but the shares of tokens per expert are counted over
``axis``, the ranks that have tokens of one batch: then the mean of all ranks' losses is the loss of
the whole batch, and the bias is the same on every rank. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import comm
from shardwise.moe.activation import wide


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens find experts."""

    num_experts: int
    experts_per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # weights of a token's choices sum to ``scale``
    scale: float = 1.0
    balance_loss: float = 0.0  # how much the load-balance loss counts
    z_loss: float = 0.0
    bias_rate: float = 0.0  # how far update_bias moves the bias of an expert; 0: no bias
    capacity_factor: float | None = None  # of the even share of choices; None: nothing is dropped

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be an int"
            for name in ("num_experts", "experts_per_token")
            if type(getattr(self, name)) is not int
        ]
        if not problems and not 1 <= self.experts_per_token <= self.num_experts:
            problems.append(
                f"experts_per_token={self.experts_per_token} must lie between 1 and "
                f"num_experts={self.num_experts}"
            )
        if self.score not in ("softmax", "sigmoid"):
            problems.append(f"score={self.score!r} is neither 'softmax' nor 'sigmoid'")
        for name in ("balance_loss", "z_loss", "bias_rate"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                problems.append(f"{name}={value} must be zero or positive, and finite")
        if not 0 < self.scale < math.inf:
            problems.append(f"scale={self.scale} must be positive and finite")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            problems.append(f"capacity_factor={self.capacity_factor} must be positive; None: none")
        if problems:
            raise ValueError("this routing cannot work: " + "; ".join(problems))

    def capacity(self, num_tokens: int) -> int | None:
        """The most choices that one expert takes."""
        if self.capacity_factor is None:
            return None
        even = num_tokens * self.experts_per_token / self.num_experts
        return math.ceil(even * self.capacity_factor)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Where tokens go. ``loss`` is weighted already: add it to the model's."""

    experts: Tensor  # [tokens, choices] int64
    weights: Tensor  # [tokens, choices] fp32; zero where a choice was dropped
    kept: Tensor | None  # [tokens, choices] bool; None: all
    counts: Tensor  # [experts] int64: choices kept on this rank
    dropped: Tensor  # [] int64
    loss: Tensor  # [] fp32
    capacity: int | None

    def statistics(self) -> dict[str, Tensor]:
        """For metrics, still on the device: see :func:`statistics_of`."""
        return statistics_of(self.counts, self.dropped, self.counts.sum() + self.dropped)


def statistics_of(counts: Tensor, dropped: Tensor, total: Tensor) -> dict[str, Tensor]:
    """The busiest expert's load over the even share, the share of experts without work, and the
    share of choices that were dropped; counts [..., experts]."""
    counts = counts.float()
    return {
        "load_max": counts.amax(-1) / counts.mean(-1).clamp_min(1e-9),
        "idle_share": (counts == 0).float().mean(-1),
        "dropped_share": dropped / total.clamp_min(1),
    }


_TINY = torch.finfo(torch.float32).tiny  # keeps 0 / 0 away, and any score that is not 0


class Router(nn.Module):
    """Scores tokens against experts and chooses. The weight may be bf16; logits are fp32.

    Choices are counted in training, once: not in a recomputation, and not without gradients, which
    is how a reentrant checkpoint runs at first (``use_reentrant=False`` is counted).
    """

    expert_bias: Tensor
    load: Tensor
    dropped: Tensor

    def __init__(
        self,
        routing: Routing,
        hidden: int,
        *,
        axis: comm.Axis | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.routing, self.axis = routing, axis
        self.weight = nn.Parameter(
            torch.empty(routing.num_experts, hidden, device=device, dtype=dtype)
        )
        zeros = torch.zeros(routing.num_experts, dtype=torch.float32, device=device)
        if routing.bias_rate:
            self.register_buffer("expert_bias", zeros.clone())
        # Choices since the last step, for the bias and for metrics: no part of a checkpoint, which
        # is made between steps.
        self.register_buffer("load", zeros, persistent=False)
        self.register_buffer("dropped", zeros[:1].clone(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """As new: ``to_empty`` leaves anything in them."""
        if self.routing.bias_rate:
            self.expert_bias.zero_()
        self.forget_load()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            # Counts and biases are fp32 whatever the model is cast to: bf16 counts to 256.
            if buffer is not None and buffer.dtype != torch.float32:
                kept = before[name]
                assert kept is not None
                exact = torch.empty_like(buffer, dtype=torch.float32)
                self._buffers[name] = exact if kept.is_meta else exact.copy_(kept)
        if before["load"] is not None and before["load"].is_meta and not self.load.is_meta:
            self.forget_load()  # born now, and no state dict brings counts
        return self

    def forward(self, tokens: Tensor) -> Routes:
        """tokens [tokens, hidden]."""
        routing = self.routing
        # A dry run's tensors have no device that autocast knows.
        kind = "cpu" if tokens.is_meta else tokens.device.type
        with torch.autocast(kind, enabled=False):
            # fp32: bf16 would tie experts that differ.
            rows = wide(tokens)
            logits = F.linear(rows, self.weight.to(rows.dtype))  # [tokens, experts]
        scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
        ranked = scores.detach()
        if routing.bias_rate:
            ranked = ranked + self.expert_bias
        chosen = ranked.topk(routing.experts_per_token, -1).indices  # [tokens, choices]
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)
        if routing.scale != 1:
            weights = weights * routing.scale

        wanted = _count(chosen, routing.num_experts)  # [experts], before anything is dropped
        capacity = routing.capacity(len(tokens))
        kept, counts = None, wanted
        if capacity is not None:
            kept = _places_in_line(chosen, wanted) < capacity
            weights = weights * kept
            counts = wanted.clamp_max(capacity)
        dropped = (wanted - counts).sum()
        if self.training and torch.is_grad_enabled() and not _recomputing():
            self.load += wanted
            self.dropped += dropped
        return Routes(
            experts=chosen,
            weights=weights,
            kept=kept,
            counts=counts,
            dropped=dropped,
            loss=self._loss(logits, scores, wanted),
            capacity=capacity,
        )

    def _loss(self, logits: Tensor, scores: Tensor, wanted: Tensor) -> Tensor:
        routing = self.routing
        loss = logits.new_zeros(())
        total = wanted.to(logits.dtype)
        if routing.balance_loss and self.axis is not None:
            comm.all_reduce(total, self.axis).wait()  # by ranks without tokens too
        if len(logits) == 0:
            return loss + 0 * logits.sum()
        if routing.balance_loss:
            shares = total / total.sum().clamp_min(1)
            loss = loss + routing.balance_loss * unevenness(scores, shares)
        if routing.z_loss:
            loss = loss + routing.z_loss * logits.logsumexp(-1).square().mean()
        return loss

    def tally(self) -> Tensor:
        """[experts + 1], still on the device: choices of each expert on this rank since the last
        :meth:`update_bias`, dropped ones too, and how many of all were dropped."""
        return torch.cat([self.load, self.dropped])

    @torch.no_grad()
    def update_bias(self) -> None:
        """After an optimizer step: busy experts become a little less likely, idle ones more.

        Without a ``bias_rate`` it only starts the counts anew.
        """
        if self.routing.bias_rate:
            for axis in self._bias_axes():
                comm.all_reduce(self.load, axis).wait()
            self.expert_bias += self.routing.bias_rate * (self.load.mean() - self.load).sign()
        self.forget_load()

    def _bias_axes(self) -> tuple[comm.Axis, ...]:
        """The ranks whose biases move together: ``axis``, or all that share the router's weight
        where those are more."""
        own = () if self.axis is None else (self.axis,)
        weight = self.weight
        if not isinstance(weight, DTensor) or weight.device_mesh.size() <= sum(a.size for a in own):
            return own
        return comm.mesh_axes(weight.device_mesh)

    def forget_load(self) -> None:
        """Count anew."""
        self.load.zero_()
        self.dropped.zero_()


def unevenness(scores: Tensor, shares: Tensor) -> Tensor:
    """Sum over experts of (share of choices x mean score), scaled so that an even spread gives 0.

    ``scores`` [tokens, experts] may be sigmoids: a token's are made to sum to 1 first.
    """
    chances = scores / scores.sum(-1, keepdim=True).clamp_min(_TINY)
    return scores.shape[-1] * (shares * chances.mean(0)).sum() - 1


def _recomputing() -> bool:
    """Whether a forward runs inside a backward: what it sees has been counted."""
    return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined,no-any-return]


def _count(chosen: Tensor, num_experts: int) -> Tensor:
    """[experts] int64, without waiting (``bincount`` would)."""
    ordered = chosen.flatten().sort().values
    edges = torch.arange(num_experts, device=chosen.device)
    return torch.searchsorted(ordered, edges, right=True).diff(prepend=edges.new_zeros(1))


def _places_in_line(chosen: Tensor, counts: Tensor) -> Tensor:
    """Like ``chosen``: how many choices before this one, token by token, want the same expert."""
    ordered, order = chosen.flatten().sort(stable=True)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(order), device=order.device) - starts[ordered]
    return torch.empty_like(places).index_copy_(0, order, places).view_as(chosen)
