# SPDX-License-Identifier: Apache-2.0
"""The forward of a planned step: the model's own, or a sketch that calls units as the model would.

    forward     root( embedding  1( )  2( )  3( )  norm, head )       in registration order
    backward    what each of them read, in reverse, brings its gradient

A sketch computes nothing; autograd, checkpoints and the units do the rest, as in a run. It assumes
that units run in the order in which they are registered, each once, and that every trainable
parameter gets a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.comm import Call
from shardwise.moe import mixtures_of
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import READS
from shardwise.report.engine import META, BuiltUnit, Engine
from shardwise.report.planned import Mesh, Traffic
from shardwise.report.units import Owner, recomputed_modules
from shardwise.shard.call import sentinel
from shardwise.shard.fp8_group import FP8Group
from shardwise.shard.whole_parameter import AUTOGRADS


@contextmanager
def own_forward(
    loss: Callable[[nn.Module], Tensor], model: nn.Module, engine: Engine
) -> Iterator[Callable[[], Tensor]]:
    """The model with the units' parameters and hooks in it, for the time of the context."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    hooks: list[Any] = []
    for built in engine.units:
        places = [(parameters, name) for parameters, name, *_ in built.unit.places]
        before += [(parameters, name, parameters[name]) for parameters, name in places]
        built.unit.hide(force=True)
        module, unit = built.owner.module, built.unit
        before_it = module.register_forward_pre_hook(
            unit._pre_forward, prepend=True, with_kwargs=True
        )
        hooks += [before_it, module.register_forward_hook(unit._post_forward)]

    def forward() -> Tensor:
        with META:
            return loss(model)

    try:
        yield forward
    finally:
        for hook in hooks:
            hook.remove()
        for parameters, name, parameter in before:
            parameters[name] = parameter


def sketch(engine: Engine, recomputed: frozenset[int]) -> Callable[[], Tensor]:
    """The forward of a model; ``recomputed``: ids of modules that run inside a checkpoint."""
    built = {id(one.owner): one for one in engine.units}

    def call(owner: Owner, hidden: Tensor, again: bool) -> Tensor:
        one = built[id(owner)]
        (hidden,), _ = one.unit.pre_forward((hidden,), {})
        for part in owner.parts:
            if isinstance(part, Owner):
                inside = again or id(part.module) in recomputed
                hidden = _run(inside and not again, call, part, hidden, inside)
                continue
            within = partial(_within, one, recomputed)
            for inside, positions in groupby(part, within):
                work = _Work(one, list(positions))
                hidden = _run(inside and not again, _apply, work, hidden)
        return one.unit.post_forward(hidden)  # type: ignore[no-any-return]

    def forward() -> Tensor:
        return call(engine.root.owner, torch.empty((), device=META), False)

    return forward


def _within(one: BuiltUnit, recomputed: frozenset[int], position: int) -> bool:
    return any(id(module) in recomputed for module in one.owner.found[position].modules)


def _run(again: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    if not again:
        return function(*args)
    made = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return made  # type: ignore[no-any-return]


class _Work:
    """Parameters of one unit that are read one after another."""

    def __init__(self, built: BuiltUnit, positions: list[int]) -> None:
        self.built, self.positions = built, positions

    @property
    def trains(self) -> bool:
        return any(self.built.leaf(position).requires_grad for position in self.positions)

    def forward(self) -> None:
        """Read planes as products do, which decode them in memory that is kept."""
        for group, index in self._coded():
            shape, dtype = group.items[index].shape, group.whole.dtype
            if "backward" in READS[group.format] and len(shape) == 2:
                row = torch.empty(1, shape[1], dtype=dtype, device=META)
                with torch.no_grad():
                    F.linear(row, group.unsharded[index])
            else:
                group.plane(index, "forward")

    def backward(self) -> None:
        """Bring gradients in reverse. A kernel writes those of its module before autograd tells of
        any of them."""
        for group, index in self._coded():
            if "backward" in READS[group.format]:
                group.plane(index, "backward")
        written: list[int] = []
        for position in reversed(self.positions):
            leaf = self.built.leaf(position)
            if not leaf.requires_grad:
                continue
            if self._by_kernel(position):
                leaf.fresh_main_grad()
                leaf.grad_added_to_main_grad = True
                written.append(position)
                continue
            self._arrive(written)
            AUTOGRADS.__set__(leaf, torch.empty(leaf.shape, dtype=leaf.dtype, device=META))
            self._arrive([position])
        self._arrive(written)

    def _arrive(self, positions: list[int]) -> None:
        for position in positions:
            self.built.unit.arrived(self.built.where[position])
        positions.clear()

    def _by_kernel(self, position: int) -> bool:
        found = self.built.owner.found[position]
        return any(getattr(module, "writes_main_grad", False) for module in found.modules)

    def _coded(self) -> list[tuple[FP8Group, int]]:
        places = [self.built.where[position] for position in self.positions]
        groups = self.built.unit.groups
        return [(groups[n], i) for n, i in places if isinstance(groups[n], FP8Group)]  # type: ignore[misc]


def _apply(work: _Work, hidden: Tensor) -> Tensor:
    # A leaf that every backward of a wrapped model reaches stands for those that are trained.
    trained = sentinel if work.trains else torch.empty(0)
    return _Sketched.apply(work, hidden, trained)  # type: ignore[no-any-return, no-untyped-call]


class _Sketched(torch.autograd.Function):
    """Work that only its parameters notice."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden: Tensor, trained: Tensor) -> Tensor:
        work.forward()
        ctx.work = work
        ctx.save_for_backward(hidden)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018  # a checkpoint runs forward once more for them
        ctx.work.backward()
        return None, grad, None


# ------------------------------------------------------------------------------ rows to experts

COUNT, WEIGHT = 8, 4  # bytes of a count of rows, and of a router's weight


def traffic_of(
    model: nn.Module, mesh: Mesh, precision: Precision, tokens: int, microbatches: int
) -> Traffic:
    """The collectives that routers, and rows on their way to experts, add to a step:

        router     counts of all ranks for the balance term, and for biases   all_reduce over world
        dispatch   how many rows come                                         all_to_all over ep
                   rows and their weights, there; rows back; gradients the other way

    ``tokens``: of one microbatch on one rank. How many bytes of rows leave a rank depends on what
    its tokens choose: they are planned as if every expert got as many, and kept apart. Routers
    count over all ranks of the mesh, as ``MixtureOfExperts.spread(axis, tokens)`` has them do in
    the trainer.
    """
    found = Traffic()
    again = recomputed_modules(model)
    for layer in mixtures_of(model):
        forwards = microbatches * (2 if id(layer) in again else 1)
        routing, ep = layer.router.routing, layer.experts.ep
        balances = forwards * bool(routing.balance_loss) + bool(routing.bias_rate)
        if mesh.num_ranks > 1 and balances:
            nbytes = 4 * routing.num_experts
            found.known[Call("all_reduce", "world", mesh.num_ranks, nbytes)] += balances
        if ep > 1:
            leaving = routing.num_experts - layer.experts.num_experts
            found.known[Call("all_to_all", "ep", ep, COUNT * leaving)] += forwards
            width = precision.compute_dtype(layer.router.weight.dtype).itemsize
            row, rows = layer.experts.hidden * width, tokens * routing.experts_per_token
            away = rows - rows // ep
            found.even[Call("all_to_all", "ep", ep, away * row)] += 2 * (forwards + microbatches)
            found.even[Call("all_to_all", "ep", ep, away * WEIGHT)] += forwards + microbatches
    return found
