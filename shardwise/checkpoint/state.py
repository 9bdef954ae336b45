# SPDX-License-Identifier: Apache-2.0
"""A model and its optimizer as named tensors and plain values, whatever they are wrapped in.

    model.blocks.0.up.weight                            a parameter or a persistent buffer
    optimizer.state.blocks.0.up.weight.exp_avg          a state, under the name of its parameter

The names are those of the module tree, so a checkpoint depends neither on wrappers nor on the order
of an optimizer's groups. The tensors are the live tensors: a save reads them, a load writes them.

The experts of all ranks are stored as one tensor, whether a rank holds its own as one or one by
one. So a live tensor is the whole of a stored one, or some experts of it, and so are its states:

    rank 0   fc1.weight [2, out, in]                -->  experts 0-1 of   fc1.weight [4, out, in]
    rank 1   fc1.weight0 [out, in], fc1.weight1     -->  expert 2, expert 3

States that are single numbers (counts of steps) are those of all experts of a weight.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.checkpoint.errors import CheckpointError, shown
from shardwise.checkpoint.manifest import Manifest, OptimizerValues
from shardwise.checkpoint.pieces import Entry, Key, key_text
from shardwise.checkpoint.values import dtype_name, encode
from shardwise.core.compat import tree_leaves
from shardwise.core.layout import Shape
from shardwise.core.tensor import ShardedTensor
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.optim.gradients import zero_state
from shardwise.optim.muon import MACHINE_SETTINGS
from shardwise.shard.module import units_of
from shardwise.shard.state_dict import clean

log = logging.getLogger(__name__)

# Options that say how an optimizer computes, but not its results: a load does not change these.
_MACHINE_OPTIONS = {"foreach", "fused", "capturable", "differentiable", *MACHINE_SETTINGS}
_NAMES = {"params", "param_names"}
_ALGORITHM = ("kind", "function")  # options with which states mean something else


@dataclass(frozen=True)
class Experts:
    """The experts of a live tensor among those of all ranks."""

    name: str  # of the stored parameter
    first: int
    count: int
    total: int  # of all ranks
    grouped: bool  # whether dimension 0 of the live tensor counts experts


@dataclass(frozen=True, eq=False)
class Held:
    """A live tensor: the whole of a stored tensor, or some experts of it."""

    key: Key
    tensor: Tensor
    experts: Experts | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the stored tensor."""
        shape = tuple(self.tensor.shape)
        if self.experts is None:
            return shape
        return (self.experts.total, *(shape[1:] if self.experts.grouped else shape))

    def stored(self, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape]:
        """A box of the live tensor as a box of the stored one."""
        of = self.experts
        if of is None:
            return offsets, sizes
        if of.grouped:
            return (of.first + offsets[0], *offsets[1:]), sizes
        return (of.first, *offsets), (1, *sizes)

    def boxes(self) -> Iterator[tuple[Shape, Tensor]]:
        """(offsets in the stored tensor, view of the live one) of this rank's boxes."""
        for offsets, view in local_boxes(self.tensor):
            begins, sizes = self.stored(offsets, tuple(view.shape))
            yield begins, view.expand(sizes)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_boxes(tensor: Tensor) -> list[tuple[Shape, Tensor]]:
    """(offsets, view) of this rank's boxes of a tensor."""
    if isinstance(tensor, ShardedTensor):
        views = tensor.cut.views(tensor.to_local().detach())
        boxes = zip(tensor.cut.boxes, views, strict=True)
        return [(tuple(offsets), view) for (offsets, _), view in boxes]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []  # this rank is not on the mesh of the tensor
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        data = tensor.to_local().detach()
        return [(tuple(chunk.offsets), data)] if data.numel() else []
    return [((0,) * tensor.dim(), tensor.detach())]


