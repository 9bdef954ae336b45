# SPDX-License-Identifier: Apache-2.0
"""One training step in bytes: units gather, release and reduce in the order of the real ones.

    forward     root( 1( ) 2( ) 3( ) )        who is prefetched, and whose turn it is to reduce, is
    backward    root 3 2 1, reduces 3 2 1 root    asked of shard/order.py itself
    step        root 1 2 3                    gathers, where the optimizer's step brings weights

Each event moves bytes in a ledger of its own and counts its collectives; nothing is computed, no
memory taken. What a step does depends on the units alone, never on the number of ranks, so 4096
ranks cost as much as two. Microbatches between the first and the last are all alike: one of them
is played and counted as often as it comes.

Assumed: units run in the order in which they are registered, each once; every trainable parameter
gets a gradient. Where a kernel writes a weight gradient into the buffer itself, it opens it early:
before the reduction of the unit before has made room.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.comm import Call
from shardwise.memory import Ledger
from shardwise.precision.mxfp8_tensor import Reads
from shardwise.report.footprint import Footprint
from shardwise.shard.order import Order

Moment = Reads | Literal["step"]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What one step held and sent."""

    rest: dict[str, int]
    loaded: dict[str, int]  # after the last backward, gradients included
    peak: dict[str, int]
    peak_total: int
    calls: Counter[Call]
    phases: dict[Moment, Counter[Call]]  # the same, apart for forward, backward and step
    timeline: tuple[tuple[str, str, int], ...]  # (what happens, kind, bytes more or less)


