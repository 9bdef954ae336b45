# SPDX-License-Identifier: Apache-2.0
"""Call: one forward of a unit, its inputs and outputs, and the hooks that lead backward to it."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from shardwise import comm
from shardwise.moe.weights import is_wanted
from shardwise.shard.containers import Swaps, look_into, map_tensors, put_back
from shardwise.shard.members import refuse_side_way
from shardwise.uncompiled import skip_frames

if TYPE_CHECKING:
    from shardwise.shard.unit import Unit


_sequence_nr = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


class Call:
    """One forward of a unit, as backward meets it again."""

    __slots__ = (
        *("__weakref__", "begun", "forward", "gated", "recorded"),
        *("swaps", "task", "unit", "weights"),
    )

    def __init__(self, unit: Unit, weights: Any, recorded: bool, forward: int) -> None:
        self.unit = ref(unit)
        self.weights = weights  # the versions of the weights that this forward reads
        self.recorded = recorded  # whether autograd records the call, so that a backward can come
        self.task = -1  # the backward that entered the call last
        self.swaps: Swaps = []  # of the inputs, while the call runs
        self.gated = False  # whether gradients of inputs pass through ``InputsOfAWrappedModule``
        self.forward = forward  # the number of the root's forward; 0: made inside a backward
        self.begun = _sequence_nr()  # nodes of the graph with this number or more came after

    def enters(self) -> bool:
        """Whether the backward that runs now comes to this call for the first time."""
        before, self.task = self.task, torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        return before != self.task

    def pass_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lead every input that needs a gradient through a gate."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # the usual case
            if not args[0].requires_grad:
                return args, kwargs
            self.gated = True
            return tuple(InputsOfAWrappedModule.apply(self, sentinel, args[0])), kwargs  # type: ignore[no-untyped-call]
        through: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                through.append(tensor)
            return tensor

        map_tensors(collect, (args, kwargs))
        if not through:
            return args, kwargs
        self.gated = True
        behind = iter(InputsOfAWrappedModule.apply(self, sentinel, *through))  # type: ignore[no-untyped-call]
        gate = lambda t: next(behind) if t.requires_grad else t  # noqa: E731
        return map_tensors(gate, (args, kwargs), self.swaps)  # type: ignore[no-any-return]

    def watch_outputs(self, output: Any, more: Sequence[Any] = ()) -> bool:
        """Call ``pre_backward`` of the unit when the first gradient of an output comes. Returns
        whether a gradient can come. ``more``: tensors to watch beside the output.

        Raises TypeError if no tensor is found and an object may hide one. The backward of such a
        tensor would read weights that were released.
        """
        if isinstance(output, Tensor) and not more:
            return self._watch(output)
        watched, closed = False, []
        for item in (*look_into(output, set()), *look_into(more, set())):
            if isinstance(item, Tensor):
                watched = self._watch(item) or watched
            else:
                closed.append(type(item).__name__)
        if closed and not watched:
            raise TypeError(
                f"forward returned a {type(output).__name__} with a {closed[0]} inside, in which "
                f"no tensor can be found: return tensors, or containers or objects of them"
            )
        return watched

    def _watch(self, tensor: Tensor) -> bool:
        """Hook one output; returns whether a gradient can come to it."""
        if tensor.is_leaf:  # a weight: its own gradient is reported, and a hook would stay on it
            return False
        if tensor.grad_fn._sequence_nr() < self.begun:  # type: ignore[union-attr]
            return False  # made before this forward, which got it in a container and returns it
        tensor.register_hook(partial(_open, self))
        # Autograd runs the node with the highest number first. So all nodes of this forward run
        # after the hook, also the nodes of tensors that it left elsewhere (losses in a list).
        tensor.grad_fn._set_sequence_nr(_sequence_nr())  # type: ignore[union-attr,attr-defined]
        sentinel.view_as(sentinel)  # takes this number, so that the gate of the next unit is higher
        # An in-place operation on a view (x = linear(x); x += y) replaces its node, and the hook is
        # lost. The base keeps its node. The base of an input that forward returns is older than
        # the node of the gate, and is not hooked.
        base: Any = tensor._base
        first = self.begun + self.gated
        if base is not None and not base.is_leaf and base.grad_fn._sequence_nr() >= first:
            base.register_hook(partial(_open, self))
        return True


class Calls:
    """The calls of one unit that are not done, in one list for each state.

    running    forward has begun
    awaited    forward is over, and a backward may come
    open       backward has entered the call, and gradients of its inputs are still to come
    """

    def __init__(self, modules: Sequence[ref[nn.Module]]) -> None:
        self._modules = modules
        self._begun = 0  # calls since the unit was at rest; a list of modules has several
        self.running: list[Call] = []
        self.awaited: list[Call] = []  # the same number on every rank
        self.open: list[Call] = []

    def begin(self, call: Call) -> None:
        """A forward begins."""
        self._begun += 1
        self.running.append(call)

    def end(self) -> Call | None:
        """End the innermost call that runs, and return it. None: an exception has dropped it."""
        if not self.running:
            return None
        call = self.running.pop()
        put_back(call.swaps)
        return call

    @property
    def finished(self) -> bool:
        """Whether no call runs, and every module of a list has run."""
        return not self.running and self._begun % len(self._modules) == 0

    @property
    def outside(self) -> bool:
        """Whether a call runs that is no recomputation. A backward that comes now is inside it."""
        return any(call.forward for call in self.running)

    def wait_for(self, call: Call) -> None:
        """A backward of ``call`` may come."""
        self.awaited.append(call)

    def enter(self, call: Call, stays: bool) -> None:
        """A backward has come to a call: the first one, or one more over a kept graph. The call
        stays open until ``leave``, or, if ``stays``, until the end of that backward."""
        _remove(self.awaited, call)
        if call.gated or stays:
            self.open.append(call)

    def leave(self, call: Call) -> None:
        """Autograd has computed the gradients of the inputs of a call."""
        _remove(self.open if call in self.open else self.awaited, call)

    def forget(self, forwards: Container[int]) -> None:
        """Expect no backward for the calls of these forwards of the root. (The graph may have been
        kept, so that a backward can still enter them.)"""
        self.awaited = [call for call in self.awaited if call.forward not in forwards]

    def drop_dead(self, entering: bool) -> bool:
        """Forget the calls that an exception ended. Returns whether any was running and none is
        left. ``entering``: the stack has one call more, which begins or ends just now."""
        if not self.running:
            return False
        modules = [module for reference in self._modules if (module := reference()) is not None]
        alive = max(calls_on_stack(modules) - entering, 0)
        while len(self.running) > alive:
            self.end()
        return not self.running

    def stop(self) -> None:
        """No call runs any more, and backward is in no call."""
        while self.end() is not None:
            pass
        self.open, self._begun = [], 0


def _remove(calls: list[Call], call: Call) -> None:
    if call in calls:
        calls.remove(call)


def _open(call: Call, grad: Tensor) -> None:
    """The first gradient of an output of ``call`` has come."""
    unit = call.unit()
    if unit is None:
        raise RuntimeError(
            "backward came to a wrapped module that was deleted since its forward: its gradients "
            "would be lost. Keep the model until backward is through"
        )
    unit.pre_backward(call)


# When a compiled function calls backward, torch.compile must not trace the hooks of that backward.
skip_frames(_open)


class InputsOfAWrappedModule(torch.autograd.Function):
    """The gate of a call: the identity on its inputs. Its backward runs when the gradients of all
    inputs have been computed. If a module writes to its inputs in place, the error of torch names
    this class: the inputs must be cloned first."""

    @staticmethod
    def forward(ctx: Any, call: Call, sentinel: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an input that was not read has no gradient
        # DTensors may pass on tensors whose collective is still under way. A compiled graph
        # (torch 2.13) loses the gradients of such tensors.
        return tuple(map(comm.arrived, inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        unit = ctx.call.unit()
        if unit is not None:
            if ctx.call.enters() and any(grad is not None for grad in grads):
                refuse_side_way(unit)  # frozen weights have no gradient that ``arrived`` would see
            unit.inputs_done(ctx.call)
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, call: None, sentinel: None, *tangents: Tensor | None) -> Any:
        return tuple(None if t is None else t.view_as(t) for t in tangents)


skip_frames(InputsOfAWrappedModule.backward)

# A leaf behind every gate, which gets no gradient. A backward for all leaves visits it; a backward
# for chosen inputs (torch.autograd.grad) does not.
sentinel = torch.zeros((), requires_grad=True)
_SENTINEL = torch.autograd.graph.get_gradient_edge(sentinel).node


def calls_on_stack(modules: Sequence[nn.Module]) -> int:
    """How many calls of these modules run now, by the stack of this thread: for rare cases."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        # "wrapped_method": the methods that torch's register_fsdp_forward_method makes.
        if frame.f_code is _CALL or frame.f_code.co_name == "wrapped_method":
            count += any(frame.f_locals.get("self") is module for module in modules)
        frame = frame.f_back  # type: ignore[assignment]
    return count


