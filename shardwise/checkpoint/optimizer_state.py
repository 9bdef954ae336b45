# SPDX-License-Identifier: Apache-2.0
"""An optimizer's states and options: as they are saved, and as a load compares and writes them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint.errors import CheckpointError, shown
from shardwise.checkpoint.manifest import Manifest, OptimizerValues
from shardwise.checkpoint.pieces import Entry, key_text
from shardwise.checkpoint.state import Held, State
from shardwise.checkpoint.values import encode
from shardwise.core.compat import tree_leaves
from shardwise.core.tensor import ShardedTensor
from shardwise.optim.muon import MACHINE_SETTINGS
from shardwise.optim.storage import buffer_of

log = logging.getLogger(__name__)

# Options that say how an optimizer computes, but not its results: a load does not change these.
_MACHINE_OPTIONS = frozenset(
    ("foreach", "fused", "capturable", "differentiable", "kind", "param_names", *MACHINE_SETTINGS)
)


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
    waiting = [{*buffer.waiting} for buffer in buffers]  # gradients to come, which stay to come
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = parameter.detach()  # the same memory, which nothing reads or writes
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        for buffer, items in zip(buffers, waiting, strict=True):
            buffer.waiting |= items


def _named(optimizer: Optimizer, state: State) -> Iterator[tuple[int, Tensor, str]]:
    """(number of the group, parameter, its name) for the parameters of the model; others are
    problems."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if (name := state.names.get(id(parameter))) is not None:
                yield index, parameter, name
                continue
            state.problems.append(
                f"group {index} of the optimizer holds a parameter of shape "
                f"{list(parameter.shape)} that the model does not hold: make the optimizer after "
                f"wrapping, with model.parameters()"
            )


# ------------------------------------------------------------------------------ saving


def add_optimizer(state: State, optimizer: Optimizer) -> OptimizerValues:
    """Add the optimizer's tensors to ``state``; return its other values, by parameter."""
    create_state(optimizer)
    state.problems += [
        f"the optimizer's state has an entry {key!r} that belongs to no parameter, and states are "
        f"stored by the names of parameters: keep it in an option of a group, or in extra"
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor) and value
    ]
    parameters: dict[str, int] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, parameter, name in _named(optimizer, state):
        parameters[state.stored_name(name)] = index
        states = optimizer.state.get(parameter, {})
        for key, value in states.items():
            if isinstance(value, Tensor):
                held = state.add(name, value, key, states)
                state.problems += _piece_problems(held, parameter)
            elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                state.problems.append(
                    f"'{key}' of the optimizer state of '{name}' is a {type(value).__name__} with "
                    f"tensors inside, which may be pieces: keep each tensor under a key"
                )
            else:
                scalars.setdefault(state.stored_name(name), {})[key] = value
    try:
        encode(scalars, "the optimizer's scalars")
    except CheckpointError as error:
        state.problems.append(str(error))
    return OptimizerValues(
        kind=type(optimizer).__name__,
        options=[_options(group) for group in optimizer.param_groups],
        parameters=parameters,
        scalars=scalars,
    )


