# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of MXFP8 runs: main weights and nothing else, so that any other run can take them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.shard.group import Group
from tests.parity.mxfp8_helpers import (
    STORED,
    Kind,
    assert_same_bits,
    expected_planes,
    make,
    optimizer_of,
    planes_seen,
    precision_of,
    train,
    wrap,
)
from tests.ranks import run_ranks


def main_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


WIDTH = 128  # for every format


def save(rank: int, world_size: int, path: str) -> dict[str, Tensor]:
    model = wrap(make(True, width=WIDTH), "zero3", world_size, precision=precision_of(True))
    optimizer = optimizer_of(model, "muon")
    train(model, rank, optimizer=optimizer, steps=range(3))
    sw.save(path, model, optimizer)
    return main_weights(model) | planes_seen(model)


def load(
    rank: int, world_size: int, path: str, strategy: str, on: bool, format: Kind
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Into a model that was elsewhere and has gathered; then one step, to see that it goes on."""
    model = make(on, format, width=WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    wrap(model, strategy, world_size, precision=precision_of(on, format))
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))  # codes of what is about to be replaced
    optimizer = optimizer_of(model, "muon")
    sw.load(path, model, optimizer)
    found, planes = main_weights(model), planes_seen(model)
    if on:
        assert_same_bits(planes, expected_planes(model, format), "made anew from main")
    seen = train(model, rank, optimizer=optimizer, steps=range(1))
    assert torch.isfinite(seen["loss 0.0"])
    return found, planes


TARGETS: list[tuple[int, str, bool, Kind]] = [
    (1, "zero0", True, "mxfp8"),
    (2, "zero2", True, "mxfp8"),
    (3, "zero3", True, "mxfp8"),
    (4, "hfsdp", True, "mxfp8"),
    (2, "zero1", True, "mxfp8"),
    (3, "zero3", True, "fp8_block"),
    (2, "zero3", False, "mxfp8"),  # bf16
]


def test_a_checkpoint_goes_into_any_world_strategy_and_format(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    (expected, *_) = run_ranks(save, 2, path)
    codes = {name: value for name, value in expected.items() if value.dtype == torch.uint8}
    weights = {name: value for name, value in expected.items() if name not in codes}
    assert len(codes) == 2 * len(STORED) and len(weights) == 17
    for world_size, strategy, on, format in TARGETS:
        what = f"{world_size} ranks, {strategy}, {format if on else 'bf16'}"
        for found, planes in run_ranks(load, world_size, path, strategy, on, format):
            assert_same_bits(found, weights, what)
            if on and format == "mxfp8":
                assert_same_bits(planes, codes, what)


# ------------------------------------------------------------------------------ negative control


def check_stale(rank: int, world_size: int, path: str) -> str:
    """Codes that outlive a load, because a plane asks nobody how old it is, are noticed."""
    model = wrap(make(True), "zero1", world_size, precision=precision_of(True))
    optimizer = optimizer_of(model, "muon")
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
    sw.save(path, model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2.0)
        model(torch.zeros(1, 1, dtype=torch.long))
    fresh = property(lambda group: group.whole is None or group.whole.live)
    with mock.patch.object(Group, "is_current", fresh):
        sw.load(path, model, optimizer)
        with pytest.raises(AssertionError) as caught:
            assert_same_bits(planes_seen(model), expected_planes(model, "mxfp8"), "stale codes")
    assert_same_bits(planes_seen(model), expected_planes(model, "mxfp8"), "made anew")
    return str(caught.value)


def test_codes_that_outlive_a_load_are_noticed(tmp_path: Path) -> None:
    for said in run_ranks(check_stale, 2, str(tmp_path / "saved")):
        assert "stale codes" in said and "differ" in said
