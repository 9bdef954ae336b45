# SPDX-License-Identifier: Apache-2.0
"""The storage of a parameter: which rank has which of its elements, under any way of sharding.

    a plain tensor                 this rank stores all of it
    our ShardedTensor              by its layout: packed, uneven, nothing on some ranks
    torch's DTensor, Shard(0)      rows, divided as by torch.chunk (FSDP2)
    tensor parallelism             blocks of rows or columns, which FSDP2 may shard once more

Ranks that store different pieces form the *shard axis*. Ranks that store the same pieces are
*replicas*. All sharded axes of a mesh act as one.
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

from shardwise.core import comm
from shardwise.core.division import Division, Piece
from shardwise.core.layout import Layout
from shardwise.core.mesh import Ranks
from shardwise.core.placements import chunk_range, joint_places
from shardwise.core.tensor import ShardedTensor

Flags = tuple[bool, ...]  # one per mesh axis


@dataclass(frozen=True)
class Sharding:
    """The mesh axes that cut a parameter. Parameters of equal Shardings share an exchange.

    ``sharded`` axes cut it into contiguous pieces, ``blocked`` axes into blocks of rows or columns
    (tensor parallelism). Ranks of the other axes store the same elements.
    """

    mesh: DeviceMesh | None = None  # None: a plain tensor
    sharded: Flags = ()
    blocked: Flags = ()
    block_dim: int = 0  # 0: blocks of rows, 1: blocks of columns
    num_data_axes: int | None = None  # the first axes, whose ranks may be replicas; None: all axes

    @cached_property
    def ranks(self) -> Ranks:
        assert self.mesh is not None, "a plain tensor lies on no mesh"
        return Ranks(self.mesh)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.ranks.sizes if self.mesh is not None else ()

    @property
    def replicated(self) -> Flags:
        pairs = enumerate(zip(self.sharded, self.blocked, strict=True))
        num_axes = len(self.sharded) if self.num_data_axes is None else self.num_data_axes
        return tuple(axis < num_axes and not (shards or blocks) for axis, (shards, blocks) in pairs)

    def count(self, flags: Flags) -> int:
        """The number of ranks on the chosen axes together."""
        return math.prod(itertools.compress(self.sizes, flags))

    def axis(self, flags: Flags) -> comm.Axis | None:
        """The chosen axes as one axis, whose first use may be collective; None: it has one rank."""
        if self.mesh is None or self.count(flags) == 1:
            return None
        return self.ranks.joint(flags)

    def places(self, flags: Flags) -> list[int]:
        """By rank of the joint axis: its place in the order of ``shard_range``."""
        return joint_places(list(itertools.compress(self.sizes, flags)))

    @cached_property
    def block(self) -> int:
        """The number of this rank's block."""
        place = self.ranks.coordinate if self.mesh is not None else ()
        return next(itertools.compress(place, self.blocked), 0)

    @property
    def axes(self) -> tuple[comm.Axis, ...]:
        """The axes of the mesh that have several ranks, outer to inner."""
        return self.ranks.chosen([True] * len(self.sizes)) if self.mesh is not None else ()

    @property
    def cutting_axes(self) -> tuple[comm.Axis, ...]:
        """The axes of several ranks that store different elements, outer to inner."""
        if self.mesh is None:
            return ()
        pairs = zip(self.sharded, self.blocked, strict=True)
        return self.ranks.chosen(shards or blocks for shards, blocks in pairs)


_PLAIN = Sharding()