class Step:
    """The shared part of a simulated model: its ledger, its order, reductions under way."""

    def __init__(
        self, *, asynchronous: bool, max_reductions: int = 1, gathers: bool = False
    ) -> None:
        self.ledger = Ledger()
        self.ledger.watchers.append(self._note)
        self.gathers = gathers  # whether the optimizer's step brings the weights it has written
        self.phases: dict[Moment, Counter[Call]] = {"forward": Counter(), "backward": Counter()}
        if gathers:
            self.phases["step"] = Counter()
        self.phase: Moment = "forward"
        self.weight = 1  # how many microbatches the one being played stands for
        self.asynchronous, self.max_reductions = asynchronous, max_reductions
        self.doing = "at rest"
        self.timeline: list[tuple[str, str, int]] = []
        self._flying: deque[tuple[Callable[[], None], Callable[[], None], bool]] = deque()
        self.order: Order[SimulatedUnit]

    def send(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self.phases[self.phase][call] += self.weight

    def launch(self, complete: Callable[[], None], number: int, finish: Callable[[], None]) -> None:
        """On a device a reduction is issued whole, on the host its end comes when drained."""
        if self.asynchronous:
            complete()
            complete = _nothing
        self._flying.append((complete, finish, self.asynchronous or number <= 1))

    def finish_issued(self) -> None:
        """As the runtime's."""
        if all(issued for _, _, issued in self._flying):
            self.drain(self.max_reductions - 1)

    def drain(self, keep: int = 0) -> None:
        while len(self._flying) > keep:
            complete, finish, _ = self._flying.popleft()
            complete()
            finish()

    def _note(self, kind: str, nbytes: int) -> None:
        if nbytes:
            self.timeline.append((self.doing, kind, nbytes))


class Held:
    """A buffer that comes and goes."""

    def __init__(self, step: Step, kind: str, nbytes: int) -> None:
        self._step, self._kind, self._nbytes, self.live = step, kind, nbytes, False

    def acquire(self) -> None:
        if not self.live:
            self.live = True
            self._step.ledger.add(self._kind, self._nbytes)

    def release(self) -> None:
        if self.live:
            self.live = False
            self._step.ledger.add(self._kind, -self._nbytes)


class SimulatedGroup:
    """The buffers of one group through a step; see ``shard/group.py`` and ``shard/gradient.py``."""

    def __init__(self, step: Step, size: Footprint) -> None:
        self.step, self.size = step, size
        self.planes = [Held(step, "compute", nbytes) for nbytes in size.planes]
        self.staging = Held(step, "staging", size.staging)
        self.kept = Held(step, "compute", size.kept)
        self.packed = Held(step, "grad_transient", size.packed)
        self.partial = Held(step, "grad_accumulator", size.partial)
        self.inner = Held(step, "grad_accumulator", size.inner)
        self.grad = Held(step, "grad", size.grad)
        step.ledger.add("main", size.main)
        step.ledger.add("compute", size.compute)
        for plane in self.planes if size.persistent else ():
            plane.acquire()
        # Between steps an optimizer writes what is trained: frozen weights are still as gathered,
        # and so is what the step before has brought.
        fresh = not size.trainable or step.gathers
        self.refreshed = fresh
        early = size.reads["forward"] if size.trainable else range(len(self.planes))
        self.filled = [
            plane.live and fresh and number in early for number, plane in enumerate(self.planes)
        ]
        self.published = False  # whether the parameters at rest show gradients
        self.in_flight = False

    # ------------------------------------------------------------------ weights

    def gather(self, phase: Reads) -> None:
        again = self.size.reads_again and self.step.phase == "backward"
        reads = range(len(self.planes)) if again else self.size.reads[phase]
        missing = [number for number in reads if not self.filled[number]]
        for number in missing:
            self.planes[number].acquire()
            self.filled[number] = True
        kept = self.size.reads["backward"] if self.kept.live else ()
        if kept and set(kept) <= set(missing):
            self.step.send(self.size.regather)
            missing = [number for number in missing if number not in kept]
        if not missing:
            return
        if self.size.staging:
            self.staging.acquire()
        if not self.refreshed:
            self.step.send(self.size.refresh)
            self.refreshed = True
        for number in [0] if self.size.staging else missing:
            self.step.send(self.size.gather[number])
        if self.size.staging:
            self.staging.release()

    def release(self, keep: bool = False) -> None:
        if self.size.persistent or self.size.aliased:
            return
        if keep and self.size.kept:
            self.gather("backward")  # the plane that backward reads is not always here yet
            self.kept.acquire()
        for number, plane in enumerate(self.planes):
            plane.release()
            self.filled[number] = False

    def settle(self) -> None:
        """The optimizer has written to it, and brings what forward will read."""
        if self.size.trainable:
            self.refreshed, self.filled = False, [False] * len(self.planes)
            self.gather("forward")

    # ------------------------------------------------------------------ gradients

    def tidy(self) -> None:
        if not self.published:
            self.grad.release()

    def open(self, last: bool) -> None:
        """A kernel asks for the memory of a gradient."""
        keep = all(self.size.waits) and not last
        self._target(keep, last or not any(self.size.waits)).acquire()

    def reduce(self, last: bool) -> None:
        step, size = self.step, self.size
        step.drain(0 if self.in_flight else step.max_reductions - 1)
        keep = all(size.waits) and not last
        last = last or not any(size.waits)
        target = self._target(keep, last)
        target.acquire()
        if keep:
            return
        if target is self.partial and size.recast:
            self.packed.acquire()
            self.partial.release()
            target = self.packed
        if last:
            self.grad.acquire()
        self.in_flight = True
        step.send(size.reduce[last])
        # On a device a backend receives in memory of its own.
        sizes = size.packing[last] if step.asynchronous else size.room[last]
        rooms = [Held(step, "receive", room) for room in sizes]

        def complete() -> None:
            """What is received is added up, then the next collective begins."""
            for position, room in enumerate(rooms):
                room.release()
                for after in rooms[position + 1 : position + 2]:
                    after.acquire()
            if not last:
                self.inner.acquire()

        def finish() -> None:
            self.in_flight = False
            if target is not self.grad:
                target.release()
            if last:
                self.inner.release()
                self.published = True

        for room in rooms[:1]:
            room.acquire()
        step.launch(complete, len(size.reduce[last]), finish)

    def _target(self, keep: bool, last: bool) -> Held:
        if keep or self.partial.live:
            return self.partial
        unread = not self.published or self.size.alone
        if self.size.in_place and last and not self.inner.live and unread:
            return self.grad
        return self.packed


class SimulatedUnit:
    """A unit as ``shard/order.py`` knows it, with the units inside it."""

    def __init__(
        self,
        name: str,
        step: Step,
        sizes: Sequence[Footprint],
        *,
        inner: Sequence[SimulatedUnit] = (),
        releases_after_forward: bool,
        completes_first: bool,
        trains_last: int,
        reached: bool = True,
    ) -> None:
        self.name, self.step, self.inner = name, step, list(inner)
        self.groups = [SimulatedGroup(step, size) for size in sizes]
        self._releases = releases_after_forward
        self._completes_first = completes_first  # before the backward of the units inside it
        self._trains_last = trains_last  # gradients that come after that
        self._reached = reached  # whether gradients flow back into it at all
        self._expected, self._in_backward, self._last = 0, False, True

    def tree(self) -> list[SimulatedUnit]:
        """This unit and all inside it, in order of entry."""
        return [self, *(unit for child in self.inner for unit in child.tree())]

    # ------------------------------------------------------------------ a pass

    def forward(self) -> None:
        self.step.doing = f"forward {self.name}"
        expected = self.step.order.entered(self)
        for group in self.groups:
            group.gather("forward")
        for group in self.groups:
            group.kept.release()
        if expected is not None and expected is not self:
            expected.prefetch("forward")
        for child in self.inner:
            child.forward()
        self.step.doing = f"forward {self.name}"
        self.step.order.left(self)
        if self._releases:
            for group in self.groups:
                group.release(keep=True)
        self._expected += self._reached

    def backward(self, last: bool) -> None:
        if not self.expects_backward:
            return
        self.step.doing = f"backward {self.name}"
        self._expected -= 1
        self._in_backward, self._last = True, last
        for group in self.groups:
            group.gather("backward")
        for group in self.groups:
            group.kept.release()
        after = self.step.order.after(self)
        if after is not None and after is not self and after.gathers_in_backward:
            after.prefetch("backward")
        if self._completes_first:
            self._complete()
        for child in reversed(self.inner):
            child.backward(last)
        if not self._completes_first:
            self.step.doing = f"backward {self.name}"
            self._complete()

    def _complete(self) -> None:
        for group in self.groups:
            if group.size.opens_early:
                group.open(self._last)
        if self._trains_last > 1:
            self.step.finish_issued()  # before the last gradient
        for group in self.groups:
            group.release()
        self._in_backward = False
        if any(group.size.trainable for group in self.groups):
            self.step.order.ready(self)

    # ------------------------------------------------------------------ what the order asks

    @property
    def expects_backward(self) -> bool:
        return self._expected > 0

    @property
    def gathers_in_backward(self) -> bool:
        return self._expected > 0

    @property
    def holds_turn(self) -> bool:
        return self._in_backward

    def prefetch(self, reads: Reads) -> None:
        for group in self.groups:
            group.gather(reads)

    def tidy(self) -> None:
        for group in self.groups:
            group.tidy()

    def reduce(self) -> None:
        for group in self.groups:
            if group.size.trainable:
                group.reduce(self._last)

    def release_unused(self, graph_kept: bool = False) -> None:
        """After backward: what forward left for one that never came, through frozen layers."""
        for group in self.groups:
            group.release()


def simulate(root: SimulatedUnit, microbatches: int) -> Simulated:
    """One step of ``root`` from rest."""
    step, units = root.step, root.tree()
    step.order = Order(list(units))
    rest = step.ledger.snapshot()
    # The steps before this one have made it as large as it gets; it is never given back.
    decoded = [group.size.workspace for unit in units for group in unit.groups]
    step.ledger.add("workspace", max(decoded, default=0))
    step.ledger.reset_peak()
    step.timeline.clear()
    played = min(microbatches, 3)
    for number in range(played):
        step.weight = microbatches - 2 if 0 < number < played - 1 else 1
        step.phase = "forward"
        step.order.begin_forward()
        for unit in units:
            unit.tidy()
        root.forward()
        step.phase = "backward"
        step.order.begin_backward()
        root.backward(last=number == played - 1)
        step.drain()
        for unit in units:
            unit.release_unused()
    loaded = step.ledger.snapshot()
    if step.gathers:
        step.phase, step.weight, step.doing = "step", 1, "step"
        for unit in units:
            for group in unit.groups:
                group.settle()
    return Simulated(
        rest=rest,
        loaded=loaded,
        peak={kind: nbytes for kind, nbytes in sorted(step.ledger.peak.items()) if nbytes},
        peak_total=step.ledger.peak_total,
        calls=sum(step.phases.values(), Counter()),
        phases=step.phases,
        timeline=tuple(step.timeline),
    )


def _nothing() -> None:
    """What is left of a reduction that was issued whole."""
