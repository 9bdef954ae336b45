# SPDX-License-Identifier: Apache-2.0
"""Parameters of awkward shapes over small meshes: what the tests of ShardedTensor are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise.core.layout import ELEMENT, ROW, TENSOR, Grain, Item, Layout, plan
from shardwise.core.mesh import Ranks
from shardwise.core.tensor import Backing, Cut, ShardedTensor
from tests.one_card import device_type
from tests.ranks import run_ranks

SHAPES = {
    "wide": (7, 13),
    "cube": (3, 5, 2),
    "vector": (37,),
    "tall": (150, 3),
    "one_row": (1, 6),
    "scalar": (),
}
# (world size, mesh shape, sharded axes, shards per holder)
MESHES = [
    (1, (1,), (True,), 1),
    (2, (2,), (True,), 1),
    (3, (3,), (True,), 1),
    (4, (4,), (True,), 1),
    (2, (2,), (True,), 3),
    (4, (2, 2), (False, True), 1),
    (4, (2, 2), (True, True), 1),
    (4, (2, 2), (True, True), 2),
    (2, (2,), (False,), 1),
]
CASES = [(*mesh, grain) for mesh in MESHES for grain in (ROW, ELEMENT)]
CASES += [(3, (3,), (True,), 1, TENSOR), (4, (2, 2), (True, True), 1, TENSOR)]
SOME_CASES = [
    (1, (1,), (True,), 1, ROW),
    (3, (3,), (True,), 1, ROW),
    (3, (3,), (True,), 1, ELEMENT),
    (4, (2, 2), (False, True), 1, ROW),
    (4, (2, 2), (True, True), 2, ELEMENT),
]
NAN = float("nan")


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device_type(), shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


class World:
    """All SHAPES in one flat buffer, as this rank holds it. Padding is NaN: reading it shows."""

    def __init__(
        self, mesh_shape: Sequence[int], sharded: Sequence[bool], finer: int, grain: Grain
    ) -> None:
        self.mesh = mesh_of(tuple(mesh_shape))
        self.sharded = tuple(sharded)
        holders = math.prod(size for size, cut in zip(mesh_shape, sharded, strict=True) if cut)
        items = [Item(name, shape, grain) for name, shape in SHAPES.items()]
        self.layout: Layout = plan(tuple(items), holders * finer)
        self.cuts = [
            Cut(self.layout, index, Ranks(self.mesh), self.sharded) for index in range(len(items))
        ]

    def tensors(
        self, fulls: dict[str, Tensor], *, requires_grad: bool = False, fresh_cuts: bool = False
    ) -> dict[str, ShardedTensor]:
        """One buffer filled with pieces of full tensors, and ShardedTensors over it."""
        first = self.cuts[0]
        run = self.layout.num_shards // first.num_holders
        begin = first.shard_index * run * self.layout.shard_size
        dtype = next(iter(fulls.values())).dtype
        flat = torch.full((run * self.layout.shard_size,), NAN, dtype=dtype)
        result = {}
        for index, (name, full) in enumerate(fulls.items()):
            cut = self.cuts[index]
            if fresh_cuts:
                cut = Cut(self.layout, index, Ranks(self.mesh), self.sharded)
            lo, hi = cut.piece
            start = self.layout.starts[index] + lo - begin if hi > lo else 0
            local = flat[start : start + hi - lo].view(cut.local_shape)
            local.copy_(full.reshape(-1)[lo:hi].view(cut.local_shape))
            result[name] = ShardedTensor(local, cut, requires_grad=requires_grad, buffer=Backing())
        return result


def full_tensors(seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def check(actual: ShardedTensor, expected: Tensor) -> None:
    """The gathered value is bitwise the expected one, and so is the local piece."""
    assert type(actual) is ShardedTensor
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    full = actual.full_tensor()
    assert type(full) is Tensor
    torch.testing.assert_close(full, expected, rtol=0, atol=0, equal_nan=True)
    piece = actual.cut.take(expected)
    torch.testing.assert_close(actual.to_local(), piece, rtol=0, atol=0, equal_nan=True)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def parameters_of(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: nn.Parameter(one) for name, one in tensors.items()}


def run_case(fn: Callable[..., Any], case: tuple[Any, ...], *args: Any) -> list[Any]:
    world_size, *rest = case
    return run_ranks(fn, world_size, *rest, *args)


def full_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
