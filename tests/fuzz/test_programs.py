# SPDX-License-Identifier: Apache-2.0
"""A handful of programs of the fuzzer (``make fuzz`` draws others), and its own mistakes."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.fuzz.__main__ import candidates
from tests.fuzz.draw import make
from tests.fuzz.outcome import compare, outcome, reference
from tests.fuzz.program import walk


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 6, 7, 9, 10, 13])
def test_a_program_ends_as_plain_torch_does(seed: int) -> None:
    kind, words, full = outcome(make(seed, 2))
    assert kind in ("ok", "loud", "both"), (words, full)


def test_a_difference_is_seen() -> None:
    program = make(0, 2)
    right = reference(program)
    wrong = copy.deepcopy(right)
    assert compare(program, right, reference(program)) is None
    label, value = next(one for one in wrong[1] if isinstance(one[1], torch.Tensor))
    wrong[1][wrong[1].index((label, value))] = (label, value + 1)
    assert "other values" in (compare(program, wrong, right) or "")


def test_smaller_programs_are_programs() -> None:
    program = make(9, 2)
    smaller = list(candidates(program))
    assert len(smaller) > 10
    for one in smaller[::5]:
        assert one != program and list(walk(one["tree"]))
        reference(one)
