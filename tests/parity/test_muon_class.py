# SPDX-License-Identifier: Apache-2.0
"""``sw.Muon`` by itself: plain parameters, torch's FSDP2, and tensor-parallel weights."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw
from shardwise.core import comm
from shardwise.core.placements import chunk_range
from shardwise.optim.split import Split
from shardwise.optim.storage import block_shape, sharding_of
from tests.models import mesh_of
from tests.one_card import device_type
from tests.ranks import run_ranks

STEPS = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(6, 14, bias=False)  # rows that do not divide by 3 or 4
        self.down = nn.Linear(14, 6, bias=False)
        self.square = nn.Linear(6, 6, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.square(self.down(self.up(hidden).relu()))


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    seed = 50 * step + sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def local_piece(parameter: Tensor, full: Tensor) -> Tensor:
    """This rank's part of a full tensor, by plain slicing."""
    if not isinstance(parameter, DTensor):
        return full.clone()
    cut = sharding_of(parameter)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    if any(cut.blocked):
        axis = cut.blocked.index(True)
        dim = full.ndim - 2 + cut.block_dim
        full = full.chunk(cut.sizes[axis], dim)[coordinate[axis]]
    assert tuple(full.shape) == block_shape(parameter)
    sizes = [size for size, sharded in zip(cut.sizes, cut.sharded, strict=True) if sharded]
    places = [place for place, sharded in zip(coordinate, cut.sharded, strict=True) if sharded]
    begin, end = chunk_range(len(full), sizes, places)
    return full[begin:end].contiguous()


def train(model: nn.Module, optimizer: Any) -> list[comm.Call]:
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            piece = local_piece(parameter, gradient(name, parameter.shape, step))
            if isinstance(parameter, DTensor):
                assert piece.shape == parameter.to_local().shape
                piece = DTensor.from_local(
                    piece,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = piece
        with comm.record() as calls:
            optimizer.step()
    return calls


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    compared = 0
    for (name, mine), its in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.detach().to_local(), local_piece(mine, its.detach())), name
        compared += 1
    assert compared == 3


def reference(**options: Any) -> Net:
    model = Net()
    train(model, sw.Muon(model.parameters(), lr=0.1, weight_decay=0.1, **options))
    return model


# ------------------------------------------------------------------------------ plain


def test_alone_it_is_the_same_optimizer() -> None:
    alone, together = Net(), Net()
    before = [p.detach().clone() for p in alone.parameters()]
    train(alone, sw.Muon(alone.named_parameters(), lr=0.1, weight_decay=0.1))
    settings = sw.muon(lr=0.1, weight_decay=0.1, preset="keller")
    train(together, sw.optimizer(together, matrix=settings, elementwise=None))
    for mine, its, old in zip(alone.parameters(), together.parameters(), before, strict=True):
        assert torch.equal(mine, its) and not torch.equal(mine, old)


def test_groups_have_their_own_settings_when_they_come_first_and_later() -> None:
    one, two, apart = Net(), Net(), Net()
    later = sw.Muon([{"params": [one.up.weight], "lr": 0.1}], lr=0.03, scale="none")
    later.add_param_group({"params": one.down.weight})
    later.add_param_group({"params": [one.square.weight], "preset": "nonic"})
    first = sw.Muon(
        [
            {"params": [two.up.weight], "lr": 0.1},
            {"params": [two.down.weight]},
            {"params": [two.square.weight], "preset": "nonic"},
        ],
        lr=0.03,
        scale="none",
    )
    groups = first.param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.03, 0.03]
    assert [group["preset"] for group in groups] == ["keller", "keller", "nonic"]
    for model, optimizer in ((one, later), (two, first)):
        train(model, optimizer)
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    train(apart, sw.Muon([apart.up.weight], lr=0.1, scale="none"))
    assert torch.equal(apart.up.weight, one.up.weight)
    vector = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"lr=-1.*\[3\] is no matrix"):
        later.add_param_group({"params": [vector], "lr": -1})
    with pytest.raises(ValueError, match="Muon is for matrices"):
        later.add_param_group({"params": [vector], "kind": "elementwise"})
    assert len(later.param_groups) == 3
    later.step()


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_schedulers_of_betas_reach_them(kind: str) -> None:
    """Schedulers set betas of AdamW alone, as of torch's; torch refuses to set them beside Muon."""
    torch.manual_seed(0)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0}
    optimizers = [
        sw.optimizer(net, matrix=None, elementwise=sw.adamw(**options)),
        torch.optim.AdamW(other.parameters(), **options),
    ]
    cycle = getattr(torch.optim.lr_scheduler, kind)
    rates = (
        {"max_lr": 0.1, "total_steps": 9}
        if kind == "OneCycleLR"
        else {"base_lr": 0.01, "max_lr": 0.1}
    )
    schedulers = [cycle(one, **rates) for one in optimizers]
    seen = set()
    for _ in range(4):
        for one, scheduler in zip(optimizers, schedulers, strict=True):
            for parameter in one.param_groups[0]["params"]:
                parameter.grad = torch.cos(parameter.detach())
            one.step()
            scheduler.step()
        betas = [one.param_groups[0]["betas"] for one in optimizers]
        assert betas[0] == betas[1]
        seen.add(betas[0])
    assert len(seen) == 4
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    both = sw.optimizer(net, matrix=sw.muon(), elementwise=sw.adamw())
    with pytest.raises(ValueError, match="cycle_momentum"):
        cycle(both, **rates)
    cycle(both, **rates, cycle_momentum=False)
    alone = sw.Muon(Net().parameters(), momentum=0.9)
    rates |= {"max_momentum": 0.8, "base_momentum": 0.7}
    cycle(alone, **rates)
    assert alone.param_groups[0]["momentum"] == 0.8


