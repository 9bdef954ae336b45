# SPDX-License-Identifier: Apache-2.0
"""Runtime: the units of one model, their order, the forward and the backward that run, and the flow
of their groups.

    forward      unit 1 | unit 2 | unit 3        each prefetches the next one
    backward     unit 3 | unit 2 | unit 1        each prefetches the previous one
    reductions           [3]      [2]            while the next unit computes

A unit that was not expected is gathered when it runs. A unit that was prefetched and did not run is
released at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import comm
from shardwise.memory import weakly
from shardwise.moe.delayed import drop_pending
from shardwise.precision import fp8_block
from shardwise.shard.call import Calls, is_for_inputs
from shardwise.shard.flow import Flow
from shardwise.shard.initial_values import same_over_tiles
from shardwise.shard.members import check_first_forward, refuse_ddp, stray_gradients
from shardwise.shard.order import Order
from shardwise.words import quoted

if TYPE_CHECKING:
    from shardwise.shard.unit import Unit


class Runtime(Flow):
    """The runtime of one root module, made at its first forward."""

    def __init__(
        self,
        device: torch.device,
        units: list[Unit],
        axes: Sequence[comm.Axis],
        **options: Any,
    ) -> None:
        super().__init__(device, **options)
        self._units = [weakref.ref(unit) for unit in units]
        self.axes = tuple(axes)  # of all units, each once
        self.order = Order(units)
        self.forward = 0  # the number of the root's last forward
        self.answered = 0  # the number of the last forward that a backward came to
        self.in_forward = False  # whether a forward of the root runs, or has raised
        self.for_inputs = False  # whether the running backward brings no gradient of a parameter
        # The forwards whose graph the running backward walks. 0 stands for recomputations.
        self.walked = {0}
        # Set from the first unit of a backward to its end: a reference to the callback that
        # autograd holds until the end. The reference is dead if the backward raised.
        self._ending: Callable[[], Any] | None = None
        self._writers_awaited = False  # whether the user marked the end of the optimizer's step

    @staticmethod
    def start(unit: Unit, root: nn.Module) -> None:
        """The first forward of a root: look for problems, then give its units names, lanes and
        memory."""
        units: dict[Unit, str] = {}
        for name, module in root.named_modules():
            inner = getattr(module, "_shardwise_unit", None)
            if inner is not None:
                units.setdefault(inner, name)
        for inner in units:
            inner.follow_moves()
            inner.members.refuse_replaced(inner)
        check_first_forward(root, list(units), list(units.values()))
        groups = [group for inner in units for group in inner.groups]
        same_over_tiles(groups)
        runtime = Runtime(
            groups[0].device if groups else torch.device("cpu"),
            list(units),
            list(dict.fromkeys(axis for group in groups for axis in group.ranks.axes)),
            lanes=unit._comm_ctx.lanes,
            **unit.options,
        )
        unit._comm_ctx.lanes = runtime.lanes
        for inner, name in units.items():
            inner.begin(runtime, name or type(root).__name__.removeprefix("FSDP"), inner is unit)

    @property
    def units(self) -> list[Unit]:
        """The units that are still alive, outer before inner."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    all_states = units  # the name that torch's pipeline stages use

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """The root's forward begins."""
        fp8_block.forget()  # weights may be written between forwards without a note
        refuse_ddp(self.units)
        self.order.begin_forward()
        self.forward += 1
        self.in_forward = True
        for unit in self.units:
            unit.tidy()  # all units before the first gather, which can use the memory that is freed
        if not self._writers_awaited:
            self.await_writers()
        self._writers_awaited = False

    def give_up(self, unit: Unit) -> None:
        """Forget a unit that belongs to two models: the other root takes it over."""
        self._units = [reference for reference in self._units if reference() is not unit]
        self.order.forget(unit)

    def await_writers(self, event: Any = None) -> None:
        """Make gathers wait for the writes to main weights so far: for all work that was issued to
        the compute lane, or only for ``event``, which the user recorded at the end of the
        optimizer's step. ``Group.gather`` notices later writes."""
        if event is None:
            self.lanes.join("gather", "compute")
        else:
            self.lanes.wait("gather", event)
            self._writers_awaited = True
        for unit in self.units if self.lanes.asynchronous else ():
            for group in unit.groups:
                group.awaited = group.main.state

    def is_unanswered(self, calls: Calls) -> bool:
        """Whether one of these calls was recorded after the last forward that a backward came
        to."""
        recorded = any(call.forward > self.answered for call in calls.awaited)
        return recorded and not self.has_failed()

    def end_forward(self) -> None:
        """The root's forward is over."""
        self.in_forward = False
        for unit in self.order.ran():
            unit.end_forward()

    # ------------------------------------------------------------------ backward

    @property
    def keeps_graph(self) -> bool:
        """Whether a backward runs that keeps its graph for another (``retain_graph=True``)."""
        kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        return self.in_backward and kept

    def begin_backward(self) -> None:
        """A unit enters backward. The first unit has autograd call ``_backward_ended``."""
        if self._ending is not None:
            if self._ending() is not None:
                return
            self.recover()  # the backward before this one raised
        self.order.begin_backward()
        leaves = (leaf for unit in self.units for leaf in unit.arrivals.leaves())
        self.for_inputs = is_for_inputs(leaves)
        ending = weakly(self._backward_ended)
        self._ending = weakref.ref(ending, weakly(self.hide_weights))
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(ending)

    def hide_weights(self, ending: Any = None) -> None:
        """Give the parameters at rest back to the modules. ``ending``: the reference to the ending
        of a backward, which has died; does nothing if that backward has ended."""
        if ending is None or ending is self._ending:
            for unit in self.units:
                unit.hide()

    def has_failed(self) -> bool:
        """Whether a backward began and never ended, because something raised inside it."""
        return self._ending is not None and not self.in_backward

    def _backward_ended(self) -> None:
        """Autograd calls this at the end of a backward, but not after a backward that raised."""
        try:
            self._end_backward()
        except BaseException:
            self.hide_weights()
            raise

    def _end_backward(self) -> None:
        """Complete all units, join the lanes, and raise for gradients that were not reduced."""
        # Until this function is done, count the backward as failed: hooks may raise.
        self._ending = lambda: None
        units = self.units[::-1]
        for unit in self.order.unreached():
            unit.pass_by(ended=True)
        for unit in [*self.order.waiting(), *units]:
            unit.end_backward()
        self.drain()
        self._reduce_left([] if self.for_inputs else units)
        unreduced = [
            f"'{name}' of unit '{unit.name}'"
            for unit in units
            if not unit.waits_for_delayed
            for name in unit.arrivals.unreduced()
        ]
        strays = [name for unit in units for name in stray_gradients(unit.originals)]
        self._conclude(units, graph_kept=self.keeps_graph)
        if unreduced:
            raise RuntimeError(
                f"gradients of {', '.join(unreduced)} were computed and not reduced in this "
                f"backward: another backward, which runs inside of it, may read weights that other "
                f"parts of the graph read too. A checkpoint needs use_reentrant=False; each module "
                f"that an autograd function calls needs a fully_shard for itself. Else please "
                f"report the order in which units run. To go on, call reset_iter_state() on the "
                f"root"
            )
        self._ending = None
        if strays:
            raise RuntimeError(
                f"gradients went to {', '.join(strays)} as before wrapping: forward uses a "
                f"reference from then (in a list, a closure, an attribute), which no optimizer "
                f"trains any more. Read the parameter from its module in forward, or share modules"
            )

    def _reduce_left(self, units: Sequence[Unit]) -> None:
        """Reduce the gradients that wait in units which only earlier microbatches used, if this
        microbatch is the last."""
        last = [unit for unit in units if unit.sync and unit.last and unit.reduce_outer]
        left = [unit for unit in last if unit.arrivals.waiting and not unit.waits_for_delayed]
        for unit in left:
            unit.expect_waiting()
            unit.reduce_waiting()
        self.drain()

    def reduce_waiting(self) -> None:
        """Reduce to the main gradients what backwards without gradient sync left. A pipeline
        schedule calls this at the end of a step, when no backward runs."""
        units = self.units[::-1]
        for unit in units:
            unit.expect_waiting()
        for unit in units:
            unit.reduce_waiting()
        self.drain()
        self._conclude(units, graph_kept=False)

    def _conclude(self, units: Sequence[Unit], *, graph_kept: bool) -> None:
        """No backward runs any more: release weights, and let the host read gradients."""
        for unit in units:
            unit.release_unused(graph_kept)
        self.answered = max(self.answered, *self.walked)
        self.walked = {0}
        self.wait_on_host()

    def finish_late(self) -> None:
        """A unit has completed. If backward is over already, wait for its reduction."""
        if self._ending is None and not self.in_backward:
            self.drain()
            self.wait_on_host()

    # ------------------------------------------------------------------ after an exception

    def recover(self) -> None:
        """Go on after a backward that raised. Raises if the user has not dropped all gradients,
        which would be lost."""
        kept = [name for unit in self.units for name in unit.arrivals.kept()]
        if kept:
            raise RuntimeError(
                f"the last backward raised an exception and left a part of its gradients "
                f"({quoted(kept)}). Drop them before the next forward: call reset_iter_state() on "
                f"the root module, or zero_grad()"
            )
        self.reset()

    def reset(self) -> None:
        """Forget an iteration that failed half way, with its gradients."""
        self.drop_reductions()
        self._ending = None
        self.walked, self.in_forward = {0}, False
        self.order.begin_forward()
        for unit in self.units:
            unit.reset()
        drop_pending(p for unit in self.units for group in unit.groups for p in group.sharded)
