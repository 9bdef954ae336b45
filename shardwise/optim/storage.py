# SPDX-License-Identifier: Apache-2.0
"""Where a parameter is stored: which rank holds which of its elements, whoever cut it.

    a plain tensor                 all of it, here
    our ShardedTensor              as its layout says: packed, uneven, on some ranks nothing
    torch's DTensor, Shard(0)      rows as torch.chunk cuts them (FSDP2)
    tensor parallelism             blocks of rows or columns, which FSDP2 may cut once more

Ranks that hold different pieces are the *shard axis*, ranks that hold the same are *replicas*. All
sharded axes of a mesh act as one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import comm
from shardwise.buffer import Ranks
from shardwise.layout import Layout
from shardwise.placements import REPLICATE, SHARD, shard_range
from shardwise.tensor import ShardedTensor, Version

Piece = tuple[int, int, int]  # (rank on the shard axis, lo, hi)


@dataclass(frozen=True, eq=False)
class Home:
    """A mesh and what its axes do to a parameter. Homes with equal keys share an exchange.

    ``sharded`` axes cut it into contiguous pieces, ``tensor`` axes into blocks of rows or columns
    (tensor parallelism), and ranks of the others hold the same.
    """

    mesh: DeviceMesh | None
    sharded: tuple[bool, ...] = ()
    tensor: tuple[bool, ...] = ()
    tensor_dim: int = 0  # of the matrix: 0 rows, 1 columns

    @property
    def key(self) -> Any:
        return (self.mesh, self.sharded, self.tensor, self.tensor_dim)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.size(axis) for axis in range(self.mesh.ndim)) if self.mesh else ()

    @cached_property
    def num_shards(self) -> int:
        return self._size_of(self.sharded)

    @cached_property
    def num_replicas(self) -> int:
        return math.prod(self.sizes) // self.num_shards // self.num_blocks

    def _size_of(self, chosen: tuple[bool, ...]) -> int:
        pairs = zip(self.sizes, chosen, strict=False)
        return math.prod(size for size, taken in pairs if taken)

    @cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Of the ranks of the shard axis, on the sharded mesh axes, in rank order."""
        pairs = zip(self.sizes, self.sharded, strict=True)
        return list(itertools.product(*(range(size) for size, sharded in pairs if sharded)))

    @cached_property
    def shards(self) -> comm.Axis | None:
        """The ranks that hold different pieces, as one axis (its first use may be collective)."""
        return self._joint(self.sharded)

    @cached_property
    def replicas(self) -> comm.Axis | None:
        """The ranks that hold the same pieces."""
        return self._joint(self._replicated)

    @cached_property
    def replica_order(self) -> list[int]:
        """Of each rank of that axis: its place as ``shard_range`` counts."""
        assert self.mesh is not None, "a plain tensor has no replicas"
        wanted = [SHARD if one else REPLICATE for one in self._replicated]
        return Ranks(self.mesh).joint(wanted)[1]

    @property
    def _replicated(self) -> tuple[bool, ...]:
        cut = self.tensor or (False,) * len(self.sharded)
        return tuple(not (s or block) for s, block in zip(self.sharded, cut, strict=True))

    @cached_property
    def blocks(self) -> comm.Axis | None:
        """The ranks that hold blocks of the same matrices."""
        return self._joint(self.tensor)

    @cached_property
    def block(self) -> int:
        """Which block this rank holds."""
        coordinate = self.mesh.get_coordinate() if self.mesh is not None else None
        pairs = zip(coordinate or (), self.tensor, strict=False)
        return next((position for position, taken in pairs if taken), 0)

    @cached_property
    def num_blocks(self) -> int:
        """Into how many blocks tensor parallelism cuts it."""
        return self._size_of(self.tensor)

    @cached_property
    def axes(self) -> tuple[comm.Axis, ...]:
        """The axes that cut it, one by one, outer to inner: a sum needs no new group."""
        if self.mesh is None:
            return ()
        cut = self.tensor or (False,) * len(self.sharded)
        triples = zip(comm.mesh_axes(self.mesh), self.sharded, cut, strict=True)
        return tuple(a for a, sharded, block in triples if (sharded or block) and a.size > 1)

    @property
    def every_axis(self) -> tuple[comm.Axis, ...]:
        """All axes of the mesh that have several ranks, outer to inner."""
        axes = comm.mesh_axes(self.mesh) if self.mesh is not None else ()
        return tuple(axis for axis in axes if axis.size > 1)

    def _joint(self, chosen: tuple[bool, ...]) -> comm.Axis | None:
        if self.mesh is None or not any(chosen):
            return None
        wanted = [SHARD if one else REPLICATE for one in chosen]
        axis, _ = Ranks(self.mesh).joint(wanted)
        return axis if axis.size > 1 else None


