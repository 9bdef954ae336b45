# SPDX-License-Identifier: Apache-2.0
"""Experts used twice in a backward, ranks without tokens, whole state dicts of spread experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core import comm
from shardwise.moe import FullPrecision, GroupedMLP, MixtureOfExperts, Routing, swiglu
from shardwise.shard.state_dict import full_state_dict, load_full_state_dict
from tests.models import mesh_of
from tests.moe_models import Way, build, by_expert
from tests.ranks import on_ranks, run_ranks
from tests.whole import assert_same

HIDDEN = 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = GroupedMLP(2, HIDDEN, HIDDEN, activation=swiglu())

    def forward(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        ends = torch.tensor([half, len(x)], dtype=torch.int32)
        return self.mlp(x, ends, FullPrecision(torch.ones(len(x))))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One block, used twice, a linear between."""

    def __init__(self, block: nn.Module, twice: bool) -> None:
        super().__init__()
        self.first, self.block, self.middle = nn.Linear(HIDDEN, HIDDEN), block, nn.Linear(32, 32)
        self.twice = twice
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.block(x)
        x = x + self.middle(x)
        return (x + self.block(x) if self.twice else x).square().mean()


def used_twice(rank: int, world_size: int, kind: str, wrapping: str, way: str) -> dict[str, Tensor]:
    block = Experts() if kind == "experts" else nn.Linear(HIDDEN, HIDDEN, bias=False)
    net: Any = Twice(block, way == "module")
    mesh = mesh_of(world_size)
    options: Any = {} if kind == "experts" else {"precision": sw.Precision(weights="mxfp8")}
    if wrapping == "buckets":
        net = sw.data_parallel(net, mesh=mesh, placements=sw.zero(1), bucket_mb=0.0005, **options)
    else:
        if wrapping == "units":
            sw.fully_shard(net.block, mesh=mesh, placements=sw.zero(3), **options)
        sw.fully_shard(net, mesh=mesh, placements=sw.zero(3), **options)
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(5))
    rows = x.split(8) if way == "forward" else [x]
    sum(net(part) for part in rows).backward()
    return {
        name.removeprefix("module."): parameter.grad.full_tensor().clone()
        for name, parameter in net.named_parameters()
    }


@pytest.mark.parametrize("way", ["module", "forward"])
@pytest.mark.parametrize("kind", ["experts", "mxfp8"])
def test_gradients_of_all_uses_are_summed(kind: str, way: str) -> None:
    """One unit reduces when backward is over; small ones and buckets must not reduce before."""
    (expected,) = run_ranks(used_twice, 1, kind, "one", way)
    for wrapping in ("units", "buckets"):
        for found in run_ranks(used_twice, 2, kind, wrapping, way):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], msg=f"{wrapping}: {name}")


def trained(
    rank: int, world_size: int, tokens: tuple[int, int], delay: bool, grad: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = MixtureOfExperts(
        Routing(num_experts=4, experts_per_token=2, balance_loss=0.1), 8, 8,
        activation=swiglu(), bias=True, delay_weight_gradient=delay,
    )  # fmt: skip
    layer.spread(comm.as_axis(dist.group.WORLD, "ep"))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens[rank], 8, generator=generator).requires_grad_(grad)
    y, routes = layer(x)
    (y.square().sum() + routes.loss).backward()
    assert not layer.experts.delayed._pending
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def test_a_rank_without_tokens_keeps_nobody_waiting() -> None:
    for found in run_ranks(trained, 2, (0, 5), False, True):
        assert all(bool(gradient.isfinite().all()) for gradient in found.values())


def test_delayed_gradients_come_also_where_the_rows_need_none() -> None:
    plain, delayed = (run_ranks(trained, 2, (3, 5), delay, False) for delay in (0, 1))
    for one, other in zip(plain, delayed, strict=True):
        for name, gradient in one.items():
            assert torch.equal(gradient, other[name]), name


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@on_ranks(2)
def test_a_whole_state_dict_holds_the_experts_of_all_ranks(
    rank: int, world_size: int, layout: str
) -> None:
    net = build(Way(ranks=2, ep=2, strategy="zero3", weights=layout))
    before = by_expert(net, None)
    both = full_state_dict(nn.ModuleList([net, net]))  # a module that is used twice
    tensors = {name: value for name, value in both.items() if isinstance(value, Tensor)}
    one, other = ({n[2:]: v for n, v in tensors.items() if n[0] == at} for at in "01")
    assert_same(one, other)
    box = [full_state_dict(net, only_first_rank=True)]
    dist.broadcast_object_list(box, 0)  # the file that rank 0 wrote
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    load_full_state_dict(net, box[0])
    after = by_expert(net, None)
    assert before and before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def biased(rank: int, world_size: int, axis: bool) -> Tensor:
    torch.manual_seed(0)
    routing = Routing(num_experts=4, experts_per_token=2, bias_rate=0.1)
    layer = MixtureOfExperts(routing, 8, 16, activation=swiglu())
    layer.spread(None, comm.as_axis(dist.group.WORLD, "dp") if axis else None)
    sw.fully_shard(layer, mesh=mesh_of(world_size), placements=sw.zero(3))
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(rank))
    layer(x)[0].sum().backward()
    layer.router.update_bias()
    return layer.router.expert_bias


def test_biases_of_ranks_do_not_part() -> None:
    """Told which ranks have tokens, or told by the mesh over which the router is wrapped."""
    told, derived = run_ranks(biased, 2, True), run_ranks(biased, 2, False)
    assert all(torch.equal(bias, told[0]) for bias in told + derived) and told[0].abs().max() > 0