def _piece_problems(held: Held, parameter: Tensor) -> list[str]:
    """The problem with a plain tensor that may be a piece: a save takes it from a single rank."""
    sharded = isinstance(parameter, ShardedTensor) and parameter.cut.num_holders > 1
    if sharded and not isinstance(held.tensor, DTensor) and held.tensor.numel() > 1:
        return [
            f"'{key_text(held.key)}' is a plain tensor of shape {list(held.tensor.shape)} beside a "
            f"sharded parameter, and may be whole or a piece: make it like the parameter "
            f"(zeros_like)"
        ]
    return []


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that JSON can hold. Objects are left out: a load keeps its own."""
    options = {}
    for key, value in group.items():
        with suppress(CheckpointError):
            encode(value if key != "params" else {}, key)
            options[key] = value
    del options["params"]
    return options


# ------------------------------------------------------------------------------ loading


class OptimizerLoad:
    """A load into an optimizer: ``compare`` finds all problems, ``write`` makes all changes.

    ``compare`` creates states that the optimizer does not have yet and adds them to ``state``, so
    that the load of the tensors fills them. ``undo`` removes them.
    """

    def __init__(self, optimizer: Optimizer, state: State, manifest: Manifest) -> None:
        self.differences: list[str] = []  # from the optimizer that was saved
        self._optimizer, self._state, self._manifest = optimizer, state, manifest
        self._before = {key: {**value} for key, value in optimizer.state.items() if value}
        self._writes: list[Callable[[], object]] = []

    def compare(self) -> None:
        """Add what does not fit to the problems of the state, and plan the writes."""
        saved, problems = self._manifest.optimizer, self._state.problems
        if saved is None:
            problems.append(
                "it holds no optimizer state: load with optimizer=None, or save with one"
            )
            return
        create_state(self._optimizer)
        kind = type(self._optimizer).__name__
        of_groups: dict[int, dict[int, None]] = {}  # rows of saved options, in order
        expected: set[str] = set()
        for index, parameter, name in _named(self._optimizer, self._state):
            stored = self._manifest.saved_name(self._state.stored_name(name))
            expected |= {stored, self._state.stored_name(name)}
            if (row := saved.parameters.get(stored)) is not None:
                of_groups.setdefault(index, {})[row] = None
            self._compare_states(parameter, name, stored, saved, kind)
        states = self._manifest.states.keys() | saved.scalars.keys()
        problems += [
            f"unexpected in it: optimizer state of '{name}'"
            for name in sorted(states - expected - self._state.tied.keys())
        ]
        for index, rows in of_groups.items():
            group = self._optimizer.param_groups[index]
            self._plan_options(index, group, [saved.options[row] for row in rows])
        if kind != saved.kind:
            self.differences.append(f"the optimizer was a {shown(saved.kind)}")

    def _compare_states(
        self, parameter: Tensor, name: str, stored: str, saved: OptimizerValues, kind: str
    ) -> None:
        """Compare one parameter's states; create them if this optimizer has none yet."""
        of = self._state.experts.get(name)
        tensors = self._manifest.states.get(stored, {})
        if of is not None:
            found = {key: entry.experts_among(of.first, of.count) for key, entry in tensors.items()}
            if any(0 < count < of.count for count in found.values()):
                self._state.problems.append(
                    f"optimizer state of '{name}': only some of its experts have it in the "
                    f"checkpoint: load into a module with a parameter for each (layout 'indexed')"
                )
                return
            tensors = {key: entry for key, entry in tensors.items() if found[key]}
        scalars = saved.scalars.get(stored, {})
        states: dict[str, Any] = self._optimizer.state.get(parameter, {})
        if states and not tensors and not scalars and saved.kind == kind:
            # The parameter had no state when it was saved, as in a new optimizer.
            self._writes.append(partial(self._optimizer.state.__setitem__, parameter, {}))
            return
        if not states and (tensors or scalars):  # it makes them later, or never for this parameter
            states = {key: self._new(parameter, key, tensors[key], name) for key in sorted(tensors)}
            self._optimizer.state[parameter] = states = {**states, **scalars}
        held = {
            key: self._state.add(name, value, key, states)
            for key, value in states.items()
            if isinstance(value, Tensor)
        }
        here, others = {one.key[1] for one in held.values()}, states.keys() - held.keys()
        if here != tensors.keys() or others != scalars.keys():
            self._state.problems.append(
                f"optimizer state of '{name}': {sorted({*tensors, *scalars}) or 'none'} from "
                f"{saved.kind} in the checkpoint, {sorted(here | others) or 'none'} in this {kind}"
            )
            return
        for key, value in scalars.items():
            if not _replaces(value, states[key]):
                what = f"'{key}' of the optimizer state of '{name}'"
                self._state.problems.append(f"{what} is {shown(value)} in it, not as here")
        if scalars:
            self._writes.append(lambda: self._optimizer.state[parameter].update(scalars))

    def _new(self, parameter: Tensor, key: str, saved: Entry, name: str) -> Tensor:
        """A new state in the layout of its parameter, or a plain tensor if it has another shape."""
        of, shape = self._state.experts.get(name), saved.shape
        if saved.shape == Held(("", ""), parameter, of).shape and (saved.shape or key != "step"):
            return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
        if of is not None:
            shape = (of.count, *shape[1:]) if of.grouped and shape[1:] else shape[1:]
        return torch.zeros(shape, dtype=saved.dtype, device="cpu")

    def _plan_options(self, index: int, group: dict[str, Any], saved: list[dict[str, Any]]) -> None:
        """A group takes the options that all of its parameters were saved with."""
        for key in {key: None for options in saved for key in options}:
            values = [options[key] for options in saved if key in options]
            current = group.get(key)
            if key in _MACHINE_OPTIONS:
                continue
            what = f"'{key}' of group {index} of the optimizer"
            same = key == "function" and any(value != current for value in values)
            if same or not all(_replaces(value, current) for value in values):
                text = f"{what} is {shown(values[0])} in it, {shown(current)} here"
                self._state.problems.append(text)
            elif any(encode(value, key) != encode(values[0], key) for value in values):
                self.differences.append(f"{what} was not loaded")
                log.warning(
                    "%s had several values when it was saved, and keeps its own: %s", what, current
                )
            elif isinstance(current, Tensor):
                new = torch.as_tensor(values[0], device="cpu").to(current)
                self._writes.append(partial(current.copy_, new))
            else:
                self._writes.append(partial(group.__setitem__, key, values[0]))

    def write(self) -> None:
        """Change the optimizer, after the tensors of its states were loaded."""
        for write in self._writes:
            write()
        self._optimizer.__setstate__({})  # as torch's load does: keeps AdamW's decay decoupled

    def undo(self) -> None:
        """Remove the states that ``compare`` has made."""
        states = self._optimizer.state
        for key in [key for key in states if key not in self._before]:
            del states[key]


def _replaces(saved: Any, current: Any) -> bool:
    """Whether a saved value can replace the current value: both are numbers, or texts, ..."""
    if saved is None or current is None:
        return True
    kinds: list[Any] = [(bool, int, float, Tensor), (tuple, list), str, dict]
    if not any(isinstance(saved, kind) and isinstance(current, kind) for kind in kinds):
        return type(saved) is type(current)
    if isinstance(current, tuple | list) and current:
        return len(saved) == len(current) and all(map(_replaces, saved, current))
    return not isinstance(saved, Tensor) or saved.shape in ((), torch.as_tensor(current).shape)
