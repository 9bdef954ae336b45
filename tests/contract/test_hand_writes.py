# SPDX-License-Identifier: Apache-2.0
"""Weights and gradients that are written by hand, alike on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.contract.helpers import (
    Net,
    assert_parameters_equal,
    average_gradients,
    pair,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_writes_that_ranks_share_are_right(rank: int, world_size: int, strategy: str) -> None:
    """By hand, by an optimizer of one's own, and by one of torch that passes empty pieces by."""

    class Passing(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for one in self.param_groups[0]["params"]:
                    if not isinstance(one, sw.ShardedTensor) or one.to_local().numel():
                        one.add_(one.grad, alpha=-0.1)

    net, plain = pair(Net)
    net = wrap(net, world_size, strategy)
    for step in range(3):
        word_loss(net, rank, step).backward()
        average_gradients(plain, partial(word_loss, step=step), world_size)
        for model in (net, plain):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            Passing(model.parameters(), {}).step()
            with torch.no_grad():
                for one in model.parameters():
                    one.sub_(0.1 * one.grad)
                    one.grad = (one.grad * 1.5).clone() / 1.5
                    one.grad.mul_(torch.full(one.shape, 0.5))
                    one.add_(one.grad)
                    one.clamp_(min=torch.linspace(-1, 0, one.numel()).view(one.shape))
                    torch.add(one, torch.linspace(0, 1, one.numel()).view(one.shape), out=one.grad)
            model.zero_grad()
    assert_parameters_equal(net, plain)
