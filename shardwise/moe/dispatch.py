# SPDX-License-Identifier: Apache-2.0
"""Dispatch: send a row for each token and choice to its expert, and the results back.

One rank:

    tokens      t0      t1      t2          chosen: t0 -> {0, 2}, t1 -> {0, 1}, t2 -> {2, 1}
    sorted      t0 t1 | t1 t2 | t0 t2       expert by expert
    back        sorted by token again, and each token's rows summed (experts apply the weights)

With experts spread over an axis, rank r holds experts [r·n, (r+1)·n). Rows go there and back in two
all-to-alls of exact size.

    rank 0   sorted | to 0: e0 e1 | to 1: e2 e3 |   --->   | from 0: e0 e1 | from 1: e0 e1 |
    rank 1   sorted | to 0: e0 e1 | to 1: e2 e3 |   --->   | from 0: e2 e3 | from 1: e2 e3 |
                                                  then sorted by expert: | e0: 0, 1 | e1: 0, 1 |

An exchange is two autograd nodes: the first starts the exchange, the second waits for it. Work
between the two (a shared expert) overlaps with the messages, in forward and in backward. All this
runs between the graphs of torch.compile.

The host must know the sizes: it waits for the device to count the rows, once in each forward of a
layer.

The rows of an expert are in the order of ranks and tokens, as on one rank with the whole batch.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.core import comm
from shardwise.core.streams import lanes_apart
from shardwise.core.uncompiled import operator
from shardwise.kernels import has_triton
from shardwise.moe.router import Choices


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The order of rows by expert, and the number of rows that ranks send each other."""

    order: Tensor  # [rows]: index into tokens x choices, sorted by expert
    places: Tensor  # [tokens x choices]: the row of each choice
    num_choices: int
    ends: Tensor  # [local experts] int32: the end of each expert's rows
    axis: comm.Axis | None = None  # the ranks that share the experts; None: this rank has all
    sizes: list[int] = field(default_factory=list)  # rows sent to each rank
    out_sizes: list[int] = field(default_factory=list)  # rows received from each rank
    by_expert: Tensor | None = None  # [received]: the received rows sorted by expert


def plan_dispatch(routes: Choices, axis: comm.Axis | None = None) -> DispatchPlan:
    """Sort choices by expert; over an axis, exchange the numbers of rows."""
    counts, num_slots = routes.counts, routes.experts.numel()
    slots = routes.experts.flatten()
    if len(counts) < 1 << 15:  # a GPU sorts by digits of 8 bits: fewer bits are faster
        slots = slots.to(torch.uint8 if len(counts) <= 1 << 8 else torch.int16)
    order = slots.sort(stable=True).indices
    places, choices = _places(order, num_slots), routes.experts.shape[-1]
    if axis is None or axis.size == 1:
        ends = counts.cumsum(0).int()
        return DispatchPlan(order=order, places=places, num_choices=choices, ends=ends)
    each = [len(counts) // axis.size] * axis.size
    received = torch.empty_like(counts)
    comm.all_to_all(received, counts, each, each, axis).wait()
    going, coming = (numbers.view(axis.size, -1) for numbers in (counts, received))
    sizes, out_sizes = torch.stack([going.sum(1), coming.sum(1)]).tolist()  # the host waits here
    expert = torch.arange(each[0], device=received.device).repeat(axis.size)
    arriving = torch.repeat_interleave(expert, received, output_size=sum(out_sizes))
    return DispatchPlan(
        order=order,
        places=places,
        num_choices=choices,
        ends=coming.sum(0).cumsum(0).int(),
        axis=axis,
        sizes=sizes,
        out_sizes=out_sizes,
        by_expert=arriving.sort(stable=True).indices,
    )


@operator(
    "expert_places(Tensor order, int num_slots) -> Tensor",
    lambda order, num_slots: order.new_empty(num_slots),
)
def _places(order: Tensor, num_slots: int) -> Tensor:
    """The place of each slot in ``order``. This function and :func:`placed` are operators, because
    Inductor (torch 2.11, 2.13) may read memory before ``index_copy_`` has filled it."""
    places = order.new_full((num_slots,), len(order))
    return places.index_copy_(0, order, torch.arange(len(order), device=order.device))


def check_share(num_experts: int, size: int, rank: int = 0) -> int:
    """The number of experts per rank; raises where ``size`` ranks cannot share them evenly."""
    if type(size) is not int or size < 1 or rank not in range(size):
        raise ValueError(
            f"keep_share(size={size!r}, rank={rank!r}): give a size of 1 or more, and a rank from "
            f"0 to size - 1"
        )
    if num_experts % size:
        divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"{num_experts} experts cannot be spread evenly over ep={size}: choose ep from "
            f"{divisors}, or a multiple of {size} experts"
        )
    return num_experts // size


