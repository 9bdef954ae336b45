# SPDX-License-Identifier: Apache-2.0
"""A handful of programs of the fuzzer (``make fuzz`` draws others), and its own mistakes."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from tests.fuzz.__main__ import candidates
from tests.fuzz.draw import FEATURES, make
from tests.fuzz.outcome import FINE, compare, exact, outcome, reference
from tests.fuzz.program import walk


@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7, 9])
def test_a_program_ends_as_plain_torch_does(seed: int) -> None:
    kind, words, full = outcome(make(seed, 2))
    assert kind in FINE, (words, full)


def test_every_feature_is_drawn() -> None:
    programs = [make(seed, (2, 3, 4)[seed % 3]) for seed in range(400)]
    drawn = Counter(name for program in programs for name in program["odd"])
    assert drawn.keys() == FEATURES.keys()
    assert sum(map(exact, programs)) > 40


def test_a_difference_is_seen() -> None:
    program = next(one for one in (make(seed, 2) for seed in range(99)) if exact(one))
    right = reference(program).logs
    wrong = copy.deepcopy(right)
    assert compare(program, right, reference(program).logs) is None
    label, value = next(one for one in wrong[1] if isinstance(one[1], torch.Tensor))
    wrong[1][wrong[1].index((label, value))] = (label, value * (1 + 1e-6))
    assert "other bits" in (compare(program, wrong, right) or "")


def test_smaller_programs_are_programs() -> None:
    program = make(9, 2)
    smaller = list(candidates(program))
    assert len(smaller) > 10
    for one in smaller[::5]:
        assert one != program and list(walk(one["tree"]))
        assert reference(one).logs


@pytest.mark.parametrize("mistake", ["scaled twice", "left behind"])
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    """In one of a few programs: not each has gradients that the mistake reaches."""
    found = (outcome(make(seed, 2) | {"planted": mistake}) for seed in range(20))
    assert any(kind not in FINE for kind, *_ in found)
