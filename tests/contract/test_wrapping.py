# SPDX-License-Identifier: Apache-2.0
"""Wrapping: changes to a module, the owner of each parameter, the remains of a failure."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.shard.module import unit_of
from tests.contract.helpers import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    full,
    mesh_for,
    num_groups,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


@on_ranks(2)
def test_a_wrapped_module_is_an_fsdp_module_of_its_class(rank: int, world_size: int) -> None:
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    keys = list(net.state_dict())
    assert wrap(net, world_size) is net
    for module, original in ((net, Net), (net.blocks[0], Block)):
        kind = type(module)
        assert isinstance(module, FSDPModule) and isinstance(module, sw.ShardedModule)
        assert isinstance(module, original)
        assert kind.__name__ == f"FSDP{original.__name__}"
        order = kind.__mro__
        assert order.index(FSDPModule) < order.index(original)
    assert type(net.blocks[0]) is type(net.blocks[1]), "one class for all blocks of a kind"
    assert type(net.head) is nn.Linear and type(net.blocks[0].up) is nn.Linear
    assert [name for name, _ in net.named_parameters()] == names
    assert list(net.state_dict()) == keys
    for name, parameter in net.named_parameters():
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor), name
        assert parameter.is_leaf and parameter.requires_grad, name


def shapes_are_global(rank: int, world_size: int) -> None:
    net, plain = pair(Net)
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    wrap(net, world_size)
    local = 0
    for name, parameter in net.named_parameters():
        assert parameter.shape == shapes[name], name
        assert parameter.stride() == plain.get_parameter(name).stride(), name
        local += parameter.to_local().numel()
    whole = sum(shape.numel() for shape in shapes.values())
    assert 0 < local < whole, "each rank holds a part"
    assert_parameters_equal(net, plain, tolerance=0.0)


def test_parameters_at_rest_show_the_whole_shape_and_hold_a_part() -> None:
    run_ranks(shapes_are_global, 2)
    run_ranks(shapes_are_global, 4)


@on_ranks(2)
def test_slicing_a_wrapped_sequential_gives_a_plain_one(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sw.fully_shard(model[0], mesh=mesh_for("zero", world_size))
    sw.fully_shard(model, mesh=mesh_for("zero", world_size))
    head = model[:2]
    assert type(head) is nn.Sequential and not isinstance(head, FSDPModule)
    assert len(head) == 2 and head[0] is model[0]
    assert isinstance(head[0], FSDPModule)
    assert isinstance(model, FSDPModule), "the original stays wrapped"


@on_ranks(2)
def test_wrapping_twice_is_refused_and_changes_nothing(rank: int, world_size: int) -> None:
    net, plain = pair(Block)
    mesh = mesh_for("zero", world_size)
    sw.fully_shard(net, mesh=mesh)
    message = raised(lambda: sw.fully_shard(net, mesh=mesh), AssertionError)
    assert type(net).__name__ == "FSDPBlock"
    check_backward(net, plain, vector_loss, rank, world_size)
    assert "Block" in message and "already" in message


class Chain(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


@on_ranks(2)
def test_containers_without_a_forward_are_refused_and_those_with_one_are_not(
    rank: int, world_size: int
) -> None:
    mesh = mesh_for("zero", world_size)
    linears = [nn.Linear(4, 4), nn.Linear(4, 4)]
    first = raised(lambda: sw.fully_shard(nn.ModuleList(linears), mesh=mesh), ValueError)
    members = nn.ModuleDict({"a": linears[0]})
    second = raised(lambda: sw.fully_shard(members, mesh=mesh), ValueError)
    net, plain = pair(lambda: Chain([nn.Linear(4, 4), nn.Linear(4, 4)]))
    sw.fully_shard(net, mesh=mesh)
    assert torch.allclose(net(vectors(rank, width=4)), plain(vectors(rank, width=4)))
    assert "ModuleList" in first and "forward" in first
    assert "ModuleDict" in second and "forward" in second


@on_ranks(2)
def test_a_list_of_modules_is_one_unit(rank: int, world_size: int) -> None:
    net, plain = pair(lambda: Net(layers=3))
    mesh = mesh_for("zero", world_size)
    # The same module twice and a module inside another count once.
    together = [net.blocks[0], net.blocks[1], net.blocks[0], net.blocks[1].up]
    before = transient_bytes()
    assert sw.fully_shard(together, mesh=mesh) is together
    assert isinstance(net.blocks[0], FSDPModule) and isinstance(net.blocks[1], FSDPModule)
    assert type(net.blocks[1].up) is nn.Linear
    sw.fully_shard(net, mesh=mesh)
    assert type(net.blocks[2]) is Block, "left to the root"
    for step in range(2):
        with sw.comm.record() as calls:
            word_loss(net, rank, step).backward()
        average_gradients(plain, lambda m, r, step=step: word_loss(m, r, step), world_size)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)
        reductions = [call for call in calls if call.operation == "reduce_scatter"]
        assert unit_of(net.blocks[0]) is unit_of(net.blocks[1])
        assert len(reductions) == num_groups(net.blocks[0], net), "for the list, for the root"


@on_ranks(2)
def test_each_parameter_belongs_to_the_innermost_unit_around_it(rank: int, world_size: int) -> None:
    net = Net(layers=2)
    mesh = mesh_for("zero", world_size)
    sw.fully_shard(net.blocks[0].up, mesh=mesh)
    sw.fully_shard(net.blocks[0], mesh=mesh)
    sw.fully_shard(net, mesh=mesh)
    up = sum(p.numel() for p in net.blocks[0].up.parameters())
    block = sum(p.numel() for p in net.blocks[0].parameters())
    whole = sum(p.numel() for p in net.parameters())
    owned = {net.blocks[0].up: up, net.blocks[0]: block - up, net: whole - block}
    for module, numel in owned.items():
        unit = unit_of(module)
        assert unit is not None
        assert sum(math.prod(item.shape) for group in unit.groups for item in group.items) == numel
    with sw.comm.record() as calls, torch.no_grad():
        net(words(rank))
    gathers = [call for call in calls if call.operation == "all_gather"]
    assert len(gathers) == num_groups(*owned), "each is gathered once, by the unit that owns it"


class Bare(nn.Module):
    """A root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_a_root_without_parameters_of_its_own_trains(rank: int, world_size: int) -> None:
    net, plain = pair(Bare)
    before = transient_bytes()
    wrap(net, world_size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        assert check_backward(net, plain, vector_loss, rank, world_size, step) == 12
        assert_at_rest(net, before)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)


