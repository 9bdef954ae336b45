# SPDX-License-Identifier: Apache-2.0
"""``plan``: what a model, a mesh and a strategy will take on each rank, to the byte, before a run.

    model on "meta"  -->  units  -->  groups and layouts  -->  one simulated step  -->  Plan
                          wrap_units  the real planner         simulate.py

No process group and no memory. Layers that are alike are laid out once, so 405 billion parameters
over 4096 ranks take as long as 8 billion over 8. The figures are those of ``shardwise.ledger`` and
``comm.record()`` in a real run; activations are the model's own and no part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.optim.routing import Routed, routes_of
from shardwise.placements import REPLICATE, SHARD, Placements
from shardwise.precision import Precision
from shardwise.report.buckets import Arrival, SimulatedBuckets, lay_out_buckets, whole_model
from shardwise.report.exchange import (
    Fleet,
    fleets_of,
    heaviest,
    orthogonalisation,
)
from shardwise.report.footprint import Mesh
from shardwise.report.planned import OPTIMIZERS, Figures, Options, as_placements
from shardwise.report.shard_map import shard_map
from shardwise.report.simulate import SimulatedUnit, Step, simulate
from shardwise.report.suggest import suggest
from shardwise.report.table import plan_text
from shardwise.report.traffic import traffic_of
from shardwise.report.turns import footprints, state_bytes, turns_of
from shardwise.report.units import (
    Owner,
    buffers_of,
    folded,
    lay_out,
    owners,
    places,
    simulated,
)
from shardwise.shard.wrapping import GrainChoice


@dataclass(frozen=True, kw_only=True)
class Plan(Figures):
    """``str(plan)`` is for people, ``as_dict`` for JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON and for the page."""
        options, matrices = self.options, self.matrices
        precision = vars(options.precision).items()
        return {
            "model": self.model,
            "num_parameters": self.num_parameters,
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            "ep": options.ep,
            "strategy": self.strategy,
            "placements": str(options.placements),
            "precision": {name: str(value).removeprefix("torch.") for name, value in precision},
            "optimizer": options.optimizer,
            "microbatches": options.microbatches,
            "device": options.device,
            "source": self.source,
            "rest": self.rest,
            "loaded": self.loaded,
            "peak": self.peak,
            "peak_total": self.peak_total,
            "optimizer_bytes": self.optimizer_bytes,
            "other_bytes": options.other_bytes,
            "total": self.total,
            "padding": {"elements": self.padding, "of": self.num_elements},
            "weights": {
                name: {"parameters": parameters, "elements": elements, "plane_bytes": list(planes)}
                for name, (parameters, elements, planes) in self.formats.items()
            },
            "gathered": {
                phase: {"count": count, "nbytes": nbytes, "wire_bytes": sent}
                for phase, (count, nbytes, sent) in self.gathered.items()
            },
            "collectives": [vars(collective) for collective in self.collectives],
            "newton_schulz": None if matrices is None else matrices.as_dict(),
            "memory": options.memory,
            "fits": self.fits,
            "suggestions": list(self.suggestions),
            "shard_map": shard_map(self),
        }

    def __str__(self) -> str:
        return plan_text(self)


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
    other_bytes: int = 0,
    name: str | None = None,
    rank: int | None = None,
    tokens: int | None = None,
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
            or sizes alone, for axes of these names: ``(2, 4)``.
        placements: :class:`Placements`, or a name: zero0, zero1, zero2, zero3, hsdp, hfsdp.
        optimizer: "adamw", "muon" (matrices; AdamW for the rest) or "none".
        microbatches: backward passes per optimizer step.
        wrap: the modules given to ``fully_shard``, default: those of :func:`wrap_units`.
        bucket_mb: as given to ``data_parallel``: plan that instead, the whole model in buckets.
        gather_in_step: as given to ``fully_shard`` (``overlap_gather="step"`` of the other), with
            ``sw.optimizer``: matrices are exchanged in waves, and weights are gathered by the step
            that updates them, not by a forward.
        device: "cuda" (a GPU that the kernels serve), another one by its compute capability
            ("cuda:sm_80"), or "cpu". Matrices are weighed as there: by what was measured, or by
            operations. A reduction is issued whole on a GPU, piece by piece on a CPU, which moves
            the peak of gradients that accumulate over an outer axis.
        memory: bytes of a rank. What does not fit gets suggestions, each of them planned.
        other_bytes: what comes on top of the library's own bytes: activations, workspaces.
        rank: whose collectives, where a matrix optimizer gives ranks different work; default: the
            one that sends most between shards.
        tokens: of one microbatch on one rank, to plan what routers and rows send as well: rows as
            if every expert got as many, since only tokens will tell.
    """
    ignored = set(ignored_params)
    if bucket_mb is None:
        root = owners(model, wrap, ignored)
    elif wrap is None and grain is None:
        root = whole_model(model, ignored)
    else:
        raise ValueError(
            "plan: wrap and grain are fully_shard's, and bucket_mb is data_parallel's, which takes "
            "the whole model and keeps matrices whole: give one or the other"
        )
    precision = precision or Precision()
    problems = precision.unmatched([one.name for owner in root.tree() for one in owner.found])
    if problems:
        raise ValueError(f"plan: {'; '.join(problems)}, by their names in the modules of wrap")
    options = Options(
        mesh=Mesh.of(mesh_shape),
        placements=as_placements(placements),
        precision=precision,
        optimizer=optimizer,
        microbatches=microbatches,
        reshard_after_forward=reshard_after_forward,
        gather_in_step=gather_in_step,
        device=device,
        memory=memory,
        other_bytes=other_bytes,
        ep=max(owner.ep for owner in root.tree()),
        bucket_mb=bucket_mb,
    )
    routes = routes_of(model)
    label = name or type(model).__name__
    made = _plan(root, routes, options, grain, label, rank)
    if tokens is not None:
        traffic = traffic_of(model, options.mesh, options.precision, tokens, microbatches)
        made = replace(made, traffic=traffic)
    if made.fits is not False:
        return made

    def again(**changes: Any) -> Plan:
        kept = SHARD not in changes.get("placements", options.placements).compute
        buckets = bucket_mb if kept else None
        changed = replace(
            options, gather_in_step=gather_in_step and kept, bucket_mb=buckets, **changes
        )
        base = root if buckets == bucket_mb else owners(model, None, ignored)
        return _plan(base, routes, changed, grain, label, rank, with_exchange=False)

    return replace(made, suggestions=tuple(suggest(options, again)))


