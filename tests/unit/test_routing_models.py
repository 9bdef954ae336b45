# SPDX-License-Identifier: Apache-2.0
"""Routing on the names and shapes of known models: heads, convolutions, what looks misrouted, and
routes that outlive the parameters they were chosen for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.moe import GroupedMLP, swiglu
from shardwise.optim.routing import routes_of
from shardwise.optim.split import Split
from tests.models import make_model, mesh_of
from tests.ranks import on_ranks, run_ranks


def found(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {one.name: (one.route.kind, one.route.reason) for one in routes_of(model)}


# ------------------------------------------------------------------------------ heads


class HFConv1D(nn.Module):
    """GPT-2's linear, which is stored [in, out]."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, cols))
        self.bias = nn.Parameter(torch.empty(cols))


def gpt2(width: int = 1024, layers: int = 4) -> nn.Module:
    """GPT-2 medium's names and shapes: as many positions as channels."""

    def block() -> nn.Module:
        attention = {"c_attn": HFConv1D(width, 3 * width), "c_proj": HFConv1D(width, width)}
        mlp = {"c_fc": HFConv1D(width, 4 * width), "c_proj": HFConv1D(4 * width, width)}
        parts = {"attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)}
        return nn.ModuleDict({"ln_1": nn.LayerNorm(width), **parts, "ln_2": nn.LayerNorm(width)})

    with torch.device("meta"):
        tables = {"wte": nn.Embedding(50257, width), "wpe": nn.Embedding(1024, width)}
        blocks = nn.ModuleList(block() for _ in range(layers))
        body = nn.ModuleDict({**tables, "h": blocks, "ln_f": nn.LayerNorm(width)})
        model = nn.ModuleDict({"transformer": body, "lm_head": nn.Linear(width, 50257, bias=False)})
    model["lm_head"].weight = body["wte"].weight
    return model


def gpt_neo(width: int = 2048, layers: int = 2) -> nn.Module:
    """GPT-Neo 1.3B's: four square matrices a layer, shaped like its positions; a head whose name
    says nothing."""

    def block() -> nn.Module:
        names = ("k_proj", "v_proj", "q_proj", "out_proj")
        inner = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names})
        mlp = {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        attention = nn.ModuleDict({"attention": inner})
        return nn.ModuleDict({"attn": attention, "mlp": nn.ModuleDict(mlp)})

    with torch.device("meta"):
        tables = {"wte": nn.Embedding(50257, width), "wpe": nn.Embedding(2048, width)}
        body = nn.ModuleDict({**tables, "h": nn.ModuleList(block() for _ in range(layers))})
        return nn.ModuleDict({"transformer": body, "unnamed": nn.Linear(width, 50257, bias=False)})


def test_square_matrices_are_no_heads_where_positions_are_as_many_as_channels() -> None:
    for model, count in ((gpt2(), 4 * 4), (gpt_neo(), 6 * 2)):
        kinds = found(model)
        inside = [name for name in kinds if ".h." in name and name.endswith("weight")]
        matrices = [name for name in inside if "ln_" not in name]
        assert len(matrices) == count
        assert {kinds[name] for name in matrices} == {("matrix", "matrix")}
        assert {kinds[name][0] for name in kinds if name not in matrices} == {"elementwise"}
        shaped = [text for text in sw.routing_report(model).warnings if "shaped like" in text]
        assert not shaped, shaped
    reason = "output head, shaped like an embedding"
    assert found(gpt_neo())["unnamed.weight"] == ("elementwise", reason)
    # Without a vocabulary, and with a last matrix that is shaped like its positions.
    parts = {"pos": nn.Embedding(16, 16), "up": nn.Linear(16, 64), "out": nn.Linear(16, 16)}
    assert found(nn.ModuleDict(parts))["out.weight"] == ("matrix", "matrix")


# ------------------------------------------------------------------------------ warnings


def suspect(name: str, *shape: int) -> nn.Module:
    """A model in which a weight of this name and shape stands between others."""
    model = nn.Module()
    model.words = nn.Embedding(400, 16)
    owner, _, leaf = name.rpartition(".")
    holder = nn.Module() if owner else model
    if owner:
        model.add_module(owner, holder)
    holder.register_parameter(leaf, nn.Parameter(torch.randn(shape)))
    model.last = nn.Linear(16, 16, bias=False)
    return model


SUSPECTS = {
    "A_log": ((32, 16), "state of a recurrence"),
    "time_decay": ((32, 16), "state of a recurrence"),
    "relative_position_bias_table": ((49, 16), "table of positions"),
    "rel_pos_h": ((27, 16), "table of positions"),
    "linear_fc1.weight": ((64, 16), "fused weight"),
    "kv_a_proj_with_mqa.weight": ((24, 16), "fused weight"),
}


@pytest.mark.parametrize("name", list(SUSPECTS))
def test_what_looks_misrouted_is_warned_about_once_with_the_way_out(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape, what = SUSPECTS[name]
    model = suspect(name, *shape)
    assert found(model)[name][0] == "matrix"
    sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    (text,) = [record.getMessage() for record in caplog.records]
    assert f"'{name}' looks like" in text and what in text and "sw.route(model" in text
    assert "last.weight" not in text
    caplog.clear()
    for choice in ({"elementwise": name}, {"matrix": name}):
        sw.route(model, **choice)  # type: ignore[arg-type]
        sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    assert not caplog.records, "what was chosen is meant"


def test_an_ordinary_model_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    sw.optimizer(make_model(width=16), matrix=sw.muon(), elementwise=sw.adamw())
    assert not caplog.records


# ------------------------------------------------------------------------------ convolutions


class Vision(nn.Module):
    """Convolutions of one, two and three dimensions, rows that do not divide by 2 or 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.line = nn.Conv1d(5, 13, 3)
        self.plane = nn.Conv2d(4, 11, 3)
        self.space = nn.Conv3d(3, 10, 2)
        self.turned = nn.ConvTranspose2d(9, 8, 2)
        self.linear = nn.Linear(12, 7)


CHOSEN: dict[str, Any] = {
    "matrix": ["line.weight", "plane.weight", "space.weight", "turned.weight"],
    "split": {"plane.weight": Split.stacked(5, 6)},
}


def gradients_for(model: nn.Module, step: int) -> None:
    for number, p in enumerate(model.parameters()):
        value = torch.randn(p.numel(), generator=torch.Generator().manual_seed(50 * step + number))
        value = value.view(p.shape)
        if hasattr(p, "cut"):
            p.grad = torch.zeros_like(p).copy_(value)
        elif isinstance(p, DTensor):
            p.grad = distribute_tensor(value, p.device_mesh, p.placements)
        else:
            p.grad = value


def train(model: nn.Module) -> None:
    matrix = sw.muon(lr=0.1, weight_decay=0.1)
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=0.1))
    assert len(optimizer.param_groups[0]["params"]) == 5
    for step in range(3):
        gradients_for(model, step)
        optimizer.step()


def trained_vision(wrap: Any = None, before: bool = True) -> Vision:
    model = Vision()
    if before:
        sw.route(model, **CHOSEN)
    if wrap is not None:
        wrap(model)
    if not before:
        sw.route(model, **CHOSEN)
    train(model)
    return model


def test_convolutions_are_matrices_of_what_each_output_reads() -> None:
    unasked = {row.name: row.optimizer for row in sw.routing_report(Vision()).rows}
    assert [name for name, where in unasked.items() if where == "muon"] == ["linear.weight"]
    model, flat = trained_vision(), Vision()
    for name in ("line", "plane", "space", "turned"):
        weight = getattr(flat, name).weight
        getattr(flat, name).weight = nn.Parameter(weight.detach().flatten(1))
    sw.route(flat, **CHOSEN)
    rows = {row.name: row for row in sw.routing_report(model).rows}
    assert rows["line.weight"].matrices == ((13, 15),)
    assert rows["plane.weight"].matrices == ((5, 36), (6, 36))
    train(flat)
    for mine, its in zip(model.parameters(), flat.parameters(), strict=True):
        assert torch.equal(mine.reshape(its.shape), its)
    sw.Muon([Vision().plane.weight])  # what has four dimensions can be nothing else


def sharded_vision(rank: int, world_size: int, way: str, before: bool) -> int:
    mesh = mesh_of(world_size)
    wraps: dict[str, Any] = {
        "zero3": lambda m: sw.fully_shard(m, mesh=mesh),
        "element": lambda m: sw.fully_shard(m, mesh=mesh, grain=sw.ELEMENT),
        "zero0": lambda m: sw.fully_shard(m, mesh=mesh, placements=sw.zero(0)),
        "data_parallel": lambda m: sw.data_parallel(m, mesh=mesh),
        "fsdp2": lambda m: fully_shard(m, mesh=mesh),
    }
    ours, one = trained_vision(wraps[way], before), trained_vision()
    compared = 0
    for (name, mine), its in zip(ours.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), its), (way, name)
        compared += 1
    return compared


@pytest.mark.parametrize("way", ["zero3", "element", "zero0", "data_parallel", "fsdp2"])
def test_sharded_convolutions_are_those_of_one_process(way: str) -> None:
    assert run_ranks(sharded_vision, 3, way, True) == [10] * 3
    assert run_ranks(sharded_vision, 2, way, False) == [10] * 2


@on_ranks(2)
def test_a_convolution_that_is_cut_across_is_refused(rank: int, world_size: int) -> None:
    model = Vision()
    cut = distribute_tensor(model.plane.weight.detach(), mesh_of(world_size), [Shard(1)])
    model.plane.weight = nn.Parameter(cut)
    sw.route(model, matrix="plane.weight")
    with pytest.raises(ValueError, match="cut another dimension than the first") as caught:
        sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    message = str(caught.value)
    assert "'plane.weight' of shape [11, 4, 3, 3]" in message


# ------------------------------------------------------------------------------ routes that last


def routed_before(rank: int, world_size: int, kind: str) -> int:
    """Routes that were chosen before torch put other parameters in the place of those."""
    results = []
    for when in ("before", "after", "never"):
        torch.manual_seed(8)
        model: Any = nn.Module()
        model.words, model.up = nn.Embedding(12, 8), nn.Linear(8, 32)
        model.down = nn.Linear(32, 8)
        options: dict[str, Any] = {
            "elementwise": "down.weight",
            "split": {"up.weight": Split.heads(2)},
        }
        if when == "before":
            sw.route(model, **options)
        if kind == "copy":
            model = copy.deepcopy(model)
        if kind == "tp":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh_of(world_size), plan)
        if kind in ("fsdp2", "alone"):
            fully_shard(model, mesh=mesh_of(world_size))
        if when == "after":
            sw.route(model, **options)
        if kind == "alone":
            optimizer: Any = sw.Muon([("up.weight", model.up.weight)], lr=0.1)
        else:
            matrix = sw.muon(lr=0.1)
            optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=0.1))
        gradients_for(model, 0)
        optimizer.step()
        results.append([whole(p.detach()) for p in model.parameters()])
    assert all(map(torch.equal, results[0], results[1]))
    return sum(not torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("kind", ["fsdp2", "tp", "alone", "copy"])
def test_a_route_outlives_the_parameters_it_was_chosen_for(kind: str) -> None:
    changed = 1 if kind == "alone" else 2
    assert run_ranks(routed_before, 2, kind) == [changed] * 2, "routes matter"


def fused_experts(rank: int, world_size: int) -> str:
    """Declarations of a module's parameters hold for those that torch puts in their place."""
    model = nn.Module()
    model.experts = GroupedMLP(2, 8, 8, activation=swiglu())
    fully_shard(model, mesh=mesh_of(world_size))
    (fused,) = [one for one in routes_of(model) if "fc1" in one.name]
    return str(fused.route.split)


def test_gate_and_up_of_experts_stay_two_matrices_under_fsdp2() -> None:
    model = nn.Module()
    model.experts = GroupedMLP(2, 8, 8, activation=swiglu())
    (fused,) = [one for one in routes_of(model) if "fc1" in one.name]
    assert fused.route.split is not None
    assert run_ranks(fused_experts, 2) == [str(fused.route.split)] * 2
