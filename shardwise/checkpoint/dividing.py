# SPDX-License-Identifier: Apache-2.0
"""Which rank writes which piece, and host copies of what this rank writes.

The layout says which ranks hold the same piece, so all ranks choose the same writer, without a
message, and one rank describes where all elements of a tile are:

    hsdp, 2 x 2 ranks        rank 0   rank 1   rank 2   rank 3
    holds                    A' B'    A" B"    A' B'    A" B"     ' and ": the halves of A and B
    writes                   A'       A"       B'       B"        the largest tensor first, to the
                                                                  replicas with the fewest bytes
    describes                A, B
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.pieces import Entry, Key, Run, Tile, piece_name, runs_of
from shardwise.checkpoint.state import Held, State
from shardwise.core.cut import Cut
from shardwise.core.streams import Lanes
from shardwise.core.tensor import ShardedTensor

_ALIGNMENT = 64


@dataclass
class Division:
    """What this rank writes, and the tiles that it describes."""

    written: dict[str, Tensor] = field(default_factory=dict)  # by name in the file
    described: dict[Key, Entry] = field(default_factory=dict)


def divide(state: State, rank: int, world_size: int) -> Division:
    """Divide the tensors among the ranks. Every piece has one writer."""
    replicas = _Replicas(rank, world_size)
    division = Division()
    # Ranks with the same replicas have the same tensors of the same sizes: all choose the same.
    for held in sorted(state.held, key=lambda held: (-_nbytes(held.tensor), held.key)):
        if (columns := replicas.of(held, held.key in state.buffers)) is not None:
            _add(division, held, columns, rank)
    return division


class _Columns:
    """The ranks that hold a tensor: a list of the holders of its pieces for each replica."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = [tuple(column) for column in ranks.T.tolist()]
        self._loads = numpy.zeros(ranks.shape, numpy.int64)  # elements that each rank writes

    def choose(self, runs: tuple[Run, ...]) -> tuple[int, ...]:
        """The replica that writes these pieces: the one whose holders write least so far."""
        column = 0
        if len(self.ranks) > 1 and runs:
            holders = [slice(run.holder, run.holder + run.number) for run in runs]
            column = int(sum(self._loads[some].sum(0) for some in holders).argmin())
            for some, run in zip(holders, runs, strict=True):
                self._loads[some, column] += run.length
        return self.ranks[column]


class _Replicas:
    """The columns of each tensor; tensors of equal meshes share the count of bytes."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._everyone = _Columns(numpy.arange(world_size).reshape(1, -1))
        self._first = _Columns(numpy.zeros((1, 1), int))
        self._alone = _Columns(numpy.full((1, 1), rank))
        self._known: dict[Any, _Columns] = {}

    def of(self, held: Held, is_buffer: bool) -> _Columns | None:
        """None: this rank is not on the mesh of the tensor."""
        tensor = held.tensor
        if is_buffer:
            return self._first
        if not isinstance(tensor, DTensor):
            spread = held.experts is not None and held.experts.total > held.experts.count
            return self._alone if spread else self._everyone
        if tensor.device_mesh.get_coordinate() is None:
            return None
        same: Any = tensor.device_mesh, tuple(tensor.placements)
        if isinstance(tensor, ShardedTensor):
            tile = tensor.cut.tile
            same = tensor.cut.full_mesh, tensor.cut.sharded, None if tile is None else tile.dims
        if same not in self._known:
            ranks = _holders(tensor)
            of_ranks = ranks.shape, ranks.tobytes()
            self._known[same] = self._known.setdefault(of_ranks, _Columns(ranks))
        return self._known[same]


def _holders(tensor: DTensor) -> Any:
    """The ranks that hold a DTensor: a row for each piece, a column for each replica; of torch's
    own, whose other pieces are not known here, the ranks that hold this rank's piece."""
    place: Any = tensor.device_mesh.get_coordinate()
    grid = tensor.device_mesh.mesh.cpu().numpy()
    if not isinstance(tensor, ShardedTensor):
        # Every placement that does not replicate cuts: torch's strided shards are no ``Shard``.
        cuts = [not placement.is_replicate() for placement in tensor.placements]
        where = tuple(at if cut else slice(None) for at, cut in zip(place, cuts, strict=True))
        return numpy.sort(grid[where].reshape(1, -1))
    cut, data_axes = tensor.cut, len(tensor.cut.sharded)
    dims = () if cut.tile is None else cut.tile.dims
    tile = tuple(
        slice(None) if dim is None else place[data_axes + at] for at, dim in enumerate(dims)
    )
    grid = grid[(slice(None),) * data_axes + tile]
    # The inner axis is the major one, as in ``shard_range``.
    sharded = [axis for axis in reversed(range(data_axes)) if cut.sharded[axis]]
    rest = [axis for axis in range(grid.ndim) if axis not in sharded]
    return grid.transpose(*sharded, *rest).reshape(cut.num_holders, -1)


