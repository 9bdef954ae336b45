# SPDX-License-Identifier: Apache-2.0
"""The storage of a parameter: which rank has which of its elements, under any way of sharding.

    a plain tensor                 all of it, here
    our ShardedTensor              as its layout says: packed, uneven, nothing on some ranks
    torch's DTensor, Shard(0)      rows as torch.chunk divides them (FSDP2)
    tensor parallelism             blocks of rows or columns, which FSDP2 may shard once more

Ranks that store different pieces form the *shard axis*, ranks that store the same pieces are
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

from shardwise import comm
from shardwise.layout import Layout
from shardwise.mesh import Ranks
from shardwise.optim.split import Piece
from shardwise.placements import chunk_range, joint_places
from shardwise.tensor import ShardedTensor, Version

Flags = tuple[bool, ...]  # one per mesh axis


@dataclass(frozen=True)
class Sharding:
    """The mesh axes that cut a parameter. Parameters of equal Shardings share an exchange.

    ``sharded`` axes cut it into contiguous pieces, ``blocked`` axes into blocks of rows or columns
    (tensor parallelism). Ranks of the other axes store the same.
    """

    mesh: DeviceMesh | None = None  # None: a plain tensor
    sharded: Flags = ()
    blocked: Flags = ()
    block_dim: int = 0  # of the matrix: 0 rows, 1 columns
    num_data_axes: int | None = None  # None: all; ranks of the others exchange no copies

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
        num = len(self.sharded) if self.num_data_axes is None else self.num_data_axes
        return tuple(axis < num and not (shards or blocks) for axis, (shards, blocks) in pairs)

    def count(self, flags: Flags) -> int:
        """The number of ranks on the chosen axes together."""
        return math.prod(itertools.compress(self.sizes, flags))

    def axis(self, flags: Flags) -> comm.Axis | None:
        """The chosen axes as one (its first use may be collective); None: it has one rank."""
        if self.mesh is None or self.count(flags) == 1:
            return None
        return self.ranks.joint(flags)

    def places(self, flags: Flags) -> list[int]:
        """By rank of the joint axis: its place as ``shard_range`` counts."""
        return joint_places(list(itertools.compress(self.sizes, flags)))

    @cached_property
    def block(self) -> int:
        """The number of this rank's block."""
        place = self.ranks.coordinate if self.mesh is not None else ()
        return next(itertools.compress(place, self.blocked), 0)

    @property
    def axes(self) -> tuple[comm.Axis, ...]:
        """All axes of the mesh that have several ranks, outer to inner."""
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
    if isinstance(parameter, ShardedTensor):
        cut, num = parameter.cut, len(parameter.cut.sharded)
        tiles = () if cut.tile is None else cut.tile.dims
        sides = [_side(dim, parameter.ndim) for dim in tiles]
        found = [side for side in sides if side is not None]
        if not found:
            # Ranks of tensor parallelism that hold the same, or other matrices of a stack, all work
            # alike and exchange nothing.
            return Sharding(cut.mesh, cut.sharded, (False,) * num)
        blocked = (False,) * num + tuple(side is not None for side in sides)
        sharded = cut.sharded + (False,) * len(sides)
        return Sharding(cut.full_mesh, sharded, blocked, found[0], num_data_axes=num)
    if isinstance(parameter, DTensor):
        dims = _block_dims(parameter)
        sharded = tuple(
            _is_shard(placement) and dim is None
            for placement, dim in zip(parameter.placements, dims, strict=True)
        )
        found = [dim for dim in dims if dim is not None]
        blocked = tuple(dim is not None for dim in dims)
        return Sharding(parameter.device_mesh, sharded, blocked, found[0] if found else 0)
    return _PLAIN


def axes_of(parameters: Iterable[Tensor]) -> list[comm.Axis]:
    """Every axis that the parameters are spread over, once, in order."""
    found: dict[int, comm.Axis] = {}
    for parameter in parameters:
        ours = isinstance(parameter, ShardedTensor)
        sharding = Sharding(parameter.cut.full_mesh) if ours else sharding_of(parameter)  # type: ignore[attr-defined]
        for axis in sharding.axes:
            found.setdefault(id(axis.group), axis)
    return list(found.values())


def _block_dims(parameter: DTensor) -> list[int | None]:
    """For each mesh axis: the side of the matrix along which it cuts blocks, or None.

    An axis along columns always cuts blocks. An axis along rows does where its name is "tp", where
    an outer axis cut the rows of its blocks (torch's strided shards), and inside stacked matrices.
    """
    names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
    strided = [_is_strided(placement) for placement in parameter.placements]
    found: list[int | None] = []
    for name, placement, again in zip(names, parameter.placements, strided, strict=True):
        side = placement.dim - (parameter.ndim - 2) if _is_shard(placement) else -1  # type: ignore[attr-defined]
        blocks = side == 1 or name == "tp" or any(strided) or parameter.ndim > 2
        found.append(side if parameter.ndim > 1 and side >= 0 and blocks and not again else None)
    return found


def _side(dim: int | None, ndim: int) -> int | None:
    """The side of a matrix [..., out, in] that a cut of this dimension is along: 0, 1 or None."""
    side = -1 if dim is None or ndim < 2 else dim - (ndim - 2)
    return side if side >= 0 else None


