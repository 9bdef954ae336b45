# SPDX-License-Identifier: Apache-2.0
"""Tile: the part of a whole tensor that tensor parallelism left on this rank, before data
parallelism cuts it further.

A buffer packs tiles, so layouts, gathers over ``dp`` and reductions see ordinary tensors. Code that
needs the whole tensor (shapes, ``full_tensor``, norms, checkpoints, Muon) asks the tile:

    weight [8, 6], mesh dp=2 x tp=2, Shard(0) on tp (Colwise)      Shard(1) on tp (Rowwise)

    tp 0   rows 0-3   --laid out-->  dp 0: rows 0-1                tp 0: columns 0-2, dp cuts rows
                                     dp 1: rows 2-3                tp 1: columns 3-5
    tp 1   rows 4-7   --laid out-->  dp 0: rows 4-5                Replicate() on tp (norms): the
                                     dp 1: rows 6-7                whole tensor, the same on each

A parameter has two meshes. ``seen`` is the mesh of the DTensor that the user made and forward
computes with: ``tp``, or one mesh of all axes, replicated over ``dp``. The parameter at rest, its
gradient and its optimizer states are on ``mesh``: the data-parallel axes, then those of the tile.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwise.core import comm
from shardwise.core.compat import DTensorSpec, TensorMeta
from shardwise.core.layout import Box
from shardwise.core.mesh import Ranks, joined
from shardwise.core.placements import chunk_range


@dataclass(frozen=True)
class Tile:
    """One tile of a tensor of ``shape``, and the mesh axes that made it."""

    shape: tuple[int, ...]
    mesh: DeviceMesh  # the data-parallel axes, then those of the tile
    num_data_axes: int
    seen: DeviceMesh  # the mesh of the DTensor that forward computes with
    seen_placements: tuple[Placement, ...]

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """How the tile's axes cut the tensor, outer to inner: Shard or Replicate."""
        names = self.seen.mesh_dim_names or ()
        by_name = dict(zip(names, self.seen_placements, strict=True))
        return tuple(by_name[name] for name in (self.mesh.mesh_dim_names or ())[self._own])

    @property
    def _own(self) -> slice:
        return slice(self.num_data_axes, None)

    @cached_property
    def dims(self) -> tuple[int | None, ...]:
        """For each axis of the tile, the dimension that it cuts; None: its ranks hold the same."""
        return tuple(getattr(placement, "dim", None) for placement in self.placements)

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(self.mesh)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self._ranks.sizes[self._own]

    @property
    def _coordinate(self) -> tuple[int, ...]:
        return self._ranks.coordinate[self._own]

    def axes(self, *, cut: bool) -> tuple[comm.Axis, ...]:
        """The axes of several ranks that hold different tiles, or (``cut=False``) the same one."""
        own = [(dim is not None) == cut for dim in self.dims]
        return self._ranks.chosen([False] * self.num_data_axes + own)

    # ------------------------------------------------------------------ where it lies

    def _box_at(self, coordinate: tuple[int, ...]) -> Box:
        """(offsets, sizes) of the tile at one coordinate of the tile's axes."""
        ranges = [self._range(dim, coordinate) for dim in range(len(self.shape))]
        return tuple(lo for lo, _ in ranges), tuple(hi - lo for lo, hi in ranges)

    def _range(self, dim: int, coordinate: tuple[int, ...]) -> tuple[int, int]:
        """[begin, end) along one dimension, cut by the first ``len(coordinate)`` axes."""
        chosen = [at for at in range(len(coordinate)) if self.dims[at] == dim]
        sizes, places = [self._sizes[at] for at in chosen], [coordinate[at] for at in chosen]
        return chunk_range(self.shape[dim], sizes, places)

    @cached_property
    def box(self) -> Box:
        """(offsets, sizes) of this rank's tile."""
        return self._box_at(self._coordinate)

    @cached_property
    def shapes(self) -> frozenset[tuple[int, ...]]:
        """The shapes of the tiles of all ranks; the first ranks may hold larger ones."""
        coordinates = itertools.product(*map(range, self._sizes))
        return frozenset(self._box_at(coordinate)[1] for coordinate in coordinates)

    # ------------------------------------------------------------------ whole tensors

    def take(self, full: Tensor) -> Tensor:
        """This rank's tile of a full tensor, a view."""
        for dim, (begin, size) in enumerate(zip(*self.box, strict=True)):
            full = full.narrow(dim, begin, size)
        return full

    def join(self, tile: Tensor) -> Tensor:
        """The whole tensor, from every rank's tile (collective over the axes that cut it)."""
        for at in reversed(range(len(self.dims))):
            dim, size, axis = self.dims[at], self._sizes[at], self._ranks.axes[self._own][at]
            if dim is None or size == 1:
                continue
            outer = self._coordinate[:at]
            ranges = [self._range(dim, (*outer, place)) for place in range(size)]
            lengths = [hi - lo for lo, hi in ranges]
            padded = tile.new_zeros(*tile.shape[:dim], max(lengths), *tile.shape[dim + 1 :])
            padded.narrow(dim, 0, tile.shape[dim]).copy_(tile)
            part = padded.view(-1).view(torch.uint8)  # not every backend carries every dtype
            together = part.new_empty(size * part.numel())
            comm.all_gather(together, part, axis).wait()
            parts = together.view(tile.dtype).view(size, *padded.shape)
            pairs = zip(parts, lengths, strict=True)
            tile = torch.cat([values.narrow(dim, 0, length) for values, length in pairs], dim)
        return tile

    # ------------------------------------------------------------------ as forward sees it

    def seen_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of the DTensor that forward computes with."""
        strides = torch.empty(self.shape, device="meta").stride()
        meta = TensorMeta(torch.Size(self.shape), strides, dtype)
        return DTensorSpec(self.seen, self.seen_placements, tensor_meta=meta)

    def local_gradient(self, grad: Tensor) -> Tensor:
        """This rank's tile of a gradient of the seen DTensor. Over the tile's axes the gradient is
        placed like the weight, with a collective if needed (partial sums of norms). Partial sums
        over data-parallel axes stay: the buffer reduces them."""
        assert isinstance(grad, DTensor)
        own = (self.mesh.mesh_dim_names or ())[self._own]
        names = self.seen.mesh_dim_names or ()
        pairs = zip(names, self.seen_placements, grad.placements, strict=True)
        wanted = tuple(weights if name in own else grads for name, weights, grads in pairs)
        if wanted != tuple(grad.placements):
            grad = grad.redistribute(placements=wanted)
        return comm.arrived(grad._local_tensor)


def _own_axes(data: DeviceMesh, over: DeviceMesh) -> tuple[str, ...]:
    """The axes of ``over`` that are not data-parallel."""
    return tuple(n for n in over.mesh_dim_names or () if n not in (data.mesh_dim_names or ()))


def tile_of(parameter: Tensor, mesh: DeviceMesh) -> Tile | None:
    """The tile of a DTensor parameter that is to be sharded over ``mesh``; None for a plain
    tensor. Call ``tile_problem`` first."""
    if not isinstance(parameter, DTensor):
        return None
    over = parameter.device_mesh
    every = joined(mesh, over, _own_axes(mesh, over))
    return Tile(tuple(parameter.shape), every, mesh.ndim, over, tuple(parameter.placements))


def replicated_tile(shape: tuple[int, ...], data: DeviceMesh, over: DeviceMesh) -> Tile | None:
    """The tile of a tensor that lies over ``data`` and is the same on all ranks of the other axes
    of ``over``; None if ``over`` has no other axes."""
    own = _own_axes(data, over)
    if not own:
        return None
    return Tile(shape, joined(data, over, own), data.ndim, over, (Replicate(),) * over.ndim)


def tile_problem(name: str, parameter: DTensor, mesh: DeviceMesh) -> str | None:
    """The reason, the same on every rank, why a DTensor parameter cannot be sharded over ``mesh``,
    or None."""
    over, data = parameter.device_mesh, mesh.mesh_dim_names
    what = f"'{name}' is a DTensor with {parameter.placements} on {over.mesh_dim_names}"
    if data is None or over.mesh_dim_names is None:
        return f"{what}: name the axes of both meshes (mesh_dim_names)"
    if any(placement.is_partial() for placement in parameter.placements):
        return f"{what}: no weight is a partial sum"
    if any(isinstance(placement, _StridedShard) for placement in parameter.placements):
        return f"{what}: it is sharded by torch's fully_shard already; wrap it once"
    for axis, placement in zip(over.mesh_dim_names, parameter.placements, strict=True):
        if axis in data and not placement.is_replicate():
            return (
                f"{what}. Expected Replicate on axis '{axis}', which is data-parallel here: "
                f"perhaps torch's fully_shard has cut it. Pass parameters replicated over {data}"
            )
    try:
        tile = tile_of(parameter, mesh)
    except (RuntimeError, KeyError, ValueError) as error:
        return (
            f"{what}, but these axes and {data} belong to different meshes ({error}): make one "
            f"mesh of all axes, init_mesh(dp=..., tp=...), and use mesh['dp'] and mesh['tp']"
        )
    assert tile is not None
    if any(0 in shape for shape in tile.shapes):
        return f"{what}: its shape {list(parameter.shape)} leaves nothing for some ranks"
    return None