@dataclass
class State:
    """The tensors of a rank, all other values, and the problems that prevent a save or a load."""

    held: list[Held] = field(default_factory=list)
    buffers: set[Key] = field(default_factory=set)  # saved from rank 0, as ranks may differ
    tied: dict[str, str] = field(default_factory=dict)  # another stored name -> the saved one
    extra_states: dict[str, Any] = field(default_factory=dict)  # of modules that have one
    names: dict[int, str] = field(default_factory=dict)  # of parameters, by id
    dtypes: dict[str, str] = field(default_factory=dict)  # before wrapping, if other than main's
    experts: dict[str, Experts] = field(default_factory=dict)  # by name of the parameter
    problems: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A hash of the pieces that this rank holds."""
        pieces = []
        for held in self.held:
            cut = isinstance(held.tensor, ShardedTensor) and held.tensor.cut
            pieces.append((held.key, cut.piece if cut else tuple(_local(held.tensor).shape)))
        return hashlib.sha256(repr(sorted(pieces)).encode()).hexdigest()

    def stored_name(self, name: str) -> str:
        return self.experts[name].name if name in self.experts else name

    def add(self, name: str, tensor: Tensor, state: str = "", states: Iterable[str] = ()) -> Held:
        """Add a parameter or buffer, or a state of it; ``states`` are the keys of all its states.

        Optimizers of whole matrices have a state for each matrix of grouped experts, with its
        number in the key: ``left.3``. It is stored as the state ``left`` of an expert (``left.1``
        where an expert has several matrices)."""
        of = self.experts.get(name)
        base, _, number = state.rpartition(".")
        if of is not None and of.grouped and base and number.isdigit():
            each, rest = divmod(sum(one.rpartition(".")[0] == base for one in states), of.count)
            if not rest:  # so many matrices in each expert
                expert, matrix = divmod(int(number), each)
                of = replace(of, first=of.first + expert, grouped=False)
                state = base if each == 1 else f"{base}.{matrix}"
        held = Held((self.stored_name(name), state), tensor, of if tensor.dim() else None)
        self.held.append(held)
        local = _local(tensor)
        what = f"'{key_text(held.key)}' of shape {list(tensor.shape)}"
        if local.is_meta:
            self.problems.append(f"{what} is on the meta device: materialise it (to_empty())")
        elif local.layout != torch.strided:
            self.problems.append(f"{what} is {local.layout}: only strided tensors can be saved")
        elif held.experts and held.experts.grouped and len(tensor) != held.experts.count:
            self.problems.append(
                f"{what} has no part for each of {held.experts.count} experts: give every expert a "
                f"separate parameter (layout 'indexed')"
            )
        return held

    def named(self, optimizer: Optimizer) -> Iterator[tuple[int, Tensor, str]]:
        """(number of the group, parameter, its name) for the optimizer's parameters. One that the
        model does not hold is a problem."""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if (name := self.names.get(id(parameter))) is not None:
                    yield index, parameter, name
                    continue
                self.problems.append(
                    f"group {index} of the optimizer holds a parameter of shape "
                    f"{list(parameter.shape)} that the model does not hold: make the optimizer "
                    f"after wrapping, with model.parameters()"
                )


# ------------------------------------------------------------------------------ the model


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def model_state(model: nn.Module) -> State:
    """The parameters and persistent buffers of a model; gathered weights are released first."""
    model = unwrapped(model)
    state = State(experts=_experts_of(model))
    live = model.state_dict(keep_vars=True)  # the registered objects; also reshards the weights
    buffers = {id(buffer) for buffer in model.buffers()}
    known = buffers | {id(parameter) for parameter in model.parameters()}
    seen: dict[int, Held] = {}
    for raw_name, value in live.items():
        name = clean(raw_name)
        if raw_name.rpartition(".")[2] == "_extra_state":
            state.extra_states[name] = value
        elif id(value) not in known:
            state.problems.append(
                f"'{name}' of the state dict is a {type(value).__name__} that the model does not "
                f"hold: a state-dict hook put it there"
            )
        elif (first := seen.get(id(value))) is not None:
            if (other := state.stored_name(name)) != first.key[0]:
                state.tied[other] = first.key[0]
        else:
            seen[id(value)] = held = state.add(name, value)
            state.names[id(value)] = name
            if id(value) in buffers:
                state.buffers.add(held.key)
    for group in (group for unit in units_of(model) for group in unit.groups):
        if group.parameter_dtype != group.main.dtype:
            names = (state.names[id(p)] for p in group.sharded if id(p) in state.names)
            before = dtype_name(group.parameter_dtype)
            state.dtypes |= {state.stored_name(name): before for name in names}
    return state


def _experts_of(model: nn.Module) -> dict[str, Experts]:
    """The experts of a model's parameters, by name."""
    found: dict[str, Experts] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GroupedLinear):
            first, count, total = module.first_expert, module.num_experts, module.total_experts
            for kind, layout in module.layouts.items():
                name = clean(f"{path}.{kind}" if path else kind)
                found[name] = Experts(name, first, count, total, True)
                for index in range(count) if layout != "grouped" else ():
                    found[f"{name}{index}"] = Experts(name, first + index, 1, total, False)
    return found


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
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "deterministic algorithms": not on_gpu or torch.are_deterministic_algorithms_enabled(),
    }


