# SPDX-License-Identifier: Apache-2.0
"""The order of units: which unit runs next, and which may reduce next. No communication.

    forward     root( 1( ) 2( ) 3( ) )      entries: root 1 2 3       exits: 1 2 3 root
    backward    enters root 3 2 1           the exits, backwards: each prefetches the one after it
                reduces 3 2 1 root          the entries, backwards: a parent after its children

Collectives are matched by their order, so every rank must issue them in the same order. Gradients
may be complete in another order on one rank, where a parameter was not used. So units reduce in
turn: a unit that is ready waits until the units before it have reduced. If the backward of a rank
skips units, the rank gathers and reduces for them at the place where other ranks enter them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from shardwise.shard.unit import Unit


class Order:
    """The order in which the units of one model ran, and will run."""

    def __init__(self, units: list[Unit]) -> None:
        self._expected = [ref(unit) for unit in units]  # entries of the last forward
        self._entries: list[ref[Unit]] = []
        self._exits: list[ref[Unit]] = []
        self._arrivals: list[ref[Unit]] = []  # the units in the order in which backward enters them
        self._following: dict[ref[Unit], ref[Unit]] = {}  # the next arrival after each
        self._turns: deque[ref[Unit]] = deque()  # the units that are to reduce, in order
        self._ready: list[Unit] = []  # units whose gradients are complete, before their turn

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """Begin to record a forward; the next one is expected to run in the same order."""
        if self._entries:
            self._expected = self._entries
        self._entries, self._exits = [], []

    def entered(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` runs now, and return the unit that is expected next."""
        position = len(self._entries)
        self._entries.append(ref(unit))
        expected = self._expected
        if position + 1 < len(expected) and expected[position]() is unit:
            return expected[position + 1]()
        return None

    def left(self, unit: Unit) -> None:
        """Note that a forward of ``unit`` is over."""
        self._exits.append(ref(unit))

    def ran(self) -> list[Unit]:
        """The units of this forward, in order of entry."""
        return _alive(self._entries)

    def forget(self, unit: Unit) -> None:
        """Drop a unit that another model has taken over."""
        for listed in (self._expected, self._entries, self._exits):
            listed[:] = [reference for reference in listed if reference() is not unit]

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> None:
        """Expect a backward of the last forward."""
        self._arrivals = list(dict.fromkeys(self._exits[::-1]))  # each at its first place
        self._following = dict(pairwise(self._arrivals))
        self._turns, self._ready = deque(dict.fromkeys(self._entries)), []
        self._turns.reverse()

    def after(self, unit: Unit) -> Unit | None:
        """The unit that backward is expected to enter after ``unit``."""
        following = self._following.get(ref(unit))
        return None if following is None else following()

    def before(self, unit: Unit) -> list[Unit]:
        """The units that backward should have entered before ``unit``."""
        arrivals = _alive(self._arrivals)
        return arrivals[: arrivals.index(unit)] if unit in arrivals else []

    def ready(self, unit: Unit) -> None:
        """The gradients of ``unit`` are complete: it reduces now, or when its turn comes."""
        if ref(unit) not in self._turns:  # not of this forward, or its turn is over
            unit.reduce()
        elif unit not in self._ready:  # else an earlier call completed the unit
            self._ready.append(unit)
            self._advance()

    def waiting(self) -> list[Unit]:
        """The units that have not had their turn, in the order in which they reduce."""
        return _alive(self._turns)

    def unreached(self) -> list[Unit]:
        """The same units in the order in which backward would have entered them."""
        waiting = self.waiting()
        return [unit for unit in _alive(self._arrivals) if unit in waiting]

    def _advance(self) -> None:
        """Reduce the units that are ready and have their turn. Stops at the last unit that is
        ready: the units after it may still enter backward."""
        while self._ready:
            unit = self._turns[0]()
            if unit in self._ready:
                self._ready.remove(unit)
                unit.reduce()
            elif unit is not None and unit.holds_turn:
                return
            self._turns.popleft()


def _alive(references: Iterable[ref[Unit]]) -> list[Unit]:
    return [unit for reference in references if (unit := reference()) is not None]
