# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism inside data parallelism: the numbers of one process under every strategy, the
same bits under every strategy of one mesh, and what parameters at rest say of themselves."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.moe import GroupedLinear, MixtureOfExperts, Routing, swiglu
from shardwise.optim.functions import ANY
from tests.one_card import UNTRACED, device_type
from tests.ranks import on_ranks, run_ranks
from tests.tensor_parallel import (
    Net,
    adamw_of,
    assert_close,
    batches,
    bucketed,
    data_rank,
    grid,
    loss_of,
    muon_of,
    one_process,
    sharded,
    tiled,
    train,
    whole,
)
from tests.whole import assert_same, whole_parameters, whole_state

SIXTEEN_BITS = pytest.mark.cpu_only(
    "16 bits: other kernels serve matrices that travel than those that stay"
)
STEPS = 2  # the second has momentum


def one_unit(mesh: DeviceMesh, placements: sw.Placements) -> nn.Module:
    """Matrices beside an embedding whose tiles are uneven. In one buffer with it they would lie
    otherwise on each rank of tp, and these would plan different exchanges."""
    model = sw.fully_shard(tiled(mesh), mesh=mesh, placements=placements)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.cut.pieces for p in model.blocks.parameters()])
    assert all(pieces == everyone[0] for pieces in everyone)
    return model


def torchs(mesh: DeviceMesh, placements: Any = None, sequence: bool = True) -> Net:
    """Under torch's own FSDP2, whose peer a vocabulary is that divides."""
    model = tiled(mesh, sequence)
    for unit in (*model.blocks, model):
        torch_fully_shard(unit, mesh=mesh["dp"])
    return model


def normuon_of(model: nn.Module) -> Any:
    matrix = ANY["normuon"](lr=0.05, weight_decay=0.1)  # a smooth function: rounding stays small
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


def soap_of(model: nn.Module) -> Any:
    matrix = ANY["soap"](lr=0.05, weight_decay=0.1, frequency=2)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw_of,
    "normuon": normuon_of,
    **{mode: partial(muon_of, tensor_parallel=mode) for mode in ("duplicated", "distributed")},
}
WAYS: dict[str, Any] = {
    "zero3": (sharded, (2, 2), sw.zero(3)),
    "one unit": (one_unit, (2, 2), sw.zero(3)),
    "zero1": (sharded, (2, 2), sw.zero(1)),
    "buckets zero0": (bucketed, (2, 2), sw.zero(0)),
    "buckets zero2": (bucketed, (2, 2), sw.zero(2)),
    "hsdp": (sharded, (2, 1, 2), sw.hsdp()),
    "hfsdp": (sharded, (2, 1, 2), sw.hfsdp()),
    "half": (partial(sharded, sequence=False), (2, 2), sw.zero(0)),
    "torch": (torchs, (2, 2), None),
}
# The form with most messages goes every way, the others where they differ.
WAYS_OF = {
    "distributed": [*WAYS][:7],
    "duplicated": ["zero3", "zero1", "buckets zero2", "hfsdp"],
    "adamw": ["zero3", "buckets zero0", "hsdp", "half"],
    "normuon": ["zero3", "hsdp", "half", "torch"],
}


def everywhere(optimize: Any, names: list[str]) -> list[list[dict[str, Tensor]]]:
    found = []
    for wrap, sizes, placements in map(WAYS.__getitem__, names):
        mesh = grid(*sizes)
        model = wrap(mesh, placements)
        found.append(train(model, optimize(model), batches(STEPS, 2, data_rank(mesh))))
    return found


def assert_same_bits(runs: list[list[dict[str, Tensor]]], steps: int = STEPS) -> None:
    first, *others = runs
    for other in others:
        for mine, its in list(zip(other, first, strict=True))[:steps]:
            names = [name for name in mine if steps == STEPS or name.startswith(("loss", "grad"))]
            assert not [name for name in names if not torch.equal(mine[name], its[name])]


