# SPDX-License-Identifier: Apache-2.0
"""``CPUOffloadPolicy``. On a CPU mesh there is nowhere to move to: it must simply work."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from tests.contract.helpers import (
    Net,
    assert_at_rest,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


def offloaded(rank: int, world_size: int, strategy: str, pin: bool, mixed: bool) -> None:
    net, plain = pair(Net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if mixed else {}
    wrap(net, world_size, strategy, offload_policy=CPUOffloadPolicy(pin_memory=pin), **options)
    before = transient_bytes()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    tolerance = 0.05 if mixed else 1e-5
    for step in range(3):
        for microbatch in range(2):
            net.set_is_last_backward(microbatch == 1)
            seed = 2 * step + microbatch
            word_loss(net, rank, seed).backward()
            average_gradients(plain, lambda m, r, seed=seed: word_loss(m, r, seed), world_size)
        assert_gradients_equal(net, plain, tolerance)
        assert_at_rest(net, before)
        for parameter in net.parameters():
            assert parameter.device.type == "cpu" and parameter.grad.device.type == "cpu"
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain, 5e-3 if mixed else 1e-5)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_offloading_on_a_cpu_trains_right(strategy: str, mixed: bool) -> None:
    run_ranks(offloaded, ranks_for(strategy), strategy, True, mixed)


def test_offloading_without_pinned_memory() -> None:
    run_ranks(offloaded, 2, "zero3", False, False)


@on_ranks(2)
def test_an_unknown_offload_policy_is_refused(rank: int, world_size: int) -> None:
    assert wrap(Net(), world_size, offload_policy=OffloadPolicy()) is not None
    message = raised(lambda: wrap(Net(), world_size, offload_policy="cpu"), ValueError)
    assert "offload_policy" in message and "cpu" in message
