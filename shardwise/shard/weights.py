# SPDX-License-Identifier: Apache-2.0
"""The whole weights of one unit: gathered, put in its modules' hands, taken back, released.

at rest   the modules hold DTensors over the main weight
shown     the modules hold whole parameters, views of gathered memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise import comm
from shardwise.precision.fp8_tensor import Reads
from shardwise.shard.group import Group
from shardwise.shard.runtime import Runtime

# (a module's parameter dictionary, name in it, group, index): the dictionary, not the module, so
# that nothing here keeps a model alive
Place = tuple[dict[str, Any], str, int, int]


class Weights:
    """The groups of a unit and the places of their parameters in its modules."""

    def __init__(self, groups: Sequence[Group], places: Sequence[Place]) -> None:
        self.groups, self.places = list(groups), list(places)
        self.shown = False

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The versions of the main weights."""
        return [group.main.state for group in self.groups]

    def gather(self, runtime: Runtime, reads: Reads) -> None:
        """Begin to bring what forward or backward reads."""
        for group in self.groups:
            group.gather(runtime, reads)

    def wait(self, runtime: Runtime) -> None:
        """Wait for the gathers that were begun."""
        for group in self.groups:
            group.wait(runtime)

    def expose(self, runtime: Runtime, reads: Reads, *, by_and_by: bool = False) -> None:
        """Gather, wait, and put the whole weights in the modules' hands. ``by_and_by``: where
        modules wait for their own weights, only what has arrived."""
        self.gather(runtime, reads)
        self.wait(runtime)
        if not self.shown:
            self.show(runtime)

    def show(self, runtime: Runtime) -> None:
        """Put the weights that have arrived in the modules' hands."""
        for parameters, name, number, index in self.places:
            parameters[name] = self.groups[number].unsharded[index]
        self.shown = True

    def hide(self, force: bool = False) -> None:
        """The modules hold the parameters at rest again."""
        if self.shown or force:
            for parameters, name, number, index in self.places:
                parameters[name] = self.groups[number].sharded[index]
            self.shown = False

    def assign(self) -> None:
        """Write tensors that stand in the places of the parameters at rest into these."""
        for parameters, name, number, index in self.places:
            held, ours = parameters.get(name), self.groups[number].sharded[index]
            if held is not None and held is not ours:
                parameters[name] = ours
                self.groups[number].assign(index, held)

    def release(self, runtime: Runtime, kept_axis: comm.Axis | None = None) -> None:
        """Give the memory back; 1/k of it stays on each of the k ranks of ``kept_axis``."""
        for group in self.groups:
            if kept_axis is not None:
                group.keep_part(runtime, kept_axis)
            group.release(runtime)
