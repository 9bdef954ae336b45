# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of MXFP8 runs: main weights and nothing else, so that any other run can take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import MismatchError
from shardwise.precision.fp8_tensor import Format, FP8Tensor
from shardwise.shard.fp8_group import FP8Group
from tests.parity.mxfp8_helpers import (
    STORED,
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
    rank: int, world_size: int, path: str, strategy: str, on: bool, format: Format
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


TARGETS: list[tuple[int, str, bool, Format]] = [
    (1, "zero0", True, "mxfp8_rowcol"),
    (2, "zero2", True, "mxfp8_rowcol"),
    (3, "zero3", True, "mxfp8_rowcol"),
    (4, "hfsdp", True, "mxfp8_rowcol"),
    (3, "zero1", True, "mxfp8_2d"),  # other formats, by name
    (2, "zero1", True, "mxfp8"),
    (3, "zero3", True, "fp8_block"),
    (2, "zero3", False, "mxfp8_rowcol"),  # bf16
]


def test_a_checkpoint_goes_into_any_world_strategy_and_format(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    (expected, *_) = run_ranks(save, 2, path)
    codes = {name: value for name, value in expected.items() if value.dtype == torch.uint8}
    weights = {name: value for name, value in expected.items() if name not in codes}
    assert len(codes) == 4 * len(STORED) and len(weights) == 17
    for world_size, strategy, on, format in TARGETS:
        what = f"{world_size} ranks, {strategy}, {format if on else 'bf16'}"
        for found, planes in run_ranks(load, world_size, path, strategy, on, format):
            assert_same_bits(found, weights, what)
            if on and format == "mxfp8_rowcol":
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
    right = FP8Group._missing
    FP8Group._missing = lambda self, phase: []  # type: ignore[method-assign]
    try:
        sw.load(path, model, optimizer)
        with pytest.raises(AssertionError) as caught:
            assert_same_bits(
                planes_seen(model), expected_planes(model, "mxfp8_rowcol"), "stale codes"
            )
    finally:
        FP8Group._missing = right  # type: ignore[method-assign]
    assert_same_bits(planes_seen(model), expected_planes(model, "mxfp8_rowcol"), "made anew")
    return str(caught.value)


def test_codes_that_outlive_a_load_are_noticed(tmp_path: Path) -> None:
    for said in run_ranks(check_stale, 2, str(tmp_path / "saved")):
        assert "stale codes" in said and "differ" in said


# ------------------------------------------------------------------------------ another format


class Holder(nn.Module):
    """A module of planes, under the names that ``FP8Tensor.state_dict`` gives them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            plane, _, part = name.partition(".")
            if plane not in self._modules:
                self.add_module(plane, nn.Module())
            self.get_submodule(plane).register_buffer(part, tensor)


def test_codes_are_no_main_weights(tmp_path: Path) -> None:
    linear = nn.Linear(32, 32, bias=False)
    coded = nn.Module()
    planes = FP8Tensor.encode(linear.weight).state_dict()
    coded.add_module("weight", Holder(planes))
    path = tmp_path / "codes"
    sw.save(path, coded)
    before = linear.weight.detach().clone()
    with pytest.raises(MismatchError) as caught:
        sw.load(path, linear)
    assert "'weight' is stored as fp8 codes" in str(caught.value)
    assert "precision.FP8Tensor" in str(caught.value) and "unexpected" not in str(caught.value)
    assert torch.equal(linear.weight, before)
