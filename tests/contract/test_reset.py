# SPDX-License-Identifier: Apache-2.0
"""Exceptions in the middle of an iteration, and ``reset_iter_state`` after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    Block,
    assert_at_rest,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    options_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    wrap,
)
from tests.ranks import run_ranks


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
    for step in range(3):
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
        vector_loss(net, rank, step).backward()
        average_gradients(plain, lambda m, r, step=step: vector_loss(m, r, step), world_size)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
def test_after_an_exception_and_a_reset_training_is_right(
    strategy: str, where: str, number: int
) -> None:
    run_ranks(explode, ranks_for(strategy), strategy, where, number, False)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
def test_a_reset_drops_microbatches_that_waited(strategy: str, where: str) -> None:
    run_ranks(explode, ranks_for(strategy), strategy, where, 1, True)


def no_grad_exception(rank: int, world_size: int) -> None:
    net, plain = pair(Mined)
    wrap(net, world_size)
    before = transient_bytes()
    net.blocks[1].armed = "forward"
    with torch.no_grad():
        raised(lambda: vector_loss(net, rank), BoomError)
    net.blocks[1].armed = None
    net.reset_iter_state()
    assert_at_rest(net, before)
    vector_loss(net, rank).backward()
    average_gradients(plain, vector_loss, world_size)
    assert_gradients_equal(net, plain)


def test_a_reset_after_an_exception_without_gradients() -> None:
    run_ranks(no_grad_exception, 2)


def only_on_the_root(rank: int, world_size: int) -> str:
    net = wrap(Mined(), world_size)
    vector_loss(net, rank).backward()
    net.reset_iter_state()  # harmless between iterations
    return raised(lambda: net.blocks[0].reset_iter_state(), RuntimeError)


def test_a_reset_is_for_the_root() -> None:
    for message in run_ranks(only_on_the_root, 2):
        assert "root" in message


def list_unit(rank: int, world_size: int) -> None:
    """A unit of two modules of which only the first came to run."""
    net, plain = pair(Mined)
    options = options_for("zero3", world_size)
    sw.fully_shard([net.blocks[0], net.blocks[1]], **options)
    sw.fully_shard(net, **options)
    before = transient_bytes()
    net.blocks[1].armed = "forward"
    raised(lambda: vector_loss(net, rank), BoomError)
    net.blocks[1].armed = None
    net.reset_iter_state()
    assert_at_rest(net, before)
    vector_loss(net, rank).backward()
    average_gradients(plain, vector_loss, world_size)
    assert_gradients_equal(net, plain)
    assert_at_rest(net, before)


def test_a_reset_with_a_list_of_modules_half_run() -> None:
    run_ranks(list_unit, 2)
