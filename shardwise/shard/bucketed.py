# SPDX-License-Identifier: Apache-2.0
"""A unit whose groups are buckets: the whole model, gathered and reduced bucket by bucket.

    step        gathers  3 2 1 0        ``early``: as the optimizer is done with each, meanwhile
    forward     gathers  3 2 1 0        what is not there, in forward order; awaited before all of
                                        it, or, with ``stages``, when a module first reads it
    backward    reduces  0 1 2 3        each as soon as its gradients and those before it are there

The weights stay whole between steps, so nothing is released and a bucket need not wait for the rest
of the model to reduce. Buckets are gathered and reduced in one fixed order, whatever a rank's
forward used: collectives match on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.memory import weakly
from shardwise.shard.group import Group
from shardwise.shard.unit import Phase, Unit
from shardwise.shard.wrapped import Place
from shardwise.streams import annotate


class BucketedUnit(Unit):
    """The state behind one ``data_parallel`` call; groups in the order of backward."""

    by_group = True

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        groups: Sequence[Group],
        places: Sequence[Place],
        *,
        staged: bool = False,
        **options: Any,
    ) -> None:
        """``staged``: modules wait for their own weights, not the whole model for all."""
        self._next = 0  # the bucket whose turn it is to reduce
        self._missing: list[int] = []  # by bucket: gradients that have not come in this backward
        stages = _stages(modules[0], places) if staged else {}
        super().__init__(name, modules, groups, places, staged=bool(stages), **options)
        self._stages = [
            stage.register_forward_pre_hook(weakly(self.awaited, numbers))
            for stage, numbers in stages.items()
        ]

    def _end_forward(self, kept: bool, output: Any = None) -> None:
        self.wait()  # what no module asked for must have arrived too
        super()._end_forward(kept, output)

    def awaited(self, numbers: list[int], *_: Any) -> None:
        """A module that reads these buckets runs next."""
        if self.phase is not Phase.RESTING:
            self.show_groups(numbers)

    # ------------------------------------------------------------------ gradients

    def _expect_gradients(self, comes: Callable[[Tensor], bool] | None) -> None:
        super()._expect_gradients(comes)
        self._next = 0
        self._missing = [0] * len(self.groups)
        for number, _ in self.arrivals.missing:
            self._missing[number] += 1

    def group_arrived(self, number: int) -> None:
        """A gradient of one bucket has come: reduce the buckets that have all of theirs, in
        order."""
        self._missing[number] -= 1
        while self._next < len(self.groups) and not self._missing[self._next]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        group = self.groups[self._next]
        self._next += 1
        if group.trainable:
            with annotate(self.name, f"reduce bucket {self._next - 1}"):
                group.gradients.reduce(self.runtime)

    def reduce(self) -> None:
        """Backward is over for this model: what is still here, unused parameters as zeros."""
        while self._next < len(self.groups):
            self._reduce_next()

    def rest(self) -> RuntimeError | None:
        self._next = 0
        return super().rest()


def _stages(model: nn.Module, places: Sequence[Place]) -> dict[nn.Module, list[int]]:
    """The buckets that each waiting module reads."""
    held: dict[int, set[int]] = {}
    for parameters, _, number, _ in places:
        held.setdefault(id(parameters), set()).add(number)
    found: dict[nn.Module, list[int]] = {}
    for stage, inside in _modules_in_order(model):
        numbers = {number for inner in inside for number in held.get(id(inner._parameters), ())}
        # The root's own wait is its unit's; it comes before this one, and shows nothing.
        if numbers:
            found[stage] = sorted(numbers, reverse=True)
    return found


def _modules_in_order(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules that forward comes to one after another, and whose parameters each may read.

    A module with lists of modules inside (a decoder, a block with experts) computes by calling
    them, so it is entered and they are stages of their own; any other may read what is below it
    (attention reads the weight of its output projection), so it is one stage.
    """
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if any(isinstance(inner, _LISTS) for inner in module.modules()):
            read = [child for child in module.children() if isinstance(child, _PARAMETERS)]
            yield module, [module, *read]
            waiting += list(module.children())[::-1]
        else:
            yield module, list(module.modules())


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)  # never called: their owner reads them
