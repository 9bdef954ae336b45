# SPDX-License-Identifier: Apache-2.0
"""The steps of wrapping a module: find its parameters, make their values the same on all ranks, and
give the module its class and hooks."""

from __future__ import annotations

import logging
import math
import weakref
import zlib
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

from shardwise.holders import hide_from_hooks, show_to_hooks
from shardwise.layout import ROW, TENSOR, Grain, tensor_fraction
from shardwise.lockstep import STEP
from shardwise.notices import warn_once
from shardwise.shard.flow import in_checkpoint, in_recomputation
from shardwise.shard.members import Members, modules_below
from shardwise.shard.module import ShardedModule, unit_of
from shardwise.shard.state_dict import full_state_dict
from shardwise.shard.unit import Unit
from shardwise.shard.whole_parameter import carry_attributes
from shardwise.tensor import ShardedTensor
from shardwise.tensor_writes import sketch
from shardwise.uncompiled import uncompiled
from shardwise.words import quoted

logger = logging.getLogger(__name__)

# Torch's pipeline stages ask torch's verb for the state of a module, which is kept under this key.
_TORCH_VERB = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]
UNEVEN = "_shardwise_uneven"  # of a plain parameter that stands for a tile in a plan
# "tensor": a promise that no matrix is cut, refused where padding would be too much of it.
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
        """The tensor to lay out, with the attributes of the parameter: the parameter itself, or
        this rank's tile of a DTensor."""
        if not isinstance(self.parameter, DTensor) or isinstance(self.parameter, ShardedTensor):
            return self.parameter
        tile = self.parameter._local_tensor.detach()
        tile.requires_grad_(self.parameter.requires_grad)
        carry_attributes(self.parameter, tile)
        return tile

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is laid out."""
        ours = isinstance(self.parameter, ShardedTensor)
        return self.parameter.cut.item_shape if ours else tuple(self.local.shape)  # type: ignore[attr-defined]

    @cached_property
    def uneven(self) -> bool:
        """Whether ranks of tensor parallelism hold tiles of different shapes."""
        over = self.parameter
        if isinstance(over, ShardedTensor):
            return over.cut.tile is not None and len(over.cut.tile.shapes) > 1
        if not isinstance(over, DTensor):
            return getattr(over, UNEVEN, False)
        pairs = zip(over.placements, over.device_mesh.shape, strict=True)
        cuts = [(one.dim, size) for one, size in pairs if isinstance(one, Shard)]
        return any(
            over.shape[dim] % math.prod(size for other, size in cuts if other == dim)
            for dim, _ in cuts
        )

    @property
    def owners(self) -> tuple[type[nn.Module], ...]:
        return tuple(type(module) for module in self.modules)


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules`` without repetitions and without modules inside another one of the list."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    unique: list[nn.Module] = []
    for module in modules:
        if id(module) not in inner and all(module is not other for other in unique):
            unique.append(module)
    return unique


def find_parameters(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Found]:
    """Parameters below ``roots`` that no inner unit owns, in registration order, tied ones once."""
    found = parameters_and_units(roots, ignored, lambda module: unit_of(module) is not None)
    return [one for one in found if isinstance(one, Found)]


def own_buffers(
    roots: Sequence[nn.Module], *, attributes: bool = False
) -> list[tuple[str, Tensor]]:
    """Names and values of the buffers below ``roots`` that no inner unit has, but for sparse and
    distributed ones; or of tensors that are plain attributes, or in short lists and dicts there."""
    below = modules_below([("", root) for root in roots], lambda one: unit_of(one) is not None)
    own = [(path, module) for path, module, inner in below if not inner]
    found = [
        (f"{path}{name}", value)
        for path, module in own
        for name, values in (vars(module) if attributes else module._buffers).items()
        for value in (_inside(values) if name not in ("_parameters", "_buffers") else ())
    ]
    return [(n, v) for n, v in found if type(v) is Tensor and v.layout == torch.strided]


def _inside(value: Any) -> Sequence[Any]:
    value = list(value.values()) if isinstance(value, dict) else value
    return value[:64] if isinstance(value, list | tuple) else (value,)


def parameters_and_units(
    roots: Sequence[nn.Module], ignored: set[nn.Parameter], is_unit: Callable[[nn.Module], bool]
) -> Iterator[Found | tuple[str, nn.Module]]:
    """The same, and (path, module) of each inner unit in its place."""
    found: dict[int, Found] = {}
    skipped = {id(parameter) for parameter in ignored}
    several = len(roots) > 1
    named = [(f"{number}." if several else "", root) for number, root in enumerate(roots)]
    for path, module, inner in modules_below(named, is_unit):
        if inner:
            yield path, module
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            if new := id(parameter) not in found:
                found[id(parameter)] = Found(f"{path}{name}", parameter, [])
            found[id(parameter)].places.append((module._parameters, name))
            found[id(parameter)].modules.append(module)
            if new:
                yield found[id(parameter)]


def grain_of(found: Found, choice: GrainChoice | None) -> Grain:
    """The grain of one parameter: the given one, or the one that the given function returns."""
    if choice is None or isinstance(choice, Grain):
        return choice or ROW
    if choice == "tensor":
        shape = found.parameter.shape
        return TENSOR if len(shape) == 2 else tensor_fraction(shape[0]) if len(shape) > 2 else ROW
    return choice(found.name, found.parameter)


def wrap_units(model: nn.Module) -> list[nn.Module]:
    """The modules to wrap, inner before outer: every block of the outermost lists, then the model.

    A block is an entry of a ``ModuleList`` that holds parameters; lists inside a block, such as its
    experts, stay with it.
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
    """Swap parameters, move buffers, change classes and add hooks; undo all if anything fails."""
    classes = [type(root) for root in roots]
    before = [(parameters, name, parameters[name]) for parameters, name, *_ in unit.places]
    try:
        unit.hide(force=True)
        for root in roots:
            _move_buffers(root, device)
            root.__class__ = _wrapped_class(type(root))
            vars(root)["_shardwise_unit"] = unit  # an OptimizedModule would pass it on inside
    except Exception:
        for root, original in zip(roots, classes, strict=True):
            root.__class__ = original
            root.__dict__.pop("_shardwise_unit", None)
        for parameters, name, parameter in before:
            parameters[name] = parameter
        raise
    for root in roots:
        root.__dict__.setdefault(STATE_KEY, {})[_TORCH_VERB] = unit
        # Torch's ``replicate`` (DDP without a wrapper) around this module leaves it out by this.
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
        f.parameter._shardwise_owner = f.name  # type: ignore[attr-defined]
    if lost := [f.name for f in found if f.parameter.grad is not None]:
        warn_once(logger, "gradients from before wrapping are dropped: %s", quoted(lost))


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
    """transformers' and peft's own, given whole weights: call it on every rank; rank 0 writes."""
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = full_state_dict(self, only_first_rank=True)
    kwargs.setdefault("is_main_process", torch.distributed.get_rank() == 0)
    return super(ShardedModule, self).save_pretrained(*args, **kwargs)  # type: ignore[misc]


