# SPDX-License-Identifier: Apache-2.0
"""Wrapping: what it makes of a module, who owns which parameter, what is refused on every rank."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise as sw
from shardwise.shard.module import unit_of
from tests.contract.helpers import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    Trial,
    adamw,
    assert_close,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    full,
    mesh_for,
    num_groups,
    on,
    pair,
    raised,
    ranks_for,
    sgd,
    transient_bytes,
    vector_loss,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

# ------------------------------------------------------------------------------ what it makes


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_a_wrapped_module_is_an_fsdp_module_of_its_class(rank: int, world_size: int) -> None:
    net, plain = pair(Net)
    assert wrap(net, world_size) is net
    for module, original in ((net, Net), (net.blocks[0], Block)):
        assert isinstance(module, FSDPModule) and isinstance(module, sw.ShardedModule)
        assert type(module).__name__ == f"FSDP{original.__name__}"
        order = type(module).__mro__
        assert order.index(FSDPModule) < order.index(original)
    assert type(net.blocks[0]) is type(net.blocks[1]), "one class for all blocks of a kind"
    assert type(net.head) is nn.Linear and type(net.blocks[0].up) is nn.Linear
    assert list(net.state_dict()) == list(plain.state_dict())
    for name, parameter in net.named_parameters():
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor), name
        assert parameter.is_leaf and parameter.requires_grad, name
        assert parameter.stride() == plain.get_parameter(name).stride(), name
    local = sum(parameter.to_local().numel() for parameter in net.parameters())
    assert 0 < local < sum(parameter.numel() for parameter in plain.parameters())
    assert_parameters_equal(net, plain, tolerance=0.0)


@on_ranks(2)
def test_slicing_a_wrapped_sequential_gives_a_plain_one(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for module in (model[0], model):
        sw.fully_shard(module, mesh=mesh_for("zero", world_size))
    head = model[:2]
    assert type(head) is nn.Sequential and len(head) == 2 and head[0] is model[0]
    assert isinstance(head[0], FSDPModule) and isinstance(model, FSDPModule)


class Chain(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


@on_ranks(2)
def test_a_list_of_modules_is_one_unit(rank: int, world_size: int) -> None:
    net, plain = pair(lambda: Net(layers=3))
    mesh = mesh_for("zero", world_size)
    # The same module twice and a module inside another count once.
    together = [net.blocks[0], net.blocks[1], net.blocks[0], net.blocks[1].up]
    assert sw.fully_shard(together, mesh=mesh) is together
    assert type(net.blocks[1].up) is nn.Linear
    assert unit_of(net.blocks[0]) is unit_of(net.blocks[1])
    sw.fully_shard(net, mesh=mesh)
    assert type(net.blocks[2]) is Block, "left to the root"
    t = Trial(net, plain, rank, world_size, transient_bytes())
    for step in range(2):
        with sw.comm.record() as calls:
            t.backward(word_loss, step)
        reductions = [call for call in calls if call.operation == "reduce_scatter"]
        assert len(reductions) >= num_groups(net.blocks[0], net), "for the list, for the root"


@on_ranks(2)
def test_each_parameter_belongs_to_the_innermost_unit_around_it(rank: int, world_size: int) -> None:
    net = Net()
    inner, block = net.blocks[0].up, net.blocks[0]
    for module in (inner, block, net):
        sw.fully_shard(module, mesh=mesh_for("zero", world_size))
    sizes = [sum(p.numel() for p in module.parameters()) for module in (inner, block, net)]
    owned = {inner: sizes[0], block: sizes[1] - sizes[0], net: sizes[2] - sizes[1]}
    for module, numel in owned.items():
        unit: Any = unit_of(module)
        assert sum(math.prod(item.shape) for group in unit.groups for item in group.items) == numel
    with sw.comm.record() as calls, torch.no_grad():
        net(words(rank))
    assert len(calls) == num_groups(*owned), "each is gathered once, by the unit that owns it"


class Bare(nn.Module):
    """A root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on("zero3", make=Bare)
def test_a_root_without_parameters_of_its_own_trains(t: Trial) -> None:
    t.train(vector_loss, make=adamw)


