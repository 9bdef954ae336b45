# SPDX-License-Identifier: Apache-2.0
"""Weights that forward writes, and parameters that no flat buffer can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import raised
from tests.models import mesh_of
from tests.ranks import on_ranks


class Writer(nn.Module):
    """Treats its weight in ``way`` before it uses it."""

    def __init__(self, way: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64, bias=False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.way == "write":
            weight.data.mul_(2)
        elif self.way == "in place":
            with torch.no_grad():
                weight.mul_(2)
        return self.inner(x)


@on_ranks(2)
def test_a_write_to_whole_main_weights_is_kept(rank: int, world_size: int) -> None:
    """Whole main weights are what forward sees: a write is one to them."""
    for way in ("write", "in place"):
        model = sw.fully_shard(Writer(way), mesh=mesh_of(world_size), placements=sw.zero(0))
        model(torch.randn(2, 64)).sum().backward()
        assert torch.equal(model.inner.weight.full_tensor(), 2 * Writer().inner.weight)


# ------------------------------------------------------------------------------ sparse gradients


# ------------------------------------------------------------------------------ tensor subclasses


class Scaled(Tensor):
    """A tensor whose operations are its own, as those of quantised weights are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


@on_ranks(2)
def test_parameters_with_operations_of_their_own_are_refused(rank: int, world_size: int) -> None:
    for wrap in (sw.fully_shard, sw.data_parallel):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(model.weight.detach().as_subclass(Scaled))
        message = raised(lambda w=wrap, m=model: w(m, mesh=mesh_of(world_size)), ValueError)
        assert "'weight' is a Scaled" in message and "ignored_params" in message
        wrap(model, mesh=mesh_of(world_size), ignored_params={model.weight})