_CALL = nn.Module._call_impl.__code__


def is_for_inputs(leaves: Iterable[Tensor]) -> bool:
    """Whether the running backward is for chosen inputs, and for none of the parameters
    ``leaves``."""
    if torch._C._will_engine_execute_node(_SENTINEL):  # type: ignore[attr-defined]
        return False  # a backward for all leaves of a graph with a gate
    if any(map(will_come, leaves)):
        return False
    behind = (getattr(node, "variable", None) for node in _behind([_node_now()]))
    return not all(is_wanted(leaf) for leaf in behind if leaf is not None)


def will_come(*leaves: Tensor) -> bool:
    """Whether the running backward computes the gradients of all these parameters, or delays them.
    No gradient comes to a parameter that was frozen after forward."""
    return all(
        getattr(leaf, "delayed", False) or (leaf.requires_grad and is_wanted(leaf))
        for leaf in leaves
    )


def recomputes_inside(unit: Unit) -> bool:
    """Whether the running backward, which has just reached an output of the unit, will come to a
    reentrant checkpoint inside the unit. Such a checkpoint starts another backward, and the graph
    of the running one does not contain the parameters that the checkpoint reads."""
    return any(type(node).__name__ == _REENTRANT for node in _behind([_node_now()], unit))


def reads_on(unit: Unit) -> bool:
    """Whether backward, which has just reached an output of the unit, may read frozen weights of
    the unit after the last gradient has come: if the graph leads out of the unit through no gate,
    to inputs in an object that cannot be opened, in a closure, or in an attribute."""
    inside = set(map(id, unit.arrivals.leaves()))
    stays = not any(group.comes_and_goes for group in unit.groups)
    if stays or not inside or len(inside) == sum(len(group.items) for group in unit.groups):
        return False
    inside.add(id(sentinel))
    for node in _behind([_node_now()], unit):
        leaf = getattr(node, "variable", None)
        is_gate = isinstance(getattr(node, "call", None), Call)
        if is_gate or not (leaf is None or id(leaf) in inside):
            return True
    return False


def _behind(waiting: list[Any], until: Unit | None = None) -> Iterator[Any]:
    """The given nodes and all nodes behind them, as far as the gates of ``until``."""
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        call = getattr(node, "call", None)
        if node in seen or (isinstance(call, Call) and call.unit() is until):
            continue  # nodes behind a gate of the unit are outside of it
        yield node
        seen.add(node)
        waiting += [behind for behind, _ in node.next_functions]


_node_now = torch._C._current_autograd_node  # type: ignore[attr-defined]
_REENTRANT = f"{torch.utils.checkpoint.CheckpointFunction.__name__}Backward"