class Final(nn.Module):
    """A class that refuses subclasses cannot change its class either."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


@on_ranks(2)
def test_a_failure_while_wrapping_leaves_every_module_as_it_was(rank: int, world_size: int) -> None:
    modules: list[Any] = [Block(4), Final()]
    before = [(set(vars(m)), {n: (p, p.clone()) for n, p in m.named_parameters()}) for m in modules]
    mesh = mesh_for("zero", world_size)
    raised(lambda: sw.fully_shard(modules, mesh=mesh), TypeError)
    for module, kind, (attributes, parameters) in zip(modules, (Block, Final), before, strict=True):
        assert type(module) is kind and set(vars(module)) == attributes
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not module._state_dict_pre_hooks and not module._load_state_dict_pre_hooks
        for name, parameter in module.named_parameters():
            assert parameter is parameters[name][0] and torch.equal(parameter, parameters[name][1])
    # Nothing of the failed attempt stands in the way of a good one.
    assert isinstance(sw.fully_shard(modules[0], mesh=mesh), FSDPModule)


@on_ranks(2)
def test_attributes_of_a_parameter_reach_the_sharded_and_the_whole_one(
    rank: int, world_size: int
) -> None:
    net, seen = Block(), {}
    net.up.weight.no_decay = True
    net.up.register_forward_pre_hook(lambda module, args: seen.update(vars(module.weight)))
    wrap(net, world_size)
    assert net.up.weight.no_decay is True and not hasattr(net.down.weight, "no_decay")
    net(vectors(rank))
    assert seen["no_decay"] is True, "in forward too"


class Odd(nn.Module):
    """Holds what no buffer could, and what a rank keeps for itself."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.local = nn.Parameter(torch.ones(rank + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.linear(x)) + self.local.sum() + self.phase.real.sum()


@on_ranks(2)
def test_ignored_parameters_stay_what_they_are_and_are_not_reduced(
    rank: int, world_size: int
) -> None:
    (net, plain), alone = pair(Odd), Odd(rank)
    net.local = nn.Parameter(torch.ones(rank + 1))  # of any kind, and other on each rank
    alone.load_state_dict(plain.state_dict(), strict=False) if rank == 0 else None
    skipped = {net.empty, net.phase, net.local, net.other.weight}
    sw.fully_shard(net, mesh=mesh_for("zero", world_size), ignored_params=skipped)
    assert {net.empty, net.phase, net.local, net.other.weight} == skipped
    assert isinstance(net.linear.weight, DTensor)
    with torch.no_grad():
        net.local.fill_(1 / (rank + 1))  # so that all ranks compute the same
    vector_loss(net, rank).backward()
    average_gradients(plain, vector_loss, world_size)
    for name in ("linear.weight", "linear.bias", "other.bias"):
        grad = net.get_parameter(name).grad
        assert_close(full(grad), plain.get_parameter(name).grad, name, 1e-5)
    mine = net.other.weight.grad
    assert type(mine) is Tensor and not torch.allclose(mine, plain.other.weight.grad, atol=1e-6)
    assert net.local.grad.shape == (rank + 1,)


# ------------------------------------------------------------------------------ initial values