# ------------------------------------------------------------------------------ exchanges


# Waits for rows [rows, hidden] sorted by expert, and for their router weights [rows]. Its argument
# is called in backward while gradients are sent: it computes delayed weight gradients.
Arrival = Callable[[Callable[[], None] | None], tuple[Tensor, Tensor]]


def send(tokens: Tensor, weights: Tensor, plan: DispatchPlan) -> Arrival:
    """Start to send tokens [tokens, hidden] and the router weights of their choices to the
    experts."""
    rows = _Spread.apply(tokens, plan.order, plan.places, plan.num_choices)
    weights = _Pick.apply(weights.flatten(), plan.order)
    if plan.axis is None:
        return lambda _: (rows, weights)
    first, second = (RowExchange(plan.axis, plan.sizes, plan.out_sizes) for _ in range(2))
    sent = _StartExchange.apply(rows, first), _StartExchange.apply(weights, second)

    def wait(meanwhile: Callable[[], None] | None) -> tuple[Tensor, Tensor]:
        rows = _WaitForExchange.apply(sent[0], first, meanwhile)
        weights = _WaitForExchange.apply(sent[1], second, None)
        return _Pick.apply(rows, plan.by_expert), _Pick.apply(weights, plan.by_expert)

    return wait


def collect(rows: Tensor, plan: DispatchPlan) -> Tensor:
    """Send the rows of the experts back and sum them per token: [tokens, hidden]."""
    if plan.axis is not None:
        assert plan.by_expert is not None
        rows = _Pick.apply(rows, _places(plan.by_expert, len(rows)))
        exchange = RowExchange(plan.axis, plan.out_sizes, plan.sizes)
        rows = _WaitForExchange.apply(_StartExchange.apply(rows, exchange), exchange, None)
    summed: Tensor = _Sum.apply(rows, plan.order, plan.places, plan.num_choices)
    return summed


class RowExchange:
    """One all-to-all of rows, and the reverse all-to-all of their gradients."""

    def __init__(self, axis: comm.Axis, sizes: list[int], out_sizes: list[int]) -> None:
        self.axis, self.sizes, self.out_sizes = axis, sizes, out_sizes
        self._pending: tuple[comm.Pending, Any, Tensor, Tensor] | None = None

    def start(self, source: Tensor, sizes: list[int], out_sizes: list[int]) -> Tensor:
        source = source.contiguous()
        width = source[0].numel() if source.dim() > 1 and len(source) else source.shape[1:].numel()
        out = source.new_empty(sum(out_sizes), *source.shape[1:])
        elements = [size * width for size in sizes]
        out_elements = [size * width for size in out_sizes]
        lanes = lanes_apart(source.device)
        # On the outer lane; the compute lane owns the memory, and waits before freeing it.
        lanes.join("outer", "compute")
        with lanes.on("outer"):
            sent = out.view(-1), source.view(-1)
            pending = comm.all_to_all(*sent, out_elements, elements, self.axis)
        self._pending = pending, lanes.mark("outer"), source, out
        return out

    def wait(self) -> Tensor:
        """The received rows, ready for the compute lane."""
        assert self._pending is not None, "wait for an exchange once, after its start"
        pending, mark, _, out = self._pending
        pending.wait()
        lanes_apart(out.device).wait("compute", mark)
        self._pending = None  # the source is no longer needed
        return out


