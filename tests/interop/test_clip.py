# SPDX-License-Identifier: Apache-2.0
"""torch's own gradient clipping and loss scaling on sharded gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.contract.helpers import (
    MAIN_STRATEGIES,
    STRATEGIES,
    Net,
    assert_close,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    full,
    pair,
    ranks_for,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


def clip(rank: int, world_size: int, strategy: str, kind: float, foreach: bool | None) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    word_loss(net, rank).backward()
    average_gradients(plain, word_loss, world_size)
    limit = 0.05
    norms = [
        torch.nn.utils.clip_grad_norm_(m.parameters(), limit, norm_type=kind, foreach=foreach)
        for m in (net, plain)
    ]
    ours, theirs = (full(norm) for norm in norms)
    assert theirs > limit, "there was something to clip"
    assert ours.shape == (), ours.shape
    assert_close(ours, theirs, "norm", 1e-5)
    assert_gradients_equal(net, plain, 1e-7)
    again = full(torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9, norm_type=kind))
    assert_close(again, torch.tensor(limit), "clipped norm", 1e-5)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(strategy, 2.0) for strategy in STRATEGIES]
    + [(strategy, kind) for strategy in ("zero0", "hfsdp") for kind in (1.0, float("inf"))],
)
def test_clip_grad_norm_sees_the_whole_gradient_once(strategy: str, kind: float) -> None:
    run_ranks(clip, ranks_for(strategy), strategy, kind, None)


@pytest.mark.parametrize("strategy", ["zero3", "hfsdp"])
def test_clip_grad_norm_without_foreach(strategy: str) -> None:
    run_ranks(clip, ranks_for(strategy), strategy, 2.0, False)


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_clip_grad_value(rank: int, world_size: int, strategy: str) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    word_loss(net, rank).backward()
    average_gradients(plain, word_loss, world_size)
    for model in (net, plain):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert_gradients_equal(net, plain, 1e-7)
    assert max(parameter.grad.max() for parameter in plain.parameters()) == pytest.approx(1e-3)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_grad_scaler_skips_a_step_on_every_rank_when_one_overflows(
    rank: int, world_size: int, strategy: str
) -> None:
    """fp16 with a loss scale; an overflow on one rank alone must skip the step on all."""
    net, plain = pair(Net)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    wrap(net, world_size, strategy, mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=100)
    taken = 0
    for step in range(4):
        overflows = step == 1
        loss: Any = word_loss(net, rank, step)
        if overflows and rank == world_size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if not overflows:
            average_gradients(plain, lambda m, r, s=step: word_loss(m, r, s), world_size)
            assert_gradients_equal(net, plain, 5e-3)
            reference.step()
            reference.zero_grad()
            taken += 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (256.0 if step < 1 else 128.0), (step, scaler.get_scale())
    assert taken == 3
    assert_parameters_equal(net, plain, 3e-3)


def overflow_in_one_shard(rank: int, world_size: int, strategy: str) -> int:
    """A loss that overflows spreads over every shard; an infinity in one shard alone does not."""
    net, _ = pair(Net)
    wrap(net, world_size, strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(word_loss(net, rank)).backward()
    broken = rank == world_size - 1
    if broken:
        pieces = [parameter.grad.to_local() for parameter in net.parameters()]
        next(piece for piece in pieces if piece.numel())[-1:].fill_(float("inf"))
    before = [full(parameter).clone() for parameter in net.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0, "every rank knows"
    for old, parameter in zip(before, net.parameters(), strict=True):
        assert torch.equal(old, full(parameter)), "and no rank stepped"
    return int(broken)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hfsdp"])
def test_grad_scaler_hears_of_an_infinity_in_one_shard(strategy: str) -> None:
    assert sum(run_ranks(overflow_in_one_shard, ranks_for(strategy), strategy)) == 1
