# SPDX-License-Identifier: Apache-2.0
"""Pieces: the boxes of tensors that a rank holds, which of them it writes, and their host copies.

DCP's own planner gathers every rank's list of boxes on one rank, removes duplicates and scatters
the rest. Here each rank knows from the layout which boxes it holds and which ranks hold the same
ones, so all ranks come to the same division with no message:

    hsdp, 2 x 2 ranks        rank 0   rank 1   rank 2   rank 3
    holds                    A B C    D E F    A B C    D E F      A, D... boxes of tensors
    replicas of its boxes    0, 2     1, 3     0, 2     1, 3
    writes                   A C      D F      B        E          largest first, to who has least
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.layout import Shape
from shardwise.streams import Lanes
from shardwise.tensor import ShardedTensor

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor."""

    key: str
    shape: Shape  # of the whole tensor
    offsets: Shape
    data: Tensor  # a view of the live tensor, or its copy in host memory


def local_pieces(key: str, tensor: Tensor) -> list[Piece]:
    """This rank's boxes of a tensor, as views: a save reads them, a load writes them."""
    shape = tuple(tensor.shape)
    if isinstance(tensor, ShardedTensor):
        views = tensor.cut.views(tensor.to_local().detach())
        return [
            Piece(key, shape, tuple(offsets), view)
            for (offsets, _), view in zip(tensor.cut.boxes, views, strict=True)
        ]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []  # a tensor of other ranks
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        data = tensor.to_local().detach()
        return [Piece(key, shape, tuple(chunk.offsets), data)] if data.numel() else []
    return [Piece(key, shape, (0,) * tensor.dim(), tensor.detach())]


def pieces_to_write(
    tensors: Mapping[str, Tensor],
    rank: int,
    world_size: int,
    *,
    first_only: Collection[str] = (),
    on_every_rank: Collection[str] = (),
) -> list[Piece]:
    """The pieces that this rank writes, largest first; every piece has one writer.

    Args:
        first_only: keys that only rank 0 writes: tensors that may differ between ranks.
        on_every_rank: keys of plain tensors that every rank writes: they are stored under other
            names on other ranks.
    """

    def replicas(key: str, tensor: Tensor) -> tuple[int, ...]:
        if key in first_only:
            return (0,)
        if isinstance(tensor, DTensor):
            return _replicas(tensor)
        return (rank,) if key in on_every_rank else tuple(range(world_size))

    offers = []
    for key, tensor in tensors.items():
        if holders := replicas(key, tensor):
            pieces = local_pieces(key, tensor)
            offers.append((-sum(piece.data.nbytes for piece in pieces), key, holders, pieces))
    written: list[Piece] = []
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # heaps of (bytes, rank)
    # Ranks with the same replicas see the same tensors of the same sizes, and choose alike.
    for negative_size, _, holders, pieces in sorted(offers, key=lambda offer: offer[:2]):
        heap = loads.setdefault(holders, [(0, holder) for holder in holders])
        load, writer = heap[0]
        heapq.heapreplace(heap, (load + 1 - negative_size, writer))  # 1: empty ones count too
        if writer == rank:
            written += pieces
    return written


def _replicas(tensor: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same boxes of a tensor as this one, itself included."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    # Every placement that does not replicate cuts: torch's strided shards are no ``Shard``.
    where = tuple(
        slice(None) if placement.is_replicate() else position
        for position, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return tuple(sorted(torch.atleast_1d(mesh.mesh[where]).flatten().tolist()))


# ------------------------------------------------------------------------------ host memory


class Staging:
    """Host memory from which a background save writes while training changes the tensors.

    device   | weight | exp_avg | ...           one copy each, then training goes on
    host     |weight|exp_avg|..... one block, kept from save to save .....|
                ^ a tensor whose storage is exactly its bytes: torch.save writes whole storages
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)  # as large as the largest save so far

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with their data in host memory. The copies are complete on return."""
        begins, end = [], 0
        for piece in pieces:
            begins.append(end)
            end += -(-piece.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {piece.data.device for piece in pieces if piece.data.device.type == "cuda"}
        if self._block.numel() < end:
            self._block = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._block = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
        staged = []
        for piece, begin in zip(pieces, begins, strict=True):
            host = _own_storage(self._block[begin : begin + piece.data.nbytes], piece.data)
            host.copy_(piece.data, non_blocking=True)
            staged.append(replace(piece, data=host))
        for device in devices:
            Lanes(device).synchronize()
        return staged


def on_host(data: Tensor) -> Tensor:
    """The tensor in host memory with a storage of exactly its bytes, copied only if necessary."""
    data = data.detach().resolve_conj().resolve_neg()
    if data.device.type != "cpu" or not data.is_contiguous():
        return data.to("cpu").contiguous()
    if data.untyped_storage().nbytes() == data.nbytes:
        return data
    return _own_storage(data.reshape(-1).view(torch.uint8), data)


def _own_storage(memory: Tensor, like: Tensor) -> Tensor:
    """Bytes of a larger block as a tensor with a storage of its own, in the same memory."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    # By way of numpy: a view made by torch would share, and save, the whole block's storage.
    return torch.from_numpy(memory.numpy()).view(like.dtype).view(like.shape)
