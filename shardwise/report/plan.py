# SPDX-License-Identifier: Apache-2.0
"""``plan``: what a model, a mesh and a strategy will take on each rank, to the byte, before a run.

    model  -->  a copy, wrapped  -->  runtime, optimizer  -->  one step  -->  Plan
                units.py              engine.py                forward.py

No process group and no memory: the library itself runs as one rank of a pretended mesh, and its
ledger and ``comm.record()`` are read as in a run. With a batch the model's own forward is followed
too: activations.py.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from shardwise.memory import separate_ledger
from shardwise.models.tensor_parallel import planned_tiles
from shardwise.moe import mixtures_of
from shardwise.optim.gradients import division_of
from shardwise.placements import SHARD, Placements
from shardwise.precision import Precision
from shardwise.report.activations import Follower
from shardwise.report.engine import Engine
from shardwise.report.figures import Plan
from shardwise.report.forward import own_forward, sketch, traffic_of
from shardwise.report.orthogonalisation import (
    by_rank,
    heaviest,
    momenta,
    num_holders,
    orthogonalisation,
    summed,
)
from shardwise.report.planned import (
    OPTIMIZERS,
    Measured,
    Mesh,
    Options,
    PlannedGroup,
    PlannedUnit,
    as_placements,
)
from shardwise.report.suggest import largest, suggest
from shardwise.report.units import ToWrap, modules_to_wrap, price_of_whole, spread_over
from shardwise.shard.checks import grain_problems
from shardwise.shard.containers import map_tensors
from shardwise.shard.data_parallel import GRAINS
from shardwise.shard.formats import staged_because
from shardwise.shard.group import Group
from shardwise.shard.wrapping import GrainChoice

TOKENS = (1, 8)  # of the default batch; parameters and their gradients do not depend on it


def plan(
    model: nn.Module,
    mesh_shape: Mapping[str, int] | Sequence[int],
    placements: Placements | str = "zero3",
    *,
    precision: Precision | None = None,
    optimizer: str = "adamw",
    microbatches: int = 1,
    wrap: Sequence[nn.Module] | None = None,
    reshard_after_forward: bool | int | None = None,
    bucket_mb: float | None = None,
    gather_in_step: bool = False,
    grain: GrainChoice | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    device: str = "cuda",
    memory: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    tokens: int | None = None,
    batch: tuple[int, int] | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
) -> Plan:
    """Plan one training step of ``model`` on one rank of a mesh.

    Args:
        model: best built under ``torch.device("meta")``; only names, shapes and dtypes are read,
            and ``model.recomputed``, where it has that: the modules that it checkpoints.
            One that ``fully_shard`` has wrapped is planned in the units that it has.
            Where experts are spread over ranks, one rank's share of them
            (``MixtureOfExperts.keep_share``): every so many neighbours of the inner axis hold
            different ones.
        mesh_shape: data-parallel axes, outer to inner: ``{"dp": 8}``, ``{"dp_outer": 2, "dp": 4}``;
            or sizes alone, for axes of these names: ``(2, 4)``. With ``"tp": 2`` inside of them the
            plan is of one rank's tiles, and counts what is sent over the data-parallel axes; the
            model is a GPT, or cut by ``parallelize_module``.
        placements: :class:`Placements`, or a name: zero0, zero1, zero2, zero3, hsdp, hfsdp.
        optimizer: "adamw", "none", or a matrix optimizer ("muon", "soap", ...) with AdamW for the
            rest.
        microbatches: backward passes per optimizer step.
        wrap: the modules given to ``fully_shard``, default: those of :func:`wrap_units`.
        bucket_mb: as given to ``data_parallel``: plan that instead, the whole model in buckets.
        gather_in_step: as given to ``fully_shard`` (``overlap_gather="step"`` of the other), with
            ``sw.optimizer``: matrices are exchanged in waves, and weights are gathered by the step
            that updates them, not by a forward.
        device: "cuda" or "cpu". Matrices are weighed as there: by what was measured, or by
            operations. A reduction is issued whole on a GPU, piece by piece on a CPU, which moves
            the peak of gradients that accumulate over an outer axis.
        memory: bytes of a rank. What does not fit gets suggestions, each of them planned.
        rank: whose collectives, where a matrix optimizer gives ranks different work; default: the
            one that sends most between shards.
        tokens: of one microbatch on one rank, to plan what routers and rows send as well: rows as
            if every expert got as many, since only tokens will tell.
        batch: (sequences, tokens of each) of one microbatch on one rank. ``model(tokens, targets)``
            is then followed on the meta device, so that activations are in the plan, and with
            ``memory`` the largest microbatch that fits. Implies ``tokens``.
        loss: runs the own forward of the model that it is given, a copy on the meta device, and
            returns what backward starts from (``dry_run``); without it, and without a batch, a
            sketch calls the units.
    """
    if batch is not None:
        tokens = math.prod(batch) if tokens is None else tokens
    shape = dict(mesh_shape) if isinstance(mesh_shape, Mapping) else mesh_shape
    tp = shape.pop("tp", 1) if isinstance(shape, dict) else 1
    mesh = Mesh.of(shape)
    problems = grain_problems(grain)
    if batch is not None or loss is not None:
        problems += _forward_problems(model)
    if rank is not None and not 0 <= rank < mesh.num_ranks:
        problems.append(f"rank {rank} of a mesh of {mesh.num_ranks}: name one that exists")
    if problems:
        raise ValueError(f"plan: {'; '.join(problems)}")
    label, whole = name or type(model).__name__, sum(p.numel() for p in model.parameters())
    if tp > 1:
        model = planned_tiles(model, tp)
    if bucket_mb is not None and (wrap is not None or grain not in GRAINS):
        raise ValueError(
            "plan: wrap and grains are fully_shard's, and bucket_mb is data_parallel's, which "
            "takes the whole model, and of grains 'tensor' and ROW alone: give one or the other"
        )
    options = Options(
        mesh=mesh,
        placements=as_placements(placements),
        precision=precision or Precision(),
        microbatches=microbatches,
        gather_in_step=gather_in_step,
        ep=spread_over(model),
        tp=tp,
        bucket_mb=bucket_mb,
        batch=batch,
        optimizer=optimizer,
        reshard_after_forward=reshard_after_forward,
        device=device,
        memory=memory,
    )
    source = ToWrap(model, modules_to_wrap(model, wrap), list(ignored_params), grain)
    step = _Step(source, label, loss)
    made = step.plan(options, rank, search=batch is not None and memory is not None)
    work, chosen = made.matrices, bucket_mb is not None and grain is None
    if chosen and work is not None and work.num_whole < work.num_matrices:
        # Of this plan alone, not of the changes that are suggested: it wraps the model once more.
        price = price_of_whole(source, options)
        made = replace(made, matrices=replace(work, whole_price=price))
    if tp > 1:  # how tiles are orthogonalised is the optimizer's choice, and not planned
        made = replace(made, num_parameters=whole, matrices=None)
    if tokens is not None:
        made = replace(made, traffic=traffic_of(model, options, tokens))
    if made.fits is not False:
        return made
    if batch is not None and made.largest == 0:
        # Not even one sequence fits: a change is tried with that, the least there is.
        batch = (1, batch[1])
    tried = replace(options, batch=batch)

    def again(**changes: Any) -> Plan:
        kept = SHARD not in changes.get("placements", options.placements).compute
        buckets = bucket_mb if kept else None
        changed = replace(
            tried, gather_in_step=gather_in_step and kept, bucket_mb=buckets, **changes
        )
        return step.plan(changed, rank)

    return replace(made, suggestions=tuple(suggest(made, again)))


def dry_run(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    placements: Placements | str = "zero3",
    *,
    rank: int = 0,
    loss: Callable[[nn.Module], Tensor] | None = None,
    **options: Any,
) -> Plan:
    """A plan whose step runs the model's own forward, on meta tensors.

    A plan takes units to run in the order in which they are registered, and every trainable
    parameter to get a gradient. A dry run knows; where both is as taken, the two agree to the byte.
    The model must be on the meta device, and is left as it was.

    Args:
        rank: which rank of the mesh this process poses as.
        loss: runs the forward of the model that it is given, a wrapped copy, and returns what
            ``backward`` starts from; default: the sum of the outputs for a batch of token ids.
        options: those of ``plan``.
    """
    if mesh_shape.get("tp", 1) > 1:
        raise ValueError(
            f"dry_run: tp={mesh_shape['tp']}: the model's own forward would need the other ranks "
            f"of tensor parallelism; plan without a dry run"
        )
    loss = loss or _sum_of_outputs
    made = plan(model, mesh_shape, placements, rank=rank, loss=loss, **options)
    return replace(made, source=f"dry run as rank {rank} of {made.mesh.num_ranks}")


def _sum_of_outputs(model: nn.Module) -> Tensor:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, model(torch.zeros(TOKENS, dtype=torch.int64)))
    if not found:
        raise ValueError(
            f"{type(model).__name__} gave no output that needs a gradient for token ids of shape "
            f"{TOKENS}: pass loss, a function of the model"
        )
    return sum((tensor.float().sum() for tensor in found[1:]), found[0].float().sum())


def _forward_problems(model: nn.Module) -> list[str]:
    """Why the model's own forward, which a batch and a dry run follow, cannot be run."""
    problems = []
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    if not plain or not all(parameter.is_meta for parameter in model.parameters()):
        problems.append(
            "the model, whose own forward is run, must be neither wrapped nor real, and some of "
            "its parameters are not on the meta device: build another one under "
            "torch.device('meta')"
        )
    if any(layer.experts.ep > 1 for layer in mixtures_of(model)):
        problems.append(
            "experts are spread over ranks, and rows without values cannot be routed between "
            "them: plan without a dry run, and give tokens instead of a batch"
        )
    return problems


