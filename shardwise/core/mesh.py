# SPDX-License-Identifier: Apache-2.0
"""Meshes: the ranks of a job as named axes, outer to inner (``dp_outer``, ``dp``, ``ep``, ``tp``);
a rank's place on them (``Ranks``); and axes that are made from other axes."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.core import comm
from shardwise.core.agreement import all_ranks
from shardwise.core.placements import Placement, num_shards, shard_range
from shardwise.core.rehearsal import SHARED, ranks_per_gpu, use_gpu
from shardwise.notices import warn_once

logger = logging.getLogger(__name__)

AXES = ("dp_outer", "dp", "ep", "tp")
DATA_AXES = ("dp_outer", "dp")


def init_mesh(
    *,
    dp: int | None = None,
    dp_outer: int = 1,
    ep: int = 1,
    tp: int = 1,
    device_type: str | None = None,
) -> DeviceMesh:
    """A mesh over all ranks. ``dp=None``: all ranks that the other axes leave.

    If there is no process group yet, this joins the one that ``torchrun`` prepared, or makes a
    group of one rank without a launcher. If there are more ranks than GPUs, they share the GPUs
    (see ``shardwise.core.rehearsal``). Axes of size one are left out, except ``dp``.
    """
    given = {"dp": dp, "dp_outer": dp_outer, "ep": ep, "tp": tp}
    wrong = [f"{name}={size!r}" for name, size in given.items() if size is not None and size < 1]
    if wrong:
        raise ValueError(f"init_mesh({', '.join(wrong)}): the size of an axis is 1 or more")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        _join_process_group(device_type)
    world = dist.get_world_size()
    others = dp_outer * ep * tp
    if dp is None:
        dp = max(1, world // others)
    sizes = {"dp_outer": dp_outer, "dp": dp, "ep": ep, "tp": tp}
    if math.prod(sizes.values()) != world:
        shape = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
        raise ValueError(
            f"a mesh of {shape or 'dp=1'} has {math.prod(sizes.values())} ranks, but the job has "
            f"{world}: change the sizes, or start {math.prod(sizes.values())} processes"
        )
    names = tuple(name for name in AXES if sizes[name] > 1 or name == "dp")
    return init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


@dataclass(frozen=True)
class Ranks:
    """A mesh as one rank sees it: the axes, outer to inner, and the rank's place on each.

    ``others``: the axis over which experts are spread, for a mesh of expert parameters.
    """

    mesh: DeviceMesh
    others: comm.Axis | None = None

    @cached_property
    def axes(self) -> tuple[comm.Axis, ...]:
        names = self.mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(self.mesh.ndim))
        return tuple(comm.as_axis(self.mesh.get_group(i), name) for i, name in enumerate(names))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        return tuple(axis.rank for axis in self.axes)

    def num_shards(self, placements: Sequence[Placement]) -> int:
        """The number of shards that these placements cut a buffer into."""
        return num_shards(placements, self.sizes)

    def held(self, placements: Sequence[Placement], num_shards: int) -> tuple[int, int]:
        """(first, count) of the shards that this rank holds, of ``num_shards``."""
        return shard_range(placements, self.sizes, self.coordinate, num_shards)

    def chosen(self, flags: Iterable[bool]) -> tuple[comm.Axis, ...]:
        """The flagged axes that have several ranks, outer to inner."""
        return tuple(a for a, flag in zip(self.axes, flags, strict=True) if flag and a.size > 1)

    def joint(self, flags: Sequence[bool]) -> comm.Axis:
        """The flagged axes as one axis; the inner one counts fastest (see ``joint_places``)."""
        if sum(flags) == 1:
            return self.axes[flags.index(True)]
        names = self.mesh.mesh_dim_names
        assert names is not None, "a mesh of several axes is named, checked at construction"
        chosen = tuple(itertools.compress(names, flags))
        return comm.as_axis(flattened(self.mesh, chosen).get_group(), "+".join(chosen))


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The axes ``names`` as one axis; the first call makes its process group (collective).

    torch keeps a flattened mesh on the root mesh, and then its own DTensors gather over it in one
    collective. For rows that both axes cut unevenly, this gather returns padding instead of rows
    (torch 2.13), without an error. So our flattened mesh is kept where torch does not look. A mesh
    that the user flattened stays where it is.
    """
    root, kept = _kept_on_root(mesh)
    if (mesh, names) not in kept:
        registry = getattr(root, "_flatten_mapping", {})
        before = set(registry)
        kept[mesh, names] = mesh[names]._flatten()
        for name in set(registry) - before:
            del registry[name]
    return kept[mesh, names]


