# SPDX-License-Identifier: Apache-2.0
"""fp8 weights whose sides are no multiples of 128: not a bit changes with how they are gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardwise as sw
from tests.models import mesh_for, ranks_for
from tests.parity.mxfp8_helpers import (
    STEPS,
    STORED,
    Kind,
    assert_same_bits,
    expected_planes,
    loss_of,
    make,
    off_in_the_same_groups,
    optimizer_of,
    planes_seen,
    precision_of,
    staged_weights,
    tokens,
    train,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

FORMAT: Kind = "fp8_block"
WIDTH = 144  # and an MLP of 432: the last blocks are of 16, and of 48


def trained(
    rank: int, world_size: int, strategy: str, on: bool = True, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    model = make(on, FORMAT, width=WIDTH)
    options = {"precision": precision_of(on, FORMAT)} | options
    model = wrap(model, strategy, world_size, **options)
    return model, train(model, rank, optimizer=optimizer_of(model, "muon"))


def check_on_and_off(rank: int, world_size: int, strategy: str) -> tuple[int, int]:
    with sw.comm.record() as sent:
        model, on = trained(rank, world_size, strategy)
    with sw.comm.record() as sent_off, off_in_the_same_groups():
        precision = precision_of(True, FORMAT)
        _, off = trained(rank, world_size, strategy, on=False, precision=precision)
    assert_same_bits(on, off, f"{strategy}: fp8 gather on / off")
    report, staged = sw.precision_report(model), staged_weights(model)
    assert set(report.stored) == STORED
    assert not all(staged) and any(staged) == ("as bf16" in str(report))
    found = planes_seen(model)
    assert_same_bits(found, expected_planes(model, FORMAT), "codes and scales")
    assert any(value.shape == (2, 4) for value in found.values()), "partial blocks"
    assert on[f"loss {STEPS - 1}.0"] < 0.9 * on["loss 0.0"], "nothing was learned"
    gathered = [sum(c.nbytes for c in calls if c.operation == "all_gather")
                for calls in (sent, sent_off)]  # fmt: skip
    return gathered[0], gathered[1]


# Whole blocks go through every strategy in test_mxfp8. Partial ones change how planes are cut and
# joined: over no axis, over one that keeps them and one that does not, over two.
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
def test_partial_blocks_gathered_on_is_off(strategy: str) -> None:
    for codes, bf16 in run_ranks(check_on_and_off, ranks_for(strategy), strategy):
        assert codes < 0.9 * bf16 or not bf16


@pytest.mark.parametrize("stage", [0, 1])  # 2 gathers as 1 does
@on_ranks(2)
def test_data_parallel_trains_to_the_same_bits(rank: int, world_size: int, stage: int) -> None:
    runs = []
    for on in (False, True):
        model = sw.data_parallel(
            make(on, FORMAT, width=WIDTH),
            mesh=mesh_for(sw.zero(stage), world_size),
            placements=sw.zero(stage),
            precision=precision_of(on, FORMAT),
            bucket_mb=0.2,
        )
        runs.append(train(model, rank, optimizer=optimizer_of(model, "muon")))
    assert_same_bits(runs[1], runs[0], f"data_parallel, stage {stage}")
    assert set(sw.precision_report(model).stored) == STORED
    assert_same_bits(planes_seen(model), expected_planes(model, FORMAT), "planes")
    assert not all(staged_weights(model))


@on_ranks(2)
def test_a_shard_that_cuts_a_block_sends_bf16_and_the_report_says_so(
    rank: int, world_size: int
) -> None:
    with mock.patch("shardwise.shard.formats.math.lcm", return_value=1):
        model, found = trained(rank, world_size, "zero3")
    _, expected = trained(rank, world_size, "zero3", on=False)
    assert_same_bits(found, expected, "blocks that are cut")
    assert any(staged_weights(model))
    report = str(sw.precision_report(model))
    assert "gathered as bf16 (" in report and "because a rank's shard cuts a block" in report


def check_resume(rank: int, world_size: int, path: str) -> int:
    model = make(True, FORMAT, width=WIDTH)
    model = wrap(model, "zero3", world_size, precision=precision_of(True, FORMAT))
    optimizer = optimizer_of(model, "muon")
    train(model, rank, optimizer=optimizer, steps=range(1))
    sw.save(path, model, optimizer)
    expected = train(model, rank, optimizer=optimizer, steps=range(1, 3))
    for strategy in ("zero3", "zero1"):
        resumed = make(True, FORMAT, width=WIDTH)
        with torch.no_grad():
            for parameter in resumed.parameters():
                parameter.add_(1.0)  # nothing of the new model may survive
        resumed = wrap(resumed, strategy, world_size, precision=precision_of(True, FORMAT))
        loss_of(resumed, tokens(0, 0, rank))  # codes of what is about to be replaced
        again = optimizer_of(resumed, "muon")
        sw.load(path, resumed, again)
        found = train(resumed, rank, optimizer=again, steps=range(1, 3))
        assert_same_bits(found, expected, f"resumed in {strategy}")
    return len(expected)


def test_resumed_and_resharded_is_uninterrupted(tmp_path: Path) -> None:
    assert min(run_ranks(check_resume, 2, str(tmp_path / "half way"))) > 2
