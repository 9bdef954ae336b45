# SPDX-License-Identifier: Apache-2.0
"""Spread experts inside wrappers of others, and gradients that are clipped before they came."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from tests.contract.helpers import logged, raised
from tests.contract.test_experts import Delayed, grid, rows, spread_net
from tests.models import mesh_of
from tests.moe_models import batch
from tests.ranks import on_ranks


def wrapped_otherwise(how: str, mesh: Any, world_size: int) -> Any:
    net: Any = spread_net(mesh)
    if how == "ddp":
        return DistributedDataParallel(net)
    if how.startswith("torch"):
        experts = mesh["dp"] if how == "torch, apart" else mesh_of(world_size)
        if how != "torch":
            torch_fully_shard(net.moe.experts, mesh=experts)
        torch_fully_shard(net, mesh=mesh_of(world_size))
    elif how == "ours":
        sw.fully_shard(net, mesh=mesh_of(world_size), meshes={"*.experts": mesh["dp"]})
    return net


@pytest.mark.parametrize(
    ("how", "told"),
    [("ddp", True), ("torch", True), ("torch, experts too", True)]
    + [("torch, apart", False), ("ours", False), ("plain", False)],
)
@on_ranks(4, fresh=True)
def test_experts_that_a_wrapper_made_copies_of_are_told(
    rank: int, world_size: int, how: str, told: bool
) -> None:
    """A wrapper over all ranks makes 0 and 1 of experts 2 and 3, or a mixture of both."""
    net = wrapped_otherwise(how, grid(world_size // 2, 2), world_size)
    with logged() as texts:
        for _ in range(2):
            net(batch(0, rank, world_size)).backward()
    found = [text for text in texts if "other experts" in text]
    assert len(found) == (told and rank == 0), texts
    assert all("ranks [0, 1]" in text and "experts 0 to 1 of 4" in text for text in found), texts


@pytest.mark.parametrize("wrapper", ["plain", "zero3", "data_parallel"])
@on_ranks(2)
def test_gradients_are_not_clipped_before_the_delayed_ones_came(
    rank: int, world_size: int, wrapper: str
) -> None:
    net: Any = Delayed()
    if wrapper != "plain":
        {"zero3": sw.fully_shard, "data_parallel": sw.data_parallel}[wrapper](
            net, mesh=mesh_of(world_size)
        )
    clip = partial(sw.optimizer(net, matrix=sw.muon(), elementwise=sw.adamw()).clip_grad_norm, 0.1)
    net(rows(rank)).backward()
    before = [p.grad if p.grad is None else p.grad.clone() for p in net.parameters()]
    assert "Call backward_dw() after backward" in raised(clip, RuntimeError)
    for one, parameter in zip(before, net.parameters(), strict=True):
        assert (one is None and parameter.grad is None) or torch.equal(
            *(g.to_local() if hasattr(g, "to_local") else g for g in (one, parameter.grad))
        )
    net.experts.backward_dw()
    clip()