def with_own_seed(rank: int, world_size: int, strategy: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(rank)
    net = Net()
    own = {name: value.detach().clone() for name, value in net.named_parameters()}
    wrap(net, world_size, strategy)
    first = {name: full(value).clone() for name, value in net.named_parameters()}
    optimizer = sgd(net)
    word_loss(net, rank).backward()
    optimizer.step()
    torch.manual_seed(50 + rank)  # random writes leave replicas the same whatever their seeds
    nn.init.normal_(net.head.weight)
    with torch.no_grad():
        net.blocks[0].up.weight.add_(torch.randn_like(net.blocks[0].up.weight))
    torch.manual_seed(7)  # the same on all ranks: as one process draws
    nn.init.uniform_(net.head.bias)
    torch.manual_seed(7)
    assert torch.equal(net.head.bias.full_tensor(), torch.empty(len(net.head.bias)).uniform_())
    return [own, first, {name: full(value).clone() for name, value in net.named_parameters()}]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_begin_with_the_values_of_the_first_and_stay_the_same(strategy: str) -> None:
    """Sharded main weights have no copies: each rank brings its piece, as in FSDP2."""
    (own, *first), *others = run_ranks(with_own_seed, ranks_for(strategy), strategy)
    assert not torch.equal(own["embedding.weight"], others[0][0]["embedding.weight"])
    for _, *values in others:
        for mine, theirs in zip(first, values, strict=True):
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    if strategy == "zero0":
        assert all(torch.equal(value, first[0][name]) for name, value in own.items())


# ------------------------------------------------------------------------------ meshes


@dataclass(frozen=True)
class DataParallelMeshDims:
    """torch's of that name, which older versions do not have."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


DIMS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any, int]] = {
    "hsdp": ((2, 2), ("x", "y"), DataParallelMeshDims(shard="y", replicate="x"), 4),
    "one of two": ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp"), 2),
    "by its name": ((2, 2), ("dp", "tp"), None, 2),
    "replicas alone": ((4,), ("x",), DataParallelMeshDims(replicate="x"), 4),
}


@pytest.mark.parametrize("name", DIMS)
@on_ranks(4)
def test_data_parallel_axes_are_chosen_by_name(rank: int, world_size: int, name: str) -> None:
    sizes, names, dims, ranks = DIMS[name]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    other = mesh.get_local_rank("tp") if "tp" in names else 0  # its ranks hold other models
    torch.manual_seed(other)
    net, plain = Block(), Block()
    plain.load_state_dict(net.state_dict())
    sw.fully_shard(net, mesh=mesh, **({"dp_mesh_dims": dims} if dims else {}))
    position = mesh.get_local_rank("dp") if "dp" in names else rank
    vector_loss(net, position).backward()
    average_gradients(plain, vector_loss, ranks)
    assert_gradients_equal(net, plain)
    local = sum(parameter.to_local().numel() for parameter in net.parameters())
    whole = sum(parameter.numel() for parameter in net.parameters())
    assert local == whole if name == "replicas alone" else local < whole


def not_a_member(rank: int, world_size: int) -> str | None:
    """A mesh over half the ranks: those outside are told so, those inside can work."""
    mesh = DeviceMesh("cpu", [0, 1])
    if rank >= 2:
        return raised(lambda: sw.fully_shard(Block(), mesh=mesh), ValueError)
    net, plain = pair(Block)
    sw.fully_shard(net, mesh=mesh)
    check_backward(net, plain, vector_loss, rank, 2)
    return None


def test_a_rank_outside_the_mesh_is_told() -> None:
    assert [text is None for text in run_ranks(not_a_member, 4)] == [True, True, False, False]


@on_ranks(1, fresh=True)
def test_without_a_process_group_a_mesh_of_one_is_made(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    net, plain = pair(Block)
    sw.fully_shard(net)
    check_backward(net, plain, vector_loss, rank, 1)
    assert dist.is_initialized()


# ------------------------------------------------------------------------------ refusals


class Typed(Tensor):
    """A tensor whose operations are its own, as those of quantised weights are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


def with_odd(value: Any) -> nn.Module:
    net = nn.Linear(4, 4)
    net.odd = nn.Parameter(value, requires_grad=True)
    return net


def one_axis() -> DeviceMesh:
    return mesh_for("zero", dist.get_world_size())


def two_axes() -> DeviceMesh:
    return mesh_for("hsdp", dist.get_world_size())


def shard(module: Any, **options: Any) -> Any:
    return sw.fully_shard(module, **({"mesh": one_axis()} | options))


def bucketed(module: Any, **options: Any) -> Any:
    return sw.data_parallel(module, **({"mesh": one_axis()} | options))


def last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def twice(verb: Any) -> None:
    net = verb(Block())
    verb(net)


def inside() -> None:
    net = Net()
    shard(net.blocks[0])
    bucketed(net)


def tied() -> None:
    net = Net()
    net.head.weight = net.embedding.weight
    shard(net.embedding)
    shard(net)


def renamed() -> Any:
    net: Any = Block()
    net.high = net.up
    del net.up
    return net


def set_to(method: str, value: Any) -> None:
    getattr(shard(Net()), method)(value)


# What is refused, by a word that the message must have, and the call.
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "hsdp on one axis": ("axes", lambda: shard(Block(), placements=sw.hsdp())),
    "zero on two axes": ("hsdp()", lambda: shard(Block(), mesh=two_axes(), placements=sw.zero(3))),
    "three axes": (
        "1D or 2D",
        lambda: shard(Block(), mesh=DeviceMesh("cpu", torch.arange(4).view(2, 2, 1))),
    ),
    "too large": ("5 ranks", lambda: sw.init_mesh(dp=5)),
    "no rank": ("dp=0", lambda: sw.init_mesh(dp=0)),
    "no such axis": ("'z'", lambda: shard(Block(), dp_mesh_dims=DataParallelMeshDims(shard="z"))),
    "empty": ("'odd'", lambda: shard(with_odd(torch.empty(0, 3)))),
    "complex": ("'odd'", lambda: shard(with_odd(torch.ones(3, dtype=torch.complex64)))),
    "float8": ("'odd'", lambda: shard(with_odd(torch.ones(3).to(torch.float8_e4m3fn)))),
    "cut already": (
        "'odd'",
        lambda: shard(with_odd(distribute_tensor(torch.ones(4, 4), one_axis(), [Shard(0)]))),
    ),
    "a subclass": ("'odd'", lambda: shard(with_odd(torch.ones(3).as_subclass(Typed)))),
    "a list without forward": ("ModuleList", lambda: shard(nn.ModuleList([Block()]))),
    "a dict without forward": ("ModuleDict", lambda: shard(nn.ModuleDict({"a": Block()}))),
    "no module": ("empty", lambda: shard([])),
    "tied across units": ("head.weight", tied),
    "twice": ("Block", lambda: twice(shard)),
    "twice in buckets": ("Block", lambda: twice(bucketed)),
    "unused": ("ignore", lambda: shard(Block(), unused_parameters="ignore")),
    "memory": ("pool", lambda: shard(Block(), memory="pool")),
    "offload": ("cpu", lambda: shard(Block(), offload_policy="cpu")),
    "argument": ("shard", lambda: shard(Block(), shard=True)),
    "policy": ("mp_policy", lambda: shard(Block(), mp_policy="bf16")),
    "two policies": (
        "mp_policy",
        lambda: shard(Block(), precision=sw.Precision(), mp_policy=_policy()),
    ),
    "placements": ("placements", lambda: shard(Block(), placements="zero3")),
    "not a module": ("Tensor", lambda: shard(torch.ones(2))),
    "not a mesh": ("mesh", lambda: shard(Block(), mesh=[0, 1])),
    "three of four": ("divide", lambda: shard(Block(), reshard_after_forward=3)),
    "zero ranks": ("0", lambda: shard(Block(), reshard_after_forward=0)),
    "of what stays": (
        "replicated",
        lambda: shard(Block(), placements=sw.zero(1), reshard_after_forward=2),
    ),
    "several at once": (
        "'y'",
        lambda: shard(Block(), placements=sw.hsdp(), unused_parameters="x", memory="y"),
    ),
    "a divisor of zero": ("0", lambda: set_to("set_gradient_divide_factor", 0.0)),
    "no buffer": ("0", lambda: set_to("set_reduce_scatter_max_input_buffers", 0)),
    "a flag of buffers": ("True", lambda: set_to("set_reduce_scatter_max_input_buffers", True)),
    "a number to a switch": ("bool", lambda: set_to("set_reshard_after_forward", 2)),
    "stage 3 in buckets": ("fully_shard", lambda: bucketed(Net(), placements=sw.zero(3))),
    "buckets of nothing": ("bucket_mb", lambda: bucketed(Net(), bucket_mb=0)),
    "a unit inside": ("wrapped already", inside),
    "a pattern": ("experts", lambda: bucketed(Net(), meshes={"experts": one_axis()})),
    "a number for Muon": ("sw.muon", lambda: bucketed(Net(), matrix=0.1)),
    # Of one rank alone, or other ones on a rank: all of them say so.
    "one rank": ("'odd'", lambda: shard(with_odd(torch.ones(3 * (not last()), 2)))),
    "other shapes": ("rank", lambda: shard(Block(WIDTH + 2 * last()))),
    "other dtypes": ("rank", lambda: shard(Block().to(torch.bfloat16 if last() else None))),
    "other names": ("rank", lambda: shard(renamed() if last() else Block())),
    "other trained": ("rank", lambda: shard(Block().requires_grad_(not last()))),
    "other strategies": ("rank", lambda: shard(Block(), placements=sw.zero(3 - last()))),
    "other grains": ("rank", lambda: shard(Block(), grain=sw.TENSOR if last() else None)),
    "other switches": ("rank", lambda: shard(Block(), reshard_after_forward=last())),
    "other layers": ("rank", lambda: bucketed(Net(layers=1 + last()))),
}


