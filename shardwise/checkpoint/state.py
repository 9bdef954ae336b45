# SPDX-License-Identifier: Apache-2.0
"""A model as named tensors and plain values, whatever it is wrapped in.

    model.blocks.0.up.weight                            a parameter or a persistent buffer
    optimizer.state.blocks.0.up.weight.exp_avg          a state, under the name of its parameter
    state.json                                          groups, options, tied names, scalars

The names are those of the module tree, so a checkpoint depends neither on wrappers nor on the order
of an optimizer's groups. The tensors are the live tensors: a save reads them, a load writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.pieces import Stack, stacks_of
from shardwise.checkpoint.values import dtype_name, encode
from shardwise.shard.module import units_of
from shardwise.shard.state_dict import clean

_EXTRA = "_extra_state"


@dataclass
class State:
    """Tensors by key, all other values, and the problems that prevent a save or a load."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)  # keys; saved from rank 0, as ranks may differ
    tied: dict[str, str] = field(default_factory=dict)  # another name -> the saved name
    extra_states: dict[str, Any] = field(default_factory=dict)  # of modules that have one
    names: dict[int, str] = field(default_factory=dict)  # of parameters, by id
    dtypes: dict[str, str] = field(default_factory=dict)  # before wrapping, if other than main's
    stacks: dict[str, Stack] = field(default_factory=dict)  # of expert parameters, by name
    members: dict[str, Stack] = field(default_factory=dict)  # of their tensors and states, by key
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the parameter or buffer ``name``."""
        key = model_key(name)
        self.tensors[key] = tensor
        if name in self.stacks:
            self.members[key] = self.stacks[name].renamed(model_key)

    def add_state(
        self, name: str, key: str, value: Tensor, stack: Stack | None, stored: str
    ) -> None:
        """Add the state ``key`` of the parameter ``name``. If it belongs to experts, ``stack`` says
        how it is stored, under the key ``stored``."""
        full = state_key(name, key)
        self.tensors[full] = value
        if stack is not None:
            self.members[full] = stack.renamed(partial(state_key, key=stored))

    def stored_names(self, name: str) -> tuple[str, ...]:
        """The names of a parameter in a checkpoint: a name for each expert of all ranks, if any."""
        return self.stacks[name].everywhere if name in self.stacks else (name,)

    def stored_name(self, name: str) -> str:
        """The name of a parameter in a checkpoint, or of its first expert on this rank."""
        return self.stacks[name].here[0] if name in self.stacks else name

    @property
    def stored_keys(self) -> frozenset[str]:
        """The keys of the tensors of all ranks."""
        plain = self.tensors.keys() - self.members.keys()
        return frozenset(plain).union(*(stack.everywhere for stack in self.members.values()))


def model_key(name: str) -> str:
    return f"model.{name}"


def state_key(name: str, key: str) -> str:
    return f"optimizer.state.{name}.{key}"


# ------------------------------------------------------------------------------ the model


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel. (The prefix that torch.compile adds to names is
    removed by ``clean``.)"""
    return model.module if isinstance(model, DistributedDataParallel) else model


def model_state(model: nn.Module) -> State:
    """The parameters and persistent buffers of a model; gathered weights are released first."""
    model = unwrapped(model)
    state = State(stacks=stacks_of(model, clean))
    parameters = {id(parameter) for parameter in model.parameters()}
    live = model.state_dict(keep_vars=True)  # the registered objects; also reshards the weights
    parameters |= {id(parameter) for parameter in model.parameters()}
    buffers = {id(buffer) for buffer in model.buffers()}
    first_name: dict[int, str] = {}
    for raw_name, value in live.items():
        name = clean(raw_name)
        if raw_name.rpartition(".")[2] == _EXTRA:
            state.extra_states[name] = value
        elif not isinstance(value, Tensor):
            state.problems.append(f"'{name}' of the state dict is a {type(value).__name__}")
        elif id(value) not in parameters | buffers:
            state.problems.append(f"'{name}': a state-dict hook put a copy there")
        elif id(value) in first_name:
            first = first_name[id(value)]
            names, firsts = state.stored_names(name), state.stored_names(first)
            state.tied |= zip(names, firsts, strict=False)
            if len(names) != len(firsts):
                state.problems.append(
                    f"'{name}' and '{first}' are one tensor, but only one of the names belongs to "
                    f"experts, which are stored one by one: give '{name}' a separate tensor"
                )
        else:
            first_name[id(value)] = name
            state.add(name, value)
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
        return [f"'{name}' is a {local.layout} tensor: only strided tensors can be saved"]
    return []


