# SPDX-License-Identifier: Apache-2.0
"""One forward of a unit: what goes in, what comes out, and how backward finds its way back to
it."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Container, Iterator, Sequence
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
from shardwise.shard.whole_parameter import Whole
from shardwise.tensor import ShardedTensor
from shardwise.uncompiled import skip_frames

if TYPE_CHECKING:
    from shardwise.shard.unit import Unit


_sequence_nr = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


class CallState(enum.Enum):
    """The state of one call of a unit."""

    RUNNING = "running"  # its forward has begun
    AWAITED = "awaited"  # its forward is over, and a backward may come
    OPEN = "open"  # backward has entered it, and the gradients of its inputs are to come
    DONE = "done"


class Call:
    """One forward of a unit, as backward meets it again."""

    __slots__ = (
        *("__weakref__", "begun", "forward", "gated", "recorded"),
        *("state", "swaps", "task", "unit", "weights"),
    )

    def __init__(self, unit: Unit, weights: Any, recorded: bool, forward: int) -> None:
        self.unit = ref(unit)
        self.weights = weights  # the versions of the weights that it computes with
        self.recorded = recorded  # whether autograd records it, so that a backward can come
        self.state = CallState.RUNNING
        self.task = -1  # the backward that entered it last
        self.swaps: Swaps = []  # of its inputs, while it runs
        self.gated = False  # whether its inputs' gradients pass through a gate of ours
        self.forward = forward  # the number of the root's forward; 0: made inside a backward
        self.begun = _sequence_nr()  # nodes of the graph that come later are its own, or later ones

    def enters(self) -> bool:
        """Whether the backward that runs now has not come to this call before."""
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
        """Tell the unit when the first gradient of an output comes; returns whether one can come.

        Raises TypeError where no tensor is found and an object may hide one: its backward would
        read weights that are no longer there.
        """
        if isinstance(output, Tensor) and not more:
            return self._watch(output)
        watched, closed = False, []
        for found in (*look_into(output, set()), *look_into(more, set())):
            if isinstance(found, Tensor):
                watched = self._watch(found) or watched
            else:
                closed.append(type(found).__name__)
        if closed and not watched:
            raise TypeError(
                f"forward returned a {type(output).__name__} with a {closed[0]} inside, in which "
                f"no tensor can be found: return tensors, or containers or objects of them"
            )
        return watched

    def _watch(self, tensor: Tensor) -> bool:
        if tensor.is_leaf:  # a weight itself: its own gradient tells, and a hook would stay on it
            return False
        if tensor.grad_fn._sequence_nr() < self.begun:  # type: ignore[union-attr]
            return False  # of before: it was given in a container, which forward returns
        tensor.register_hook(partial(_open, self))
        # Autograd runs what came last first: all that this forward has recorded comes after the
        # hook, also what leads to tensors that it left elsewhere (losses in a list).
        tensor.grad_fn._set_sequence_nr(_sequence_nr())  # type: ignore[union-attr,attr-defined]
        sentinel.view_as(sentinel)  # takes this number: the gate of the next unit goes first
        # Whoever writes to a view (x = linear(x); x += y) takes its node, and the hook, away. What
        # the forward was given, and returns, has a base from before the gate's node.
        base: Any = tensor._base
        own = self.begun + self.gated
        if base is not None and not base.is_leaf and base.grad_fn._sequence_nr() >= own:
            base.register_hook(partial(_open, self))
        return True


class Calls:
    """The calls of one unit that are not done, by state.

    begin        RUNNING
    end          RUNNING to AWAITED where a backward can come, else DONE
    enter        any to OPEN where gradients go on to inputs, visible or hidden, else DONE
    leave        any to DONE: the gradients of its inputs are on their way
    forget       no longer counted among the awaited; a kept graph may still lead into one
    stop         RUNNING and OPEN to DONE
    """

    def __init__(self, modules: Sequence[ref[nn.Module]]) -> None:
        self._modules = modules
        self._begun = 0  # since the unit was at rest; a list of modules has several calls
        self.running: list[Call] = []
        self.awaited: list[Call] = []  # counted, so the same on every rank
        self.open: list[Call] = []

    def begin(self, call: Call) -> None:
        """A forward begins."""
        self._begun += 1
        self.running.append(call)

    def end(self) -> Call | None:
        """Take off the innermost call that runs; None where an exception has dropped it."""
        if not self.running:
            return None
        call = self.running.pop()
        call.state = CallState.DONE
        put_back(call.swaps)
        return call

    @property
    def finished(self) -> bool:
        """Whether none runs, and every module of a list has run."""
        return not self.running and self._begun % len(self._modules) == 0

    @property
    def outside(self) -> bool:
        """Whether one runs that no backward has begun: a backward that comes now is inside it."""
        return any(call.forward for call in self.running)

    def wait_for(self, call: Call) -> None:
        """A backward of ``call`` may come."""
        call.state = CallState.AWAITED
        self.awaited.append(call)

    def enter(self, call: Call, stays: bool) -> None:
        """A backward has come to a call: the first, or one more over a kept graph. ``stays``: no
        gate tells when it has left it again."""
        _remove(self.awaited, call)
        call.state = CallState.OPEN if call.gated or stays else CallState.DONE
        if call.state is CallState.OPEN:
            self.open.append(call)

    def leave(self, call: Call) -> None:
        """The gradients of a call's inputs are on their way."""
        _remove(self.open if call.state is CallState.OPEN else self.awaited, call)
        call.state = CallState.DONE

    def forget(self, forwards: Container[int]) -> None:
        """No backward is expected to come to the calls of these forwards of the root."""
        self.awaited = [call for call in self.awaited if call.forward not in forwards]

    def drop_dead(self, entering: bool) -> bool:
        """Forget calls that an exception ended; whether any was running and none is left.
        ``entering``: one more has begun just now."""
        if not self.running:
            return False
        modules = [module for reference in self._modules if (module := reference()) is not None]
        alive = max(calls_on_stack(modules) - entering, 0)
        while len(self.running) > alive:
            self.end()
        return not self.running

    def stop(self) -> None:
        """No call runs any more, and backward is in none."""
        while self.end() is not None:
            pass
        for call in self.open:
            call.state = CallState.DONE
        self.open, self._begun = [], 0


