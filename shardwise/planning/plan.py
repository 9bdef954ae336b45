# SPDX-License-Identifier: Apache-2.0
"""``plan``: the memory and the collectives of each rank, to the byte, before a run.

    model  -->  a copy, wrapped  -->  engine, optimizer  -->  one step  -->  Plan
                units.py              engine.py                forward.py

A plan needs no process group and no memory. The library itself runs as one rank of a pretended
mesh, and the plan reads its ledger and ``comm.record()``, as in a run. With a batch the model's own
forward runs too, and its activations are counted: activations.py.
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

from shardwise.core.layout import ROW
from shardwise.core.memory import separate_ledger
from shardwise.core.placements import SHARD, Placements
from shardwise.models.tensor_parallel import planned_tiles
from shardwise.moe import mixtures_of
from shardwise.optim.gradients import division_of
from shardwise.planning.activations import Follower
from shardwise.planning.engine import Engine
from shardwise.planning.figures import Plan
from shardwise.planning.forward import own_forward, sketch, traffic_of
from shardwise.planning.orthogonalisation import (
    by_rank,
    heaviest,
    momenta,
    num_holders,
    orthogonalisation,
    summed,
)
from shardwise.planning.planned import (
    OPTIMIZERS,
    Measured,
    Mesh,
    Options,
    PlannedGroup,
    PlannedUnit,
    as_placements,
)
from shardwise.planning.suggest import largest, suggest
from shardwise.planning.units import ToWrap, modules_to_wrap, price_of_whole, spread_over
from shardwise.precision import Precision
from shardwise.shard.call import tensors_in
from shardwise.shard.checks import option_problems
from shardwise.shard.group import Group
from shardwise.shard.wrap import GrainChoice

TOKENS = (1, 8)  # shape of the default batch; parameters and gradients do not depend on it


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
        model: best built under ``torch.device("meta")``. Only names, shapes and dtypes are read,
            and ``model.recomputed`` if it exists: the modules that run under activation
            checkpointing. A model that ``fully_shard`` has wrapped is planned with its units.
            If experts are spread over ranks, the model has one rank's share of the experts
            (``MixtureOfExperts.keep_share``): neighbours on the inner axis hold different shares.
        mesh_shape: data-parallel axes, outer to inner: ``{"dp": 8}``, ``{"dp_outer": 2, "dp": 4}``;
            or sizes alone, for axes with these names: ``(2, 4)``. With ``"tp": 2`` the plan is for
            the tiles of one rank, and counts bytes sent over the data-parallel axes; the model is a
            GPT, or was cut by ``parallelize_module``.
        placements: :class:`Placements`, or a name: zero0, zero1, zero2, zero3, hsdp, hfsdp.
        optimizer: "adamw", "none", or a matrix optimizer ("muon", "soap", ...) with AdamW for the
            other parameters.
        microbatches: backward passes per optimizer step.
        wrap: the modules given to ``fully_shard``; default: the modules of :func:`wrap_units`.
        bucket_mb: as given to ``data_parallel``, which is planned instead of ``fully_shard``: the
            whole model in buckets.
        device: "cuda" or "cpu". The cost of a matrix is a measured time on "cuda", and a number of
            operations on "cpu". A reduction is issued whole on a GPU and piece by piece on a CPU;
            this changes the peak of gradients that accumulate over an outer axis.
        memory: bytes of a rank. A plan that does not fit has suggestions; each was planned.
        rank: the rank whose collectives are planned, if a matrix optimizer gives ranks different
            work; default: the rank that sends most between shards.
        tokens: of one microbatch on one rank. Then the collectives of routers and of rows are
            planned too, as if every expert got as many rows: the real numbers depend on the tokens.
        batch: (sequences, tokens of each) of one microbatch on one rank. ``model(tokens, targets)``
            then runs on the meta device, so that the plan includes activations, and with
            ``memory`` the largest microbatch that fits. Implies ``tokens``.
        loss: runs the forward of its argument, a copy of the model on the meta device, and returns
            the tensor from which backward starts (``dry_run``). Without a loss and a batch, a
            sketch calls the units.
    """
    if batch is not None:
        tokens = math.prod(batch) if tokens is None else tokens
    shape = dict(mesh_shape) if isinstance(mesh_shape, Mapping) else mesh_shape
    tp = shape.pop("tp", 1) if isinstance(shape, dict) else 1
    mesh = Mesh.of(shape)
    problems = option_problems("none", "caching", None, grain)
    if batch is not None or loss is not None:
        problems += _forward_problems(model)
    if rank is not None and not 0 <= rank < mesh.num_ranks:
        problems.append(
            f"rank {rank} of a mesh of {mesh.num_ranks}: choose a rank from 0 to "
            f"{mesh.num_ranks - 1}"
        )
    if problems:
        raise ValueError(f"plan: {'; '.join(problems)}")
    label = name or type(model).__name__
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if tp > 1:
        model = planned_tiles(model, tp)
    if bucket_mb is not None and (wrap is not None or grain not in (None, "tensor", ROW)):
        raise ValueError(
            "plan: bucket_mb plans data_parallel, which wraps the whole model and knows the grains "
            "'tensor' and ROW alone; wrap and other grains belong to fully_shard. Leave out "
            "bucket_mb, or wrap and grain"
        )
    options = Options(
        mesh=mesh,
        placements=as_placements(placements),
        precision=precision or Precision(),
        microbatches=microbatches,
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
    work = made.matrices
    if bucket_mb is not None and grain is None and work is not None and work.cuts_matrices:
        # Only for this plan, not for suggested changes: the price wraps the model once more.
        price = price_of_whole(source, options)
        made = replace(made, matrices=replace(work, whole_price=price))
    if tp > 1:  # the optimizer chooses how to orthogonalise tiles; this is not planned
        made = replace(made, num_parameters=num_parameters, matrices=None)
    if tokens is not None:
        made = replace(made, traffic=traffic_of(model, options, tokens))
    if made.fits is not False:
        return made
    if batch is not None and made.largest == 0:
        # Not even one sequence fits: try changes with one sequence.
        options = replace(options, batch=(1, batch[1]))

    def again(**changes: Any) -> Plan:
        if SHARD in changes.get("placements", options.placements).compute:
            changes["bucket_mb"] = None
        return step.plan(replace(options, **changes), rank)

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

    A plan assumes that units run in the order of their registration, and that every trainable
    parameter gets a gradient. A dry run does not. Where both assumptions are true, a plan and a dry
    run agree to the byte. The model must be on the meta device, and is not changed.

    Args:
        rank: the rank of the mesh whose work is planned.
        loss: runs the forward of its argument, a wrapped copy of the model, and returns the tensor
            from which backward starts; default: the sum of the outputs for a batch of token ids.
        options: the options of ``plan``.
    """
    if mesh_shape.get("tp", 1) > 1:
        raise ValueError(
            f"dry_run: tp={mesh_shape['tp']}: the model's own forward needs the other ranks of "
            f"tensor parallelism. Use plan instead"
        )
    loss = loss or _sum_of_outputs
    made = plan(model, mesh_shape, placements, rank=rank, loss=loss, **options)
    return replace(made, source=f"dry run as rank {rank} of {made.mesh.num_ranks}")


def _sum_of_outputs(model: nn.Module) -> Tensor:
    outputs = tensors_in(model(torch.zeros(TOKENS, dtype=torch.int64)))
    found = [x for x in outputs if x.is_floating_point() and x.requires_grad]
    if not found:
        raise ValueError(
            f"no output of {type(model).__name__} requires a gradient, for token ids of shape "
            f"{TOKENS}: pass loss, a function of the model"
        )
    return sum((tensor.float().sum() for tensor in found[1:]), found[0].float().sum())


def _forward_problems(model: nn.Module) -> list[str]:
    """The reasons why the model's own forward cannot run, as a batch and a dry run need."""
    problems = []
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    if not plain or not all(parameter.is_meta for parameter in model.parameters()):
        problems.append(
            "the model, whose own forward runs, must be neither wrapped nor real, but some of its "
            "parameters are wrapped, or are not on the meta device: build another model under "
            "torch.device('meta')"
        )
    if any(layer.experts.ep > 1 for layer in mixtures_of(model)):
        problems.append(
            "experts are spread over ranks, and rows without values cannot be routed between "
            "ranks: use plan instead of a dry run, with tokens instead of a batch"
        )
    return problems


def _loss_of(batch: tuple[int, int], model: nn.Module) -> Tensor:
    tokens, targets = torch.zeros(2, *batch, dtype=torch.int64)
    return model(tokens, targets)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Step:
    """A model to plan; the options vary."""

    source: ToWrap
    label: str
    loss: Callable[[nn.Module], Tensor] | None

    def plan(self, options: Options, rank: int | None, search: bool = False) -> Plan:
        """``search``: also look for the largest microbatch that fits."""
        with _no_garbage(), separate_ledger() as ledger:
            engine = Engine(options, ledger, self.source.wrapped(options, rank or 0))
            if rank is None and engine.matrix_groups:
                engine.pose_as(heaviest(engine.matrix_groups, options.mesh.num_ranks))
            made = self._figures(engine)
            return replace(made, largest=self._largest(engine, made)) if search else made

    def _measure(self, engine: Engine, batch: tuple[int, int] | None) -> Measured:
        """Measure a step whose forward is the model's own, or a sketch of it."""
        loss = self.loss
        if batch is not None:
            engine.follower = Follower(engine.model, engine.ledger)
            loss = loss or partial(_loss_of, batch)
        if loss is None:
            return engine.measure(sketch(engine.model))
        return engine.measure(partial(own_forward, loss, engine.model))

    def _largest(self, engine: Engine, made: Plan) -> int:
        """The largest number of sequences that fits. The same units run more steps."""
        options = made.options
        assert options.batch is not None and options.memory is not None
        first, length = options.batch

        def total(count: int) -> int:
            if count == first:
                return made.total
            return replace(made, followed=self._measure(engine, (count, length)).followed).total

        return largest(total, options.memory, first, made.total - made.activations)

    def _figures(self, engine: Engine) -> Plan:
        options, matrices = engine.options, engine.matrix_groups
        measured, units = self._measure(engine, options.batch), _units(engine)
        return Plan(
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
            matrices=orthogonalisation(matrices, options.mesh.num_ranks) if matrices else None,
            divisions={
                routed.name: division
                for routed in engine.routes
                if (division := division_of(routed.parameter)) is not None
            },
            **vars(measured),
        )


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Without garbage collection: all objects of a plan live until its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _units(engine: Engine) -> tuple[PlannedUnit, ...]:
    """The units. Units with the same buffers are one entry, at the place of the first. A bucket
    with spread experts and other parameters is two entries."""
    matrices = {id(r.parameter) for r in engine.routes if r.route.kind == "matrix"}
    names: dict[tuple[tuple[int, PlannedGroup], ...], list[str]] = {}
    for unit in engine.units:
        groups = tuple((_spread(group), _planned_group(group, matrices)) for group in unit.groups)
        names.setdefault(groups, []).append(unit.name)
    return tuple(
        PlannedUnit(
            names=tuple(alike), groups=tuple(group for own, group in groups if own == ep), ep=ep
        )
        for groups, alike in names.items()
        for ep in sorted({own for own, _ in groups} or {1})
    )


def _spread(group: Group) -> int:
    """The number of ranks over which the experts of a group are spread; 1: not spread."""
    return 1 if group.ranks.others is None else group.ranks.others.size


def _planned_group(group: Group, matrices: set[int]) -> PlannedGroup:
    dtype = str(group.codec.dtype).removeprefix("torch.")
    return PlannedGroup(
        layout=group.layout,
        dtype=group.main.dtype,
        stored="main" if group.aliased else group.format or dtype,
        planes=() if group.whole is None else tuple(b.nbytes for b in group.whole.blocks),
        matrices=tuple(id(parameter) in matrices for parameter in group.sharded),
        trainable=group.trainable,
        staged="" if group.whole is None else group.codec.staged_because(group.layout),
    )


def _state_bytes(units: Sequence[PlannedUnit], options: Options, engine: Engine) -> list[int]:
    """Bytes of optimizer state on each rank. Where replicas divide the matrices, the state of a
    matrix lies on one replica."""
    states, ranks = OPTIMIZERS[options.optimizer], options.mesh.num_ranks
    divided = [group for group in engine.matrix_groups if group.divides]
    parts = [by_rank(group.sharding, momenta(group, states[0]), ranks) for group in divided]
    parts += [by_rank(group.sharding, group.owned_bytes, ranks) for group in engine.matrix_groups]
    counted_above = {ranks // num_holders(group.sharding) for group in divided}  # values of ep
    for ep in sorted({unit.ep for unit in units if unit.groups}):
        tensors = (0 if ep in counted_above else states[0], states[1])
        by_shard = numpy.sum(
            [
                len(unit.names) * group.state_bytes(tensors)
                for unit in units
                for group in unit.groups
                if unit.ep == ep
            ],
            axis=0,
        )
        shards = options.mesh.without(ep).shards(options.placements.main)
        parts.append([int(by_shard[shard]) for shard in shards for _ in range(ep)])
    return summed(parts)
