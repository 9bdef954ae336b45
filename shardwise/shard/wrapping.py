# SPDX-License-Identifier: Apache-2.0
"""Wrapping a module: find its parameters and buffers, and give the module its class and hooks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardwise.layout import ROW, TENSOR, Grain, tensor_fraction
from shardwise.notices import warn_once
from shardwise.shard.members import Members, modules_below
from shardwise.shard.module import ShardedModule, unit_of
from shardwise.shard.state_dict import full_state_dict
from shardwise.shard.unit import Unit
from shardwise.shard.whole_parameter import carry_attributes
from shardwise.tensor import ShardedTensor
from shardwise.tensor_steps import OWNER
from shardwise.uncompiled import uncompiled
from shardwise.words import quoted

logger = logging.getLogger(__name__)

# Torch's pipeline stages look a module's state up under this key, torch's own ``fully_shard``.
_TORCH_VERB = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]
UNEVEN = "_shardwise_uneven"  # an attribute of plain parameters that stand for tiles in a plan
# "tensor" promises that no matrix is cut; fully_shard refuses it if padding would be too much.
GrainChoice = Grain | Callable[[str, nn.Parameter], Grain] | Literal["tensor"]


# ------------------------------------------------------------------------------ finding parameters


@dataclass(eq=False)
class Found:
    """One parameter and every place where it is registered."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[dict[str, Any], str]]
    modules: list[nn.Module] = field(default_factory=list)  # the modules that register it

    @cached_property
    def local(self) -> Tensor:
        """The tensor to lay out: the parameter itself, or this rank's tile of a DTensor, with the
        attributes of the parameter."""
        if not isinstance(self.parameter, DTensor) or isinstance(self.parameter, ShardedTensor):
            return self.parameter
        tile = self.parameter._local_tensor.detach()
        tile.requires_grad_(self.parameter.requires_grad)
        carry_attributes(self.parameter, tile)
        return tile

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is laid out."""
        if isinstance(self.parameter, ShardedTensor):
            return self.parameter.cut.item_shape
        return tuple(self.local.shape)

    @cached_property
    def uneven(self) -> bool:
        """Whether ranks of tensor parallelism hold tiles of different shapes."""
        parameter = self.parameter
        if isinstance(parameter, ShardedTensor):
            return parameter.cut.tile is not None and len(parameter.cut.tile.shapes) > 1
        if not isinstance(parameter, DTensor):
            return getattr(parameter, UNEVEN, False)
        parts: dict[int, int] = {}  # by dimension: the number of parts that it is cut into
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if isinstance(placement, Shard):
                parts[placement.dim] = parts.get(placement.dim, 1) * size
        return any(parameter.shape[dim] % number for dim, number in parts.items())

    @property
    def owners(self) -> tuple[type[nn.Module], ...]:
        return tuple(type(module) for module in self.modules)


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules`` without repetitions, and without modules that are inside others of the list."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    unique: list[nn.Module] = []
    for module in modules:
        if id(module) not in inner and all(module is not other for other in unique):
            unique.append(module)
    return unique


def find_parameters(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Found]:
    """Parameters below ``roots`` that no inner unit owns, in the order of registration. A tied
    parameter is listed once."""
    found = parameters_and_units(roots, ignored, lambda module: unit_of(module) is not None)
    return [entry for entry in found if isinstance(entry, Found)]


def own_buffers(
    roots: Sequence[nn.Module], *, attributes: bool = False
) -> list[tuple[str, Tensor]]:
    """Names and values of the buffers below ``roots`` that no inner unit has, without sparse and
    distributed tensors.

    ``attributes``: instead of buffers, the tensors that modules keep as plain attributes, or in
    attributes that are lists or dicts (the first 64 entries).
    """
    below = modules_below([("", root) for root in roots], lambda m: unit_of(m) is not None)
    tensors = []
    for path, module, is_inner in below:
        if is_inner:
            continue
        for name, value in (vars(module) if attributes else module._buffers).items():
            if name in ("_parameters", "_buffers"):
                continue
            entries = list(value.values()) if isinstance(value, dict) else value
            entries = entries[:64] if isinstance(entries, list | tuple) else [entries]
            tensors += [
                (f"{path}{name}", entry)
                for entry in entries
                if type(entry) is Tensor and entry.layout == torch.strided
            ]
    return tensors


def parameters_and_units(
    roots: Sequence[nn.Module], ignored: set[nn.Parameter], is_unit: Callable[[nn.Module], bool]
) -> Iterator[Found | tuple[str, nn.Module]]:
    """The parameters of :func:`find_parameters`, and between them, in the order of registration,
    (path, module) of each inner unit."""
    found: dict[int, Found] = {}
    ignored_ids = {id(parameter) for parameter in ignored}
    several = len(roots) > 1
    named = [(f"{number}." if several else "", root) for number, root in enumerate(roots)]
    for path, module, is_inner in modules_below(named, is_unit):
        if is_inner:
            yield path, module
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            is_new = id(parameter) not in found
            entry = found.setdefault(id(parameter), Found(f"{path}{name}", parameter, []))
            entry.places.append((module._parameters, name))
            entry.modules.append(module)
            if is_new:
                yield entry


def grain_of(found: Found, choice: GrainChoice | None) -> Grain:
    """The grain of one parameter, by the ``grain`` that the user passed."""
    if choice is None or isinstance(choice, Grain):
        return choice or ROW
    if choice == "tensor":
        shape = found.parameter.shape
        if len(shape) > 2:
            return tensor_fraction(shape[0])
        return TENSOR if len(shape) == 2 else ROW
    return choice(found.name, found.parameter)


def wrap_units(model: nn.Module) -> list[nn.Module]:
    """The modules to wrap, inner before outer: the blocks of the outermost lists, then the model.

    A block is an entry of a ``ModuleList`` that has parameters. Lists inside a block, such as a
    list of experts, belong to the block.
    """
    blocks: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, nn.ModuleList):
            blocks += [block for block in module if any(True for _ in block.parameters())]
        else:
            waiting += list(module.children())[::-1]
    return [*outermost(blocks), model]


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


# ------------------------------------------------------------------------------ class and hooks


def install(
    roots: Sequence[nn.Module], unit: Unit, device: torch.device, found: Sequence[Found]
) -> None:
    """Replace parameters, move buffers, change classes and add hooks. If a step before the hooks
    fails, undo the steps."""
    classes = [type(root) for root in roots]
    before = [(parameters, name, parameters[name]) for parameters, name, *_ in unit.places]
    try:
        unit.hide(force=True)
        for root in roots:
            _move_buffers(root, device)
            root.__class__ = _wrapped_class(type(root))
            # Past __setattr__: an OptimizedModule would set the attribute of the module inside.
            vars(root)["_shardwise_unit"] = unit
    except Exception:
        for root, original in zip(roots, classes, strict=True):
            root.__class__ = original
            root.__dict__.pop("_shardwise_unit", None)
        for parameters, name, parameter in before:
            parameters[name] = parameter
        raise
    for root in roots:
        root.__dict__.setdefault(STATE_KEY, {})[_TORCH_VERB] = unit
        # By this, torch's ``replicate`` (DDP without a wrapper) of an outer module leaves this out.
        root.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
        root.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
        root.register_forward_hook(_post_forward)
        root.register_forward_hook(_after_failure, always_call=True)
        root.register_state_dict_pre_hook(_before_state_dict)
        root.register_state_dict_post_hook(_after_state_dict)
        root.register_load_state_dict_pre_hook(_before_load)
        root.register_load_state_dict_post_hook(_after_load)
    unit.members = Members(unit)
    for f in found:
        unit.originals.append((f.name, weakref.ref(f.parameter)))
        setattr(f.parameter, OWNER, f.name)
    with_grad = [f.name for f in found if f.parameter.grad is not None]
    if with_grad:
        warn_once(logger, "gradients from before wrapping are dropped: %s", quoted(with_grad))


def _move_buffers(root: nn.Module, device: torch.device) -> None:
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


_classes: dict[type, type] = {}


def _wrapped_class(original: type) -> type:
    if original not in _classes:
        more = {"save_pretrained": _save_pretrained} if hasattr(original, "save_pretrained") else {}
        _classes[original] = type(f"FSDP{original.__name__}", (ShardedModule, original), more)
    return _classes[original]


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of transformers and peft, with whole weights. All ranks call it, and
    rank 0 writes."""
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = full_state_dict(self, only_first_rank=True)
    kwargs.setdefault("is_main_process", torch.distributed.get_rank() == 0)
    return super(ShardedModule, self).save_pretrained(*args, **kwargs)  # type: ignore[misc]