def test_bad_parameters_are_refused_together() -> None:
    weight, vector = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="cannot work") as caught:
        sw.Muon(
            [
                {"params": [("bias", vector), ("w", weight)], "betas": (0.9, 0.95)},
                {"params": [("again", weight), ("text", "w")]},
            ]
        )
    for part in (
        "'bias' of shape [3] is no matrix",
        "betas is unknown",
        "again is given twice",
        "text is a str",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="no parameters"):
        sw.Muon([])
    with pytest.raises(ValueError, match=r"scale='big': one of original"):
        sw.Muon([weight], scale="big")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.0},
        {"lr": 0.01, "ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2), "momentum": 0.9},
    ],
    ids=str,
)
def test_it_stands_in_for_torchs(options: dict[str, Any]) -> None:
    """The arguments of torch, its defaults, and its updates to the rounding of its products."""
    ours, theirs = inspect.signature(sw.Muon.__init__), inspect.signature(torch.optim.Muon.__init__)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].default == parameter.default, name
    assert [*ours.parameters][: len(theirs.parameters)] == [*theirs.parameters]
    models = Net(), Net()
    before = [p.detach().clone() for p in models[0].parameters()]
    for model, kind in zip(models, (sw.Muon, torch.optim.Muon), strict=True):
        train(model, kind(model.parameters(), **options))
    for mine, its, old in zip(models[0].parameters(), models[1].parameters(), before, strict=True):
        moved = (its - old).norm()
        assert moved > 0 and (mine - its).norm() / moved < 0.03
    groups = [{"params": [models[0].up.weight], "ns_steps": 2, "adjust_lr_fn": "match_rms_adamw"}]
    (group,) = sw.Muon(groups).param_groups
    assert group["preset"].steps == 2 and group["scale"] == "match_rms_adamw"
    for wrong in ({"adjust_lr_fn": "rms"}, {"eps": -1.0}, {"ns_coefficients": (1.0, 2.0)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sw.Muon(models[0].parameters(), **wrong)


# ------------------------------------------------------------------------------ torch's FSDP2


@cache
def grid() -> DeviceMesh:
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))


def under_fsdp2(rank: int, world_size: int, sizes: tuple[int, ...]) -> list[tuple[str, str]]:
    model = Net()
    fully_shard(model, mesh=mesh_of(*sizes))
    optimizer = sw.Muon(model.named_parameters(), lr=0.1, weight_decay=0.1)
    for parameter in model.parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert isinstance(momentum, DTensor) and momentum.placements == parameter.placements
    calls = train(model, optimizer)
    assert_same(model, reference())
    # FSDP2 gathers what the optimizer wrote.
    hidden = torch.randn(3, 6)
    assert torch.equal(model(hidden), reference()(hidden))
    whole = [gradient(n, p.shape, STEPS - 1) for n, p in model.named_parameters()]
    squares = sum(one.square().sum().item() for one in whole)
    assert float(sw.Muon.clip_grad_norm(optimizer, 1e9)) == pytest.approx(squares**0.5)
    return [(call.operation, call.axis) for call in calls]


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2))]
)
def test_under_fsdp2_one_exchange_serves_all_shapes(
    world_size: int, sizes: tuple[int, ...]
) -> None:
    expected = {
        (1,): [],
        (2, 2): [("all_to_all", "dp"), ("all_to_all", "dp"), ("all_to_all", "dp_outer")],
    }.get(sizes, [("all_to_all", "dp")] * 2)
    assert run_ranks(under_fsdp2, world_size, sizes) == [expected] * world_size


