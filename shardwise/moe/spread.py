# SPDX-License-Identifier: Apache-2.0
"""Experts of several ranks inside a graph of torch.compile: four operators and their backwards.

    sizes      how many rows ranks send each other; the host waits for these numbers
    send       the rows of tokens leave          backward: gradients of rows arrive, summed by token
    experts    rows arrive and are computed      backward: gradients of rows leave, then dW1, dW2
    collect    rows go back, summed by token     backward: gradients of sums go to the experts

Work between send and experts (a shared expert) overlaps with the messages, in forward and in
backward. The number of rows is known when the graph runs, not when it is compiled: in the graph it
is a symbolic number, and only these operators read rows.

In a graph a running exchange is a tensor that holds its number. The gradient of this tensor is the
exchange of the gradients. These operators own all memory that is sent and received, because a graph
reuses the memory of its nodes after their last use.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN202

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.uncompiled import library, operator
from shardwise.moe.dispatch import (
    Dispatcher,
    DispatchPlan,
    copies,
    dispatchers,
    exchange_counts,
    placed,
    plan_exchange,
    sums,
)
from shardwise.moe.grouped_mlp import Inside
from shardwise.moe.mlp import (
    by_parameter,
    computed,
    empty_gradients,
    mlp_backward,
    mlp_forward,
    ordered,
    returned_gradients,
    work_of,
)
from shardwise.moe.products import check_ends
from shardwise.moe.router import Routes
from shardwise.moe.weights import Pending, originals, remember

_ops: Any = torch.ops.shardwise


def spread_experts(
    tokens: Tensor,
    routes: Routes,
    dispatcher: str,
    experts: Inside,
    delay: bool,
    beside: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """The sums of the experts [tokens, hidden], and the result of ``beside``, computed while rows
    are sent. torch.compile traces this function."""
    chosen, counts = routes.experts, routes.counts
    # The loss: on every rank this collective comes after the collective of the router's loss. The
    # empty tensor: as in ``graph_mlp``, two calls must not be merged.
    after = [routes.loss.detach(), torch.empty(0, device=tokens.device)]
    received, numbers = _ops.expert_sizes.default(
        chosen, counts, after, routes.capacity, dispatcher
    )
    sent, arriving = numbers[:2].tolist()
    exchange, order, places, by_expert, ends = _ops.expert_send.default(
        tokens, routes.weights, chosen, routes.kept, counts, received, numbers, sent, arriving,
        dispatcher,
    )  # fmt: skip
    output_beside = None if beside is None else beside(tokens)
    y, *_ = _ops.expert_rows.default(
        exchange, ends, by_expert, numbers, *experts, delay, dispatcher
    )
    summed = _ops.expert_collect.default(
        y, order, places, by_expert, numbers, dispatcher, len(tokens)
    )
    return summed, output_beside


# ------------------------------------------------------------------------------ under way

_under_way: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
_numbers = itertools.count()


def _begun(wait: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """The tensor that stands for an exchange. ``wait`` ends the exchange."""
    number = next(_numbers)
    _under_way[number] = wait
    _under_way.pop(number - 8, None)  # still present only if an exception came before its end
    return torch.tensor(number, dtype=torch.float64)


def _ended(exchange: Tensor) -> tuple[Tensor, Tensor]:
    """Wait for an exchange: the received rows and their weights."""
    return _under_way.pop(int(exchange))()


def _fake_exchange() -> Tensor:
    return torch.empty((), dtype=torch.float64)


def _plan(
    name: str, order: Tensor, places: Tensor, by_expert: Tensor, numbers: Tensor, tokens: int
) -> tuple[Dispatcher, DispatchPlan]:
    _, _, *sizes, padded = numbers.tolist()
    half, choices = len(sizes) // 2, len(places) // (tokens + 1)
    return (
        dispatchers[name],
        DispatchPlan(
            order=order,
            places=places if padded else places[:-choices],
            num_choices=choices,
            ends=order,  # not read
            sizes=sizes[:half],
            out_sizes=sizes[half:],
            by_expert=by_expert,
            padded=bool(padded),
        ),
    )


# ------------------------------------------------------------------------------ sizes, send


def _fake_sizes(chosen, counts, after, capacity, name) -> tuple[Tensor, Tensor]:
    num_ranks = dispatchers[name].axis.size  # type: ignore[union-attr]
    return counts.new_empty(counts.shape), torch.empty(2 * num_ranks + 3, dtype=torch.int64)


@operator(
    "expert_sizes(Tensor chosen, Tensor counts, Tensor[] after, int? capacity, str name)"
    " -> (Tensor, Tensor)",
    _fake_sizes,
)
def _sizes(chosen, counts, after, capacity, name) -> tuple[Tensor, Tensor]:
    axis = dispatchers[name].axis
    assert axis is not None
    received, numbers = exchange_counts(chosen, counts, capacity, axis)
    totals = sum(numbers[: axis.size]), sum(numbers[axis.size : -1])
    return received, torch.tensor([*totals, *numbers])


def _fake_send(tokens, weights, chosen, kept, counts, received, numbers, sent, arriving, name):
    places = chosen.new_empty((len(tokens) + 1) * chosen.shape[-1])
    local = len(counts) // dispatchers[name].axis.size  # type: ignore[union-attr]
    ends = counts.new_empty(local, dtype=torch.int32)
    return _fake_exchange(), places.new_empty(sent), places, places.new_empty(arriving), ends


@operator(
    "expert_send(Tensor tokens, Tensor weights, Tensor chosen, Tensor? kept, Tensor counts,"
    " Tensor received, Tensor numbers, SymInt sent, SymInt arriving, str name)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_send,
)
@torch.no_grad()
def _send(tokens, weights, chosen, kept, counts, received, numbers, sent, arriving, name):
    plan = plan_exchange(chosen, kept, counts, received, numbers.tolist()[2:])
    arrival = dispatchers[name].send(tokens, weights, plan)
    more = 0 if plan.padded else plan.num_choices
    places = F.pad(plan.places, (0, more), value=sent)
    return _begun(lambda: arrival(None)), plan.order, places, plan.by_expert, plan.ends


def _keep_sent(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tokens, _, _, _, _, _, numbers, _, _, ctx.name = inputs
    _, order, places, by_expert, ends = output
    ctx.mark_non_differentiable(order, places, by_expert, ends)
    ctx.save_for_backward(order, places, numbers)
    ctx.tokens = *tokens.shape, tokens.dtype


def _fake_return(exchange, order, places, numbers, tokens, hidden, dtype):
    weights = torch.promote_types(dtype, torch.float32)
    slots = tokens, places.shape[0] // (tokens + 1)
    return order.new_empty(tokens, hidden, dtype=dtype), order.new_empty(slots, dtype=weights)


@operator(
    "expert_send_backward(Tensor exchange, Tensor order, Tensor places, Tensor numbers,"
    " SymInt tokens, SymInt hidden, ScalarType dtype) -> (Tensor, Tensor)",
    _fake_return,
)
def _return(exchange, order, places, numbers, tokens, hidden, dtype) -> tuple[Tensor, Tensor]:
    rows, weights = _ended(exchange)
    choices = len(places) // (tokens + 1)
    summed = sums(rows, order, places, choices, bool(numbers[-1]))[:tokens]
    return summed, placed(weights, order, len(places)).view(-1, choices)[:tokens]


def _bring_tokens(ctx: Any, exchange: Tensor, *_: Any) -> tuple[Any, ...]:
    tokens, weights = _ops.expert_send_backward.default(exchange, *ctx.saved_tensors, *ctx.tokens)
    return tokens, weights, *[None] * 8


torch.library.register_autograd(
    "shardwise::expert_send", _bring_tokens, setup_context=_keep_sent, lib=library
)


# ------------------------------------------------------------------------------ experts


def _fake_rows(exchange, ends, by_expert, numbers, parameters, text, delay, name):
    rows, first = by_expert.shape[0], parameters[0]
    like = torch.empty(0, dtype=first.dtype, device=by_expert.device)
    wide = torch.promote_types(first.dtype, torch.float32)
    x = like.new_empty(rows, first.shape[-1])
    z, p = like.new_empty(rows, first.shape[-2]), like.new_empty(rows, dtype=wide)
    return x, like.new_empty(x.shape), z, p


@operator(
    "expert_rows(Tensor exchange, Tensor ends, Tensor by_expert, Tensor numbers,"
    " Tensor[] parameters, str text, bool delay, str name) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_rows,
)
def _rows(exchange, ends, by_expert, numbers, parameters, text, delay, name):
    x, p = _ended(exchange)
    check_ends(ends, len(x))
    remember(parameters)
    y, z, _ = mlp_forward(x, p, ends, work_of(x, parameters, len(ends), text))
    return y, x, z, p


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, ends, by_expert, numbers, parameters, ctx.text, ctx.delay, ctx.name = inputs
    _, x, z, p = output
    ctx.mark_non_differentiable(x, z, p)
    ctx.save_for_backward(x, None, z, p, ends, by_expert, numbers, *parameters)


def _fake_rows_backward(dy, saved, by_expert, numbers, parameters, text, trained, *_):
    return [_fake_exchange(), *empty_gradients(parameters, trained)]


@operator(
    "expert_rows_backward(Tensor dy, Tensor?[] saved, Tensor by_expert, Tensor numbers,"
    " Tensor[] parameters, str text, bool[] trained, bool wants, bool delay, str name) -> Tensor[]",
    _fake_rows_backward,
)
def _rows_backward(dy, saved, by_expert, numbers, parameters, text, trained, wants, delay, name):
    parameters = originals(parameters, trained)
    pending: Pending = []
    work = work_of(dy, parameters, len(saved[4]), text)
    work = replace(work, delay=pending.extend if delay else None)
    dx, dp, gradients = mlp_backward(dy, list(saved), work, wants, wants)
    results = [_fake_exchange()]
    if dx is not None:
        results = [_begun(_begin_return(dx, dp, by_expert, numbers, dispatchers[name]))]
    del dx, dp
    if delay:  # the exchange of row gradients has started
        gradients = ordered(computed(pending), work.bundles)
    return results + returned_gradients(parameters, gradients, trained)


def _begin_return(
    dx: Tensor, dp: Tensor, by_expert: Tensor, numbers: Tensor, dispatcher: Dispatcher
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Send the gradients of rows and of their weights back to the ranks that sent the rows."""
    _, _, *sizes, _ = numbers.tolist()
    half = len(sizes) // 2
    rows, weights = (dispatcher.exchange(sizes[half:], sizes[:half]) for _ in range(2))
    for exchange, gradient in ((rows, dx), (weights, dp)):
        exchange.start(
            placed(gradient, by_expert, len(by_expert)), exchange.sizes, exchange.out_sizes
        )
    return lambda: (rows.wait(), weights.wait())


