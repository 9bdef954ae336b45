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
between the two (a shared expert) overlaps with the messages, in forward and in backward. In a graph
of torch.compile the nodes are operators (``spread.py``).

The host must know the sizes. Without a capacity the host waits for the device to count the rows,
once in each forward of a layer. With a capacity the host does not wait: ranks send each other the
largest number of rows that the experts can take, with padding, after the hosts have compared their
numbers of tokens. Where padding would more than double the rows (a capacity factor over 2), sizes
are exact.

    rank 0   sorted | to 0: e0 e1 .. | to 1: e2 e3 . |       ..  padding rows, of weight zero

The rows of an expert are in the order of ranks and tokens, as on one rank with the whole batch.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.core import comm
from shardwise.core.agreement import differ
from shardwise.core.streams import Lanes
from shardwise.core.uncompiled import operator
from shardwise.kernels import has_triton
from shardwise.moe.router import Routes


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The order of rows by expert, and the number of rows that ranks send each other."""

    order: Tensor  # [rows]: index into tokens x choices, sorted by expert
    # [tokens x choices]: the row of each choice; the number of rows if the choice was dropped. With
    # padding there is one more token.
    places: Tensor
    num_choices: int
    ends: Tensor  # [local experts] int32: the end of each expert's rows
    sizes: list[int] | None = None  # rows sent to each rank
    out_sizes: list[int] | None = None  # rows received from each rank
    by_expert: Tensor | None = None  # [received]: the received rows sorted by expert
    padded: bool = False  # whether there are padding rows


def plan_dispatch(routes: Routes, axis: comm.Axis | None = None) -> DispatchPlan:
    """Sort choices by expert, dropped ones last; over an axis, exchange the numbers of rows."""
    if axis is not None and axis.size > 1:
        received, numbers = exchange_counts(routes.experts, routes.counts, routes.capacity, axis)
        return plan_exchange(routes.experts, routes.kept, routes.counts, received, numbers)
    num_experts, num_slots = len(routes.counts), routes.experts.numel()
    order = _by_expert(routes.experts, routes.kept, num_experts)
    ends = routes.counts.cumsum(0).int()
    if routes.capacity is not None:
        # The largest number of rows that experts can take, so that the host need not wait for
        # counts. Dropped choices fill the rows up to this bound. They go to the last expert, with
        # weight zero.
        bound = min(num_slots, num_experts * routes.capacity)
        order = order[:bound]
        ends[-1:].fill_(bound)  # an assignment would copy from the host, and wait
    places, choices = _places(order, num_slots), routes.experts.shape[-1]
    return DispatchPlan(order=order, places=places, num_choices=choices, ends=ends)


def _by_expert(chosen: Tensor, kept: Tensor | None, num_experts: int) -> Tensor:
    slots = chosen.flatten()
    if kept is not None:
        slots = slots.masked_fill(~kept.flatten(), num_experts)
    if num_experts < 1 << 15:  # a GPU sorts by digits of 8 bits: fewer bits are faster
        slots = slots.to(torch.uint8 if num_experts < 1 << 8 else torch.int16)
    return slots.sort(stable=True).indices


def exchange_counts(
    chosen: Tensor, counts: Tensor, capacity: int | None, axis: comm.Axis
) -> tuple[Tensor, list[int]]:
    """The number of rows for each of this rank's experts, by source [ranks x local experts]. And a
    list: the rows sent to each rank, the rows received from each rank, and 1 with padding, else
    0."""
    local = len(counts) // axis.size
    received = torch.empty_like(counts)
    each = [local] * axis.size
    comm.all_to_all(received, counts, each, each, axis).wait()
    if (block := _block(chosen, capacity, axis, local)) is not None:
        return received, [block] * 2 * axis.size + [1]
    both = torch.stack([counts, received]).view(2 * axis.size, local)
    return received, [*both.sum(1).tolist(), 0]  # the host waits here


def plan_exchange(
    chosen: Tensor, kept: Tensor | None, counts: Tensor, received: Tensor, numbers: list[int]
) -> DispatchPlan:
    """The plan for the numbers of rows of :func:`exchange_counts`."""
    num_ranks, choices = len(numbers) // 2, chosen.shape[-1]
    order = _by_expert(chosen, kept, len(counts))
    coming = received.view(num_ranks, -1)  # [source, expert]
    if numbers[-1]:
        going = counts.view(num_ranks, -1).sum(1)
        return _padded(order, choices, going, coming, numbers[0])
    sizes, out_sizes = numbers[:num_ranks], numbers[num_ranks:-1]
    expert = torch.arange(coming.shape[1], device=received.device).repeat(num_ranks)
    arriving = torch.repeat_interleave(expert, received, output_size=sum(out_sizes))
    order = order[: sum(sizes)]
    return DispatchPlan(
        order=order,
        places=_places(order, chosen.numel()),
        num_choices=choices,
        ends=coming.sum(0).cumsum(0).int(),
        sizes=sizes,
        out_sizes=out_sizes,
        by_expert=arriving.sort(stable=True).indices,
    )


PADDED = 2  # at most so many times the rows of all choices are sent to avoid a wait of the host


def _block(chosen: Tensor, capacity: int | None, axis: comm.Axis, local: int) -> int | None:
    """The number of rows that every rank sends to every rank with padding. None: the host should
    wait for exact numbers, or ranks have different numbers of tokens (collective, among hosts)."""
    if capacity is None or differ(len(chosen), axis):
        return None
    block = min(chosen.numel(), local * capacity)
    return block if block * axis.size <= PADDED * chosen.numel() else None


def _padded(order: Tensor, choices: int, going: Tensor, coming: Tensor, block: int) -> DispatchPlan:
    """Every rank sends ``block`` rows to every rank. Rows of one additional token are the padding.
    On arrival padding goes to the last expert, behind its rows."""
    num_ranks = len(coming)
    slots, place = len(order), torch.arange(block, device=order.device)
    behind = (going.cumsum(0) - going).unsqueeze(1) + place  # [rank, block]: index into order
    sent = order[behind.clamp_max(slots - 1)].masked_fill(place >= going.unsqueeze(1), slots)
    ends = coming.cumsum(1).contiguous()
    expert = torch.searchsorted(ends, place.expand(num_ranks, block).contiguous(), right=True)
    last = coming.sum(0).cumsum(0).int()
    last[-1:].fill_(num_ranks * block)  # an assignment would copy from the host, and wait
    sent = sent.flatten()
    return DispatchPlan(
        padded=True,
        order=sent,
        places=_places(sent, slots + choices),
        num_choices=choices,
        ends=last,
        sizes=[block] * num_ranks,
        out_sizes=[block] * num_ranks,
        by_expert=expert.flatten().sort(stable=True).indices,
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


class Dispatcher:
    """Moves rows between tokens and experts, over ``axis`` where experts are spread. Graphs of
    torch.compile refer to a dispatcher by its name."""

    def __init__(self, axis: comm.Axis | None = None, name: str = "") -> None:
        self.axis, self.name = axis, name
        self._lanes: Lanes | None = None

    @staticmethod
    def over(axis: comm.Axis | None) -> Dispatcher:
        """The dispatcher of an axis, shared by all layers. Its name is the same in every run, so
        that cached graphs on disk can be reused."""
        name = "" if axis is None else f"{axis.name} {getattr(axis.group, 'group_name', '')}"
        dispatcher = dispatchers.get(name)
        if dispatcher is None or dispatcher.axis is not axis:  # an older group had this name
            dispatcher = dispatchers[name] = Dispatcher(axis, name)
        return dispatcher

    def send(self, tokens: Tensor, weights: Tensor, plan: DispatchPlan) -> Arrival:
        """Start to send tokens [tokens, hidden] and the router weights of their choices to the
        experts."""
        rows = _Spread.apply(tokens, plan.order, plan.places, plan.num_choices, plan.padded)
        weights = weights.flatten()
        if plan.padded:  # padding has weight zero
            weights = F.pad(weights, (0, plan.num_choices))
        weights = _Pick.apply(weights, plan.order)
        if plan.sizes is None or plan.out_sizes is None:
            return lambda _: (rows, weights)
        first, second = (self.exchange(plan.sizes, plan.out_sizes) for _ in range(2))
        sent = _StartExchange.apply(rows, first), _StartExchange.apply(weights, second)

        def wait(meanwhile: Callable[[], None] | None) -> tuple[Tensor, Tensor]:
            rows = _WaitForExchange.apply(sent[0], first, meanwhile)
            weights = _WaitForExchange.apply(sent[1], second, None)
            return _Pick.apply(rows, plan.by_expert), _Pick.apply(weights, plan.by_expert)

        return wait

    def collect(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Send the rows of the experts back and sum them per token: [tokens, hidden], with one more
        row for padding if the plan is padded."""
        if plan.sizes is not None and plan.out_sizes is not None:
            assert plan.by_expert is not None
            rows = _Pick.apply(rows, _places(plan.by_expert, len(rows)))
            exchange = self.exchange(plan.out_sizes, plan.sizes)
            rows = _WaitForExchange.apply(_StartExchange.apply(rows, exchange), exchange, None)
        summed: Tensor = _Sum.apply(rows, plan.order, plan.places, plan.num_choices, plan.padded)
        return summed

    def exchange(self, sizes: list[int], out_sizes: list[int]) -> RowExchange:
        assert self.axis is not None
        if self._lanes is None and torch.cuda.is_available():
            self._lanes = Lanes(torch.device("cuda", torch.cuda.current_device()))
        return RowExchange(self.axis, self._lanes, sizes, out_sizes)