class Final(nn.Module):
    """A class that refuses subclasses cannot change its class either."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(1))

    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@on_ranks(2)
def test_a_failure_while_wrapping_leaves_every_module_as_it_was(rank: int, world_size: int) -> None:
    first, final = Block(4), Final()
    modules = [first, final]
    parameters = [dict(module.named_parameters()) for module in modules]
    values = [{n: p.detach().clone() for n, p in group.items()} for group in parameters]
    attributes = [set(module.__dict__) for module in modules]
    mesh = mesh_for("zero", world_size)
    assert "final" in raised(lambda: sw.fully_shard(modules, mesh=mesh), TypeError)
    assert type(first) is Block and type(final) is Final
    for module, group, before, keys in zip(modules, parameters, values, attributes, strict=True):
        assert set(module.__dict__) == keys
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not module._state_dict_pre_hooks and not module._load_state_dict_pre_hooks
        now = dict(module.named_parameters())
        assert list(now) == list(group)
        for name, parameter in now.items():
            assert parameter is group[name], "the very same object"
            assert torch.equal(parameter, before[name])
        module(vectors(rank, width=4)).sum().backward()
    # Nothing of the failed attempt stands in the way of a good one.
    sw.fully_shard(first, mesh=mesh)
    assert isinstance(first, FSDPModule)


@on_ranks(2)
def test_attributes_of_a_parameter_reach_the_sharded_and_the_whole_one(
    rank: int, world_size: int
) -> None:
    net = Block()
    net.up.weight.no_decay = True
    net.up.weight.tags = ["a", "b"]
    seen = {}

    def look(module: nn.Module, args: object) -> None:
        seen.update(vars(module.weight))

    net.up.register_forward_pre_hook(look)
    wrap(net, world_size)
    assert net.up.weight.no_decay is True and net.up.weight.tags == ["a", "b"]
    assert not hasattr(net.down.weight, "no_decay")
    net(vectors(rank))
    assert seen["no_decay"] is True and seen["tags"] == ["a", "b"], "in forward too"


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


def with_own_seed(rank: int, world_size: int, strategy: str) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(rank)
    net = Net()
    own = {name: value.detach().clone() for name, value in net.named_parameters()}
    wrap(net, world_size, strategy)
    return [own, {name: full(value).clone() for name, value in net.named_parameters()}]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_begin_with_the_values_of_the_first(strategy: str) -> None:
    """Sharded main weights have no copies: each rank brings its piece, as in FSDP2."""
    (own, first), *others = run_ranks(with_own_seed, ranks_for(strategy), strategy)
    assert not torch.equal(own["embedding.weight"], others[0][0]["embedding.weight"])
    for _, values in others:
        assert all(torch.equal(value, first[name]) for name, value in values.items())
    if strategy == "zero0":
        assert all(torch.equal(value, first[name]) for name, value in own.items())


def random_writes(rank: int, world_size: int, strategy: str) -> list[list[float]]:
    net = wrap(Net(), world_size, strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    word_loss(net, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.manual_seed(50 + rank)
    nn.init.normal_(net.head.weight)
    with torch.no_grad():
        net.blocks[0].up.weight.add_(torch.randn_like(net.blocks[0].up.weight))
    torch.manual_seed(7)  # the same on all ranks: as one process draws
    nn.init.uniform_(net.head.bias)
    torch.manual_seed(7)
    assert torch.equal(net.head.bias.full_tensor(), torch.empty(len(net.head.bias)).uniform_())
    word_loss(net, rank, 1).backward()
    optimizer.step()
    return [parameter.full_tensor().flatten().tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_writes_leave_replicas_the_same_whatever_their_seeds(strategy: str) -> None:
    first, *others = run_ranks(random_writes, ranks_for(strategy), strategy)
    assert len(first) > 10 and others and all(other == first for other in others)
