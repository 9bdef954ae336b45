# SPDX-License-Identifier: Apache-2.0
"""Router: the experts of each token, their weights, and how evenly experts are used.

    scores    softmax or sigmoid of x·Wᵀ, in fp32                        [tokens, experts]
    chosen    the k highest of scores + bias (the bias affects the choice, not the weights)
    weights   the scores of the chosen experts, normalised to sum to ``scale``, or only scaled

No choice is dropped. Two means keep experts evenly busy, and may be combined: a load-balance loss,
of the batch or of each sequence, whose gradient lowers the scores of busy experts, and a bias that
is moved after each step, without a loss. The z-loss keeps logits small. A training loop adds the
loss of the routes to its own, and calls ``update_bias`` after each step.

With groups, a token's experts lie in few groups: the groups whose two best experts have the highest
scores. Experts are spread over ranks in order, so if a group holds the experts of one node, groups
limit the number of nodes that a token is sent to.

Losses are means over this rank's tokens, but the shares of tokens per expert are counted over
``axis``, the ranks that have tokens of one batch. So the mean of the losses of all ranks is the
loss of the whole batch, and the bias is the same on every rank. The counts travel while the experts
compute. The host never waits for the device in this file.
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
from shardwise.core.streams import lanes_apart
from shardwise.core.uncompiled import operator
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
        problems += bound_problems(self, 0, "scale", above=True)
        if problems:
            raise ValueError("this routing cannot work: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The experts of each token. Add ``loss`` (coefficients are included) to the model's loss."""

    experts: Tensor  # [tokens, choices] int64
    weights: Tensor  # [tokens, choices] fp32
    counts: Tensor  # [experts] int64: choices on this rank
    loss: Tensor  # [] fp32

    def statistics(self) -> dict[str, Tensor]:
        """Metrics, as tensors on the device: see :func:`statistics_of`."""
        return statistics_of(self.counts)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a router returns: the experts of each token, and what its losses are computed from."""

    experts: Tensor
    weights: Tensor
    counts: Tensor
    logits: Tensor  # [tokens, experts] fp32
    scores: Tensor  # [tokens, experts] fp32
    total: Tensor  # [experts]: choices on all ranks, perhaps on their way
    axis: str  # the name of the axis that they travel over; "": they are there
    routing: Routing

    def routes(self, length: int | None = None) -> Routes:
        """The routes with their loss. Call it late: it waits for the counts of the other ranks.
        ``length``: tokens of each sequence; None: the tokens are one sequence."""
        total = _arrived_sum(self.total, self.axis) if self.axis else self.total
        loss = losses(self.logits, self.scores, self.experts, total, self.routing, length)
        return Routes(experts=self.experts, weights=self.weights, counts=self.counts, loss=loss)


def statistics_of(counts: Tensor) -> dict[str, Tensor]:
    """Metrics of ``counts`` [..., experts]: the largest load of an expert relative to the even
    share, and the share of experts without work."""
    counts = counts.float()
    return {
        "load_max": counts.amax(-1) / counts.mean(-1).clamp_min(1e-9),
        "idle_share": (counts == 0).float().mean(-1),
    }


_TINY = torch.finfo(torch.float32).tiny  # avoids 0 / 0, and changes no other score


class Router(nn.Module):
    """Scores experts for each token and chooses. The weight may be bf16; logits are fp32.

    Choices are counted in each forward in training, once: not when a backward recomputes it.
    """

    expert_bias: Tensor
    load: Tensor

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
        self.reset_parameters()

    @property
    def axis(self) -> comm.Axis | None:
        """The ranks that have tokens of one batch; None: this rank alone."""
        return self._axis

    @axis.setter
    def axis(self, axis: comm.Axis | None) -> None:
        self._axis, self._axis_name = axis, ""
        if axis is not None:
            # The same in every run, so that graphs on disk are used again.
            planned = " planned" if axis.group is None else ""
            self._axis_name = f"{axis.name} {axis.peers}{planned}"
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

    def forward(self, tokens: Tensor) -> Choices:
        """The choices of tokens [tokens, hidden]."""
        routing = self.routing
        logits = logits_of(tokens, self.weight)
        bias = self.expert_bias if routing.bias_rate else None
        scores, chosen, weights, counts = choose(logits, bias, routing)
        if self.training:
            self.load += _first_time(counts)
        total, axis = counts.to(logits.dtype), self._axis_name if routing.balance_loss else ""
        return Choices(
            experts=chosen,
            weights=weights,
            counts=counts,
            logits=logits,
            scores=scores,
            total=_begun_sum(total, axis) if axis else total,  # on ranks without tokens too
            axis=axis,
            routing=routing,
        )

    def tally(self) -> Tensor:
        """The choices of each expert on this rank since the last :meth:`update_bias`."""
        return self.load.clone()

    @torch.no_grad()
    def update_bias(self, unless: Tensor | None = None) -> None:
        """Make busy experts a little less likely, and idle experts more. Call it after each step.

        Without a ``bias_rate`` only the counts are reset. ``unless`` [] bool, on the device: the
        bias does not change if this is true, because the step was skipped.
        """
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
        self.load.zero_()


_axes: weakref.WeakValueDictionary[str, comm.Axis] = weakref.WeakValueDictionary()
# The sum that is under way over each axis: (the collective, an event after it, its memory).
_sums: dict[str, tuple[comm.Pending, Any, Tensor]] = {}


# Two operators, so that graphs compute between them. Graphs refer to an axis by its name.
@operator(
    "begun_sum(Tensor counts, str axis) -> Tensor",
    lambda counts, axis: counts.new_empty(counts.shape),
)
def _begun_sum(counts: Tensor, axis: str) -> Tensor:
    """Memory for the sum over the ranks of an axis, which is under way."""
    _end_sum(axis, counts.device)  # nobody read the loss of the last forward
    total, lanes = counts.clone(), lanes_apart(counts.device)
    lanes.join("outer", "compute")
    with lanes.on("outer"):
        pending = comm.all_reduce(total, _axes[axis])
    _sums[axis] = pending, lanes.mark("outer"), total
    return total


@operator(
    "arrived_sum(Tensor total, str axis) -> Tensor",
    lambda total, axis: total.new_empty(total.shape),
)
def _arrived_sum(total: Tensor, axis: str) -> Tensor:
    _end_sum(axis, total.device)
    return total.clone()


def _end_sum(axis: str, device: torch.device) -> None:
    if axis in _sums:
        pending, mark, _ = _sums.pop(axis)
        pending.wait()
        lanes_apart(device).wait("compute", mark)


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
    and the number of choices of each expert [experts]."""
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