def placements_of(model: nn.Module) -> list[str]:
    """The placements and meshes of a model as text, for the manifest."""
    texts: dict[str, None] = {}
    for unit in units_of(model):
        for group in unit.groups:
            axes = ", ".join(f"{axis.name}={axis.size}" for axis in group.ranks.axes)
            texts[f"{group.placements} over {axes}"] = None
    return list(texts) or ["plain tensors, the same on every rank"]


# ------------------------------------------------------------------------------ state.json


def json_state(state: State, optimizer: dict[str, Any] | None) -> Any:
    """The contents of ``state.json``. Values that JSON can't hold are added to ``problems``."""
    parts = [(f"the extra state '{name}'", value) for name, value in state.extra_states.items()]
    if optimizer is not None:
        parts += [(f"the optimizer's {part}", optimizer[part]) for part in ("groups", "scalars")]
    for where, value in parts:
        try:
            encode(value, where)
        except CheckpointError as error:
            state.problems.append(str(error))
    values = {"tied": state.tied, "extra_states": state.extra_states, "optimizer": optimizer}
    return values | {"dtypes": state.dtypes}


def check_json_state(values: Any, where: str, keys: Container[str]) -> None:
    """Raise unless ``state.json`` has the form that ``json_state`` returns.

    ``keys`` are the keys of the tensors in the index.
    """
    if (problem := _json_state_problem(values, keys)) is not None:
        raise DamagedError(f"{where} is not what shardwise writes: {problem}")


def _json_state_problem(values: Any, keys: Container[str]) -> str | None:
    if not _is_dict(values) or not {"tied", "extra_states", "optimizer"} <= values.keys():
        return "values are missing"
    tied, extra_states, optimizer = values["tied"], values["extra_states"], values["optimizer"]
    if not _is_dict(tied, lambda name: type(name) is str and model_key(name) in keys):
        return "'tied' does not name tensors"
    if not _is_dict(extra_states):
        return "'extra_states' is no dictionary of names"
    for name, value in extra_states.items():
        block = value.get("gate_up_block", 0) if type(value) is dict else 0
        if type(block) is not int or block < 0:
            return f"the order of gate and up in {shown(name)} is no size"
    if optimizer is None:
        return None
    parts = {"class": str, "groups": list, "scalars": dict, "tensors": dict}
    if not _is_dict(optimizer) or any(type(optimizer.get(n)) is not k for n, k in parts.items()):
        return "'optimizer' lacks a part"
    for group in optimizer["groups"]:
        if not _is_dict(group) or not (
            _is_names(group.get("parameters"))
            and _is_dict(group.get("options"))
            and "params" not in group["options"]
            and _is_dict(group.get("described"), lambda text: type(text) is str)
        ):
            return "'groups' are not groups of an optimizer"
    if not _is_dict(optimizer["scalars"], _is_dict) or not _is_dict(
        optimizer["tensors"], _is_names
    ):
        return "the optimizer's states are not listed by parameter"
    for name, states in optimizer["tensors"].items():
        for key in states:
            if state_key(name, key) not in keys:
                return f"the optimizer state {shown(key)} of {shown(name)} is not in the index"
    return None


def _is_dict(value: Any, item: Callable[[Any], bool] = lambda item: True) -> bool:
    """Whether a value is a dictionary with texts as keys and values that ``item`` accepts."""
    return type(value) is dict and all(type(k) is str and item(v) for k, v in value.items())


def _is_names(value: Any) -> bool:
    return type(value) is list and all(type(name) is str for name in value)
