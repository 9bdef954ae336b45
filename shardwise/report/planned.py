# SPDX-License-Identifier: Apache-2.0
"""Options and results of a plan: values, for those who make them and those who show them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy
import torch

from shardwise.comm import Call
from shardwise.division import Division
from shardwise.layout import Layout
from shardwise.mesh import DATA_AXES
from shardwise.optim.functions import ANY as FUNCTIONS
from shardwise.placements import (
    STRATEGIES,
    Placement,
    Placements,
    num_shards,
    shard_range,
)
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Reads
from shardwise.report.activations import WORKSPACE
from shardwise.report.orthogonalisation import Orthogonalisation
from shardwise.shard.checks import (
    bucket_problems,
    forward_problems,
    mesh_problems,
    step_problems,
)
from shardwise.words import bound_problems

Moment = Reads | Literal["step"]

# Tensors of optimizer state per parameter, in main's dtype: (of a matrix, of any other). Those of
# functions have shapes of their own, and lie on the owners.
OPTIMIZERS = dict.fromkeys(FUNCTIONS, (0, 2)) | {"adamw": (2, 2), "muon": (1, 2), "none": (0, 0)}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The data-parallel axes, outer to inner: names and sizes, and nobody behind them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Mapping[str, int] | Sequence[int]) -> Mesh:
        if isinstance(shape, Sequence) and len(shape) <= len(DATA_AXES):
            shape = dict(zip(DATA_AXES[-len(shape) :], shape, strict=False))
        named = shape if isinstance(shape, Mapping) else {"mesh_shape": shape}
        wrong = [f"{n}={s!r}" for n, s in named.items() if not isinstance(s, int) or s < 1]
        if wrong or not isinstance(shape, Mapping) or not shape:
            raise ValueError(
                f"a mesh of {', '.join(wrong) or 'no axes'}: name each axis with 1 or more ranks, "
                'outer to inner, as in {"dp_outer": 2, "dp": 4}'
            )
        return cls(names=tuple(shape), sizes=tuple(shape.values()))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def num_shards(self, placements: Sequence[Placement]) -> int:
        return num_shards(placements, self.sizes)

    def without(self, ep: int) -> Mesh:
        """The mesh of the ranks that hold the same experts: one of every ``ep`` neighbours on the
        inner axis. Rank r of this mesh is rank r // ep of that."""
        return replace(self, sizes=(*self.sizes[:-1], self.sizes[-1] // ep))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        return tuple(map(int, numpy.unravel_index(rank, self.sizes)))

    def shard(self, placements: Sequence[Placement], rank: int) -> int:
        """The one shard that a rank holds."""
        shards = self.num_shards(placements)
        return shard_range(placements, self.sizes, self.coordinate(rank), shards)[0]

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


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
    ep: int = 1  # over how many ranks of the inner axis experts are spread
    tp: int = 1  # ranks of tensor parallelism, inside the mesh: each has its tile of the model
    bucket_mb: float | None = None  # of data_parallel; None: units of fully_shard
    batch: tuple[int, int] | None = None  # [sequences, tokens] of a microbatch; None: not followed

    def __post_init__(self) -> None:
        problems = mesh_problems(self.mesh.names, self.mesh.sizes, self.placements)
        problems += step_problems(self.gather_in_step, self.placements)
        if self.bucket_mb is not None:
            problems += bucket_problems(self.placements, self.bucket_mb)
            if self.reshard_after_forward is not None:
                problems.append(
                    f"reshard_after_forward={self.reshard_after_forward} with "
                    f"bucket_mb={self.bucket_mb}: data_parallel keeps weights whole; leave it out"
                )
        if self.optimizer not in OPTIMIZERS:
            problems.append(f"optimizer={self.optimizer!r}: one of {', '.join(OPTIMIZERS)}")
        if self.device not in ("cpu", "cuda"):
            problems.append(f"device={self.device!r}: 'cuda' or 'cpu'")
        problems += bound_problems(self, 1, "tp", "microbatches", "memory")
        if self.batch is not None and (len(self.batch) != 2 or min(self.batch) < 1):
            problems.append(f"batch={self.batch}: (sequences, tokens of each), 1 or more")
        if self.mesh.sizes[-1] % self.ep:
            problems.append(
                f"experts are spread over ep={self.ep}, which does not divide the "
                f"{self.mesh.sizes[-1]} ranks of axis '{self.mesh.names[-1]}'"
            )
        inner, spread = self.mesh.names[-1], f" with ep={self.ep}" if self.ep > 1 else ""
        size = self.mesh.sizes[-1] // self.ep
        problems += forward_problems(
            self.reshard_after_forward, f"'{inner}'{spread}", size, self.placements
        )
        if problems:
            raise ValueError("plan: " + "; ".join(problems))

    @property
    def measured(self) -> bool:
        """Whether the kernels serve there, so that matrices weigh what was measured."""
        return self.device == "cuda"

    @property
    def workspace(self) -> int:
        """The bytes that cuBLAS keeps for itself in torch's memory."""
        return 0 if self.batch is None or self.device == "cpu" else WORKSPACE


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """Parameters that share a buffer: where each lies, and what the buffer costs."""

    layout: Layout
    dtype: torch.dtype  # of the main weight
    stored: str  # the format or the dtype of the compute weight; "main" where that is read itself
    planes: tuple[int, ...]  # bytes of the gathered compute weights
    matrices: tuple[bool, ...]  # per item: does a matrix optimizer take it?
    trainable: bool

    def state_bytes(self, states: tuple[int, int]) -> list[int]:
        """Bytes of optimizer state beside each shard; padding has none.

        ``states``: tensors per matrix, and per any other parameter, in main's dtype.
        """
        per_shard = [0] * self.layout.num_shards
        for index, matrix in enumerate(self.matrices if self.trainable else ()):
            width = states[0 if matrix else 1] * self.dtype.itemsize
            for shard in self.layout.holders(index):
                low, high = self.layout.piece(index, shard)
                per_shard[shard] += (high - low) * width
        return per_shard


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Wrapped modules that are all alike."""

    names: tuple[str, ...]
    groups: tuple[PlannedGroup, ...]
    ep: int = 1  # over how many ranks its experts are spread; figures are of one share

    @property
    def name(self) -> str:
        count = len(self.names)
        name = self.names[0] if count == 1 else f"{self.names[0]} and {count - 1} alike"
        return name if self.ep == 1 else f"{name} (one of {self.ep} shares)"


@dataclass(frozen=True)
class Traffic:
    """Collectives of routers and of rows on their way to experts, in one step on one rank."""

    known: Counter[Call] = field(default_factory=Counter)
    even: Counter[Call] = field(default_factory=Counter)  # with these bytes if routing is even


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one operation over one axis in one step, as one rank issues them."""

    operation: str
    axis: str
    size: int
    count: int
    nbytes: int  # whole buffers, as comm.record() counts them
    wire_bytes: int  # what leaves the rank
    received_bytes: int  # what reaches it
    even: bool = False  # whether the bytes are those of even routing: tokens will decide


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The bytes that one step held and sent.

    ``rest``, ``loaded`` and ``peak`` have the ledger's kinds: between steps, after the last
    backward, and the highest of each kind within a step. ``peak_total`` is the highest sum of them
    at one moment.
    """

    rest: dict[str, int]
    loaded: dict[str, int]
    peak: dict[str, int]
    peak_total: int
    phases: dict[Moment, Counter[Call]] = field(repr=False)  # collectives, by who issues them
    exchanged: Counter[Call] = field(repr=False)  # those of the matrix optimizer
    timeline: tuple[tuple[str, int], ...] = field(repr=False, default=())  # (kind, bytes more)
    # With a batch: the highest sum of these bytes and of activations at one moment; of it, the
    # latter.
    followed: int | None = None
    activations: int = 0

    @property
    def calls(self) -> Counter[Call]:
        """The collectives of forward, backward and, where it gathers, of the step."""
        return sum(self.phases.values(), Counter())


@dataclass(frozen=True, kw_only=True)
class Plan(Measured):
    """Bytes per rank and collectives per step. ``optimizer_bytes`` come on top of what was
    measured: the state on the rank that holds most."""

    model: str
    num_parameters: int
    options: Options
    source: str  # "plan", or "dry run"
    units: tuple[PlannedUnit, ...]
    optimizer_bytes: int
    matrices: Orthogonalisation | None = None
    traffic: Traffic = field(repr=False, default_factory=Traffic)
    # By name: the elements of a matrix that each replica works on, where replicas divide it.
    divisions: dict[str, Division] = field(repr=False, default_factory=dict)
    largest: int | None = None  # with a batch: sequences that a microbatch can have in ``memory``
    suggestions: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.options.mesh

    @property
    def strategy(self) -> str:
        return strategy_name(self.options.placements)

    @property
    def total(self) -> int:
        """The bytes that a rank needs at the worst moment."""
        peak = self.peak_total if self.followed is None else self.followed
        return peak + self.optimizer_bytes + self.options.workspace

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
        """All collectives of a step: of forward and backward, of the matrix optimizer (on the rank
        that sends most), and of routing."""
        known = self.calls + self.traffic.known
        known += self.exchanged if self.matrices else Counter()
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
                received_bytes=sum(call.received_bytes * count for call, count in found),
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
                planes = tuple(times * nbytes for nbytes in group.planes)
                parameters, elements, held = found.get(name, (0, 0, (0,) * len(planes)))
                found[name] = (
                    parameters + times * len(group.layout.items),
                    elements + times * group.layout.payload,
                    tuple(a + b for a, b in zip(held, planes, strict=True)),
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        """The figures that the page of a run shows, as JSON can hold them."""
        from shardwise.report.shard_map import shard_map

        return {
            "num_parameters": self.num_parameters,
            "activations": None if self.followed is None else self.activations,
            "rest": self.rest,
            "loaded": self.loaded,
            "optimizer_bytes": self.optimizer_bytes,
            "total": self.total,
            "shard_map": shard_map(self),
            "text": str(self),
        }

    def __str__(self) -> str:
        from shardwise.report.table import plan_text

        return plan_text(self)


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
