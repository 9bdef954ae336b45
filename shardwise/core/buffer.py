# SPDX-License-Identifier: Apache-2.0
"""Buffer: many parameters in one flat storage, spread over a mesh by placements.

    layout of 3 shards      | wq rows 0-3 | wk 0-1 | wk 2-3 | wv rows 0-3 | wo rows 0-3 |.pad.|
    placements [S], rank 1                         | wk 2-3 | wv rows 0-3 |
    placements [R], any     | wq rows 0-3 | wk rows 0-3     | wv rows 0-3 | wo rows 0-3 |.pad.|

A rank's part is always one contiguous range of the layout, so a gathered buffer *is* the
parameters: no copy out, no reassembly. ``placements.steps`` lists the collectives that lead from
one list of placements to another; ``shard/group.py`` gathers with them, ``shard/gradient.py``
reduces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.core.layout import Layout, View
from shardwise.core.memory import Block
from shardwise.core.mesh import Ranks
from shardwise.core.placements import PARTIAL, SHARD, Placement, as_placement
from shardwise.core.tensor import Backing, Cut, ShardedTensor
from shardwise.core.tile import Tile


class Buffer(Backing):
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
        pin: bool = False,
    ) -> None:
        super().__init__()
        self.layout, self.ranks = layout, ranks
        self.placements = tuple(as_placement(placement) for placement in placements)
        self.first_shard, self.num_shards = ranks.held(self.placements, layout.num_shards)
        numel = self.num_shards * layout.shard_size
        self.block = Block(numel, dtype, device, kind, pin=pin)

    @property
    def flat(self) -> Tensor:
        """This rank's range of the layout, one dimension, padding included."""
        return self.block.tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.block.tensor.dtype

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
        """One parameter as a DTensor over this memory."""
        return ShardedTensor(self.view(index), self.cut(index, tile), buffer=self)
