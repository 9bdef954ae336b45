# SPDX-License-Identifier: Apache-2.0
"""Dispatch: a row for each token and choice, brought to its expert, and back.

One rank:

    tokens      t0      t1      t2          chosen: t0 -> {0, 2}, t1 -> {0, 1}, t2 -> {2, 1}
    sorted      t0 t1 | t1 t2 | t0 t2       expert by expert
    back        sorted by token again, and each token's rows summed (the experts weighed them)

Experts spread over an axis, rank r holding experts [r·n, (r+1)·n): rows go out and come back in two
exact-size all-to-alls.

    rank 0   sorted | to 0: e0 e1 | to 1: e2 e3 |   --->   | from 0: e0 e1 | from 1: e0 e1 |
    rank 1   sorted | to 0: e0 e1 | to 1: e2 e3 |   --->   | from 0: e2 e3 | from 1: e2 e3 |
                                                  then sorted by expert: | e0: 0, 1 | e1: 0, 1 |

An exchange is two autograd nodes, one that starts it and one that waits: whatever is computed
between them (a shared expert) overlaps with the messages, forward and backward. Exact sizes must be
known to the host: that is the one wait here, and only where experts are spread.

Within an expert, rows stand in the order of ranks and tokens: the order that one rank with the
whole batch would have.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise import comm
from shardwise.moe.router import Routes
from shardwise.streams import Lanes


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The rows of each expert by token, and the number of rows that ranks send each other."""

    order: Tensor  # [rows]: index into tokens x choices, sorted by expert
    num_choices: int
    num_slots: int  # tokens x choices
    ends: Tensor  # [local experts] int32, of the rows that the experts get
    sizes: list[int] | None = None  # rows sent to each rank
    out_sizes: list[int] | None = None  # rows received from each
    by_expert: Tensor | None = None  # [received]: from the order of arrival to that of experts


def plan_dispatch(routes: Routes, axis: comm.Axis | None = None) -> DispatchPlan:
    """Sort choices by expert, dropped ones last; over an axis, tell everybody how many come."""
    chosen = routes.experts
    num_experts = len(routes.counts)
    slots = chosen.flatten()
    if routes.kept is not None:
        slots = slots.masked_fill(~routes.kept.flatten(), num_experts)
    order = slots.sort(stable=True).indices
    alone = axis is None or axis.size == 1
    choices, num_slots = chosen.shape[-1], len(slots)
    if alone:
        ends = routes.counts.cumsum(0).int()
        if routes.capacity is not None:
            # As many rows as experts can take at most: the host need not know how many are full.
            # What is left over of dropped choices goes to the last expert with weight zero.
            bound = min(num_slots, num_experts * routes.capacity)
            order = order[:bound]
            ends[-1:].fill_(bound)  # ends is new; an assignment would copy from the host, and wait
        return DispatchPlan(order=order, num_choices=choices, num_slots=num_slots, ends=ends)
    assert axis is not None
    local = num_experts // axis.size
    received = torch.empty_like(routes.counts)
    each = [local] * axis.size
    comm.all_to_all(received, routes.counts, each, each, axis).wait()
    going = routes.counts.view(axis.size, local).sum(1)
    coming = received.view(axis.size, local)  # [source, expert]
    numbers = torch.cat([going, coming.sum(1)]).tolist()  # the host waits here
    sizes, out_sizes = numbers[: axis.size], numbers[axis.size :]
    expert = torch.arange(local, device=received.device).repeat(axis.size)
    arriving = torch.repeat_interleave(expert, received, output_size=sum(out_sizes))
    return DispatchPlan(
        order=order[: sum(sizes)],
        num_choices=choices,
        num_slots=num_slots,
        ends=coming.sum(0).cumsum(0).int(),
        sizes=sizes,
        out_sizes=out_sizes,
        by_expert=arriving.sort(stable=True).indices,
    )


def check_share(num_experts: int, size: int, rank: int = 0) -> int:
    """Experts per rank."""
    if type(size) is not int or size < 1 or rank not in range(size):
        raise ValueError(f"keep_share(size={size!r}, rank={rank!r}): rank is one of size ranks")
    if num_experts % size:
        divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"{num_experts} experts cannot be spread evenly over ep={size}: choose one of "
            f"{divisors} ranks, or a multiple of {size} experts"
        )
    return num_experts // size


# ------------------------------------------------------------------------------ there and back


class Arrival:
    """Rows on their way to the experts. ``wait`` makes them usable."""

    def __init__(
        self,
        plan: DispatchPlan,
        rows: Tensor,
        weights: Tensor,
        flights: tuple[_Flight, _Flight] | None,
    ) -> None:
        self.plan, self._rows, self._weights, self._flights = plan, rows, weights, flights

    def wait(self, meanwhile: Callable[[], None] | None = None) -> tuple[Tensor, Tensor]:
        """Rows [rows, hidden] sorted by expert and their router weights [rows].

        ``meanwhile`` is called in backward while the gradients travel: delayed weight gradients.
        """
        rows, weights = self._rows, self._weights
        if self._flights is not None:
            by_expert = self.plan.by_expert
            rows = _Land.apply(rows, self._flights[0], meanwhile)
            weights = _Land.apply(weights, self._flights[1], None)
            rows, weights = (_Pick.apply(value, by_expert) for value in (rows, weights))
        return rows, weights