# The hooks are on wrapped modules only, so their module always has a unit.


@uncompiled
def _pre_forward(module: Any, args: Any, kwargs: Any) -> Any:
    return module._shardwise_unit._pre_forward(module, args, kwargs)


@uncompiled
def _post_forward(module: Any, args: Any, output: Any) -> Any:
    return module._shardwise_unit.post_forward(output)


@uncompiled
def _after_failure(module: Any, args: Any, output: Any) -> None:
    """Put the sharded parameters back after a forward that raised: code that catches the exception
    and calls ``model.zero_grad()`` means these parameters."""
    unit = module._shardwise_unit
    if unit.calls.running and not unit.runtime.in_backward:
        unit.drop_dead_calls(entering=True)


def _before_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:
    """Show the sharded parameters to the state dict, even while whole weights are gathered."""
    module._shardwise_unit.hide_at_rest()
    module._shardwise_unit.hide()


def _after_state_dict(module: Any, *_: Any) -> None:
    """Show the whole weights again if a forward or backward called ``state_dict()``."""
    module._shardwise_unit.show_again()


def _before_load(
    module: Any, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    """Show the sharded parameters to a load."""
    unit: Unit = module._shardwise_unit
    unit.put_away(release=False)  # the load overwrites what was written to whole weights
    unit.assigns = metadata.get("assign_to_params_buffers", False)
    _refuse_codes(module, state_dict, prefix)


def _after_load(module: Any, keys: Any) -> None:
    """Move the tensors that ``assign=True`` put in place of parameters into the flat buffers."""
    if module._shardwise_unit.assigns:
        module._shardwise_unit.assign()


def _refuse_codes(module: nn.Module, state_dict: Any, prefix: str) -> None:
    """Raise for fp8 codes, which ``copy_`` would silently read as numbers."""
    for name, parameter in module.named_parameters():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.itemsize == 1 < parameter.itemsize:
            raise ValueError(
                f"'{prefix}{name}' is {value.dtype}: codes, not values. Loading does not decode "
                f"codes into main weights. Load the values that were encoded, or decode the codes "
                f"first (shardwise.precision.FP8Tensor)"
            )
