# SPDX-License-Identifier: Apache-2.0
"""Arrivals: the gradients that one unit waits for in a backward.

missing   expected in this backward, and not here yet
delayed   of the missing ones: come later, perhaps after this backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

import numpy
from torch import Tensor

from shardwise import comm
from shardwise.shard.group import Group

Key = tuple[int, int]  # (group, index in it)


class Listener(Protocol):
    """A unit, as far as this is concerned."""

    def arrived(self, number: int, index: int) -> None: ...


class Arrivals:
    """Which gradients have come, and what of them is left when backward ends."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._sizes = {
            (number, index): item.numel
            for number, group in enumerate(groups)
            for index, item in enumerate(group.items)
        }
        total = sum(self._sizes.values())
        # Where no more than this is missing, the last gradient may be next: a matrix, and biases.
        self.one_more = max(self._sizes.values(), default=0) + total // 64
        self.missing: set[Key] = set()
        self.delayed: set[Key] = set()
        self.elements = 0  # of the missing ones
        self._listeners: dict[Key, Any] = {}

    def listen(self, told: ref[Listener]) -> None:
        """Have ``told`` hear when autograd has brought the gradient of a trainable parameter;
        follows ``requires_grad_``."""
        for number, group in enumerate(self._groups):
            for index, leaf in enumerate(group.unsharded):
                if leaf.requires_grad and (number, index) not in self._listeners:
                    hook = partial(_tell, told, number, index)
                    self._listeners[number, index] = leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ one backward

    def expect(self, comes: Callable[[Tensor], bool]) -> None:
        """A backward begins; ``comes``: which gradients to wait for, of trainable parameters."""
        self.missing = {
            (number, index)
            for number, group in enumerate(self._groups)
            for index, leaf in enumerate(group.unsharded)
            if leaf.requires_grad and comes(leaf)
        }
        self.elements = sum(map(self._sizes.__getitem__, self.missing))

    def arrive(self, key: Key) -> bool:
        """Note a gradient; False where it had come before, or is not waited for."""
        if key not in self.missing:
            return False
        self.missing.remove(key)
        self.elements -= self._sizes[key]
        if self.delayed:
            self.delayed.discard(key)
        return True

    @property
    def only_delayed(self) -> bool:
        """Whether gradients are missing, and all of these are delayed."""
        return 0 < len(self.missing) == len(self.delayed)

    def forget(self) -> None:
        self.missing, self.delayed, self.elements = set(), set(), 0

    # ------------------------------------------------------------------ at its end

    @property
    def trainable(self) -> bool:
        """Whether there is anything to reduce."""
        return any(group.trainable for group in self._groups)

    def leaves(self) -> list[Tensor]:
        """The trainable parameters, as forward sees them."""
        return [leaf for group in self._groups for leaf in group.unsharded if leaf.requires_grad]

    def names(self) -> list[str]:
        """The names of all parameters."""
        return [item.name for group in self._groups for item in group.items]

    def absent(self) -> comm.Facts:
        """For each parameter, whether the reduction of this backward had no gradient of it. False
        where there was no reduction: frozen, not reached, or delayed ones are to come."""
        found = numpy.zeros(len(self._sizes), bool)
        first = 0
        for group in self._groups:
            came = group.gradients.came
            if False in came:
                trained = [leaf.requires_grad for leaf in group.unsharded]
                found[first : first + len(came)] = ~numpy.array(came) & numpy.array(trained)
            first += len(group.items)
        return found

    def unreduced(self) -> list[str]:
        """Parameters whose gradient came and was not reduced."""
        return self._chosen(lambda group: group.gradients.unreduced())

    def kept(self) -> list[str]:
        """Parameters with a gradient, or whose earlier microbatches wait to be reduced."""
        return self._chosen(lambda group: group.gradients.kept())

    def _chosen(self, chosen: Callable[[Group], list[int]]) -> list[str]:
        return [group.items[index].name for group in self._groups for index in chosen(group)]


def _tell(told: ref[Listener], number: int, index: int, leaf: Tensor) -> None:
    owner = told()
    if owner is not None:
        owner.arrived(number, index)
