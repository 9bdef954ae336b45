# SPDX-License-Identifier: Apache-2.0
"""Placements say how a buffer is spread over a mesh: values only, no communication.

Every parameter lives in three buffers: the *compute* weight that forward and backward read, the
*grad*, and the *main* weight (the original of all copies), with the optimizer state. A strategy is
three lists of placements, one entry for each data-parallel mesh axis, outer to inner:

    strategy   compute   grad            main
    zero(0)    R         Partial         R         data parallel
    zero(1)    R         Partial         S         distributed optimizer
    zero(2)    R         S               S
    zero(3)    S         S               S         fully sharded
    hsdp()     [R, S]    [Partial, S]    [R, S]
    hfsdp()    [R, S]    [Partial, S]    [S, S]

``grad`` is the placement in which gradients *accumulate* between microbatches. The last microbatch
reduces them to ``main``'s placement: over a Partial axis by a reduce-scatter if main is sharded, by
an all-reduce if main is replicated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same bytes."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds one term of a sum: a gradient before its reduction."""

    def __str__(self) -> str:
        return "Partial"


@dataclass(frozen=True)
class Shard:
    """Every rank of the axis holds one contiguous range of the flat buffer."""

    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim != 0:
            raise ValueError(
                f"Shard({self.dim}): buffers are flat and cut along rows, so only Shard(0) exists"
            )

    def __str__(self) -> str:
        return "S"


Placement: TypeAlias = Replicate | Partial | Shard
REPLICATE, PARTIAL, SHARD = Replicate(), Partial(), Shard()


def as_placement(value: Any) -> Placement:
    """Our placement for one of ours or torch's ``Replicate()``, ``Partial()``, ``Shard(0)``."""
    if isinstance(value, Replicate | Partial | Shard):
        return value
    name = type(value).__name__
    if name == "Shard":
        return Shard(value.dim)
    if name == "Replicate":
        return REPLICATE
    if name == "Partial":
        return PARTIAL
    raise ValueError(f"{value!r} is no placement; use Replicate(), Partial() or Shard()")


@dataclass(frozen=True, kw_only=True)
class Placements:
    """The three placement lists of one strategy, one entry per data-parallel axis."""

    compute: tuple[Placement, ...]
    grad: tuple[Placement, ...]
    main: tuple[Placement, ...]

    def __init__(self, *, compute: Sequence[Any], grad: Sequence[Any], main: Sequence[Any]) -> None:
        for name, values in (("compute", compute), ("grad", grad), ("main", main)):
            object.__setattr__(self, name, tuple(as_placement(value) for value in values))
        problems = self._problems()
        if problems:
            raise ValueError(f"{self} cannot work: " + "; ".join(problems))

    @property
    def num_axes(self) -> int:
        return len(self.main)

    def __str__(self) -> str:
        lists = {"compute": self.compute, "grad": self.grad, "main": self.main}
        words = (f"{name}=[{', '.join(map(str, values))}]" for name, values in lists.items())
        return f"Placements({', '.join(words)})"

    def _problems(self) -> list[str]:
        problems = []
        if not len(self.compute) == len(self.grad) == len(self.main) >= 1:
            problems.append("the three lists need one entry per data-parallel axis, at least one")
        if PARTIAL in self.compute or PARTIAL in self.main:
            problems.append("only a grad can be Partial; weights are Replicate or Shard")
        for name in ("compute", "grad", "main"):
            flags = [value == SHARD for value in getattr(self, name)]
            if flags != sorted(flags):
                problems.append(
                    f"{name} shards an outer axis but not the inner ones: sharded axes must be a "
                    f"suffix, so that a rank's part is one contiguous range"
                )
        for axis, (compute, grad, main) in enumerate(
            zip(self.compute, self.grad, self.main, strict=False)
        ):
            if compute == SHARD and main != SHARD:
                problems.append(f"axis {axis}: compute is sharded, so main must be (use Shard())")
            if grad == SHARD and main != SHARD:
                problems.append(f"axis {axis}: grad is sharded, so main must be (use Partial())")
            if grad == REPLICATE:
                problems.append(f"axis {axis}: a grad accumulates as Partial() or Shard()")
        return problems


