# SPDX-License-Identifier: Apache-2.0
"""A model and its optimizer as named tensors and plain values, whatever they are wrapped in.

    model.blocks.0.up.weight                            a parameter or a persistent buffer
    optimizer.state.blocks.0.up.weight.exp_avg          a state, under the name of its parameter
    state.json                                          groups, options, tied names, scalars

Names are those of the module tree, so neither the order of an optimizer's groups nor a wrapper
shows in a checkpoint. The tensors are the live ones: a save reads them, a load writes them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.experts import Stack, stacks_of
from shardwise.checkpoint.values import dtype_name, encode
from shardwise.optim.muon import MACHINE_SETTINGS, MomentumForm, convert_momentum
from shardwise.optim.storage import local_of
from shardwise.shard.module import units_of
from shardwise.tensor import ShardedTensor

log = logging.getLogger(__name__)

_EXTRA = "_extra_state"
# How an optimizer computes is a matter of the machine; what it computes, of the run. These stay as
# they are in the optimizer that loads.
_MACHINE_OPTIONS = frozenset(
    ("foreach", "fused", "capturable", "differentiable", "kind", *MACHINE_SETTINGS)
)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass
class State:
    """Tensors by key; everything else as values; and all that stands in the way."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)  # may differ between ranks: rank 0's count
    tied: dict[str, str] = field(default_factory=dict)  # a further name -> the one that is saved
    extra_states: dict[str, Any] = field(default_factory=dict)  # of modules that have any
    names: dict[int, str] = field(default_factory=dict)  # of parameters, by identity
    dtypes: dict[str, str] = field(default_factory=dict)  # came with, where main has another
    stacks: dict[str, Stack] = field(default_factory=dict)  # expert parameters, by name
    members: dict[str, Stack] = field(default_factory=dict)  # how their tensors are stored, by key
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, rename: Callable[[str], str], tensor: Tensor) -> str:
        """A tensor of the parameter ``name`` (or a buffer); its key."""
        key = rename(name)
        self.tensors[key] = tensor
        if name in self.stacks:
            self.members[key] = self.stacks[name].renamed(rename)
        return key

    def stored_names(self, name: str) -> tuple[str, ...]:
        """What a parameter is called in a checkpoint: on all ranks, by expert where it has any."""
        return self.stacks[name].everywhere if name in self.stacks else (name,)

    def stored_name(self, name: str) -> str:
        """The first of those that are here."""
        return self.stacks[name].here[0] if name in self.stacks else name

    @property
    def stored_keys(self) -> frozenset[str]:
        """Of the tensors of all ranks."""
        alone = self.tensors.keys() - self.members.keys()
        return frozenset(alone).union(*(stack.everywhere for stack in self.members.values()))


def model_key(name: str) -> str:
    return f"model.{name}"


def state_key(name: str, key: str) -> str:
    return f"optimizer.state.{name}.{key}"


# ------------------------------------------------------------------------------ the model


def unwrapped(model: nn.Module) -> nn.Module:
    """Without DistributedDataParallel and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def clean(name: str) -> str:
    """The name that a parameter would have without wrappers inside the model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def of_model(model: nn.Module) -> State:
    """Parameters and persistent buffers. Weights that are kept gathered go to rest first."""
    model = unwrapped(model)
    state = State(stacks=stacks_of(model, clean))
    parameters = {id(parameter) for parameter in model.parameters()}
    first_name: dict[int, str] = {}
    live = model.state_dict(keep_vars=True)  # the registered objects themselves
    parameters |= {id(parameter) for parameter in model.parameters()}  # now at rest
    buffers = {id(buffer) for buffer in model.buffers()}
    for raw_name, value in live.items():
        name = clean(raw_name)
        if raw_name.rpartition(".")[2] == _EXTRA:
            state.extra_states[name] = value
        elif not isinstance(value, Tensor):
            state.problems.append(f"'{name}' of the state dict is a {type(value).__name__}")
        elif id(value) not in parameters | buffers:
            state.problems.append(f"'{name}': a state-dict hook put a copy there")
        elif id(value) in first_name:
            state.tied[name] = first_name[id(value)]
        else:
            first_name[id(value)] = name
            state.add(name, model_key, value)
            if id(value) in buffers:
                state.buffers.add(model_key(name))
            else:
                state.names[id(value)] = name
            state.problems += tensor_problems(name, value)
    for group in (group for unit in units_of(model) for group in unit.groups):
        if group.parameter_dtype != group.main.dtype:
            named = (state.names[id(p)] for p in group.sharded if id(p) in state.names)
            stored = (key for name in named for key in state.stored_names(name))
            state.dtypes |= dict.fromkeys(stored, dtype_name(group.parameter_dtype))
    return state


