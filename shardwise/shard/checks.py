# SPDX-License-Identifier: Apache-2.0
"""The door of construction: what a wrapping call refuses, before anything changes.

Each check returns a list of problems, each a text with the value, the reason and the fix.
``raise_together`` raises all problems of all ranks on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.core.agreement import UNSUPPORTED
from shardwise.core.hooks import OWNER
from shardwise.core.layout import Grain
from shardwise.core.placements import SHARD, Placements
from shardwise.core.tensor import ShardedTensor
from shardwise.core.tile import tile_problem
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.precision import Precision
from shardwise.precision.fp8_native import native_problem
from shardwise.shard.found import Found, spread_linear
from shardwise.shard.module import unit_of
from shardwise.shard.wrap import Wrapping
from shardwise.words import quoted


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
    twice = [type(module).__name__ for module in modules if unit_of(module) is not None]
    if twice:  # as torch's own: it is the same mistake on every rank
        raise AssertionError(
            f"Each distinct composable distributed API can only be applied to a module once. "
            f"{', '.join(twice)}: wrapped already"
        )


def wrapping_problems(job: Wrapping) -> list[str]:
    """Problems that any wrapping call may have: with modules, parameters, meshes and experts."""
    problems = _module_problems(job.roots)
    inside = [m for root in job.roots for m in root.modules()]
    ddp = [module for module in inside if isinstance(module, DistributedDataParallel)]
    reduced = {id(parameter) for module in ddp for parameter in module.parameters()}
    pairs = list(zip(job.found, job.homes, strict=True))
    for f, mesh in pairs:
        if id(f.parameter) in reduced:
            problems.append(
                f"'{f.name}' is inside DistributedDataParallel, which reduces its gradient "
                f"already: wrap the module without DDP (sw.zero(0) replicates like DDP), "
                f"or pass DDP's parameters as ignored_params"
            )
        if (problem := _parameter_problem(f, mesh)) is not None:
            problems.append(problem)
    for mesh in job.ranks:
        problems += mesh_problems(mesh.mesh_dim_names, mesh.shape, job.placements)
    if job.precision.products == "native" and (problem := native_problem(job.device)):
        problems.append(f"Precision(products='native'): {problem}")
    return problems + _expert_problems(job.roots, pairs)


def _module_problems(roots: Sequence[nn.Module]) -> list[str]:
    problems = [] if roots else ["an empty list of modules"]
    for module in roots:
        bare = type(module).forward is nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and bare:
            problems.append(
                f"fully_shard does not support containers that do not implement forward: wrap the "
                f"members of this {type(module).__name__}, or pass them as a list"
            )
    return problems


def _parameter_problem(f: Found, mesh: DeviceMesh) -> str | None:
    """The first problem of one parameter."""
    parameter: Any = f.parameter
    is_dtensor = isinstance(parameter, DTensor)
    if isinstance(parameter, ShardedTensor) or hasattr(parameter, OWNER):
        return (
            f"'{f.name}' belongs to another unit already (tied weights in two units): wrap "
            f"both modules in one call with a list, or leave both to the root"
        )
    if is_dtensor and any(isinstance(module, GroupedLinear) for module in f.modules):
        return (
            f"'{f.name}' holds experts and is a DTensor over {parameter.device_mesh}: experts are "
            f"spread over ranks (MixtureOfExperts.spread), not cut by parallelize_module"
        )
    if is_dtensor and (problem := tile_problem(f.name, parameter, mesh)) is not None:
        return problem
    eight_bits = parameter.is_floating_point() and parameter.itemsize == 1
    if parameter.is_complex() or (parameter.requires_grad and eight_bits):
        return (
            f"'{f.name}' has dtype {parameter.dtype}, whose gradients no backend can sum; "
            f"train in float32, bfloat16 or float16"
        )
    if hasattr(parameter, "fsdp_pre_all_gather"):
        return (
            f"{UNSUPPORTED}'{f.name}' is a {type(parameter).__name__} with "
            f"fsdp_pre_all_gather, which would never be called: wrap plain parameters; to send "
            f"8 bits for each weight, use precision=sw.Precision(weights='mxfp8')"
        )
    kinds = {*type(parameter).__mro__} - {nn.Parameter, torch.Tensor}
    overrides = ("__torch_function__", "__torch_dispatch__")
    plain = is_dtensor or not any(name in vars(kind) for kind in kinds for name in overrides)
    if not plain or parameter.numel() == 0:
        return (
            f"'{f.name}' is a {type(parameter).__name__} of shape {list(parameter.shape)}, and "
            f"flat buffers keep plain numbers, at least one: pass it as ignored_params"
        )
    return None


def _expert_problems(
    roots: Sequence[nn.Module], found: Sequence[tuple[Found, DeviceMesh]]
) -> list[str]:
    """Problems with experts that are spread over ranks. Experts must be sharded over ranks with the
    same experts, and other parameters over all ranks that have tokens."""
    inside = [m for root in roots for m in root.modules() if isinstance(m, GroupedLinear)]
    axes = [m.axis for m in inside if m.is_spread and m.axis is not None]
    exchanges = {axis.peers for axis in axes if not axis.pretends}
    problems: dict[str, list[str]] = {}  # the names, by problem
    for f, mesh in found if exchanges else ():
        linear, ranks = spread_linear(f), sorted(mesh.mesh.flatten().tolist())
        if linear is None and not all({*peers} <= {*ranks} for peers in exchanges):
            problem = "no expert, so its gradient is a sum over all ranks that exchange tokens "
            problem += f"({sorted(exchanges)}): use a mesh of these ranks, not of {ranks}"
        elif linear and linear.axis and len({*ranks}.intersection(linear.axis.peers)) > 1:
            problem = f"spread over ranks of which the mesh {ranks} has several"
            problem += ". Wrap the block with meshes={'*.experts': grid['dp']}, or wrap the "
            problem += "experts before it: fully_shard(layer.experts, mesh=grid['dp'])"
        else:
            continue
        problems.setdefault(problem, []).append(f.name)
    shared = {(mesh, x.axis.peers) for f, mesh in found if (x := spread_linear(f)) and x.axis}
    if len(shared) > len({mesh for mesh, _ in shared}):
        problem = "spread over different ranks and share a mesh: wrap the experts of each layer in "
        problems[problem + "a call of their own"] = ["experts"]
    return [f"{quoted(names)}: {problem}" for problem, names in problems.items()]


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
    if len(sizes) > 1 and names is None:
        problems.append("a mesh of several axes needs mesh_dim_names")
    return problems


def option_problems(unused: Any, memory: Any, offload: Any, grain: Any = None) -> list[str]:
    problems = []
    if unused not in ("none", "zeros"):
        problems.append(f"unused_parameters={unused!r}: choose 'none' or 'zeros'")
    if memory not in ("caching", "trace"):
        problems.append(f"memory={memory!r}: choose 'caching' or 'trace'")
    if offload is not None and type(offload) not in (OffloadPolicy, CPUOffloadPolicy):
        problems.append(f"offload_policy={offload!r}: pass OffloadPolicy() or CPUOffloadPolicy()")
    if not (grain in (None, "tensor") or isinstance(grain, Grain) or callable(grain)):
        problems.append(
            f"grain={grain!r}: choose 'tensor', a Grain (layout.ROW, ...) or a function that "
            f"returns a Grain"
        )
    return problems


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
