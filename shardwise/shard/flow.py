# SPDX-License-Identifier: Apache-2.0
"""Flow: the lanes, the memory and the running reductions that the groups of one model share. And
whether the running code is inside a checkpoint of torch.

    reductions   [3]  [2]      each is launched when its gradients are packed, and finished when a
    compute      3  2  1       later one needs its memory, or backward is over

Groups and gradients know the flow of their model; its subclass ``Runtime`` knows the units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

from shardwise import comm
from shardwise.memory import CACHING, Source, TracePool
from shardwise.mesh import separate
from shardwise.precision.fp8_products import Emulated, Workspace
from shardwise.streams import Lanes


@dataclass(eq=False)
class _Reduction:
    """A gradient reduction under way: its collectives, and a function to call after them."""

    collectives: Iterator[comm.Pending]
    finish: Callable[[], None]
    issued: bool  # whether all collectives are issued, so that finishing only waits
    label: str
    current: comm.Pending | None = None  # the collective to wait for next
    done: Any = None  # an event after the last collective


class SharedLanes:
    """The lanes that several roots share (``share_comm_ctx``); None until one of them runs."""

    def __init__(self) -> None:
        self.lanes: Lanes | None = None


class Flow:
    """The lanes and the memory of one model, and its reductions."""

    def __init__(
        self,
        device: torch.device,
        *,
        lanes: Lanes | None = None,
        memory: str = "caching",
        unify: bool = False,
    ) -> None:
        self.lanes = lanes or Lanes(device, unify=unify)
        self.source: Source = TracePool() if memory == "trace" else CACHING
        # Each reduction more under way adds the gradients of a unit to the peak of memory.
        self.max_reductions = 1
        self.separate_reduce = False
        self.offloads = False  # whether gradients go to the host
        # The products of all MXFP8 weights, which are decoded into the same workspace.
        self.matmul = Emulated(workspace=Workspace())
        self._reductions: deque[_Reduction] = deque()
        self._reduce_axes: dict[comm.Axis, comm.Axis] = {}

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running, so that a forward which begins is a recomputation."""
        return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]

    def reduce_axis(self, axis: comm.Axis) -> comm.Axis:
        """The communicator for reductions: that of the gathers, unless they are separated."""
        return self._reduce_axes.get(axis, axis) if self.separate_reduce else axis

    def separate_reductions(self, axes: Iterable[comm.Axis]) -> None:
        """Give reductions communicators of their own (collective: every rank calls it)."""
        self.separate_reduce = True
        for axis in axes:
            if axis not in self._reduce_axes:
                self._reduce_axes[axis] = separate(axis)

    def launch(
        self,
        collectives: Iterator[comm.Pending],
        number: int,
        finish: Callable[[], None],
        label: str,
    ) -> None:
        """Start a reduction of ``number`` collectives. On a device, all are issued now. On the
        host, the first is issued now, and each other when ``drain`` has waited for the one
        before."""
        lanes = self.lanes
        issued = lanes.asynchronous or number <= 1
        reduction = _Reduction(collectives, finish, issued, label)
        lanes.join("reduce", "compute")  # the gradients were packed on the compute lane
        self._issue(reduction)
        if lanes.asynchronous:
            self._complete(reduction)
            lanes.join("outer", "reduce")
            reduction.done = lanes.mark("outer")
        self._reductions.append(reduction)

    def drain(self, keep: int = 0) -> None:
        """Finish the oldest reductions until at most ``keep`` are under way."""
        while len(self._reductions) > keep:
            reduction = self._reductions.popleft()
            if not self.lanes.asynchronous:
                self._complete(reduction)
            self.lanes.wait("compute", reduction.done)
            # ``finish`` holds tensors that were allocated on the reduce lane and read on others.
            self.lanes.wait("reduce", reduction.done)
            reduction.finish()

    def finish_issued(self) -> None:
        """Finish reductions early, to free memory. Ranks may call this at different moments, so it
        does nothing if a reduction still has collectives to issue."""
        if all(reduction.issued for reduction in self._reductions):
            self.drain(self.max_reductions - 1)

    def _complete(self, reduction: _Reduction) -> None:
        while reduction.current is not None:
            reduction.current.wait()
            self._issue(reduction)

    def _issue(self, reduction: _Reduction) -> None:
        comm.purpose = reduction.label
        reduction.current = next(reduction.collectives, None)
        comm.purpose = ""

    def drop_reductions(self) -> None:
        """Forget the reductions under way. Waits for collectives, which cannot be cancelled."""
        for reduction in self._reductions:
            if reduction.current is not None:
                reduction.current.wait()
        self._reductions.clear()

    def wait_on_host(self) -> None:
        """Make the host wait for gradients that are copied to it, before they are read."""
        if self.offloads:
            self.lanes.synchronize()


def in_checkpoint() -> bool:
    """Whether the running code will run once more in backward, because it is inside a checkpoint of
    torch that is not reentrant."""
    return _packed_by(torch.utils.checkpoint._checkpoint_hook)


def in_recomputation() -> bool:
    """Whether such a checkpoint runs a forward once more, for the tensors that autograd saved. No
    gradient will come to the outputs of that forward."""
    return _packed_by(torch.utils.checkpoint._recomputation_hook)


def _packed_by(hooks: type) -> bool:
    """Whether these hooks of a checkpoint pack the tensors that autograd saves now."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if top is None:
        return False
    pack = top[0]  # a function that the constructor of the hooks defines
    return pack.__module__ == hooks.__module__ and pack.__qualname__.startswith(hooks.__name__)
