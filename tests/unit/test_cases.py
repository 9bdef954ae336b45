# SPDX-License-Identifier: Apache-2.0
"""The choice of cases: few, and any two values meet."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.cases import pairwise


@pytest.mark.parametrize("sizes", [(6, 2, 2), (4, 2, 3), (5, 2, 2), (2, 2, 2, 2)])
def test_any_two_values_meet_in_few_cases(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    cases = pairwise(*axes)

    def pairs(chosen: list[tuple[str, ...]]) -> set[tuple[str, str]]:
        return {pair for case in chosen for pair in combinations(case, 2)}

    assert pairs(cases) == pairs(list(product(*axes)))
    assert len(cases) == len(set(cases)) <= max(a * b for a, b in combinations(sizes, 2)) + 2