@SIXTEEN_BITS
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(4)
def test_the_numbers_are_those_of_one_process(rank: int, world_size: int, name: str) -> None:
    runs = everywhere(OPTIMIZERS[name], WAYS_OF[name])
    optimize = {"duplicated": muon_of, "distributed": muon_of}.get(name, OPTIMIZERS[name])
    for run in runs:
        assert_close(run, one_process(optimize, STEPS, 2))
    if name in ("duplicated", "distributed"):
        assert_same_bits(runs)
    elif name == "adamw":  # torch's clipping rounds norms of whole tensors and of pieces otherwise
        assert_same_bits(runs[:3], steps=1)


@on_ranks(4)
def test_blockwise_is_muon_on_tiles(rank: int, world_size: int) -> None:
    """As on torch's DTensors of tensor parallelism alone, which see all batches here."""
    optimize = partial(muon_of, tensor_parallel="blockwise")
    runs = everywhere(optimize, ["zero3", "one unit", "buckets zero0", "hsdp"])
    assert_same_bits(runs)
    model = tiled(grid(2, 2))
    assert_close(runs[0], train(model, optimize(model), batches(STEPS, 2)))
    with pytest.raises(AssertionError):
        assert_close(runs[0], one_process(muon_of, STEPS, 2))


FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "trace": {"memory": "trace"},
    "neighbours": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("form", FORMS)
@on_ranks(4)
def test_options(rank: int, world_size: int, form: str) -> None:
    optimize = muon_of if device_type() == "cpu" else adamw_of  # a GPU orthogonalises in 16 bits
    mesh = grid(2, 2)
    model = sharded(mesh, sw.zero(3), **FORMS[form])
    found = train(model, optimize(model), batches(2, 2, data_rank(mesh)))
    expected = one_process(optimize, 2, 2)
    if form != "bf16":
        assert_close(found, expected)
        return
    for mine, its in zip(found, expected, strict=True):
        assert mine["norm"].item() == pytest.approx(its["norm"].item(), rel=0.05)


@on_ranks(4)
def test_microbatches_wait_for_the_last(rank: int, world_size: int) -> None:
    """Two microbatches under hsdp: gradients of norms, partial over tp, are summed and reduced."""
    mesh, expected = grid(2, 1, 2), Net()
    model = sharded(mesh, sw.hsdp())
    for number in range(2):
        model.set_is_last_backward(number == 1)
        loss_of(model, 2 * number + data_rank(mesh)).backward()
        for other in range(2):
            (loss_of(expected, 2 * number + other) / 2).backward()
    for (name, mine), its in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(whole(mine.grad), its.grad, atol=1e-5), name


@pytest.mark.parametrize(("sizes", "sequence"), [((2, 2), False), ((2, 2), True)], ids=str)
@on_ranks(4)
def test_the_norm_under_torchs_fsdp2_is_the_true_one(
    rank: int, world_size: int, sizes: tuple[int, int], sequence: bool
) -> None:
    """Of parameters on meshes of one kind or of two."""
    mesh, one = grid(*sizes), Net()
    ours = torchs(mesh, sequence=sequence)
    assert len({p.device_mesh.ndim for p in ours.parameters()}) == (1 if sequence else 2)
    optimizers = [muon_of(ours), muon_of(one)]
    loss_of(ours, mesh["dp"].get_local_rank()).backward()
    for other in range(2):
        (loss_of(one, other) / 2).backward()
    for kind in (1.0, float("inf"), 2.0):
        norms = [
            optimizer.clip_grad_norm(0.1 if kind == 2.0 else 1e9, kind) for optimizer in optimizers
        ]
        torch.testing.assert_close(*norms)
    assert norms[1] > 0.1, "there was something to clip"
    for (name, mine), its in zip(ours.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), its.grad, msg=name, atol=1e-6, rtol=1e-4)


