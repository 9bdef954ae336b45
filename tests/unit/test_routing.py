# SPDX-License-Identifier: Apache-2.0
"""Which optimizer a parameter belongs to, and how fused weights fall into matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.kernels.polynomials import PRESETS
from shardwise.optim.routing import routes_of
from shardwise.optim.split import Split, matrices_of
from tests.models import make_model, mesh_of, shard_model
from tests.ranks import run_ranks
from tests.reference.muon import SlowMuon


class Zoo(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.positions = nn.Embedding(9, 16)
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
    assert set(DEFAULT) == {name for name, _ in zoo.named_parameters()}
    assert {name: one.kind for name, one in sw.route(zoo).items()} == {
        name: kind for name, (kind, _) in DEFAULT.items()
    }


def test_a_head_shaped_like_the_embedding_is_found_without_its_name() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(40, 16), "last": nn.Linear(16, 40)})
    inside = nn.ModuleDict({"model": nn.ModuleDict({"head": nn.Linear(6, 5)})})
    assert found(inside)["model.head.weight"] == ("elementwise", "output head, by name")
    assert found(model)["last.weight"] == ("elementwise", "output head, shaped like an embedding")


class ParallelEmbedding(nn.Module):
    """Somebody's own: no subclass of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 16))


def test_embeddings_that_are_not_torchs_are_found_by_their_names() -> None:
    model = nn.Module()
    model.words, model.embedder = ParallelEmbedding(), nn.Linear(16, 16)
    model.pos_embed = nn.Parameter(torch.zeros(1, 9, 16))
    assert found(model)["words.weight"] == ("elementwise", "embedding, by name")
    assert found(model)["pos_embed"] == ("elementwise", "embedding, by name")
    assert found(model)["embedder.weight"] == ("matrix", "matrix")


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
    with pytest.raises(ValueError, match=r"matrix=.* matches no parameter"):
        sw.route(zoo, matrix=zoo.norm)
    # Nothing goes to two optimizers, or to none.
    optimizer = sw.optimizer(zoo, matrix=sw.muon(), elementwise=sw.adamw())
    taken = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(taken) == sorted(id(p) for p in zoo.parameters()) and len(set(taken)) == len(
        taken
    )


def test_bad_routing_is_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match="cannot work") as caught:
        sw.route(
            Zoo(),
            matrix=["attention.*.weight", "picture.bias", "nothing.*", 3],
            elementwise=["attention.qkv.*"],
            split={
                "attention.qkv.weight": Split.stacked(16, 16, 17),
                "experts": Split.heads(5),
                "norm.weight": Split.heads(2),
                "absent": Split.heads(2),
            },
        )
    message = str(caught.value)
    for part in (
        "'attention.qkv.weight' is given to two optimizers: matrix='attention.*.weight' and "
        "elementwise='attention.qkv.*'",
        "'picture.bias' of shape [16] is no matrix",
        "matrix='nothing.*' matches no parameter",
        "3 selects nothing",
        "'experts' of shape [4, 24, 16]: 24 rows do not divide into 5 equal blocks",
        "'norm.weight' has a split heads(2) but goes to the elementwise optimizer",
        "split 'absent' matches no parameter",
    ):
        assert part in message, (part, message)
    with pytest.raises(ValueError, match=r"16, 17.*make 49 rows, the matrix has 48"):
        sw.route(Zoo(), split={"attention.qkv.weight": Split.stacked(16, 16, 17)})
    with pytest.raises(ValueError, match="has two splits"):
        sw.route(Zoo(), split={"exp*": Split.heads(2), "experts": Split.heads(3)})
    with pytest.raises(ValueError, match=r"either sizes or parts; .*dim=2"):
        Split(dim=2)


def test_the_report_says_what_happens_and_warns() -> None:
    zoo = Zoo()
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
    assert len(report.warnings) == 1


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
    "gated qkv": ((40, 16), Split.stacked(16, 8, 8, 8), 4),
    "grouped gated qkv": ((40, 16), Split.grouped(4, 4, 2, 2, 2), 4),
    "gate and up, stacked": ((64, 16), Split.heads(2), 2),
    "gate and up, interleaved": ((64, 16), Split.interleaved(2), 2),
    "per head": ((32, 16), Split.heads(4), 4),
    "per head, columns": ((16, 32), Split.heads(4, dim=1), 4),
    "interleaved columns": ((16, 32), Split.interleaved(2, dim=1), 2),
}


@pytest.mark.parametrize("name", list(SPLITS))
def test_splits_are_the_blocks_they_name(name: str) -> None:
    shape, split, count = SPLITS[name]
    weight = torch.randn(shape)
    pieces = matrices_of(shape, split)
    assert sum(piece.numel for piece in pieces) == weight.numel()
    taken: list[Tensor] = []
    copy = torch.zeros_like(weight)
    for piece in pieces:
        part = weight.view(-1)[piece.start : piece.start + piece.numel]
        part = part.view(piece.rows, piece.cols)
        target = copy.view(-1)[piece.start : piece.start + piece.numel]
        for index, one in enumerate(piece.take(part)):
            assert tuple(one.shape) == piece.shapes[index]
            piece.put(target.view(piece.rows, piece.cols), index, one)
            taken.append(one)
    expected = index_lists(shape, split)
    assert len(taken) == count == len(expected)
    for one, (rows, columns) in zip(taken, expected, strict=True):
        assert torch.equal(one, weight[rows][:, columns])
    assert torch.equal(copy, weight), "put is the inverse of take"


@pytest.mark.parametrize("name", list(SPLITS))
def test_fused_weights_are_orthogonalised_block_by_block(name: str) -> None:
    shape, split, _ = SPLITS[name]
    torch.manual_seed(3)
    model = nn.Module()
    model.register_parameter("fused", nn.Parameter(torch.randn(shape)))
    sw.route(model, split={"fused": split})
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.1, scale="unit_rms_norm"), elementwise=None)
    slow = SlowMuon(
        {"fused": model.fused.detach()},
        {"fused": index_lists(shape, split)},
        PRESETS["nonic"],
        lr=0.1,
        scale="unit_rms_norm",
    )
    whole = SlowMuon(
        {"fused": model.fused.detach()},
        {"fused": [(list(range(shape[0])), list(range(shape[1])))]},
        PRESETS["nonic"],
        lr=0.1,
        scale="unit_rms_norm",
    )
    for _ in range(3):
        model.fused.grad = torch.randn(shape)
        for reference in (slow, whole):
            reference.step({"fused": model.fused.grad})
        optimizer.step()
    found = model.fused.detach().double()
    torch.testing.assert_close(found, slow.weights["fused"], rtol=0, atol=2e-4)
    assert (found - whole.weights["fused"]).abs().max() > 0.01, "the split matters"


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
