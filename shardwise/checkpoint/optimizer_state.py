# SPDX-License-Identifier: Apache-2.0
"""An optimizer's states and groups: as they are saved, and as a load compares and writes them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardwise.checkpoint.errors import CheckpointError, shown
from shardwise.checkpoint.index import Entry
from shardwise.checkpoint.pieces import Stack
from shardwise.checkpoint.reading import Checkpoint
from shardwise.checkpoint.state import State, state_key, tensor_problems
from shardwise.checkpoint.values import encode
from shardwise.layout import Shape
from shardwise.notices import warn_once
from shardwise.optim.muon import MACHINE_SETTINGS, MomentumForm, convert_momentum
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.optim.storage import local_of, version_of
from shardwise.tensor import ShardedTensor

log = logging.getLogger(__name__)

# Options that say how an optimizer computes, not what, or for which parameters: a load leaves the
# optimizer's own in place.
_MACHINE_OPTIONS = frozenset(
    ("foreach", "fused", "capturable", "differentiable", "kind", "param_names", *MACHINE_SETTINGS)
)
_SAME_STEPS = {"AdamW", "ShardedOptimizer", "Muon"}  # classes: their groups say what is computed

# ------------------------------------------------------------------------------ saving


def create_state(optimizer: Optimizer) -> None:
    """Have an optimizer make the state of every trainable parameter now, and change nothing else.

    Otherwise a parameter that has had no gradient yet has no state, on this rank or on all. An
    optimizer with an ``init_state()`` is asked. torch's own make theirs in ``_init_group``, before
    any arithmetic and for parameters with a gradient: each lacking one is lent itself as gradient.
    """
    own: Callable[[], Any] | None = getattr(optimizer, "init_state", None)
    make = getattr(optimizer, "_init_group", None)
    if own is not None:
        own()
    elif make is not None:
        num_lists = len(inspect.signature(make).parameters) - 1
        for group in optimizer.param_groups:
            without = [
                parameter
                for parameter in group["params"]
                if parameter.requires_grad and not optimizer.state.get(parameter)
            ]
            with torch.no_grad(), _lent_gradients(without):
                make({**group, "params": without}, *([] for _ in range(num_lists)))
            for parameter in without:
                # The defaultdict has an entry for each; SGD made no state for some.
                if not optimizer.state[parameter]:
                    del optimizer.state[parameter]


@contextmanager
def _lent_gradients(parameters: list[Tensor]) -> Iterator[None]:
    versions = {id(v): v for p in parameters if (v := version_of(p)) is not None}.values()
    waiting = [version.waiting for version in versions]  # is no gradient; and stays
    for version in versions:
        version.waiting = set()
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = parameter.detach()  # the same memory; nothing is computed with it
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        for version, items in zip(versions, waiting, strict=True):
            version.waiting = items


def add_optimizer(state: State, optimizer: Optimizer) -> dict[str, Any]:
    """Put the optimizer's tensors into ``state``; return its other values, as they are saved."""
    if isinstance(optimizer, ShardedOptimizer) and optimizer.half_step is not None:
        state.problems.append(optimizer.half_step)
    create_state(optimizer)
    state.problems += [
        f"the optimizer's state has an entry {key!r} that belongs to no parameter: a checkpoint "
        f"holds states by the names of parameters; keep it in an option of a group, or in extra"
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor) and value
    ]
    scalars: dict[str, dict[str, Any]] = {}
    tensors: dict[str, list[str]] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        names: list[str] = []
        for parameter in group["params"]:
            name = state.names.get(id(parameter))
            if name is None:
                state.problems.append(_unknown_parameter(f"group {index} of the", parameter))
                continue
            names += state.stored_names(name)
            states = optimizer.state.get(parameter, {})
            for key, value in states.items():
                stack, stored = _state_stack(state, name, key, states)
                for one in stack.everywhere if stack is not None else (name,):
                    if isinstance(value, Tensor):
                        tensors.setdefault(one, []).append(stored)
                    else:
                        scalars.setdefault(one, {})[stored] = value
                full = state_key(name, key)
                for leaf in tree_leaves(value):  # also a tensor in a list
                    if isinstance(leaf, Tensor):
                        state.problems += _piece_problem(full, parameter, leaf)
                if isinstance(value, Tensor):
                    state.add_state(name, key, value, stack, stored)
                    state.problems += tensor_problems(full, value)
                    state.problems += _expert_problem(full, stack, value)
        options, texts = _options(group)
        groups.append({"parameters": names, "options": options, "described": texts})
    kind = type(optimizer).__name__
    return {"class": kind, "groups": groups, "scalars": scalars, "tensors": tensors}