def _remove(calls: list[Call], call: Call) -> None:
    if call in calls:
        calls.remove(call)


def _open(call: Call, grad: Tensor) -> None:
    unit = call.unit()
    if unit is None:
        raise RuntimeError(
            "backward came to a wrapped module that was deleted since its forward: its gradients "
            "would reach nobody. Keep the model until backward is through"
        )
    unit.pre_backward(call)


class InputsOfAWrappedModule(torch.autograd.Function):
    """Identity on a unit's inputs; its backward tells that the unit's backward computed them all.
    Torch names the class where a module writes to its inputs in place: clone them first."""

    @staticmethod
    def forward(ctx: Any, call: Call, sentinel: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an input that was not read has no gradient
        # DTensors hand over tensors that are still on their way; a compiled graph (torch 2.13)
        # loses the gradients of those.
        return tuple(map(comm.arrived, inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        unit = ctx.call.unit()
        if unit is not None:
            if ctx.call.enters() and any(grad is not None for grad in grads):
                refuse_side_way(unit)  # frozen weights have no gradient that would tell
            unit.inputs_done(ctx.call)
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, call: None, sentinel: None, *tangents: Tensor | None) -> Any:
        return tuple(None if one is None else one.view_as(one) for one in tangents)


# A leaf behind every gate. A backward for all leaves comes to it, with nothing in hand; one for
# chosen inputs (torch.autograd.grad) does not.
sentinel = torch.zeros((), requires_grad=True)
_SENTINEL = torch.autograd.graph.get_gradient_edge(sentinel).node


def reaches_all_leaves() -> bool:
    """Whether the backward that runs now is for all leaves of a graph with a gate in it."""
    return bool(torch._C._will_engine_execute_node(_SENTINEL))  # type: ignore[attr-defined]


def calls_on_stack(modules: Sequence[nn.Module], frame: Any = None) -> int:
    """How many calls of these modules run now, by Python's own stack (this thread's, or that which
    ends in ``frame``). Walks all of it: for rare cases."""
    found, frame = 0, frame or sys._getframe()
    while frame is not None:
        # torch's register_fsdp_forward_method makes methods of that name.
        if frame.f_code in _CALLS or frame.f_code.co_name == "wrapped_method":
            found += any(frame.f_locals.get("self") is module for module in modules)
        frame = frame.f_back
    return found


_CALLS = (nn.Module._call_impl.__code__,)


def engine_on_stack(frame: Any) -> Any:
    """The call of autograd's engine on the stack that ends in ``frame``, the innermost; or None."""
    while frame is not None and frame.f_code is not _ENGINE:
        frame = frame.f_back
    return frame


def asks_for_all() -> bool:
    """Whether the backward that runs now was asked for all leaves, by the call of the engine on the
    stack. Walks all stacks: for graphs without a gate."""
    engines = map(engine_on_stack, [sys._getframe(), *sys._current_frames().values()])
    engine = next(filter(None, engines), None)
    return engine is not None and not engine.f_locals["args"][3]


def will_come(*leaves: Tensor) -> bool:
    """Whether the backward that runs now computes the gradients of parameters, or has them computed
    later; not of those that were frozen since forward."""
    return all(
        getattr(leaf, "delayed", False) or (leaf.requires_grad and is_wanted(leaf))
        for leaf in leaves
    )


def recomputes_inside(unit: Unit) -> bool:
    """Whether the backward that runs now will come to a reentrant checkpoint inside the unit whose
    output it has just reached. Such a one starts a backward of its own: of the parameters that it
    reads the graph knows nothing."""
    return any(type(node).__name__ == _REENTRANT for node in _behind([_node_now()], unit))


def reads_on(unit: Unit) -> bool:
    """Whether backward, which has just reached an output of the unit, may read its frozen weights
    after the last gradient has come: where the graph leads out of the unit through no gate, to
    inputs in an object that cannot be opened, in a closure, in an attribute."""
    ours = set(map(id, unit.arrivals.leaves()))
    kept = not any(group.comes_and_goes for group in unit.groups)
    if kept or not ours or len(ours) == sum(len(group.items) for group in unit.groups):
        return False
    ours.add(id(sentinel))
    for node in _behind([_node_now()], unit):
        leaf = getattr(node, "variable", None)
        if isinstance(getattr(node, "call", None), Call) or not (leaf is None or id(leaf) in ours):
            return True
    return False


@functools.wraps(torch.autograd.graph._engine_run_backward)  # type: ignore[attr-defined]
def _run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """torch's own, for ``backward`` and ``torch.autograd.grad``. Raises where this was asked for
    parameters at rest: forward computed with whole ones, so no graph knows these. And where
    ``torch.autograd.grad`` was asked for whole ones, outside of every forward and backward (an
    inner loop of a module, and checkpoints of others, ask for them inside): nothing reduces it."""
    inputs = args[3] or ()
    asked = {id(one) for one in inputs if isinstance(one, ShardedTensor)}
    roots = [getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in outputs]
    leaves = (getattr(node, "variable", None) for node in _behind(roots if asked else []))
    wholes = [one for one in leaves if isinstance(one, Whole) and id(one._at_rest) in asked]
    why = "parameters at rest, which no graph knows"
    own = [one for one in inputs if isinstance(one, Whole)]
    if own and not wholes and not kwargs.get("accumulate_grad") and not _inside_a_call():
        wholes, why = own, "gathered parameters, whose gradient would be this rank's own"
    if wholes:
        names = f"{', '.join(one.name_here for one in wholes[:4])}{', ...' if wholes[4:] else ''}"
        raise RuntimeError(
            f"torch.autograd.grad or backward(inputs=...) asks for {names} of unit "
            f"{wholes[0]._group.label}, {why}. Call backward() without inputs=, "
            f"requires_grad_(False) on what shall have no gradient, and read .grad"
        )
    return _engine_run(outputs, *args, **kwargs)


def _inside_a_call() -> bool:
    """Whether a backward runs, or the forward of a wrapped module. Walks the stack: for rare
    cases."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code in _CALLS and "_shardwise_unit" in vars(frame.f_locals["self"]):
            return True
        frame = frame.f_back
    return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined,no-any-return]


# Hooks of a backward that a compiled function calls are no part of it.
skip_frames(_run_backward)
_engine_run = torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]
_ENGINE = _engine_run.__code__
for _place in (torch.autograd.graph, torch.autograd):
    _place._engine_run_backward = _run_backward  # type: ignore[attr-defined]


def _behind(waiting: list[Any], until: Unit | None = None) -> Iterator[Any]:
    """The given nodes and all behind them, as far as the gates of the inputs of ``until``."""
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        call = getattr(node, "call", None)
        if node in seen or (isinstance(call, Call) and call.unit() is until):
            continue  # what is behind the gate of its inputs is not inside
        yield node
        seen.add(node)
        waiting += [behind for behind, _ in node.next_functions]


_node_now = torch._C._current_autograd_node  # type: ignore[attr-defined]
_REENTRANT = f"{torch.utils.checkpoint.CheckpointFunction.__name__}Backward"