def _policy() -> Any:
    return torch.distributed.fsdp.MixedPrecisionPolicy()


def refused(rank: int, world_size: int) -> dict[str, str]:
    kinds = (ValueError, TypeError, AssertionError, RuntimeError)
    return {name: raised(call, kinds) for name, (_, call) in REFUSED.items()}  # type: ignore[arg-type]


def test_what_cannot_work_is_refused_by_name_on_every_rank() -> None:
    for found in run_ranks(refused, 4):
        wrong = {name: text for name, text in found.items() if REFUSED[name][0] not in text}
        assert not wrong, wrong


def other_optimizers(rank: int, world_size: int) -> dict[str, str]:
    net = wrap(Net(), world_size)
    head, adam = dict(net.named_parameters())["head.weight"], sw.adamw()
    cases: dict[str, Callable[[], Any]] = {
        "kinds": lambda: sw.optimizer(net, matrix=sw.muon() if rank else None, elementwise=adam),
        "settings": lambda: sw.optimizer(net, matrix=sw.muon(lr=1.0 + rank), elementwise=adam),
        "alone": lambda: sw.Muon([head], momentum=0.5 if rank else 0.6),
        "frozen": lambda: (
            head.requires_grad_(rank == 0),
            sw.optimizer(net, matrix=sw.muon(), elementwise=adam),
        ),
    }
    return {name: raised(call, ValueError) for name, call in cases.items()}


