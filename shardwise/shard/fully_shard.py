# SPDX-License-Identifier: Apache-2.0
"""``fully_shard``: from a module to a unit. Everything is checked before anything changes.

module tree --> parameters not owned by an inner unit --> groups alike in dtype and trainability
            --> one flat buffer each --> the module's class and hooks
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise import comm
from shardwise.buffer import Ranks
from shardwise.layout import Item, plan_groups
from shardwise.mesh import data_mesh, default_mesh
from shardwise.placements import PARTIAL, REPLICATE, SHARD, Placements, hsdp, zero
from shardwise.precision import Precision
from shardwise.shard.checks import (
    check_types,
    describe_parameter,
    forward_problems,
    mesh_problems,
    module_problems,
    option_problems,
    placement_problems,
    raise_together,
)
from shardwise.shard.find import Found, GrainChoice, find_parameters, grain_of, outermost
from shardwise.shard.group import Group
from shardwise.shard.module import ShardedModule, unit_of
from shardwise.shard.unit import Unit

logger = logging.getLogger(__name__)
M = TypeVar("M", bound="nn.Module | list[nn.Module]")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    precision: Precision | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    grain: GrainChoice | None = None,
    unused_parameters: str = "error",
    memory: str = "caching",
    unify_streams: bool = False,
) -> M:
    """Spread a module's parameters, gradients and optimizer state over a mesh, in place.

    Call it bottom-up: on each block, then on the model. A call owns the parameters below it that no
    inner call owns; they are gathered before the module's forward and released after it, together.

    Args:
        module: a module, or a list of modules that run one after another as one unit.
        mesh: any DeviceMesh; its ``dp_outer`` and ``dp`` axes where it names them, else all axes.
        placements: ``zero(0..3)``, ``hsdp()``, ``hfsdp()`` or your own :class:`Placements`.
            Default: fully sharded, replicated over the outer axis of a 2-D mesh.
        precision: dtypes of weights, gradients and inputs; or ``mp_policy``, torch's form of it.
        reshard_after_forward: release after forward and gather again in backward (True), keep
            (False), keep 1/k and gather again from k neighbours (an int), or True except for the
            root (None).
        offload_policy: ``CPUOffloadPolicy``: main weights, gradients and optimizer state on the
            host.
        ignored_params: left alone: not sharded, not moved, not reduced.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: which axes of ``mesh`` replicate, and which
            shard.
        grain: the smallest piece of a parameter that may not be cut; rows by default.
        unused_parameters: what a parameter without a gradient means: an "error", or "zeros".
        memory: where transient buffers come from, "caching" or "trace"; the root's choice holds.
        unify_streams: all communication on one stream: less overlap, less peak; the root's choice
            holds.
    """
    modules = list(module) if isinstance(module, list) else [module]
    check_types(modules, mesh, placements, precision, mp_policy)
    roots = outermost(modules)
    mesh = _choose_mesh(mesh, dp_mesh_dims)
    placements = placements or _default_placements(mesh, dp_mesh_dims)
    precision = precision or Precision.from_torch(mp_policy or MixedPrecisionPolicy())
    found = find_parameters(roots, ignored_params or set())
    ranks = Ranks(mesh)
    problems = module_problems(roots, found) + mesh_problems(mesh, placements)
    problems += option_problems(unused_parameters, memory, offload_policy)
    problems += forward_problems(reshard_after_forward, ranks, placements)
    problems += placement_problems(shard_placement_fn, found)
    description = [
        f"{placements} {precision} unused={unused_parameters} memory={memory} "
        f"offload={offload_policy} reshard_after_forward={reshard_after_forward}"
    ] + [describe_parameter(f, grain) for f in found]
    raise_together(description, problems, ranks)
    kept_axis, release = _after_forward(reshard_after_forward, ranks)
    device = _device(mesh)
    values = _same_values(found, ranks, device)
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    pin = offload and offload_policy.pin_memory and device.type == "cuda"  # type: ignore[union-attr]
    groups: list[Group] = []
    where: dict[int, tuple[int, int]] = {}
    for members in _groups(found, ranks.num_shards(placements.main), grain):
        chosen = [found[position] for position in members]
        items = [Item(f.name, tuple(f.parameter.shape), grain_of(f, grain)) for f in chosen]
        tensors = [values[position] for position in members]
        for index, position in enumerate(members):
            where[position] = (len(groups), index)
        groups.append(
            Group(items, tensors, ranks, placements, precision, device, offload=offload, pin=pin)
        )
    del values
    places = [
        (parameters, name, *where[position])
        for position, f in enumerate(found)
        for parameters, name in f.places
    ]
    unit = Unit(
        type(roots[0]).__name__ if roots else "empty",
        roots,
        groups,
        places,
        precision=precision,
        release_after_forward=release,
        kept_axis=kept_axis,
        unused=unused_parameters,
        options={"memory": memory, "unify": unify_streams},
    )
    _install(roots, unit, device)
    for f in found:
        unit.forsaken.append((f.name, weakref.ref(f.parameter)))
        f.parameter._shardwise_owner = f.name  # type: ignore[attr-defined]
    return module


# ------------------------------------------------------------------------------ choices


def _groups(
    found: Sequence[Found], num_shards: int, grain: GrainChoice | None
) -> list[tuple[int, ...]]:
    """Positions of parameters that share a buffer: alike in dtype and trainability, and not so odd
    in their rows that packing them together would cost more than it saves."""
    alike: dict[tuple[torch.dtype, bool], list[int]] = {}
    for position, f in enumerate(found):
        alike.setdefault((f.parameter.dtype, f.parameter.requires_grad), []).append(position)
    groups = []
    for positions in alike.values():
        items = [
            Item(found[p].name, tuple(found[p].parameter.shape), grain_of(found[p], grain))
            for p in positions
        ]
        for members in plan_groups(items, num_shards):
            groups.append(tuple(positions[member] for member in members))
    return groups


def _choose_mesh(mesh: DeviceMesh | None, dims: Any) -> DeviceMesh:
    if mesh is None:
        return default_mesh()
    if dims is None:
        return data_mesh(mesh)
    names = _axis_names(dims.replicate) + _axis_names(dims.shard)
    missing = [name for name in names if name not in (mesh.mesh_dim_names or ())]
    if missing:
        raise ValueError(f"dp_mesh_dims names {missing}; the mesh has axes {mesh.mesh_dim_names}")
    return mesh[tuple(names)]


def _axis_names(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _default_placements(mesh: DeviceMesh, dims: Any) -> Placements:
    """Fully sharded, replicated over the outer one of two axes; or as ``dims`` say."""
    if dims is None:
        return zero(3) if mesh.ndim == 1 else hsdp()
    outer, inner = len(_axis_names(dims.replicate)), len(_axis_names(dims.shard))
    weights = [REPLICATE] * outer + [SHARD] * inner
    return Placements(compute=weights, grad=[PARTIAL] * outer + [SHARD] * inner, main=weights)


def _after_forward(wanted: bool | int | None, ranks: Ranks) -> tuple[comm.Axis | None, bool | None]:
    """(the axis of k ranks that keep weights between forward and backward, whether to release)."""
    if wanted is None or isinstance(wanted, bool):
        return None, wanted
    if wanted == 1:
        return None, False
    axis = ranks.axes[-1]
    return (None, True) if wanted == axis.size else (axis.split(wanted), True)


# ------------------------------------------------------------------------------ building


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _same_values(found: Sequence[Found], ranks: Ranks, device: torch.device) -> list[Tensor]:
    """Initial values, the same on every rank: where they differ, the first rank's are taken."""
    values: list[Tensor] = [f.parameter for f in found]
    sums = [_checksum(value) for value in values]
    for axis in ranks.axes:
        everyone = comm.agree(sums, axis)
        differing = [
            position
            for position in range(len(values))
            if any(theirs[position] != everyone[0][position] for theirs in everyone)
        ]
        if differing:
            logger.warning(
                "ranks of axis '%s' initialised %d parameters differently (first: '%s'); taking "
                "the "
                "values of its rank 0. Seed all ranks alike to avoid the broadcast",
                axis.name,
                len(differing),
                found[differing[0]].name,
            )
        for position in differing:
            original = values[position]
            value = original.detach().to(device, copy=True).contiguous()
            comm.broadcast(value, axis).wait()
            values[position] = value.requires_grad_(original.requires_grad)
            for name, attribute in vars(original).items():
                setattr(values[position], name, attribute)
        sums = everyone[0]
    return values


