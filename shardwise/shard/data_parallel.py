# SPDX-License-Identifier: Apache-2.0
"""``data_parallel``: packs a whole model into buckets and divides the optimizer's work among ranks.

model --> parameters in backprop order --> matrices | the rest, by dtype, format, trainability, mesh
      --> buckets, each one flat buffer --> one unit, whose weights stay

    step        the optimizer updates the whole matrices that this rank owns
    forward     gathers  3 2 1 0    in the order of forward. Forward waits for all of them, or with
                                    ``overlap_gather`` each module for its own
    backward    reduces  0 1 2 3    each bucket once its gradients and those of the buckets before
                                    it have come

The place of each matrix follows from its shape and its position in the model alone. The optimizer
reads the owner of a matrix from the same layout, and finds the matrix whole there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

# Arithmetic beside layout, which imports nothing of the old engine; it moves with the switch.
from shardwise.core.buckets import plan_elements, plan_matrices
from shardwise.core.layout import ROW, TENSOR, Grain, Item, tensor_fraction
from shardwise.core.memory import weakly
from shardwise.core.mesh import data_mesh, init_mesh
from shardwise.core.placements import Placements, zero
from shardwise.kernels.polynomials import cost
from shardwise.optim.muon import MuonSettings, muon
from shardwise.optim.routing import Route, route_problems, routes_of
from shardwise.optim.split import matrices_of
from shardwise.precision import Precision
from shardwise.precision.policy import stores_nothing
from shardwise.shard.checks import (
    bucket_problems,
    check_types,
    option_problems,
    wrapping_problems,
)
from shardwise.shard.formats import side_in
from shardwise.shard.module import unit_of, units_of
from shardwise.shard.unit import Unit
from shardwise.shard.wrap import PlannedBuffer, Wrapping
from shardwise.words import quoted

M = TypeVar("M", bound=nn.Module)


def data_parallel(
    model: M,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    bucket_mb: float = 256,
    grain: Literal["tensor"] | Grain | None = None,
    meshes: Mapping[str, DeviceMesh] | None = None,
    matrix: MuonSettings | None = None,
    overlap_gather: bool = False,
    precision: Precision | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    unused_parameters: str = "none",
    memory: str = "caching",
) -> M:
    """Replicate a model's weights over a mesh, and shard its gradients and optimizer state.

    The model is changed in place. :func:`sw.route` decides which parameters are matrices: if you
    call it, do so before this call.

    Args:
        mesh: the mesh to replicate over. Only its axes ``dp_outer`` and ``dp`` are used if it has
            axes of these names, otherwise all its axes. Default: one axis of all ranks.
        placements: ``zero(0)``, ``zero(1)`` (the default), ``zero(2)``, or your own
            :class:`Placements` with replicated compute weights. For sharded compute weights use
            ``fully_shard``.
        bucket_mb: the size of weights, in megabytes of their own dtype, from which on a bucket is
            full and is sent. All gradients of a bucket are in memory at once. A bucket grows beyond
            this size if that keeps every matrix whole, up to 55 % of all matrices, so that the rest
            of backward can overlap with its reduction. If that is not enough, or pads by more than
            1/32, matrices are cut by rows over several ranks, and the optimizer gathers the
            parts. ``sw.plan`` shows how many matrices are cut, and why.
        grain: ``"tensor"`` promises that every matrix lies whole on one rank, on any number of
            ranks. This costs larger buckets, which overlap less, and padding: ``sw.plan`` says how
            much. ``sw.ROW``: cut matrices if that keeps buckets near ``bucket_mb``.
        meshes: other meshes for some parameters, by name pattern: ``{"*.experts": expert_mesh}``. A
            pattern that names a module stands for all parameters below the module. Their gradients
            are summed over that mesh and divided by the number of ranks of ``mesh``, because an
            expert sees the tokens of several ranks.
        matrix: the ``sw.muon(...)`` that you will pass to ``sw.optimizer``. The cost of its
            Newton-Schulz on each matrix is used to balance the ranks.
        overlap_gather: True: the first module that reads a bucket waits for it, not the model's
            forward. A module may then read weights of the modules that it calls only by calling
            them.
        precision: the dtypes of weights, gradients and inputs.
        mp_policy: torch's ``MixedPrecisionPolicy``, instead of ``precision``.
        ignored_params: parameters to leave alone: they are not sharded, moved or reduced.
        unused_parameters: ``"none"`` or ``"zeros"``; see ``fully_shard``.
        memory: see ``fully_shard``.
    """
    check_types([model], mesh, placements, precision, mp_policy, verb="data_parallel")
    mesh = init_mesh() if mesh is None else data_mesh(mesh)
    placements = placements or zero(1)
    precision = precision or Precision.from_torch(mp_policy or MixedPrecisionPolicy())
    settings = matrix if isinstance(matrix, MuonSettings) else muon()
    job = Wrapping("data_parallel", [model], mesh, placements, precision, ignored_params)
    routes = {id(routed.parameter): routed.route for routed in routes_of(model)}
    problems = job.spread(meshes) + wrapping_problems(job)
    problems += _own_problems(model, placements, bucket_mb, grain, matrix, overlap_gather)
    problems += option_problems(unused_parameters, memory, None)
    problems += precision.unmatched([f.name for f in job.found])
    problems += stores_nothing(precision.format, job.stored)
    for f in job.found:
        problems += route_problems(f.name, tuple(f.parameter.shape), routes[id(f.parameter)])
    job.refuse(
        problems,
        f"unused={unused_parameters} memory={memory} bucket={bucket_mb} grain={grain} "
        f"overlap={overlap_gather} {settings.preset}",
        [
            f"{routes[id(f.parameter)].kind} over {home.mesh_dim_names} {tuple(home.shape)}"
            for f, home in zip(job.found, job.homes, strict=True)
        ],
    )
    unit = job.install(
        _planned_buckets(job, routes, settings, bucket_mb, grain),
        {home: float(mesh.size()) for home in job.ranks if home != mesh},
        unused=unused_parameters,
        options={"memory": memory},
        waits=not overlap_gather,
    )
    for stage, numbers in _stages(model, unit).items() if overlap_gather else ():
        stage.register_forward_pre_hook(weakly(unit.wait_for, numbers))
    return model


# ------------------------------------------------------------------------------ planning


def _planned_buckets(
    job: Wrapping,
    routes: Mapping[int, Route],
    settings: MuonSettings,
    bucket_mb: float,
    grain: Grain | str | None,
) -> list[PlannedBuffer]:
    """The buckets, in the order in which backward fills them. Backward is assumed to reach
    parameters in the reverse order of their registration."""
    found = job.found
    alike: dict[tuple[Any, ...], list[int]] = {}
    for position in reversed(range(len(found))):
        parameter, home = found[position].parameter, job.homes[position]
        # A frozen matrix has no optimizer that could need it whole.
        whole = parameter.requires_grad and routes[id(parameter)].kind == "matrix"
        format, uneven = job.stored[position].format, found[position].uneven
        key = (home, parameter.dtype, parameter.requires_grad, whole, format, uneven)
        alike.setdefault(key, []).append(position)
    # All with the grain of a matrix. The planner may cut other parameters anywhere.
    all_items = []
    for f, stored in zip(found, job.stored, strict=True):
        shape = routes[id(f.parameter)].shape_of(f.shape)
        matrix_grain = TENSOR if len(shape) < 3 else tensor_fraction(shape[0])
        all_items.append(Item(f.name, f.shape, matrix_grain, side_in(stored.format)))
    planned = []
    filled: set[int] = set()  # other parameters that share a bucket with matrices
    for key in sorted(alike, key=lambda key: not key[3]):  # matrices first
        home, dtype, trained, whole, format, uneven = key
        positions = [position for position in alike[key] if position not in filled]
        bucket_size = max(int(bucket_mb * 2**20) // dtype.itemsize, 1)
        items = [all_items[position] for position in positions]
        num_shards = job.num_shards(home)
        if not whole:
            buckets = plan_elements(items, num_shards, bucket_size)
        else:
            parameters = [found[position].parameter for position in positions]
            costs = [
                _matrix_cost(parameter.shape, routes[id(parameter)], settings)
                for parameter in parameters
            ]
            others = alike.get((home, dtype, trained, False, format, uneven), [])
            fill = [all_items[position] for position in others]
            buckets = plan_matrices(items, costs, num_shards, bucket_size, fill=fill, grain=grain)
            positions += others
        for bucket in buckets:
            members = tuple(positions[member] for member in bucket.members)
            filled.update(members)
            planned.append(PlannedBuffer(members, bucket.layout, home))
    return sorted(planned, key=lambda buffer: -min(buffer.members))


def _matrix_cost(shape: Sequence[int], route: Route, settings: MuonSettings) -> int:
    """The cost of Newton-Schulz on all matrices of one parameter."""
    matrices = matrices_of(route.shape_of(shape), route.split)
    shapes = (shape for matrix in matrices for shape in matrix.shapes)
    return sum(cost(rows, cols, settings.polynomial) for rows, cols in shapes)


def _own_problems(
    model: nn.Module, placements: Placements, bucket_mb: Any, grain: Any, matrix: Any, overlap: Any
) -> list[str]:
    problems = []
    if grain not in (None, "tensor", ROW):
        problems.append(
            f"grain={grain!r}: choose None, 'tensor' (every matrix stays whole) or sw.ROW (small "
            f"buckets)"
        )
    if overlap is not True and overlap is not False:
        problems.append(f"overlap_gather={overlap!r}: choose True or False")
    problems += bucket_problems(placements, bucket_mb)
    if matrix is not None and not isinstance(matrix, MuonSettings):
        problems.append(f"matrix={matrix!r}: use sw.muon(...)")
    inner = [unit.name for unit in units_of(model)] if unit_of(model) is None else []
    if inner:
        problems.append(
            f"{quoted(inner)} inside the model is wrapped already: data_parallel takes the "
            f"whole model in one call; for parameters on another mesh use meshes="
        )
    return problems


# ------------------------------------------------------------------------------ overlap_gather


def _stages(model: nn.Module, unit: Unit) -> dict[nn.Module, list[int]]:
    """The buckets that each module waits for before it runs."""
    buckets_of: dict[int, set[int]] = {}  # by the dict of a module's parameters
    for parameters, _, number, _ in unit.places:
        buckets_of.setdefault(id(parameters), set()).add(number)
    stages: dict[nn.Module, list[int]] = {}
    for stage, readable in _modules_in_order(model):
        numbers: set[int] = set()
        for module in readable:
            numbers |= buckets_of.get(id(module._parameters), set())
        # The root is a stage too: its unit's hook runs earlier, and waits for nothing.
        if numbers:
            stages[stage] = sorted(numbers, reverse=True)
    return stages


def _modules_in_order(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """(stage, modules whose parameters it may read), in the order of forward.

    A module with lists of modules inside (a decoder, a block with experts) computes by calling the
    modules of the lists. So its children are stages too, and it reads only its own parameters. Any
    other module is one stage: it may read all parameters below it, as attention reads the weight of
    its output projection.
    """
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    of_parameters = (nn.ParameterList, nn.ParameterDict)  # never called: the module above reads
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if any(isinstance(inner, lists) for inner in module.modules()):
            read = [child for child in module.children() if isinstance(child, of_parameters)]
            yield module, [module, *read]
            waiting += list(module.children())[::-1]
        else:
            yield module, list(module.modules())
