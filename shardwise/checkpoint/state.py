# SPDX-License-Identifier: Apache-2.0
"""A model as named tensors and plain values, whatever it is wrapped in.

    model.blocks.0.up.weight                            a parameter or a persistent buffer
    optimizer.state.blocks.0.up.weight.exp_avg          a state, under the name of its parameter

The names are those of the module tree, so a checkpoint depends neither on wrappers nor on the order
of an optimizer's groups. The tensors are the live tensors: a save reads them, a load writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.manifest import model_key, state_key
from shardwise.checkpoint.pieces import Piece, Stack, local_boxes, stacks_of
from shardwise.checkpoint.values import dtype_name
from shardwise.shard.module import units_of
from shardwise.shard.state_dict import clean

_EXTRA = "_extra_state"


@dataclass
class State:
    """Tensors by key, all other values, and the problems that prevent a save or a load."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    where: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # name and state, by key
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
        self.tensors[key], self.where[key] = tensor, (name, None)
        if (stack := self.stacks.get(name)) is not None:
            self.members[key] = replace(stack, key=model_key(stack.name))

    def add_state(
        self, name: str, key: str, value: Tensor, stack: Stack | None, stored: str
    ) -> None:
        """Add the state ``key`` of the parameter ``name``. If it belongs to experts, ``stack`` says
        how it is stored, under the key ``stored``."""
        full = state_key(name, key)
        self.tensors[full], self.where[full] = value, (name, stored)
        if stack is not None:
            self.members[full] = replace(stack, key=state_key(stack.name, stored))

    def stored_names(self, name: str) -> tuple[str, ...]:
        """The names under which all ranks together store a parameter."""
        return self.stacks[name].stored if name in self.stacks else (name,)

    def stored_name(self, name: str) -> str:
        """The name of a parameter in a checkpoint; of experts, that of the first on this rank."""
        return self.stacks[name].here[0] if name in self.stacks else name

    def pieces(self, key: str) -> list[Piece]:
        """The boxes of a tensor that this rank holds, as views; of experts, a box for each."""
        tensor, (name, state) = self.tensors[key], self.where[key]
        shape, stack = tuple(tensor.shape), self.members.get(key)
        boxes = local_boxes(tensor)
        if stack is None:
            return [Piece(name, state, shape, offsets, data) for offsets, data in boxes]
        return [piece for box in boxes for piece in stack.pieces(state, shape, *box)]

    @property
    def all_keys(self) -> list[str]:
        """The keys of the stored tensors of all ranks."""
        keys = set(self.tensors) - set(self.members)
        for key, stack in self.members.items():
            _, state = self.where[key]
            keys |= {model_key(n) if state is None else state_key(n, state) for n in stack.stored}
        return sorted(keys)


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
            stacks = {state.stacks.get(name), state.stacks.get(first)} if names != firsts else set()
            if None in stacks and any(stack is not None and stack.spread for stack in stacks):
                state.problems.append(
                    f"'{name}' and '{first}' are one tensor, but only one of the names belongs to "
                    f"experts, of which other ranks hold more: give '{name}' a separate tensor"
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
    """The placements, meshes and formats of a model as text, for the manifest."""
    texts: dict[str, None] = {}
    for unit in units_of(model):
        for group in unit.groups:
            axes = ", ".join(f"{axis.name}={axis.size}" for axis in group.ranks.axes)
            texts[f"{group.placements} over {axes}, {group.format or group.codec.dtype}"] = None
    return list(texts) or ["plain tensors, the same on every rank"]


def facts_of(model: nn.Module, num_ranks: int) -> dict[str, Any]:
    """What must be equal, beside the pieces and the options, for a run to continue bit for bit."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    on_gpu = device.type == "cuda"
    return {
        "ranks": num_ranks,
        "placements": placements_of(model),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "deterministic algorithms": not on_gpu or torch.are_deterministic_algorithms_enabled(),
    }
