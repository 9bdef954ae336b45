# SPDX-License-Identifier: Apache-2.0
"""An optimizer's states and groups: as they are saved, and as a load compares and writes them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint.errors import CheckpointError, shown
from shardwise.checkpoint.manifest import OptimizerValues, state_key
from shardwise.checkpoint.pieces import Stack
from shardwise.checkpoint.reading import Checkpoint, Sizes
from shardwise.checkpoint.state import State, tensor_problems
from shardwise.checkpoint.values import encode
from shardwise.core.compat import tree_leaves
from shardwise.core.layout import Shape
from shardwise.core.tensor import ShardedTensor
from shardwise.notices import warn_once
from shardwise.optim.muon import MACHINE_SETTINGS
from shardwise.optim.storage import buffer_of

log = logging.getLogger(__name__)

# Options that say how an optimizer computes, but not its results: a load does not change these.
_MACHINE_OPTIONS = frozenset(
    ("foreach", "fused", "capturable", "differentiable", "kind", "param_names", *MACHINE_SETTINGS)
)
# Classes whose states can be exchanged: the options of the groups define the steps.
_SAME_STEPS = {"AdamW", "ShardedOptimizer", "Muon"}

# ------------------------------------------------------------------------------ saving


def create_state(optimizer: Optimizer) -> None:
    """Make an optimizer create the state of every trainable parameter now, and nothing else.

    Otherwise a parameter that has had no gradient yet has no state, on this rank or on all. This
    calls ``init_state()`` if the optimizer has it. The optimizers of torch create states in
    ``_init_group``, before any arithmetic, for parameters that have a gradient. So each parameter
    without a state gets itself as its gradient for the time of the call.
    """
    init_state: Callable[[], Any] | None = getattr(optimizer, "init_state", None)
    init_group = getattr(optimizer, "_init_group", None)
    if init_state is not None:
        init_state()
    elif init_group is not None:
        num_lists = len(inspect.signature(init_group).parameters) - 1
        for group in optimizer.param_groups:
            without = [
                parameter
                for parameter in group["params"]
                if parameter.requires_grad and not optimizer.state.get(parameter)
            ]
            with torch.no_grad(), _own_values_as_gradients(without):
                init_group({**group, "params": without}, *([] for _ in range(num_lists)))
            for parameter in without:
                # Reading the defaultdict made an entry, also where SGD has no state.
                if not optimizer.state[parameter]:
                    del optimizer.state[parameter]


@contextmanager
def _own_values_as_gradients(parameters: list[Tensor]) -> Iterator[None]:
    buffers = {id(b): b for p in parameters if (b := buffer_of(p)) is not None}.values()
    waiting = [buffer.waiting for buffer in buffers]  # gradients to come, which stay to come
    for buffer in buffers:
        buffer.waiting = set()
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = parameter.detach()  # the same memory, which nothing reads or writes
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        for buffer, items in zip(buffers, waiting, strict=True):
            buffer.waiting = items


def add_optimizer(state: State, optimizer: Optimizer) -> OptimizerValues:
    """Add the optimizer's tensors to ``state``; return its other values, by parameter."""
    create_state(optimizer)
    state.problems += [
        f"the optimizer's state has an entry {key!r} that belongs to no parameter, and states are "
        f"stored by the names of parameters: keep it in an option of a group, or in extra"
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor) and value
    ]
    rows = [_options(group) for group in optimizer.param_groups]
    parameters: dict[str, int] = {}
    scalars: dict[str, dict[str, Any]] = {}
    tensors: dict[str, list[str]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = state.names.get(id(parameter))
            if name is None:
                state.problems.append(_unknown_parameter(f"group {index} of the", parameter))
                continue
            parameters |= dict.fromkeys(state.stored_names(name), index)
            states = optimizer.state.get(parameter, {})
            for key, value in states.items():
                stack, stored = _state_stack(state, name, key, states)
                for stored_name in stack.stored if stack is not None else (name,):
                    if isinstance(value, Tensor):
                        tensors.setdefault(stored_name, []).append(stored)
                    else:
                        scalars.setdefault(stored_name, {})[stored] = value
                full = state_key(name, key)
                for leaf in tree_leaves(value):  # also a tensor in a list
                    if isinstance(leaf, Tensor):
                        state.problems += _piece_problem(full, parameter, leaf)
                if isinstance(value, Tensor):
                    state.add_state(name, key, value, stack, stored)
                    state.problems += tensor_problems(full, value)
                    state.problems += _expert_problem(full, stack, value)
    for where, part in (("options", [row for row, _ in rows]), ("scalars", scalars)):
        try:
            encode(part, f"the optimizer's {where}")
        except CheckpointError as error:
            state.problems.append(str(error))
    table: dict[tuple[str, ...], int] = {}
    found = {name: table.setdefault(tuple(keys), len(table)) for name, keys in tensors.items()}
    return OptimizerValues(
        kind=type(optimizer).__name__,
        options=[options for options, _ in rows],
        described=[texts for _, texts in rows],
        parameters=parameters,
        states=[list(keys) for keys in table],
        tensors=found,
        scalars=scalars,
    )


def _state_stack(
    state: State, name: str, key: str, states: Iterable[str]
) -> tuple[Stack | None, str]:
    """The stack of a state of the parameter ``name`` if it belongs to experts, and the key under
    which the state is stored."""
    stack = state.stacks.get(name)
    return (None, key) if stack is None else stack.state(key, states)


def _unknown_parameter(where: str, parameter: Tensor) -> str:
    return (
        f"{where} optimizer holds a parameter of shape {list(parameter.shape)} that the model does "
        f"not hold: make the optimizer after wrapping, with model.parameters()"
    )


def _piece_problem(name: str, parameter: Tensor, value: Tensor) -> list[str]:
    """The problem with a plain tensor that may be a piece: a save takes it from a single rank."""
    sharded = isinstance(parameter, ShardedTensor) and parameter.cut.num_holders > 1
    if sharded and not isinstance(value, DTensor) and value.numel() > 1:
        return [
            f"'{name}' is a plain tensor of shape {list(value.shape)} beside a sharded parameter, "
            f"and may be a whole tensor or a piece: make it like the parameter (zeros_like)"
        ]
    return []


def _expert_problem(name: str, stack: Stack | None, value: Tensor) -> list[str]:
    """The problem with a state of several experts that has no part for each of them."""
    if stack is None or not stack.grouped or value.dim() == 0 or len(value) == len(stack.here):
        return []
    return [
        f"'{name}' of shape {list(value.shape)} has no part for each of {len(stack.here)} experts, "
        f"which are stored one by one: give every expert a separate parameter (layout 'indexed')"
    ]


def _options(group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of a group that JSON can hold, and the others as text."""
    options, texts = {}, {}
    for key, value in group.items():
        if key == "params":
            continue
        try:
            encode(value, key)
        except CheckpointError:
            texts[key] = repr(value)
        else:
            options[key] = value
    return options, texts


# ------------------------------------------------------------------------------ loading


class OptimizerLoad:
    """A load into an optimizer: ``compare`` finds all problems, ``write`` makes all changes.

    ``compare`` creates states that the optimizer does not have yet and adds them to ``state``, so
    that the load of the tensors fills them. ``write`` gives them to the optimizer.
    """

    def __init__(self, optimizer: Optimizer, state: State, checkpoint: Checkpoint) -> None:
        self.problems: list[str] = []
        self.differences: list[str] = []  # from the optimizer that was saved
        self._optimizer, self._state, self._checkpoint = optimizer, state, checkpoint
        self._had_state = {key: bool(value) for key, value in optimizer.state.items()}
        self._kind = type(optimizer).__name__
        self._writes: list[Callable[[], object]] = []

    def compare(self) -> None:
        """Fill ``problems``; if there are none, plan the writes."""
        saved = self._checkpoint.manifest.optimizer
        if saved is None:
            self.problems.append(
                "it holds no optimizer state: load with optimizer=None, or save with one"
            )
            return
        create_state(self._optimizer)
        expected: set[str] = set()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self._state.names.get(id(parameter))
                if name is None:
                    self.problems.append(_unknown_parameter("the", parameter))
                    continue
                stack = self._state.stacks.get(name)
                for one in (name, *stack.everywhere) if stack else (name,):
                    expected |= {*self._checkpoint.manifest.names(one)}
                self.problems += self._state_problems(name, parameter, saved)
        stored = saved.tensors.keys() | saved.scalars.keys()
        for name in sorted(stored - expected - self._state.tied.keys()):
            self.problems.append(f"unexpected in it: optimizer state of '{name}'")
        if not self.problems:
            self._plan_groups(saved)
        classes = {saved.kind, self._kind}
        if len(classes) > 1:
            self.differences.append(f"the optimizer was a {shown(saved.kind)}")
        if not self.problems and len(classes) > 1 and not classes <= _SAME_STEPS:
            warn_once(
                log,
                "the optimizer is a %s, and its states were saved by a %s, which may compute other "
                "steps: states with equal names were loaded",
                self._kind,
                shown(saved.kind),
            )

    def write(self) -> None:
        """Change the optimizer, after the tensors of its states were loaded."""
        for write in self._writes:
            write()
        self._optimizer.__setstate__({})  # as torch's load does: keeps AdamW's decay decoupled

    def undo(self) -> None:
        """Remove the states that ``compare`` has made."""
        states = self._optimizer.state
        for parameter in [*states]:
            if parameter not in self._had_state:
                del states[parameter]
            elif not self._had_state[parameter]:
                states[parameter].clear()

    # ------------------------------------------------------------------ states

    def _saved_states(self, name: str) -> tuple[set[str], dict[str, Any]]:
        """The keys of the saved states of a parameter that are tensors, and the other states."""
        saved = self._checkpoint.manifest.optimizer
        assert saved is not None
        tensors: set[str] = set()
        scalars: dict[str, Any] = {}
        for one in self._checkpoint.manifest.names(name):
            tensors |= {*(saved.states[saved.tensors[one]] if one in saved.tensors else ())}
            scalars |= saved.scalars.get(one, {})
        return tensors, scalars

    def _state_problems(self, name: str, parameter: Tensor, saved: OptimizerValues) -> list[str]:
        """Compare one parameter's state; create the state if this optimizer has none yet."""
        stack = self._state.stacks.get(name)
        stored = self._state.stored_name(name)
        tensors, scalars = self._saved_states(stored)
        saved_keys = {*tensors, *scalars}
        states: dict[str, Any] = self._optimizer.state.get(parameter, {})
        for expert in stack.here[1:] if stack else ():
            others = self._saved_states(expert)
            if others != (tensors, scalars):
                return [
                    f"optimizer state of '{expert}': {sorted({*others[0], *others[1]}) or 'none'} "
                    f"in the checkpoint, and {sorted(saved_keys) or 'none'} of '{stored}', or "
                    f"other numbers; '{name}' here has one state for all of its experts"
                ]
        if not states and saved_keys:
            # This optimizer creates its states later, or never for this parameter.
            states = {
                key: _new_state(parameter, key, self._checkpoint.sizes(stored, key), stack)
                for key in sorted(tensors)
            }
            states |= scalars
            self._writes.append(partial(self._optimizer.state.__setitem__, parameter, states))
        elif states and not saved_keys and saved.kind == self._kind:
            # The parameter had no state when it was saved, as in a new optimizer.
            self._writes.append(partial(self._optimizer.state.__setitem__, parameter, {}))
            return []
        places = {key: _state_stack(self._state, name, key, states) for key in states}
        keys = {stored_key for _, stored_key in places.values()}
        if keys != saved_keys:
            return [
                f"optimizer state of '{name}': {sorted(saved_keys) or 'none'} from "
                f"{saved.kind} in the checkpoint, {sorted(keys) or 'none'} in this {self._kind}"
            ]
        problems = []
        for key, place in places.items():
            if place[1] in tensors:
                problems += self._tensor_problems(name, key, states[key], parameter, *place)
        for key, value in scalars.items():
            if not _replaces(value, states.get(key)):
                self._problem_of(f"'{key}' of the optimizer state of '{name}'", value, states[key])
        if scalars:
            self._writes.append(lambda: self._optimizer.state[parameter].update(scalars))
        return problems

    def _tensor_problems(
        self, name: str, key: str, value: Any, parameter: Tensor, stack: Stack | None, stored: str
    ) -> list[str]:
        full = state_key(name, key)
        if not isinstance(value, Tensor):
            return [f"'{full}' is a tensor in the checkpoint and a number here"]
        self._state.add_state(name, key, value, stack, stored)
        checkpoint = self._checkpoint
        if stack is None:
            saved = checkpoint.sizes(name, stored)
            return differences(full, saved, tuple(value.shape), value.dtype)
        problems = []
        shape, orders = stack.expert_shape(tuple(value.shape)), checkpoint.manifest.extra_states
        parameter_shape = self._state.stacks[name].expert_shape(tuple(parameter.shape))
        if stack.reorders(orders) and shape not in ((), parameter_shape):
            problems.append(
                f"'{full}' has shape {list(value.shape)}, not that of its parameter. Gate and up "
                f"have another order in the checkpoint, and it is unknown which rows of this state "
                f"belong to gate: load into a module with that order"
            )
        for expert in stack.here:
            found = checkpoint.sizes(expert, stored)
            problems += differences(state_key(expert, stored), found, shape, value.dtype)
        if len(stack.here) > 1 and not shape and not problems:
            counts = {float(count) for count in checkpoint.read_all(stack.here, stored)}
            if len(counts) > 1:
                problems.append(
                    f"'{key}' of the experts of '{name}' in the checkpoint: {sorted(counts)}, and "
                    f"here they have one for all: load into a module with a parameter for each "
                    f"(layout 'indexed')"
                )
        return problems

    # ------------------------------------------------------------------ groups

    def _plan_groups(self, saved: OptimizerValues) -> None:
        """A group takes the options that all of its parameters were saved with."""
        for index, group in enumerate(self._optimizer.param_groups):
            rows = set()
            for parameter in group["params"]:
                name = self._state.stored_name(self._state.names[id(parameter)])
                for one in self._checkpoint.manifest.names(name):
                    if (row := saved.parameters.get(one)) is not None:
                        rows.add(row)
                        break
            for row in sorted(rows):
                _warn_of_objects(index, group, saved.described[row])
            self._plan_options(index, group, [saved.options[row] for row in sorted(rows)])

    def _plan_options(self, index: int, group: dict[str, Any], saved: list[dict[str, Any]]) -> None:
        for key in {key: None for options in saved for key in options}:
            values = [options[key] for options in saved if key in options]
            current = str(group[key]) if key == "function" and key in group else group.get(key)
            if key in _MACHINE_OPTIONS:
                continue
            other_function = key == "function" and any(value != current for value in values)
            if other_function or not all(_replaces(value, current) for value in values):
                self._problem_of(f"'{key}' of group {index} of the optimizer", values[0], current)
            elif _differ(values):
                self.differences.append(f"'{key}' of group {index} of the optimizer was not loaded")
                warn_once(
                    log,
                    "group %d of the optimizer joins parameters that were saved with different "
                    "'%s': it keeps its value, %s",
                    index,
                    key,
                    current,
                )
            elif isinstance(current, Tensor):
                new = torch.as_tensor(values[0], device="cpu").to(current)
                self._writes.append(partial(current.copy_, new))
            elif key != "function":  # the functions are equal
                self._writes.append(partial(group.__setitem__, key, values[0]))

    def _problem_of(self, name: str, saved: Any, current: Any) -> None:
        self.problems.append(f"{name} is {shown(saved)} in it, {shown(current)} here")


def differences(name: str, saved: Sizes | None, shape: Shape, dtype: torch.dtype) -> list[str]:
    """The problems of loading a saved tensor into one of this shape and dtype."""
    if saved is None:
        return [f"missing from it: '{name}' {list(shape)}"]
    problems = []
    if saved.shape != tuple(shape):
        problems.append(
            f"'{name}' has shape {list(saved.shape)} in it, {list(shape)} in this model"
        )
    # A wider dtype is exact: 16-bit weights can be loaded into fp32 main weights.
    floating = saved.dtype.is_floating_point and saved.dtype.itemsize > 1
    wider = floating and torch.promote_types(saved.dtype, dtype) == dtype
    if saved.dtype != dtype and not wider:
        problems.append(
            f"'{name}' is {saved.dtype} in it, {dtype} here: load in the saved dtype and "
            f"convert afterwards"
        )
    return problems


def _new_state(parameter: Tensor, key: str, saved: Sizes | None, stack: Stack | None) -> Tensor:
    """A new state in the layout of its parameter, or a plain tensor if it has another shape."""
    assert saved is not None, "the manifest lists it"
    shape = stack.live_shape(saved.shape) if stack else saved.shape
    if shape == tuple(parameter.shape) and (saved.shape or key != "step"):
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype, device="cpu")


def _differ(values: list[Any]) -> bool:
    """Whether the options of several groups differ. Objects count as equal."""
    try:
        first, *others = (encode(value, "") for value in values)
    except CheckpointError:
        return False
    return any(other != first for other in others)


def _replaces(saved: Any, current: Any) -> bool:
    """Whether a saved value can replace the current value: both are numbers, or texts, ..."""
    kinds = {_kind(saved), _kind(current)}
    if isinstance(current, Tensor):
        fits = not isinstance(saved, Tensor) or saved.shape in ((), current.shape)
        return kinds == {"number"} and fits
    if isinstance(saved, tuple | list) and isinstance(current, tuple | list) and current:
        return len(saved) == len(current) and all(map(_replaces, saved, current))
    return len(kinds - {"nothing"}) <= 1


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool | int | float | Tensor | numpy.generic | numpy.ndarray):
        return "number"
    return "sequence" if isinstance(value, tuple | list) else type(value).__name__


def _warn_of_objects(index: int, group: dict[str, Any], described: dict[str, str]) -> None:
    for key, text in described.items():
        if repr(group.get(key)) != text:
            warn_once(
                log,
                "group %d of the optimizer has %s=%r, and had %s when it was saved: a checkpoint "
                "can't restore such an object",
                index,
                key,
                group.get(key),
                shown(text),
            )
