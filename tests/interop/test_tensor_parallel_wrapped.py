# SPDX-License-Identifier: Apache-2.0
"""Parameters of tensor parallelism that this library sharded further: what they say of themselves,
and the forms in which torch's users write it (test_tensor_parallel_saved: checkpoints)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.moe import GroupedLinear, MixtureOfExperts, Routing, swiglu
from tests.ranks import on_ranks
from tests.tensor_parallel import (
    Net,
    adamw_of,
    assert_close,
    batches,
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
from tests.whole import assert_same, whole_parameters

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
        assert parameter.shape == expected[name].shape, name
        assert torch.equal(parameter.full_tensor(), expected[name]), name
        assert torch.equal(parameter.sum(), expected[name].double().sum().float()), name
        torch.testing.assert_close(parameter.norm(), expected[name].norm())
        assert parameter.max() == expected[name].max(), name
        # Every rank's boxes, of all ranks: each element once for each of its copies.
        held = [None] * world_size
        dist.all_gather_object(held, parameter.cut.boxes)
        count = torch.zeros(parameter.shape)
        for offsets, sizes in (box for boxes in held for box in boxes):
            where = zip(offsets, sizes, strict=True)
            count[tuple(slice(begin, begin + size) for begin, size in where)] += 1
        cut = math.prod(2 for one in parameter.placements if not one.is_replicate())
        assert (count == world_size / cut).all(), name
        for (offsets, sizes), view in zip(
            parameter.cut.boxes, parameter.cut.views(parameter.to_local()), strict=True
        ):
            where = zip(offsets, sizes, strict=True)
            box = tuple(slice(begin, begin + size) for begin, size in where)
            assert torch.equal(view, expected[name][box]), name


@on_ranks(4)
def test_forward_sees_the_dtensor_that_the_user_made(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    model, before = sharded(mesh, sw.zero(3)), tiled(mesh)
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any) -> None:
        seen.update(dict(module.named_parameters()))

    model.blocks[1].register_forward_pre_hook(look)
    loss_of(model, 0).backward()
    for name, parameter in before.blocks[1].named_parameters():
        mine = seen[name]
        assert isinstance(mine, DTensor) and isinstance(mine, nn.Parameter) and mine.is_leaf
        assert (mine.device_mesh, mine.placements) == (parameter.device_mesh, parameter.placements)
        assert mine.shape == parameter.shape
        assert mine.to_local().shape == parameter.to_local().shape


@on_ranks(4)
def test_diagnosis_sees_all_ranks(rank: int, world_size: int) -> None:
    mesh, expected = grid(2, 2), Net()
    model = sharded(mesh, sw.zero(3))
    for name, (norm, grad) in sw.parameter_norms(model).items():
        assert norm == pytest.approx(expected.get_parameter(name).norm().item()) and grad is None
    assert "blocks.0.down.weight [8, 16] of [8, 32] (Shard(dim=1),)" in sw.describe(model)
    assert sw.find_nonfinite(model) == []
    if rank == 3:
        held = [p.to_local() for p in model.blocks[1].parameters() if p.to_local().numel()]
        held[0].view(-1)[0] = float("nan")
    [found] = sw.find_nonfinite(model)
    assert found.name.startswith("blocks.1.") and "on rank (1, 1): 1 NaN" in str(found)


@on_ranks(4)
def test_initialisation_after_wrapping_draws_one_models_numbers(rank: int, world_size: int) -> None:
    def reset(model: nn.Module) -> None:
        torch.manual_seed(7)
        for parameter in model.parameters():
            nn.init.normal_(parameter)

    expected, mesh = Net(), grid(2, 2)
    with torch.device("meta"):
        model = tiled(mesh)
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    reset(model)
    reset(expected)
    assert_same(whole_parameters(model), whole_parameters(expected))
    assert loss_of(model, 0).item() == pytest.approx(loss_of(expected, 0).item(), rel=1e-5)


# ------------------------------------------------------------------------------ other forms


@on_ranks(4)
def test_a_scaled_loss_that_overflows_on_one_rank_stops_all(rank: int, world_size: int) -> None:
    """An infinite gradient in the tile of one rank of tp."""
    mesh = grid(2, 2)
    model = sharded(mesh, sw.zero(3))
    optimizer = adamw_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
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
    ours, theirs = spmd(mesh), spmd(mesh)
    sw.fully_shard(ours, mesh=mesh, dp_mesh_dims=dims)
    torch_fully_shard(theirs, mesh=mesh, dp_mesh_dims=dims)
    optimizers = [adamw_of(ours), adamw_of(theirs)]
    cut = (Shard(0),) * (mesh.ndim - 1)
    for step in range(2):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            out = model(distribute_tensor(rows, mesh, (*cut, Replicate())))
            out.square().mean().backward()
        for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert mine.device_mesh == mesh, name
            assert torch.allclose(whole(mine.grad), whole(its.grad), atol=1e-6), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(whole(mine), whole(its), atol=1e-6), name


@pytest.mark.parametrize("form", ["bf16", "offload", "trace", "keep", "neighbours", "recompute"])
@on_ranks(4)
def test_options(rank: int, world_size: int, form: str) -> None:
    mesh = grid(2, 2)
    options: dict[str, Any] = {
        "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "trace": {"memory": "trace"},
        "keep": {"reshard_after_forward": False},
        "neighbours": {"reshard_after_forward": 2},
        "recompute": {},
    }[form]
    model = sharded(mesh, sw.zero(3), **options)
    if form == "recompute":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
    found = train(model, muon_of(model), batches(2, 2, data_rank(mesh)))
    expected = one_process(muon_of, 2, 2)
    if form != "bf16":
        assert_close(found, expected)
        return
    for mine, its in zip(found, expected, strict=True):
        assert mine["norm"].item() == pytest.approx(its["norm"].item(), rel=0.05)
    norm = "blocks.0.norm.weight"
    assert torch.allclose(found[-1][norm], expected[-1][norm], atol=0.05)


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


# ------------------------------------------------------------------------------ torch.compile


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
    optimizers = [adamw_of(model) for model in models]
    for step in range(2):
        for model in models:
            loss_of(model, 2 * step + data_rank(mesh)).backward()
        for (name, mine), its in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            assert torch.allclose(whole(mine.grad), whole(its.grad), atol=1e-6), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert graphs, "compiled"


# ------------------------------------------------------------------------------ refused


@on_ranks(4)
def test_dtensors_that_cannot_be_sharded_are_refused_by_name(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    narrow = nn.Linear(4, 1)  # one row for two ranks
    parallelize_module(narrow, mesh["tp"], ColwiseParallel())
    partial = nn.Linear(4, 4)
    weight = DTensor.from_local(partial.weight.detach(), mesh["tp"], [Partial()])
    partial.weight = nn.Parameter(weight)
    wrapped = tiled(mesh)
    torch_fully_shard(wrapped, mesh=mesh["dp"])
    over_dp = nn.Linear(4, 4)
    over_dp.weight = nn.Parameter(distribute_tensor(over_dp.weight.detach(), mesh, [Shard(0)] * 2))
    unnamed = nn.Linear(4, 4)
    other = init_device_mesh("cpu", (4,))
    unnamed.weight = nn.Parameter(distribute_tensor(unnamed.weight.detach(), other, [Shard(0)]))
    experts = GroupedLinear(4, 8, 8)
    cut = distribute_tensor(experts.weight.detach(), mesh["tp"], [Shard(0)])
    experts.weight = nn.Parameter(cut)
    for module, why in (
        (narrow, "leaves nothing for some ranks"),
        (partial, "no weight is a partial sum"),
        (wrapped, "fully_shard already"),
        (over_dp, "Expected Replicate on axis 'dp'"),
        (unnamed, "name the axes"),
        (experts, "'weight' holds experts and is a DTensor over .*not cut by parallelize"),
    ):
        with pytest.raises(ValueError, match=why):
            sw.fully_shard(module, mesh=mesh)


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
            assert torch.allclose(
                loss.float(), plain(rows[data_rank(mesh)]).square().mean(), rtol=0.1
            )