_NOWHERE = Home(None)


def home_of(parameter: Tensor) -> Home:
    """The home of a parameter; a new value each time, compare by ``key``."""
    if isinstance(parameter, ShardedTensor):
        return Home(parameter.cut.mesh, parameter.cut.sharded)
    if isinstance(parameter, DTensor):
        dims = _tensor_dims(parameter)
        sharded = tuple(
            _is_shard(placement) and dim is None
            for placement, dim in zip(parameter.placements, dims, strict=True)
        )
        found = [dim for dim in dims if dim is not None]
        tensor = tuple(dim is not None for dim in dims) if found else ()
        return Home(parameter.device_mesh, sharded, tensor, found[0] if found else 0)
    return _NOWHERE


def axes_of(parameters: Iterable[Tensor]) -> list[comm.Axis]:
    """Every axis that they are spread over, once, in order."""
    found: dict[int, comm.Axis] = {}
    for parameter in parameters:
        for axis in home_of(parameter).every_axis:
            found.setdefault(id(axis.group), axis)
    return list(found.values())


def _tensor_dims(parameter: DTensor) -> list[int | None]:
    """For each mesh axis: along which side of the matrix it cuts blocks, if that is what it does.

    Along columns it always does. Along rows it does where its name is "tp", where an outer axis cut
    the rows of its blocks (torch's strided shards), and inside stacked matrices.
    """
    names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
    strided = [_is_strided(placement) for placement in parameter.placements]
    found: list[int | None] = []
    for name, placement, again in zip(names, parameter.placements, strided, strict=True):
        side = placement.dim - (parameter.ndim - 2) if _is_shard(placement) else -1  # type: ignore[attr-defined]
        of_blocks = side == 1 or name == "tp" or any(strided) or parameter.ndim > 2
        found.append(side if parameter.ndim > 1 and side >= 0 and of_blocks and not again else None)
    return found


def _is_shard(placement: Any) -> bool:
    return bool(placement.is_shard()) or _is_strided(placement)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def cut_along_rows(parameter: Tensor) -> bool:
    """Whether every axis that cuts a DTensor does so along its first dimension."""
    foreign = isinstance(parameter, DTensor) and not isinstance(parameter, ShardedTensor)
    placements = parameter.placements if foreign else ()  # type: ignore[attr-defined]
    return all(one.dim == 0 for one in placements if _is_shard(one))


def problem_of(name: str, parameter: Tensor, *, matrix: bool = False) -> str | None:
    """Why the pieces of a parameter can't be found, or None."""
    if parameter.is_meta:
        return f"'{name}' has no values yet (meta device): materialise the model first"
    if isinstance(parameter, ShardedTensor) or not isinstance(parameter, DTensor):
        return None
    if any(placement.is_partial() for placement in parameter.placements):
        return f"'{name}' is a DTensor with {parameter.placements}: no weight is a partial sum"
    if not matrix:
        return None
    home = home_of(parameter)
    if sum(home.tensor) > 1:
        return f"'{name}' is cut into blocks by two axes ({parameter.placements}): use one"
    if any(home.tensor):
        length = parameter.shape[parameter.ndim - 2 + home.tensor_dim]
        size = home.num_blocks
        if length % size:
            return (
                f"'{name}' has {length} {('rows', 'columns')[home.tensor_dim]}, which do not "
                f"divide over {size} tensor-parallel ranks"
            )
    return None


