# SPDX-License-Identifier: Apache-2.0
"""Arrivals: the gradients that one unit waits for in a backward.

missing   expected in this backward, and not here yet
delayed   of the missing ones: come later, perhaps after this backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise import comm
from shardwise.memory import weakly
from shardwise.shard.group import Group

Key = tuple[int, int]  # (group, index in it)
_REQUIRES_GRAD = attrgetter("requires_grad")


class Arrivals:
    """Which gradients have come, and what of them is left when backward ends."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._sizes = {
            (number, index): item.numel
            for number, group in enumerate(groups)
            for index, item in enumerate(group.items)
        }
        self._leaves = {key: groups[key[0]].unsharded[key[1]] for key in self._sizes}
        self._flags: list[bool] = []  # which of them were trainable when last looked at
        self._trainable: set[Key] = set()
        self.trained: comm.Facts = numpy.zeros(len(self._leaves), bool)  # the same, by position
        total = sum(self._sizes.values())
        # Where no more than this is missing, the last gradient may be next: a matrix, and biases.
        self.one_more = max(self._sizes.values(), default=0) + total // 64
        self.missing: set[Key] = set()
        self.delayed: set[Key] = set()
        self.elements = 0  # of the missing ones
        self._listeners: dict[Key, Any] = {}

    def listen(self, arrived: Callable[[Key, Tensor], None]) -> None:
        """Call ``arrived``, a method whose object is not kept alive, whenever autograd has brought
        the gradient of a trainable parameter; follows ``requires_grad_``."""
        self.follow()
        for key in self._trainable - self._listeners.keys():
            hook = weakly(arrived, key)
            register: Any = Tensor.register_post_accumulate_grad_hook  # here, not at rest
            self._listeners[key] = register(self._leaves[key], hook)

    def follow(self) -> None:
        """Note which parameters are trained now, without a loop where nothing has changed."""
        with torch._C.DisableTorchFunctionSubclass():  # half the time
            flags = list(map(_REQUIRES_GRAD, self._leaves.values()))
        if flags != self._flags:
            self._flags, self.trained = flags, numpy.array(flags, bool)
            self._trainable = set(compress(self._leaves, flags))

    # ------------------------------------------------------------------ one backward

    def expect(self, comes: Callable[[Tensor], bool] | None) -> None:
        """A backward begins; ``comes``: which gradients to wait for, of trainable parameters. None:
        all of them."""
        self.follow()
        if comes is None:
            self.missing = set(self._trainable)
        else:
            self.missing = {key for key in self._trainable if comes(self._leaves[key])}
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

    def delay(self, number: int, index: int) -> None:
        """The gradient of one parameter comes later, perhaps after this backward."""
        self.delayed.add((number, index))

    @property
    def only_delayed(self) -> bool:
        """Whether gradients are missing, and all of these are delayed."""
        return 0 < len(self.missing) == len(self.delayed)

    def refuse_delayed(self, unit: str) -> None:
        """Raise where delayed gradients have not come before the next forward."""
        if self.delayed:
            names = [self._groups[n].items[index].name for n, index in sorted(self.delayed)]
            raise RuntimeError(
                f"the gradients of {names} in unit '{unit}' are still to come: call backward_dw() "
                f"of their module after each backward, before the next forward; or, to drop all "
                f"gradients, reset_iter_state() on the root module"
            )

    def forget(self) -> None:
        self.missing, self.delayed, self.elements = set(), set(), 0

    # ------------------------------------------------------------------ at its end

    @property
    def trainable(self) -> bool:
        """Whether there is anything to reduce."""
        return bool(self._trainable)

    def leaves(self) -> list[Tensor]:
        """The trainable parameters, as forward sees them, in order."""
        return [leaf for key, leaf in self._leaves.items() if key in self._trainable]

    def names(self) -> list[str]:
        """The names of all parameters."""
        return [item.name for group in self._groups for item in group.items]

    def absent(self) -> comm.Facts:
        """Whether this backward brought no gradient, for each trained parameter: where it did not
        come to the unit, for all of them; delayed ones are to come."""
        groups, late = self._groups, bool(self.delayed)
        came = [g.gradients.came or [late] * len(g.items) for g in groups]
        found: comm.Facts = self.trained & ~numpy.array([*chain.from_iterable(came)], bool)
        return found

    def shown(self, has: bool) -> comm.Facts:
        """Whether the reduction of this backward had one (or had none: ``has``), those of waiting
        microbatches included. False where there was no reduction."""
        found = numpy.zeros(len(self._sizes), bool)
        first = 0
        for group in self._groups:
            if group.gradients.came and has in group.gradients.brought:
                here = slice(first, first + len(group.items))
                found[here] = numpy.array(group.gradients.brought) == has
            first += len(group.items)
        return found & self.trained

    def unreduced(self) -> list[str]:
        """Parameters whose gradient came and was not reduced."""
        return self._chosen(lambda group: group.gradients.unreduced())

    @property
    def waiting(self) -> bool:
        """Whether gradients of earlier microbatches wait to be reduced, of parameters that were
        frozen since too."""
        return any(group.gradients.waits for group in self._groups)

    def kept(self) -> list[str]:
        """Parameters with a gradient, or whose earlier microbatches wait to be reduced."""
        return self._chosen(lambda group: group.gradients.kept())

    def _chosen(self, chosen: Callable[[Group], list[int]]) -> list[str]:
        return [group.items[index].name for group in self._groups for index in chosen(group)]
