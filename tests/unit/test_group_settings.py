# SPDX-License-Identifier: Apache-2.0
"""Settings of parameter groups that are changed after construction: no step is taken with one that
the constructor refuses, and nothing moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.optim.settings import GroupSettings
from shardwise.optim.sharded import SETTINGS


@sw.matrix_optimizer
def plain(
    gradient: torch.Tensor, state: dict[str, torch.Tensor], *, lr: float, beta: float = 0.5
) -> torch.Tensor:
    return lr * beta * gradient


KINDS = ["matrix", "function", "elementwise"]


def made(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    matrix = plain(lr=0.1) if kind == "function" else sw.muon(lr=0.1)
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, optimizer, next(g for g in optimizer.param_groups if g["kind"] == kind)


NUMBERS = [-1.0, math.nan, math.inf, -math.inf, "0.1", None, True, [0.1], torch.tensor([0.1, 0.2])]
NUMBERS += [torch.tensor(math.nan), torch.tensor(-0.1), torch.tensor(0.1, device="meta"), 1j]
CASES: list[tuple[str, str, Any]] = [
    *(
        (kind, name, value)
        for kind in KINDS
        for name in ("lr", "weight_decay")
        for value in NUMBERS
    ),
    *(("matrix", "momentum", value) for value in (*NUMBERS, 1, 1.5)),
    *(("elementwise", "eps", value) for value in NUMBERS),
    *(("elementwise", "betas", (0.9, value)) for value in (*NUMBERS, 1.0)),
    *(("elementwise", "betas", value) for value in (0.9, (0.9,), (0.9, 0.95, 0.99), "ab", None)),
    *(("matrix", name, "other") for name in ("decay", "momentum_form", "form", "preset", "wire")),
    *(("matrix", name, "other") for name in ("replicas", "tensor_parallel", "scale")),
    *(("matrix", "nesterov", value) for value in ("no", 2, None)),
    *(("matrix", "step_bytes", value) for value in (0, -1, "1GB", math.nan)),
    ("elementwise", "fused", "yes"),
    *((kind, name, True) for kind in KINDS for name in ("maximize", "amsgrad")),
]


@pytest.mark.parametrize(("kind", "name"), dict.fromkeys(case[:2] for case in CASES))
def test_a_value_that_no_step_can_take_is_refused_and_nothing_moves(kind: str, name: str) -> None:
    model, optimizer, group = made(kind)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    good = group.get(name)
    for value in [value for *case, value in CASES if case == [kind, name]]:
        group[name] = value
        for _ in range(2):  # a refusal is not forgotten
            with pytest.raises(
                ValueError, match=rf"nothing was updated: param_groups\[\d\].*{name}"
            ):
                optimizer.step()
        assert all(map(torch.equal, before, model.parameters())), value
        group[name] = good
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters())), "and goes on once it is right"


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_that_was_taken_out_is_named(kind: str) -> None:
    _, optimizer, group = made(kind)
    for name in [name for name in group if name not in ("params", "kind", "function")]:
        value = group.pop(name)
        with pytest.raises(ValueError, match=f"{name} was taken out: set it again"):
            optimizer.step()
        group[name] = value
    optimizer.step()


def in_place(group: dict[str, Any]) -> Callable[[float], None]:
    group["lr"] = torch.tensor(0.1)
    return group["lr"].fill_


def in_a_list(group: dict[str, Any]) -> Callable[[float], None]:
    group["betas"] = [0.9, 0.95]
    return lambda value: group["betas"].__setitem__(0, value)


@pytest.mark.parametrize("written", [in_place, in_a_list])
def test_a_value_that_is_written_in_place_is_seen(written: Any) -> None:
    _, optimizer, group = made("elementwise")
    write = written(group)
    settings = GroupSettings(SETTINGS)
    assert settings.problem(optimizer.param_groups) is None
    write(-1.0)
    assert "=tensor(-1.)" in (found := settings.problem(optimizer.param_groups) or "") or (
        "betas=(-1.0" in found
    )
    write(0.5)
    assert settings.problem(optimizer.param_groups) is None


def test_settings_are_looked_at_where_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, group = made("matrix")
    looked: list[Any] = []
    monkeypatch.setattr(
        GroupSettings, "_group_problem", lambda self, group: looked.append(group["kind"])
    )
    changes = [("lr", 0.1, 2), ("lr", 0.2, 2), ("nesterov", False, 4), ("nesterov", False, 4)]
    for name, value, count in changes:
        group[name] = value
        optimizer.step()
        assert len(looked) == count
