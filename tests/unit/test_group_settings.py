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
from tests.models import make_model
from tests.parity.runs import SETTINGS


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


def test_every_combination_by_name_pattern_is_a_parameter_group() -> None:
    model = make_model(depth=2)
    sw.route(model, settings=SETTINGS)
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.05), elementwise=sw.adamw(lr=1e-2))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    first, second, bias = (
        of[f"layers.{name}"] for name in ("0.up.weight", "1.up.weight", "0.up.bias")
    )
    assert (first["lr"], first["momentum"]) == (0.05 * 0.25, 0.5)
    assert (second["lr"], second["momentum"]) == (0.05 * 0.5, 0.95)
    assert (bias["lr"], bias["weight_decay"]) == (3e-3 * 2.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers.*": {"lr_scale": -1}}, ["lr_scale"]),
        ({"layers.*.up.weight": {"betas": (0.9, 0.9)}}, ["layers.0.up.weight", "betas"]),
        ({"*bias": {"momentum": 0.5}}, ["bias", "momentum"]),
        ({"layers.*.up.weight": {"momentum": 2.0}}, ["momentum"]),
        ({"nothing*": {"lr": 1.0}}, ["nothing*"]),
        ({"layers.*": 0.5}, ["layers.*"]),
    ],
    ids=str,
)
def test_patterns_that_cannot_work_are_refused(settings: Any, words: list[str]) -> None:
    model = make_model(depth=2)

    def build() -> None:
        sw.route(model, settings=settings)
        sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())

    with pytest.raises(ValueError, match="cannot work") as caught:
        build()
    assert [word for word in words if word not in str(caught.value)] == []