class _StartExchange(torch.autograd.Function):
    """Forward starts the exchange; backward waits for the exchange of the gradients."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(source, exchange.sizes, exchange.out_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.exchange.wait(), None  # ``grad`` is a stand-in, see _WaitForExchange


class _WaitForExchange(torch.autograd.Function):
    """Forward waits for the exchange; backward starts the exchange of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, arrived: Tensor, exchange: RowExchange, meanwhile: Callable[[], None] | None
    ) -> Tensor:
        ctx.exchange, ctx.meanwhile = exchange, meanwhile
        exchange.wait()
        return arrived.view_as(arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        exchange: RowExchange = ctx.exchange
        exchange.start(grad, exchange.out_sizes, exchange.sizes)
        if ctx.meanwhile is not None:
            ctx.meanwhile()
        return grad, None, None  # a stand-in: _StartExchange returns the received gradients


# ------------------------------------------------------------------------------ permutations

# The gradient of torch's ``index_select`` adds rows in the order of its threads. The gradients here
# are permutations, and sums have a fixed order.


class _Spread(torch.autograd.Function):
    """Repeat each token's row for every choice, sorted by expert."""

    @staticmethod
    def forward(  # no *args: without gradients Dynamo counts the parameters, and drops ctx
        ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, choices: int
    ) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.choices = choices
        return copies(tokens, order, places, choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order, places = ctx.saved_tensors
        return sums(grad, order, places, ctx.choices), None, None, None


class _Sum(torch.autograd.Function):
    """Sum the rows of each token, which come sorted by expert: the reverse of :class:`_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.choices = choices
        return sums(rows, order, places, choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order, places = ctx.saved_tensors
        return copies(grad, order, places, ctx.choices), None, None, None


class _Pick(torch.autograd.Function):
    """Select rows in another order, each at most once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_slots = len(values)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return placed(grad, order, ctx.num_slots), None


@operator(
    "expert_copies(Tensor tokens, Tensor order, Tensor places, int choices) -> Tensor",
    lambda tokens, order, *_: tokens.new_empty(len(order), *tokens.shape[1:]),
)
def copies(tokens: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
    """The row of each token for each of its choices, in ``order``."""
    if _by_kernel(tokens):
        from shardwise.kernels.row_sums import row_copies

        repeated: Tensor = row_copies(tokens, places.view(-1, choices), len(order))
        return repeated
    return tokens.index_select(0, order // choices)


@operator(
    "expert_sums(Tensor rows, Tensor order, Tensor places, int choices) -> Tensor",
    lambda rows, _, places, choices: rows.new_empty(len(places) // choices, *rows.shape[1:]),
)
def sums(rows: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
    """The sum of the rows of each token [tokens, ...], in the order of its choices."""
    if _by_kernel(rows):
        from shardwise.kernels.row_sums import row_sums

        summed: Tensor = row_sums(rows, places.view(-1, choices))
        return summed
    slots = placed(rows, order, len(places)).unflatten(0, (-1, choices))  # type: ignore[no-untyped-call]
    return torch.sum(slots, 1)


def _by_kernel(rows: Tensor) -> bool:
    narrow = rows.dim() == 2 and rows.itemsize <= 4
    return rows.device.type == "cuda" and narrow and has_triton()


@operator(
    "expert_placed(Tensor rows, Tensor order, int num_slots) -> Tensor",
    lambda rows, _, num_slots: rows.new_empty(num_slots, *rows.shape[1:]),
)
def placed(rows: Tensor, order: Tensor, num_slots: int) -> Tensor:
    """``rows`` at the slots ``order``, and zeros in the other slots."""
    shape = (num_slots, *rows.shape[1:])
    slots = rows.new_empty(shape) if len(order) == num_slots else rows.new_zeros(shape)
    return slots.index_copy_(0, order, rows)