def _state_stack(
    state: State, name: str, key: str, states: Iterable[str]
) -> tuple[Stack | None, str]:
    """How a state of the parameter ``name`` is stored beside experts, and under which key."""
    stack = state.stacks.get(name)
    return (None, key) if stack is None else stack.state(key, states)


def described(optimizer: Optimizer) -> dict[str, Any]:
    """The class and the groups' options for the manifest; what JSON can't hold as text."""
    groups = []
    for group in optimizer.param_groups:
        options, texts = _options(group)
        groups.append({**options, **texts, "num_parameters": len(group["params"])})
    return {"class": type(optimizer).__name__, "groups": groups}


def _unknown_parameter(where: str, parameter: Tensor) -> str:
    return (
        f"{where} optimizer holds a parameter of shape {list(parameter.shape)} that the model does "
        f"not: make the optimizer after wrapping, with model.parameters()"
    )


def _piece_problem(name: str, parameter: Tensor, value: Tensor) -> list[str]:
    """A plain tensor is taken to be the same on every rank; one rank's piece would not be."""
    pieces = isinstance(parameter, ShardedTensor) and parameter.cut.num_holders > 1
    if pieces and not isinstance(value, DTensor) and value.numel() > 1:
        return [
            f"'{name}' is a plain tensor of shape {list(value.shape)} beside a sharded parameter: "
            f"whether it is whole is unknown; make it like the parameter (zeros_like)"
        ]
    return []


