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

The order of gate and up is stored too, and a load into another order permutes rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.pieces import Key, key_text
from shardwise.checkpoint.values import dtype_name
from shardwise.core.layout import Shape
from shardwise.core.tensor import ShardedTensor
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear
from shardwise.shard.module import units_of
from shardwise.shard.state_dict import clean

_EXTRA = "_extra_state"


@dataclass(frozen=True)
class Experts:
    """The experts of a live tensor among those of all ranks."""

    name: str  # of the stored parameter
    first: int
    count: int
    total: int  # of all ranks
    grouped: bool  # whether dimension 0 of the live tensor counts experts
    order: str | None = None  # name of the extra state that holds the order of gate and up
    block: int = 0  # the order of gate and up here


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

    @property
    def shared(self) -> bool:
        """Whether one number, a count of steps, is that of several experts."""
        return self.experts is not None and self.experts.grouped and not self.tensor.dim()

    def stored(self, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape]:
        """A box of the live tensor as a box of the stored one."""
        of = self.experts
        if of is None:
            return offsets, sizes
        if of.grouped and sizes:
            return (of.first + offsets[0], *offsets[1:]), sizes
        return (of.first, *offsets), (of.count, *sizes)

    def boxes(self) -> Iterator[tuple[Shape, Tensor]]:
        """(offsets in the stored tensor, view of the live one) of this rank's boxes."""
        for offsets, view in local_boxes(self.tensor):
            begins, sizes = self.stored(offsets, tuple(view.shape))
            yield begins, view.expand(sizes)  # a view: only ``shared`` repeats an element


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

    def stored_name(self, name: str) -> str:
        return self.experts[name].name if name in self.experts else name

    def add(self, name: str, tensor: Tensor, state: str = "", states: Iterable[str] = ()) -> Held:
        """Add a parameter or buffer, or a state of it; ``states`` are the keys of all its states.

        Optimizers of whole matrices have a state for each matrix of grouped experts, with its
        number in the key: ``left.3``. It is stored as the state ``left`` of an expert (``left.1``
        where an expert has several matrices)."""
        experts = self.experts.get(name)
        base, _, number = state.rpartition(".")
        if experts is not None and experts.grouped and base and number.isdigit():
            similar = sum(other.rpartition(".")[0] == base for other in states)
            each, rest = divmod(similar, experts.count)  # matrices of one expert
            if not rest:
                expert, matrix = divmod(int(number), each)
                experts = replace(experts, first=experts.first + expert, count=1, grouped=False)
                state = base if each == 1 else f"{base}.{matrix}"
        held = Held((self.stored_name(name), state), tensor, experts)
        self.held.append(held)
        self.problems += _problems(held)
        return held

    @property
    def keys(self) -> list[Key]:
        """The stored tensors: the same on all ranks."""
        return sorted({held.key for held in self.held})


def _problems(held: Held) -> list[str]:
    tensor, name = held.tensor, key_text(held.key)
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.is_meta:
        return [f"'{name}' is on the meta device: materialise it first (to_empty())"]
    if local.layout != torch.strided:
        return [f"'{name}' is a {local.layout} tensor: only strided tensors can be saved"]
    of = held.experts
    if of is not None and of.grouped and tensor.dim() and len(tensor) != of.count:
        return [
            f"'{name}' of shape {list(tensor.shape)} has no part for each of {of.count} experts: "
            f"give every expert a separate parameter (layout 'indexed')"
        ]
    return []


# ------------------------------------------------------------------------------ the model


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel. (The prefix that torch.compile adds to names is
    removed by ``clean``.)"""
    return model.module if isinstance(model, DistributedDataParallel) else model


def model_state(model: nn.Module) -> State:
    """The parameters and persistent buffers of a model; gathered weights are released first."""
    model = unwrapped(model)
    state = State(experts=_experts_of(model))
    parameters = {id(parameter) for parameter in model.parameters()}
    live = model.state_dict(keep_vars=True)  # the registered objects; also reshards the weights
    parameters |= {id(parameter) for parameter in model.parameters()}
    buffers = {id(buffer) for buffer in model.buffers()}
    seen: dict[int, Held] = {}
    for raw_name, value in live.items():
        name = clean(raw_name)
        if raw_name.rpartition(".")[2] == _EXTRA:
            state.extra_states[name] = value
        elif not isinstance(value, Tensor) or id(value) not in parameters | buffers:
            state.problems.append(
                f"'{name}' of the state dict is a {type(value).__name__} that the model does not "
                f"hold: a state-dict hook put it there"
            )
        elif (first := seen.get(id(value))) is not None:
            other = Held((state.stored_name(name), ""), value, state.experts.get(name))
            box = (0,) * value.dim(), tuple(value.shape)
            if other.shape != first.shape or other.stored(*box) != first.stored(*box):
                state.problems.append(
                    f"'{name}' and '{state.names[id(value)]}' are one tensor, but only one of the "
                    f"names belongs to experts: give '{name}' a separate tensor"
                )
            elif other.key != first.key:
                state.tied[other.key[0]] = first.key[0]
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
        if not isinstance(module, GroupedLinear):
            continue
        prefix = clean(f"{path}.") if path else ""
        order, block = None, 0
        if isinstance(module, GateUpLinear):
            order, block = f"{prefix}{_EXTRA}", module.gate_up_block
        first, count, total = module.first_expert, module.num_experts, module.total_experts
        for kind, layout in module.layouts.items():
            name = f"{prefix}{kind}"
            if layout == "grouped":
                found[name] = Experts(name, first, count, total, True, order, block)
            for index in range(count) if layout != "grouped" else ():
                one = Experts(name, first + index, 1, total, False, order, block)
                found[f"{name}{index}"] = one
    return found


def pieces_digest(state: State) -> str:
    """A hash of the pieces that this rank holds."""
    pieces: list[tuple[Key, Any]] = []
    for held in state.held:
        if isinstance(held.tensor, ShardedTensor):
            pieces.append((held.key, held.tensor.cut.piece))
        elif isinstance(held.tensor, DTensor):
            pieces.append((held.key, tuple(held.tensor.to_local().shape)))
    return hashlib.sha256(repr(sorted(pieces)).encode()).hexdigest()


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
