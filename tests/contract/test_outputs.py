# SPDX-License-Identifier: Apache-2.0
"""Results of forwards: losses on the side, features of frozen units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    check_backward,
    options_for,
    pair,
    raised,
    ranks_for,
    vector_loss,
    vectors,
    wrap,
)
from tests.contract.test_odd_uses import WAYS, wrapped
from tests.ranks import on_ranks


class SideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.last(self.first(x).tanh())
        self.kept = hidden.square().mean()
        return x + hidden


class SideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SideBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_loss_that_a_module_keeps_on_itself(rank: int, world_size: int, strategy: str) -> None:
    """A loss that a module leaves on itself, as routers of experts do, beside that of the model."""
    net, plain = pair(SideNet)
    wrap(net, world_size, strategy, unused_parameters="zeros")
    for step in range(3):
        for model, ranks in ((net, [rank]), (plain, range(world_size))):
            for each in ranks:
                loss = model(torch.full((3, WIDTH), 1.0 + each + step)).square().mean()
                ((loss + model.blocks[0].kept) / len(ranks)).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                grad = net.get_parameter(name).grad
                low, high = grad.cut.piece
                wanted = parameter.grad.reshape(-1)[low:high]
                assert torch.allclose(grad.to_local().reshape(-1), wanted, atol=1e-6), name
        net.zero_grad()
        plain.zero_grad()


class Leaking(nn.Module):
    """Blocks whose forwards leave losses in a list that no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.left: Callable[[], list[Tensor]] = list
        left: list[Tensor] = []
        for block in self.blocks:
            block.forward = partial(self.leak, block, left)  # type: ignore[method-assign]
        self.left = lambda: [left.pop() for _ in self.blocks]

    @staticmethod
    def leak(block: Any, left: list[Tensor], x: Tensor) -> Tensor:
        y = block[0](x).tanh()
        left.append((block[0](x) * block[0].bias).square().mean())
        return y

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def leaking_loss(model: Any, rank: int, step: int) -> Tensor:
    loss = vector_loss(model, rank, step)
    return loss + sum(model.left())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_losses_that_forwards_leave_in_a_list(
    rank: int, world_size: int, way: str, frozen: bool
) -> None:
    """Their backward reads weights, and comes not through an output of the unit."""
    net, plain = wrapped(way, world_size, Leaking)
    for model in (net, plain) if frozen else ():
        model.blocks[2].requires_grad_(False)
    for step in range(3):
        check_backward(net, plain, leaking_loss, rank, world_size, step)


class Features(nn.Module):
    """A frozen unit whose features are the loss, and whose output is not used."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(inner(), nn.Tanh())
        self.inner.requires_grad_(False)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inner[0].register_forward_hook(lambda *called: self.kept.append(called[2]))
        return self.inner(self.first(x))


def feature_loss(model: Any, rank: int, step: int = 0) -> Tensor:
    model(vectors(rank, step))
    return model.kept.pop().square().mean()


@on_ranks(2)
def test_features_of_a_frozen_unit_whose_output_is_not_used(rank: int, world_size: int) -> None:
    """Backward would read weights that nobody has gathered for it: named, or right."""
    for inner in (partial(nn.LayerNorm, WIDTH), partial(nn.Linear, WIDTH, WIDTH)):
        for options in ({}, {"reshard_after_forward": False}):
            net, plain = pair(partial(Features, inner))
            sw.fully_shard(net.inner, **options_for("zero3", world_size), **options)
            sw.fully_shard(net, **options_for("zero3", world_size))
            if options:
                check_backward(net, plain, feature_loss, rank, world_size)
                continue
            raised(feature_loss(net, rank).backward, RuntimeError)  # torch says so
