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

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.precision.fp8_tensor import Reads
from shardwise.shard.group import Group
from shardwise.shard.runtime import Runtime
from shardwise.shard.unit import Phase, Unit
from shardwise.shard.weights import Place, Weights
from shardwise.streams import annotate


class BucketedWeights(Weights):
    """The weights of buckets, shown one by one."""

    def __init__(self, groups: Sequence[Group], places: Sequence[Place], staged: bool) -> None:
        super().__init__(groups, places)
        self._staged = staged  # whether modules wait for their own weights
        self._here = [False] * len(groups)  # by bucket: whether the modules hold its whole weights
        self._places: list[list[tuple[dict[str, Any], str, int]]] = [[] for _ in groups]
        for parameters, name, number, index in places:
            self._places[number].append((parameters, name, index))

    def gather(self, runtime: Runtime, reads: Reads) -> None:
        for group in reversed(self.groups):  # in the order of forward
            group.gather(runtime, reads)

    def expose(self, runtime: Runtime, reads: Reads, *, by_and_by: bool = False) -> None:
        self.gather(runtime, reads)
        if not (self._staged and by_and_by):
            self.wait(runtime)
        self.show(runtime)

    def show(self, runtime: Runtime) -> None:
        self.shown = True
        arrived = (number for number, group in enumerate(self.groups) if not group.pending)
        self.show_buckets(runtime, arrived)

    def show_buckets(self, runtime: Runtime, numbers: Iterable[int]) -> None:
        """Put the whole weights of these buckets in the modules' hands, once they are there."""
        for number in numbers:
            if not self._here[number]:
                group = self.groups[number]
                group.wait(runtime)
                for parameters, name, index in self._places[number]:
                    parameters[name] = group.unsharded[index]
                self._here[number] = True

    def hide(self, force: bool = False) -> None:
        super().hide(force)
        self._here = [False] * len(self.groups)


class BucketedUnit(Unit):
    """The state behind one ``data_parallel`` call; groups in the order of backward."""

    weights: BucketedWeights
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
        self._staged = bool(stages)
        super().__init__(name, modules, groups, places, **options)
        self._stages = [
            stage.register_forward_pre_hook(partial(_await, weakref.ref(self), numbers))
            for stage, numbers in stages.items()
        ]

    def _make_weights(self, groups: Sequence[Group], places: Sequence[Place]) -> BucketedWeights:
        return BucketedWeights(groups, places, self._staged)

    def _end_forward(self, kept: bool, output: Any = None) -> None:
        self.weights.wait(self.runtime)  # what no module asked for must have arrived too
        super()._end_forward(kept, output)

    def awaited(self, numbers: list[int]) -> None:
        """A module that reads these buckets runs next."""
        if self.phase is not Phase.RESTING:
            self.weights.show_buckets(self.runtime, numbers)

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

    def rest(self) -> None:
        super().rest()
        self._next = 0


def _await(unit: weakref.ref[BucketedUnit], numbers: list[int], *_: Any) -> None:
    owner = unit()
    if owner is not None:
        owner.awaited(numbers)


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