def tensor_problems(name: str, value: Tensor) -> list[str]:
    local = value._local_tensor if isinstance(value, DTensor) else value
    if local.is_meta:
        return [f"'{name}' is on the meta device: materialise it first (to_empty())"]
    if local.layout != torch.strided:
        return [f"'{name}' is a {local.layout} tensor: only strided ones can be saved"]
    return []


def placements_of(model: nn.Module) -> list[str]:
    """How the model is spread, for people who find a checkpoint."""
    found: dict[str, None] = {}
    for unit in units_of(model):
        for group in unit.groups:
            axes = ", ".join(f"{axis.name}={axis.size}" for axis in group.ranks.axes)
            found[f"{group.placements} over {axes}"] = None
    return list(found) or ["plain tensors, the same on every rank"]


# ------------------------------------------------------------------------------ the optimizer


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
                # A defaultdict remembers who was asked for; nothing was made for these (SGD).
                if not optimizer.state[parameter]:
                    del optimizer.state[parameter]


@contextmanager
def _lent_gradients(parameters: list[Tensor]) -> Iterator[None]:
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = parameter.detach()  # the same memory; nobody computes with it
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def add_optimizer(state: State, optimizer: Optimizer) -> dict[str, Any]:
    """Put the optimizer's tensors into ``state``; return the rest, as it is saved."""
    create_state(optimizer)
    scalars: dict[str, dict[str, Any]] = {}
    tensors: dict[str, list[str]] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        names: list[str] = []
        for parameter in group["params"]:
            name = state.names.get(id(parameter))
            if name is None:
                shape = list(parameter.shape)
                state.problems.append(
                    f"group {index} of the optimizer holds a parameter of shape {shape} that the "
                    f"model does not: make the optimizer after wrapping, with model.parameters()"
                )
                continue
            stored = state.stored_names(name)
            names += stored
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    for one in stored:
                        tensors.setdefault(one, []).append(key)
                    full = state.add(name, partial(state_key, key=key), value)
                    state.problems += tensor_problems(full, value)
                    state.problems += _whole_problem(full, parameter, value)
                    state.problems += _expert_problem(full, state.stacks.get(name), value)
                else:
                    for one in stored:
                        scalars.setdefault(one, {})[key] = value
        options, described = _options(group)
        groups.append({"parameters": names, "options": options, "described": described})
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "scalars": scalars,
        "tensors": tensors,
    }


def _whole_problem(name: str, parameter: Tensor, value: Tensor) -> list[str]:
    """A plain tensor is taken to be the same on every rank; one rank's piece would not be."""
    pieces = isinstance(parameter, ShardedTensor) and parameter.cut.num_holders > 1
    if pieces and not isinstance(value, DTensor) and value.numel() > 1:
        return [
            f"'{name}' is a plain tensor of shape {list(value.shape)} beside a sharded parameter: "
            f"nobody can tell whether it is whole; make it like the parameter (zeros_like)"
        ]
    return []


def _expert_problem(name: str, stack: Stack | None, value: Tensor) -> list[str]:
    """Experts are stored one by one: of a state of all of them each must have a part."""
    if stack is None or not stack.grouped or value.dim() == 0 or len(value) == len(stack.here):
        return []
    return [
        f"'{name}' of shape {list(value.shape)} has no part for each of {len(stack.here)} experts, "
        f"which are stored one by one: give every expert a parameter of its own (layout 'indexed')"
    ]