# ------------------------------------------------------------------------------ the optimizer


def optimizer_values(optimizer: Optimizer, state: State) -> OptimizerValues:
    """Add the optimizer's tensors to ``state``; return its other values, by parameter."""
    state.problems += [
        f"the optimizer's state has an entry {key!r} that belongs to no parameter, and states are "
        f"stored by the names of parameters: keep it in an option of a group, or in extra"
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor) and value
    ]
    parameters: dict[str, int] = {}
    scalars: dict[str, dict[str, Any]] = {}
    numbers: dict[Key, Any] = {}  # of experts one by one, which share them
    for index, parameter, name in state.named(optimizer):
        stored = state.stored_name(name)
        parameters[stored] = index
        states = optimizer.state.get(parameter, {})
        sharded = isinstance(parameter, ShardedTensor) and parameter.cut.num_holders > 1
        for key, value in states.items():
            what = f"'{key}' of the optimizer state of '{name}'"
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            # A save takes what is no DTensor from a single rank.
            pieces = sharded and any(t.numel() > 1 and not isinstance(t, DTensor) for t in tensors)
            if pieces or (tensors and not isinstance(value, Tensor)):
                state.problems.append(
                    f"{what} is a {type(value).__name__} with tensors that may be whole or pieces: "
                    f"keep each under a key, made like the parameter (zeros_like)"
                )
                continue
            if tensors:
                state.add(name, value, key, states)
            else:
                scalars.setdefault(stored, {})[key] = value
            if name in state.experts and (not tensors or not value.dim()):
                other = numbers.setdefault((stored, key), value)
                if other is not value and other != value:
                    state.problems.append(
                        f"{what} is {value}, and {other} for another expert: train all experts of "
                        f"a weight together, or save without an optimizer"
                    )
    options = [_options(group) for group in optimizer.param_groups]
    kind = type(optimizer).__name__
    return OptimizerValues(kind=kind, options=options, parameters=parameters, scalars=scalars)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that JSON can hold. Objects are left out: a load keeps its own."""
    options = {}
    for key in group.keys() - _NAMES:
        with suppress(CheckpointError):
            encode(group[key], key)
            options[key] = group[key]
    return options


class OptimizerLoad:
    """A load into an optimizer. Making one finds all problems; ``write`` makes all changes."""

    def __init__(self, optimizer: Optimizer, state: State, manifest: Manifest) -> None:
        self.differences: list[str] = []  # from the optimizer that was saved
        self._optimizer, self._state, self._manifest = optimizer, state, manifest
        self._writes: list[Callable[[], object]] = []
        if manifest.optimizer is None:
            state.problems.append(
                "it holds no optimizer state: load with optimizer=None, or save with one"
            )
            return
        self._saved, kind = manifest.optimizer, type(optimizer)
        if kind.__name__ != self._saved.kind:
            self.differences.append(f"the optimizer was a {shown(self._saved.kind)}")
        if self._saved.kind not in {one.__name__ for one in kind.__mro__}:
            text = f"its optimizer is a {shown(self._saved.kind)}, and this one a {kind.__name__}"
            state.problems.append(text)
            return
        of_groups: dict[int, dict[int, None]] = {}  # rows of saved options, in order
        expected: set[str] = set(state.tied)
        for index, parameter, name in state.named(optimizer):
            stored = manifest.saved_name(state.stored_name(name))
            expected |= {stored, state.stored_name(name)}
            if (row := self._saved.parameters.get(stored)) is not None:
                of_groups.setdefault(index, {})[row] = None
            self._load_states(optimizer.param_groups[index], parameter, name, stored)
        states = manifest.states.keys() | self._saved.scalars.keys()
        state.problems += [
            f"unexpected in it: optimizer state of '{name}'" for name in sorted(states - expected)
        ]
        for index, rows in of_groups.items():
            self._load_options(index, [self._saved.options[row] for row in rows])

    def _load_states(
        self, group: dict[str, Any], parameter: Tensor, name: str, stored: str
    ) -> None:
        """Load one parameter's states: into the tensors that it has, or into new ones."""
        of, tensors = self._state.experts.get(name), self._manifest.states.get(stored, {})
        scalars = self._saved.scalars.get(stored, {})
        states: dict[str, Any] = {}
        if tensors or scalars:  # else it had made no step
            states |= self._optimizer.state.get(parameter, {})
        live = {key: value for key, value in states.items() if isinstance(value, Tensor)}
        held = {self._state.add(name, live[key], key, states).key[1] for key in live}
        eager = group.get("fused") or group.get("capturable")
        for key in sorted(tensors.keys() - held):
            at = parameter.device if key != "step" or eager else torch.device("cpu")
            states[key] = _new_state(parameter, key, tensors[key], of, at)
            self._state.add(name, states[key], key, states)
        if states or scalars or parameter in self._optimizer.state:
            place = partial(self._optimizer.state.__setitem__, parameter, states | scalars)
            self._writes.append(place)

    def _load_options(self, index: int, saved: list[dict[str, Any]]) -> None:
        """A group takes the options that all of its parameters were saved with."""
        group = self._optimizer.param_groups[index]
        for key in sorted(
            {key for options in saved for key in options} - _MACHINE_OPTIONS - _NAMES
        ):
            values, current = [options[key] for options in saved if key in options], group.get(key)
            what = f"'{key}' of group {index} of the optimizer"
            several = any(encode(value, key) != encode(values[0], key) for value in values)
            if key in _ALGORITHM:
                if current is not None and (several or values[0] != current):
                    text = f"{what} is {shown(values[0])} in it, {shown(current)} here"
                    self._state.problems.append(text)
            elif several:
                self.differences.append(f"{what} was not loaded")
                log.warning("%s had several values when saved, and keeps %s", what, current)
            elif isinstance(current, Tensor):
                new = torch.as_tensor(values[0], device="cpu").to(current).view(current.shape)
                self._writes.append(partial(current.copy_, new))
            else:
                self._writes.append(partial(group.__setitem__, key, values[0]))

    def write(self) -> None:
        """Change the optimizer, after the tensors of its states were loaded."""
        for write in self._writes:
            write()
        self._optimizer.__setstate__({})  # as torch's load does: keeps AdamW's decay decoupled


def _new_state(
    parameter: Tensor, key: str, saved: Entry, of: Experts | None, device: torch.device
) -> Tensor:
    """A state in the layout of its parameter, or a plain tensor if it has another shape."""
    shape = saved.shape
    if shape == Held(("", ""), parameter, of).shape and (shape or key != "step"):
        return zero_state(parameter).to(saved.dtype)
    if of is not None and shape:
        shape = (of.count, *shape[1:]) if of.grouped else shape[1:]
    return torch.zeros(shape, dtype=saved.dtype, device=device)
