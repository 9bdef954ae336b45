# SPDX-License-Identifier: Apache-2.0
"""Buffer: many parameters in one flat storage, spread over a mesh by placements.

    layout of 3 shards      | wq rows 0-3 | wk 0-1 | wk 2-3 | wv rows 0-3 | wo rows 0-3 |.pad.|
    placements [S], rank 1                         | wk 2-3 | wv rows 0-3 |
    placements [R], any     | wq rows 0-3 | wk rows 0-3     | wv rows 0-3 | wo rows 0-3 |.pad.|

A rank's part is always one contiguous range of the layout, so a gathered buffer *is* the
parameters: no copy out, no reassembly. ``placements.steps`` lists the collectives that lead from
one list of placements to another; a gather runs them here, a reduction in ``shard/gradient.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise import comm
from shardwise import tensor_steps as _hooks  # noqa: F401  (optimizers' steps are seen from now on)
from shardwise.layout import Layout, View
from shardwise.memory import Block, Source
from shardwise.mesh import Ranks
from shardwise.placements import PARTIAL, SHARD, Placement, as_placement, steps
from shardwise.tensor import Cut, ShardedTensor, Version
from shardwise.tile import Tile


class Gathered:
    """Memory of whole weights, and the version of main that they were made from."""

    def __init__(self, memory: Block) -> None:
        self.memory = memory
        self.filled: Any = None  # main.state at that time; None: never filled, or released since

    def acquire(self, source: Source) -> None:
        self.memory.acquire(source)


class Part(Gathered):
    """1/k of the gathered weights, kept after forward. The k ranks of an axis gather the rest again
    for backward."""

    def __init__(self, whole: Gathered, axis: comm.Axis) -> None:
        flat = whole.memory.tensor
        length = flat.numel() // axis.size
        super().__init__(Block(length, flat.dtype, flat.device, "compute", lane="gather"))
        self.whole, self.axis = whole, axis
        self.here = slice(axis.rank * length, (axis.rank + 1) * length)


class Beside:
    """The whole weights of a rank that holds all of main and keeps the weights. An optimizer that
    writes main and these weights in one pass saves the next gather, which would cast main again."""

    def __init__(self, main: Buffer, whole: Buffer, copy: Gathered) -> None:
        # Weakly, because main's version holds this object.
        self._main, self._whole, self._copy = weakref.proxy(main), whole, copy

    def views(self, items: Collection[int]) -> dict[int, Tensor] | None:
        """The whole weight of each of ``items``. None if ``items`` are not all, because only a
        gather would update the rest, or if these weights are older than main already."""
        copy, everything = self._copy, set(range(len(self._whole.layout.items)))
        if not copy.memory.live or copy.filled != self._main.state or set(items) != everything:
            return None
        return dict(enumerate(self._whole.views()))

    def written(self) -> None:
        """The optimizer has written both alike; the step will count one write to main."""
        count, version = self._main.state
        self._copy.filled = (count + 1, version)


class GatherPlan(NamedTuple):
    """The views that one gather reads and writes: one cast, then one collective for each axis."""

    source: Tensor
    place: Tensor | None  # where ``source`` is cast to; None: nothing is cast
    stages: list[tuple[Tensor, Tensor, comm.Axis]]

    @property
    def views(self) -> list[Any]:
        """All tensors that the plan holds (and axes)."""
        return [self.source, self.place, *(part for stage in self.stages for part in stage)]

    def run(self) -> comm.Pending:
        """Issue the gather. Each stage sends what the stage before it received, so all stages but
        the last are waited for."""
        if self.place is not None:
            self.place.copy_(self.source, non_blocking=True)
        pending = comm.Pending()
        for whole, shard, axis in self.stages:
            pending.wait()
            pending = comm.all_gather(whole, shard, axis)
        return pending


class Buffer:
    """Flat storage + layout + placements."""

    def __init__(
        self,
        layout: Layout,
        ranks: Ranks,
        placements: Sequence[Placement],
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        *,
        lane: str = "compute",
        pin: bool = False,
    ) -> None:
        self.layout, self.ranks = layout, ranks
        self.placements = tuple(as_placement(placement) for placement in placements)
        self.first_shard, self.num_shards = ranks.held(self.placements, layout.num_shards)
        numel = self.num_shards * layout.shard_size
        self.block = Block(numel, dtype, device, kind, lane=lane, pin=pin)

    @cached_property
    def version(self) -> Version:
        """Counts the writes through DTensors of this memory. Most buffers never need it."""
        return Version()

    @property
    def flat(self) -> Tensor:
        """This rank's range of the layout, one dimension, padding included."""
        return self.block.tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.block.tensor.dtype

    @property
    def state(self) -> tuple[int, int]:
        """Changes whenever the contents may: by an op on a DTensor of it, or on a plain view."""
        return self.version.count, self.flat._version

    @property
    def pieces(self) -> tuple[View, ...]:
        """The piece of each parameter that lies in ``flat``."""
        return self.layout.pieces(self.first_shard, self.num_shards)

    def view(self, index: int) -> Tensor:
        """This rank's piece of one parameter: whole rows as ``[rows, ...]``, else flat."""
        _, _, offset, shape, strides = self.pieces[index]
        return self.flat.as_strided(shape, strides, offset)

    def views(self) -> list[Tensor]:
        """This rank's piece of each parameter."""
        flat = self.flat
        return [flat.as_strided(shape, strides, at) for _, _, at, shape, strides in self.pieces]

    def cut(self, index: int, tile: Tile | None = None) -> Cut:
        """The :class:`Cut` of one parameter, which its DTensors share."""
        assert PARTIAL not in self.placements, "a partial sum is no value that a DTensor could show"
        sharded = tuple(placement == SHARD for placement in self.placements)
        return Cut(self.layout, index, self.ranks, sharded, tile=tile)

    def dtensor(self, index: int, tile: Tile | None = None) -> ShardedTensor:
        """One parameter as a DTensor over this memory. Writes to it change ``state``."""
        return ShardedTensor(self.view(index), self.cut(index, tile), version=self.version)

    def part_of(self, other: Buffer) -> Tensor:
        """The range of ``other`` that this buffer holds: where a gather puts it."""
        return other.flat[slice(*self._range_of(other, self.placements))]

    # ------------------------------------------------------------------ moving bytes

    def gather_plan(self, out: Buffer) -> GatherPlan:
        """A plan to fill ``out`` (the same placements with fewer Shards), which can run often."""
        gathers = self.gather_steps(out)
        place = self.part_of(out)
        direct = len(gathers) == 1 and self.dtype == out.dtype and self.flat.device == place.device
        stages = [
            (out.flat[slice(*whole)], self.flat if direct else out.flat[slice(*shard)], axis)
            for axis, shard, whole in gathers
        ]
        aliased = place.data_ptr() == self.flat.data_ptr()
        return GatherPlan(self.flat, None if direct or aliased else place, stages)

    def gather_steps(self, out: Buffer) -> list[tuple[comm.Axis, tuple[int, int], tuple[int, int]]]:
        """(axis, the range of ``out`` that a rank sends, the range that it has after), in order."""
        placements, gathers = list(self.placements), []
        shard = self._range_of(out, placements)
        for axis, _, there in steps(self.placements, out.placements):
            placements[axis] = there
            whole = self._range_of(out, placements)
            gathers.append((self.ranks.axes[axis], shard, whole))
            shard = whole
        return gathers

    def gather(self, out: Buffer) -> comm.Pending:
        """Fill ``out``, and cast to its dtype."""
        return self.gather_plan(out).run()

    def _range_of(self, out: Buffer, placements: Sequence[Placement]) -> tuple[int, int]:
        """The elements of ``out`` that this rank holds with these placements."""
        first, count = self.ranks.held(placements, self.layout.num_shards)
        size = self.layout.shard_size
        begin = (first - out.first_shard) * size
        return begin, begin + count * size