def _checksum(value: Tensor) -> int:
    """Of the bits and their order; 0 for a parameter that has no values yet."""
    if value.is_meta:
        return 0
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = value.detach().contiguous().view(-1).view(width[value.element_size()])
    total, first = 0, 1
    for part in bits.split(1 << 22):  # the weights of positions take memory too
        places = torch.arange(first, first + part.numel(), device=part.device)
        total += int((part.to(torch.int64) * places).sum().item())
        first += part.numel()
    return total % (1 << 63)


def _install(roots: Sequence[nn.Module], unit: Unit, device: torch.device) -> None:
    """Swap parameters, move buffers, change classes, add hooks. Undone if anything fails."""
    classes = [type(root) for root in roots]
    before = [(parameters, name, parameters[name]) for parameters, name, *_ in unit.places]
    try:
        unit.hide(force=True)
        for root in roots:
            _move_buffers(root, device)
            root.__class__ = _wrapped_class(type(root))
            root._shardwise_unit = unit  # type: ignore[assignment]
    except Exception:
        for root, original in zip(roots, classes, strict=True):
            root.__class__ = original
            root.__dict__.pop("_shardwise_unit", None)
        for parameters, name, parameter in before:
            parameters[name] = parameter
        raise
    for root in roots:
        root.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
        root.register_forward_hook(_post_forward)
        root.register_state_dict_pre_hook(_rest_first)
        root.register_load_state_dict_pre_hook(_rest_before_load)


def _move_buffers(root: nn.Module, device: torch.device) -> None:
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


_classes: dict[type, type] = {}


def _wrapped_class(original: type) -> type:
    if original not in _classes:
        _classes[original] = type(f"FSDP{original.__name__}", (ShardedModule, original), {})
    return _classes[original]


def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    return unit._pre_forward(module, args, kwargs)


def _post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    return unit.post_forward(output)


def _rest_first(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A state dict shows the parameters at rest, whatever was kept gathered."""
    unit = unit_of(module)
    if unit is not None:
        unit.hide()


def _rest_before_load(
    module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    unit = unit_of(module)
    if unit is not None:
        unit.hide()
    if metadata.get("assign_to_params_buffers", False):
        raise NotImplementedError(
            "load_state_dict(assign=True) would replace views of the flat buffers by strangers; "
            "load with assign=False"
        )