def test_ranks_that_build_different_optimizers_all_raise() -> None:
    first, second = run_ranks(other_optimizers, 2)
    assert first == second, "the same message everywhere"
    assert "elementwise" not in first["settings"], "only what differs"


# ------------------------------------------------------------------------------ every method

# What each set_* method of torch's FSDPModule is called with, and whether it holds here.
METHODS: dict[str, tuple[tuple[Any, ...], bool]] = {
    "set_all_reduce_hook": ((print,), False),
    "set_allocate_memory_from_process_group_for_comm": ((True,), False),
    "set_custom_all_gather": ((object(),), False),
    "set_custom_reduce_scatter": ((object(),), False),
    "set_force_sum_reduction_for_comms": ((False,), True),
    "set_gradient_divide_factor": ((2.0,), True),
    "finalize_backward": ((), False),
    "set_keep_unsharded_storage": ((True,), False),
    "set_manual_backward_finalization": ((True,), False),
    "set_modules_to_backward_prefetch": (([],), True),
    "set_modules_to_forward_prefetch": (([],), True),
    "set_post_optim_event": ((None,), True),
    "set_reduce_scatter_divide_factor": ((2.0,), True),
    "set_reduce_scatter_max_input_buffers": ((1,), True),
    "set_symm_mem_for_comm": (("NCCL",), False),
}
SWITCHES = ("is_last_backward", "reduce_scatter_unused_params", "requires_all_reduce")
SWITCHES += ("requires_gradient_sync", "reshard_after_backward", "reshard_after_forward")
SWITCHES += ("separate_reduce_scatter_group", "unshard_in_backward")
METHODS |= {f"set_{name}": ((True,), True) for name in SWITCHES}


@pytest.mark.parametrize("name", METHODS)
@on("zero3")
def test_every_method_works_or_is_refused(t: Trial, name: str) -> None:
    (arguments, holds), method = METHODS[name], getattr(t.net, name)
    for _ in range(2):  # before the first forward, and after it
        if holds:
            assert method(*arguments) is None
        else:
            assert name in raised(lambda: method(*arguments), NotImplementedError)
        t.backward()
        t.zero_grad()


def test_no_method_of_torch_is_forgotten() -> None:
    theirs = {name for name in dir(FSDPModule) if name.startswith("set_")}
    assert 12 <= len(theirs) and theirs <= set(METHODS), "torch has a new method"
    pairs = [(FSDPModule, sw.ShardedModule, name) for name in theirs | {"unshard", "reshard"}]
    for torchs, ours, name in pairs:
        assert getattr(ours, name) is not getattr(torchs, name), name
    functions = [(getattr(torchs, name), getattr(ours, name)) for torchs, ours, name in pairs]
    for torchs, ours in [*functions, (torch.distributed.fsdp.fully_shard, sw.fully_shard)]:
        wanted, found = inspect.signature(torchs).parameters, inspect.signature(ours).parameters
        for parameter in wanted.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                assert parameter.name in found or "kwargs" in found, (ours, parameter.name)


@on_ranks(2)
def test_the_number_of_reductions_in_flight_changes_no_bit(rank: int, world_size: int) -> None:
    """Reductions in flight: one, two, many; the same bits."""
    grads = []
    for count in (1, 2, 5):
        torch.manual_seed(0)
        net = wrap(Net(layers=4), world_size)
        net.set_reduce_scatter_max_input_buffers(count)
        net.set_separate_reduce_scatter_group(count != 2)
        for step in range(2):
            word_loss(net, rank, step).backward()
        grads.append([parameter.grad.full_tensor() for parameter in net.parameters()])
    assert len(grads[0]) > 20
    for other in grads[1:]:
        assert all(map(torch.equal, grads[0], other))
