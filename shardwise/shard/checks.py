# SPDX-License-Identifier: Apache-2.0
"""Checks before anything changes: all problems at once, the same on every rank.

A check returns sentences: the value, the reason, the fix. ``raise_together`` raises them on all
ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from shardwise import comm
from shardwise.agreement import UNSUPPORTED
from shardwise.layout import Grain
from shardwise.mesh import order_problem
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.notices import warn_once
from shardwise.placements import SHARD, Placements
from shardwise.precision import Precision
from shardwise.precision.policy import Stored
from shardwise.shard.module import unit_of
from shardwise.shard.wrapped import Held
from shardwise.shard.wrapping import Found
from shardwise.tensor import ShardedTensor
from shardwise.tile import tile_problem

logger = logging.getLogger(__name__)


def check_types(
    modules: Sequence[Any],
    mesh: Any,
    placements: Any,
    precision: Any,
    policy: Any,
    verb: str = "fully_shard",
) -> None:
    """Raise for arguments with which ranks can't even exchange their problems."""
    wrong = [
        f"{name} is a {type(value).__name__}, not a {kind.__name__}: {value!r}"
        for name, value, kind in (
            *(("module", module, nn.Module) for module in modules),
            ("mesh", mesh, DeviceMesh),
            ("placements", placements, Placements),
            ("precision", precision, Precision),
            ("mp_policy", policy, MixedPrecisionPolicy),
        )
        if value is not None and not isinstance(value, kind)
    ]
    if precision is not None and policy is not None:
        wrong.append("precision and mp_policy are two ways to say the same; pass one")
    if mesh is not None and isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        wrong.append(f"rank {torch.distributed.get_rank()} is not part of the mesh {mesh}")
    if wrong:
        raise ValueError(f"{verb}: " + "; ".join(wrong))


def wrapping_problems(
    roots: Sequence[nn.Module],
    found: Sequence[tuple[Found, DeviceMesh]],
    meshes: Sequence[DeviceMesh],
    placements: Placements,
    held: Sequence[Held],
) -> list[str]:
    """Problems that any wrapping may have: of modules, of their parameters, each with the mesh that
    it is for, of the memory that these hold, and of all meshes."""
    below = (named for root in roots for named in root.named_modules())
    units = {unit: path for path, one in below if (unit := unit_of(one)) is not None}
    inner = [
        one._replace(name=f"{path}.{one.name}" if len(unit.modules) == 1 else one.name)
        for unit, path in units.items()
        for one in unit.held
    ]
    problems = module_problems(roots, found) + _shared_problems([*inner, *held])
    for mesh in meshes:
        problems += mesh_problems(mesh.mesh_dim_names, mesh.shape, placements)
        problems += filter(None, [order_problem(mesh)])
    return problems + expert_problems(roots, found)


