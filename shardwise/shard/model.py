# SPDX-License-Identifier: Apache-2.0
"""Model: what the units of one root share. The order in which they ran, the lanes, and the backward
that runs.

    forward      unit 1 | unit 2 | unit 3        each prefetches the one that followed it last time
    backward     unit 3 | unit 2 | unit 1        each prefetches the one that was through before it
    reductions           [3]      [2]            while the next unit computes

A prefetch that was wrong is released when the root's forward, or the backward, ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.compat import at_end_of_backward, backward_id
from shardwise.core.memory import weakly
from shardwise.debugging import watch_if_asked
from shardwise.precision.policy import stores_nothing
from shardwise.shard.flow import Flow
from shardwise.shard.parameter import AnyLeaf
from shardwise.words import quoted

Unit: TypeAlias = Any  # that of ``unit.py``, which stands on this file
LEFT_ALONE = "_shardwise_left_alone"  # an attribute of parameters that each rank updates by itself


class Model(Flow):
    """Made at the first forward of a root module."""

    def __init__(self, units: Sequence[Unit], device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self._units = [ref(unit) for unit in units]
        self.in_forward = self.in_backward = False
        self._backward = -1  # the backward that the units have been told of
        # Whether this backward is for inputs alone (torch.autograd.grad): it reduces nothing.
        self.for_inputs = False
        self._entered: Unit | None = None  # the last unit that a forward entered
        self._left: Unit | None = None  # the last unit whose forward was over
        self._ran: list[ref[Unit]] = []  # the units of the last forward with gradients, as entered
        self._order: deque[ref[Unit]] = deque()  # of this backward: who has not been reduced
        self._writers_awaited = False  # whether the user marked the end of the optimizer's step

    @staticmethod
    def start(unit: Unit, root: nn.Module) -> Model:
        """The first forward of a root: look for problems, then give its units names, lanes and
        memory."""
        units: dict[Unit, str] = {}
        for name, module in root.named_modules():
            inner = vars(module).get("_shardwise_unit")
            if inner is not None:
                units.setdefault(inner, name)
        _check_first_forward(root, units)
        groups = [group for inner in units for group in inner.groups]
        device = groups[0].device if groups else torch.device("cpu")
        if device.type != "meta":  # else it is a plan's, and of this rank alone
            watch_if_asked(root)
        model = Model(list(units), device, lanes=unit._comm_ctx.lanes, **unit.options)
        unit._comm_ctx.lanes = model.lanes
        for inner, name in units.items():
            inner.put_away()  # what was gathered by hand, on other lanes
            inner.model = model
            inner.name = name or type(root).__name__.removeprefix("FSDP")
            for group in inner.groups:
                group.awaited = None
                group.gradients.pool = model.pool
                model.offloads = model.offloads or group.offload
                group.sync_initial_values()
        for inner, following in pairwise(units):  # until a forward has shown who follows
            inner.follower = ref(following)
        return model

    @property
    def units(self) -> list[Unit]:
        """The units that are still alive, outer before inner."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    all_states = units  # the name that torch's pipeline stages use

    @property
    def root(self) -> Unit | None:
        return self._units[0]()

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """The root's forward begins."""
        self._entered = self._left = None
        if torch.is_grad_enabled():
            self._ran.clear()
        self.in_forward = True
        for unit in self.units:
            unit.tidy()
        if not self._writers_awaited:
            self.await_writers()
        self._writers_awaited = False

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
                group.awaited = group.writes

    def entered(self, unit: Unit) -> None:
        """Prefetch for whoever ran next the last time. Only inside the root's forward, whose end
        drops what nobody used: no gather may be left to read main while an optimizer writes it."""
        if not self.in_forward:
            return
        guess, before, self._entered = unit.follower, self._entered, unit
        if before is not None and before is not unit:
            before.follower = ref(unit)
        if torch.is_grad_enabled():
            self._ran.append(ref(unit))
        self._prefetch(unit, guess, unit.forward_prefetch)

    def left(self, unit: Unit) -> None:
        """A forward of this unit is over."""
        if self.in_forward and torch.is_grad_enabled():
            if self._left is not None and self._left is not unit:
                unit.predecessor = ref(self._left)
            elif self._left is None:
                unit.predecessor = None
            self._left = unit

    def end_forward(self) -> None:
        """The root's forward is over. Units of several modules of which some ran are put away, and
        so is what was prefetched and not used."""
        if self._entered is not None:
            self._entered.follower = None
        self._entered = self._left = None  # units hold this object: no circle
        self.in_forward = False
        for unit in self.units:
            if unit.ran or unit.calls:  # a call that raised, and the model has caught it
                unit.calls.clear()
                unit.end_forward()
        self.drop_prefetched()

    @staticmethod
    def _prefetch(unit: Unit, guess: Any, wanted: Sequence[Any] | None) -> None:
        """Gather for the units that the user listed, else for the one that is expected."""
        for reference in [guess] if wanted is None else wanted:
            other = reference() if reference is not None else None
            if other is not None and other is not unit and other.model is unit.model:
                other.gather()

    def drop_prefetched(self) -> None:
        """Release weights that no module sees."""
        for unit in self.units:
            if not unit.shown and unit.releases_after_forward:
                for group in unit.groups:
                    group.release(self)

    # ------------------------------------------------------------------ backward

    @property
    def is_nested(self) -> bool:
        """Whether another backward runs now than the one that began (a reentrant checkpoint)."""
        return backward_id() != self._backward

    def begin_backward(self) -> None:
        """A gradient has come to a unit: the first one has autograd call ``end_backward``."""
        if not self.in_backward:
            self.in_backward, self._backward = True, backward_id()
            for unit in self.units:
                unit.backward = "before"
            self._order = deque(reversed(dict.fromkeys(self._ran)))
            groups = (group for unit in self.units for group in unit.groups)
            self.for_inputs = not any(group.gradients.comes for group in groups)
            at_end_of_backward(weakly(self.end_backward))

    def prefetch_before(self, unit: Unit) -> None:
        guess = unit.predecessor
        other = guess() if guess is not None else None
        if other is not None and not (other.backward == "before" and other.gather_in_backward):
            guess = None  # its part of this backward is over, or reads no weights
        self._prefetch(unit, guess, unit.backward_prefetch)

    def reduce_in_order(self, unit: Unit) -> None:
        """Reduce what is complete, each unit behind those that forward entered after it. Gradients
        that only some ranks have come at other times there: the order may not follow from them."""
        order = self._order
        if ref(unit) not in order:
            unit.reduce_groups()  # called outside of the root's forward, or once more
        while order and ((first := order[0]()) is None or first.reduce_groups()):
            order.popleft()

    def end_backward(self) -> None:
        """Autograd is through: complete what is left, in one order on every rank, and join."""
        self.in_backward = False
        left = [unit for reference in self._order if (unit := reference()) is not None]
        self._order.clear()
        for unit in dict.fromkeys([*left, *reversed(self.units)]):
            unit.advance(force=True)
            self._reduce_left(unit)
            if not unit.calls:  # else this backward ran inside a forward
                unit.put_away(unit.release_after_backward)
        self.end_reductions()

    def _reduce_left(self, unit: Unit) -> None:
        """Reduce what came too late (a second call, a use outside of forward), and what waits in a
        unit that only earlier microbatches used, if this microbatch is the last."""
        final = unit.sync and unit.last and unit.reduce_outer
        for group in unit.groups[: unit.turn] if not self.for_inputs else ():
            gradients = group.gradients
            if gradients.delayed:
                continue
            late = gradients.has_unpacked
            if late or (gradients.pending and final):
                gradients.begin(unit.sync, unit.last and unit.reduce_outer, unit.unused)
                gradients.reduce(self)

    def reduce_waiting(self) -> None:
        """Reduce to the main gradients what backwards without synchronisation left. A pipeline
        schedule calls this at the end of a step, when no backward runs."""
        for unit in reversed(self.units):
            for group in unit.groups:
                if group.gradients.pending:
                    group.gradients.begin(True, True, unit.unused)
                    group.gradients.reduce(self)
        self.end_reductions()

    def end_reductions(self) -> None:
        self.drain()
        self.wait_on_host()

    def reset(self) -> None:
        """Forget a step that an exception has left, with its gradients."""
        self.drop_reductions()
        self.in_forward = self.in_backward = False
        self._entered = self._left = None
        for unit in self.units:
            unit.reset()


def _check_first_forward(root: nn.Module, units: dict[Unit, str]) -> None:
    """Raise for problems of the whole model."""
    for unit, name in units.items():
        unit.tidy()
        missing = [f"{name}.{x}" if name else x for g in unit.groups for x in g.without_values]
        if missing:
            raise RuntimeError(
                f"FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {missing}. Call model.to_empty(device=...) "
                f"and initialise or load them before the first forward"
            )
    in_fp8 = [unit for unit in units if unit.precision.format is not None]
    stored = [how for unit in in_fp8 for how in unit.stored.values()]
    for problem in stores_nothing(in_fp8[0].precision.format, stored) if in_fp8 else ():
        raise ValueError(problem)
    plain = [
        name
        for name, p in root.named_parameters()
        if not isinstance(p, DTensor | AnyLeaf) and p.requires_grad and not hasattr(p, LEFT_ALONE)
    ]
    groups = [group for unit in units for group in unit.groups]
    if plain and any(group.ranks.mesh.size() > 1 for group in groups):
        raise RuntimeError(
            f"{quoted(plain)} is trained and in no unit: nothing would average its gradient over "
            f"the ranks. Wrap the module that holds it (the model itself, after its blocks), or "
            f"pass it in ignored_params of a unit"
        )
