# SPDX-License-Identifier: Apache-2.0
"""The forward of a planned step: the model's own, or a sketch that calls units as the model would.

    forward     root( embedding  1( )  2( )  3( )  norm, head )       in order of registration
    backward    the same parameters in reverse order, each with its gradient

A sketch has a node of autograd for each parameter, which computes nothing. Autograd, checkpoints
and the units work as in a run. A sketch assumes that each unit runs once, in the order of
registration, and that every trainable parameter gets a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.comm import Call
from shardwise.moe import mixtures_of
from shardwise.planning.planned import Options, Traffic
from shardwise.planning.units import META, Branch, Own, branch_of, recomputed_modules
from shardwise.shard.call import tensors_in


def own_forward(model: nn.Module, inputs: Sequence[Any]) -> Tensor:
    """Run the model's own forward; the loss is the sum of the outputs, or the one number."""
    with META:
        outputs = tensors_in(model(*inputs))
        found = [x for x in outputs if x.is_floating_point() and x.requires_grad]
        if not found:
            raise ValueError(f"plan: no output of {type(model).__name__} requires a gradient")
        losses = [x if x.ndim == 0 else x.float().sum() for x in found]
        return sum(losses[1:], losses[0])


def sketch(model: nn.Module) -> Callable[[], Tensor]:
    """A forward that calls the units of a wrapped model."""
    root, recomputed = branch_of(model), recomputed_modules(model)

    def is_recomputed(own: Own) -> bool:
        return not recomputed.isdisjoint(map(id, own.modules))

    def call(branch: Branch, hidden: Tensor, again: bool) -> Tensor:
        (hidden,), _ = branch.unit.pre_forward(branch.module, (hidden,), {})
        for part in branch.parts:
            if isinstance(part, Branch):
                inside = again or id(part.module) in recomputed
                hidden = _run(inside and not again, call, part, hidden, inside)
                continue
            for inside, run in groupby(part, is_recomputed):
                hidden = _run(inside and not again, _compute, list(run), hidden)
        return branch.unit.post_forward(branch.module, hidden)  # type: ignore[no-any-return]

    return lambda: call(root, torch.empty((), device=META), False)


def _run(again: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    if not again:
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _compute(parameters: list[Own], hidden: Tensor) -> Tensor:
    """Use parameters one after another, but together those whose gradients kernels write: a kernel
    writes all gradients of its module before autograd reports one of them."""
    for is_written, run in groupby(parameters, lambda own: own.is_written):
        leaves = [own.leaf for own in run]
        for used in [leaves] if is_written else [[leaf] for leaf in leaves]:
            hidden = _Sketched.apply(is_written, hidden, *used)  # type: ignore[no-untyped-call]
    return hidden


class _Sketched(torch.autograd.Function):
    """Uses parameters: its backward brings their gradients."""

    @staticmethod
    def forward(ctx: Any, is_written: bool, hidden: Tensor, *leaves: Any) -> Tensor:
        ctx.is_written, ctx.leaves = is_written, leaves
        ctx.save_for_backward(hidden)
        return torch.empty((), dtype=hidden.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018  # makes a checkpoint run forward again
        grads: list[Tensor | None] = []
        for leaf in ctx.leaves:
            if ctx.is_written and leaf.requires_grad:
                leaf.fresh_main_grad()
                leaf.grad_added_to_main_grad = True
            needed = leaf.requires_grad and not ctx.is_written
            grads.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=META) if needed else None)
        return None, grad, *grads


# ------------------------------------------------------------------------------ rows to experts

COUNT, WEIGHT = 8, 4  # bytes of a count of rows, and of a router's weight


def traffic_of(model: nn.Module, options: Options, tokens: int) -> Traffic:
    """The collectives that routers and the rows of experts add to a step:

        router     counts of all ranks for the balance loss and for biases   all_reduce over world
        dispatch   the numbers of rows                                        all_to_all over ep
                   rows and their weights to experts; rows back; their gradients

    ``tokens``: of one microbatch on one rank. The bytes of rows that leave a rank depend on the
    choices of its tokens. They are planned as if every expert got as many rows, and listed
    separately. Routers count over all ranks of the mesh, as the trainer sets them up with
    ``MixtureOfExperts.spread(axis, tokens)``.
    """
    traffic, mesh, microbatches = Traffic(), options.mesh, options.microbatches
    again = recomputed_modules(model)
    for layer in mixtures_of(model):
        forwards = microbatches * (2 if id(layer) in again else 1)
        routing, ep = layer.router.routing, layer.experts.ep
        balances = forwards * bool(routing.balance_loss) + bool(routing.bias_rate)
        if mesh.num_ranks > 1 and balances:
            nbytes = 4 * routing.num_experts
            traffic.known[Call("all_reduce", "world", mesh.num_ranks, nbytes)] += balances
        if ep > 1:
            leaving = routing.num_experts - layer.experts.num_experts
            traffic.known[Call("all_to_all", "ep", ep, COUNT * leaving)] += forwards
            width = options.precision.compute_dtype(layer.router.weight.dtype).itemsize
            row, rows = layer.experts.hidden * width, tokens * routing.experts_per_token
            away = rows - rows // ep
            traffic.even[Call("all_to_all", "ep", ep, away * row)] += 2 * (forwards + microbatches)
            traffic.even[Call("all_to_all", "ep", ep, away * WEIGHT)] += forwards + microbatches
    return traffic
