# SPDX-License-Identifier: Apache-2.0
"""A parameter without a gradient is left alone, bit for bit as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise as sw
from shardwise.optim.functions import ANY
from tests.models import Model, loss_of, make_model, mesh_for, mesh_of, shard_model, tokens
from tests.parity.helpers import everything
from tests.ranks import run_ranks

WAYS = {
    "zero0": (2, "muon"),
    "zero1": (2, "muon"),
    "zero2": (3, "muon"),
    "zero3": (3, "muon"),
    "hsdp": (4, "muon"),
    "hfsdp": (4, "muon"),
    "data_parallel": (2, "muon"),
    "fsdp2": (3, "muon"),
    "fsdp2 hybrid": (4, "muon"),
    # Functions, which keep states on the owners.
    "zero0 normuon": (2, "normuon"),
    "zero3 normuon": (3, "normuon"),
    "data_parallel normuon": (2, "normuon"),
    "fsdp2 normuon": (3, "normuon"),
}
MATRICES = [f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("up", "down")]


def build(way: str, world_size: int) -> Model:
    model = make_model(depth=2)
    kind = way.split()[0]
    if kind == "data_parallel":
        return sw.data_parallel(model, mesh=mesh_of(world_size))
    if kind == "fsdp2":
        mesh = mesh_of(2, 2) if "hybrid" in way else mesh_of(world_size)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    placements = sw.zero(int(kind[-1])) if kind.startswith("zero") else getattr(sw, kind)()
    return shard_model(model, placements, mesh_for(placements, world_size))


def optimizer_of(model: nn.Module, name: str) -> Any:
    matrix: Any = {**ANY, "muon": sw.muon}[name](lr=0.05, weight_decay=0.1)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2, weight_decay=0.1))


def give(model: nn.Module, step: int, without: set[str]) -> None:
    """The same gradients to a model in one process and in many."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        value = torch.randn(parameter.shape, generator=generator)
        if type(parameter) is not nn.Parameter and not hasattr(parameter, "cut"):
            assert isinstance(parameter, DTensor)
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        elif hasattr(parameter, "cut") and step % 2:  # else whole: a step takes its piece
            value = torch.zeros_like(parameter).copy_(value)
        parameter.grad = None if name in without else value


def lacking(rank: int, world_size: int, way: str, name: str) -> int:
    ours, one = build(way, world_size), make_model(depth=2)
    optimizers = [optimizer_of(model, name) for model in (ours, one)]
    names = [name for name, _ in one.named_parameters()]
    vectors = {name for name in names if name.endswith("bias")}
    some: list[set[str]] = [
        set(),
        {MATRICES[0]},
        {*MATRICES[1:3], "embedding.weight", *vectors},
        set(MATRICES),
        set(),
        set(names),
        {MATRICES[3], "head.weight"},
    ]
    compared = 0
    before = everything(ours, optimizers[0])
    for step, without in enumerate(some):
        for model, optimizer in zip((ours, one), optimizers, strict=True):
            give(model, step, without)
            optimizer.step()
        after, expected = everything(ours, optimizers[0]), everything(one, optimizers[1])
        for key, value in after.items():
            assert torch.equal(value, expected[key]), (way, step, key)
            stays = key.split()[0] in without
            assert stays == torch.equal(value, before[key]), (way, step, key, stays)
            compared += 1
        before = after
    return compared


@pytest.mark.parametrize("way", list(WAYS))
def test_what_has_no_gradient_stays_as_in_one_process(way: str) -> None:
    world_size, name = WAYS[way]
    found = run_ranks(lacking, world_size, way, name)
    states = {"normuon": 3}.get(name, 1)  # of a matrix
    assert found == [7 * (15 + 4 * states + 33)] * world_size


def frozen(rank: int, world_size: int, way: str, name: str) -> None:
    """Through forward and backward: frozen after a step, then a step without any gradient."""
    model = build(way, world_size)
    optimizer = optimizer_of(model, name)
    before = everything(model, optimizer)
    for step in range(3):
        if step == 1:
            for parameter in (*model.layers[0].parameters(), model.layers[1].up.weight):
                parameter.requires_grad_(False)
        loss_of(model, tokens(step, 0, rank, world_size)).backward()
        if step == 2:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        after = everything(model, optimizer)
        for key, value in after.items():
            stays = step == 2 or (step == 1 and key.startswith(("layers.0", "layers.1.up.weight")))
            assert torch.equal(value, before[key]) == stays, (way, step, key)
        before = after


# Without a second way under which the engine is the same and the optimizer's decision is too: more
# name that repeat, more functions, torch's hybrid.
ENGINES = ("zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "fsdp2")
ENGINES += ("data_parallel", "data_parallel normuon", "zero3 normuon")


@pytest.mark.parametrize("way", ENGINES)
def test_what_is_frozen_after_a_step_or_has_been_zeroed_stays(way: str) -> None:
    world_size, name = WAYS[way]
    run_ranks(frozen, world_size, way, name)


def empty_shards(rank: int, world_size: int, kind: str) -> int:
    """Fewer rows than ranks: who holds nothing of a matrix still has its gradient."""
    torch.manual_seed(2)
    model, one = (nn.Sequential(nn.Linear(7, 2, bias=False)) for _ in range(2))
    one.load_state_dict(model.state_dict())
    wrap = sw.fully_shard if kind == "ours" else fully_shard
    wrap(model, mesh=mesh_of(world_size))
    optimizers = [sw.Muon(m.named_parameters(), lr=0.1) for m in (model, one)]
    inputs = torch.randn(world_size, 5, 7)
    for _ in range(2):
        model(inputs[rank]).square().mean().backward()
        for other in range(world_size):
            (one(inputs[other]).square().mean() / world_size).backward()
        for optimizer in optimizers:
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model[0].weight.full_tensor(), one[0].weight)
    return model[0].weight.to_local().numel()


@pytest.mark.parametrize("kind", ["ours", "fsdp2"])
def test_a_rank_that_holds_nothing_of_a_matrix_is_no_rank_without_gradient(kind: str) -> None:
    assert 0 in run_ranks(empty_shards, 3, kind)
