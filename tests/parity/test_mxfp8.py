# SPDX-License-Identifier: Apache-2.0
"""MXFP8 weights: not a bit changes with how they are stored, gathered or scheduled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.shard.module import units_of
from tests.parity.mxfp8_helpers import (
    STEPS,
    STORED,
    STRATEGIES,
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


def ranks_of(strategy: str) -> int:
    return 4 if strategy in ("hsdp", "hfsdp") else 2


def run(
    rank: int, world_size: int, strategy: str, kind: str, on: bool, format: Any, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    trains = {name: options.pop(name) for name in ("microbatches", "evaluate") if name in options}
    shape = {name: options.pop(name) for name in ("inside", "outside") if name in options}
    model = make(on, format, **shape)
    model = wrap(model, strategy, world_size, precision=precision_of(on, format), **options)
    optimizer = optimizer_of(model, kind)
    return model, train(model, rank, optimizer=optimizer, **trains)


def check_on_and_off(rank: int, world_size: int, strategy: str, kind: str, format: Any) -> int:
    coded, on = run(rank, world_size, strategy, kind, True, format)
    _, off = run(rank, world_size, strategy, kind, False, format)
    assert_same_bits(on, off, f"{strategy} {kind}: fp8 gather on / off")
    assert set(sw.precision_report(coded).stored) == STORED
    found = planes_seen(coded)
    assert_same_bits(found, expected_planes(coded, format), "codes and scales")
    assert len(found) == len(STORED) * (4 if format == "mxfp8" else 2)
    first, last = on[f"loss 0.0"], on[f"loss {STEPS - 1}.0"]
    assert last < 0.8 * first, f"nothing was learned: {first} to {last}"
    return len(on)


@pytest.mark.parametrize(
    ("strategy", "kind", "format"),
    [(strategy, kind, "mxfp8") for strategy in STRATEGIES for kind in ("adamw", "muon")]
    + [("zero1", "muon", "mxfp8_2d"), ("zero3", "muon", "mxfp8_2d"), ("hfsdp", "muon", "mxfp8_2d")],
)
def test_fp8_gather_on_is_off(strategy: str, kind: str, format: str) -> None:
    world_size = ranks_of(strategy)
    seen = run_ranks(check_on_and_off, world_size, strategy, kind, format)
    assert min(seen) > 2 * STEPS
