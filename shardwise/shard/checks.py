# SPDX-License-Identifier: Apache-2.0
"""Checks that run before a wrapping call changes anything.

Each check returns a list of problems, each a text with the value, the reason and the fix.
``raise_together`` raises all problems of all ranks on every rank.
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
from shardwise.tensor_steps import OWNER
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
    """Raise for arguments without which ranks cannot even exchange problems."""
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
        wrong.append("precision and mp_policy set the same values; pass one of them")
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
    """Problems that any wrapping call may have: with the modules, with their parameters (each given
    with its mesh), with the memory that these share, with the meshes, and with spread experts."""
    inner_units = {}  # with the path to each, the last if a unit has several modules
    for root in roots:
        for path, module in root.named_modules():
            if (unit := unit_of(module)) is not None:
                inner_units[unit] = path
    inner = [
        entry._replace(name=f"{path}.{entry.name}" if len(unit.modules) == 1 else entry.name)
        for unit, path in inner_units.items()
        for entry in unit.held
    ]
    problems = _module_problems(roots, found) + _shared_problems([*inner, *held])
    for mesh in meshes:
        problems += mesh_problems(mesh.mesh_dim_names, mesh.shape, placements)
        problems += filter(None, [order_problem(mesh)])
    return problems + _expert_problems(roots, found)


def _module_problems(
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
        if id(f.parameter) in reduced:
            problems.append(
                f"'{f.name}' is inside DistributedDataParallel, which reduces its gradient "
                f"already: wrap the module without DDP (sw.zero(0) replicates like DDP), "
                f"or pass DDP's parameters as ignored_params"
            )
        problem = _parameter_problem(f, mesh)
        if problem is not None:
            problems.append(problem)
    return problems + _untied_problems([f for f, _ in found])


def _parameter_problem(f: Found, mesh: DeviceMesh) -> str | None:
    """The first problem of one parameter."""
    parameter, owner = f.parameter, f.owners[0].__name__
    if isinstance(parameter, ShardedTensor) or hasattr(parameter, OWNER):
        return (
            f"'{f.name}' belongs to another unit already (tied weights in two units): wrap "
            f"both modules in one call with a list, or leave both to the root"
        )
    if isinstance(parameter, DTensor):
        if any(isinstance(module, GroupedLinear) for module in f.modules):
            return (
                f"'{f.name}' holds experts and is a DTensor over "
                f"{parameter.device_mesh.mesh_dim_names}: experts are spread over ranks "
                f"(MixtureOfExperts.spread), not cut; leave them out of parallelize_module"
            )
        problem = tile_problem(f.name, parameter, mesh)
        if problem is not None:
            return problem
    eight_bits = parameter.is_floating_point() and parameter.itemsize == 1
    if parameter.is_complex() or (parameter.requires_grad and eight_bits):
        return (
            f"'{f.name}' has dtype {parameter.dtype}, whose gradients no backend can sum; "
            f"train in float32, bfloat16 or float16"
        )
    if parameter.requires_grad and any(getattr(m, "sparse", None) is True for m in f.modules):
        return (
            f"'{f.name}' belongs to a {owner}(sparse=True): gradients are "
            f"summed over ranks in dense buffers; build it with sparse=False"
        )
    if mesh.size() > 1 and any(getattr(m, "max_norm", None) is not None for m in f.modules):
        return (
            f"'{f.name}' belongs to a {owner}(max_norm=...), whose forward rewrites the rows that "
            f"it looks up, and each rank looks up other rows: build it without max_norm, and "
            f"renormalise rows after the optimizer's step (torch.renorm)"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in f.modules):
        return (
            f"'{f.name}' belongs to a module of torch.jit, which keeps its own parameters and "
            f"would never see gathered weights: wrap the module that it was made of "
            f"(torch.compile works on wrapped modules), or pass the parameter in ignored_params"
        )
    if hasattr(parameter, "fsdp_pre_all_gather"):
        return (
            f"{UNSUPPORTED}'{f.name}' is a {type(parameter).__name__} with "
            f"fsdp_pre_all_gather, which would never be called: wrap plain parameters; to send "
            f"8 bits for each weight, use precision=sw.Precision(weights='mxfp8')"
        )
    if _has_own_operations(parameter):
        return (
            f"'{f.name}' is a {type(parameter).__name__}, a tensor with operations of its own, "
            f"and flat buffers keep plain numbers: wrap plain parameters, or pass it as "
            f"ignored_params"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        return (
            f"'{f.name}' has hooks for its gradient, which would never be called: call "
            f"register_post_accumulate_grad_hook after wrapping, which shows reduced gradients"
        )
    if parameter.numel() == 0:
        return (
            f"'{f.name}' has shape {list(parameter.shape)} and no elements: pass it in "
            f"ignored_params"
        )
    return None


def _untied_problems(found: Sequence[Found]) -> list[str]:
    """Problems with embeddings that were tied to a head. ``parallelize_module`` gives each its own
    DTensor: both then hold the same values, and would be trained separately."""
    tiles = [f for f in found if isinstance(f.parameter, DTensor) and f.parameter.ndim > 1]
    embeddings = [f for f in tiles if any(isinstance(m, nn.Embedding) for m in f.modules)]
    return [
        f"'{f.name}' and '{other.name}' hold the same values: parallelize_module unties tied "
        f"weights. Tie them again after it (head.weight = embedding.weight)"
        for f in embeddings
        for other in tiles
        if other is not f and _same_values(f.parameter, other.parameter)
    ]


def held_by(found: Sequence[Found], buffers: Sequence[tuple[str, Tensor]]) -> list[Held]:
    """The memory of trainable parameters and of buffers. Tensors with gaps are left out."""
    trained = [(f.name, f.local) for f in found if f.local.requires_grad and not f.local.is_meta]
    held = []
    for name, tensor in [*trained, *buffers]:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.numel() == 1 + sum((size - 1) * stride for size, stride in steps):
            begin, memory = int(tensor.storage_offset()), StorageWeakRef(tensor.untyped_storage())
            held.append(Held(name, memory, begin, begin + tensor.numel(), tensor.requires_grad))
    return held


def _shared_problems(held: Sequence[Held]) -> list[str]:
    """Problems with trainable parameters or buffers in the memory of a trainable parameter
    (``head.weight.data = embedding.weight.data``): wrapping would give each its own memory."""
    return [
        f"'{entry.name}' lies in the memory of '{other.name}', and would be trained apart from "
        f"it: tie the parameters (head.weight = embedding.weight), or clone() one of them"
        for entry, other in _overlaps(held)
    ]


def warn_of_views(
    found: Sequence[Found], attributes: Sequence[tuple[str, Tensor]], mesh: DeviceMesh
) -> None:
    """Warn of plain tensors (``self.cache = self.weight.data``) in the memory of parameters."""
    pairs = list(_overlaps(held_by(found, attributes)))
    if pairs:
        warn_once(
            logger,
            "tensors that modules keep as attributes are views of weights, and stay as they are "
            "when the weights are trained: %s. Compute these tensors in forward",
            ", ".join(f"'{view.name}' of '{weight.name}'" for view, weight in pairs[:4]),
            mesh=mesh,
        )


def _overlaps(held: Sequence[Held]) -> Iterator[tuple[Held, Held]]:
    """Pairs of an entry and an earlier trained entry that lies in a part of the same memory."""
    trained: dict[StorageWeakRef, list[Held]] = {}
    for entry in held:
        earlier = trained.setdefault(entry.memory, [])
        for other in earlier:
            if other.begin < entry.end and entry.begin < other.end:
                yield entry, other
        if entry.trained:
            earlier.append(entry)


def _same_values(first: Any, second: Any) -> bool:
    """Whether two DTensors hold the same values, which are not all equal (as zeros are)."""
    if first.shape != second.shape or first.placements != second.placements or first.is_meta:
        return False
    local = first.to_local().detach()
    return torch.equal(local, second.to_local()) and bool((local != local.flatten()[:1]).any())


def _has_own_operations(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a tensor subclass, other than DTensor, that overrides torch's
    operations."""
    kinds = {*type(parameter).__mro__} - {nn.Parameter, torch.Tensor}
    overrides = ("__torch_function__", "__torch_dispatch__")
    overriding = any(name in vars(kind) for kind in kinds for name in overrides)
    return overriding and not isinstance(parameter, DTensor)


