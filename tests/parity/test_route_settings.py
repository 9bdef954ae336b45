# SPDX-License-Identifier: Apache-2.0
"""Settings by name pattern: the same bits under every strategy, saved, loaded, refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from tests.models import STRATEGIES, ZERO, make_model
from tests.parity.helpers import assert_same, everything
from tests.parity.test_muon import train, wrap
from tests.ranks import run_ranks

OWN = {
    "layers.*": {"lr_scale": 0.5},
    "layers.0.up.weight": {"lr_scale": 0.25, "momentum": 0.5, "scale": "unit_rms_norm"},
    "*bias": {"weight_decay": 0.0, "lr": 3e-3, "lr_scale": 2.0},
}


def build(name: str | None, world_size: int = 1, own: Any = OWN, matrix: Any = None) -> Any:
    model = make_model(depth=2)
    sw.route(model, settings=own)
    if name is not None:
        wrap(STRATEGIES[name], world_size, model)
    matrix = matrix or sw.muon(lr=0.05, weight_decay=0.1)
    return model, sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


@cache
def unsharded(rank: int) -> dict[str, Tensor]:
    model, optimizer = build(None)
    train(model, optimizer, rank, sharded=False)
    return everything(model, optimizer)


def test_every_combination_is_a_parameter_group() -> None:
    model, optimizer = build(None)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert of["layers.0.up.weight"]["lr"] == 0.05 * 0.25
    assert of["layers.0.up.weight"]["momentum"] == 0.5
    assert of["layers.1.up.weight"]["lr"] == 0.05 * 0.5
    assert of["layers.1.up.weight"]["momentum"] == 0.95
    assert of["layers.0.up.bias"]["lr"] == 3e-3 * 2.0
    assert of["layers.0.up.bias"]["weight_decay"] == 0.0
    plain, bits = build(None, own=None)[0], unsharded(0)
    other = sw.optimizer(
        plain, matrix=sw.muon(lr=0.05, weight_decay=0.1), elementwise=sw.adamw(lr=1e-2)
    )
    train(plain, other, 0, sharded=False)
    found = everything(plain, other)
    assert not torch.equal(found["layers.0.up.weight"], bits["layers.0.up.weight"]), "they matter"


def check_all(rank: int, world_size: int, folder: str) -> None:
    expected = unsharded(rank)
    names = (*ZERO, "hsdp", "hfsdp")
    for name, other in zip(names, (*names[1:], names[0]), strict=True):
        model, optimizer = build(name, world_size)
        train(model, optimizer, rank, sharded=True, steps=3)
        path = f"{folder}/{name}"
        sw.save(path, model, optimizer)
        model, optimizer = build(other, world_size)
        sw.load(path, model, optimizer)
        lrs = sorted(group["lr"] for group in optimizer.param_groups)
        assert lrs == sorted(group["lr"] for group in build(None)[1].param_groups)
        train(model, optimizer, rank, sharded=True, first=3)
        assert_same(everything(model, optimizer), expected, f"{name} -> {other}")


def test_the_same_bits_under_every_strategy_and_after_a_load_into_another(tmp_path: Path) -> None:
    run_ranks(check_all, 4, str(tmp_path))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"layers.*": {"lr_scale": -1}}, ["lr_scale=-1 must be a number, 0 or more"]),
        ({"layers.*.up.weight": {"betas": (0.9, 0.9)}}, ["layers.0.up.weight", "betas is unknown"]),
        ({"*bias": {"momentum": 0.5}}, ["bias", "momentum is unknown; there are lr"]),
        ({"layers.*.up.weight": {"momentum": 2.0}}, ["momentum=2.0"]),
        ({"nothing*": {"lr": 1.0}}, ["settings 'nothing*' matches no parameter"]),
        ({"layers.*": 0.5}, ["settings 'layers.*': 0.5"]),
    ],
    ids=str,
)
def test_settings_that_cannot_work(own: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="cannot work") as caught:
        build(None, own=own)
    assert [word for word in words if word not in str(caught.value)] == []