def zero(stage: int) -> Placements:
    """ZeRO stage 0 (data parallel), 1 (distributed optimizer), 2, or 3 (fully sharded)."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero({stage!r}): the stages are 0, 1, 2 and 3")
    return Placements(
        compute=[SHARD if stage >= 3 else REPLICATE],
        grad=[SHARD if stage >= 2 else PARTIAL],
        main=[SHARD if stage >= 1 else REPLICATE],
    )


def hsdp() -> Placements:
    """Fully sharded inside, replicated outside: a 2-D mesh, outer to inner."""
    return Placements(compute=[REPLICATE, SHARD], grad=[PARTIAL, SHARD], main=[REPLICATE, SHARD])


def hfsdp() -> Placements:
    """:func:`hsdp` with main weights and optimizer state sharded over the outer axis too."""
    return Placements(compute=[REPLICATE, SHARD], grad=[PARTIAL, SHARD], main=[SHARD, SHARD])


class Step(NamedTuple):
    """One collective over one mesh axis, between two lists of placements."""

    axis: int
    here: Placement
    there: Placement


@cache
def steps(here: tuple[Placement, ...], there: tuple[Placement, ...]) -> tuple[Step, ...]:
    """The collectives that bring a buffer from placements ``here`` to ``there``, in order.

        Shard    to Replicate    all-gather, from the outermost sharded axis inwards
        Partial  to Shard        reduce-scatter, from the innermost axis outwards
        Partial  to Replicate    all-reduce, from the innermost axis outwards

    In this order the Shards stay a suffix of the mesh, so a rank's part is always one range.
    """
    changes = [Step(axis, *pair) for axis, pair in enumerate(zip(here, there, strict=True))]
    gathers = [step for step in changes if (step.here, step.there) == (SHARD, REPLICATE)]
    reductions = [step for step in changes if step.here == PARTIAL != step.there]
    assert len(gathers) + len(reductions) == sum(step.here != step.there for step in changes)
    return (*gathers, *reversed(reductions))


def shard_range(
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    num_shards: int,
) -> tuple[int, int]:
    """(first, count) of the shards that a rank holds, of ``num_shards`` equal shards.

    The inner axis is the major axis, so that a gather over the outer axis joins neighbours:

        mesh (2 outer, 2 inner), [S, S]      rank (outer, inner)  (0,0) (1,0) (0,1) (1,1)
                                             shard                  0     1     2     3
        gathered over the outer axis: [R, S]                      |----0-1----|----2-3----|
    """
    index, parts = 0, 1
    for placement, size, position in zip(
        reversed(placements), reversed(sizes), reversed(coordinate), strict=True
    ):
        if placement == SHARD:
            index, parts = index * size + position, parts * size
    assert num_shards % parts == 0, (num_shards, parts)
    count = num_shards // parts
    return index * count, count


def num_shards(placements: Sequence[Placement], sizes: Sequence[int]) -> int:
    """The number of shards that a buffer is cut into, on a mesh of these sizes."""
    pairs = zip(placements, sizes, strict=True)
    return math.prod(size for placement, size in pairs if placement == SHARD)


def ranks_by(sizes: Sequence[int], flags: Sequence[bool]) -> list[tuple[int, int]]:
    """For each rank of a mesh: (its rank over the axes without a flag, and over the others).

    >>> ranks_by([2, 2], [False, True])
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    pairs = []
    for coordinate in itertools.product(*map(range, sizes)):
        rank = {True: 0, False: 0}
        for size, flag, place in zip(sizes, flags, coordinate, strict=True):
            rank[flag] = rank[flag] * size + place
        pairs.append((rank[False], rank[True]))
    return pairs


def joint_places(sizes: Sequence[int]) -> list[int]:
    """For each rank of several axes joined into one (the inner axis counts fastest): its place in
    the order of :func:`shard_range` (the outer axis counts fastest)."""
    all_sharded, count = [SHARD] * len(sizes), math.prod(sizes)
    coordinates = itertools.product(*map(range, sizes))
    return [shard_range(all_sharded, sizes, coordinate, count)[0] for coordinate in coordinates]


def chunk_range(length: int, sizes: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """The part [begin, end) of a dimension that torch's Shard gives to one coordinate."""
    begin, end = 0, length
    for size, position in zip(sizes, coordinate, strict=True):
        step = -(-(end - begin) // size)
        begin, end = min(begin + position * step, end), min(begin + (position + 1) * step, end)
    return begin, end


# By the names in command lines and files.
STRATEGIES: dict[str, Placements] = {
    **{f"zero{stage}": zero(stage) for stage in range(4)},
    "hsdp": hsdp(),
    "hfsdp": hfsdp(),
}