def _loss_of(batch: tuple[int, int], model: nn.Module) -> Tensor:
    tokens, targets = torch.zeros(2, *batch, dtype=torch.int64)
    return model(tokens, targets)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Step:
    """All of a plan but its options."""

    source: ToWrap
    label: str
    loss: Callable[[nn.Module], Tensor] | None

    def plan(self, options: Options, rank: int | None, search: bool = False) -> Plan:
        """``search``: also look for the largest microbatch that fits."""
        with _no_garbage():
            return self._plan(options, rank, search)

    def _measure(self, engine: Engine, batch: tuple[int, int] | None) -> Measured:
        """A step whose forward is the model's own, or a sketch of it."""
        loss = self.loss
        if batch is not None:
            engine.follower = Follower(engine.model, engine.ledger)
            loss = loss or partial(_loss_of, batch)
        if loss is None:
            return engine.measure(sketch(engine.model))
        return engine.measure(partial(own_forward, loss, engine.model))

    def _largest(self, engine: Engine, made: Plan) -> int:
        """The most sequences of a microbatch that fit: the units stay, and walk more steps."""
        options = made.options
        assert options.batch is not None and options.memory is not None
        first, length = options.batch

        def total(count: int) -> int:
            if count == first:
                return made.total
            return replace(made, followed=self._measure(engine, (count, length)).followed).total

        return largest(total, options.memory, first, made.total - made.activations)

    def _plan(self, options: Options, rank: int | None, search: bool) -> Plan:
        with separate_ledger() as ledger:
            engine = Engine(options, ledger, self.source.wrapped(options, rank or 0))
            if rank is None and engine.matrix_groups:
                engine.pose_as(heaviest(engine.matrix_groups, options.mesh.num_ranks))
            return self._figures(engine, search)

    def _figures(self, engine: Engine, search: bool) -> Plan:
        options, matrices = engine.options, engine.matrix_groups
        found, units = self._measure(engine, options.batch), _units(engine)
        work = orthogonalisation(matrices, options.mesh.num_ranks) if matrices else None
        made = Plan(
            model=self.label,
            num_parameters=sum(
                len(unit.names) * unit.ep * group.layout.payload
                for unit in units
                for group in unit.groups
            ),
            options=options,
            source="plan",
            units=units,
            optimizer_bytes=max(_state_bytes(units, options, engine), default=0),
            matrices=work,
            divisions={
                one.name: division
                for one in engine.routes
                if (division := division_of(one.parameter)) is not None
            },
            **vars(found),
        )
        return replace(made, largest=self._largest(engine, made)) if search else made


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Everything that a plan makes lives until its end: looking for garbage would find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _units(engine: Engine) -> tuple[PlannedUnit, ...]:
    """Units with the same buffers as one, in the order of their first; in buckets, experts that
    are spread over ranks apart from the rest."""
    matrices = {id(one.parameter) for one in engine.routes if one.route.kind == "matrix"}
    alike: dict[tuple[tuple[int, PlannedGroup], ...], list[str]] = {}
    for unit in engine.units:
        groups = tuple(_planned_group(group, matrices) for group in unit.groups)
        alike.setdefault(groups, []).append(unit.name)
    return tuple(
        PlannedUnit(
            names=tuple(names), groups=tuple(group for at, group in groups if at == ep), ep=ep
        )
        for groups, names in alike.items()
        for ep in sorted({at for at, _ in groups} or {1})
    )


