# SPDX-License-Identifier: Apache-2.0
"""Call: one forward of a unit, from its inputs to its outputs, and how backward meets it again.

    inputs --gate--> [ modules of the unit ] --hook--> outputs

The first gradient of an output *enters* the call: the weights are gathered. The gate was recorded
before anything else of the call, so autograd runs it last: its backward *leaves* the call. A call
whose inputs need no gradient has no gate, and stays open to the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.core.compat import next_number, run_first, tree_flatten, tree_map_only


class Call:
    """One forward of a unit. The graph holds it, and it holds the unit weakly."""

    __slots__ = ("__weakref__", "begun", "gated", "unit", "writes")

    def __init__(self, unit: Any, writes: list[int]) -> None:
        self.unit = ref(unit)  # which enters and leaves calls
        self.writes = writes  # how often the weights had been written that this forward reads
        self.gated = False
        self.begun = next_number()  # nodes of the graph with this number or more came after

    def pass_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Lead every input that needs a gradient through the gate."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # the usual case
            if args[0].requires_grad:
                self.gated = True
                args = tuple(_Gate.apply(self, *args))  # type: ignore[no-untyped-call]
            return args, kwargs
        through = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
        if not through:
            return args, kwargs
        self.gated = True
        behind = iter(_Gate.apply(self, *through))  # type: ignore[no-untyped-call]
        return map_tensors(lambda x: next(behind) if x.requires_grad else x, (args, kwargs))  # type: ignore[no-any-return]

    def watch(self, output: Any) -> None:
        """Enter the call when the first gradient of an output comes."""
        for tensor in tensors_in(output):
            if not tensor.requires_grad or tensor.is_leaf:
                continue
            node: Any = tensor.grad_fn
            if node._sequence_nr() < self.begun:
                continue  # made before this forward, which got it in an object and returns it
            tensor.register_hook(partial(_enter, self))
            # All nodes of this forward run after the hook, also those of tensors that it left
            # elsewhere (losses in a list).
            run_first(node)
            # An in-place operation on a view (x = linear(x); x += y) replaces its node, and the
            # hook is lost. The base keeps its node.
            base: Any = tensor._base
            first = self.begun + self.gated  # the base of a returned input is older than the gate
            if base is None or base.is_leaf or base.grad_fn._sequence_nr() < first:
                continue
            base.register_hook(partial(_enter, self))


def _enter(call: Call, gradient: Tensor) -> None:
    unit = call.unit()
    if unit is None:
        raise RuntimeError(
            "backward came to a wrapped module that was deleted since its forward: its gradients "
            "would be lost. Keep the model until backward is through"
        )
    unit.enter(call)


class _Gate(torch.autograd.Function):
    """The identity on the inputs of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an input that was not read has no gradient
        # DTensors may pass on tensors whose collective is still under way. A compiled graph
        # (torch 2.13) loses the gradients of such tensors.
        return tuple(map(comm.arrived, inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        unit = ctx.call.unit()
        if unit is not None:
            unit.leave(ctx.call)
        return (None, *grads)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an argument or a result, in all containers that torch's pytree knows."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with all its tensors changed, in new containers."""
    return change(value) if isinstance(value, Tensor) else tree_map_only(Tensor, change, value)


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """The value with its floating-point tensors in another dtype; None: as it is."""
    if dtype is None:
        return value
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)