def module_problems(
    roots: Sequence[nn.Module], found: Sequence[tuple[Found, DeviceMesh]]
) -> list[str]:
    problems = [] if roots else ["an empty list of modules"]
    if torch.is_inference_mode_enabled() or any(f.parameter.is_inference() for f, _ in found):
        problems.append(
            "a module that is built or wrapped under torch.inference_mode() cannot be trained: "
            "build and wrap the model outside, or use torch.no_grad()"
        )
    for module in roots:
        if unit_of(module) is not None:
            problems.append(f"{type(module).__name__} is wrapped already; wrap each module once")
        bare = type(module).forward is nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and bare:
            problems.append(
                f"fully_shard does not support containers that do not implement forward: wrap the "
                f"members of this {type(module).__name__}, or pass them as a list"
            )
    inside = (m for root in roots for m in root.modules() if isinstance(m, DistributedDataParallel))
    reduced = {id(parameter) for ddp in inside for parameter in ddp.parameters()}
    for f, mesh in found:
        parameter = f.parameter
        if id(parameter) in reduced:
            problems.append(
                f"'{f.name}' is inside DistributedDataParallel, which reduces its gradient "
                f"already: wrap the module without DDP (sw.zero(0) replicates like DDP), "
                f"or pass DDP's parameters as ignored_params"
            )
        tiled = tile_problem(f.name, parameter, mesh) if isinstance(parameter, DTensor) else None
        if isinstance(parameter, DTensor) and any(isinstance(m, GroupedLinear) for m in f.modules):
            tiled = (
                f"'{f.name}' holds experts and is a DTensor over "
                f"{parameter.device_mesh.mesh_dim_names}: experts are spread over ranks "
                f"(MixtureOfExperts.spread), not cut; leave them out of parallelize_module"
            )
        eight_bits = parameter.is_floating_point() and parameter.itemsize == 1
        if isinstance(parameter, ShardedTensor) or hasattr(parameter, "_shardwise_owner"):
            problems.append(
                f"'{f.name}' belongs to another unit already (tied weights in two units): wrap "
                f"both modules in one call with a list, or leave both to the root"
            )
        elif tiled is not None:
            problems.append(tiled)
        elif parameter.is_complex() or (parameter.requires_grad and eight_bits):
            problems.append(
                f"'{f.name}' has dtype {parameter.dtype}, whose gradients no backend can sum; "
                f"train in float32, bfloat16 or float16"
            )
        elif parameter.requires_grad and any(getattr(m, "sparse", None) is True for m in f.modules):
            problems.append(
                f"'{f.name}' belongs to a {f.owners[0].__name__}(sparse=True): gradients are "
                f"summed over ranks in dense buffers; build it with sparse=False"
            )
        elif mesh.size() > 1 and any(getattr(m, "max_norm", None) is not None for m in f.modules):
            problems.append(
                f"'{f.name}' belongs to a {f.owners[0].__name__}(max_norm=...), whose forward "
                f"rewrites the rows that it looks up, on each rank others: build it without "
                f"max_norm, and bound rows after the optimizer's step (torch.renorm)"
            )
        elif any(isinstance(m, torch.jit.ScriptModule) for m in f.modules):
            problems.append(
                f"'{f.name}' belongs to a module of torch.jit, which keeps its own parameters and "
                f"would never see gathered ones: wrap the module that it was made of "
                f"(torch.compile works on wrapped modules), or pass it in ignored_params"
            )
        elif hasattr(parameter, "fsdp_pre_all_gather"):
            problems.append(
                f"{UNSUPPORTED}'{f.name}' is a {type(parameter).__name__} with "
                f"fsdp_pre_all_gather, which would never be called: wrap plain parameters, for "
                f"8 bits on the wire with precision=sw.Precision(weights='mxfp8')"
            )
        elif has_own_operations(parameter):
            problems.append(
                f"'{f.name}' is a {type(parameter).__name__}, a tensor with operations of its own, "
                f"and flat buffers keep plain numbers: wrap plain parameters, or pass it as "
                f"ignored_params"
            )
        elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            problems.append(
                f"'{f.name}' has hooks for its gradient, which would never be called: call "
                f"register_post_accumulate_grad_hook after wrapping, which shows reduced gradients"
            )
        elif parameter.numel() == 0:
            problems.append(
                f"'{f.name}' has shape {list(parameter.shape)} and no elements: pass it in "
                f"ignored_params"
            )
    return problems + untied_problems([f for f, _ in found])


def untied_problems(found: Sequence[Found]) -> list[str]:
    """Problems of embeddings that were tied to a head until ``parallelize_module`` gave each a
    DTensor of its own: they hold the same values, and would be trained apart."""
    tiles = [f for f in found if isinstance(f.parameter, DTensor) and f.parameter.ndim > 1]
    embeddings = [f for f in tiles if any(isinstance(m, nn.Embedding) for m in f.modules)]
    return [
        f"'{f.name}' and '{other.name}' hold the same values: parallelize_module unties weights "
        f"that were one. Tie them again after it (head.weight = embedding.weight)"
        for f in embeddings
        for other in tiles
        if other is not f and _same_values(f.parameter, other.parameter)
    ]


def held_by(found: Sequence[Found], buffers: Sequence[tuple[str, Tensor]]) -> list[Held]:
    """The memory of trainable parameters and of buffers, but for those with gaps."""
    trained = [(f.name, f.local) for f in found if f.local.requires_grad and not f.local.is_meta]
    held = []
    for name, one in [*trained, *buffers]:
        steps = zip(one.shape, one.stride(), strict=True)
        if one.numel() == 1 + sum((size - 1) * stride for size, stride in steps):
            begin, memory = int(one.storage_offset()), StorageWeakRef(one.untyped_storage())
            held.append(Held(name, memory, begin, begin + one.numel(), one.requires_grad))
    return held


def _shared_problems(held: Sequence[Held]) -> list[str]:
    """Problems of trainable parameters in the memory of others, or of buffers
    (``head.weight.data = embedding.weight.data``): wrapping gives each memory of its own."""
    return [
        f"'{one.name}' lies in the memory of '{other.name}', and would be trained apart from "
        f"it: tie the parameters (head.weight = embedding.weight), or clone() one"
        for one, other in _overlaps(held)
    ]


