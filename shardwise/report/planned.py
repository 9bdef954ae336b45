# SPDX-License-Identifier: Apache-2.0
"""What is planned, and what came of it: values, for those who make them and those who show them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from shardwise.comm import Call
from shardwise.placements import SHARD, STRATEGIES, Placements, Turns
from shardwise.precision import Precision
from shardwise.report.exchange import Orthogonalisation
from shardwise.report.footprint import Mesh
from shardwise.report.simulate import Moment
from shardwise.report.traffic import Traffic
from shardwise.report.units import PlannedUnit
from shardwise.shard.checks import bucket_problems

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
    bucket_mb: float | None = None  # of data_parallel; None: units of fully_shard

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
        if self.bucket_mb is not None:
            problems += bucket_problems(self.placements, self.bucket_mb)
            if self.reshard_after_forward is not None:
                problems.append(
                    f"reshard_after_forward={self.reshard_after_forward} with "
                    f"bucket_mb={self.bucket_mb}: data_parallel keeps weights whole; leave it out"
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
class Figures:
    """Bytes per rank and collectives per step.

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