def spread_linear(found: Found) -> GroupedLinear | None:
    """The linear that a parameter of spread experts belongs to; None for other parameters."""
    for module in found.modules:
        if isinstance(module, GroupedLinear) and module.is_spread:
            return module
    return None


def experts_axis(found: Sequence[Found]) -> comm.Axis | None:
    """The axis over which the experts among the parameters of one mesh are spread."""
    for f in found:
        linear = spread_linear(f)
        if linear is not None and linear.axis is not None:
            return linear.axis
    return None


def _expert_problems(
    roots: Sequence[nn.Module], found: Sequence[tuple[Found, DeviceMesh]]
) -> list[str]:
    """Problems with experts that are spread over ranks. Experts must be sharded over ranks with the
    same experts, and other parameters over all ranks that have tokens."""
    linears = [m for root in roots for m in root.modules() if isinstance(m, GroupedLinear)]
    spread = [linear.axis for linear in linears if linear.is_spread and linear.axis is not None]
    exchanges = {axis.peers for axis in spread if not axis.pretends}  # ranks that exchange tokens
    mixed: list[str] = []
    partial: list[str] = []
    axes: set[tuple[DeviceMesh, Any]] = set()  # of experts: (mesh, ranks that exchange tokens)
    for f, mesh in found:
        linear = spread_linear(f)
        if linear is not None and linear.axis is not None:
            axes.add((mesh, linear.axis.peers))
        if not exchanges:
            continue
        ranks = sorted(mesh.mesh.flatten().tolist())
        if linear is None:
            not_inside = [list(peers) for peers in exchanges if not {*peers} <= {*ranks}]
            if not_inside:
                partial.append(
                    f"'{f.name}' is no expert: ranks {not_inside[0]} exchange tokens, so its "
                    f"gradient is summed over all these ranks, but this mesh has ranks {ranks}. "
                    f"Use a mesh of all ranks that have tokens"
                )
        elif linear.axis is not None and len({*ranks}.intersection(linear.axis.peers)) > 1:
            mixed.append(
                f"'{f.name}' holds {experts_text(f)}, and this mesh of ranks {ranks} has ranks "
                f"with other experts. Wrap the block with meshes={{'*.experts': grid['dp']}}, or "
                f"wrap the experts before it: fully_shard(layer.experts, mesh=grid['dp'])"
            )
    problems = [
        texts[0] + (f" (and so for {len(texts) - 1} more)" if len(texts) > 1 else "")
        for texts in (mixed, partial)
        if texts
    ]
    if len(axes) > len({mesh for mesh, _ in axes}):
        problems.append(
            f"experts spread over different ranks, {sorted(peers for _, peers in axes)}, share a "
            f"mesh: wrap the experts of each layer in a call of their own"
        )
    return problems


