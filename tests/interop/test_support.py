# SPDX-License-Identifier: Apache-2.0
"""Every pair of features is right, or refused by name: the table in docs/support.md."""

from __future__ import annotations

import pytest

from tests import pairs
from tests.ranks import run_ranks

CASES = pairs.cases()
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "mxfp8": 1e-2, "fp8_block": 1e-2}


def run_case(rank: int, world_size: int, case: pairs.Case) -> tuple[list[float], list[float], str]:
    """The losses on this rank and, from the first one, of one rank alone; or the error."""
    if pairs.refusal(case) is not None:
        try:
            pairs.sharded(case, rank)
        except (ValueError, NotImplementedError, TypeError) as error:
            return [], [], str(error)
        return [], [], ""
    mesh, found = pairs.mesh_of_one(), pairs.sharded(case, rank)
    return found, pairs.alone(case, mesh) if rank == 0 else [], ""


def test_every_pair_is_in_a_case() -> None:
    held = [pairs.pairs_of(case) for case in CASES]
    right = [one for one, case in zip(held, CASES, strict=True) if pairs.refusal(case) is None]
    for pair in map(frozenset, pairs.pairs()):
        refused = pairs.refusal(pairs.plain(dict(pair))) is not None
        assert any(pair in one for one in (held if refused else right)), pair
    assert len(CASES) < 40 and sum(case["compile"] == "compile" for case in CASES) < 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_a_case_is_right_or_refused_by_name(case: pairs.Case) -> None:
    words, results = pairs.refusal(case), run_ranks(run_case, pairs.world_of(case), case)
    expected = results[0][1]
    for found, _, error in results:
        if words is not None:
            assert words in error, error or "nothing was refused"
        else:
            assert found == pytest.approx(expected, rel=TOLERANCE[case["weights"]])
            assert len(found) == pairs.STEPS and found[-1] != found[0]