def _is_shard(placement: Any) -> bool:
    return bool(placement.is_shard()) or _is_strided(placement)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def cut_along_rows(parameter: Tensor) -> bool:
    """Whether no axis cuts a DTensor otherwise than into pieces of its first dimension."""
    if isinstance(parameter, ShardedTensor):
        tile = parameter.cut.tile
        return tile is None or not tile.axes(cut=True)
    placements: Any = parameter.placements if isinstance(parameter, DTensor) else ()
    return all(one.dim == 0 for one in placements if _is_shard(one))


def cut_into_pieces(parameter: Tensor) -> bool:
    """Whether no axis cuts a parameter otherwise than into consecutive pieces of its elements."""
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.tile is None or not parameter.cut.tile.axes(cut=True)
    sharding = sharding_of(parameter)
    return sharding.count(sharding.blocked) == 1


def storage_problem(name: str, parameter: Tensor, *, matrix: bool = False) -> str | None:
    """Why an optimizer cannot find the pieces of a parameter, or None."""
    if parameter.is_meta:
        return f"'{name}' has no values yet (meta device): materialise the model first"
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
        what = ("rows", "columns")[sharding.block_dim]
        return (
            f"'{name}' has {length} {what}, which do not divide over {size} tensor-parallel ranks"
        )
    return None


def block_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape that shards cut: the parameter's, or its block's under tensor parallelism."""
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.item_shape
    shape, sharding = list(parameter.shape), sharding_of(parameter)
    if any(sharding.blocked):
        shape[-2 + sharding.block_dim] //= sharding.count(sharding.blocked)
    return tuple(shape)


def pieces_of(parameter: Tensor) -> Sequence[Piece]:
    """The elements of a parameter (of its block) that each rank stores, sorted by element."""
    if isinstance(parameter, ShardedTensor):
        cut = parameter.cut
        sizes = tuple(itertools.compress(sharding_of(parameter).sizes, cut.sharded))
        return _packed_pieces(cut.layout, cut.index, sizes)
    if isinstance(parameter, DTensor):
        return _chunked_pieces(parameter)
    return [(0, 0, parameter.numel())]


@lru_cache(maxsize=1 << 10)
def _packed_pieces(layout: Layout, index: int, sizes: tuple[int, ...]) -> tuple[Piece, ...]:
    """The pieces of one item over sharded axes of these sizes; layers that are alike share them."""
    rank_of, run = _rank_of(sizes), layout.num_shards // math.prod(sizes)
    shards, numel = layout.holders(index), layout.items[index].numel
    first, last, width = shards[0] // run, shards[-1] // run, run * layout.shard_size
    begin = first * width - layout.starts[index]
    lows = range(begin, begin + (last - first + 1) * width, width)
    return tuple(
        (rank_of[holder], low if low > 0 else 0, min(low + width, numel))
        for holder, low in enumerate(lows, first)
    )


@lru_cache(maxsize=16)
def _rank_of(sizes: tuple[int, ...]) -> dict[int, int]:
    """The rank on the joint axis of each place."""
    return {place: rank for rank, place in enumerate(joint_places(sizes))}


def _chunked_pieces(parameter: DTensor) -> list[Piece]:
    """Rows as torch divides them: axis by axis, the outer first (strided ones last), each piece of
    ceil(rows / size)."""
    sharding, shape = sharding_of(parameter), block_shape(parameter)
    pairs = zip(sharding.sizes, map(_is_strided, parameter.placements), strict=True)
    cuts = list(itertools.compress(pairs, sharding.sharded))
    order = sorted(range(len(cuts)), key=lambda number: cuts[number][1])
    row = math.prod(shape[1:])
    found = []
    for rank, coordinate in enumerate(itertools.product(*(range(size) for size, _ in cuts))):
        sizes, places = [cuts[n][0] for n in order], [coordinate[n] for n in order]
        begin, end = chunk_range(shape[0], sizes, places)
        if begin < end:
            found.append((rank, begin * row, end * row))
    return sorted(found, key=lambda piece: piece[1])


def local_of(tensor: Tensor) -> Tensor:
    """This rank's piece as a plain tensor, aliased."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach() if tensor.requires_grad else tensor


def version_of(parameter: Tensor) -> Version | None:
    """The write counter of the buffer that stores a parameter; one object per buffer."""
    return parameter.version if isinstance(parameter, ShardedTensor) else None


def mark_written(parameters: Sequence[Tensor]) -> None:
    """Count a write to the buffers of these parameters, and say that this step writes no more to
    them. Once per buffer and on every rank, also where a rank stores nothing of it."""
    found = [version for parameter in parameters if (version := version_of(parameter)) is not None]
    for version in {id(version): version for version in found}.values():
        version.count += 1
        if version.on_stepped is not None:
            version.on_stepped()


class Written:
    """Tensors that are written flat: views of them, or copies that go back at the end."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def flat(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor.view(-1)
        copy = next((copy for one, copy in self._copies if one is tensor), None)
        if copy is None:
            copy = tensor.contiguous()
            self._copies.append((tensor, copy))
        return copy.view(-1)

    def finish(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)
