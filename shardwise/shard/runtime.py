# SPDX-License-Identifier: Apache-2.0
"""Runtime: what the units of one model share: lanes, memory, their order, reductions under way.

    forward      unit 1 | unit 2 | unit 3        each prefetches the next one
    backward     unit 3 | unit 2 | unit 1        each prefetches the previous one
    reductions           [3]      [2]            while the next unit computes

A unit that comes unexpected is gathered when it comes; one that was prefetched and never came is
released at the end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise import comm
from shardwise.memory import Caching, Source, TracePool
from shardwise.precision.mxfp8_linear import Emulated, Workspace
from shardwise.shard.order import Member, Order
from shardwise.streams import Lanes


@dataclass(eq=False)
class _Reduction:
    """A gradient reduction under way: collectives still to be waited for, and what comes after."""

    collectives: Iterator[comm.Pending]
    finish: Callable[[], None]
    issued: bool  # whether nothing is left to issue: waiting is then all that is left
    current: comm.Pending | None = None
    done: Any = None
    held: list[Tensor] = field(default_factory=list)


class SharedLanes:
    """The lanes that several roots use together (``share_comm_ctx``), once one of them made
    them."""

    def __init__(self) -> None:
        self.lanes: Lanes | None = None


class Runtime:
    """One per root module, made at its first forward."""

    def __init__(
        self,
        device: torch.device,
        units: list[Member],
        *,
        lanes: Lanes | None = None,
        memory: str = "caching",
        unify: bool = False,
    ) -> None:
        self.lanes = lanes or Lanes(device, unify=unify)
        self.source: Source = TracePool() if memory == "trace" else Caching()
        self.max_reductions = 1  # a gradient buffer more in flight is a unit more of peak memory
        self.separate_reduce = False
        self._reductions: deque[_Reduction] = deque()
        self._launching: _Reduction | None = None
        self._reduce_axes: dict[comm.Axis, comm.Axis] = {}
        self._units = [weakref.ref(unit) for unit in units]
        self.order = Order(units)
        self.forward = 0  # the number of the root's last
        # Forwards whose graph the backward that runs now walks; 0 is what it runs itself.
        self.walked = {0}
        self._backward_task: int | None = None
        self.offloads = False  # whether gradients go to the host
        self._writers_awaited = False  # whether the user marked the optimizer's end
        # The products of all MXFP8 weights: each is decoded where the one before was.
        self.matmul = Emulated(workspace=Workspace())

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """The root's forward starts."""
        self.order.begin_forward()
        self.forward += 1
        for reference in self._units:
            unit = reference()
            if unit is not None:
                unit.tidy()  # all before the first gather: their memory is free for it
        if not self._writers_awaited:
            self.await_writers()
        self._writers_awaited = False

    def await_writers(self, event: Any = None) -> None:
        """Have gathers wait for what has written main weights so far: for all that compute was
        given, or only for ``event``, by which the user marks the optimizer's end. Later writes are
        noticed by ``Group.gather``."""
        if event is None:
            self.lanes.join("gather", "compute")
        else:
            self.lanes.wait("gather", event)
            self._writers_awaited = True
        for reference in self._units if self.lanes.asynchronous else ():
            unit = reference()
            for group in unit.groups if unit is not None else ():
                group.awaited = group.main.state

    def end_forward(self) -> None:
        """The root's forward is over."""
        for unit in self.order.ran():
            unit.end_forward()

    # ------------------------------------------------------------------ reductions

    def reduce_axis(self, axis: comm.Axis) -> comm.Axis:
        """The communicator for reductions: that of the gathers unless told to separate them."""
        return self._reduce_axes.get(axis, axis) if self.separate_reduce else axis

    def separate_reductions(self, axes: list[comm.Axis]) -> None:
        """Give reductions communicators of their own (collective: every rank calls it)."""
        self.separate_reduce = True
        for axis in axes:
            if axis not in self._reduce_axes:
                self._reduce_axes[axis] = axis.separate()

    def launch(
        self, collectives: Iterator[comm.Pending], number: int, finish: Callable[[], None]
    ) -> None:
        """Start a reduction of ``number`` collectives. On a device all of it is issued now; on the
        host the first collective is, and the rest follows when somebody waits."""
        lanes = self.lanes
        reduction = _Reduction(collectives, finish, issued=lanes.asynchronous or number <= 1)
        lanes.join("reduce", "compute")  # the gradients were packed there
        self._launching = reduction
        reduction.current = next(collectives, None)
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
        """Room for what comes, ahead of ``drain``: called where ranks may differ in the moment, so
        only for reductions that issue nothing any more."""
        if all(reduction.issued for reduction in self._reductions):
            self.drain(self.max_reductions - 1)

    def _complete(self, reduction: _Reduction) -> None:
        while reduction.current is not None:
            reduction.current.wait()
            reduction.current = next(reduction.collectives, None)

    # ------------------------------------------------------------------ backward

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running: a forward that comes now is a recomputation."""
        return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]

    def begin_backward(self) -> None:
        """The first unit of a backward: be called when autograd is done, once."""
        if self._backward_task is not None:
            return
        self._backward_task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        self.order.begin_backward()
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Join the lanes and check; what is missing is named, on every rank that misses it."""
        self._backward_task = None
        units = [unit for reference in reversed(self._units) if (unit := reference()) is not None]
        missing: list[str] = []
        for unit in self.order.unreached():
            unit.pass_by(ended=True)
        for unit in [*self.order.waiting(), *units]:
            missing += unit.end_backward()
        self.drain()
        kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        for unit in units:
            unit.release_unused(kept)
        self.walked = {0}
        self.settle()
        if isinstance(self.source, TracePool):
            self.source.step_done(graph_kept=kept)
        if missing:
            raise RuntimeError(
                f"no gradient reached {', '.join(missing)} in this backward. If these parameters "
                f"are "
                f"meant to be unused, pass unused_parameters='zeros' to fully_shard (or call "
                f"set_reduce_scatter_unused_params(True)); else freeze them with "
                f"requires_grad_(False)"
            )

    def settle_late(self) -> None:
        """A unit has completed. After backward nobody else will wait for its reduction."""
        if self._backward_task is None and not self.in_backward:
            self.drain()
            self.settle()

    def settle(self) -> None:
        """Before somebody reads gradients: the host waits for those that are copied to it."""
        if self.offloads:
            self.lanes.settle()

    def reset(self) -> None:
        """Forget an iteration that failed half way."""
        for reduction in self._reductions:
            if reduction.current is not None:
                reduction.current.wait()  # messages under way cannot be called back
        self._reductions.clear()
        self._backward_task = None
        self.walked = {0}
        self.order.begin_forward()