def _expert_problem(name: str, stack: Stack | None, value: Tensor) -> list[str]:
    """Experts are stored one by one, so a state of several experts needs a part for each."""
    if stack is None or not stack.grouped or value.dim() == 0 or len(value) == len(stack.here):
        return []
    return [
        f"'{name}' of shape {list(value.shape)} has no part for each of {len(stack.here)} experts, "
        f"which are stored one by one: give every expert a parameter of its own (layout 'indexed')"
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
    """One load into an optimizer: problems are found first, writes are made later.

    States that the optimizer has not made yet are prepared and added to ``state``, so that the
    tensors' load fills them; the optimizer gets them in ``write``.
    """

    def __init__(self, optimizer: Optimizer, state: State, checkpoint: Checkpoint) -> None:
        self.problems: list[str] = []
        self._optimizer, self._state, self._checkpoint = optimizer, state, checkpoint
        self._had_state = {one: bool(found) for one, found in optimizer.state.items()}
        self._kind = type(optimizer).__name__
        self._writes: list[Callable[[], object]] = []

    def compare(self) -> None:
        """Fill ``problems``, and plan the writes if there are none."""
        saved = self._checkpoint.values["optimizer"]
        if saved is None:
            self.problems.append(
                "it holds no optimizer state: load with optimizer=None, or save with one"
            )
            return
        create_state(self._optimizer)
        known: set[str] = set()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self._state.names.get(id(parameter))
                if name is None:
                    self.problems.append(_unknown_parameter("the", parameter))
                    continue
                known |= {*self._state.stored_names(name)}
                self.problems += self._state_problems(name, parameter, saved)
        stored = set(saved["tensors"]) | set(saved["scalars"])
        for name in sorted(stored - known - self._state.tied.keys()):
            self.problems.append(f"unexpected in it: optimizer state of '{name}'")
        if not self.problems:
            self._plan_groups(saved)
        classes = {saved["class"], self._kind}
        if not self.problems and len(classes) > 1 and not classes <= _SAME_STEPS:
            warn_once(
                log,
                "the optimizer is a %s, and its states were saved by a %s, whose steps may be "
                "others: what has the same name was loaded",
                self._kind,
                shown(saved["class"]),
            )

    def write(self) -> None:
        """Change the optimizer, after the tensors of its states were loaded."""
        for write in self._writes:
            write()
        self._optimizer.__setstate__({})  # as torch's load: AdamW's decay stays decoupled, for one
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.half_step = None

    def undo(self) -> None:
        """Remove the states that ``compare`` has made."""
        states = self._optimizer.state
        for parameter in [*states]:
            if parameter not in self._had_state:
                del states[parameter]
            elif not self._had_state[parameter]:
                states[parameter].clear()

    # ------------------------------------------------------------------ states

    def _state_problems(self, name: str, parameter: Tensor, saved: Any) -> list[str]:
        """Compare one parameter's state; prepare what this optimizer has not made yet."""
        stack = self._state.stacks.get(name)
        stored = self._state.stored_name(name)
        tensors = saved["tensors"].get(stored, [])
        scalars = saved["scalars"].get(stored, {})
        wanted = {*tensors, *scalars}
        here: dict[str, Any] = self._optimizer.state.get(parameter, {})
        members = stack.here if stack else (name,)
        for one in members:
            found = {*saved["tensors"].get(one, []), *saved["scalars"].get(one, {})}
            alike = set(saved["tensors"].get(one, [])) == set(tensors)
            if saved["scalars"].get(one, {}) != scalars or not alike:
                return [
                    f"optimizer state of '{one}': {sorted(found) or 'none'} in the checkpoint, and "
                    f"{sorted(wanted) or 'none'} of '{stored}', or other numbers; '{name}' here "
                    f"has one state for all of its experts"
                ]
        index = self._checkpoint.index
        if not here and wanted:
            # This optimizer makes its states later, or never for this parameter.
            here = {
                key: _new_state(parameter, key, index[state_key(stored, key)], stack)
                for key in tensors
            }
            here |= scalars
            self._writes.append(partial(self._optimizer.state.__setitem__, parameter, here))
        elif here and not wanted and saved["class"] == self._kind:
            # The parameter had no state when it was saved, as in a new optimizer.
            self._writes.append(partial(self._optimizer.state.__setitem__, parameter, {}))
            return []
        places = {key: _state_stack(self._state, name, key, here) for key in here}
        mine = {key for _, key in places.values()}
        if mine != wanted:
            return [
                f"optimizer state of '{name}': {sorted(wanted) or 'none'} from {saved['class']} "
                f"in the checkpoint, {sorted(mine) or 'none'} in this {self._kind}"
            ]
        problems = []
        for key, (its_stack, its_key) in places.items():
            if its_key in tensors:
                problems += self._tensor_problems(
                    name, key, here[key], parameter, its_stack, its_key
                )
        for key, value in scalars.items():
            if not _alike(value, here.get(key)):
                self._problem_of(f"'{key}' of the optimizer state of '{name}'", value, here[key])
        if scalars:
            states = self._optimizer.state
            self._writes.append(lambda: states[parameter].update(scalars))
        return problems

    def _tensor_problems(
        self, name: str, key: str, value: Any, parameter: Tensor, stack: Stack | None, stored: str
    ) -> list[str]:
        full, index = state_key(name, key), self._checkpoint.index
        if not isinstance(value, Tensor):
            return [f"'{full}' is a tensor in the checkpoint and a number here"]
        self._state.add_state(name, key, value, stack, stored)
        if stack is None:
            return differences(full, index[full], tuple(value.shape), value.dtype)
        problems = []
        shape, orders = stack.stored_shape(value.shape), self._checkpoint.values["extra_states"]
        usual = ((), self._state.stacks[name].stored_shape(tuple(parameter.shape)))
        if stack.reorders(orders) and shape not in usual:
            problems.append(
                f"'{full}' has shape {list(value.shape)}, not its parameter's: gate and up stand "
                f"in another order in the checkpoint, and which of its rows belong to which is "
                f"unknown; load into a module with that order"
            )
        entries = [index[state_key(one, stored)] for one in stack.here]
        for one, entry in zip(stack.here, entries, strict=True):
            problems += differences(state_key(one, stored), entry, shape, value.dtype)
        if len(entries) > 1 and not shape:
            counts = self._counts(entries)
            if len(counts) > 1:
                problems.append(
                    f"'{key}' of the experts of '{name}' in the checkpoint: {sorted(counts)}, and "
                    f"here they have one for all: load into a module with a parameter for each "
                    f"(layout 'indexed')"
                )
        return problems

    def _counts(self, entries: Sequence[Entry]) -> set[float]:
        """The different values of numbers that are stored as tensors."""
        chunks = [chunk for entry in entries for chunk in entry.chunks]
        return {float(value) for _, value in self._checkpoint.read(chunks)}

    # ------------------------------------------------------------------ groups

    def _plan_groups(self, saved: dict[str, Any]) -> None:
        by_name = {name: group for group in saved["groups"] for name in group["parameters"]}
        every = self._optimizer.param_groups
        found: list[dict[int, dict[str, Any]]] = []  # for each group here, the saved ones, once
        for group in every:
            found.append({})
            for parameter in group["params"]:
                name = self._state.stored_name(self._state.names[id(parameter)])
                if (source := by_name.get(name)) is not None:
                    found[-1][id(source)] = source
                    self._plan_momentum(parameter, name, group, source["options"])
        for index, (group, sources) in enumerate(zip(every, found, strict=True)):
            for source in sources.values():
                _warn_of_objects(index, group, source["described"])
            shared = [not sources.keys().isdisjoint(theirs) for theirs in found]
            parts = [one for one, beside in zip(every, shared, strict=True) if beside]
            options = [source["options"] for source in sources.values()]
            self._plan_options(index, group, options, parts)

    def _plan_options(
        self,
        index: int,
        group: dict[str, Any],
        sources: list[dict[str, Any]],
        parts: list[dict[str, Any]],
    ) -> None:
        """Options of the saved groups whose parameters this group holds. ``parts`` are the groups
        here that share these saved ones; this group is among them."""
        for key in {key: None for source in sources for key in source}:
            values = [source[key] for source in sources if key in source]
            current = str(group[key]) if key == "function" and key in group else group.get(key)
            if key in _MACHINE_OPTIONS:
                continue
            other = key == "function" and any(value != current for value in values)
            if other or not all(_alike(value, current) for value in values):
                self._problem_of(f"'{key}' of group {index} of the optimizer", values[0], current)
            elif _differ(values) or _differ([part.get(key) for part in parts]):
                warn_once(
                    log,
                    "group %d of the optimizer joins parameters that were saved with different "
                    "'%s', or shares a saved group with one of another '%s'; it keeps its own, %s",
                    index,
                    key,
                    key,
                    current,
                )
            elif isinstance(current, Tensor):
                new = torch.as_tensor(values[0], device="cpu").to(current)
                self._writes.append(partial(current.copy_, new))
            elif key != "function":  # it is the same
                self._writes.append(partial(group.__setitem__, key, values[0]))

    def _plan_momentum(
        self, parameter: Tensor, name: str, group: dict[str, Any], saved: dict[str, Any]
    ) -> None:
        """Convert momentum that was saved in the other form to this group's, once loaded."""
        form, before = group.get("momentum_form"), saved.get("momentum_form")
        if form == before:
            return
        known = before in get_args(MomentumForm) and type(saved.get("momentum")) is float
        if form is None or before is None or not known:  # of one of torch's optimizers, for one
            self.problems.append(f"'{name}' has momentum of an unknown form in it, or here")
            return

        def convert() -> None:
            own = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            if own is not None:
                convert_momentum(local_of(own), saved["momentum"], before, form)

        self._writes.append(convert)

    def _problem_of(self, name: str, saved: Any, current: Any) -> None:
        self.problems.append(f"{name} is {shown(saved)} in it, {shown(current)} here")


def differences(name: str, entry: Entry, shape: Shape, dtype: torch.dtype) -> list[str]:
    """The problems of loading a saved tensor into one of this shape and dtype."""
    problems = []
    if entry.shape != tuple(shape):
        problems.append(
            f"'{name}' has shape {list(entry.shape)} in it, {list(shape)} in this model"
        )
    # Wider is exact: 16-bit weights of a model whose main weights are fp32 here.
    wider = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
    if entry.dtype != dtype and not (wider and torch.promote_types(entry.dtype, dtype) == dtype):
        problems.append(
            f"'{name}' is {entry.dtype} in it, {dtype} here: load in the saved dtype and "
            f"convert afterwards"
        )
    return problems


def _new_state(parameter: Tensor, key: str, entry: Entry, stack: Stack | None) -> Tensor:
    """A state in the layout of its parameter, or a plain tensor for a count beside it."""
    shape = stack.live_shape(entry.shape) if stack else entry.shape
    if shape == tuple(parameter.shape) and (entry.shape or key != "step"):
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")


def _differ(values: list[Any]) -> bool:
    """Whether options of several groups are not the same; objects are never compared."""
    try:
        first, *others = (encode(value, "") for value in values)
    except CheckpointError:
        return False
    return any(other != first for other in others)


def _alike(saved: Any, current: Any) -> bool:
    """Whether a saved value is of a kind that can replace the current one: number, text..."""
    kinds = {_kind(saved), _kind(current)}
    if isinstance(current, Tensor):
        fits = not isinstance(saved, Tensor) or saved.shape in ((), current.shape)
        return kinds == {"number"} and fits
    if isinstance(saved, tuple | list) and isinstance(current, tuple | list) and current:
        return len(saved) == len(current) and all(map(_alike, saved, current))
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
                "group %d of the optimizer has %s=%r, which was %s when it was saved: an object "
                "that a checkpoint can't bring back",
                index,
                key,
                group.get(key),
                shown(text),
            )
