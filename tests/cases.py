# SPDX-License-Identifier: Apache-2.0
"""Cases for tests of many parameters: few of all combinations, in which each meets each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, such that any two values of any two axes occur
    together: 6 x 2 x 2 are 12 cases, not 24. What breaks by one value or by two is found."""
    every = list(product(*(range(len(axis)) for axis in axes)))
    missing = {pair for case in every for pair in combinations(enumerate(case), 2)}
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(missing.intersection(_pairs(case))))
        missing.difference_update(_pairs(best))
        chosen.append(best)
    return [tuple(axis[at] for axis, at in zip(axes, case, strict=True)) for case in sorted(chosen)]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(case), 2))
