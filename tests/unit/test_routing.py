# SPDX-License-Identifier: Apache-2.0
"""Which optimizer a parameter belongs to, how fused weights fall into matrices, and routes that
outlive the parameters they were chosen for."""

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
from shardwise.kernels.polynomials import PRESETS
from shardwise.moe import GroupedMLP, swiglu
from shardwise.optim.routing import routes_of
from shardwise.optim.split import Split, matrices_of
from tests.models import make_model, mesh_of, shard_model
from tests.ranks import on_ranks, run_ranks
from tests.reference.muon import SlowMuon


class ParallelEmbedding(nn.Module):
    """Somebody's own: no subclass of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 16))


class Zoo(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.positions = nn.Embedding(9, 16)
        self.words = ParallelEmbedding()
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, 16))
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(16, 48), "output": nn.Linear(16, 16, bias=False)}
        )
        self.experts = nn.Parameter(torch.randn(4, 24, 16))
        self.norm = nn.LayerNorm(16)
        self.mixer = nn.Conv1d(16, 16, 3, groups=16)
        self.picture = nn.Conv2d(3, 16, 4)
        self.gate = nn.Linear(16, 1, bias=False)
        self.tied = nn.Linear(16, 40, bias=False)
        self.tied.weight = self.embedding.weight
        self.lm_head = nn.Linear(16, 33, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))


DEFAULT = {
    "embedding.weight": ("elementwise", "embedding, tied"),
    "positions.weight": ("elementwise", "embedding"),
    "words.weight": ("elementwise", "embedding, by name"),
    "pos_embed": ("elementwise", "embedding, by name"),
    "attention.qkv.weight": ("matrix", "matrix"),
    "attention.qkv.bias": ("elementwise", "vector"),
    "attention.output.weight": ("matrix", "matrix"),
    "experts": ("matrix", "stacked matrices"),
    "norm.weight": ("elementwise", "vector"),
    "norm.bias": ("elementwise", "vector"),
    "mixer.weight": ("elementwise", "convolution"),
    "mixer.bias": ("elementwise", "vector"),
    "picture.weight": ("elementwise", "convolution"),
    "picture.bias": ("elementwise", "vector"),
    "gate.weight": ("elementwise", "a single row or column"),
    "lm_head.weight": ("elementwise", "output head, by name"),
    "temperature": ("elementwise", "scalar"),
}


def found(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {one.name: (one.route.kind, one.route.reason) for one in routes_of(model)}


def test_the_default() -> None:
    zoo = Zoo()
    assert found(zoo) == DEFAULT
    assert {name: one.kind for name, one in sw.route(zoo).items()} == {
        name: kind for name, (kind, _) in DEFAULT.items()
    }
    head = ("elementwise", "output head, shaped like an embedding")
    model = nn.ModuleDict({"words": nn.Embedding(40, 16), "last": nn.Linear(16, 40)})
    assert found(model)["last.weight"] == head
    inside = nn.ModuleDict({"model": nn.ModuleDict({"head": nn.Linear(6, 5)})})
    assert found(inside)["model.head.weight"] == ("elementwise", "output head, by name")


def test_square_matrices_are_no_heads_where_positions_are_as_many_as_channels() -> None:
    """GPT-Neo's names: an embedding of positions with the shape of a weight, a head without a
    name; and a last matrix that is shaped like positions."""
    width, words = 32, nn.Embedding(500, 32)
    block = nn.ModuleDict({"q_proj": nn.Linear(width, width), "c_fc": nn.Linear(width, 4 * width)})
    parts = {"wte": words, "wpe": nn.Embedding(width, width), "h": nn.ModuleList([block])}
    kinds = found(nn.ModuleDict({**parts, "unnamed": nn.Linear(width, 500, bias=False)}))
    assert [n for n in kinds if kinds[n][0] == "matrix"] == [
        "h.0.q_proj.weight",
        "h.0.c_fc.weight",
    ]
    positions = {"pos": nn.Embedding(16, 16), "up": nn.Linear(16, 64), "out": nn.Linear(16, 16)}
    assert found(nn.ModuleDict(positions))["out.weight"] == ("matrix", "matrix")


def test_overriding_by_name_module_parameter_and_function() -> None:
    zoo = Zoo()
    routes = sw.route(
        zoo,
        matrix=["lm_head.*", zoo.gate],
        elementwise=[zoo.experts, lambda name, p: name.startswith("attention.qkv")],
    )
    kinds = {name: one.kind for name, one in routes.items()}
    for name in ("lm_head.weight", "gate.weight"):
        assert kinds[name] == "matrix"
    for name in ("experts", "attention.qkv.weight", "attention.qkv.bias", "norm.bias"):
        assert kinds[name] == "elementwise"
    assert found(zoo)["experts"][1].startswith("chosen by a parameter")
    kinds = {name: one.kind for name, one in sw.route(zoo, matrix=zoo.attention.qkv).items()}
    assert kinds["attention.qkv.weight"] == "matrix" and kinds["attention.qkv.bias"] != "matrix"
    # Nothing goes to two optimizers, or to none.
    optimizer = sw.optimizer(zoo, matrix=sw.muon(), elementwise=sw.adamw())
    taken = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(taken) == sorted(id(p) for p in zoo.parameters())


def test_bad_routing_is_refused_all_at_once() -> None:
    zoo = Zoo()
    with pytest.raises(ValueError, match="cannot work") as caught:
        sw.route(
            zoo,
            matrix=["attention.*.weight", "picture.bias", "nothing.*", zoo.norm, 3],
            elementwise=["attention.qkv.*"],
            split={
                "attention.qkv.weight": Split.stacked(16, 16, 17),
                "experts": Split.heads(5),
                "norm.weight": Split.heads(2),
                "absent": Split.heads(2),
                "gate.weight": 3,
            },
        )
    for part in (
        "'attention.qkv.weight' is given to two optimizers",
        "'picture.bias' of shape [16] is no matrix",
        "matrix='nothing.*' matches no parameter",
        "matrix=a LayerNorm matches no parameter",
        "3 selects nothing",
        "'attention.qkv.weight' has a split",
        "'experts' of shape [4, 24, 16]: 24 rows",
        "'norm.weight' has a split",
        "split 'absent' matches no parameter",
        "split 'gate.weight': 3",
    ):
        assert part in str(caught.value), part
    with pytest.raises(ValueError, match="dim=2"):
        Split(dim=2)


def test_the_report_says_what_happens_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    zoo = Zoo()
    sw.optimizer(zoo, matrix=sw.muon(), elementwise=sw.adamw())
    (text,) = [record.getMessage() for record in caplog.records]
    assert "attention.qkv.weight" in text and "sw.route(model" in text
    sw.route(
        zoo,
        matrix=["lm_head.weight", "gate.weight"],
        elementwise="attention.output.weight",
        split={"experts": Split.heads(2)},
    )
    zoo.norm.requires_grad_(False)
    report = sw.routing_report(zoo, sw.muon(scale="unit_rms_norm"))
    rows = {row.name: row for row in report.rows}
    assert set(rows) == set(DEFAULT)
    assert rows["experts"].matrices == ((12, 16),) * 8
    assert rows["experts"].scales == ((12 / 16) ** 0.5,) * 8
    assert rows["norm.weight"].optimizer == "frozen"
    assert rows["temperature"].optimizer == "adamw" and rows["temperature"].matrices == ()
    text = str(report)
    assert "8 of 12x16" in text and "11 matrices are orthogonalised" in text
    assert "muon: 4 parameters of 2.85K elements" in text, text
    assert "warning: attention.qkv.weight looks like a fused weight and has no split" in text
    caplog.clear()
    for choice in ({"elementwise": "*.qkv.*"}, {"matrix": "*.qkv.weight"}):
        sw.route(zoo, **choice)  # type: ignore[arg-type]
        assert not sw.routing_report(zoo).warnings, "what was chosen is meant"
    sw.optimizer(zoo, matrix=sw.muon(), elementwise=sw.adamw())
    assert not caplog.records


def sharded_report(rank: int, world_size: int) -> Any:
    model = make_model(depth=2, width=16)
    before = found(model)
    sw.route(model, split={"layers.0.up.weight": Split.heads(2)})
    kept = {name: p._shardwise_route for name, p in model.named_parameters()}
    shard_model(model, sw.zero(3), mesh_of(world_size))
    assert all(p._shardwise_route is kept[name] for name, p in model.named_parameters())
    assert {name: kind for name, (kind, _) in found(model).items()} == {
        name: kind for name, (kind, _) in before.items()
    }
    report = sw.routing_report(model)
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    (group,) = optimizer._matrix_groups
    planned = [shape for matrix in group.exchange.matrices for shape in matrix.shapes]
    assert [shape for row in report.rows for shape in row.matrices] == planned and len(planned) == 5
    assert {row.grain for row in report.rows} == {"row"}
    return str(report)


def test_routes_survive_sharding_and_the_report_lists_the_optimizers_matrices() -> None:
    texts = run_ranks(sharded_report, 2)
    assert texts[0] == texts[1] and "layers.0.up.weight" in texts[0]


# ------------------------------------------------------------------------------ splits


def index_lists(shape: tuple[int, int], split: Split) -> list[tuple[list[int], list[int]]]:
    """Every matrix as (rows, columns), one index at a time."""
    groups, sizes = split.resolved(shape)
    length, period = shape[split.dim], sum(sizes)
    assert groups * period == length
    result = []
    for block in range(len(sizes)):
        begin = sum(sizes[:block])
        mine = [i for i in range(length) if begin <= i % period < begin + sizes[block]]
        others = list(range(shape[1 - split.dim]))
        result.append((mine, others) if split.dim == 0 else (others, mine))
    return result


SPLITS = {
    "qkv": ((48, 16), Split.stacked(16, 16, 16), 3),
    "grouped qkv": ((48, 16), Split.grouped(4, 8, 2, 2), 3),
    "gate and up, interleaved": ((64, 16), Split.interleaved(2), 2),
    "per head": ((32, 16), Split.heads(4), 4),
    "per head, columns": ((16, 32), Split.heads(4, dim=1), 4),
    "interleaved columns": ((16, 32), Split.interleaved(2, dim=1), 2),
}


@pytest.mark.parametrize("name", list(SPLITS))
def test_fused_weights_are_orthogonalised_block_by_block(name: str) -> None:
    shape, split, count = SPLITS[name]
    blocks = index_lists(shape, split)
    assert sum(len(matrix.shapes) for matrix in matrices_of(shape, split)) == len(blocks) == count
    torch.manual_seed(3)
    model = nn.Module()
    model.register_parameter("fused", nn.Parameter(torch.randn(shape)))
    sw.route(model, split={"fused": split})
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.1, scale="unit_rms_norm"), elementwise=None)
    options: dict[str, Any] = {"lr": 0.1, "scale": "unit_rms_norm"}
    everything = [(list(range(shape[0])), list(range(shape[1])))]
    slow, whole = (
        SlowMuon({"fused": model.fused.detach()}, {"fused": rows}, PRESETS["nonic"], **options)
        for rows in (blocks, everything)
    )
    for _ in range(3):
        model.fused.grad = torch.randn(shape)
        for reference in (slow, whole):
            reference.step({"fused": model.fused.grad})
        optimizer.step()
    weight = model.fused.detach().double()
    torch.testing.assert_close(weight, slow.weights["fused"], rtol=0, atol=2e-4)
    assert (weight - whole.weights["fused"]).abs().max() > 0.01, "the split matters"


@pytest.mark.parametrize("split", [None, Split.interleaved(2), Split.heads(2)], ids=str)
def test_stacked_experts_are_matrices_of_their_own(split: Split | None) -> None:
    torch.manual_seed(4)
    stacked, apart = nn.Module(), nn.Module()
    weight = torch.randn(3, 12, 10)
    stacked.register_parameter("experts", nn.Parameter(weight.clone()))
    for index in range(3):
        apart.register_parameter(f"expert{index}", nn.Parameter(weight[index].clone()))
    if split is not None:
        sw.route(stacked, split={"experts": split})
        sw.route(apart, split={"expert*": split})
    optimizers = [
        sw.optimizer(model, matrix=sw.muon(lr=0.1, weight_decay=0.1), elementwise=None)
        for model in (stacked, apart)
    ]
    for _ in range(3):
        grad = torch.randn(3, 12, 10)
        stacked.experts.grad = grad.clone()
        for index in range(3):
            getattr(apart, f"expert{index}").grad = grad[index].clone()
        for optimizer in optimizers:
            optimizer.step()
    together = torch.stack([getattr(apart, f"expert{index}") for index in range(3)])
    assert torch.equal(stacked.experts, together) and not torch.equal(together, weight)


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


def trained_vision(wrap: Any = None, before: bool = True, flat: bool = False) -> Vision:
    model = Vision()
    if flat:
        for name in ("line", "plane", "space", "turned"):
            weight = getattr(model, name).weight
            getattr(model, name).weight = nn.Parameter(weight.detach().flatten(1))
    if before:
        sw.route(model, **CHOSEN)
    if wrap is not None:
        wrap(model)
    if not before:
        sw.route(model, **CHOSEN)
    matrix = sw.muon(lr=0.1, weight_decay=0.1)
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=0.1))
    assert len(optimizer.param_groups[0]["params"]) == 5
    for step in range(3):
        gradients_for(model, step)
        optimizer.step()
    return model


def test_convolutions_are_matrices_of_what_each_output_reads() -> None:
    unasked = {row.name: row.optimizer for row in sw.routing_report(Vision()).rows}
    assert [name for name, where in unasked.items() if where == "muon"] == ["linear.weight"]
    model, flat = trained_vision(), trained_vision(flat=True)
    rows = {row.name: row for row in sw.routing_report(model).rows}
    assert rows["line.weight"].matrices == ((13, 15),)
    assert rows["plane.weight"].matrices == ((5, 36), (6, 36))
    for mine, its in zip(model.parameters(), flat.parameters(), strict=True):
        assert torch.equal(mine.reshape(its.shape), its)
    sw.Muon([Vision().plane.weight])  # what has four dimensions can be nothing else


def sharded_vision(rank: int, world_size: int, way: str, before: bool) -> int:
    mesh = mesh_of(world_size)
    wraps: dict[str, Any] = {
        "zero3": lambda m: sw.fully_shard(m, mesh=mesh),
        "element": lambda m: sw.fully_shard(m, mesh=mesh, grain=sw.ELEMENT),
        "data_parallel": lambda m: sw.data_parallel(m, mesh=mesh),
        "fsdp2": lambda m: fully_shard(m, mesh=mesh),
    }
    ours, one = trained_vision(wraps[way], before), trained_vision()
    pairs = list(zip(ours.named_parameters(), one.parameters(), strict=True))
    for (name, mine), its in pairs:
        assert torch.equal(mine.full_tensor(), its), (way, name)
    return len(pairs)


@pytest.mark.parametrize("way", ["zero3", "element", "data_parallel", "fsdp2"])
def test_sharded_convolutions_are_those_of_one_process(way: str) -> None:
    assert run_ranks(sharded_vision, 3, way, True) == [10] * 3
    assert run_ranks(sharded_vision, 2, way, False) == [10] * 2


@on_ranks(2)
def test_a_convolution_that_is_cut_across_is_refused(rank: int, world_size: int) -> None:
    model = Vision()
    cut = distribute_tensor(model.plane.weight.detach(), mesh_of(world_size), [Shard(1)])
    model.plane.weight = nn.Parameter(cut)
    sw.route(model, matrix="plane.weight")
    with pytest.raises(ValueError, match=r"'plane.weight' of shape \[11, 4, 3, 3\]"):
        sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())


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


@on_ranks(2)
def test_gate_and_up_of_experts_stay_two_matrices_under_fsdp2(rank: int, world_size: int) -> None:
    """Declarations of a module's parameters hold for those that torch puts in their place."""
    splits = []
    for wrap in (lambda model: model, lambda model: fully_shard(model, mesh=mesh_of(2))):
        model = nn.Module()
        model.experts = GroupedMLP(2, 8, 8, activation=swiglu())
        wrap(model)
        (fused,) = [one for one in routes_of(model) if "fc1" in one.name]
        splits.append(fused.route.split)
    assert splits[0] is not None and splits[0] == splits[1]
