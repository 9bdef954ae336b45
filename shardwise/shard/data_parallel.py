# SPDX-License-Identifier: Apache-2.0
"""``data_parallel``: a whole model in buckets, its optimizer's work spread over the ranks.

model --> parameters in backprop order --> matrices | the rest, by dtype, format, trainability, mesh
      --> buckets, each one flat buffer --> the same groups and phases as under ``fully_shard``

    rank 0   main |q0 k0|         gradients reduce-scattered bucket by bucket while backward runs
    rank 1   main       |q1 k1|   the step updates what a rank owns, whole matrices
    any rank      |q0 k0|q1 k1|   then one all-gather per bucket; parameters are views of it

Where each matrix lies follows from its shape and its place in the model alone; the optimizer reads
the owner off the same layout, and finds every matrix whole there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.layout import ROW, TENSOR, Grain, Item, tensor_fraction
from shardwise.memory import weakly
from shardwise.mesh import data_mesh, init_mesh
from shardwise.optim.matrix_group import kernels_everywhere
from shardwise.optim.muon import MuonSettings, muon
from shardwise.optim.presets import price
from shardwise.optim.routing import Route, route_problems, routes_of
from shardwise.optim.split import matrices_of
from shardwise.placements import Placements, zero
from shardwise.precision import Precision
from shardwise.precision.policy import stores_nothing
from shardwise.shard.buckets import plan_elements, plan_matrices
from shardwise.shard.building import PlannedBuffer, Wrapping
from shardwise.shard.checks import bucket_problems, check_types, option_problems
from shardwise.shard.formats import side_in
from shardwise.shard.module import unit_of, units_of
from shardwise.shard.unit import Phase, Unit
from shardwise.shard.wrapped import Place
from shardwise.streams import annotate
from shardwise.words import quoted

M = TypeVar("M", bound=nn.Module)
_VERB = "data_parallel"
GRAINS = (None, "tensor", ROW)


def data_parallel(
    model: M,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    bucket_mb: float = 256,
    grain: Literal["tensor"] | Grain | None = None,
    meshes: Mapping[str, DeviceMesh] | None = None,
    matrix: MuonSettings | None = None,
    overlap_gather: bool | str = False,
    precision: Precision | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    unused_parameters: str = "none",
    memory: str = "caching",
    unify_streams: bool = False,
) -> M:
    """Replicate a model over a mesh and spread its gradients and optimizer state, in place.

    Args:
        mesh: any DeviceMesh; its ``dp_outer`` and ``dp`` axes where it names them, else all axes.
        placements: whose compute weights are replicated: ``zero(0)``, ``zero(1)`` (the default),
            ``zero(2)``, or your own; sharded weights are for ``fully_shard``.
        bucket_mb: megabytes of weights, in their own dtype, from which on a bucket is sent. It
            grows where that keeps every matrix whole, up to 55 % of them, so that the rest of
            backward overlaps with it; the gradients of a bucket are in memory at once. Where that
            is not enough, or would pad over a thirty-second, matrices lie in equal parts on several
            ranks, and the optimizer brings them together. ``sw.plan`` says how many, and why.
        grain: "tensor" is a promise that every matrix lies whole on one rank, at the price of
            larger buckets and padding; refused where padding would be more than an eighth.
            ``sw.ROW``: matrices are cut where that keeps buckets near ``bucket_mb``.
        meshes: other meshes for some parameters, by name pattern: ``{"*.experts": expert_mesh}``; a
            pattern also stands for everything below the module it names. Their gradients are summed
            over that mesh and divided by the ranks of ``mesh``: an expert sees the tokens of
            several of them.
        matrix: ``sw.muon(...)`` of the optimizer to come: how matrices are weighed against each
            other.
        overlap_gather: wait for a bucket when the first module that reads it runs, not before the
            model's forward. Modules must read the weights of those they call through calls.
            "step": also begin, inside ``sw.optimizer``'s step, with each bucket that it is done
            with: elementwise ones (embeddings) first, then matrices in the order of forward, while
            those after them are orthogonalised. Build the optimizer after this call.
        precision: dtypes of weights, gradients and inputs; or ``mp_policy``, torch's form of it.
        ignored_params: left alone: not sharded, not moved, not reduced.
        unused_parameters: as for ``fully_shard``: "none", "zeros" or "error".
        memory, unify_streams: as in ``fully_shard``.

    Which parameters are matrices is the answer of :func:`sw.route`; call that before.
    """
    check_types([model], mesh, placements, precision, mp_policy, verb=_VERB)
    mesh = init_mesh() if mesh is None else data_mesh(mesh)
    placements = placements or zero(1)
    precision = precision or Precision.from_torch(mp_policy or MixedPrecisionPolicy())
    settings = matrix if isinstance(matrix, MuonSettings) else muon()
    job = Wrapping(_VERB, [model], mesh, placements, precision, ignored_params)
    found, stored = job.found, job.stored
    routes = {id(one.parameter): one.route for one in routes_of(model)}
    problems = job.spread(meshes)
    problems += _own_problems(model, placements, bucket_mb, grain, matrix, overlap_gather)
    problems += option_problems(unused_parameters, memory, None)
    problems += precision.unmatched([f.name for f in found])
    problems += stores_nothing(precision.format, stored)
    for f in found:
        problems += route_problems(f.name, tuple(f.parameter.shape), routes[id(f.parameter)])
    job.refuse(
        problems,
        f"unused={unused_parameters} memory={memory} bucket={bucket_mb} grain={grain} "
        f"overlap={overlap_gather} {settings.preset} {settings.form}",
        [
            f"{routes[id(f.parameter)].kind} over {home.mesh_dim_names} {tuple(home.shape)}"
            for f, home in zip(found, job.homes, strict=True)
        ],
    )
    job.install(
        BucketedUnit,
        _planned_buckets(job, routes, settings, bucket_mb, grain),
        divisors={home: float(mesh.size()) for home in job.ranks if home != mesh},
        release_after_forward=None,
        kept_axis=None,
        unused=unused_parameters,
        options={"memory": memory, "unify": unify_streams},
        staged=bool(overlap_gather),
        early=overlap_gather == "step",
    )
    return model


# ------------------------------------------------------------------------------ planning


def _planned_buckets(
    job: Wrapping,
    routes: Mapping[int, Route],
    settings: MuonSettings,
    bucket_mb: float,
    grain: Grain | str | None,
) -> list[PlannedBuffer]:
    """The buckets, in the order in which backward fills them, which is taken to meet parameters in
    the reverse order of their registration."""
    found = job.found
    measured = kernels_everywhere(job.device, job.ranks[job.mesh].axes)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for position in reversed(range(len(found))):
        parameter, home = found[position].parameter, job.homes[position]
        format = job.stored[position].format
        # A frozen matrix has no optimizer that could need it whole.
        whole = parameter.requires_grad and routes[id(parameter)].kind == "matrix"
        trained, uneven = parameter.requires_grad, found[position].uneven
        key = (home, parameter.dtype, trained, whole, format, uneven)
        alike.setdefault(key, []).append(position)
    # The grains of matrices; what is no matrix is cut anywhere.
    seen = [routes[id(one.parameter)].shape_of(one.shape) for one in found]
    sides = [side_in(stored.format) for stored in job.stored]
    every = [
        Item(one.name, one.shape, TENSOR if len(shape) < 3 else tensor_fraction(shape[0]), side)
        for one, shape, side in zip(found, seen, sides, strict=True)
    ]
    planned = []
    filled: set[int] = set()  # positions that share a bucket with matrices
    for key in sorted(alike, key=lambda key: not key[3]):  # matrices first
        home, dtype, trained, whole, format, uneven = key
        positions = [position for position in alike[key] if position not in filled]
        bucket_size = max(int(bucket_mb * 2**20) // dtype.itemsize, 1)
        items = [every[position] for position in positions]
        if not whole:
            buckets = plan_elements(items, job.num_shards(home), bucket_size) if items else []
        else:
            costs = [
                matrix_cost(one.shape, routes[id(one)], settings, measured=measured)
                for one in (found[position].parameter for position in positions)
            ]
            others = alike.get((home, dtype, trained, False, format, uneven), [])
            fill = [every[position] for position in others]
            buckets = plan_matrices(
                items, costs, job.num_shards(home), bucket_size, fill=fill, grain=grain
            )
            positions += others
        for bucket in buckets:
            members = tuple(positions[member] for member in bucket.members)
            filled.update(members)
            planned.append(PlannedBuffer(members, bucket.layout, format, home))
    return sorted(planned, key=lambda buffer: -min(buffer.members))


def matrix_cost(
    shape: Sequence[int], route: Route, settings: MuonSettings, *, measured: bool = False
) -> int:
    """The cost of Newton-Schulz on all matrices of one parameter."""
    one = partial(price, polynomial=settings.polynomial, form=settings.form, measured=measured)
    matrices = matrices_of(route.shape_of(shape), route.split)
    return sum(one(rows, cols) for matrix in matrices for rows, cols in matrix.shapes)


# ------------------------------------------------------------------------------ problems


def _own_problems(
    model: nn.Module, placements: Placements, bucket_mb: Any, grain: Any, matrix: Any, overlap: Any
) -> list[str]:
    problems = []
    if grain not in GRAINS:
        problems.append(
            f"grain={grain!r}: None, 'tensor' to have every matrix whole, or sw.ROW to have small "
            f"buckets"
        )
    if overlap is not True and overlap is not False and overlap != "step":
        problems.append(f"overlap_gather={overlap!r}: True, False or 'step'")
    problems += bucket_problems(placements, bucket_mb)
    if matrix is not None and not isinstance(matrix, MuonSettings):
        problems.append(f"matrix={matrix!r}: use sw.muon(...)")
    inner = [unit.name for unit in units_of(model)] if unit_of(model) is None else []
    if inner:
        problems.append(
            f"{quoted(inner)} inside the model is wrapped already: data_parallel takes the "
            f"whole model, and meshes= for parameters on another mesh"
        )
    return problems


# ------------------------------------------------------------------------------ the unit


class BucketedUnit(Unit):
    """The state behind one ``data_parallel`` call: groups are buckets, in the order of backward.

        step        gathers  3 2 1 0    ``early``: as the optimizer is done with each, meanwhile
        forward     gathers  3 2 1 0    what is not there, in forward order; awaited before all of
                                        it, or, with ``staged``, when a module first reads it
        backward    reduces  0 1 2 3    each as soon as its gradients and those before it are there

    The weights stay whole between steps, so nothing is released and a bucket need not wait for the
    rest of the model to reduce. Buckets are gathered and reduced in one fixed order, whatever a
    rank's forward used: collectives match on every rank.
    """

    by_group = True

    def __init__(self, *wrapped: Any, staged: bool = False, **options: Any) -> None:
        self._next = 0  # the bucket whose turn it is to reduce
        self._missing: list[int] = []  # by bucket: gradients that have not come in this backward
        _, (model, *_), _, places = wrapped
        stages = _stages(model, places) if staged else {}
        super().__init__(*wrapped, staged=bool(stages), **options)
        for stage, numbers in stages.items():
            stage.register_forward_pre_hook(weakly(self.awaited, numbers))

    def _end_forward(self, kept: bool) -> None:
        self.wait()  # what no module asked for must have arrived too
        super()._end_forward(kept)

    def awaited(self, numbers: list[int], *_: Any) -> None:
        """A module that reads these buckets runs next."""
        if self.phase is not Phase.RESTING:
            self.show_groups(numbers)

    # ------------------------------------------------------------------ gradients

    def _expect_gradients(self, comes: Callable[[Tensor], bool] | None) -> None:
        super()._expect_gradients(comes)
        self._next = 0
        self._missing = [0] * len(self.groups)
        for number, _ in self.arrivals.missing:
            self._missing[number] += 1

    def group_arrived(self, number: int) -> None:
        """A gradient of one bucket has come: reduce the buckets that have all of theirs, in
        order."""
        self._missing[number] -= 1
        while self._next < len(self.groups) and not self._missing[self._next]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        group = self.groups[self._next]
        self._next += 1
        if group.trainable:
            with annotate(self.name, f"reduce bucket {self._next - 1}"):
                group.gradients.reduce(self.runtime)

    def reduce(self) -> None:
        """Backward is over for this model: what is still here, unused parameters as zeros."""
        while self._next < len(self.groups):
            self._reduce_next()

    def rest(self) -> RuntimeError | None:
        self._next = 0
        return super().rest()


def _stages(model: nn.Module, places: Sequence[Place]) -> dict[nn.Module, list[int]]:
    """The buckets that each waiting module reads."""
    held: dict[int, set[int]] = {}
    for parameters, _, number, _ in places:
        held.setdefault(id(parameters), set()).add(number)
    found: dict[nn.Module, list[int]] = {}
    for stage, inside in _modules_in_order(model):
        numbers = {number for inner in inside for number in held.get(id(inner._parameters), ())}
        # The root's own wait is its unit's; it comes before this one, and shows nothing.
        if numbers:
            found[stage] = sorted(numbers, reverse=True)
    return found


def _modules_in_order(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules that forward comes to one after another, and whose parameters each may read.

    A module with lists of modules inside (a decoder, a block with experts) computes by calling
    them, so it is entered and they are stages of their own; any other may read what is below it
    (attention reads the weight of its output projection), so it is one stage.
    """
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if any(isinstance(inner, _LISTS) for inner in module.modules()):
            read = [child for child in module.children() if isinstance(child, _PARAMETERS)]
            yield module, [module, *read]
            waiting += list(module.children())[::-1]
        else:
            yield module, list(module.modules())


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)  # never called: their owner reads them
