# SPDX-License-Identifier: Apache-2.0
"""The options of a plan, and the parts of its result: plain values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy

from shardwise.core.comm import Call
from shardwise.core.layout import Layout
from shardwise.core.mesh import DATA_AXES
from shardwise.core.placements import STRATEGIES, Placement, Placements, num_shards, shard_range
from shardwise.optim.functions import ANY as FUNCTIONS
from shardwise.precision import Precision
from shardwise.shard.checks import bucket_problems, forward_problems, mesh_problems
from shardwise.words import bound_problems

OPTIMIZERS = ("adamw", "muon", *FUNCTIONS, "none")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The names and sizes of the data-parallel axes, outer to inner; there are no processes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Mapping[str, int] | Sequence[int]) -> Mesh:
        if isinstance(shape, Sequence) and len(shape) <= len(DATA_AXES):
            shape = dict(zip(DATA_AXES[-len(shape) :], shape, strict=False))
        named = shape if isinstance(shape, Mapping) else {"mesh_shape": shape}
        wrong = [f"{n}={s!r}" for n, s in named.items() if not isinstance(s, int) or s < 1]
        if "tp" in named:
            raise ValueError("a plan knows no tensor parallelism: leave tp out of the mesh")
        if wrong or not isinstance(shape, Mapping) or not shape:
            raise ValueError(
                f"a mesh of {', '.join(wrong) or 'no axes'}: name each axis and give it 1 or more "
                'ranks, outer to inner, as in {"dp_outer": 2, "dp": 4}'
            )
        return cls(names=tuple(shape), sizes=tuple(shape.values()))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def num_shards(self, placements: Sequence[Placement]) -> int:
        return num_shards(placements, self.sizes)

    def without(self, ep: int) -> Mesh:
        """The mesh of the ranks that hold the same experts: one of every ``ep`` neighbours on the
        inner axis. Rank r of this mesh is rank r // ep of the result."""
        return replace(self, sizes=(*self.sizes[:-1], self.sizes[-1] // ep))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        return tuple(map(int, numpy.unravel_index(rank, self.sizes)))

    def shards(self, placements: Sequence[Placement]) -> list[int]:
        """The one shard that each rank holds."""
        count = self.num_shards(placements)
        coordinates = itertools.product(*map(range, self.sizes))
        return [shard_range(placements, self.sizes, at, count)[0] for at in coordinates]

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a plan that can change while the model and its wrapping stay the same."""

    mesh: Mesh
    placements: Placements
    precision: Precision
    optimizer: str
    microbatches: int
    reshard_after_forward: bool | int | None
    device: str
    memory: int | None
    ep: int = 1  # ranks of the inner axis over which experts are spread
    bucket_mb: float | None = None  # of data_parallel; None: units of fully_shard

    def __post_init__(self) -> None:
        problems = mesh_problems(self.mesh.names, self.mesh.sizes, self.placements)
        if self.bucket_mb is not None:
            problems += bucket_problems(self.placements, self.bucket_mb)
            if self.reshard_after_forward is not None:
                problems.append(
                    f"reshard_after_forward={self.reshard_after_forward} with "
                    f"bucket_mb={self.bucket_mb}: data_parallel keeps weights whole; leave it out"
                )
        if self.optimizer not in OPTIMIZERS:
            problems.append(f"optimizer={self.optimizer!r}: choose from {', '.join(OPTIMIZERS)}")
        if self.device not in ("cpu", "cuda"):
            problems.append(f"device={self.device!r}: choose 'cuda' or 'cpu'")
        problems += bound_problems(self, 1, "microbatches", "memory")
        inner, size = self.mesh.names[-1], self.mesh.sizes[-1] // self.ep
        if self.mesh.sizes[-1] % self.ep:
            problems.append(
                f"experts are spread over ep={self.ep}, which does not divide the "
                f"{self.mesh.sizes[-1]} ranks of axis '{inner}': change one of them"
            )
        spread = f" with ep={self.ep}" if self.ep > 1 else ""
        problems += forward_problems(
            self.reshard_after_forward, f"'{inner}'{spread}", size, self.placements
        )
        if problems:
            raise ValueError("plan: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Wrapped modules with equal buffers: the layout of each buffer."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    ep: int = 1  # ranks over which its experts are spread; figures are for one share

    @property
    def name(self) -> str:
        count = len(self.names)
        name = self.names[0] if count == 1 else f"{self.names[0]} and {count - 1} alike"
        return name if self.ep == 1 else f"{name} (one of {self.ep} shares)"

    @property
    def copies(self) -> int:
        """How often its buffers exist in the model, shares of experts included."""
        return len(self.names) * self.ep


@dataclass(frozen=True)
class Traffic:
    """Collectives of routers and of the rows of experts, in one step on one rank."""

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
    wire_bytes: int  # bytes that leave the rank
    received_bytes: int  # bytes that arrive at the rank
    even: bool = False  # whether the bytes assume even routing; the real bytes depend on tokens


def collectives_of(calls: Mapping[Call, int], *, even: bool = False) -> list[Collective]:
    """Calls with their numbers, summed by operation and axis."""
    kinds: dict[tuple[str, str, int], list[tuple[Call, int]]] = {}
    for call, count in calls.items():
        kinds.setdefault((call.axis, call.operation, call.size), []).append((call, count))
    return [
        Collective(
            operation=operation,
            axis=axis,
            size=size,
            count=sum(count for _, count in alike),
            nbytes=sum(call.nbytes * count for call, count in alike),
            wire_bytes=sum(call.wire_bytes * count for call, count in alike),
            received_bytes=sum(call.received_bytes * count for call, count in alike),
            even=even,
        )
        for (axis, operation, size), alike in sorted(kinds.items())
    ]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The bytes that one step of one rank held and sent.

    ``rest``, ``loaded`` and ``peak`` are bytes by the ledger's kinds: between steps, after the last
    backward, and the largest value of each kind within a step. ``peak_total`` is the largest sum of
    all kinds at one moment.
    """

    rest: dict[str, int]
    loaded: dict[str, int]
    peak: dict[str, int]
    peak_total: int
    calls: Counter[Call] = field(repr=False)  # collectives of forward and backward
    exchanged: Counter[Call] = field(repr=False)  # collectives of the matrix optimizer
    optimizer_bytes: int  # its state, which the other figures leave out
    # With a batch: the largest sum of these bytes and of activations at one moment, and the
    # activations in it.
    followed: int | None = None
    activations: int = 0


def as_placements(value: Placements | str) -> Placements:
    """Placements, or the placements of a strategy by its name."""
    if isinstance(value, Placements):
        return value
    if value not in STRATEGIES:
        raise ValueError(f"strategy {value!r} is unknown: choose from {', '.join(STRATEGIES)}")
    return STRATEGIES[value]


def strategy_name(placements: Placements) -> str:
    """The name of a strategy, or its three lists if it has no name."""
    names = [name for name, named in STRATEGIES.items() if named == placements]
    return names[0] if names else str(placements)