class Attention(nn.Module):
    """Query, key and value in one matrix, heads one after another: [heads, 3, head, width]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.qkv(x).tanh())


@on_ranks(4)
def test_a_split_within_tiles(rank: int, world_size: int) -> None:
    """Six matrices of 4 rows, three on each rank of tp: whole there, so no tile is gathered."""
    mesh, models = grid(2, 2), []
    for over in (True, False):
        model = Attention()
        sw.route(model, split={"qkv.weight": sw.Split.heads(6)})
        if over:
            plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            sw.fully_shard(model, mesh=mesh)
        optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.1), elementwise=sw.adamw())
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            model(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        near = 2e-4 if mine.device.type == "cpu" else 2e-3  # a GPU orthogonalises in 16 bits
        assert torch.allclose(whole(mine), its, atol=near)


# ------------------------------------------------------------------------------ at rest


@on_ranks(4)
def test_a_parameter_at_rest_knows_its_pieces(rank: int, world_size: int) -> None:
    mesh, expected = grid(2, 2), dict(Net().named_parameters())
    model = sharded(mesh, sw.zero(3))
    up, down = model.blocks[0].up.weight, model.blocks[0].down.weight
    assert up.placements[0].is_shard(0) and up.placements[1].is_shard(0)
    assert down.placements[0].is_shard(0) and down.placements[1] == Shard(1)
    final = model.final.weight.placements
    assert final[0].is_shard(0) and final[1] == Replicate()
    # Torch may not take these rows for those of its own Shard(0), nor for another tensor's.
    assert final[0] != up.placements[0] and not final[0] == Shard(0)  # noqa: SIM201
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        assert parameter.device_mesh.mesh_dim_names == ("dp", "tp"), name
        assert torch.equal(parameter.full_tensor(), expected[name]), name
        torch.testing.assert_close(parameter.norm(), expected[name].norm())
        # Every rank's boxes, of all ranks: each element once for each of its copies.
        held = [None] * world_size
        dist.all_gather_object(held, parameter.cut.boxes)
        count = torch.zeros(parameter.shape)
        for box in (box for boxes in held for box in boxes):
            count[slices(box)] += 1
        cut = math.prod(2 for one in parameter.placements if not one.is_replicate())
        assert (count == world_size / cut).all(), name
        views = parameter.cut.views(parameter.to_local())
        for box, view in zip(parameter.cut.boxes, views, strict=True):
            assert torch.equal(view, expected[name][slices(box)]), name


def slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))


@on_ranks(4)
def test_forward_sees_the_dtensor_that_the_user_made(rank: int, world_size: int) -> None:
    model, before = sharded(grid(2, 2), sw.zero(3)), tiled(grid(2, 2))
    seen: dict[str, Any] = {}
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda *_: seen.update(dict(block.named_parameters())))
    loss_of(model, 0).backward()
    for name, parameter in before.blocks[1].named_parameters():
        mine = seen[name]
        assert isinstance(mine, DTensor) and isinstance(mine, nn.Parameter) and mine.is_leaf
        assert (mine.device_mesh, mine.placements) == (parameter.device_mesh, parameter.placements)
        assert mine.shape == parameter.shape
        assert mine.to_local().shape == parameter.to_local().shape


@on_ranks(4)
def test_diagnosis_sees_all_ranks(rank: int, world_size: int) -> None:
    model, expected = sharded(grid(2, 2), sw.zero(3)), Net()
    for name, (norm, grad) in sw.parameter_norms(model).items():
        assert norm == pytest.approx(expected.get_parameter(name).norm().item()) and grad is None
    assert "blocks.0.down.weight [8, 16] of [8, 32]" in sw.describe(model)
    assert sw.find_nonfinite(model) == []
    if rank == 3:
        held = [p.to_local() for p in model.blocks[1].parameters() if p.to_local().numel()]
        held[0].view(-1)[0] = float("nan")
    [found] = sw.find_nonfinite(model)
    assert found.name.startswith("blocks.1.") and (found.coordinate, found.num_nan) == ((1, 1), 1)


@on_ranks(4)
def test_initialisation_after_wrapping_draws_one_models_numbers(rank: int, world_size: int) -> None:
    def reset(model: nn.Module) -> None:
        torch.manual_seed(7)
        for parameter in model.parameters():
            nn.init.normal_(parameter)

    expected, mesh = Net(), grid(2, 2)
    with torch.device("meta"):
        model = tiled(mesh)
    for unit in (*model.blocks, model):
        sw.fully_shard(unit, mesh=mesh)
    model.to_empty(device=device_type())
    reset(model)
    reset(expected)
    assert_same(whole_parameters(model), whole_parameters(expected))


@on_ranks(4)
def test_a_scaled_loss_that_overflows_on_one_rank_stops_all(rank: int, world_size: int) -> None:
    """An infinite gradient in the tile of one rank of tp."""
    mesh = grid(2, 2)
    model = sharded(mesh, sw.zero(3))
    optimizer, scaler = adamw_of(model), torch.amp.GradScaler(device_type(), init_scale=4.0)
    for broken in (False, True):
        before = whole_parameters(model)
        scaler.scale(loss_of(model, data_rank(mesh))).backward()
        if broken and rank == 1:
            held = [p.grad.to_local() for p in model.blocks[0].parameters()]
            next(one for one in held if one.numel()).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = whole_parameters(model)
        assert all(torch.equal(after[name], before[name]) == broken for name in after)
        assert scaler.get_scale() == (2.0 if broken else 4.0)


# ------------------------------------------------------------------------------ other forms


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def spmd(mesh: DeviceMesh) -> Small:
    """Every parameter a DTensor on the mesh of all axes, replicated on the data-parallel ones."""
    model, data = Small(), (Replicate(),) * (mesh.ndim - 1)
    placed = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        module, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        placements = (*data, placed.get(name, Replicate()))
        setattr(module, last, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch has no dp_mesh_dims")
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 2)], ids=str)
@on_ranks(4)
def test_dtensors_of_one_mesh_of_all_axes(
    rank: int, world_size: int, sizes: tuple[int, ...]
) -> None:
    """As torch's fully_shard takes them with dp_mesh_dims: the same gradients as it."""
    mesh = grid(*sizes)
    dims = fsdp.DataParallelMeshDims(shard="dp", replicate="dp_outer" if len(sizes) == 3 else None)
    models = [spmd(mesh), spmd(mesh)]
    cut = (Shard(0),) * (mesh.ndim - 1)
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for model, shard in zip(models, (sw.fully_shard, torch_fully_shard), strict=True):
        shard(model, mesh=mesh, dp_mesh_dims=dims)
        optimizer = adamw_of(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(distribute_tensor(rows, mesh, (*cut, Replicate()))).square().mean().backward()
            optimizer.step()
    for (name, mine), its in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert mine.device_mesh == mesh, name
        assert torch.allclose(whole(mine.grad), whole(its.grad), atol=1e-6), name
        assert torch.allclose(whole(mine), whole(its), atol=1e-6), name


@pytest.mark.cpu_only(UNTRACED)
@on_ranks(4)
def test_compiled_blocks_have_the_gradients_of_eager_ones(rank: int, world_size: int) -> None:
    """Through AOTAutograd, which takes DTensors apart. Torch 2.13's FSDP2 gets no gradient of the
    embedding there: a block's input is still on its way."""
    mesh, graphs = grid(2, 2), list[Any]()

    def compiled(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    models = [tiled(mesh) for _ in range(2)]
    for block in models[0].blocks:
        block.compile(backend=compiled, fullgraph=True)
    for model in models:
        for unit in (*model.blocks, model):
            sw.fully_shard(unit, mesh=mesh)
        loss_of(model, data_rank(mesh)).backward()
    for (name, mine), its in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(whole(mine.grad), whole(its.grad), atol=1e-6), name
    assert graphs, "compiled"


@on_ranks(4)
def test_dtensors_that_cannot_be_sharded_are_refused_by_name(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    narrow = nn.Linear(4, 1)  # one row for two ranks
    parallelize_module(narrow, mesh["tp"], ColwiseParallel())

    def placed(on: DeviceMesh, placements: list[Any]) -> nn.Module:
        linear = nn.Linear(4, 4)
        weight = distribute_tensor(linear.weight.detach(), on, placements)
        linear.weight = nn.Parameter(weight)
        return linear

    partial_sum = nn.Linear(4, 4)
    weight = DTensor.from_local(partial_sum.weight.detach(), mesh["tp"], [Partial()])
    partial_sum.weight = nn.Parameter(weight)
    experts = GroupedLinear(4, 8, 8)
    cut = distribute_tensor(experts.weight.detach(), mesh["tp"], [Shard(0)])
    experts.weight = nn.Parameter(cut)
    unnamed = init_device_mesh(device_type(), (4,))
    for module, why in (
        (narrow, "leaves nothing for some ranks"),
        (partial_sum, "partial sum"),
        (torchs(mesh), "fully_shard already"),
        (placed(mesh, [Shard(0)] * 2), "axis 'dp'"),
        (placed(unnamed, [Shard(0)]), "name the axes"),
        (experts, "'weight' holds experts"),
    ):
        with pytest.raises(ValueError, match=why):
            sw.fully_shard(module, mesh=mesh)


@on_ranks(4)
def test_matrices_that_ranks_do_not_share_are_refused(rank: int, world_size: int) -> None:
    """A function's states would have one name, and a checkpoint would hold one rank's alone."""
    mesh, values = grid(2, 2), {"weight": torch.ones(4, 8, 8), "fused": torch.ones(16, 8)}
    for name in values:
        model = nn.Module()
        for one, value in values.items():
            place = Shard(0) if one == name else Replicate()
            cut = distribute_tensor(value, mesh["tp"], [place])
            model.register_parameter(one, nn.Parameter(cut))
        sw.route(model, split={"fused": sw.Split.heads(2)})
        sw.fully_shard(model, mesh=mesh, placements=sw.zero(3))
        with pytest.raises(ValueError, match=f"cuts '{name}'"):
            soap_of(model)


class Mixed(nn.Module):
    """Products that tensor parallelism cuts, then experts and a product that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down, self.last = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)
        routing = Routing(num_experts=4, experts_per_token=2)
        self.experts = MixtureOfExperts(routing, 32, 32, activation=swiglu())
        self.experts.init_weights(0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return self.last(x + self.experts(x)[0])


@on_ranks(4)
def test_experts_and_fp8_beside_cut_products(rank: int, world_size: int) -> None:
    mesh, plain = grid(2, 2), Mixed()
    rows = [torch.randn(6, 32, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for precision in (None, sw.Precision(weights="mxfp8")):
        model = Mixed()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sw.fully_shard(model, mesh=mesh, precision=precision)
        loss = model(rows[data_rank(mesh)]).square().mean()
        loss.backward()
        if precision is None:
            torch.stack([plain(one).square().mean() for one in rows]).mean().backward()
            for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(whole(mine.grad), its.grad, atol=1e-5), name
        else:
            stored = {row.name: row for row in sw.precision_report(model).rows}
            assert stored["last.weight"].format and not stored["up.weight"].format
            near = plain(rows[data_rank(mesh)]).square().mean()
            assert torch.allclose(loss.float(), near, rtol=0.1)


# ------------------------------------------------------------------------------ saved


def trained(sizes: tuple[int, ...], optimize: Any, steps: range) -> tuple[Any, Any]:
    """``(2, 2, "torch")``: under torch's own FSDP2."""
    if sizes[-1:] == ("torch",):
        model: Any = torchs(grid(*sizes[:-1]))
    else:
        model = sharded(grid(*sizes), sw.zero(3) if len(sizes) == 2 else sw.hsdp())
    optimizer = optimize(model)
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any, steps: range) -> dict[str, Tensor]:
    for step in steps:  # the same batch on every rank, whatever the mesh
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model, optimizer)


@on_ranks(4)
def test_whole_state_dicts_go_in_and_out(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    model = bucketed(mesh, sw.zero(1))
    train(model, muon_of(model), batches(1, 2, data_rank(mesh)))
    expected = whole_parameters(model)
    plain = sw.full_state_dict(model)
    assert_same(plain, expected)
    unwrapped = tiled(mesh)
    assert_same(sw.full_state_dict(unwrapped), whole_parameters(unwrapped))
    assert not any(isinstance(value, DTensor) for value in plain.values())
    all_of_it = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = get_model_state_dict(model, options=all_of_it)
    if rank == 0:
        assert_same(theirs, expected)
    of_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for load in (
        lambda other: sw.load_full_state_dict(other, plain),
        lambda other: other.load_state_dict(plain),
        lambda other: other.load_state_dict(model.state_dict()),
        lambda other: set_model_state_dict(other, dict(plain), options=all_of_it),
        lambda other: set_model_state_dict(
            other, dict(plain) if rank == 0 else {}, options=of_first
        ),
    ):
        other = sharded(mesh, sw.zero(3))
        assert not torch.equal(whole(other.head.weight), expected["head.weight"])
        load(other)
        assert_same(whole_parameters(other), expected)
    over_tp = tiled(mesh)  # torch's DTensors, which know nothing of dp
    other.load_state_dict(over_tp.state_dict())
    assert_same(whole_parameters(other), whole_parameters(over_tp))


SAVED = {
    "muon": (muon_of, (2, 2), ((1, 4), (4, 1), (1, 2, 2))),
    "muon, three axes": (muon_of, (2, 1, 2), ((4, 1),)),
    "soap": (soap_of, (2, 2), ((1, 4),)),
    "adamw": (adamw_of, (2, 2), ((1, 2, 2),)),
    "torch": (muon_of, (2, 2, "torch"), ((1, 4),)),
}


def check_saved(rank: int, world_size: int, name: str, path: str) -> dict[str, Tensor]:
    optimize, sizes, into = SAVED[name]
    model, optimizer = trained(sizes, optimize, range(2))
    saved = whole_state(model, optimizer)
    sw.save(path, model, optimizer)
    for others in (*into, sizes):
        other, fresh = trained(others, optimize, range(7, 8))
        assert not torch.equal(whole(other.head.weight), saved["head.weight"])
        sw.load(path, other, fresh)
        assert_same(whole_state(other, fresh), saved)
    assert_same(go_on(other, fresh, range(2, 4)), go_on(model, optimizer, range(2, 4)))
    return saved


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_loads_into_any_other_mesh(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "saved")
    saved = run_ranks(check_saved, 4, name, path)[0]
    model = Net()  # and into one process
    optimizer = SAVED[name][0](model)
    sw.load(path, model, None if name == "adamw" else optimizer)
    found = whole_state(model, optimizer)
    assert_same(found, {key: saved[key] for key in found})
    if name == "soap":
        assert saved["blocks.0.up.weight left_basis"].shape == (32, 32), "of the whole matrix"


@on_ranks(4)
def test_torchs_checkpoints(rank: int, world_size: int, tmp_path: Path) -> None:
    """Written here and read by torch's fully_shard with tensor parallelism, and the other way."""
    ours = sharded(grid(2, 2), sw.zero(3))
    with torch.no_grad():
        for number, parameter in enumerate(ours.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 1000.0 * number)
    expected, theirs = whole_parameters(ours), torchs(grid(2, 2))
    dcp.save({"model": ours.state_dict()}, checkpoint_id=tmp_path / "ours")
    for other in (sharded(grid(1, 4), sw.zero(3)), bucketed(grid(2, 2), sw.zero(2)), theirs, Net()):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "ours")
        other.load_state_dict(state["model"])
        assert_same(whole_parameters(other), expected)
    dcp.save({"model": theirs.state_dict()}, checkpoint_id=tmp_path / "theirs")
    other = sharded(grid(2, 1, 2), sw.hsdp())
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "theirs")
    assert_same(whole_parameters(other), expected)


@pytest.mark.parametrize("whole_states", [True, False], ids=["whole", "sharded"])
@on_ranks(4)
def test_optimizer_states_go_through_torchs_helpers(
    rank: int, world_size: int, whole_states: bool
) -> None:
    model, optimizer = trained((2, 2), adamw_of, range(2))
    options = StateDictOptions(full_state_dict=whole_states)
    weights, states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    other, fresh = trained((2, 2), adamw_of, range(7, 8))
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=options)
    assert_same(go_on(other, fresh, range(2, 4)), go_on(model, optimizer, range(2, 4)))
