# SPDX-License-Identifier: Apache-2.0
"""Function optimizers on matrices that tensor parallelism cut, and on experts: trained as in one
process, and their states saved and read by another layout on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise.optim.functions import ANY
from shardwise.optim.split import Split
from tests import moe_models
from tests.moe_models import Way, build
from tests.parity.helpers import assert_same
from tests.ranks import on_ranks, run_ranks
from tests.tensor_parallel import (
    Net,
    assert_close,
    batches,
    bucketed,
    data_rank,
    grid,
    one_process,
    sharded,
    tiled,
    train,
    whole,
)

STEPS = 2


def soap_of(model: nn.Module) -> Any:
    return sw.optimizer(
        model,
        matrix=ANY["soap"](lr=0.05, weight_decay=0.1, frequency=2),
        elementwise=sw.adamw(lr=1e-2),
    )


def normuon_of(model: nn.Module) -> Any:
    matrix = ANY["normuon"](lr=0.05, weight_decay=0.1)  # a smooth function: rounding stays small
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


def states(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{name} {key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter, **optimizer.state[parameter]}.items()
    }


# ------------------------------------------------------------------------------ tensor parallelism


@on_ranks(4)
def test_tensor_parallelism_trains_as_one_process(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    mine = batches(STEPS, 2, data_rank(mesh))
    expected = one_process(normuon_of, STEPS, 2)
    ways = {
        "zero(3)": lambda: sharded(mesh, sw.zero(3)),
        "zero(0)": lambda: sharded(mesh, sw.zero(0), sequence=False),
        "data_parallel": lambda: bucketed(mesh, sw.zero(1)),
        "hsdp": lambda: sharded(grid(2, 1, 2), sw.hsdp()),
        "torch": lambda: torch_sharded(mesh),
    }
    for build_it in ways.values():
        model = build_it()
        assert_close(train(model, normuon_of(model), mine), expected)


def torch_sharded(mesh: Any) -> Net:
    model = tiled(mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def check_saved(rank: int, world_size: int, path: str) -> dict[str, Tensor]:
    mesh = grid(2, 2)
    mine = batches(3, 2, data_rank(mesh))
    model = sharded(mesh, sw.zero(3))
    optimizer = soap_of(model)
    train(model, optimizer, mine[:2])
    sw.save(path, model, optimizer)
    saved = states(model, optimizer)
    train(model, optimizer, mine[2:])
    after = states(model, optimizer)
    for other in (grid(1, 4), mesh):
        again = sharded(other, sw.zero(1))
        optimizer = soap_of(again)
        sw.load(path, again, optimizer)
        assert_same(states(again, optimizer), saved, str(other.shape))
    train(again, optimizer, mine[2:])
    assert_same(states(again, optimizer), after, "and training goes on")
    return saved


def test_states_of_cut_matrices_are_saved_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    found = run_ranks(check_saved, 4, path)
    assert found[0]["blocks.0.up.weight left_basis"].shape == (32, 32), "of the whole matrix"
    for other in found[1:]:
        assert_same(other, found[0], "ranks")
    model = Net()
    optimizer = soap_of(model)
    sw.load(path, model, optimizer)
    assert_same(states(model, optimizer), found[0], "one process")


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)))
        self.fused = nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))


@on_ranks(4)
def test_other_matrices_on_other_ranks_are_refused(rank: int, world_size: int) -> None:
    """Their states would have one name, and a checkpoint would hold one rank's alone."""
    mesh = grid(2, 2)
    for name, placement in (("weight", Shard(0)), ("fused", Shard(0))):
        model = Stacked()
        sw.route(model, split={"fused": Split.heads(2)})
        for one, value in list(model.named_parameters()):
            place = placement if one == name else Replicate()
            setattr(
                model, one, nn.Parameter(distribute_tensor(value.detach(), mesh["tp"], [place]))
            )
        sw.fully_shard(model, mesh=mesh, placements=sw.zero(3))
        with pytest.raises(ValueError, match=f"tensor parallelism cuts '{name}' between"):
            soap_of(model)


# ------------------------------------------------------------------------------ experts

SPREAD = Way(ranks=4, ep=2, strategy="zero3")


def check_experts(rank: int, world_size: int, path: str) -> dict[str, Tensor]:
    net = build(SPREAD)
    optimizer = soap_of(net)
    for step in range(STEPS):
        net(moe_models.batch(step, rank, world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sw.save(path, net, optimizer)
    again = build(Way(ranks=4, strategy="data_parallel"))
    other = soap_of(again)
    sw.load(path, again, other)
    return {key: value for key, value in states(again, other).items() if "fc" in key}


def test_states_of_spread_experts_are_saved_one_by_one(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    found = run_ranks(check_experts, 4, path)[0]
    grouped, indexed = build(Way()), build(Way(weights="indexed"))
    for net in (grouped, indexed):
        optimizer = soap_of(net)
        sw.load(path, net, optimizer)
        here = states(net, optimizer)
        if net is grouped:
            assert_same(
                {key: value for key, value in here.items() if "fc" in key}, found, "grouped"
            )
    fc1, fc2 = (f"moe.experts.fc{n}.weight" for n in (1, 2))
    different = {tuple(found[f"{fc2} left_basis.{n}"].flatten().tolist()) for n in range(4)}
    assert len(different) == 4, "experts have states of their own"
    for number in range(moe_models.EXPERTS):  # gate and up are two matrices of an expert
        assert torch.equal(here[f"{fc2}{number} left_basis"], found[f"{fc2} left_basis.{number}"])
        for half in range(2):
            mine, its = f"{fc1}{number} left_basis.{half}", f"{fc1} left_basis.{2 * number + half}"
            assert torch.equal(here[mine], found[its])
