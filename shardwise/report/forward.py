# SPDX-License-Identifier: Apache-2.0
"""The forward of a planned step: the model's own, or a sketch that calls units as the model would.

    forward     root( embedding  1( )  2( )  3( )  norm, head )       in order of registration
    backward    the same parameters in reverse order, each with its gradient

A sketch computes nothing. Autograd, checkpoints and the units work as in a run. A sketch assumes
that each unit runs once, in the order of registration, and that every trainable parameter gets a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.comm import Call
from shardwise.moe import mixtures_of
from shardwise.precision.fp8_tensor import READS
from shardwise.report.planned import Options, Traffic
from shardwise.report.units import META, Branch, Own, branch_of, recomputed_modules
from shardwise.shard.call import sentinel
from shardwise.shard.fp8_group import FP8Group
from shardwise.shard.module import unit_of
from shardwise.shard.unit import Unit
from shardwise.shard.whole_parameter import AUTOGRADS


def own_forward(loss: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    """Run the model's own forward."""
    root = unit_of(model)
    assert root is not None
    before = root.runtime.forward
    with META:
        value = loss(model)
    if root.runtime.forward == before:
        raise ValueError(
            "dry_run: loss must call the model that it is given, which is a wrapped copy"
        )
    return value


def sketch(model: nn.Module) -> Callable[[], Tensor]:
    """A forward that calls the units of a wrapped model."""
    root, recomputed = branch_of(model), recomputed_modules(model)

    def is_recomputed(own: Own) -> bool:
        return not recomputed.isdisjoint(map(id, own.modules))

    def call(branch: Branch, hidden: Tensor, again: bool) -> Tensor:
        (hidden,), _ = branch.unit.pre_forward((hidden,), {})
        for part in branch.parts:
            if isinstance(part, Branch):
                inside = again or id(part.module) in recomputed
                hidden = _run(inside and not again, call, part, hidden, inside)
                continue
            for inside, run in groupby(part, is_recomputed):
                hidden = _run(inside and not again, _apply, _Work(branch.unit, list(run)), hidden)
        return branch.unit.post_forward(hidden)  # type: ignore[no-any-return]

    return lambda: call(root, torch.empty((), device=META), False)


def _run(again: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    if not again:
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class _Work:
    """Consecutive parameters of one unit."""

    def __init__(self, unit: Unit, parameters: list[Own]) -> None:
        self.unit, self.parameters = unit, parameters
        self._coded: list[tuple[FP8Group, int]] = [
            (own.group, own.key[1]) for own in parameters if isinstance(own.group, FP8Group)
        ]

    @property
    def trains(self) -> bool:
        return any(own.leaf.requires_grad for own in self.parameters)

    def forward(self) -> None:
        """Read planes as products do. Products decode planes into memory that is kept."""
        for group, index in self._coded:
            shape, dtype = group.items[index].shape, group.whole.dtype
            if "backward" in READS[group.format] and len(shape) == 2:
                row = torch.empty(1, shape[1], dtype=dtype, device=META)
                with torch.no_grad():
                    F.linear(row, group.unsharded[index])
            else:
                group.plane(index, "forward")

    def backward(self) -> None:
        """Report gradients in reverse order. A kernel writes all gradients of its module before
        autograd reports one of them."""
        for group, index in self._coded:
            if "backward" in READS[group.format]:
                group.plane(index, "backward")
        written: list[Own] = []
        for own in reversed(self.parameters):
            leaf = own.leaf
            if not leaf.requires_grad:
                continue
            if own.is_written:
                leaf.fresh_main_grad()
                leaf.grad_added_to_main_grad = True
                written.append(own)
                continue
            self._arrive(written)
            AUTOGRADS.__set__(leaf, _gradient(leaf.shape, leaf.dtype))
            self.unit.arrived(own.key)
        self._arrive(written)

    def _arrive(self, parameters: list[Own]) -> None:
        for own in parameters:
            self.unit.arrived(own.key)
        parameters.clear()


@cache
def _gradient(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A gradient without values, shared by all parameters of this shape and dtype."""
    return torch.empty(shape, dtype=dtype, device=META)


def _apply(work: _Work, hidden: Tensor) -> Tensor:
    # The sentinel, a leaf that every backward of a wrapped model reaches, stands for parameters.
    trained = sentinel if work.trains else torch.empty(0)
    return _Sketched.apply(work, hidden, trained)  # type: ignore[no-any-return, no-untyped-call]


class _Sketched(torch.autograd.Function):
    """Runs a :class:`_Work` as a node of autograd."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden: Tensor, trained: Tensor) -> Tensor:
        work.forward()
        ctx.work = work
        ctx.save_for_backward(hidden)
        return torch.empty((), dtype=hidden.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018  # makes a checkpoint run forward again
        ctx.work.backward()
        return None, grad, None


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
