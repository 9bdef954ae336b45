# SPDX-License-Identifier: Apache-2.0
"""Parameters that no unit has: ``ignored_params`` are left alone, whatever they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.contract.helpers import (
    WIDTH,
    assert_close,
    average_gradients,
    full,
    mesh_for,
    pair,
    vector_loss,
)
from tests.ranks import on_ranks


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.inner = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x) * self.scale)


@on_ranks(2)
def test_ignored_parameters_stay_what_they_are_and_are_not_reduced(
    rank: int, world_size: int
) -> None:
    net, plain = pair(Scaled)
    scale, weight = net.scale, net.inner[0].weight
    sw.fully_shard(net, mesh=mesh_for("zero", world_size), ignored_params={scale, weight})
    assert net.scale is scale and net.inner[0].weight is weight, "the very same objects"
    assert not isinstance(net.scale, DTensor) and isinstance(net.linear.weight, DTensor)
    vector_loss(net, rank).backward()
    assert net.scale is scale
    own = Scaled()
    own.load_state_dict(plain.state_dict())
    vector_loss(own, rank).backward()
    average_gradients(plain, vector_loss, world_size)
    for name, parameter in plain.named_parameters():
        grad = net.get_parameter(name).grad
        assert grad is not None, name
        if name in ("scale", "inner.0.weight"):
            # Not reduced: this rank's alone, and that is not the average.
            assert_close(grad, own.get_parameter(name).grad, name, 1e-6)
            assert not torch.allclose(grad, parameter.grad, atol=1e-6)
        else:
            assert_close(full(grad), parameter.grad, name, 1e-6)


class Odd(nn.Module):
    """Holds what no buffer could."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.local = nn.Parameter(torch.ones(rank + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.local.sum() + self.phase.real.sum()


@on_ranks(2)
def test_ignored_parameters_may_be_of_any_kind_and_differ_between_ranks(
    rank: int, world_size: int
) -> None:
    net = Odd(rank)
    skipped = {net.empty, net.phase, net.local}
    sw.fully_shard(net, mesh=mesh_for("zero", world_size), ignored_params=skipped)
    assert {net.empty, net.phase, net.local} == skipped
    vector_loss(net, rank).backward()
    assert net.local.grad is not None and net.local.grad.shape == (rank + 1,)
    assert net.linear.weight.grad is not None
