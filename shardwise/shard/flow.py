# SPDX-License-Identifier: Apache-2.0
"""Flow: what the groups of one model share: lanes, memory, and reductions under way; whether a
checkpoint of torch is around what runs now.

    reductions   [3]  [2]      each is launched when its gradients are packed, and finished when a
    compute      3  2  1       later one needs its room, or backward is over

Groups and gradients know this much of the model they belong to; its units are the runtime's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from shardwise import comm
from shardwise.memory import CACHING, Source, TracePool
from shardwise.mesh import separate
from shardwise.precision.fp8_products import Emulated, Workspace
from shardwise.streams import Lanes


@dataclass(eq=False)
class _Reduction:
    """A gradient reduction under way: collectives still to be waited for, and what comes after."""

    collectives: Iterator[comm.Pending]
    finish: Callable[[], None]
    issued: bool  # whether nothing is left to issue: waiting is then all that is left
    label: str
    current: comm.Pending | None = None
    done: Any = None
    held: list[Tensor] = field(default_factory=list)


class SharedLanes:
    """The lanes that several roots use together (``share_comm_ctx``), once one of them made
    them."""

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
        self.max_reductions = 1  # a gradient buffer more in flight is a unit more of peak memory
        self.separate_reduce = False
        self.offloads = False  # whether gradients go to the host
        # The products of all MXFP8 weights: each is decoded where the one before was.
        self.matmul = Emulated(workspace=Workspace())
        self._reductions: deque[_Reduction] = deque()
        self._launching: _Reduction | None = None
        self._reduce_axes: dict[comm.Axis, comm.Axis] = {}

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running: a forward that comes now is a recomputation."""
        return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]

    def reduce_axis(self, axis: comm.Axis) -> comm.Axis:
        """The communicator for reductions: that of the gathers unless told to separate them."""
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
        """Start a reduction of ``number`` collectives. On a device all of it is issued now; on the
        host the first collective is, and the rest follows when somebody waits."""
        lanes = self.lanes
        issued = lanes.asynchronous or number <= 1
        reduction = _Reduction(collectives, finish, issued, label)
        lanes.join("reduce", "compute")  # the gradients were packed there
        self._launching = reduction
        self._issue(reduction)
        if lanes.asynchronous:
            self._complete(reduction)
            lanes.join("outer", "reduce")
            reduction.done = lanes.mark("outer")
        self._launching = None
        self._reductions.append(reduction)

    def hold(self, tensor: Tensor) -> None:
        """Keep ``tensor`` until the reduction being issued is done: another lane reads it."""
        if self._launching is not None:
            self._launching.held.append(tensor)

    def drain(self, keep: int = 0) -> None:
        """Finish the oldest reductions until at most ``keep`` are under way."""
        while len(self._reductions) > keep:
            reduction = self._reductions.popleft()
            if not self.lanes.asynchronous:
                self._complete(reduction)
            self.lanes.wait("compute", reduction.done)
            self.lanes.wait("reduce", reduction.done)  # what is held was allocated there
            reduction.finish()

    def finish_issued(self) -> None:
        """Finish reductions ahead of ``drain``, to free memory; called where ranks may differ in
        the moment, so only for reductions that issue nothing any more."""
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
        """Forget them; messages under way cannot be called back, and are waited for."""
        for reduction in self._reductions:
            if reduction.current is not None:
                reduction.current.wait()
        self._reductions.clear()

    def wait_on_host(self) -> None:
        """Make the host wait for gradients that are copied to it, before somebody reads them."""
        if self.offloads:
            self.lanes.synchronize()


def in_checkpoint() -> bool:
    """Whether what runs now will run once more in backward: torch's checkpoint is around it, the
    one that is not reentrant. It packs what autograd saves; others who do so recompute nothing."""
    return _packed_by(torch.utils.checkpoint._checkpoint_hook)


def in_recomputation() -> bool:
    """Whether such a checkpoint runs forward once more, for what autograd saved: no gradient will
    come to the outputs."""
    return _packed_by(torch.utils.checkpoint._recomputation_hook)


def _packed_by(hooks: type) -> bool:
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if found is None:
        return False
    pack = found[0]  # defined in the constructor of the hooks
    return pack.__module__ == hooks.__module__ and pack.__qualname__.startswith(hooks.__name__)
