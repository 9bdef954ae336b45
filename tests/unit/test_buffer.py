# SPDX-License-Identifier: Apache-2.0
"""Buffers against whole tensors: every way from one list of placements to another.

All values are multiples of 12, so sums and averages over 2, 3 or 4 ranks are exact, whatever their
order. Padding is NaN in every test: whoever reads it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.core.buffer import Buffer
from shardwise.core.layout import ELEMENT, ROW, TENSOR, Grain, Item, Layout, plan
from shardwise.core.mesh import Ranks
from shardwise.core.placements import PARTIAL, REPLICATE, SHARD, Placement
from tests.models import mesh_of
from tests.ranks import on_ranks, run_ranks

R, P, S = REPLICATE, PARTIAL, SHARD
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (7, 13),
    "cube": (3, 5, 2),
    "vector": (37,),
    "tall": (50, 3),
    "one_row": (1, 6),
    "scalar": (),
}
CPU = torch.device("cpu")


def items_of(grain: Grain) -> list[Item]:
    return [Item(name, shape, grain) for name, shape in SHAPES.items()]


def whole_values(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        12.0 * torch.randint(-50, 50, shape, generator=generator).float()
        for shape in SHAPES.values()
    ]


def make(
    layout: Layout,
    ranks: Ranks,
    placements: Sequence[Placement],
    dtype: torch.dtype = torch.float32,
) -> Buffer:
    return Buffer(layout, ranks, placements, dtype, CPU, "test")


def fill(buffer: Buffer, values: Sequence[Tensor]) -> Buffer:
    """This rank's pieces of ``values``; NaN everywhere else."""
    buffer.flat.fill_(math.nan)
    for index, value in enumerate(values):
        low, high, offset, *_ = buffer.pieces[index]
        buffer.flat[offset : offset + high - low] = value.reshape(-1)[low:high].to(buffer.dtype)
    return buffer


def assert_holds(buffer: Buffer, values: Sequence[Tensor]) -> int:
    """The pieces equal those of ``values``; returns how many elements were compared."""
    compared = 0
    for index, value in enumerate(values):
        low, high, *_ = buffer.pieces[index]
        expected = value.reshape(-1)[low:high].to(buffer.dtype)
        assert torch.equal(buffer.view(index).reshape(-1), expected), (index, low, high)
        compared += high - low
    return compared


@on_ranks(2)
def test_a_wrong_element_is_noticed(rank: int, world_size: int) -> None:
    """Negative control: a wrong element in any piece, and a NaN that was read, are both seen."""
    ranks = Ranks(mesh_of(world_size))
    buffer = fill(make(plan(items_of(ROW), world_size), ranks, [R]), whole_values())
    assert assert_holds(buffer, whole_values()) == sum(v.numel() for v in whole_values())
    assert buffer.flat.isnan().any(), "there is padding to be poisoned"
    for index in range(len(SHAPES)):
        view = buffer.view(index).view(-1)
        for wrong in (view[-1].item() + 12, math.nan):
            before, view[-1] = view[-1].clone(), wrong
            with pytest.raises(AssertionError):
                assert_holds(buffer, whole_values())
            view[-1] = before


# ------------------------------------------------------------------------------ DTensors over it


FULL_MESHES = [
    ((1,), 1),
    ((2,), 1),
    ((3,), 1),
    ((4,), 1),
    ((2,), 0),
    ((2, 2), 2),
    ((2, 2), 1),
    ((2, 2), 0),
]


def check_full_tensor(
    rank: int, world_size: int, sizes: tuple[int, ...], sharded: int, finer: int
) -> list[int]:
    ranks = Ranks(mesh_of(*sizes))
    placements = [R] * (len(sizes) - sharded) + [S] * sharded
    held = []
    for grain in (ROW, ELEMENT, TENSOR):
        for dtype in (torch.float32, torch.bfloat16):
            layout = plan(items_of(grain), finer * math.prod(sizes))
            buffer = fill(make(layout, ranks, placements, dtype), whole_values())
            for index, value in enumerate(whole_values()):
                tensor = buffer.dtensor(index)
                assert tensor.shape == value.shape
                assert tensor.to_local().data_ptr() == buffer.view(index).data_ptr()
                assert torch.equal(tensor.full_tensor(), value.to(dtype)), (index, str(grain))
                held.append(tensor.to_local().numel())
    return held


@pytest.mark.parametrize("finer", [1, 3], ids=["one shard each", "three shards each"])
@pytest.mark.parametrize(("sizes", "sharded"), FULL_MESHES)
def test_the_full_tensor_of_every_parameter_is_the_reference(
    sizes: tuple[int, ...], sharded: int, finer: int
) -> None:
    world_size = math.prod(sizes)
    held = run_ranks(check_full_tensor, world_size, sizes, sharded, finer)
    assert len(held[0]) == 6 * len(SHAPES)
    if world_size > 1 and sharded:
        assert any(numel == 0 for rank in held for numel in rank), "some rank owns nothing of one"


# ------------------------------------------------------------------------------ release and restore


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_views_saved_by_autograd_survive_a_release(rank: int, world_size: int) -> None:
    """A view that autograd saved in forward is read in backward, after its memory went and came."""
    ranks = Ranks(mesh_of(world_size))
    layout = plan([Item("weight", (7, 5)), Item("bias", (7,))], world_size)
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(7, 5, generator=generator), torch.randn(7, generator=generator)
    main = fill(make(layout, ranks, [S]), [weight, bias])
    whole = make(layout, ranks, [R])
    inputs = torch.randn(4, 5, generator=generator)
    results = []
    for refill in (True, False):
        comm.all_gather(whole.flat, main.flat, ranks.axes[0]).wait()
        x = inputs.clone().requires_grad_()
        parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(2)]
        for index, parameter in enumerate(parameters):
            parameter.data = whole.view(index).detach()
        y = torch.nn.functional.linear(x, *parameters)
        whole.block.release()
        assert whole.flat.untyped_storage().nbytes() == 0 and not whole.block.live
        whole.block.acquire()
        assert whole.flat.untyped_storage().nbytes() == whole.block.nbytes
        whole.flat.fill_(math.nan)
        if refill:
            comm.all_gather(whole.flat, main.flat, ranks.axes[0]).wait()
        y.sum().backward()
        results.append(x.grad)
    expected = weight.sum(0).expand(4, 5)
    torch.testing.assert_close(results[0], expected)
    assert results[1].isnan().all(), "without the refill backward reads what is there: it is a view"
