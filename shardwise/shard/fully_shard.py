# SPDX-License-Identifier: Apache-2.0
"""``fully_shard``: makes a unit of a module. All checks run before anything changes.

module tree --> parameters that no inner unit owns --> groups of equal dtype, format, trainability
            --> one flat buffer for each group     --> the module's class and hooks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.core import comm
from shardwise.core.layout import Item, Layout, cut_finer, plan, plan_groups
from shardwise.core.mesh import Ranks, data_mesh, init_mesh, split
from shardwise.core.placements import PARTIAL, REPLICATE, SHARD, Placements, hsdp, zero
from shardwise.precision import Precision
from shardwise.precision.fp8 import Format
from shardwise.shard.checks import (
    check_types,
    forward_problems,
    option_problems,
    wrapping_problems,
)
from shardwise.shard.formats import item_of
from shardwise.shard.module import unit_of
from shardwise.shard.wrap import GrainChoice, PlannedBuffer, Wrapping, grain_of

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
    unused_parameters: str = "none",
    memory: str = "caching",
    meshes: Mapping[str, DeviceMesh] | None = None,
) -> M:
    """Shard a module's parameters, gradients and optimizer state over a mesh, in place.

    Call it bottom-up: on each block, then on the model. Each call makes a *unit* of the parameters
    below the module that no earlier call has taken. The unit is gathered before the module's
    forward and released after it. All ranks must run the same units in the same order.

    Args:
        module: a module, or a list of modules that run one after another as one unit.
        mesh: the mesh to shard over. Only its axes ``dp_outer`` and ``dp`` are used if it has
            axes of these names, otherwise all its axes. Default: one axis of all ranks.
        placements: ``zero(0..3)``, ``hsdp()``, ``hfsdp()`` or your own :class:`Placements`.
            Default: ``zero(3)`` on a mesh of one axis, ``hsdp()`` on two axes.
        precision: the dtypes of weights, gradients and inputs.
        reshard_after_forward: what happens to the gathered weights between forward and backward:

            - True: release them, and gather them again for backward.
            - False: keep them.
            - a number k: each rank keeps 1/k of them. Backward gathers from k neighbouring ranks.
            - None (default): False for the root module, True for all others.

            A view of a weight that your code keeps is valid until the unit is released, as in
            FSDP2.
        shard_placement_fn: torch's argument, without effect: flat buffers are cut along rows, and
            no dimension has to divide evenly.
        mp_policy: torch's ``MixedPrecisionPolicy``, instead of ``precision``.
        offload_policy: ``CPUOffloadPolicy()`` keeps main weights, gradients and optimizer state in
            host memory.
        ignored_params: parameters to leave alone: they are not sharded, moved or reduced.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: the axes of ``mesh`` that replicate, and
            the axes that shard.
        grain: the smallest piece of a parameter that may not be cut: a value for all parameters, or
            a function of name and parameter. Default: a row. If whole rows would pad the buffers of
            a unit by more than 1/16 (with about as many ranks as rows): an element. ``"tensor"``
            promises that no matrix is cut, whatever that pads; ``sw.plan`` says how much.
        unused_parameters: what to do for a parameter of a unit that ran, and that got no gradient:

            - ``"none"``: ``.grad`` stays None. If other ranks have a gradient, theirs is NaN.
            - ``"zeros"``: it counts as zeros, and ``.grad`` is not None.
        memory: where packed gradients come from: ``"caching"`` or ``"trace"`` (memory of the step
            before). The value of the root module counts.
        meshes: other meshes for some parameters; see ``data_parallel``.
    """
    modules = list(module) if isinstance(module, list) else [module]
    check_types(modules, mesh, placements, precision, mp_policy)
    mesh = _choose_mesh(mesh, dp_mesh_dims)
    placements = placements or _default_placements(mesh, dp_mesh_dims)
    precision = precision or Precision.from_torch(mp_policy or MixedPrecisionPolicy())
    job = Wrapping("fully_shard", modules, mesh, placements, precision, ignored_params)
    problems = job.spread(meshes) + wrapping_problems(job)
    wrong = option_problems(unused_parameters, memory, offload_policy, grain)
    ranks = job.ranks[mesh]
    inner = ranks.axes[-1]
    problems += forward_problems(reshard_after_forward, f"'{inner.name}'", inner.size, placements)
    if meshes and type(reshard_after_forward) is int:
        problems.append(
            f"reshard_after_forward={reshard_after_forward} with meshes: the neighbours of a rank "
            f"differ from mesh to mesh; use True or False"
        )
    job.refuse(
        problems + wrong,
        f"unused={unused_parameters} memory={memory} offload={offload_policy} "
        f"reshard_after_forward={reshard_after_forward}",
        ["" if wrong else f"by {grain_of(f, grain)}" for f in job.found],
    )
    kept_axis, release = _after_forward(reshard_after_forward, ranks)
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    job.install(
        _planned_groups(job, grain),
        # An expert's gradient is a sum over the tokens of all ranks, of other meshes too.
        {
            home: float(home.size() * over.others.size)
            for home, over in job.ranks.items()
            if over.others
        },
        offload=offload,
        pin=offload and offload_policy.pin_memory and job.device.type == "cuda",  # type: ignore[union-attr]
        release_after_forward=release,
        kept_axis=kept_axis,
        unused=unused_parameters,
        options={"memory": memory},
    )
    return module


# As in torch: scripts call ``fully_shard.state(module)`` to see whether a module is wrapped.
fully_shard.state = unit_of  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ choices


def _planned_groups(job: Wrapping, grain: GrainChoice | None) -> list[PlannedBuffer]:
    """The buffers of a unit. Parameters share a buffer if they have the same mesh, dtype,
    format and trainability, and tensor parallelism cut all of them evenly or all unevenly. If their
    rows fit badly together, they get several buffers."""
    found = job.found
    alike: dict[tuple[DeviceMesh, torch.dtype, bool, Format | None, bool], list[int]] = {}
    for position, (f, home, stored) in enumerate(zip(found, job.homes, job.stored, strict=True)):
        key = (home, f.parameter.dtype, f.parameter.requires_grad, stored.format, f.uneven)
        alike.setdefault(key, []).append(position)
    groups = []
    for (home, *_), positions in alike.items():
        items = tuple(item_of(job.stored[at], grain_of(found[at], grain)) for at in positions)
        for members, layout in _laid_out(items, job.num_shards(home), grain is None):
            groups.append(PlannedBuffer(tuple(positions[at] for at in members), layout, home))
    return groups


@lru_cache(maxsize=64)
def _laid_out(
    items: Sequence[Item], num_shards: int, finer: bool
) -> list[tuple[tuple[int, ...], Layout]]:
    """The members and the layout of each buffer. Cached, so that equal blocks of a model are laid
    out once."""
    items = cut_finer(items, num_shards) if finer else items
    return [
        (members, plan([items[member] for member in members], num_shards))
        for members in plan_groups(items, num_shards)
    ]


def _choose_mesh(mesh: DeviceMesh | None, dims: Any) -> DeviceMesh:
    if mesh is None:
        return init_mesh()
    if dims is None:
        return data_mesh(mesh)
    names = _axis_names(dims.replicate) + _axis_names(dims.shard)
    missing = [name for name in names if name not in (mesh.mesh_dim_names or ())]
    if missing:
        raise ValueError(
            f"dp_mesh_dims names {missing}, not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
        )
    return mesh[tuple(names)]


def _axis_names(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _default_placements(mesh: DeviceMesh, dims: Any) -> Placements:
    """``zero(3)`` on one axis, ``hsdp()`` on two; or the placements that ``dims`` describe."""
    if dims is None:
        if mesh.ndim > 2:
            raise ValueError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: call its data-parallel "
                f"axes dp_outer and dp, or pass placements with an entry for each axis"
            )
        return zero(3) if mesh.ndim == 1 else hsdp()
    outer, inner = len(_axis_names(dims.replicate)), len(_axis_names(dims.shard))
    weights = [REPLICATE] * outer + [SHARD] * inner
    return Placements(compute=weights, grad=[PARTIAL] * outer + [SHARD] * inner, main=weights)


def _after_forward(wanted: bool | int | None, ranks: Ranks) -> tuple[comm.Axis | None, bool | None]:
    """(the axis of the k ranks that keep weights between forward and backward, whether the whole
    weights are released after forward)."""
    if wanted is None or isinstance(wanted, bool):
        return None, wanted
    if wanted == 1:
        return None, False
    axis = ranks.axes[-1]
    return (None, True) if wanted == axis.size else (split(axis, wanted), True)