class Stacks(nn.Module):
    """Experts as one stack of matrices, an odd number of them, and dense weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.experts = nn.Parameter(torch.randn(5, 8, 12))
        self.dense = nn.Parameter(torch.randn(12, 4))
        self.few = nn.Parameter(torch.randn(4, 12))


def stacks_under_fsdp2(rank: int, world_size: int, sizes: tuple[int, ...], dim: int) -> int:
    models = Stacks(), Stacks()
    if dim == 1:  # as torch cuts where rows are too few
        fully_shard(models[0], mesh=mesh_of(*sizes), shard_placement_fn=lambda p: Shard(1))
    else:
        fully_shard(models[0], mesh=mesh_of(*sizes))
    for model in models:
        optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.1, weight_decay=0.1), elementwise=None)
        for step in range(3):
            for name, parameter in model.named_parameters():
                full = gradient(name, parameter.shape, step)
                parameter.grad = full
                if isinstance(parameter, DTensor):
                    parameter.grad = distribute_tensor(
                        full, parameter.device_mesh, parameter.placements
                    )
            optimizer.step()
    for mine, its in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), its)
    return sum(
        not torch.equal(p, q)
        for p, q in zip(models[1].parameters(), Stacks().parameters(), strict=True)
    )


@pytest.mark.cpu_only("16 bits: other kernels serve matrices that travel than those that stay")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("world_size", "sizes"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
def test_stacks_and_columns_under_fsdp2_are_those_of_one_process(
    world_size: int, sizes: tuple[int, ...], dim: int
) -> None:
    assert run_ranks(stacks_under_fsdp2, world_size, sizes, dim) == [3] * world_size


# ------------------------------------------------------------------------------ tensor parallel


def cut_by_tp(mesh: DeviceMesh) -> Net:
    model = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    for name, side in (("up", 0), ("down", 1)):
        weight = getattr(model, name).weight
        assert weight.placements == (Shard(side),)
    square = distribute_tensor(model.square.weight.detach(), mesh, [Shard(1)])
    model.square.weight = nn.Parameter(square)
    return model


@cache
def tp_mesh(size: int) -> DeviceMesh:
    return init_device_mesh(device_type(), (size,), mesh_dim_names=("tp",))


def modes(rank: int, world_size: int) -> dict[str, list[str]]:
    """The three modes on one tensor-parallel axis: exact, exact up to rounding, Muon on blocks."""
    found, exact = {}, reference()
    for mode in ("duplicated", "distributed", "blockwise"):
        model, options = cut_by_tp(tp_mesh(2)), {"lr": 0.1, "weight_decay": 0.1}
        calls = train(model, sw.Muon(model.named_parameters(), tensor_parallel=mode, **options))
        found[mode] = [call.operation for call in calls]
        pairs = [
            (mine.to_local(), local_piece(mine, its.detach()))
            for mine, its in zip(model.parameters(), exact.parameters(), strict=True)
        ]
        if mode == "duplicated":
            assert_same(model, exact)
        elif mode == "distributed":
            assert max(float((mine - its).abs().max()) for mine, its in pairs) < 2e-4
        else:
            assert not all(torch.equal(mine, its) for mine, its in pairs)
            blocks, whole = nn.Module(), Net()
            for (name, cut), its in zip(
                cut_by_tp(tp_mesh(2)).named_parameters(), whole.parameters(), strict=True
            ):
                block = nn.Parameter(local_piece(cut, its.detach()))
                blocks.register_parameter(name.replace(".", "_"), block)
            optimizer = sw.Muon(blocks.parameters(), **options)
            for step in range(STEPS):
                for name, cut in model.named_parameters():
                    full = gradient(name, cut.shape, step)
                    getattr(blocks, name.replace(".", "_")).grad = local_piece(cut, full)
                optimizer.step()
            assert all(map(torch.equal, (mine for mine, _ in pairs), blocks.parameters()))
    return found


@pytest.mark.cpu_only("16 bits: other kernels serve matrices that travel than those that stay")
def test_the_three_modes_of_tensor_parallelism() -> None:
    found = run_ranks(modes, 2)[0]
    # There and back, for matrices cut along rows and along columns: each rank computes its part.
    assert found["duplicated"] == ["all_to_all"] * 2 * 3
    assert found["distributed"] == ["all_reduce"] * 3 * 3, "the largest element, then two Grams"
    assert not found["blockwise"], "blocks stand alone"


def both(rank: int, world_size: int) -> None:
    model = cut_by_tp(grid()["tp"])
    fully_shard(model, mesh=grid()["dp"])
    for parameter in model.parameters():
        cut = sharding_of(parameter)
        assert cut.sharded == (True, False) and cut.blocked == (False, True)
    optimizer = sw.Muon(model.named_parameters(), lr=0.1, weight_decay=0.1)
    train(model, optimizer)
    assert_same(model, reference())
    norm = optimizer.clip_grad_norm(1e9)
    squares = [
        gradient(name, parameter.shape, STEPS - 1).double().square().sum()
        for name, parameter in model.named_parameters()
    ]
    torch.testing.assert_close(norm, sum(squares).sqrt().float())
    model = Net()  # copies on the ranks of an axis
    for module in (model.up, model.down, model.square):
        weight = distribute_tensor(module.weight.detach(), grid()["tp"], [Replicate()])
        module.weight = nn.Parameter(weight)
    train(model, sw.Muon(model.named_parameters(), lr=0.1, weight_decay=0.1))
    assert_same(model, reference())


@pytest.mark.cpu_only("16 bits: other kernels serve matrices that travel than those that stay")
def test_fsdp2_over_tensor_parallel_weights_and_copies_are_exact() -> None:
    run_ranks(both, 4)


def refused(rank: int, world_size: int) -> str:
    odd = nn.Parameter(distribute_tensor(torch.randn(6, 7), tp_mesh(2), [Shard(1)]))
    fused = nn.Parameter(distribute_tensor(torch.randn(6, 8), tp_mesh(2), [Shard(0)]))
    model = nn.Module()
    model.register_parameter("odd", odd)
    model.register_parameter("fused", fused)
    sw.route(model, split={"fused": Split.heads(3)})
    with pytest.raises(ValueError, match="cannot work") as caught:
        sw.Muon(model.named_parameters())
    return str(caught.value)


def test_what_tensor_parallelism_cannot_do_is_refused() -> None:
    for message in run_ranks(refused, 2):
        assert "'odd' has 7 columns, which do not divide over 2 tensor-parallel ranks" in message
        assert "'fused' has a split heads(3), and tensor parallelism cuts its 6 rows" in message


TP_SPLITS = {
    "heads": (Split.heads(4), 0),
    "stacked": (Split.stacked(4, 2, 2), 0),
    "columns": (Split.heads(2, dim=1), 1),
    "interleaved": (Split.interleaved(2), 0),
    "grouped": (Split.grouped(2, 2, 1, 1), 0),
    "across": (Split.stacked(5, 3), 1),
}


def split_by_tp(rank: int, world_size: int) -> list[str]:
    """Matrices of a split that tensor parallelism leaves whole, or cuts evenly, over FSDP2."""
    mesh = grid()
    models = [nn.Module(), nn.Module()]
    for name, (_, side) in TP_SPLITS.items():
        torch.manual_seed(len(name))
        weight = torch.randn(8, 6)
        models[1].register_parameter(name, nn.Parameter(weight.clone()))
        cut = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(side)]))
        models[0].register_parameter(name, cut)
    fully_shard(models[0], mesh=mesh["dp"])
    calls: list[comm.Call] = []
    for model in models:
        sw.route(model, split={name: split for name, (split, _) in TP_SPLITS.items()})
        calls += train(model, sw.Muon(model.named_parameters(), lr=0.1, weight_decay=0.1))
    for mine, its in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.to_local(), local_piece(mine, its.detach()))
    return [call.operation for call in calls if call.axis == "tp"]


@pytest.mark.cpu_only("16 bits: other kernels serve matrices that travel than those that stay")
def test_splits_that_tensor_parallelism_does_not_break_are_exact() -> None:
    calls = run_ranks(split_by_tp, 4)
    assert calls[0] == calls[1] and calls[2] == calls[3], "who share blocks share their gathers"
    # Three weights are cut, of 2, 3 and 2 matrices; those of one shape and owner come together.
    assert set(calls[0] + calls[2]) == {"all_to_all"}
    assert 8 <= len(calls[0] + calls[2]) <= 14, "the other weights stay where they are"