def joined(data: DeviceMesh, other: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The axes of ``data``, then the axes ``names`` of ``other``, with the process groups of the
    one mesh that both belong to."""
    wanted = (*(data.mesh_dim_names or ()), *names)
    if other.mesh_dim_names == wanted:
        return other
    if not names:
        return data
    rest = other if other.mesh_dim_names == names else other[names]
    _, kept = _kept_on_root(data)
    if (data, rest) not in kept:
        kept[data, rest] = type(data)._concatenate([data, rest])
    return kept[data, rest]


class _Kept(dict[Any, DeviceMesh]):
    """Meshes that we made from parts of a mesh, kept on the mesh. A copy of the mesh starts without
    them: torch.compile copies the mesh of every DTensor that it guards."""

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> Any:
        return _Kept, ()


def _kept_on_root(mesh: DeviceMesh) -> tuple[DeviceMesh, dict[Any, DeviceMesh]]:
    """The mesh that ``mesh`` is a part of, and the meshes that we made from its parts, kept on it:
    torch makes a new object for every ``mesh["dp"]``."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    return root, root.__dict__.setdefault("_shardwise_made", _Kept())


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel axes of a mesh. All axes of a mesh without a ``dp`` axis are."""
    names = mesh.mesh_dim_names
    if names is None or "dp" not in names or set(names) <= set(DATA_AXES):
        return mesh
    return mesh[tuple(name for name in names if name in DATA_AXES)]


def _join_process_group(device_type: str) -> None:
    gpu = use_gpu() if device_type == "cuda" else None
    backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if gpu is not None and (count := ranks_per_gpu(gpu)) > 1:
        warn_once(logger, SHARED, count)


def separate(axis: comm.Axis) -> comm.Axis:
    """The same ranks with a separate communicator (collective over the default group): two
    collectives on one NCCL communicator never overlap, even on two streams."""
    return _subgroup(axis, axis.peers, axis.name)


def split(axis: comm.Axis, size: int) -> comm.Axis:
    """This rank's run of ``size`` neighbours on the axis (collective over the default group)."""
    first, name = axis.rank // size * size, f"{axis.name}/{size}"
    if axis.group is None:
        return comm.Axis.pretended(name, size, axis.rank - first, axis.backends["meta"])
    key = (axis, size)
    if key not in _SPLITS:
        _SPLITS[key] = _subgroup(axis, axis.peers[first : first + size], name)
    return _SPLITS[key]


_SPLITS: dict[tuple[comm.Axis, int], comm.Axis] = {}


def _subgroup(axis: comm.Axis, mine: tuple[int, ...], name: str) -> comm.Axis:
    groups = {mine[0]: list(mine)}
    if not axis.pretends:  # a rank sends only its group's first rank: whole groups are ranks^2
        firsts = comm.agree(mine[0], all_ranks())
        groups = {first: [] for first in sorted(firsts)}
        for rank, first in enumerate(firsts):
            groups[first].append(rank)
    group = None
    for first, peers in groups.items():  # every rank makes every group, in one order
        made = dist.new_group(peers)
        group = made if first == mine[0] else group
    rank = mine.index(axis.peers[axis.rank])
    return comm.Axis(name, group, len(mine), rank, axis.backends, mine)
