# SPDX-License-Identifier: Apache-2.0
"""The whole weights of one unit: gathered, put in its modules' hands, taken back, released.

at rest   the modules hold DTensors over the main weight
shown     the modules hold whole parameters, views of gathered memory
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import comm
from shardwise.precision.fp8_tensor import Reads
from shardwise.shard.call import look_into
from shardwise.shard.group import Group, storage_of
from shardwise.shard.runtime import Runtime
from shardwise.shard.whole_parameter import LOST, Whole

# (a module's parameter dictionary, name in it, group, index): the dictionary, not the module, so
# that nothing here keeps a model alive
Place = tuple[dict[str, Any], str, int, int]


class Weights:
    """The groups of a unit and the places of their parameters in its modules."""

    def __init__(
        self, groups: Sequence[Group], places: Sequence[Place], *, staged: bool, last_first: bool
    ) -> None:
        """``staged``: modules wait for their own weights. ``last_first``: forward reads the last
        group first, so the groups are gathered in that order."""
        self.groups, self.places = list(groups), list(places)
        self._staged, self._last_first = staged, last_first
        self.shown = False
        self._here = [False] * len(groups)  # by group: whether the modules hold its whole weights
        self._by_group: list[list[tuple[dict[str, Any], str, int]]] = [[] for _ in groups]
        for parameters, name, number, index in places:
            self._by_group[number].append((parameters, name, index))

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The versions of the main weights."""
        return [group.main.state for group in self.groups]

    def gather(self, runtime: Runtime, reads: Reads) -> None:
        """Begin to bring what forward or backward reads."""
        for group in reversed(self.groups) if self._last_first else self.groups:
            group.gather(runtime, reads)

    def wait(self, runtime: Runtime) -> None:
        """Wait for the gathers that were begun."""
        for group in self.groups:
            group.wait(runtime)

    def expose(self, runtime: Runtime, reads: Reads, *, by_and_by: bool = False) -> None:
        """Gather, wait, and put the whole weights in the modules' hands. ``by_and_by``: where
        modules wait for their own weights, only what has arrived."""
        self.gather(runtime, reads)
        if not (self._staged and by_and_by):
            self.wait(runtime)
        self.show(runtime)

    def show(self, runtime: Runtime) -> None:
        """Put the weights in the modules' hands; where these wait for their own, what is here."""
        self.shown = True
        groups = enumerate(self.groups)
        self.show_groups(runtime, [n for n, one in groups if not (self._staged and one.pending)])

    def show_groups(self, runtime: Runtime, numbers: Iterable[int]) -> None:
        """Put the whole weights of these groups in the modules' hands, once they are there."""
        for number in numbers:
            if not self._here[number]:
                group = self.groups[number]
                group.wait(runtime)
                for parameters, name, index in self._by_group[number]:
                    parameters[name] = group.unsharded[index]
                self._here[number] = True

    def hide(self, force: bool = False) -> None:
        """The modules hold the parameters at rest again."""
        if self.shown or force:
            for parameters, name, number, index in self.places:
                parameters[name] = self.groups[number].sharded[index]
            self.shown, self._here = False, [False] * len(self.groups)

    def assign(self) -> None:
        """Write tensors that stand in the places of the parameters at rest into these."""
        for parameters, name, number, index in self.places:
            held, ours = parameters.get(name), self.groups[number].sharded[index]
            if held is not None and held is not ours:
                parameters[name] = ours
                self.groups[number].assign(index, held)

    def lost_writes(self) -> RuntimeError | None:
        """The error for whole weights that somebody wrote to; asked before their release."""
        names = [name for group in self.groups for name in group.lost_writes()]
        return RuntimeError(f"{', '.join(names)}: {LOST}") if names else None

    def lent_to(self, output: Any) -> RuntimeError | None:
        """The error for an output of forward that lies in weights which are released next."""
        coming = [group for group in self.groups if group.comes_and_goes]
        memory = {storage_of(block.tensor) for group in coming for block in group.blocks}
        for found in look_into(output, set()) if memory else ():
            values = found.memory if isinstance(found, Whole) else found
            stored = isinstance(values, Tensor) and torch._C._has_storage(values)  # type: ignore[attr-defined]
            if stored and storage_of(values) in memory:
                return RuntimeError(
                    f"the forward of {coming[0].label} returns a tensor of shape "
                    f"{list(found.shape)} that lies in the memory of its weights, which is "
                    f"released now: return a clone, or wrap with reshard_after_forward=False"
                )
        return None

    def release(self, runtime: Runtime, kept_axis: comm.Axis | None = None) -> None:
        """Give the memory back; 1/k of it stays on each of the k ranks of ``kept_axis``."""
        for group in self.groups:
            if kept_axis is not None:
                group.keep_part(runtime, kept_axis)
            group.release(runtime)
