# SPDX-License-Identifier: Apache-2.0
"""Events while a forward or a backward runs: hidden inputs, a backward inside a forward,
other threads, other models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    Block,
    Net,
    assert_close,
    options_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    words,
    wrap,
)
from tests.contract.test_calls import check
from tests.ranks import on_ranks


class Adapted(nn.Module):
    """A frozen linear and an adapter; the input comes in an object, and so does the output."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, box: Box) -> Box:
        return Box(self.base(box.x) + self.adapter(box.x))


class Box:
    """Nothing that torch can open."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class BoxNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        box = Box(self.inner(x))
        for block in self.blocks:
            box = block(box)
        return box.x


class Refined(nn.Module):
    """A forward with a whole backward inside: it moves along a gradient, and trains a block."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        start = x.detach().requires_grad_()
        (moved,) = torch.autograd.grad(self.blocks[0](start).square().sum(), start)
        (self.blocks[1](start.detach()).square().mean() * self.scale).backward()
        for block in self.blocks:
            x = block(x - moved)
        return self.head(x)


@pytest.mark.parametrize("make", [BoxNet, Refined])
@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_inputs_in_objects_and_backwards_inside_forward(
    rank: int, world_size: int, strategy: str, make: Any
) -> None:
    net, plain = pair(make)
    wrap(net, world_size, strategy)
    plain.scale = 1 / world_size  # of the gradients that its forwards bring
    before = transient_bytes()
    for _ in range(2):
        check(net, plain, vector_loss, rank, world_size, before)


class InnerTrained(Refined):
    """The backward inside its forward brings gradients to the unit's own weights."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        x.square().mean().backward(retain_graph=True)
        return self.head(x)


@on_ranks(2)
def test_a_backward_inside_forward_for_its_own_weights_is_named(rank: int, world_size: int) -> None:
    net = wrap(InnerTrained(), world_size)
    assert "inside the forward of unit 'InnerTrained'" in raised(
        lambda: net(vectors(rank)), RuntimeError
    )


class Task(nn.Module):
    """A head on an encoder that other models use too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([encoder])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


class Tasks(nn.ModuleList):
    def __init__(self) -> None:
        encoder = Block()
        super().__init__(Task(encoder) for _ in range(2))


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_unit_of_two_models(rank: int, world_size: int, strategy: str) -> None:
    nets, plain = pair(Tasks)
    wrap(nets[0], world_size, strategy)
    sw.fully_shard(nets[1], **options_for(strategy, world_size))
    before = transient_bytes()

    def loss(models: Any, which: int) -> Tensor:
        return vector_loss(models[0], which) + vector_loss(models[1], which, 1)

    for _ in range(2):
        check(nets, plain, loss, rank, world_size, before)


@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
@on_ranks(2)
def test_a_frozen_model_may_be_written_after_a_forward_in_grad_mode(
    rank: int, world_size: int, strategy: str
) -> None:
    """No backward can come: its weights do not stay gathered."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    for _ in range(2):
        with torch.enable_grad():
            answers = [model.requires_grad_(False)(words(rank)) for model in (net, plain)]
        assert_close(*answers, "output", 1e-6)
        with torch.no_grad():
            for parameter in (*net.parameters(), *plain.parameters()):
                parameter.mul_(0.5)