@uncompiled
def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    if not in_checkpoint() and not in_recomputation():  # which count all that autograd saves
        hide_from_hooks()
    return unit._pre_forward(module, args, kwargs)


@uncompiled
def _post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    return unit.post_forward(output)


@uncompiled
def _after_failure(module: nn.Module, args: Any, output: Any) -> None:
    """Put the sharded parameters back after a forward that raised: code that catches the exception
    and calls ``model.zero_grad()`` means the sharded parameters. And others' hooks after each."""
    show_to_hooks()
    unit = unit_of(module)
    if unit is None or not unit.calls.running:
        return
    if not unit.runtime.in_backward and not unit.runtime.in_other_thread:
        unit.drop_dead_calls(entering=True)


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Show the sharded parameters to the state dict, even while whole weights are gathered."""
    unit = unit_of(module)
    if unit is not None:
        unit.hide_at_rest()
        unit.hide()


def _after_state_dict(module: nn.Module, *_: Any) -> None:
    """Show the whole weights again to a forward or backward that made the state dict."""
    unit = unit_of(module)
    if unit is not None:
        unit.show_again()


def _before_load(
    module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    unit = unit_of(module)
    if unit is not None:
        unit.put_away(release=False)  # writes to whole weights are overwritten
        unit.assigns = metadata.get("assign_to_params_buffers", False)
        sketches = _sketches(unit, module, state_dict, prefix)
        for axis in dict.fromkeys(axis for group in unit.groups for axis in group.ranks.axes):
            pairs = zip(sketches, unit.groups, strict=True)
            mine = [one for one, group in pairs if axis in group.ranks.axes]
            values = zlib.crc32(repr(mine).encode())
            axis.journal.add(STEP, f"load_state_dict() of '{unit.name}' with values {values:08x}")
    _refuse_codes(module, state_dict, prefix)


def _after_load(module: nn.Module, keys: Any) -> None:
    """Move tensors that ``assign=True`` put in place of the parameters into their buffers."""
    unit = unit_of(module)
    if unit is not None and unit.assigns:
        unit.assign()


def _sketches(unit: Unit, module: nn.Module, state_dict: Any, prefix: str) -> list[int]:
    """For each group a checksum of some numbers of each whole tensor that is loaded: the same on
    the ranks of the group, which may not be those of another (experts)."""
    numbers = {(id(parameters), name): number for parameters, name, number, _ in unit.places}
    found = [0] * len(unit.groups)
    for path, inner in module.named_modules():
        for name in inner._parameters:
            number = numbers.get((id(inner._parameters), name))
            value = state_dict.get(f"{prefix}{path}.{name}" if path else f"{prefix}{name}")
            if number is not None and type(value) in (Tensor, nn.Parameter):
                found[number] = sketch(value, found[number])
    return found


def _refuse_codes(module: nn.Module, state_dict: Any, prefix: str) -> None:
    """Raise for 8-bit codes, which ``copy_`` would silently read as numbers."""
    for name, parameter in module.named_parameters():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.itemsize == 1 < parameter.itemsize:
            raise ValueError(
                f"'{prefix}{name}' is {value.dtype}: codes, not values, and main weights are never "
                f"decoded from codes without being asked. Load the values that were encoded, or "
                f"decode them yourself (shardwise.precision.FP8Tensor)"
            )
