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

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core import comm, streams
from shardwise.core.layout import Layout
from shardwise.core.memory import separate_ledger
from shardwise.core.placements import Placements
from shardwise.core.tensor import ShardedTensor
from shardwise.moe import mixtures_of
from shardwise.optim.gradients import division_of
from shardwise.planning.activations import Follower
from shardwise.planning.compiled import Kept
from shardwise.planning.engine import Engine
from shardwise.planning.figures import Plan
from shardwise.planning.forward import own_forward, sketch, traffic_of
from shardwise.planning.matrices import heaviest, work_of
from shardwise.planning.planned import Mesh, Options, PlannedUnit, Traffic, as_placements
from shardwise.planning.units import modules_to_wrap, spread_over, wrapped_copy
from shardwise.precision import Precision
from shardwise.shard.checks import option_problems
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
    compiled: Mapping[nn.Module, Kept] | None = None,
) -> Plan:
    """Plan one training step of ``model`` on one rank of a mesh.

    Args:
        model: best built under ``torch.device("meta")``. Only names, shapes and dtypes are read,
            and ``model.recomputed`` if it exists: the modules that run under activation
            checkpointing. A model that ``fully_shard`` has wrapped is planned with its units.
            If experts are spread over ranks, the model has one rank's share of the experts
            (``MixtureOfExperts.keep_share``): neighbours on the inner axis hold different shares.
        mesh_shape: data-parallel axes, outer to inner: ``{"dp": 8}``, ``{"dp_outer": 2, "dp": 4}``;
            or sizes alone, for axes with these names: ``(2, 4)``. There is no plan of ``tp``.
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
        compiled: modules of the model that run through ``torch.compile``, and what each keeps
            (``planning.compiled.kept_by``), with a batch.
    """
    mesh, problems = Mesh.of(mesh_shape), option_problems("none", "caching", None, grain)
    if batch is not None:
        if len(batch) != 2 or min(batch) < 1:
            raise ValueError(f"plan: batch={batch}: give (sequences, tokens of each), 1 or more")
        inputs = tuple(torch.zeros(2, *batch, dtype=torch.int64, device="meta"))
        tokens = batch[0] * batch[1] if tokens is None else tokens
    if inputs is not None:
        problems += _forward_problems(model)
    if rank is not None and not 0 <= rank < mesh.num_ranks:
        problems.append(f"rank {rank} of a mesh of {mesh.num_ranks}: choose one of them, from 0 on")
    if any(_is_tile(parameter) for parameter in model.parameters()):
        problems.append("parallelize_module cut its parameters; a plan knows no tp: plan before")
    if bucket_mb is not None and wrap is not None:
        problems.append("bucket_mb wraps the whole model: leave out bucket_mb, or wrap")
    if problems:
        raise ValueError(f"plan: {'; '.join(problems)}")
    options = Options(
        mesh=mesh,
        placements=as_placements(placements),
        precision=precision or Precision(),
        microbatches=microbatches,
        ep=spread_over(model),
        bucket_mb=bucket_mb,
        optimizer=optimizer,
        reshard_after_forward=reshard_after_forward,
        device=device,
        memory=memory,
    )
    modules = modules_to_wrap(model, wrap)
    with _alone(), separate_ledger() as ledger:
        copied = wrapped_copy(
            model, modules, options, rank or 0, [*ignored_params], grain, compiled or {}
        )
        engine = Engine(options, ledger, copied)
        if rank is None and engine.matrix_groups:
            engine.pose_as(heaviest(engine.matrix_groups, mesh.num_ranks))
        forward = sketch(copied)
        if inputs is not None:
            engine.follower = Follower(copied, ledger)
            engine.follower.live += sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor))
            forward = partial(own_forward, copied, inputs)
        matrices = engine.matrix_groups
        return Plan(
            **vars(engine.measure(forward)),
            model=name or type(model).__name__,
            options=options,
            units=_units(engine),
            elements=engine.elements(),
            matrices=work_of(matrices, mesh.num_ranks) if matrices else None,
            divisions={
                routed.name: division
                for routed in engine.routes
                if (division := division_of(routed.parameter)) is not None
            },
            traffic=Traffic() if tokens is None else traffic_of(model, options, tokens),
        )


def _is_tile(parameter: nn.Parameter) -> bool:
    """Whether tensor parallelism cut a parameter."""
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.tile is not None
    return isinstance(parameter, DTensor)


@contextmanager
def _alone() -> Iterator[None]:
    """Without garbage collection, which would take most of the time (all objects of a plan live
    until its end), and unseen by ``sw.debug``, which compares ranks: a plan is of one process."""
    enabled, watching = gc.isenabled(), (comm.observer, streams.announce)
    gc.disable()
    comm.observer = streams.announce = None
    try:
        yield
    finally:
        comm.observer, streams.announce = watching
        if enabled:
            gc.enable()


def _forward_problems(model: nn.Module) -> list[str]:
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
    names: dict[tuple[tuple[int, Layout], ...], list[str]] = {}
    for unit in engine.units:
        groups = ((getattr(g.ranks.others, "size", 1), g.layout) for g in unit.groups)
        names.setdefault(tuple(groups), []).append(unit.name)
    return tuple(
        PlannedUnit(names=tuple(alike), layouts=tuple(one for o, one in found if o == ep), ep=ep)
        for found, alike in names.items()
        for ep in sorted({own for own, _ in found} or {1})
    )
