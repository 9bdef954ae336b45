# SPDX-License-Identifier: Apache-2.0
"""``plan``: what a model, a mesh and a strategy will take on each rank, to the byte, before a run.

    model on "meta"  -->  units  -->  groups and layouts  -->  one simulated step  -->  Plan
                          wrap_units  the real planner         simulate.py

No process group and no memory. Layers that are alike are laid out once, so 405 billion parameters
over 4096 ranks take as long as 8 billion over 8. The figures are those of ``shardwise.ledger`` and
``comm.record()`` in a real run; activations are the model's own and no part of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardwise.comm import Call
from shardwise.optim.routing import Routed, routes_of
from shardwise.placements import REPLICATE, SHARD, STRATEGIES, Placements, Turns
from shardwise.precision import Precision
from shardwise.report.exchange import (
    Fleet,
    Orthogonalisation,
    fleets_of,
    heaviest,
    orthogonalisation,
)
from shardwise.report.footprint import Mesh
from shardwise.report.shard_map import shard_map
from shardwise.report.simulate import Moment, Step, simulate
from shardwise.report.suggest import suggest
from shardwise.report.table import plan_text
from shardwise.report.traffic import Traffic, traffic_of
from shardwise.report.turns import footprints, state_bytes, turns_of
from shardwise.report.units import (
    Owner,
    PlannedUnit,
    buffers_of,
    folded,
    lay_out,
    owners,
    places,
    simulated,
)
from shardwise.shard.find import GrainChoice

# Tensors of optimizer state per parameter, in main's dtype: (of a matrix, of any other).
OPTIMIZERS = {"adamw": (2, 2), "muon": (1, 2), "none": (0, 0)}
KERNELS_SINCE = 90  # the compute capability that the kernels of Newton-Schulz need


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything of a plan that can be changed while the model stays as it is."""

    mesh: Mesh
    placements: Placements
    precision: Precision
    optimizer: str
    microbatches: int
    reshard_after_forward: bool | int | None
    gather_in_step: bool
    device: str
    memory: int | None
    other_bytes: int
    ep: int = 1  # over how many ranks of the inner axis experts are spread

    def __post_init__(self) -> None:
        problems = []
        axes, entries = len(self.mesh.sizes), self.placements.num_axes
        if axes != entries:
            problems.append(
                f"{self.placements} describes {entries} data-parallel axes, the mesh {self.mesh} "
                f"has {axes}: use zero0 to zero3 on one axis, hsdp or hfsdp on two"
            )
        if self.gather_in_step and SHARD in self.placements.compute:
            problems.append(
                f"gather_in_step=True under {self.placements}: whole weights are not kept between "
                f"steps; leave it out, or use zero1 or zero2"
            )
        if self.optimizer not in OPTIMIZERS:
            problems.append(f"optimizer={self.optimizer!r}: one of {', '.join(OPTIMIZERS)}")
        if re.fullmatch(r"cpu|cuda(:sm_\d+)?", self.device) is None:
            problems.append(f"device={self.device!r}: 'cuda', 'cuda:sm_80' and the like, or 'cpu'")
        if self.microbatches < 1:
            problems.append(f"microbatches={self.microbatches}: 1 or more")
        if self.memory is not None and self.memory < 1:
            problems.append(f"memory={self.memory}: bytes of one rank, 1 or more")
        if self.mesh.sizes[-1] % self.ep:
            problems.append(
                f"experts are spread over ep={self.ep}, which does not divide the "
                f"{self.mesh.sizes[-1]} ranks of axis '{self.mesh.names[-1]}'"
            )
        k, inner = self.reshard_after_forward, self.mesh.sizes[-1] // self.ep
        if k is not None and not isinstance(k, bool) and (k < 1 or inner % k):
            problems.append(
                f"reshard_after_forward={k} must divide the {inner} ranks of axis "
                f"'{self.mesh.names[-1]}'" + (f" with ep={self.ep}" if self.ep > 1 else "")
            )
        if problems:
            raise ValueError("plan: " + "; ".join(problems))

    @property
    def measured(self) -> bool:
        """Whether the kernels serve there, so that matrices weigh what was measured."""
        _, _, capability = self.device.partition(":sm_")
        return self.device != "cpu" and int(capability or KERNELS_SINCE) >= KERNELS_SINCE

    @property
    def after_forward(self) -> tuple[bool | None, int | None]:
        """(whether whole weights are released after forward, over how many ranks kept: all those
        of an axis keep what they have anyway)."""
        k = self.reshard_after_forward
        if k is None or isinstance(k, bool):
            return k, None
        return (False, None) if k == 1 else (True, k)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one operation over one axis in one step, as one rank issues them."""

    operation: str
    axis: str
    size: int
    count: int
    nbytes: int  # whole buffers, as comm.record() counts them
    wire_bytes: int  # what leaves the rank
    even: bool = False  # whether the bytes are those of even routing: tokens will decide


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes per rank and collectives per step. ``str(plan)`` is for people, ``as_dict`` for JSON.

    ``rest``, ``loaded`` and ``peak`` have the ledger's kinds: between steps, after the last
    backward, and the highest of each kind within a step. ``peak_total`` is the highest sum of them
    at one moment. ``optimizer_bytes`` come on top: the state on the rank that holds most.
    """

    model: str
    num_parameters: int
    options: Options
    source: str  # "plan", or "dry run"
    units: tuple[PlannedUnit, ...]
    rest: dict[str, int]
    loaded: dict[str, int]
    peak: dict[str, int]
    peak_total: int
    optimizer_bytes: int
    calls: Counter[Call] = field(repr=False)
    phases: dict[Moment, Counter[Call]] = field(repr=False)  # the same, by who issues it
    timeline: tuple[tuple[str, str, int], ...] = field(repr=False, default=())
    matrices: Orthogonalisation | None = None
    traffic: Traffic = field(repr=False, default_factory=Traffic)
    # By name: the elements of a matrix that each replica works on, where replicas take turns.
    turns: dict[str, Turns] = field(repr=False, default_factory=dict)
    suggestions: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.options.mesh

    @property
    def strategy(self) -> str:
        return strategy_name(self.options.placements)

    @property
    def total(self) -> int:
        """What a rank needs at the worst moment."""
        return self.peak_total + self.optimizer_bytes + self.options.other_bytes

    @property
    def fits(self) -> bool | None:
        """Whether a rank has that much; None where nobody said how much it has."""
        memory = self.options.memory
        return None if memory is None else self.total <= memory

    @property
    def padding(self) -> int:
        """Elements of all buffers that hold nothing, over all shards."""
        return sum(len(u.names) * u.ep * g.layout.padding for u in self.units for g in u.groups)

    @property
    def num_elements(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(len(u.names) * u.ep * g.layout.numel for u in self.units for g in u.groups)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Of forward and backward, of the matrix optimizer (of the rank that sends most), and of
        routing."""
        known = self.calls + self.traffic.known
        known += self.matrices.calls if self.matrices else Counter()
        kinds: dict[tuple[str, str, int, bool], list[tuple[Call, int]]] = {}
        for calls, even in ((known, False), (self.traffic.even, True)):
            for call, count in calls.items():
                key = (call.axis, call.operation, call.size, even)
                kinds.setdefault(key, []).append((call, count))
        return tuple(
            Collective(
                operation=operation,
                axis=axis,
                size=size,
                count=sum(count for _, count in found),
                nbytes=sum(call.nbytes * count for call, count in found),
                wire_bytes=sum(call.wire_bytes * count for call, count in found),
                even=even,
            )
            for (axis, operation, size, even), found in sorted(kinds.items())
        )

    @property
    def gathered(self) -> dict[str, tuple[int, int, int]]:
        """Compute weights on the wire, by phase: (gathers, bytes of them whole, bytes sent)."""
        found = {}
        for phase, calls in self.phases.items():
            weights = [(c, count) for c, count in calls.items() if c.operation == "all_gather"]
            found[str(phase)] = (
                sum(count for _, count in weights),
                sum(call.nbytes * count for call, count in weights),
                sum(call.wire_bytes * count for call, count in weights),
            )
        return found

    @property
    def formats(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """How compute weights are stored: (parameters, elements, bytes of each plane, whole)."""
        found: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        for unit in self.units:
            for group in unit.groups:
                name, times = group.stored, len(unit.names)
                planes = tuple(times * nbytes for nbytes in group.footprint.planes)
                parameters, elements, held = found.get(name, (0, 0, (0,) * len(planes)))
                found[name] = (
                    parameters + times * len(group.layout.items),
                    elements + times * group.layout.payload,
                    tuple(a + b for a, b in zip(held, planes, strict=True)),
                )
        return found

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
    mesh_shape: Mapping[str, int],
    placements: Placements | str = "zero3",
    *,
    precision: Precision | None = None,
    optimizer: str = "adamw",
    microbatches: int = 1,
    wrap: Sequence[nn.Module] | None = None,
    reshard_after_forward: bool | int | None = None,
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
        model: best built under ``torch.device("meta")``; only names, shapes and dtypes are read.
            Where experts are spread over ranks, one rank's share of them
            (``MixtureOfExperts.keep_share``): every so many neighbours of the inner axis hold
            different ones.
        mesh_shape: data-parallel axes, outer to inner: ``{"dp": 8}``, ``{"dp_outer": 2, "dp": 4}``.
        placements: :class:`Placements`, or a name: zero0, zero1, zero2, zero3, hsdp, hfsdp.
        optimizer: "adamw", "muon" (matrices; AdamW for the rest) or "none".
        microbatches: backward passes per optimizer step.
        wrap: the modules given to ``fully_shard``, default: those of :func:`wrap_units`.
        gather_in_step: as given to ``fully_shard``, with ``sw.optimizer``: matrices are exchanged
            in waves, and weights are gathered by the step that updates them, not by a forward.
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
    root = owners(model, wrap, set(ignored_params))
    options = Options(
        mesh=Mesh.of(mesh_shape),
        placements=as_placements(placements),
        precision=precision or Precision(),
        optimizer=optimizer,
        microbatches=microbatches,
        reshard_after_forward=reshard_after_forward,
        gather_in_step=gather_in_step,
        device=device,
        memory=memory,
        other_bytes=other_bytes,
        ep=max(owner.ep for owner in root.tree()),
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
        changed = replace(options, gather_in_step=gather_in_step and kept, **changes)
        return _plan(root, routes, changed, grain, label, rank, with_exchange=False)

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
    result = simulate(simulated(root, sizes, step, release), options.microbatches)
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


def as_placements(value: Placements | str) -> Placements:
    """A strategy by its name, as flags spell it."""
    if isinstance(value, Placements):
        return value
    if value not in STRATEGIES:
        raise ValueError(f"strategy {value!r} is unknown: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[value]


def strategy_name(placements: Placements) -> str:
    """The name of a strategy, or its three lists where nobody has named it."""
    names = [name for name, known in STRATEGIES.items() if known == placements]
    return names[0] if names else str(placements)
