# SPDX-License-Identifier: Apache-2.0
"""Exceptions in the middle of an iteration, and ``reset_iter_state`` after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.helpers import (
    MAIN_STRATEGIES,
    Block,
    assert_at_rest,
    assert_close,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    full,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


class BoomError(Exception):
    """Only our own mine raises it."""


class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise BoomError("backward")


class Mined(nn.Module):
    """Blocks, and a mine inside one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MinedBlock() for _ in range(3))
        self.last = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class MinedBlock(Block):
    armed: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.armed == "forward":
            raise BoomError("forward")
        if self.armed == "backward":
            hidden = Mine.apply(hidden)
        return x + self.down(hidden.tanh())


def explode(
    rank: int, world_size: int, strategy: str, where: str, number: int, microbatch: bool
) -> None:
    net, plain = pair(Mined)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        if microbatch:  # gradients of an earlier microbatch, still unreduced, are dropped too
            net.set_requires_gradient_sync(False)
            vector_loss(net, rank, 50).backward()
            net.set_requires_gradient_sync(True)
        net.blocks[number].armed = where
        assert where in raised(lambda: vector_loss(net, rank, 60).backward(), BoomError)
        net.blocks[number].armed = None
        net.reset_iter_state()
        assert_at_rest(net, before)
        assert all(parameter.grad is None for parameter in net.parameters())
        check_backward(net, plain, vector_loss, rank, world_size, step)
        assert_at_rest(net, before)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("strategy", "number"),
    [("zero0", 1), ("zero1", 1), ("zero3", 0), ("zero3", 1), ("zero3", 2), ("hfsdp", 1)],
)
def test_after_an_exception_and_a_reset_training_is_right(
    strategy: str, number: int, where: str
) -> None:
    run_ranks(explode, ranks_for(strategy), strategy, where, number, False)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
def test_a_reset_drops_microbatches_that_waited(strategy: str, where: str) -> None:
    run_ranks(explode, ranks_for(strategy), strategy, where, 1, True)


@on_ranks(2)
def test_a_reset_is_for_the_root(rank: int, world_size: int) -> None:
    net = wrap(Mined(), world_size)
    vector_loss(net, rank).backward()
    net.reset_iter_state()  # harmless between iterations
    message = raised(lambda: net.blocks[0].reset_iter_state(), RuntimeError)
    assert "root" in message


@pytest.mark.parametrize("microbatch", [False, True])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
@on_ranks(ranks_for)
def test_gradients_of_a_failed_backward_are_not_added_to_silently(
    rank: int, world_size: int, strategy: str, microbatch: bool
) -> None:
    """Gradients that a failed backward left are not mixed with those of the next."""
    net = wrap(Mined(), world_size, strategy)
    vector_loss(net, rank).backward()
    net.zero_grad()
    if microbatch:
        net.set_requires_gradient_sync(False)
        vector_loss(net, rank).backward()
        net.set_requires_gradient_sync(True)
    net.blocks[0].armed = "backward"
    raised(lambda: vector_loss(net, rank).backward(), BoomError)
    net.blocks[0].armed = None
    message = raised(lambda: vector_loss(net, rank), RuntimeError)
    net.reset_iter_state()
    vector_loss(net, rank).backward()
    assert "raised" in message and "reset_iter_state" in message


class Careful(Mined):
    """Catches what its block raises, and goes on without it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except BoomError:
                x = x + 1
        return self.last(x)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_an_exception_that_the_model_catches_itself(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Careful)
    wrap(net, world_size, strategy, unused_parameters="zeros")
    before = transient_bytes()
    for armed in ("forward", None, "forward"):
        for model in (net, plain):
            model.blocks[1].armed = armed
        vector_loss(net, rank).backward()
        average_gradients(plain, vector_loss, world_size)
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                assert_close(full(net.get_parameter(name).grad), parameter.grad, name)
        assert_at_rest(net, before)
        net.zero_grad()
        plain.zero_grad()


@on_ranks(2)
def test_an_optimizer_over_gathered_weights_is_refused(rank: int, world_size: int) -> None:
    net = wrap(Mined(), world_size)
    net.blocks[0].unshard()
    optimizer = torch.optim.AdamW(net.parameters())
    vector_loss(net, rank).backward()
    message = raised(optimizer.step, RuntimeError)
    assert "AdamW" in message and ".weight'" in message and "reshard()" in message