def _options(group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of a group that JSON can hold, and the others as text."""
    options, described = {}, {}
    for key, value in group.items():
        if key == "params":
            continue
        try:
            encode(value, key)
        except CheckpointError:
            described[key] = repr(value)
        else:
            options[key] = value
    return options, described


Write = Callable[[], object]


class Changes:
    """Writes to an optimizer's groups and scalars: checked when they are planned, made later."""

    def __init__(self, optimizer: Optimizer, state: State, saved: dict[str, Any]) -> None:
        self._optimizer, self._state = optimizer, state
        self.problems: list[str] = []
        self._writes: list[Write] = []
        by_name = {name: group for group in saved["groups"] for name in group["parameters"]}
        for index, group in enumerate(optimizer.param_groups):
            stored = [state.stored_name(state.names[id(one)]) for one in group["params"]]
            sources = [by_name.get(name) for name in stored]
            for parameter, name, source in zip(group["params"], stored, sources, strict=True):
                self._plan_scalars(parameter, name, saved["scalars"].get(name, {}))
                if source is not None:
                    self._plan_momentum(parameter, name, group, source["options"])
            known = [source for source in sources if source is not None]
            for texts in _once([source["described"] for source in known]):
                _warn_of_objects(index, group, texts)
            self._plan_options(index, group, _once([source["options"] for source in known]))

    def make(self) -> None:
        for write in self._writes:
            write()

    def _plan_options(
        self, index: int, group: dict[str, Any], sources: list[dict[str, Any]]
    ) -> None:
        """Options of the saved groups for one of this optimizer's, which may be cut otherwise."""
        for key in {key: None for source in sources for key in source}:
            values = [source[key] for source in sources if key in source]
            current = group.get(key)
            if key in _MACHINE_OPTIONS:
                continue
            if not all(_alike(value, current) for value in values):
                self.problems.append(
                    f"'{key}' of group {index} of the optimizer is {shown(values[0])} in it, "
                    f"{shown(current)} here"
                )
            elif any(not _same(value, values[0]) for value in values[1:]):
                log.warning(
                    "group %d of the optimizer joins parameters that were saved with different "
                    "'%s'; it keeps its own, %s",
                    index,
                    key,
                    current,
                )
            elif isinstance(current, Tensor):
                new = torch.as_tensor(values[0]).to(current)
                self._writes.append(partial(current.copy_, new))
            else:
                self._writes.append(partial(group.__setitem__, key, values[0]))

    def _plan_momentum(
        self, parameter: Tensor, name: str, group: dict[str, Any], saved: dict[str, Any]
    ) -> None:
        """Momentum that was kept in the other form becomes this group's, once it is loaded."""
        form, before = group.get("momentum_form"), saved.get("momentum_form")
        if form == before or form is None or before is None:
            return
        if before not in get_args(MomentumForm) or type(saved.get("momentum")) is not float:
            self.problems.append(f"'{name}' has momentum of an unknown form in it")
            return

        def convert() -> None:
            own = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            if own is not None:
                convert_momentum(local_of(own), saved["momentum"], before, form)

        self._writes.append(convert)

    def _plan_scalars(self, parameter: Tensor, name: str, scalars: dict[str, Any]) -> None:
        """States that are plain numbers."""
        here = self._optimizer.state.get(parameter, {})
        for key, value in scalars.items():
            if not _alike(value, here.get(key)):
                self.problems.append(
                    f"'{key}' of the optimizer state of '{name}' is {shown(value)} in it, "
                    f"{shown(here.get(key))} here"
                )
        if scalars:
            self._writes.append(lambda: self._optimizer.state[parameter].update(scalars))


def _once(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each object once: many parameters share a saved group."""
    return list({id(value): value for value in values}.values())


def _alike(saved: Any, current: Any) -> bool:
    """Whether a saved value is of a kind that can stand where this one does: number, text..."""
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
            log.warning(
                "group %d of the optimizer has %s=%r, which was %s when it was saved: an object "
                "that a checkpoint can't bring back",
                index,
                key,
                group.get(key),
                shown(text),
            )


def _same(one: Any, other: Any) -> bool:
    return bool(encode(one, "") == encode(other, ""))


def extra_state_modules(
    model: nn.Module, state: State, extra_states: dict[str, Any]
) -> list[tuple[nn.Module, Any]]:
    """Modules with ``set_extra_state`` and what they have saved beside tensors; but gate and up of
    experts stand in this model's own order by now."""
    modules = {clean(name): module for name, module in unwrapped(model).named_modules()}
    settled = {stack.order for stack in state.stacks.values()}
    return [
        (modules[name.rpartition(".")[0]], value)
        for name, value in extra_states.items()
        if name not in settled
    ]


def check_saved(values: Any, where: str, keys: Container[str]) -> None:
    """That the contents of ``state.json`` have the form that ``as_saved`` gives them.

    ``keys`` are those of the tensors in the index.
    """
    if (problem := _saved_problem(values, keys)) is not None:
        raise DamagedError(f"{where} is not what shardwise writes: {problem}")


def _saved_problem(values: Any, keys: Container[str]) -> str | None:
    if not _is_dict(values) or not {"tied", "extra_states", "optimizer"} <= values.keys():
        return "values are missing"
    tied, extra_states, optimizer = values["tied"], values["extra_states"], values["optimizer"]
    if not _is_dict(tied, lambda name: type(name) is str and model_key(name) in keys):
        return "'tied' names no tensors"
    if not _is_dict(extra_states):
        return "'extra_states' are none"
    for name, value in extra_states.items():
        block = value.get("gate_up_block", 0) if type(value) is dict else 0
        if type(block) is not int or block < 0:
            return f"the order of gate and up in {shown(name)}"
    if optimizer is None:
        return None
    parts = {"class": str, "groups": list, "scalars": dict, "tensors": dict}
    if not _is_dict(optimizer) or any(type(optimizer.get(n)) is not k for n, k in parts.items()):
        return "'optimizer' is none"
    for group in optimizer["groups"]:
        if not _is_dict(group) or not (
            _is_names(group.get("parameters"))
            and _is_dict(group.get("options"))
            and "params" not in group["options"]
            and _is_dict(group.get("described"), lambda text: type(text) is str)
        ):
            return "'groups' are none of an optimizer"
    if not _is_dict(optimizer["scalars"], _is_dict) or not _is_dict(
        optimizer["tensors"], _is_names
    ):
        return "the optimizer's states"
    for name, states in optimizer["tensors"].items():
        for key in states:
            if state_key(name, key) not in keys:
                return f"the optimizer state {shown(key)} of {shown(name)} is not in the index"
    return None


def _is_dict(value: Any, item: Callable[[Any], bool] = lambda item: True) -> bool:
    """Whether it is a dictionary with texts as keys, and values of a kind."""
    return type(value) is dict and all(type(k) is str and item(v) for k, v in value.items())


def _is_names(value: Any) -> bool:
    return type(value) is list and all(type(name) is str for name in value)


def as_saved(state: State, optimizer: dict[str, Any] | None) -> Any:
    """The contents of ``state.json``, by name of what can't be saved."""
    for name, value in state.extra_states.items():
        try:
            encode(value, f"the extra state '{name}'")
        except CheckpointError as error:
            state.problems.append(str(error))
    if optimizer is not None:
        for part in ("groups", "scalars"):
            try:
                encode(optimizer[part], f"the optimizer's {part}")
            except CheckpointError as error:
                state.problems.append(str(error))
    values = {"tied": state.tied, "extra_states": state.extra_states, "optimizer": optimizer}
    return values | {"dtypes": state.dtypes}


def described(optimizer: Optimizer) -> dict[str, Any]:
    """The class and the options of its groups, for the manifest; what JSON can't hold as text."""
    groups = []
    for group in optimizer.param_groups:
        options, texts = _options(group)
        groups.append({**options, **texts, "num_parameters": len(group["params"])})
    return {"class": type(optimizer).__name__, "groups": groups}