def warn_of_views(
    found: Sequence[Found], attributes: Sequence[tuple[str, Tensor]], mesh: DeviceMesh
) -> None:
    """Warn of plain tensors (``self.cache = self.weight.data``) in the memory of parameters."""
    if pairs := list(_overlaps(held_by(found, attributes))):
        warn_once(
            logger,
            "tensors that modules keep as attributes are views of weights, and stay as they are "
            "when these are trained: %s. Compute them in forward",
            ", ".join(f"'{one.name}' of '{other.name}'" for one, other in pairs[:4]),
            mesh=mesh,
        )


def _overlaps(held: Sequence[Held]) -> Iterator[tuple[Held, Held]]:
    before: dict[StorageWeakRef, list[Held]] = {}
    for one in held:
        others = before.setdefault(one.memory, [])
        yield from (
            (one, other) for other in others if other.begin < one.end and one.begin < other.end
        )
        others += [one] if one.trained else []


def _same_values(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.placements != other.placements or one.is_meta:
        return False
    local = one.to_local().detach()
    return torch.equal(local, other.to_local()) and bool((local != local.flatten()[:1]).any())


def has_own_operations(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a tensor subclass that overrides torch's operations; a DTensor of
    tensor parallelism is understood."""
    kinds = {*type(parameter).__mro__} - {nn.Parameter, torch.Tensor}
    overriding = ("__torch_function__", "__torch_dispatch__")
    own = any(name in vars(kind) for kind in kinds for name in overriding)
    return own and not isinstance(parameter, DTensor)


def spread_linear(found: Found) -> GroupedLinear | None:
    """The linear that a parameter of spread experts belongs to; None for other parameters."""
    linears = [module for module in found.modules if isinstance(module, GroupedLinear)]
    return next((linear for linear in linears if linear.is_spread), None)


def experts_axis(found: Sequence[Found]) -> comm.Axis | None:
    """The axis over which the experts among the parameters of one mesh are spread."""
    linears = [linear for f in found if (linear := spread_linear(f)) is not None]
    return next((linear.axis for linear in linears if linear.axis is not None), None)


def expert_problems(
    roots: Sequence[nn.Module], found: Sequence[tuple[Found, DeviceMesh]]
) -> list[str]:
    """Problems of experts that are spread over ranks. Experts must be sharded over ranks with the
    same experts, other parameters over all ranks that have tokens."""
    inside = [one for root in roots for one in root.modules() if isinstance(one, GroupedLinear)]
    spread = [one.axis for one in inside if one.is_spread and one.axis is not None]
    peers = {axis.peers for axis in spread if not axis.pretends}
    mixed: list[str] = []
    partial: list[str] = []
    for f, mesh in found if peers else ():
        ranks, linear = sorted(mesh.mesh.flatten().tolist()), spread_linear(f)
        if linear is None:
            apart = [list(each) for each in peers if not {*each} <= {*ranks}]
            if apart:
                partial.append(
                    f"'{f.name}' is no expert: ranks {apart[0]} exchange tokens, so its gradient "
                    f"is summed over all these ranks, but this mesh has ranks {ranks}. Use a mesh "
                    f"of all ranks that have tokens"
                )
        elif linear.axis is not None and len({*ranks}.intersection(linear.axis.peers)) > 1:
            mixed.append(
                f"'{f.name}' holds {share_of(f)}, and this mesh of ranks {ranks} has ranks with "
                f"other experts. Wrap their block with meshes={{'*.experts': grid['dp']}}, or them "
                f"by themselves, first: fully_shard(layer.experts, mesh=grid['dp'])"
            )
    axes = {(mesh, one.axis.peers) for f, mesh in found
            if (one := spread_linear(f)) is not None and one.axis is not None}  # fmt: skip
    several = [f"experts spread over different ranks, {sorted(each for _, each in axes)}, share a "
               f"mesh: wrap those of each layer by themselves"]  # fmt: skip
    return [
        f"{these[0]} (and so for {len(these) - 1} more)" if len(these) > 1 else these[0]
        for these in (
            mixed,
            partial,
            several if len(axes) > len({mesh for mesh, _ in axes}) else (),
        )
        if these
    ]


def share_of(found: Found) -> str:
    """The numbers of the experts in a parameter of spread experts, in words; else ""."""
    linear = spread_linear(found)
    if linear is None:
        return ""
    first, last = linear.first_expert, linear.first_expert + linear.num_experts - 1
    return f"experts {first} to {last} of {linear.total_experts}"


def mesh_problems(
    names: Sequence[str] | None, sizes: Sequence[int], placements: Placements
) -> list[str]:
    problems = []
    if len(sizes) != placements.num_axes:
        problems.append(
            f"{placements} describes {placements.num_axes} data-parallel axes, but the mesh "
            f"{names or ''} has {len(sizes)}: use zero(0..3) on one axis, hsdp() or hfsdp() on "
            f"two, or Placements with {len(sizes)} entries each"
        )
    if len(sizes) > 2 and names is None:
        problems.append("a mesh of more than two axes needs mesh_dim_names")
    return problems


def grain_problems(grain: Any) -> list[str]:
    if grain in (None, "tensor") or isinstance(grain, Grain) or callable(grain):
        return []
    return [f"grain={grain!r}: 'tensor', a Grain (layout.ROW, ...), or a function that returns one"]


def option_problems(unused: Any, memory: Any, offload: Any) -> list[str]:
    problems = []
    if unused not in ("none", "zeros", "error"):
        problems.append(f"unused_parameters={unused!r}: 'none', 'zeros' or 'error'")
    if memory not in ("caching", "trace"):
        problems.append(f"memory={memory!r}: 'caching' or 'trace'")
    if offload is not None and type(offload) not in (OffloadPolicy, CPUOffloadPolicy):
        problems.append(f"offload_policy={offload!r}: OffloadPolicy() or CPUOffloadPolicy()")
    return problems


def step_problems(gather_in_step: bool, placements: Placements) -> list[str]:
    if not isinstance(gather_in_step, bool):  # "no" would be true
        return [f"gather_in_step={gather_in_step!r}: True or False"]
    if not gather_in_step or SHARD not in placements.compute:
        return []
    return [
        f"gather_in_step=True under {placements}: whole weights are not kept between steps, so "
        f"there is nothing to gather early; leave it out, or use zero(1) or zero(2)"
    ]


def forward_problems(wanted: Any, axis: str, size: int, placements: Placements) -> list[str]:
    """Problems of ``reshard_after_forward``; ``axis``: the innermost one, in words."""
    if wanted is None or isinstance(wanted, bool):
        return []
    if not isinstance(wanted, int):
        return [f"reshard_after_forward={wanted!r}: a bool, a number of ranks, or None"]
    if placements.compute[-1] != SHARD:
        return [
            f"reshard_after_forward={wanted}: compute weights are replicated under {placements}, "
            f"there is nothing to reshard; pass None"
        ]
    if wanted < 1 or size % wanted:
        return [f"reshard_after_forward={wanted} must divide the {size} ranks of axis {axis}"]
    return []


def bucket_problems(placements: Placements, bucket_mb: Any) -> list[str]:
    """Problems of the placements and the bucket size of ``data_parallel``."""
    problems = []
    if SHARD in placements.compute:
        problems.append(
            f"{placements} shards the compute weights; data_parallel keeps them whole: use "
            f"zero(0), zero(1), zero(2) or Placements with compute=[Replicate(), ...], or "
            f"fully_shard for these placements"
        )
    if not isinstance(bucket_mb, int | float) or isinstance(bucket_mb, bool) or not bucket_mb > 0:
        problems.append(f"bucket_mb={bucket_mb!r}: a number of megabytes above 0")
    return problems


def placement_problems(
    choose: Callable[[nn.Parameter], Any] | None, found: Sequence[Found]
) -> list[str]:
    """Problems of torch's ``shard_placement_fn``. Which dimension it shards matters to torch, whose
    pieces of a dimension must be even; flat buffers are cut along rows, whatever it says."""
    problems = []
    for f in found if choose is not None else ():
        assert choose is not None
        wanted = choose(f.parameter)
        ndim, dim = f.parameter.ndim, getattr(wanted, "dim", None)
        if wanted is not None and (not isinstance(wanted, Shard) or dim is None):
            problems.append(
                f"{UNSUPPORTED}shard_placement_fn wants {wanted!r} for '{f.name}': it may return "
                f"a Shard or None; for another mesh, wrap the parameter's module with mesh=..."
            )
        elif dim is not None and not -ndim <= dim < max(ndim, 1):
            problems.append(
                f"shard_placement_fn wants {wanted!r} for '{f.name}' of shape "
                f"{list(f.parameter.shape)}, which has no such dimension"
            )
        elif dim not in (None, 0, -ndim):
            warn_once(
                logger,
                "shard_placement_fn has no effect (%r for '%s'): flat buffers are cut along rows "
                "and need no dimension that divides evenly",
                wanted,
                f.name,
                about="shard_placement_fn",
            )
    return problems


def described(found: Found, stored: Stored) -> str:
    """A parameter in words that must be the same on all ranks."""
    parameter = found.parameter
    placed = f" {parameter.placements}" if isinstance(parameter, DTensor) else ""
    return (
        f"{found.name} {list(parameter.shape)}{placed} {parameter.dtype} "
        f"{'trainable' if parameter.requires_grad else 'frozen'} {stored.format or ''}"
    )
