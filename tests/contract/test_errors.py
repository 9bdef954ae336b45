# SPDX-License-Identifier: Apache-2.0
"""Bad input: a clear error, on every rank, and no hang."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from tests.contract.helpers import (
    WIDTH,
    Block,
    Net,
    assert_gradients_equal,
    average_gradients,
    check_backward,
    mesh_for,
    options_for,
    pair,
    raised,
    vector_loss,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


@dataclass(frozen=True)
class DataParallelMeshDims:
    """torch's of that name, which older versions do not have."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


# ------------------------------------------------------------------------------ meshes


@on_ranks(4)
def test_meshes_that_do_not_fit_are_refused(rank: int, world_size: int) -> None:
    one, two = mesh_for("zero", world_size), mesh_for("hsdp", world_size)
    unnamed = DeviceMesh("cpu", torch.arange(world_size).view(2, -1, 1))
    cases: dict[str, Callable[[], Any]] = {
        "hsdp on one axis": lambda: sw.fully_shard(Block(), mesh=one, placements=sw.hsdp()),
        "zero on two axes": lambda: sw.fully_shard(Block(), mesh=two, placements=sw.zero(3)),
        "unnamed": lambda: sw.fully_shard(Block(), mesh=unnamed),
        "too large": lambda: sw.init_mesh(dp=world_size + 1),
        "too small": lambda: sw.init_mesh(dp=world_size // 2),
        "no rank": lambda: sw.init_mesh(dp=0),
        "outside": lambda: sw.init_mesh(dp_outer=2 * world_size),
    }
    found = {name: raised(call, ValueError) for name, call in cases.items()}
    assert "1" in found["hsdp on one axis"] and "zero" in found["hsdp on one axis"]
    assert "hsdp()" in found["zero on two axes"]
    assert "1D or 2D" in found["unnamed"]
    assert "5 ranks" in found["too large"] and "2 ranks" in found["too small"]
    assert "dp=0" in found["no rank"] and "start 8 processes" in found["outside"]


@on_ranks(4)
def test_three_axes_need_placements_of_three(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    message = raised(lambda: sw.fully_shard(Block(), mesh=mesh), ValueError)
    assert "1D or 2D" in message and "placements" in message


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
    inside, outside = (found := run_ranks(not_a_member, 4))[:2], found[2:]
    assert inside == [None, None]
    assert all("not part of the mesh" in message for message in outside)


@on_ranks(4)
def test_dp_mesh_dims_choose_axes_by_name(rank: int, world_size: int) -> None:
    """``dp_mesh_dims`` picks data-parallel axes out of a larger mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    net, plain = pair(Block)
    dims = DataParallelMeshDims(shard="y", replicate="x")
    sw.fully_shard(net, mesh=mesh, dp_mesh_dims=dims)
    check_backward(net, plain, vector_loss, rank, world_size)
    local = sum(parameter.to_local().numel() for parameter in net.parameters())
    assert local < sum(parameter.numel() for parameter in net.parameters())
    wrong = DataParallelMeshDims(shard="z")
    message = raised(lambda: sw.fully_shard(Block(), mesh=mesh, dp_mesh_dims=wrong), ValueError)
    assert "'z'" in message and "'x'" in message


@pytest.mark.parametrize("shard", [True, False], ids=["named", "by the name dp"])
@on_ranks(4)
def test_only_the_data_parallel_axis_is_used(rank: int, world_size: int, shard: bool) -> None:
    """Only one axis of the mesh is data parallel; the ranks of the other hold other models."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = mesh.get_local_rank("tp")
    torch.manual_seed(other)
    net, plain = Block(), Block()
    plain.load_state_dict(net.state_dict())
    if shard:
        sw.fully_shard(net, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    else:
        sw.fully_shard(net, mesh=mesh)  # found by its name
    position = mesh.get_local_rank("dp")
    vector_loss(net, position).backward()
    average_gradients(plain, vector_loss, 2)
    assert_gradients_equal(net, plain)


@on_ranks(2)
def test_dp_mesh_dims_that_only_replicate_shard_nothing(rank: int, world_size: int) -> None:
    """torch: only-replicate is data parallelism. The mesh has one axis, and nothing is cut."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("x",))
    net, plain = pair(Block)
    sw.fully_shard(net, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="x"))
    check_backward(net, plain, vector_loss, rank, world_size)
    for parameter in net.parameters():
        assert parameter.to_local().numel() == parameter.numel(), "every rank holds all of it"


# ------------------------------------------------------------------------------ parameters


class Odd(nn.Module):
    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.odd = nn.Parameter(parameter, requires_grad=parameter.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_ranks(2)
def test_parameters_that_cannot_be_sharded_are_refused_by_name(rank: int, world_size: int) -> None:
    mesh = mesh_for("zero", world_size)

    def wrap_with(parameter: Tensor) -> Callable[[], Any]:
        return lambda: sw.fully_shard(Odd(parameter.requires_grad_()), mesh=mesh)

    found = {
        "empty": raised(wrap_with(torch.empty(0, 3)), ValueError),
        "narrow": raised(wrap_with(torch.empty(3, 0)), ValueError),
        "complex": raised(wrap_with(torch.ones(3, dtype=torch.complex64)), ValueError),
        "float8": raised(wrap_with(torch.ones(3).to(torch.float8_e4m3fn)), ValueError),
        "dtensor": raised(
            lambda: sw.fully_shard(
                Odd(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])), mesh=mesh
            ),
            ValueError,
        ),
    }
    assert len(found) == 5
    for message in found.values():
        assert "'odd'" in message
        assert "linear" not in message
    assert "[0, 3]" in found["empty"] and "complex64" in found["complex"]
    assert "Expected Replicate on axis 'dp'" in found["dtensor"]
    assert "float8" in found["float8"] and "DTensor" in found["dtensor"]


# ------------------------------------------------------------------------------ ranks disagree


def disagree(rank: int, world_size: int, how: str) -> str:
    odd = rank == world_size - 1
    torch.manual_seed(0)
    options = options_for("zero3", world_size)
    net: Any = Block()
    if how == "shape" and odd:
        net = Block(WIDTH + 2)
    elif how == "count" and odd:
        net.extra = nn.Linear(2, 2)
    elif how == "dtype" and odd:
        net.up.to(torch.bfloat16)
    elif how == "frozen" and odd:
        net.up.requires_grad_(False)
    elif how == "name" and odd:
        net.high = net.up
        del net.up
    elif how == "strategy" and odd:
        options["placements"] = sw.zero(1)
    elif how == "precision" and odd:
        options["precision"] = sw.Precision(weights="bf16")
    elif how == "grain" and odd:
        options["grain"] = lambda name, parameter: sw.TENSOR
    elif how == "reshard" and odd:
        options["reshard_after_forward"] = False
    return raised(lambda: sw.fully_shard(net, **options), ValueError)


@pytest.mark.parametrize(
    "how",
    ["shape", "count", "dtype", "frozen", "name", "strategy", "precision", "grain", "reshard"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_wrap_different_modules_all_raise(how: str, world_size: int) -> None:
    messages = run_ranks(disagree, world_size, how)
    assert len(messages) == world_size
    for message in messages:
        assert "rank" in message


def other_optimizers(rank: int, world_size: int) -> dict[str, str]:
    net = wrap(Net(), world_size)
    head = dict(net.named_parameters())["head.weight"]
    cases: dict[str, Callable[[], Any]] = {
        "kinds": lambda: sw.optimizer(
            net, matrix=sw.muon() if rank else None, elementwise=sw.adamw()
        ),
        "settings": lambda: sw.optimizer(
            net, matrix=sw.muon(lr=0.1 * (rank + 1)), elementwise=sw.adamw()
        ),
        "alone": lambda: sw.Muon([head], momentum=0.5 if rank else 0.6),
    }
    messages = {name: raised(call, ValueError) for name, call in cases.items()}
    head.requires_grad_(rank == 0)
    messages["frozen"] = raised(
        lambda: sw.optimizer(net, matrix=sw.muon(), elementwise=sw.adamw()), ValueError
    )
    return messages


def test_ranks_that_build_different_optimizers_all_raise() -> None:
    first, second = run_ranks(other_optimizers, 2)
    assert first == second, "the same message everywhere"
    assert "matrix=None / matrix=MuonSettings(lr=0.02" in first["kinds"]
    assert "elementwise" not in first["settings"], "only what differs"
    assert all("the ranks do not build the same optimizer" in text for text in first.values())


def one_rank_fails(rank: int, world_size: int) -> str:
    """A bad parameter on one rank only: the others must not wait for it for ever."""
    net = Odd(torch.empty(0 if rank else 4, 3).requires_grad_())
    return raised(lambda: sw.fully_shard(net, mesh=mesh_for("zero", world_size)), ValueError)


def test_a_problem_on_one_rank_alone_raises_on_all() -> None:
    assert len(run_ranks(one_rank_fails, 2)) == 2


# ------------------------------------------------------------------------------ options


@on_ranks(2)
def test_unknown_options_are_refused(rank: int, world_size: int) -> None:
    mesh = mesh_for("zero", world_size)

    def attempt(**options: Any) -> Callable[[], Any]:
        return lambda: sw.fully_shard(Block(), mesh=mesh, **options)

    found = {
        "unused": raised(attempt(unused_parameters="ignore"), ValueError),
        "memory": raised(attempt(memory="pool"), ValueError),
        "empty": raised(lambda: sw.fully_shard([], mesh=mesh), ValueError),
        "argument": raised(attempt(shard=True), TypeError),
        "mp_policy": raised(attempt(mp_policy="bf16"), ValueError),
        "placements": raised(attempt(placements="zero3"), ValueError),
        "not a module": raised(lambda: sw.fully_shard(torch.ones(2), mesh=mesh), ValueError),
        "not a mesh": raised(lambda: sw.fully_shard(Block(), mesh=[0, 1]), ValueError),
    }
    assert "ignore" in found["unused"] and "zeros" in found["unused"]
    assert "pool" in found["memory"] and "empty" in found["empty"]
    assert "shard" in found["argument"]
    assert "mp_policy" in found["mp_policy"]
    assert "placements" in found["placements"]
    assert "Tensor" in found["not a module"]
    assert "mesh" in found["not a mesh"]


@on_ranks(2)
def test_all_problems_are_told_at_once(rank: int, world_size: int) -> None:
    mesh = mesh_for("zero", world_size)
    message = raised(
        lambda: sw.fully_shard(
            nn.ModuleList([Block()]),
            mesh=mesh,
            placements=sw.hsdp(),
            unused_parameters="x",
            memory="y",
        ),
        ValueError,
    )
    assert all(word in message for word in ("ModuleList", "axes", "'x'", "'y'"))


# ------------------------------------------------------------------------------ every method

# What each set_* method of torch's FSDPModule is called with, and whether it holds here.
METHODS: dict[str, tuple[tuple[Any, ...], bool]] = {
    "set_all_reduce_hook": ((print,), False),
    "set_allocate_memory_from_process_group_for_comm": ((True,), False),
    "set_custom_all_gather": ((object(),), False),
    "set_custom_reduce_scatter": ((object(),), False),
    "set_force_sum_reduction_for_comms": ((False,), True),
    "set_gradient_divide_factor": ((float,), True),
    "set_modules_to_backward_prefetch": (([],), True),
    "set_modules_to_forward_prefetch": (([],), True),
    "set_post_optim_event": ((None,), True),
    "set_reduce_scatter_divide_factor": ((float,), True),
    "set_reduce_scatter_max_input_buffers": ((1,), True),
    "set_symm_mem_for_comm": (("NCCL",), False),
}
SWITCHES = ("is_last_backward", "reduce_scatter_unused_params", "requires_all_reduce")
SWITCHES += ("requires_gradient_sync", "reshard_after_backward", "reshard_after_forward")
SWITCHES += ("separate_reduce_scatter_group", "unshard_in_backward")
METHODS |= {f"set_{name}": ((True,), True) for name in SWITCHES}


def call_method(rank: int, world_size: int, name: str, first_forward: bool) -> str | None:
    arguments, holds = METHODS[name]
    # A divisor of its own that equals the default keeps the truth the same.
    arguments = tuple(float(world_size) if value is float else value for value in arguments)
    net, plain = pair(Net)
    wrap(net, world_size)
    if first_forward:
        word_loss(net, rank).backward()
        net.zero_grad()
    method = getattr(net, name)
    if not holds:
        return raised(lambda: method(*arguments), NotImplementedError)
    assert method(*arguments) is None
    for _ in range(2):
        check_backward(net, plain, word_loss, rank, world_size)
    return None


@pytest.mark.parametrize("first_forward", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_works_or_says_why_not(name: str, first_forward: bool) -> None:
    for reason in run_ranks(call_method, 2, name, first_forward):
        if METHODS[name][1]:
            assert reason is None
        else:
            assert name in reason and len(reason) > len(name) + 30


def test_no_method_of_torch_is_forgotten() -> None:
    theirs = {name for name in dir(FSDPModule) if name.startswith("set_")}
    assert len(theirs) >= 12
    assert theirs <= set(METHODS), "torch has a new method"
    for name in theirs | {"unshard", "reshard", "_get_fsdp_state", "_apply"}:
        assert getattr(sw.ShardedModule, name) is not getattr(FSDPModule, name), name
        ours = inspect.signature(getattr(sw.ShardedModule, name)).parameters
        for parameter in inspect.signature(getattr(FSDPModule, name)).parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                assert parameter.name in ours, (name, parameter.name)


def test_fully_shard_takes_all_of_torchs_arguments() -> None:
    theirs = inspect.signature(torch.distributed.fsdp.fully_shard).parameters
    ours = inspect.signature(sw.fully_shard).parameters
    assert len(theirs) >= 7 and set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name


@on_ranks(2)
def test_values_that_cannot_work_are_refused(rank: int, world_size: int) -> None:
    net = wrap(Net(), world_size)
    divisor, buffers = [
        raised(lambda: net.set_gradient_divide_factor(0.0), ValueError),
        raised(lambda: net.set_reduce_scatter_max_input_buffers(0), ValueError)
        + raised(lambda: net.set_reduce_scatter_max_input_buffers(True), TypeError),
    ]
    assert "0" in divisor and "0" in buffers


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
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


@on_ranks(1, fresh=True)
def test_without_a_process_group_a_mesh_of_one_is_made(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    net, plain = pair(Block)
    sw.fully_shard(net)
    check_backward(net, plain, vector_loss, rank, 1)
    assert dist.is_initialized()