dispatchers: weakref.WeakValueDictionary[str, Dispatcher] = weakref.WeakValueDictionary()


class RowExchange:
    """One all-to-all of rows, and the reverse all-to-all of their gradients."""

    def __init__(
        self, axis: comm.Axis, lanes: Lanes | None, sizes: list[int], out_sizes: list[int]
    ) -> None:
        self.axis, self.lanes, self.sizes, self.out_sizes = axis, lanes, sizes, out_sizes
        self._pending: tuple[comm.Pending, Any, Tensor, Tensor] | None = None

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
        else:  # on the outer lane; the compute lane owns the memory, and waits before freeing it
            lanes.join("outer", "compute")
            with lanes.on("outer"):
                pending = comm.all_to_all(*arguments)
            mark = lanes.mark("outer")
        self._pending = pending, mark, source, out
        return out

    def wait(self) -> Tensor:
        """The received rows, ready for the compute lane."""
        assert self._pending is not None, "wait for an exchange once, after its start"
        pending, mark, _, out = self._pending
        pending.wait()
        if self.lanes is not None:
            self.lanes.wait("compute", mark)
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
    """Repeat each token's row for every choice that was kept, sorted by expert."""

    @staticmethod
    def forward(  # no *args: without gradients Dynamo counts the parameters, and drops ctx
        ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, choices: int, padded: bool
    ) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.how, ctx.num_tokens = (choices, padded), len(tokens)
        return copies(tokens, order, places, choices, padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order, places = ctx.saved_tensors
        return sums(grad, order, places, *ctx.how)[: ctx.num_tokens], None, None, None, None


class _Sum(torch.autograd.Function):
    """Sum the rows of each token, which come sorted by expert: the reverse of :class:`_Spread`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, places: Tensor, choices: int, padded: bool
    ) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.how = choices, padded
        return sums(rows, order, places, choices, padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order, places = ctx.saved_tensors
        return copies(grad, order, places, *ctx.how), None, None, None, None


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
    "expert_copies(Tensor tokens, Tensor order, Tensor places, int choices, bool padded) -> Tensor",
    lambda tokens, order, *_: tokens.new_empty(len(order), *tokens.shape[1:]),
)
def copies(tokens: Tensor, order: Tensor, places: Tensor, choices: int, padded: bool) -> Tensor:
    """The row of each token for each of its choices, in ``order``."""
    if _by_kernel(tokens) and not padded:
        from shardwise.kernels.row_sums import row_copies

        repeated: Tensor = row_copies(tokens, places.view(-1, choices), len(order))
        return repeated
    # Padding rows are copies of the last token.
    return tokens.index_select(0, (order // choices).clamp_max_(len(tokens) - 1))


@operator(
    "expert_sums(Tensor rows, Tensor order, Tensor places, int choices, bool padded) -> Tensor",
    lambda rows, _, places, choices, *__: rows.new_empty(len(places) // choices, *rows.shape[1:]),
)
def sums(rows: Tensor, order: Tensor, places: Tensor, choices: int, padded: bool) -> Tensor:
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
