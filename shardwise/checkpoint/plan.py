# SPDX-License-Identifier: Apache-2.0
"""Who writes what: a DCP planner that computes instead of asking.

DCP's own planner gathers every rank's list of boxes on one rank, removes what several offer, and
scatters the rest. Here a rank knows from the layout which boxes it holds and who else holds the
same ones, so all come to the same division with no message:

    hsdp, 2 x 2 ranks        rank 0   rank 1   rank 2   rank 3
    holds                    A B C    D E F    A B C    D E F      A, D... boxes of tensors
    replicas of its boxes    0, 2     1, 3     0, 2     1, 3
    writes                   A C      D F      B        E          largest first, to who has less
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from shardwise.layout import Shape
from shardwise.tensor import ShardedTensor


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor that this rank writes."""

    key: str
    shape: Shape  # of the whole tensor
    offsets: Shape
    data: Tensor  # a view of the live tensor, or its copy in host memory


class LayoutPlanner(SavePlanner):
    """A ``SavePlanner`` whose local plans need no global step.

    ``single`` names tensors that only rank 0 writes: those that may differ between ranks.
    ``own`` names plain tensors that every rank writes: they stand for other things on others.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        single: frozenset[str] = frozenset(),
        own: frozenset[str] = frozenset(),
    ) -> None:
        self._rank, self._everybody, self._single = rank, tuple(range(world_size)), single
        self._own = own
        self._tensors: dict[str, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._tensors = state_dict

    def pieces(self) -> list[Piece]:
        """What this rank writes, by size: the same division on every rank that shares any."""
        offers: list[tuple[int, str, tuple[int, ...], list[Piece]]] = []
        for key, tensor in self._tensors.items():
            replicas = self._replicas(key, tensor)
            if replicas:
                boxes = _pieces(key, tensor)
                nbytes = sum(piece.data.nbytes for piece in boxes)
                offers.append((nbytes, key, replicas, boxes))
        written: list[Piece] = []
        load: dict[tuple[int, ...], dict[int, int]] = {}
        # Ranks with the same replicas see the same tensors of the same sizes, and choose alike.
        for nbytes, _, replicas, boxes in sorted(offers, key=lambda o: (-o[0], o[1])):
            by_rank = load.setdefault(replicas, dict.fromkeys(replicas, 0))
            writer = min(by_rank, key=lambda rank: (by_rank[rank], rank))
            by_rank[writer] += nbytes + 1  # so that empty ones are shared out too
            if writer == self._rank:
                written += boxes
        return written

    def _replicas(self, key: str, tensor: Tensor) -> tuple[int, ...]:
        """The ranks that hold the same boxes of a tensor as this one, itself included."""
        if key in self._single:
            return self._everybody[:1]
        if not isinstance(tensor, DTensor):
            return (self._rank,) if key in self._own else self._everybody
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return ()  # a tensor of other ranks
        # Whatever does not replicate cuts: torch's strided shards are not called shards.
        sharded = [not placement.is_replicate() for placement in tensor.placements]
        where = tuple(
            position if cut else slice(None)
            for position, cut in zip(coordinate, sharded, strict=True)
        )
        return tuple(sorted(torch.atleast_1d(mesh.mesh[where]).flatten().tolist()))

    # ------------------------------------------------------------------ DCP's protocol

    def create_local_plan(self) -> SavePlan:
        pieces = self.pieces()
        self._boxes = {(piece.key, piece.offsets): piece.data for piece in pieces}
        items = []
        for piece in pieces:
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.data.shape)
            properties = TensorProperties(dtype=piece.data.dtype)
            data = TensorWriteData(chunk, properties, torch.Size(piece.shape))
            index = MetadataIndex(piece.key, piece.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Nothing to decide: the boxes of all ranks side by side are the metadata."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        return self._boxes[index.fqn, tuple(index.offset or ())]


def _pieces(key: str, tensor: Tensor) -> list[Piece]:
    """This rank's boxes of a tensor, as views."""
    shape = tuple(tensor.shape)
    if isinstance(tensor, ShardedTensor):
        flat, first = tensor.to_local().detach().view(-1), tensor.cut.piece[0]
        found = []
        for offsets, sizes in tensor.cut.boxes:
            begin = sum(o * s for o, s in zip(offsets, tensor.cut.stride, strict=True)) - first
            data = flat.narrow(0, begin, sizes.numel()).view(sizes)
            found.append(Piece(key, shape, tuple(offsets), data))
        return found
    if isinstance(tensor, DTensor):
        [chunk] = tensor.__create_chunk_list__()
        data = tensor.to_local().detach()
        return [Piece(key, shape, tuple(chunk.offsets), data)] if math.prod(data.shape) else []
    return [Piece(key, shape, (0,) * tensor.dim(), tensor.detach())]