def sharding_of(parameter: Tensor) -> Sharding:
    """How the mesh of a parameter cuts it."""
    if isinstance(parameter, ShardedTensor):
        cut = parameter.cut
        mesh, sharded, num_axes = cut.full_mesh, cut.sharded, len(cut.sharded)
        tile_dims = () if cut.tile is None else cut.tile.dims
        sides = [None] * num_axes + [_side(dim, parameter.ndim) for dim in tile_dims]
        sharded += (False,) * len(tile_dims)
        if all(side is None for side in sides):
            # Ranks of tensor parallelism that hold the same, or other matrices of a stack, work in
            # parallel and exchange nothing.
            mesh, sides, sharded = cut.mesh, sides[:num_axes], cut.sharded
    elif isinstance(parameter, DTensor):
        mesh, sides, num_axes = parameter.device_mesh, _block_sides(parameter), None
        pairs = zip(parameter.placements, sides, strict=True)
        sharded = tuple(_is_shard(placement) and side is None for placement, side in pairs)
    else:
        return _PLAIN
    block_dim = next((side for side in sides if side is not None), 0)
    return Sharding(mesh, sharded, tuple(side is not None for side in sides), block_dim, num_axes)


def axes_of(parameters: Iterable[Tensor]) -> list[comm.Axis]:
    """Every axis that the parameters are spread over, once, in order."""
    axes: dict[int, comm.Axis] = {}
    for parameter in parameters:
        sharding = sharding_of(parameter)
        if isinstance(parameter, ShardedTensor):  # also the axes of tensor parallelism
            sharding = Sharding(parameter.cut.full_mesh)
        for axis in sharding.axes:
            axes.setdefault(id(axis.group), axis)
    return list(axes.values())


def _block_sides(parameter: DTensor) -> list[int | None]:
    """For each mesh axis: the side of the matrix along which it cuts blocks, or None.

    An axis that cuts columns always cuts blocks. An axis that cuts rows does so if its name is
    "tp", if an outer axis cuts the rows of its blocks (torch's strided shards), and in stacked
    matrices.
    """
    names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
    in_blocks = parameter.ndim > 2 or any(map(_is_strided, parameter.placements))
    sides: list[int | None] = []
    for name, placement in zip(names, parameter.placements, strict=True):
        plain = _is_shard(placement) and not _is_strided(placement)
        side = _side(placement.dim if plain else None, parameter.ndim)  # type: ignore[attr-defined]
        sides.append(side if side == 1 or name == "tp" or in_blocks else None)
    return sides


def _side(dim: int | None, ndim: int) -> int | None:
    """The side of a matrix [..., out, in] that is this dimension: 0 rows, 1 columns, or None."""
    side = -1 if dim is None or ndim < 2 else dim - (ndim - 2)
    return side if side >= 0 else None


def _is_shard(placement: Any) -> bool:
    return bool(placement.is_shard()) or _is_strided(placement)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def cut_along_rows(parameter: Tensor) -> bool:
    """Whether every axis that cuts a parameter cuts its first dimension into consecutive pieces."""
    if isinstance(parameter, ShardedTensor):
        return cut_into_pieces(parameter)
    placements: Any = parameter.placements if isinstance(parameter, DTensor) else ()
    return all(placement.dim == 0 for placement in placements if _is_shard(placement))


def cut_into_pieces(parameter: Tensor) -> bool:
    """Whether every axis that cuts a parameter cuts it into consecutive pieces of its elements."""
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.tile is None or not parameter.cut.tile.axes(cut=True)
    sharding = sharding_of(parameter)
    return sharding.count(sharding.blocked) == 1


def storage_problem(name: str, parameter: Tensor, *, matrix: bool = False) -> str | None:
    """Why an optimizer cannot find the pieces of a parameter, or None."""
    if parameter.is_meta:
        return f"'{name}' has no values yet (meta device): materialise the model first"
    if matrix and not local_of(parameter).is_contiguous():
        return f"'{name}' is not contiguous, and matrices are written row by row: make it so"
    if not isinstance(parameter, DTensor):
        return None
    if any(placement.is_partial() for placement in parameter.placements):
        return f"'{name}' is a DTensor with {parameter.placements}: no weight is a partial sum"
    sharding = sharding_of(parameter)
    if not matrix or not any(sharding.blocked):
        return None
    if sum(sharding.blocked) > 1:
        return f"'{name}' is cut into blocks by two axes ({parameter.placements}): use one"
    length, size = parameter.shape[-2 + sharding.block_dim], sharding.count(sharding.blocked)
    if length % size:
        lines = ("rows", "columns")[sharding.block_dim]
        return (
            f"'{name}' has {length} {lines}, which do not divide over {size} tensor-parallel ranks"
        )
    return None