def experts_text(found: Found) -> str:
    """The numbers of the experts in a parameter of spread experts, in words; "" for others."""
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
    return [
        f"grain={grain!r}: choose 'tensor', a Grain (layout.ROW, ...) or a function that returns a "
        f"Grain"
    ]


def option_problems(unused: Any, memory: Any, offload: Any) -> list[str]:
    problems = []
    if unused not in ("none", "zeros"):
        problems.append(f"unused_parameters={unused!r}: choose 'none' or 'zeros'")
    if memory not in ("caching", "trace"):
        problems.append(f"memory={memory!r}: choose 'caching' or 'trace'")
    if offload is not None and type(offload) not in (OffloadPolicy, CPUOffloadPolicy):
        problems.append(f"offload_policy={offload!r}: pass OffloadPolicy() or CPUOffloadPolicy()")
    return problems


def step_problems(gather_in_step: bool, placements: Placements) -> list[str]:
    if not isinstance(gather_in_step, bool):  # "no" would be true
        return [f"gather_in_step={gather_in_step!r}: choose True or False"]
    if not gather_in_step or SHARD not in placements.compute:
        return []
    return [
        f"gather_in_step=True under {placements}: whole weights are not kept between steps, so "
        f"there is nothing to gather early; leave gather_in_step out, or use zero(1) or zero(2)"
    ]


def forward_problems(wanted: Any, axis: str, size: int, placements: Placements) -> list[str]:
    """Problems of ``reshard_after_forward``; ``axis``: the innermost axis, in words."""
    if wanted is None or isinstance(wanted, bool):
        return []
    if not isinstance(wanted, int):
        return [f"reshard_after_forward={wanted!r}: pass a bool, a number of ranks, or None"]
    if placements.compute[-1] != SHARD:
        return [
            f"reshard_after_forward={wanted}: compute weights are replicated under {placements}, "
            f"so there is nothing to reshard; pass None"
        ]
    if wanted < 1 or size % wanted:
        return [f"reshard_after_forward={wanted} must divide the {size} ranks of axis {axis}"]
    return []


def bucket_problems(placements: Placements, bucket_mb: Any) -> list[str]:
    """Problems of the placements and the bucket size of ``data_parallel``."""
    problems = []
    if SHARD in placements.compute:
        problems.append(
            f"{placements} shards the compute weights, and data_parallel keeps them whole: use "
            f"zero(0), zero(1), zero(2) or Placements with compute=[Replicate(), ...], or call "
            f"fully_shard for these placements"
        )
    if not isinstance(bucket_mb, int | float) or isinstance(bucket_mb, bool) or not bucket_mb > 0:
        problems.append(f"bucket_mb={bucket_mb!r}: pass a number of megabytes above 0")
    return problems


def placement_problems(
    choose: Callable[[nn.Parameter], Any] | None, found: Sequence[Found]
) -> list[str]:
    """Problems of torch's ``shard_placement_fn``. torch needs the dimension, because it cuts a
    dimension into even pieces. Flat buffers are always cut along rows."""
    problems = []
    if choose is None:
        return []
    for f in found:
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
    """A parameter in words, which must be the same on all ranks."""
    parameter = found.parameter
    placed = f" {parameter.placements}" if isinstance(parameter, DTensor) else ""
    return (
        f"{found.name} {list(parameter.shape)}{placed} {parameter.dtype} "
        f"{'trainable' if parameter.requires_grad else 'frozen'} {stored.format or ''}"
    )
