# SPDX-License-Identifier: Apache-2.0
"""The order of units: who comes next, and whose turn it is to reduce. No communication here.

    forward     root( 1( ) 2( ) 3( ) )      entries: root 1 2 3       exits: 1 2 3 root
    backward    enters root 3 2 1           the exits, backwards: each prefetches the one after it
                reduces 3 2 1 root          the entries, backwards: a parent after its children

Collectives are matched by their order, so every rank must issue them in the same one. Gradients may
be complete in another order on one rank, where a parameter was not used; so units reduce in turn:
one that is ready waits until those before it have reduced. A rank whose backward goes past units
gathers and reduces for them then, as the others do that enter them.
"""

from __future__ import annotations

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
        self._arrivals: list[ref[Unit]] = []
        self._following: dict[ref[Unit], ref[Unit]] = {}  # which of them comes after each
        self._turns: list[ref[Unit]] = []
        self._turn = 0
        self._ready: list[Unit] = []

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """Begin to record a forward; the next one is expected to run in the same order."""
        if self._entries:
            self._expected = self._entries
        self._entries, self._exits = [], []

    def entered(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` runs now, and say which one is expected next."""
        position = len(self._entries)
        self._entries.append(ref(unit))
        expected = self._expected
        if position + 1 < len(expected) and expected[position]() is unit:
            return expected[position + 1]()
        return None

    def left(self, unit: Unit) -> None:
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
        self._arrivals = list(dict.fromkeys(self._exits[::-1]))  # each where it comes first
        self._following = dict(pairwise(self._arrivals))
        self._turns = list(dict.fromkeys(self._entries))[::-1]
        self._turn, self._ready = 0, []

    def after(self, unit: Unit) -> Unit | None:
        """Which unit backward is expected to enter after ``unit``."""
        following = self._following.get(ref(unit))
        return None if following is None else following()

    def before(self, unit: Unit) -> list[Unit]:
        """Which units backward should have entered before ``unit``."""
        arrivals = _alive(self._arrivals)
        return arrivals[: arrivals.index(unit)] if unit in arrivals else []

    def ready(self, unit: Unit) -> None:
        """The gradients of ``unit`` are complete: it reduces now, or when its turn comes."""
        if ref(unit) not in self._turns[self._turn :]:  # not of this forward, or passed over
            unit.reduce()
        elif unit not in self._ready:  # else an earlier call completed it: no gradient comes to it
            self._ready.append(unit)
            self._advance()

    def waiting(self) -> list[Unit]:
        """Units whose turn has not come, in turn."""
        return _alive(self._turns[self._turn :])

    def unreached(self) -> list[Unit]:
        """The same, as backward would have entered them."""
        waiting = self.waiting()
        return [unit for unit in _alive(self._arrivals) if unit in waiting]

    def _advance(self) -> None:
        # Not past the last that is ready: who has not entered backward by then may still do so.
        while self._ready:
            unit = self._turns[self._turn]()
            if unit is not None:
                if unit in self._ready:
                    self._ready.remove(unit)
                    unit.reduce()
                elif unit.holds_turn:
                    return
            self._turn += 1


def _alive(references: list[ref[Unit]]) -> list[Unit]:
    return [unit for reference in references if (unit := reference()) is not None]
