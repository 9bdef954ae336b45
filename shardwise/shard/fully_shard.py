# SPDX-License-Identifier: Apache-2.0
"""``fully_shard``: from a module to a unit. Everything is checked before anything changes.

module tree --> parameters that no inner unit owns --> groups alike in dtype, format, trainability
            --> one flat buffer each --> the module's class and hooks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise import comm
from shardwise.layout import CHEAP_PADDING, Item, Layout, cut_finer, plan, plan_groups
from shardwise.mesh import Ranks, data_mesh, init_mesh, split
from shardwise.placements import PARTIAL, REPLICATE, SHARD, Placements, hsdp, zero
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Format
from shardwise.shard.buckets import PROMISED_PADDING
from shardwise.shard.building import PlannedBuffer, Wrapping
from shardwise.shard.checks import (
    check_types,
    forward_problems,
    grain_problems,
    option_problems,
    placement_problems,
    step_problems,
)
from shardwise.shard.formats import item_of
from shardwise.shard.module import unit_of
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import GrainChoice, grain_of

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
    gather_in_step: bool = False,
    unused_parameters: str = "none",
    memory: str = "caching",
    unify_streams: bool = False,
    meshes: Mapping[str, DeviceMesh] | None = None,
) -> M:
    """Spread a module's parameters, gradients and optimizer state over a mesh, in place.

    Call it bottom-up: on each block, then on the model. A call owns the parameters below it that no
    inner call owns; they are gathered before the module's forward and released after it, together.

    All ranks must run the same units in the same order, and step their optimizers alike, with
    gradients of the same parameters. Each backward compares what the ranks did since the backward
    before, and raises an error on every rank where they differ. Two mistakes are not noticed there:
    a rank that leaves out a whole iteration, with its step (a save, or the end of the run, shows
    it), and one that alone writes to weights or gradients (``if rank == 0: p.zero_()``): it writes
    its own piece. Where ranks hold copies, a save tells that these differ.

    Args:
        module: a module, or a list of modules that run one after another as one unit.
        mesh: any DeviceMesh; its ``dp_outer`` and ``dp`` axes where it names them, else all axes.
        placements: ``zero(0..3)``, ``hsdp()``, ``hfsdp()`` or your own :class:`Placements`.
            Default: fully sharded, replicated over the outer axis of a 2-D mesh.
        precision: dtypes of weights, gradients and inputs; or ``mp_policy``, torch's form of it.
        reshard_after_forward: release after forward and gather again in backward (True), keep
            (False), keep 1/k and gather again from k neighbours (an int), or True except for the
            root (None). A view of a weight that forward leaves in a list is valid in forward, and
            again once backward is over; in between its memory is released, and reading it ends the
            process, as in FSDP2: keep a clone, or pass False.
        offload_policy: ``CPUOffloadPolicy``: main weights, gradients and optimizer state on the
            host.
        shard_placement_fn: torch's; checked, and of no effect: flat buffers are cut along rows, and
            no dimension need divide evenly.
        ignored_params: left alone: not sharded, not moved, not reduced.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: which axes of ``mesh`` replicate, and which
            shard.
        grain: the smallest piece that may not be cut: one for all parameters, or a function of
            name and parameter. Default: a row, or an element where whole rows would pad a unit's
            buffers by more than a sixteenth (with about as many ranks as rows). "tensor" promises
            that no matrix is cut; it is refused where it would pad by more than an eighth.
        gather_in_step: where compute weights are replicated (``zero(1)``, ``zero(2)``), begin to
            gather them inside ``sw.optimizer``'s step, each unit as soon as it is updated, in the
            order of forward; else its forward does. Build the optimizer after this call.
        unused_parameters: what a parameter without a gradient means: ``.grad`` stays None ("none";
            the same on every rank, or it is an error), "zeros", or an "error" on all ranks. A unit
            that no rank calls has None under "zeros" too, and is named under "error". With
            "zeros" ranks may differ in what their losses depend on. They must not where a unit is
            inside a reentrant checkpoint or has one inside, where a checkpoint around several units
            has several outputs, where the weight gradients of a unit are delayed, and in a second
            backward over a kept graph (all ranks raise: out of step).
        memory: where transient buffers come from, "caching" or "trace"; the root's choice holds.
        unify_streams: all communication on one stream: less overlap, less peak; the root's choice
            holds.
        meshes: other meshes for some parameters, as for ``data_parallel``.
    """
    modules = list(module) if isinstance(module, list) else [module]
    check_types(modules, mesh, placements, precision, mp_policy)
    mesh = _choose_mesh(mesh, dp_mesh_dims)
    placements = placements or _default_placements(mesh, dp_mesh_dims)
    precision = precision or Precision.from_torch(mp_policy or MixedPrecisionPolicy())
    job = Wrapping("fully_shard", modules, mesh, placements, precision, ignored_params)
    problems = job.spread(meshes)
    found, ranks = job.found, job.ranks[mesh]
    inner, wrong_grain = ranks.axes[-1], grain_problems(grain)
    problems += option_problems(unused_parameters, memory, offload_policy)
    problems += forward_problems(reshard_after_forward, f"'{inner.name}'", inner.size, placements)
    problems += placement_problems(shard_placement_fn, found)
    if meshes and type(reshard_after_forward) is int:
        problems.append("reshard_after_forward with meshes: True or False; neighbours differ")
    job.refuse(
        problems + wrong_grain + step_problems(gather_in_step, placements),
        f"unused={unused_parameters} memory={memory} offload={offload_policy} "
        f"reshard_after_forward={reshard_after_forward} gather_in_step={gather_in_step}",
        ["" if wrong_grain else f"by {grain_of(f, grain)}" for f in found],
    )
    kept_axis, release = _after_forward(reshard_after_forward, ranks)
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    job.install(
        Unit,
        _planned_groups(job, grain),
        # Gradients of experts are sums over the tokens of all ranks.
        divisors={
            home: float(home.size() * over.others.size)
            for home, over in job.ranks.items()
            if over.others
        },
        offload=offload,
        pin=offload and offload_policy.pin_memory and job.device.type == "cuda",  # type: ignore[union-attr]
        release_after_forward=release,
        kept_axis=kept_axis,
        unused=unused_parameters,
        options={"memory": memory, "unify": unify_streams},
        early=gather_in_step,
    )
    return module


# Torch's spelling: what a script asks whether a module is wrapped.
fully_shard.state = unit_of  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ choices


def _planned_groups(job: Wrapping, grain: GrainChoice | None) -> list[PlannedBuffer]:
    """The buffers of a unit. Parameters share one that are alike in mesh, dtype, format,
    trainability and in whether tensor parallelism cut them unevenly; parameters whose rows fit
    badly together get several."""
    found = job.found
    alike: dict[tuple[DeviceMesh, torch.dtype, bool, Format | None, bool], list[int]] = {}
    for position, (f, home, stored) in enumerate(zip(found, job.homes, job.stored, strict=True)):
        key = (home, f.parameter.dtype, f.parameter.requires_grad, stored.format, f.uneven)
        alike.setdefault(key, []).append(position)
    groups = []
    for (home, _, _, format, _), positions in alike.items():
        items = tuple(item_of(found[position], grain, format) for position in positions)
        for members, layout in _laid_out(items, job.num_shards(home), grain is None):
            chosen = tuple(positions[member] for member in members)
            groups.append(PlannedBuffer(chosen, layout, format, home))
    padding = sum(group.layout.padding for group in groups)
    payload = sum(group.layout.payload for group in groups)
    if grain == "tensor" and padding > max(CHEAP_PADDING, payload // PROMISED_PADDING):
        raise ValueError(
            f"grain='tensor': '{found[0].name}' and the other {len(found) - 1} parameters of its "
            f"unit, whole on {job.num_shards(job.homes[0])} ranks, would pad it by "
            f"{100 * padding / payload:.0f} %, over {100 // PROMISED_PADDING} %: wrap larger "
            f"units, use sw.data_parallel or fewer ranks, or leave grain out"
        )
    return groups


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


@lru_cache(maxsize=64)
def _laid_out(
    items: Sequence[Item], num_shards: int, finer: bool
) -> list[tuple[tuple[int, ...], Layout]]:
    """The members and the layout of each buffer; blocks that are alike are laid out once."""
    items = cut_finer(items, num_shards) if finer else items
    return [
        (members, plan([items[member] for member in members], num_shards))
        for members in plan_groups(items, num_shards)
    ]


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
    return (None, True) if wanted == axis.size else (split(axis, wanted), True)