def _planned_group(group: Group, matrices: set[int]) -> tuple[int, PlannedGroup]:
    """Over how many ranks its experts are spread, and the group."""
    dtype = str(group.whole.dtype).removeprefix("torch.")
    planned = PlannedGroup(
        layout=group.layout,
        dtype=group.main.dtype,
        stored="main" if group.aliased else group.format or dtype,
        planes=() if group.aliased else tuple(block.nbytes for block in group.blocks),
        matrices=tuple(id(parameter) in matrices for parameter in group.sharded),
        trainable=group.trainable,
        staged=staged_because(group.layout, group.format, group.persistent),
    )
    return 1 if group.ranks.others is None else group.ranks.others.size, planned


def _state_bytes(units: Sequence[PlannedUnit], options: Options, engine: Engine) -> list[int]:
    """Optimizer state on each rank. Where replicas divide the matrices, the state of a matrix is
    on one of them."""
    states, mesh, ranks = OPTIMIZERS[options.optimizer], options.mesh, options.mesh.num_ranks
    divided = [group for group in engine.matrix_groups if group.divides]
    found = [by_rank(group.sharding, momenta(group, states[0]), ranks) for group in divided]
    apart = {ranks // num_holders(group.sharding) for group in divided}
    found += [by_rank(one.sharding, one.owned_bytes, ranks) for one in engine.matrix_groups]
    for ep in sorted({unit.ep for unit in units if unit.groups}):
        own = mesh.without(ep)
        counted = (0 if ep in apart else states[0], states[1])
        beside = numpy.sum(
            [
                len(unit.names) * group.state_bytes(counted)
                for unit in units
                for group in unit.groups
                if unit.ep == ep
            ],
            axis=0,
        )
        held = own.shards(options.placements.main)
        found.append([int(beside[shard]) for shard in held for _ in range(ep)])
    return summed(found)