def block_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of what shards cut: the parameter's, or its block's under tensor parallelism."""
    shape, home = list(parameter.shape), home_of(parameter)
    if any(home.tensor):
        shape[parameter.ndim - 2 + home.tensor_dim] //= home.num_blocks
    return tuple(shape)


def pieces_of(parameter: Tensor) -> Sequence[Piece]:
    """Who holds which elements of a parameter (of its block), by element."""
    if isinstance(parameter, ShardedTensor):
        return _packed_pieces(parameter)
    if isinstance(parameter, DTensor):
        return _chunked_pieces(parameter)
    return [(0, 0, parameter.numel())]


def _packed_pieces(parameter: ShardedTensor) -> tuple[Piece, ...]:
    cut, home = parameter.cut, home_of(parameter)
    sizes = tuple(size for size, sharded in zip(home.sizes, home.sharded, strict=True) if sharded)
    return _held(cut.layout, cut.index, sizes)


@lru_cache(maxsize=1 << 10)
def _held(layout: Layout, index: int, sizes: tuple[int, ...]) -> tuple[Piece, ...]:
    """The pieces of one item over sharded axes of these sizes; layers that are alike share them."""
    rank_of, run = _rank_of(sizes), layout.num_shards // math.prod(sizes)
    shards = layout.holders(index)
    return tuple(
        (rank_of[holder], *layout.piece(index, holder * run, run))
        for holder in range(shards[0] // run, shards[-1] // run + 1)
    )


@lru_cache(maxsize=16)
def _rank_of(sizes: tuple[int, ...]) -> dict[int, int]:
    """The rank on the joint axis of each holder: ranks count the inner axis fastest, holders as
    ``shard_range`` does."""
    every, count = [SHARD] * len(sizes), math.prod(sizes)
    coordinates = itertools.product(*map(range, sizes))
    return {
        shard_range(every, sizes, coordinate, count)[0]: rank
        for rank, coordinate in enumerate(coordinates)
    }


def _chunked_pieces(parameter: DTensor) -> list[Piece]:
    """Rows as torch cuts them: axis by axis, outer first (strided ones last), each piece of
    ceil(rows / size)."""
    home = home_of(parameter)
    cuts = zip(home.sizes, home.sharded, parameter.placements, strict=True)
    every = [(size, _is_strided(placement)) for size, sharded, placement in cuts if sharded]
    order = sorted(range(len(every)), key=lambda number: every[number][1])
    shape = block_shape(parameter)
    row = math.prod(shape[1:])
    found = []
    for rank, coordinate in enumerate(home.coordinates):
        sizes, places = [every[n][0] for n in order], [coordinate[n] for n in order]
        begin, end = chunk_range(shape[0], sizes, places)
        if begin < end:
            found.append((rank, begin * row, end * row))
    return sorted(found, key=lambda piece: piece[1])


def chunk_range(length: int, sizes: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """The part [begin, end) of a dimension that torch's Shard gives to one coordinate."""
    begin, end = 0, length
    for size, position in zip(sizes, coordinate, strict=True):
        step = -(-(end - begin) // size)
        begin, end = min(begin + position * step, end), min(begin + (position + 1) * step, end)
    return begin, end


def local_of(tensor: Tensor) -> Tensor:
    """This rank's piece as a plain tensor, aliased."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach() if tensor.requires_grad else tensor


def buffer_of(parameter: Tensor) -> Version | None:
    """The version of the buffer that a parameter lives in: one object for all that live there."""
    return parameter.version if isinstance(parameter, ShardedTensor) else None


def written(parameters: Sequence[Tensor]) -> None:
    """Tell whoever watches these weights that they changed and are settled for this step: once per
    buffer, on every rank, those with nothing to write included."""
    found = [version for parameter in parameters if (version := buffer_of(parameter)) is not None]
    watched = {id(version): version for version in found}
    for version in watched.values():
        version.count += 1
        if version.settled is not None:
            version.settled()