def block_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape that shards cut: that of the parameter, or of its block under tensor
    parallelism."""
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.item_shape
    shape, sharding = list(parameter.shape), sharding_of(parameter)
    if any(sharding.blocked):
        shape[-2 + sharding.block_dim] //= sharding.count(sharding.blocked)
    return tuple(shape)


def pieces_of(parameter: Tensor, division: Division | None = None) -> Sequence[Piece]:
    """The elements of a parameter, or of its block, that each rank stores; sorted by element. With
    a ``division``, replicas are shards, and each rank has what it updates."""
    if isinstance(parameter, ShardedTensor):
        cut = parameter.cut
        flags = [sharded or division is not None for sharded in cut.sharded]
        sizes = tuple(itertools.compress(sharding_of(parameter).sizes, flags))
        return _packed_pieces(cut.layout, cut.index, sizes, division)
    if isinstance(parameter, DTensor):
        return _chunked_pieces(parameter)
    return [(0, 0, parameter.numel())]


@lru_cache(maxsize=1 << 10)
def _packed_pieces(
    layout: Layout, index: int, sizes: tuple[int, ...], division: Division | None
) -> tuple[Piece, ...]:
    """The pieces of one item over axes of these sizes; layers that are alike share them."""
    rank_of = {place: rank for rank, place in enumerate(joint_places(sizes))}
    copies = 1 if division is None else len(division)
    run = layout.num_shards * copies // math.prod(sizes)
    shards, numel = layout.holders(index), layout.items[index].numel
    first, last, width = shards[0] // run, shards[-1] // run, run * layout.shard_size
    begin = first * width - layout.starts[index]
    pieces = []
    for holder in range(first, last + 1):
        low = begin + (holder - first) * width
        span = max(low, 0), min(low + width, numel)
        parts = [(0, span)] if division is None else division.parts(holder, *span)
        pieces += [(rank_of[holder * copies + replica], *part) for replica, part in parts]
    return tuple(pieces)


def _chunked_pieces(parameter: DTensor) -> list[Piece]:
    """Rows as torch divides them: axis by axis, the outer first and strided axes last, in pieces of
    ceil(rows / size)."""
    sharding, shape = sharding_of(parameter), block_shape(parameter)
    sizes = list(itertools.compress(sharding.sizes, sharding.sharded))
    strided = list(itertools.compress(map(_is_strided, parameter.placements), sharding.sharded))
    order = sorted(range(len(sizes)), key=strided.__getitem__)
    ordered_sizes, row = [sizes[axis] for axis in order], math.prod(shape[1:])
    pieces = []
    for rank, coordinate in enumerate(itertools.product(*map(range, sizes))):
        begin, end = chunk_range(shape[0], ordered_sizes, [coordinate[axis] for axis in order])
        if begin < end:
            pieces.append((rank, begin * row, end * row))
    return sorted(pieces, key=lambda piece: piece[1])


def local_of(tensor: Tensor) -> Tensor:
    """This rank's piece as a plain tensor that shares its memory."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach() if tensor.requires_grad else tensor


def mark_written(parameters: Sequence[Tensor]) -> None:
    """Count one write to each buffer of these parameters. Every rank does so, also a rank that
    stores nothing of a buffer."""
    buffers = {id(p.buffer): p.buffer for p in parameters if isinstance(p, ShardedTensor)}
    for buffer in filter(None, buffers.values()):
        buffer.writes += 1
