# SPDX-License-Identifier: Apache-2.0
"""Axis: one mesh axis as a rank sees it, and the process group behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from shardwise.lockstep import Journal


@dataclass(eq=False)
class Axis:
    """One mesh axis as a rank sees it: its group, and where this rank stands in it."""

    name: str
    group: Any  # a ProcessGroup; None: nobody is behind this axis, see :meth:`pretended`
    size: int
    rank: int
    backends: dict[str, str]  # by device type
    peers: tuple[int, ...]  # global ranks, by rank on the axis
    journal: Journal = field(repr=False)

    @classmethod
    def pretended(cls, name: str, size: int, rank: int, backend: str) -> Axis:
        """An axis for a plan: tensors on the meta device are sent as ``backend`` would send them,
        counted, and go nowhere."""
        journal = Journal(None, rank, size)
        return cls(name, None, size, rank, {"meta": backend}, tuple(range(size)), journal)

    @property
    def pretends(self) -> bool:
        """Whether one process poses as a rank of many: in a plan, or on torch's fake backend."""
        return "meta" in self.backends or "fake" in self.backends.values()

    def backend_for(self, tensor: Tensor) -> str | None:
        return self.backends.get(tensor.device.type)


GroupLike: TypeAlias = "Axis | dist.ProcessGroup"
_AXES: WeakKeyDictionary[Any, dict[str, Axis]] = WeakKeyDictionary()


def as_axis(group: GroupLike, name: str | None = None) -> Axis:
    """The Axis of a process group. One group may be an axis of several meshes, under several names;
    its messages are counted together all the same."""
    if isinstance(group, Axis):
        return group
    known = _AXES.setdefault(group, {})
    first = next(iter(known.values()), None)
    if name is None:
        name = first.name if first is not None else "group"
    if name not in known:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        known[name] = Axis(
            name=name,
            group=group,
            size=size,
            rank=rank,
            backends=_backends(group),
            peers=tuple(dist.get_process_group_ranks(group)),
            journal=first.journal if first is not None else Journal(group, rank, size),
        )
    return known[name]


def _backends(group: Any) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}`` and the like."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)  # type: ignore[misc]
