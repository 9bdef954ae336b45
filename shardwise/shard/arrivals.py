# SPDX-License-Identifier: Apache-2.0
"""Arrivals: the gradients that one unit waits for in a backward.

missing   gradients that this backward is expected to bring, and has not brought yet
delayed   missing gradients that are computed later, perhaps after this backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shardwise.memory import weakly
from shardwise.shard.group import Group

Key = tuple[int, int]  # (group, index in it)
_REQUIRES_GRAD = attrgetter("requires_grad")


class Arrivals:
    """Which gradients have come in a backward, and which have not when it ends."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._sizes = {
            (number, index): item.numel
            for number, group in enumerate(groups)
            for index, item in enumerate(group.items)
        }
        self._leaves = {key: groups[key[0]].unsharded[key[1]] for key in self._sizes}
        self._flags: list[bool] = []  # which of them are trainable, as ``follow`` has seen
        self._trainable: set[Key] = set()  # the keys of those
        total = sum(self._sizes.values())
        # If no more elements than this are missing, the last gradient may be next: that of one
        # matrix, and of biases.
        self.one_more = max(self._sizes.values(), default=0) + total // 64
        self.missing: set[Key] = set()
        self.delayed: set[Key] = set()
        self.elements = 0  # of the missing gradients
        self._listeners: dict[Key, Any] = {}

    def listen(self, arrived: Callable[[Key, Tensor], None]) -> None:
        """Call ``arrived`` whenever autograd has brought the gradient of a trainable parameter.
        ``arrived`` is a method, whose object is not kept alive."""
        self.follow()
        for key in self._trainable - self._listeners.keys():
            hook = weakly(arrived, key)
            register: Any = Tensor.register_post_accumulate_grad_hook  # ``Whole`` has another one
            self._listeners[key] = register(self._leaves[key], hook)

    def follow(self) -> None:
        """Note which parameters are trainable now. No loop if nothing has changed."""
        with torch._C.DisableTorchFunctionSubclass():  # takes half the time
            flags = list(map(_REQUIRES_GRAD, self._leaves.values()))
        if flags != self._flags:
            self._flags, self._trainable = flags, set(compress(self._leaves, flags))

    # ------------------------------------------------------------------ one backward

    def expect(self, comes: Callable[[Tensor], bool] | None) -> None:
        """A backward begins. ``comes``: whether to wait for the gradient of a trainable parameter.
        None: wait for all."""
        self.follow()
        if comes is None:
            self.missing = set(self._trainable)
        else:
            self.missing = {key for key in self._trainable if comes(self._leaves[key])}
        self.elements = sum(map(self._sizes.__getitem__, self.missing))

    def arrive(self, key: Key) -> bool:
        """Note that a gradient has come. Returns False if it came before, or is not expected."""
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

    def refuse_delayed(self, unit: str) -> None:
        """Raise if delayed gradients have not come before the next forward."""
        if self.delayed:
            names = [self._groups[n].items[index].name for n, index in sorted(self.delayed)]
            raise RuntimeError(
                f"the gradients of {names} in unit '{unit}' are still to come: call backward_dw() "
                f"of their module after each backward, before the next forward; or, to drop all "
                f"gradients, reset_iter_state() on the root module"
            )

    def forget(self) -> None:
        """No gradient is missing any more."""
        self.missing, self.delayed, self.elements = set(), set(), 0

    # ------------------------------------------------------------------ the end of a backward

    @property
    def trainable(self) -> bool:
        """Whether any parameter is trainable, so that there is something to reduce."""
        return bool(self._trainable)

    def leaves(self) -> list[Tensor]:
        """The trainable parameters as forward sees them, in order."""
        return [leaf for key, leaf in self._leaves.items() if key in self._trainable]

    def unreduced(self) -> list[str]:
        """Parameters whose gradient came and was not reduced."""
        return [each.items[i].name for each in self._groups for i in each.gradients.unreduced()]

    @property
    def waiting(self) -> bool:
        """Whether gradients of earlier microbatches wait to be reduced. Gradients of parameters
        that were frozen since then count too."""
        return any(group.gradients.waits for group in self._groups)

    def kept(self) -> list[str]:
        """Parameters with a gradient, or whose earlier microbatches wait to be reduced."""
        return [each.items[i].name for each in self._groups for i in each.gradients.kept()]