def _bring_rows(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    wants, _, _, _, trained, *_ = ctx.needs_input_grad
    exchange, *gradients = _ops.expert_rows_backward.default(
        dy, saved[:5], saved[5], saved[6], saved[7:], ctx.text, trained, wants, ctx.delay, ctx.name
    )
    of_parameters = by_parameter(gradients, trained)
    return exchange if wants else None, None, None, None, of_parameters, None, None, None


torch.library.register_autograd(
    "shardwise::expert_rows", _bring_rows, setup_context=_keep_rows, lib=library
)


# ------------------------------------------------------------------------------ collect


@operator(
    "expert_collect(Tensor rows, Tensor order, Tensor places, Tensor by_expert, Tensor numbers,"
    " str name, SymInt tokens) -> Tensor",
    lambda rows, *others: rows.new_empty(others[-1], rows.shape[1]),
)
@torch.no_grad()
def _collect(rows, order, places, by_expert, numbers, name, tokens) -> Tensor:
    dispatcher, plan = _plan(name, order, places, by_expert, numbers, tokens)
    return dispatcher.collect(rows, plan)[:tokens]


def _keep_plan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *plan, ctx.name, _ = inputs
    ctx.save_for_backward(*plan)


@operator(
    "expert_collect_backward(Tensor grad, Tensor order, Tensor places, Tensor by_expert,"
    " Tensor numbers, str name) -> Tensor",
    lambda grad, _, __, by_expert, *___: grad.new_empty(by_expert.shape[0], grad.shape[1]),
)
def _collect_backward(grad, order, places, by_expert, numbers, name) -> Tensor:
    dispatcher, plan = _plan(name, order, places, by_expert, numbers, len(grad))
    grad = F.pad(grad, (0, 0, 0, int(plan.padded)))
    rows = copies(grad, order, plan.places, plan.num_choices, plan.padded)
    exchange = dispatcher.exchange(plan.sizes or [], plan.out_sizes or [])
    exchange.start(rows, exchange.sizes, exchange.out_sizes)
    return exchange.wait().index_select(0, by_expert)


def _bring_sums(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows = _ops.expert_collect_backward.default(grad, *ctx.saved_tensors, ctx.name)
    return rows, *[None] * 6


torch.library.register_autograd(
    "shardwise::expert_collect", _bring_sums, setup_context=_keep_plan, lib=library
)
