# SPDX-License-Identifier: Apache-2.0
"""Settings that no optimizer can step with are refused where they are given: in the settings of an
optimizer, and in a group that is added to one, which stays as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


@sw.matrix_optimizer
def plain(
    gradient: torch.Tensor, state: dict[str, torch.Tensor], *, lr: float, beta: float = 0.5
) -> torch.Tensor:
    return lr * beta * gradient


MAKERS: dict[str, Any] = {"matrix": sw.muon, "function": plain, "elementwise": sw.adamw}
NUMBERS = [-1.0, math.nan, math.inf, -math.inf, "0.1", None, True, [0.1], torch.tensor([0.1, 0.2])]
NUMBERS += [torch.tensor(math.nan), torch.tensor(-0.1), torch.tensor(0.1, device="meta"), 1j]
CASES: dict[tuple[str, str], list[Any]] = {
    **{(kind, name): NUMBERS for kind in MAKERS for name in ("lr", "weight_decay")},
    ("matrix", "momentum"): [*NUMBERS, 1, 1.5],
    ("elementwise", "eps"): NUMBERS,
    ("elementwise", "betas"): [
        *((0.9, value) for value in (*NUMBERS, 1.0)),
        *(0.9, (0.9,), (0.9, 0.95, 0.99), "ab", None),
    ],
    **{("matrix", name): ["other"] for name in ("decay", "preset", "tensor_parallel", "scale")},
    ("matrix", "nesterov"): ["no", 2, None],
    ("elementwise", "fused"): ["yes"],
}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_value_that_no_step_can_take_is_refused(kind: str, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    matrix = plain(lr=0.1) if kind == "function" else sw.muon(lr=0.1)
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=0.1))
    late = model[1].bias if kind == "elementwise" else model[1].weight
    for value in CASES[kind, name]:
        with pytest.raises(ValueError, match=name if name != "preset" else "preset|unknown"):
            MAKERS[kind](**{"lr": 0.1, name: value})
        with pytest.raises(ValueError, match="a group to add cannot work"):
            optimizer.add_param_group({"params": [late], "kind": kind, name: value})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [late], "kind": kind})
    assert optimizer.param_groups[2]["lr"] == 0.1


def test_a_rate_may_be_a_tensor_and_is_read_in_every_step() -> None:
    model = nn.Linear(4, 6, bias=False)
    rate = torch.tensor(0.0)
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=rate), elementwise=None)
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(before)
    optimizer.step()
    assert torch.equal(model.weight, before)
    rate.fill_(0.1)
    optimizer.step()
    assert not torch.equal(model.weight, before)
