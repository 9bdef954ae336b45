# SPDX-License-Identifier: Apache-2.0
"""Flow: the lanes of one model, and the reductions that are under way on them.

A reduction is a generator, which issues a collective each time that it is asked to go on, and first
waits for the one before. On a device all are issued at once, and lanes order them. On the host the
next is issued when the one before has been waited for, so that messages travel while modules
compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core import comm
from shardwise.core.memory import TracePool
from shardwise.core.mesh import separate
from shardwise.core.streams import Lanes


@dataclass
class _Reduction:
    collectives: Iterator[None]
    finish: Callable[[], None]  # once compute has waited for the result
    issued: bool  # whether no collective is still to be issued
    done: Any = None  # an event after the last collective


class SharedLanes:
    """The lanes that several roots share (``share_comm_ctx``); None until one of them runs."""

    def __init__(self) -> None:
        self.lanes: Lanes | None = None


class Flow:
    """The lanes and the memory of one model, and its reductions."""

    def __init__(
        self, device: torch.device, lanes: Lanes | None = None, memory: str = "caching"
    ) -> None:
        self.lanes = lanes or Lanes(device)
        self.pool = TracePool() if memory == "trace" else None
        # Each reduction more under way adds the gradients of a unit to the peak of memory.
        self.max_reductions = 1
        self.offloads = False  # whether gradients go to the host
        self._reductions: deque[_Reduction] = deque()
        self._reduce_axes: dict[comm.Axis, comm.Axis] = {}

    def reduce_axis(self, axis: comm.Axis) -> comm.Axis:
        """The communicator for reductions over an axis."""
        return self._reduce_axes.get(axis, axis)

    def separate_reductions(self, axes: Iterable[comm.Axis]) -> None:
        """Give reductions communicators of their own (collective: every rank calls it)."""
        self._reduce_axes = {axis: separate(axis) for axis in dict.fromkeys(axes)}

    def launch(
        self, collectives: Iterator[None], finish: Callable[[], None], *, single: bool
    ) -> None:
        """Start a reduction of what compute has packed. ``single``: it is one collective."""
        lanes = self.lanes
        reduction = _Reduction(collectives, finish, lanes.asynchronous or single)
        lanes.join("reduce", "compute")
        next(collectives, None)
        if lanes.asynchronous:
            deque(collectives, maxlen=0)
            lanes.join("outer", "reduce")
            reduction.done = lanes.mark("outer")
        self._reductions.append(reduction)

    def drain(self, keep: int = 0) -> None:
        """Finish the oldest reductions until at most ``keep`` are under way."""
        while len(self._reductions) > keep:
            reduction = self._reductions.popleft()
            deque(reduction.collectives, maxlen=0)
            self.lanes.wait("compute", reduction.done)
            # The reduction holds tensors that were allocated on the reduce lane and read on outer.
            self.lanes.wait("reduce", reduction.done)
            reduction.finish()

    def finish_issued(self) -> None:
        """Finish reductions early, to free memory. Ranks may call this at different moments, so it
        does nothing if a reduction still has collectives to issue."""
        if all(reduction.issued for reduction in self._reductions):
            self.drain(self.max_reductions - 1)

    def drop_reductions(self) -> None:
        """Forget the reductions under way. A collective that was issued is awaited when it is
        deleted (``comm.Pending``), because it cannot be cancelled."""
        self._reductions.clear()

    def wait_on_host(self) -> None:
        """Make the host wait for gradients that are copied to it, before they are read."""
        if self.offloads:
            self.lanes.synchronize()