def _add(division: Division, held: Held, columns: _Columns, rank: int) -> None:
    """Add a tensor to what this rank writes and describes."""
    tensor = held.tensor
    data, begin = tensor.detach(), 0
    offsets, sizes = (0,) * tensor.dim(), tuple(tensor.shape)
    runs: tuple[Run, ...] | None = None
    if isinstance(tensor, ShardedTensor):
        data, (begin, _) = tensor.to_local().detach(), tensor.cut.piece
        runs = _runs(tensor.cut)
        if tensor.cut.tile is not None:
            offsets, sizes = tensor.cut.tile.box
    elif isinstance(tensor, DTensor):
        data = tensor.to_local().detach()
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    elif held.shared:
        data = data.expand(held.stored((), ())[1])
    offsets, sizes = held.stored(offsets, sizes)
    runs = runs or runs_of([(0, math.prod(sizes))])
    writers = columns.choose(runs)
    tile = Tile(offsets, sizes, writers, runs)
    if data.numel() and rank in writers:
        whole = data.numel() == math.prod(held.shape)
        name = piece_name(held.key, held.shape, tile, begin, begin + data.numel())
        division.written[name] = data.view(held.shape) if whole else data
    if rank == columns.ranks[0][0]:  # of torch's DTensors each piece is a tile
        before = division.described.get(held.key)
        tiles = (tile,) if math.prod(sizes) else ()
        entry = Entry(tensor.dtype, held.shape, (*(before.tiles if before else ()), *tiles))
        division.described[held.key] = entry


def _runs(cut: Cut) -> tuple[Run, ...]:
    """The pieces of a tile, by number of the holder."""
    if cut.division is not None:  # replicas divide in any order
        pieces = sorted((low, high, holder) for holder, (low, high) in cut.held())
        return runs_of((holder, high - low) for low, high, holder in pieces)
    part = cut.layout.numel // cut.num_holders  # elements of the buffer that each holder has
    start, numel = cut.layout.starts[cut.index], cut.layout.items[cut.index].numel
    first, last = start // part, (start + numel - 1) // part
    if first >= last:
        return runs_of([(first, numel)])
    head = Run(first, (first + 1) * part - start, 1)
    middle = Run(first + 1, part, last - first - 1)
    return tuple(run for run in (head, middle, Run(last, start + numel - last * part, 1)) if run[2])


# ------------------------------------------------------------------------------ host memory


class Staging:
    """Host memory from which a background save writes while training changes the tensors.

    device   | weight | exp_avg | ...           copied once, then training continues
    host     |weight|exp_avg|..... one block, kept from save to save .....|
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # grows to the largest save

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors to host memory. The copies are complete on return."""
        rooms = [-(-_nbytes(tensor) // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        if self._block.numel() < sum(rooms):
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old one first
            pinned = bool(devices)
            self._block = torch.empty(
                sum(rooms), dtype=torch.uint8, device="cpu", pin_memory=pinned
            )
        staged = {}
        parts = self._block[: sum(rooms)].split(rooms)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True):
            host = part[: _nbytes(tensor)].view(tensor.dtype).view(tensor.shape)
            staged[name] = host.copy_(tensor, non_blocking=True)
        for device in devices:
            Lanes(device).synchronize()
        return staged


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
