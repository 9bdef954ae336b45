# SPDX-License-Identifier: Apache-2.0
"""Experts under function optimizers, whose states are saved one by one and read by another layout,
and under torch's own FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.moe import GroupedLinear
from shardwise.optim.functions import ANY
from tests import moe_models
from tests.models import mesh_of
from tests.moe_models import Way, build
from tests.one_card import device_type
from tests.parity.runs import assert_same
from tests.ranks import on_ranks, run_ranks

STEPS = 2


def soap_of(model: nn.Module) -> Any:
    matrix = ANY["soap"](lr=0.05, weight_decay=0.1, frequency=2)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


def states(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{name} {key}".strip(): moe_models.whole(value)
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter, **optimizer.state[parameter]}.items()
    }


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


class Mixed(nn.Module):
    """A dense matrix on all ranks, and two of four experts on each half of them."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 8, bias=False)
        self.experts = GroupedLinear(4, 8, 8)
        self.experts.spread(2 * half, 2)


@on_ranks(4)
def test_experts_under_torchs_fsdp2_are_no_copies(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "dp"))
    half = mesh.get_local_rank("ep")
    model = Mixed(half)
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh_of(4))
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + half if "experts" in name else 0.5)
    squares = 2 * 64 * (1.0 + 4.0) + 48 * 0.25
    torch.testing.assert_close(optimizer.clip_grad_norm(1e9), torch.tensor(squares**0.5))
