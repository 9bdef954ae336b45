# SPDX-License-Identifier: Apache-2.0
"""Router: the experts of each token, their weights, and how evenly experts are used.

    scores    softmax or sigmoid of x·Wᵀ, in fp32                        [tokens, experts]
    chosen    the k highest of scores + bias (the bias affects the choice, not the weights)
    weights   the scores of the chosen experts, normalised to sum to ``scale``, or only scaled

Three means keep experts evenly busy, and may be combined: a load-balance loss, of the batch or of
each sequence, whose gradient lowers the scores of busy experts; a bias that is moved after each
step, without a loss; a capacity, which drops a token's choice if the expert is full. The z-loss
keeps logits small.

With groups, a token's experts lie in few groups: the groups whose two best experts have the highest
scores. Experts are spread over ranks in order, so if a group holds the experts of one node, groups
limit the number of nodes that a token is sent to.

Losses are means over this rank's tokens, but the shares of tokens per expert are counted over
``axis``, the ranks that have tokens of one batch. So the mean of the losses of all ranks is the
loss of the whole batch, and the bias is the same on every rank. The host never waits for the device
in this file.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardwise.core import comm
from shardwise.core.compat import inside_backward
from shardwise.core.mesh import Ranks
from shardwise.core.uncompiled import operator
from shardwise.moe import forgotten
from shardwise.moe.activation import wide
from shardwise.words import bound_problems, choice_problems, type_problems


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The settings of a router."""

    num_experts: int
    experts_per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # whether the weights of a token's choices sum to ``scale``
    scale: float = 1.0
    balance_loss: float = 0.0  # coefficient of the load-balance loss
    z_loss: float = 0.0  # coefficient of the z-loss
    bias_rate: float = 0.0  # step of update_bias; 0: no bias
    capacity_factor: float | None = None  # times the even share of choices; None: no capacity
    drop: Literal["late", "unlikely"] = "late"  # which choices of a full expert are dropped
    groups: int = 1  # number of equal parts of the experts, in order
    groups_per_token: int = 1  # number of groups in which a token's choices may lie
    sequence_loss: float = 0.0  # coefficient of the load-balance loss of each sequence

    def __post_init__(self) -> None:
        if problems := type_problems(self):
            raise ValueError("this routing cannot work: " + "; ".join(problems))
        if not 1 <= self.experts_per_token <= self.num_experts:
            problems.append(
                f"experts_per_token={self.experts_per_token} must lie between 1 and "
                f"num_experts={self.num_experts}"
            )
        if not problems and (self.groups < 1 or self.num_experts % self.groups):
            problems.append(f"groups={self.groups} must divide num_experts={self.num_experts}")
        elif not problems and not (
            1 <= self.groups_per_token <= self.groups
            and self.experts_per_token <= self.groups_per_token * (self.num_experts // self.groups)
        ):
            problems.append(
                f"groups_per_token={self.groups_per_token} of groups={self.groups} must hold "
                f"experts_per_token={self.experts_per_token} experts"
            )
        problems += choice_problems(self)
        terms = ("balance_loss", "sequence_loss", "z_loss", "bias_rate")
        problems += bound_problems(self, 0, *terms)
        problems += bound_problems(self, 0, "scale", "capacity_factor", above=True)
        if problems:
            raise ValueError("this routing cannot work: " + "; ".join(problems))

    def capacity(self, num_tokens: int) -> int | None:
        """The largest number of choices that one expert takes; None: no limit."""
        if self.capacity_factor is None:
            return None
        even = num_tokens * self.experts_per_token / self.num_experts
        return math.ceil(even * self.capacity_factor)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The experts of each token. Add ``loss`` (coefficients are included) to the model's loss."""

    experts: Tensor  # [tokens, choices] int64
    weights: Tensor  # [tokens, choices] fp32; zero where a choice was dropped
    kept: Tensor | None  # [tokens, choices] bool; None: nothing is dropped
    counts: Tensor  # [experts] int64: choices kept on this rank
    dropped: Tensor  # [] int64
    loss: Tensor  # [] fp32
    capacity: int | None

    def statistics(self) -> dict[str, Tensor]:
        """Metrics, as tensors on the device: see :func:`statistics_of`."""
        return statistics_of(self.counts, self.dropped, self.counts.sum() + self.dropped)


def statistics_of(counts: Tensor, dropped: Tensor, total: Tensor) -> dict[str, Tensor]:
    """Metrics of ``counts`` [..., experts]: the largest load of an expert relative to the even
    share, the share of experts without work, and the share of choices that were dropped."""
    counts = counts.float()
    return {
        "load_max": counts.amax(-1) / counts.mean(-1).clamp_min(1e-9),
        "idle_share": (counts == 0).float().mean(-1),
        "dropped_share": dropped / total.clamp_min(1),
    }


_TINY = torch.finfo(torch.float32).tiny  # avoids 0 / 0, and changes no other score


class Router(nn.Module):
    """Scores experts for each token and chooses. The weight may be bf16; logits are fp32.

    Choices are counted in training, once: not in a recomputation, and not without gradients. The
    first forward of a reentrant checkpoint has no gradients, so its recomputation is counted
    instead (not in graphs of torch.compile).
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
        forgotten.warn_of_constant_weights(routing)
        forgotten.watch(self)
        self.routing = routing
        self.axis = axis
        self.weight = nn.Parameter(
            torch.empty(routing.num_experts, hidden, device=device, dtype=dtype)
        )
        zeros = torch.zeros(routing.num_experts, dtype=torch.float32, device=device)
        if routing.bias_rate:
            self.register_buffer("expert_bias", zeros.clone())
        # Choices since the last step, for the bias and for metrics. Checkpoints are written between
        # steps, so they do not contain these counts.
        self.register_buffer("load", zeros, persistent=False)
        self.register_buffer("dropped", zeros[:1].clone(), persistent=False)
        self.reset_parameters()

    @property
    def axis(self) -> comm.Axis | None:
        """The ranks that have tokens of one batch; None: this rank alone."""
        return self._axis

    @axis.setter
    def axis(self, axis: comm.Axis | None) -> None:
        self._axis, self._axis_name = axis, ""
        if axis is not None:
            self._axis_name = f"{axis.name} {id(axis)}"
            _axes[self._axis_name] = axis

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Zero the buffers, which ``to_empty`` leaves undefined."""
        if self.routing.bias_rate:
            self.expert_bias.zero_()
        self.forget_load()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            # Counts and biases stay fp32 when the model is cast: bf16 can count only to 256.
            if buffer is not None and buffer.dtype != torch.float32:
                kept = before[name]
                assert kept is not None
                exact = torch.empty_like(buffer, dtype=torch.float32)
                self._buffers[name] = exact if kept.is_meta else exact.copy_(kept)
        if before["load"] is not None and before["load"].is_meta and not self.load.is_meta:
            self.forget_load()  # no values yet, and state dicts do not contain counts
        return self

    def forward(self, tokens: Tensor, length: int | None = None) -> Routes:
        """The routes of tokens [tokens, hidden]. ``length``: tokens of each sequence; None: the
        tokens are one sequence."""
        routing = self.routing
        logits = logits_of(tokens, self.weight)
        bias = self.expert_bias if routing.bias_rate else None
        scores, chosen, weights, wanted = choose(logits, bias, routing)
        capacity = routing.capacity(len(tokens))
        kept, counts, dropped = None, wanted, wanted.new_zeros(())
        if capacity is not None:
            first = None if routing.drop == "late" else weights.detach()
            kept = _places_in_line(chosen, wanted, first) < capacity
            weights = weights * kept
            counts = wanted.clamp_max(capacity)
            dropped = (wanted - counts).sum()
        late = self.training and not torch.compiler.is_compiling() and self._counts_late()
        if self.training and torch.is_grad_enabled():
            self.load += wanted if late else _first_time(wanted)
            if capacity is not None:
                self.dropped += dropped if late else _first_time(dropped)
        loss = losses(logits, scores, chosen, self._total(wanted, logits), routing, length)
        if self.training and not torch.compiler.is_compiling() and (late or not inside_backward()):
            forgotten.watch_loss(self, weights, loss)
        return Routes(
            experts=chosen,
            weights=weights,
            kept=kept,
            counts=counts,
            dropped=dropped,
            loss=loss,
            capacity=capacity,
        )

    def _counts_late(self) -> bool:
        """Whether this forward recomputes a forward without gradients, for a reentrant
        checkpoint."""
        if not torch.is_grad_enabled():
            self._without_gradients += 1
            return False
        late = self._without_gradients > 0 and inside_backward()
        self._without_gradients -= late
        return late

    def _total(self, wanted: Tensor, logits: Tensor) -> Tensor:
        """The choices of each expert [experts] on all ranks that have tokens of the batch."""
        total = wanted.to(logits.dtype)
        if self.routing.balance_loss and self._axis_name:
            return _sum_over(total, self._axis_name)  # on ranks without tokens too
        return total

    def tally(self) -> Tensor:
        """Counts [experts + 1] of this rank since the last :meth:`update_bias`, on the device: the
        choices of each expert, dropped choices included, then the number of dropped choices."""
        return torch.cat([self.load, self.dropped])

    @torch.no_grad()
    def update_bias(self, unless: Tensor | None = None) -> None:
        """Make busy experts a little less likely, and idle experts more. Call it after each step.

        Without a ``bias_rate`` only the counts are reset. ``unless`` [] bool, on the device: the
        bias does not change if this is true, because the step was skipped.
        """
        forgotten.bias_was_updated(self)
        if self.routing.bias_rate:
            for axis in self._bias_axes():
                comm.all_reduce(self.load, axis).wait()
            change = self.routing.bias_rate * (self.load.mean() - self.load).sign()
            self.expert_bias += change if unless is None else change.masked_fill(unless, 0)
        self.forget_load()

    def _bias_axes(self) -> tuple[comm.Axis, ...]:
        """The axes of the ranks with the same bias: ``axis``, or all ranks that share the router's
        weight if these are more."""
        weight, size = self.weight, 0 if self.axis is None else self.axis.size
        if isinstance(weight, DTensor) and weight.device_mesh.size() > size:
            return Ranks(weight.device_mesh).axes
        return () if self.axis is None else (self.axis,)

    def forget_load(self) -> None:
        """Reset the counts."""
        self._without_gradients = 0  # forwards in training that were not counted
        self.load.zero_()
        self.dropped.zero_()


_axes: weakref.WeakValueDictionary[str, comm.Axis] = weakref.WeakValueDictionary()


@operator(
    "sum_over(Tensor counts, str axis) -> Tensor",
    lambda counts, axis: counts.new_empty(counts.shape),
)
def _sum_over(counts: Tensor, axis: str) -> Tensor:
    """The sum over the ranks of an axis. Graphs refer to an axis by its name."""
    total = counts.clone()
    comm.all_reduce(total, _axes[axis]).wait()
    return total


@operator("first_time(Tensor counts) -> Tensor", torch.empty_like)
def _first_time(counts: Tensor) -> Tensor:
    """``counts``; zeros if this forward runs inside a backward: then they were counted before."""
    return torch.zeros_like(counts) if inside_backward() else counts.clone()


def logits_of(tokens: Tensor, weight: Tensor) -> Tensor:
    """``tokens·Wᵀ`` [tokens, experts] in fp32: in bf16, different experts would tie."""
    narrow = tokens.dtype == weight.dtype == torch.bfloat16 and not isinstance(weight, DTensor)
    if narrow and tokens.device.type in ("cuda", "meta"):
        return _Logits.apply(tokens, weight)  # type: ignore[no-any-return, no-untyped-call]
    # autocast does not know the meta device.
    kind = "cpu" if tokens.is_meta else tokens.device.type
    with torch.autocast(kind, enabled=False):
        rows = wide(tokens)
        return F.linear(rows, weight.to(rows.dtype))


class _Logits(torch.autograd.Function):
    """fp32 products of bf16 tokens and weights on the matrix units of a GPU, which sum in fp32.

    The product of two bf16 numbers is exact there. The gradient of the logits is fp32. It is split
    into two bf16 numbers: the rounded number, and the rounding error.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return _wide_product(tokens, weight.t())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        tokens, weight = ctx.saved_tensors
        rounded = grad.to(tokens.dtype)
        both = torch.cat((rounded, (grad - rounded).to(tokens.dtype)), 1)  # [tokens, 2 experts]
        of_tokens = both @ torch.cat((weight, weight)) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_tokens, None
        high, low = _wide_product(both.t(), tokens).chunk(2)
        return of_tokens, (high + low).to(weight.dtype)


def _fake_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


@operator("wide_product(Tensor a, Tensor b) -> Tensor", _fake_product)
def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in fp32 for bf16 factors."""
    if a.is_meta:  # a plan has no values, and torch 2.11 has no such product on the meta device
        return _fake_product(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[no-any-return, call-overload]


def choose(
    logits: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From logits [tokens, experts]: scores, chosen experts and their weights [tokens, choices],
    and the number of choices of each expert [experts], before choices are dropped."""
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    ranked = scores.detach()
    if bias is not None:
        ranked = ranked + bias
    if routing.groups > 1:
        ranked = _in_best_groups(ranked, routing.groups, routing.groups_per_token)
    chosen = _best(ranked, routing.experts_per_token)
    weights = scores.gather(-1, chosen)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)
    if routing.scale != 1:
        weights = weights * routing.scale
    return scores, chosen, weights, _count(chosen, routing.num_experts)


def losses(
    logits: Tensor,
    scores: Tensor,
    chosen: Tensor,
    total: Tensor,
    routing: Routing,
    length: int | None,
) -> Tensor:
    """The sum of the losses. ``total`` [experts]: choices on all ranks, for the balance loss."""
    loss = logits.new_zeros(())
    if len(logits) == 0:
        # Reads both: torch.compile would drop the collective of ``total`` if nothing used it.
        return loss + 0 * (logits.sum() + total.sum())
    if routing.balance_loss:
        shares = total / total.sum().clamp_min(1)
        loss = loss + routing.balance_loss * unevenness(scores, shares)
    if routing.z_loss:
        loss = loss + routing.z_loss * logits.logsumexp(-1).square().mean()
    if routing.sequence_loss:  # the mean of the unevenness of each sequence
        count, experts = len(scores) // (length or len(scores)), scores.shape[-1]
        choices = chosen.view(count, -1)  # [sequences, choices of all its tokens]
        wanted = scores.new_zeros(count, experts)
        wanted = wanted.scatter_add(1, choices, torch.ones_like(choices, dtype=scores.dtype))
        mean = unevenness(scores.view(count, -1, experts), wanted / choices.shape[1])
        loss = loss + routing.sequence_loss * mean
    return loss


def unevenness(scores: Tensor, shares: Tensor) -> Tensor:
    """The sum over experts of (share of choices x mean score), scaled so that 0 means evenly used
    experts. The result is a mean over sequences, if ``scores`` [..., tokens, experts] and
    ``shares`` [..., experts] have such a dimension.

    ``scores`` may be sigmoids: the scores of a token are scaled to sum to 1.
    """
    chances = scores / scores.sum(-1, keepdim=True).clamp_min(_TINY)
    return scores.shape[-1] * (shares * chances.mean(-2)).sum(-1).mean() - 1


def _best(ranked: Tensor, count: int) -> Tensor:
    """The experts with the highest scores [tokens, count]; of equal scores, the first expert. In a
    graph this is one pass, and takes a tenth of the time of torch's ``topk``."""
    chosen, experts = [], torch.arange(ranked.shape[-1], device=ranked.device)
    for _ in range(count):
        chosen.append(ranked.argmax(-1, keepdim=True))
        ranked = ranked.masked_fill(experts == chosen[-1], -math.inf)
    return torch.cat(chosen, -1)


def _in_best_groups(ranked: Tensor, groups: int, kept: int) -> Tensor:
    """Scores [tokens, experts]; -inf outside of the groups whose two best experts score highest."""
    parts: Tensor = ranked.unflatten(-1, (groups, -1))  # [tokens, groups, experts of a group]
    best = parts.topk(min(2, parts.shape[-1]), -1).values.sum(-1)  # [tokens, groups]
    outside = torch.ones_like(best, dtype=torch.bool)
    outside.scatter_(-1, best.topk(kept, -1).indices, False)
    return parts.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(-2)


def _count(chosen: Tensor, num_experts: int) -> Tensor:
    """The counts [experts] int64, without a wait for the device, unlike ``bincount``."""
    experts = torch.arange(num_experts, device=chosen.device)
    return (chosen.view(-1, 1) == experts).sum(0)


# An operator, because Inductor (torch 2.11, 2.13) may read memory before ``index_copy_`` fills it.
@operator(
    "places_in_line(Tensor chosen, Tensor counts, Tensor? first) -> Tensor",
    lambda chosen, *_: torch.empty_like(chosen),
)
def _places_in_line(chosen: Tensor, counts: Tensor, first: Tensor | None) -> Tensor:
    """For each choice, the number of choices of the same expert before it: in the order of tokens,
    or with ``first`` (shaped like ``chosen``) in descending order of its values."""
    if first is not None:
        best = first.flatten().sort(descending=True, stable=True).indices
        places = _places_in_line(chosen.flatten()[best], counts, None)
        return torch.empty_like(places).index_copy_(0, best, places).view_as(chosen)
    ordered, order = chosen.flatten().sort(stable=True)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(order), device=order.device) - starts[ordered]
    return torch.empty_like(places).index_copy_(0, order, places).view_as(chosen)