class Dispatcher:
    """Moves rows between tokens and experts, over ``axis`` where experts are spread."""

    def __init__(self, axis: comm.Axis | None = None) -> None:
        self.axis = axis
        self._lanes: Lanes | None = None

    def send(self, tokens: Tensor, routes: Routes, plan: DispatchPlan) -> Arrival:
        """Begin to bring tokens [tokens, hidden] to their experts."""
        rows = _Spread.apply(tokens, plan.order, plan.num_choices)
        weights = _Pick.apply(routes.weights.flatten(), plan.order)
        if plan.sizes is None or plan.out_sizes is None:
            return Arrival(plan, rows, weights, None)
        flights = (
            self._flight(plan.sizes, plan.out_sizes),
            self._flight(plan.sizes, plan.out_sizes),
        )
        rows = _TakeOff.apply(rows, flights[0])
        weights = _TakeOff.apply(weights, flights[1])
        return Arrival(plan, rows, weights, flights)

    def collect(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """The experts' rows brought back and summed per token: [tokens, hidden]."""
        if plan.sizes is not None and plan.out_sizes is not None:
            rows = _Place.apply(rows, plan.by_expert, len(rows))
            flight = self._flight(plan.out_sizes, plan.sizes)
            rows = _Land.apply(_TakeOff.apply(rows, flight), flight, None)
        slots = _Place.apply(rows, plan.order, plan.num_slots)  # [tokens x choices, hidden]
        summed: Tensor = slots.unflatten(0, (-1, plan.num_choices)).sum(1)
        return summed

    def _flight(self, sizes: list[int], out_sizes: list[int]) -> _Flight:
        assert self.axis is not None
        if self._lanes is None and torch.cuda.is_available():
            self._lanes = Lanes(torch.device("cuda", torch.cuda.current_device()))
        return _Flight(self.axis, self._lanes, sizes, out_sizes)


class _Flight:
    """One exchange, and the one of its gradients the other way."""

    def __init__(
        self, axis: comm.Axis, lanes: Lanes | None, sizes: list[int], out_sizes: list[int]
    ) -> None:
        self.axis, self.lanes, self.sizes, self.out_sizes = axis, lanes, sizes, out_sizes
        self._under_way: tuple[comm.Pending, Any, Tensor, Tensor] | None = None

    def start(self, source: Tensor, sizes: list[int], out_sizes: list[int]) -> Tensor:
        source = source.contiguous()
        width = source[0].numel() if source.dim() > 1 and len(source) else source.shape[1:].numel()
        out = source.new_empty(sum(out_sizes), *source.shape[1:])
        elements = [size * width for size in sizes]
        out_elements = [size * width for size in out_sizes]
        lanes = self.lanes if source.device.type == "cuda" else None
        arguments = (out.view(-1), source.view(-1), out_elements, elements, self.axis)
        if lanes is None:
            pending, mark = comm.all_to_all(*arguments), None
        else:  # on a lane of its own; memory stays the compute lane's, which waits before it frees
            lanes.join("outer", "compute")
            with lanes.on("outer"):
                pending = comm.all_to_all(*arguments)
            mark = lanes.mark("outer")
        self._under_way = pending, mark, source, out
        return out

    def wait(self) -> Tensor:
        """What came, usable by what is computed next."""
        assert self._under_way is not None, "an exchange is waited for once, after it has started"
        pending, mark, _, out = self._under_way
        pending.wait()
        if self.lanes is not None:
            self.lanes.wait("compute", mark)
        self._under_way = None  # the source may go now
        return out


class _TakeOff(torch.autograd.Function):
    """Forward starts the exchange; backward waits for that of the gradients."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(source, flight.sizes, flight.out_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.flight.wait(), None  # not ``grad``: that has only marked the way


class _Land(torch.autograd.Function):
    """Forward waits for the exchange; backward starts that of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, arrived: Tensor, flight: _Flight, meanwhile: Callable[[], None] | None
    ) -> Tensor:
        ctx.flight, ctx.meanwhile = flight, meanwhile
        flight.wait()
        return arrived.view_as(arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        flight: _Flight = ctx.flight
        flight.start(grad, flight.out_sizes, flight.sizes)
        if ctx.meanwhile is not None:
            ctx.meanwhile()
        return grad, None, None  # what arrives is _TakeOff's to return: it has other rows


# ------------------------------------------------------------------------------ permutations

# torch's own gradient of an indexed read adds rows in whatever order threads come. Here every
# gradient is a permutation, and sums have one order.


class _Spread(torch.autograd.Function):
    """Each token's row once for every choice that was kept, in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.choices, ctx.num_slots = choices, len(tokens) * choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        slots = _placed(grad, order, ctx.num_slots)
        return slots.unflatten(0, (-1, ctx.choices)).sum(1), None, None


class _Pick(torch.autograd.Function):
    """Rows in another order, each at most once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_slots = len(values)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return _placed(grad, order, ctx.num_slots), None


class _Place(torch.autograd.Function):
    """Rows at their places among the slots; zeros where a choice was dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(order)
        return _placed(rows, order, num_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


def _placed(rows: Tensor, order: Tensor, num_slots: int) -> Tensor:
    shape = (num_slots, *rows.shape[1:])
    slots = rows.new_empty(shape) if len(order) == num_slots else rows.new_zeros(shape)
    return slots.index_copy_(0, order, rows)
