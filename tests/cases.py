# SPDX-License-Identifier: Apache-2.0
"""Cases for tests of many parameters: few of all combinations, in which each meets each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[tuple[int, int], tuple[int, int]]  # (axis, value), (a later axis, its value)


def pairwise(
    *axes: Sequence[Any], fits: Callable[[tuple[Any, ...]], bool] = lambda case: True
) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, such that any two values of any two axes occur
    together: 6 x 2 x 2 are 12 cases, not 24. What breaks by one value or by two is found.

    ``fits``: which combinations there are. The first value of each axis goes with all others:
    where two values do not fit beside first values alone, no case holds them.
    """

    def whole(chosen: dict[int, int]) -> tuple[Any, ...]:
        return tuple(axis[chosen.get(at, 0)] for at, axis in enumerate(axes))

    missing: set[Pair] = set()
    for first, second in combinations(range(len(axes)), 2):
        for a, b in product(range(len(axes[first])), range(len(axes[second]))):
            if fits(whole({first: a, second: b})):
                missing.add(((first, a), (second, b)))
    found = []
    while missing:
        chosen = dict(min(missing))
        for at, axis in enumerate(axes):
            # Each further axis takes the value that brings most of what is missing.
            tried = [chosen | {at: value} for value in range(len(axis)) if at not in chosen]
            fitting = [one for one in tried if fits(whole(one))]
            chosen = max(fitting, key=lambda one: len(missing & _pairs(one)), default=chosen)
        missing -= _pairs(chosen)
        found.append(whole(chosen))
    return found


def _pairs(chosen: dict[int, int]) -> set[Pair]:
    return set(combinations(sorted(chosen.items()), 2))
