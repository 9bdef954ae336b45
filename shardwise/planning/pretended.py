# SPDX-License-Identifier: Apache-2.0
"""The mesh of a plan, which has no process group and no other ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.core import comm


class PretendedMesh(DeviceMesh):
    """The mesh of a plan: a DeviceMesh as one rank sees it, without a process group and without
    other ranks. It has the methods of a DeviceMesh that wrapping, parameters and buffers use.

    ``backend``: "nccl" or "gloo": its axes count messages as this backend would send them.
    """

    device_type = "meta"
    mesh_dim_names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    ndim: int = 0
    __hash__ = object.__hash__

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], coordinate: Sequence[int], backend: str
    ) -> None:
        self.mesh_dim_names, self.shape = tuple(names), tuple(sizes)
        self.ndim, self._coordinate, self._backend = len(names), tuple(coordinate), backend
        self._axes = [
            comm.Axis.pretended(name, size, place, backend)
            for name, size, place in zip(names, sizes, coordinate, strict=True)
        ]
        self._parts: dict[tuple[str, ...], PretendedMesh] = {}

    @staticmethod
    def _concatenate(meshes: Sequence[PretendedMesh]) -> PretendedMesh:  # type: ignore[override]
        """The axes of both meshes, the second mesh inside the first."""
        first, second = meshes
        return PretendedMesh(
            first.mesh_dim_names + second.mesh_dim_names,
            first.shape + second.shape,
            first._coordinate + second._coordinate,
            first._backend,
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    def _get_root_mesh(self) -> PretendedMesh:
        return self

    def size(self, axis: int | None = None) -> int:
        return math.prod(self.shape) if axis is None else self.shape[axis]

    def get_coordinate(self) -> tuple[int, ...]:
        return self._coordinate

    def get_group(self, axis: int = 0) -> comm.Axis:  # type: ignore[override]
        """An Axis in place of a process group: ``comm`` takes either."""
        return self._axes[axis]

    def __getitem__(self, names: str | tuple[str, ...]) -> PretendedMesh:
        names = (names,) if isinstance(names, str) else names
        if names not in self._parts:
            chosen = [self.mesh_dim_names.index(name) for name in names]
            sizes, places = ([x[i] for i in chosen] for x in (self.shape, self._coordinate))
            self._parts[names] = PretendedMesh(names, sizes, places, self._backend)
        return self._parts[names]

    def _flatten(self, *_: Any) -> PretendedMesh:
        """All axes as one; the inner axis counts fastest."""
        name = "+".join(self.mesh_dim_names)
        if (name,) not in self._parts:
            rank = list(itertools.product(*map(range, self.shape))).index(self._coordinate)
            self._parts[name,] = PretendedMesh([name], [self.size()], [rank], self._backend)
        return self._parts[name,]