def _plan(
    root: Owner,
    routes: Sequence[Routed],
    options: Options,
    grain: GrainChoice | None,
    label: str,
    rank: int | None = None,
    *,
    with_exchange: bool = True,
) -> Plan:
    mesh, placements = options.mesh, options.placements
    release, kept = options.after_forward
    arrivals: list[Arrival] = []
    if options.bucket_mb is not None:
        groups, arrivals = lay_out_buckets(root, routes, options)
    else:
        groups = lay_out(
            root,
            mesh,
            placements,
            options.precision,
            grain=grain,
            kept_ranks=kept,
            matrices={id(one.parameter) for one in routes if one.route.kind == "matrix"},
        )
    where = places(root, groups)
    states = OPTIMIZERS[options.optimizer]
    units = folded(root, groups)
    fleets: list[Fleet] = []
    if options.optimizer == "muon" and (with_exchange or REPLICATE in placements.main):
        ep_of = {id(found.parameter): owner.ep for owner in root.tree() for found in owner.found}
        fleets = fleets_of(
            routes,
            where,
            ep_of,
            mesh,
            placements.main,
            measured=options.measured,
            buffers=buffers_of(root, where) if options.gather_in_step else None,
        )
    at = (heaviest(fleets) if fleets else 0) if rank is None else rank
    turns = turns_of(fleets)
    sizes = footprints(root, groups, where, turns, mesh, placements, at)
    step = Step(asynchronous=options.device != "cpu", gathers=options.gather_in_step)
    if options.bucket_mb is not None:
        unit: SimulatedUnit = SimulatedBuckets(root.name, step, sizes, arrivals)
    else:
        unit = simulated(root, sizes, step, release)
    result = simulate(unit, options.microbatches)
    turned = [fleet for fleet in fleets if fleet.plan.num_replicas > 1]
    held = state_bytes(units, states, mesh, placements, turned, where)
    return Plan(
        model=label,
        num_parameters=sum(f.parameter.numel() * o.ep for o in root.tree() for f in o.found),
        options=options,
        source="plan",
        units=units,
        rest=result.rest,
        loaded=result.loaded,
        peak=result.peak,
        peak_total=result.peak_total,
        optimizer_bytes=max(held, default=0),
        calls=result.calls,
        phases=result.phases,
        timeline=result.timeline,
        matrices=orthogonalisation(fleets, at) if fleets and with_exchange else None,
        turns={one.name: turns[id(one.parameter)] for one in routes if id(one.parameter) in turns},
    )
