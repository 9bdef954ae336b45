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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from shardwise.core.memory import separate_ledger
from shardwise.core.placements import Placements
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
    Mesh,
    Options,
    PlannedGroup,
    PlannedUnit,
    as_placements,
)
from shardwise.planning.units import modules_to_wrap, spread_over, wrapped_copy
from shardwise.precision import Precision
from shardwise.shard.checks import option_problems
from shardwise.shard.group import Group
from shardwise.shard.wrap import GrainChoice


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
    inputs: Sequence[Any] | None = None,
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
        memory: bytes of a rank, for :attr:`Plan.fits`.
        rank: the rank whose collectives are planned, if a matrix optimizer gives ranks different
            work; default: the rank that sends most between shards.
        tokens: of one microbatch on one rank. Then the collectives of routers and of rows are
            planned too, as if every expert got as many rows: the real numbers depend on the tokens.
        batch: (sequences, tokens of each) of one microbatch on one rank. ``model(tokens, targets)``
            then runs on the meta device, so that the plan includes activations. Implies ``tokens``.
        inputs: the arguments of forward for a model of another kind, instead of ``batch``. Backward
            starts from the sum of the outputs. Without both, a sketch of forward calls the units in
            the order of their registration.
    """
    shape = dict(mesh_shape) if isinstance(mesh_shape, Mapping) else mesh_shape
    tp = shape.pop("tp", 1) if isinstance(shape, dict) else 1
    mesh, problems = Mesh.of(shape), option_problems("none", "caching", None, grain)
    if batch is not None:
        if len(batch) != 2 or min(batch) < 1:
            raise ValueError(f"plan: batch={batch}: give (sequences, tokens of each), 1 or more")
        inputs = tuple(torch.zeros(2, *batch, dtype=torch.int64, device="meta"))
        tokens = batch[0] * batch[1] if tokens is None else tokens
    if inputs is not None:
        problems += _forward_problems(model, tp)
    if rank is not None and not 0 <= rank < mesh.num_ranks:
        problems.append(f"rank {rank} of a mesh of {mesh.num_ranks}: choose one of them, from 0 on")
    if bucket_mb is not None and wrap is not None:
        problems.append("bucket_mb wraps the whole model: leave out bucket_mb, or wrap")
    if problems:
        raise ValueError(f"plan: {'; '.join(problems)}")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = planned_tiles(model, tp) if tp > 1 else model
    options = Options(
        mesh=mesh,
        placements=as_placements(placements),
        precision=precision or Precision(),
        microbatches=microbatches,
        ep=spread_over(model),
        tp=tp,
        bucket_mb=bucket_mb,
        optimizer=optimizer,
        reshard_after_forward=reshard_after_forward,
        device=device,
        memory=memory,
    )
    modules = modules_to_wrap(model, wrap)
    with _no_garbage(), separate_ledger() as ledger:
        copied = wrapped_copy(model, modules, options, rank or 0, [*ignored_params], grain)
        engine = Engine(options, ledger, copied)
        if rank is None and engine.matrix_groups:
            engine.pose_as(heaviest(engine.matrix_groups, mesh.num_ranks))
        forward = sketch(copied)
        if inputs is not None:
            engine.follower = Follower(copied, ledger)
            engine.follower.live += sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor))
            forward = partial(own_forward, copied, inputs)
        measured = engine.measure(forward)
        units, matrices = _units(engine), engine.matrix_groups
        if tp == 1:
            payloads = (len(u.names) * u.ep * g.layout.payload for u in units for g in u.groups)
            num_parameters = sum(payloads)
        else:  # the optimizer chooses how to orthogonalise tiles; this is not planned
            matrices = []
        return Plan(
            model=name or type(model).__name__,
            num_parameters=num_parameters,
            options=options,
            units=units,
            optimizer_bytes=max(_state_bytes(units, options, engine), default=0),
            matrices=orthogonalisation(matrices, mesh.num_ranks) if matrices else None,
            divisions={
                routed.name: division
                for routed in engine.routes
                if (division := division_of(routed.parameter)) is not None
            },
            traffic=None if tokens is None else traffic_of(model, options, tokens),
            **vars(measured),
        )


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Without garbage collection, which would take most of the time: all objects of a plan live
    until its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _forward_problems(model: nn.Module, tp: int) -> list[str]:
    """The reasons why the model's own forward cannot run."""
    problems = []
    parameters = list(model.parameters())
    if not all(type(p) is nn.Parameter and p.is_meta for p in parameters):
        problems.append(
            "the model, whose own forward runs, must be neither wrapped nor real, but some of its "
            "parameters are wrapped, or are not on the meta device: build another model under "
            "torch.device('meta')"
        )
    if any(layer.experts.ep > 1 for layer in mixtures_of(model)):
        problems.append(
            "experts are spread over ranks, and rows without values cannot be routed between "
            "ranks: give tokens instead of a batch"
        )
    return problems


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
