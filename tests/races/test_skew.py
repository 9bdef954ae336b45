# SPDX-License-Identifier: Apache-2.0
"""Ranks that fall behind each other at random compute the same bits as ranks that do not.

Every rank sleeps for a random while before modules of a forward, before modules of a backward and
before the optimizer's step: on a GPU the compute stream sleeps and the host runs ahead; on a CPU
the process sleeps.

    rank 0   compute | up | .... | down |       gathers and reductions meet other work than they do
    rank 1   compute | .......... | up | down |  where nobody sleeps
"""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.streams import Lanes
from tests.models import STRATEGIES, Model, loss_of, make_model, mesh_for, mesh_of, shard_model
from tests.models import tokens as tokens_of
from tests.one_card import device_type, ranks_device
from tests.ranks import RanksFailed, on_ranks, run_ranks
from tests.whole import assert_same, whole_parameters

STEPS, MICROBATCHES = 3, 2
WIDTH = 128  # a block of fp8_block
CYCLES = 2_000_000  # at most 1 ms of a GPU
WRAPPED = ("zero1", "zero3", "hsdp", "hfsdp", "data_parallel")
PRECISIONS = {
    "fp32": None,
    "bf16": sw.Precision(weights="bf16", reduce="fp32"),
    "mxfp8": sw.Precision(weights="mxfp8", reduce="fp32"),
    "fp8_block": sw.Precision(weights="fp8_block", reduce="fp32"),
}


class Skew:
    """Sleeps before the modules of a model; ``by``: the random numbers of one rank."""

    def __init__(self, rank: int) -> None:
        self.by, self.slept = random.Random(rank), 0

    def watch(self, model: nn.Module) -> None:
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(self.sleep)
                module.register_full_backward_pre_hook(self.sleep)

    def sleep(self, *_: Any) -> None:
        self.slept += 1
        if device_type() == "cuda":
            torch.cuda._sleep(int(self.by.random() * CYCLES))
        elif self.by.random() < 0.2:
            time.sleep(self.by.random() * 0.004)


def wrapped(name: str, precision: str, world_size: int, skew: Skew | None) -> Model:
    model = make_model(width=WIDTH, depth=3)
    if skew is not None:
        skew.watch(model)
    if name == "data_parallel":
        options: dict[str, Any] = {"placements": sw.zero(1), "overlap_gather": True}
        mesh = mesh_of(world_size)
        return sw.data_parallel(
            model, mesh=mesh, precision=PRECISIONS[precision], bucket_mb=0.3, **options
        )
    placements = STRATEGIES[name]
    mesh = mesh_for(placements, world_size)
    return shard_model(model, placements, mesh, precision=PRECISIONS[precision])


def train(
    rank: int, world_size: int, name: str, precision: str, skew: Skew | None
) -> dict[str, Tensor]:
    """Parameters and losses. Nothing is read before the end: the host would wait for the device."""
    model = wrapped(name, precision, world_size, skew)
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-2))
    losses = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            model.set_is_last_backward(microbatch == MICROBATCHES - 1)
            loss = loss_of(model, tokens_of(step, microbatch, rank, world_size))
            loss.backward()
            losses.append(loss.detach())
        optimizer.clip_grad_norm(1.0)
        if skew is not None:
            skew.sleep()
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(model) | {"losses": torch.stack(losses)}


def compare(rank: int, world_size: int, name: str, precision: str) -> int:
    expected = train(rank, world_size, name, precision, None)
    skew = Skew(rank)
    assert_same(train(rank, world_size, name, precision, skew), expected)
    return skew.slept


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WRAPPED)
def test_ranks_that_sleep_compute_the_same_bits(name: str, precision: str) -> None:
    slept = run_ranks(compare, 4 if name in ("hsdp", "hfsdp") else 2, name, precision)
    assert min(slept) > STEPS * MICROBATCHES * 2 * 8, "before every module, both ways"


@on_ranks(2)
def without_a_join(rank: int, world_size: int) -> None:
    """Reductions begin without waiting for the gradients that compute packs."""
    join = Lanes.join

    def forget(lanes: Lanes, lane: Any, other: Any) -> None:
        if (lane, other) != ("reduce", "compute"):
            join(lanes, lane, other)

    expected = train(rank, world_size, "zero3", "bf16", None)
    with mock.patch.object(Lanes, "join", forget):
        found = train(rank, world_size, "zero3", "bf16", Skew(rank))
    assert_same(found, expected)


@pytest.mark.skipif(ranks_device() == "cpu", reason="GPU alone: a CPU has one lane")
def test_a_join_of_streams_that_is_left_out_shows() -> None:
    """Negative control."""
    with pytest.raises(RanksFailed, match="AssertionError"):
        without_a_join()
