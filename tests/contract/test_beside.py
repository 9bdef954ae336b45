# SPDX-License-Identifier: Apache-2.0
"""An optimizer that writes the weights of forward together with main: a rank that holds all of them
and keeps them gathers nothing after the step, and computes with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.optim import elementwise
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.shard.module import unit_of
from tests.contract.helpers import WORDS, Net
from tests.models import mesh_of
from tests.ranks import on_ranks

pytest.importorskip("triton")  # whose kernel is replaced


def build(stage: int, world_size: int) -> Any:
    torch.manual_seed(0)
    net = Net()
    precision = sw.Precision(weights="bf16", reduce="fp32")
    for unit in (*net.blocks, net):
        sw.fully_shard(
            unit, mesh=mesh_of(world_size), placements=sw.zero(stage), precision=precision
        )
    return net


def fresh(net: nn.Module) -> list[bool]:
    """Whether the whole weights of each group are made of main as it is now."""
    groups = [group for unit in map(unit_of, (*net.blocks, net)) for group in unit.groups]  # type: ignore[misc, union-attr]
    assert len(groups) > 2
    for group in groups:
        if group.copies[0].filled == group.main.state:
            for index, parameter in enumerate(group.sharded):
                local = parameter._local_tensor  # type: ignore[attr-defined]
                assert torch.equal(group.whole.view(index), local.bfloat16())
    return [group.copies[0].filled == group.main.state for group in groups]


def use_kernel(patch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a clip comes with the step, and a kernel (here a loop) takes both."""

    def step(
        weights: list[Tensor], grads: list[Tensor], *_: Any, lr: float, besides: Any, **__: Any
    ) -> None:
        for weight, grad, beside in zip(weights, grads, besides, strict=True):
            weight.data.add_(grad, alpha=-lr)  # .data: a kernel tells no version counter
            if beside is not None:
                beside.data.copy_(weight)

    patch.setattr(elementwise, "_kernel_fits", lambda *pieces: True)
    patch.setattr("shardwise.kernels.adamw.step", step)
    clip = torch.tensor([1.0, 0.0])
    patch.setattr(ShardedOptimizer, "_take_clip", lambda self: (clip, True))


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_weights_beside_main_are_written_with_it(rank: int, world_size: int) -> None:
    patch = pytest.MonkeyPatch()
    words = torch.arange(WORDS).reshape(1, -1)
    try:
        use_kernel(patch)
        for stage in (0, 2, 3):
            net = build(stage, world_size)
            optimizer = sw.optimizer(net, matrix=None, elementwise=sw.adamw(lr=0.1))
            losses, found = [], []
            for number in range(4):
                loss = net(words).float().pow(2).mean()
                loss.backward()
                if number == 2:  # the optimizer leaves one out: its group is gathered as before
                    net.head.bias.grad = None
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
                found.append(fresh(net))
            kept = stage == 0 or (stage == 2 and world_size == 1)
            assert found[0] == found[3] == [kept] * len(found[0]), (stage, found)
            assert found[2].count(False) == (1 if kept else len(found[0])), (stage, found)
            patch.setattr("shardwise.buffer.Beside.views", lambda self, items: None)
            again = build(stage, world_size)
            other = sw.optimizer(again, matrix=None, elementwise=sw.adamw(lr=0.1))
            for number, expected in enumerate(losses):
                loss = again(words).float().pow(2).mean()
                loss.backward()
                if number == 2:
                    again.head.bias.grad = None
                other.step()
                other.zero_grad()
                assert not any(fresh(again)) and float(loss) == expected
            patch.undo()
            use_kernel(patch)
    finally:
        patch.undo()
