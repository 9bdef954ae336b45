# SPDX-License-Identifier: Apache-2.0
"""A handful of programs of the fuzzer (``make fuzz`` draws others), and its own mistakes."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch

from tests.fuzz.__main__ import shrink
from tests.fuzz.draw import FEATURES, make
from tests.fuzz.outcome import compare, exact, outcome, reference


@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7, 9])
def test_a_program_ends_as_plain_torch_does(seed: int) -> None:
    kind, words, full = outcome(make(seed, 2))
    assert kind == "ok", (words, full)


def test_every_feature_is_drawn() -> None:
    programs = [make(seed, (2, 3, 4)[seed % 3]) for seed in range(400)]
    drawn = Counter(name for program in programs for name in program["odd"])
    assert drawn.keys() == FEATURES.keys()
    assert sum(map(exact, programs)) > 40


def test_a_difference_is_seen() -> None:
    program = next(one for one in (make(seed, 2) for seed in range(99)) if exact(one))
    right = reference(program)
    wrong = copy.deepcopy(right)
    assert compare(program, right, reference(program)) is None
    label, value = next(one for one in wrong[1] if isinstance(one[1], torch.Tensor))
    wrong[1][wrong[1].index((label, value))] = (label, value * (1 + 1e-6))
    assert "other bits" in (compare(program, wrong, right) or "")


def test_smaller_programs_are_programs() -> None:
    """All but what the finding needs is dropped, and what is left runs."""
    program = make(9, 2)

    def steps(one: dict[str, object]) -> bool:
        return {"op": "step"} in one["ops"] and bool(reference(one))  # type: ignore[operator]

    smaller = shrink(program, steps, math.inf)
    assert smaller["ops"] == [{"op": "step"}] and smaller["optimizer"] == "sgd"
    assert len(str(smaller["tree"])) < len(str(program["tree"]))


@pytest.mark.parametrize(
    ("mistake", "feature"),
    [
        ("scaled twice", ""),
        ("left behind", ""),
        ("stale codes", "fp8"),
        ("written by two", "memory"),
    ],
)
def test_a_planted_mistake_is_seen(mistake: str, feature: str) -> None:
    """In one of a few programs: not each has gradients or weights that the mistake reaches."""
    programs = [
        one for one in (make(seed, 2) for seed in range(200)) if feature in (*one["odd"], "")
    ]
    assert any(outcome(one | {"planted": mistake})[0] == "differs" for one in programs[:15])
