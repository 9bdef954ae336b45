# SPDX-License-Identifier: Apache-2.0
"""A small model with experts in any layout, spread and sharded in any way, and its values by
expert: what tests of optimizers and of checkpoints compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.core import comm
from shardwise.moe import GroupedLinear, MixtureOfExperts, Routing, convert_gate_up, swiglu
from tests.one_card import device_type

EXPERTS, HIDDEN, WIDTH, TOKENS = 4, 12, 8, 24  # tokens of all ranks together


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is laid out and wrapped."""

    weights: Any = "grouped"
    biases: Any = "grouped"
    block: int = 0
    ranks: int = 1
    ep: int = 1
    strategy: str = "plain"  # or zero3, or data_parallel


class Net(nn.Module):
    """A linear, experts, a linear; the same values whatever the layout."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MixtureOfExperts(
            Routing(num_experts=EXPERTS, experts_per_token=2, balance_loss=0.1),
            HIDDEN,
            WIDTH,
            activation=swiglu(),
            bias=True,
            weight_layout=way.weights,
            bias_layout=way.biases,
            gate_up_block=way.block,
        )
        stacked = MixtureOfExperts(
            self.moe.router.routing, HIDDEN, WIDTH, activation=swiglu(), bias=True
        )
        for parameter in stacked.parameters():
            nn.init.normal_(parameter, std=0.4)
        self.moe.load_state_dict(stacked.state_dict())
        self.after = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        mixed, routes = self.moe(self.before(x))
        return self.after(x + mixed).square().mean() + routes.loss


def build(way: Way) -> nn.Module:
    net = Net(way)
    if way.strategy == "plain":
        return net
    if way.strategy == "data_parallel":
        mesh = init_device_mesh(device_type(), (way.ranks,), mesh_dim_names=("dp",))
        return sw.data_parallel(net, mesh=mesh, placements=sw.zero(1), bucket_mb=1)
    mesh = init_device_mesh(
        device_type(), (way.ranks // way.ep, way.ep), mesh_dim_names=("dp", "ep")
    )
    if way.ep > 1:
        net.moe.spread(comm.as_axis(mesh.get_group("ep"), "ep"))
        sw.fully_shard(net.moe.experts, mesh=mesh["dp"], placements=sw.zero(3))
    flat = init_device_mesh(device_type(), (way.ranks,), mesh_dim_names=("dp",))
    sw.fully_shard(net, mesh=flat, placements=sw.zero(3))
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return sw.optimizer(net, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-2))


def batch(step: int, rank: int, ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(TOKENS, HIDDEN, generator=generator).chunk(ranks)[rank]


def whole(value: Tensor) -> Tensor:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def by_expert(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every parameter and every state, whole; of experts each by its number, gate and up stacked.

    Ranks with other experts have other names.
    """
    found: dict[str, Tensor] = {}
    linears = {n: m for n, m in net.named_modules() if isinstance(m, GroupedLinear)}
    for name, parameter in net.named_parameters():
        values = {"": parameter, **(optimizer.state.get(parameter, {}) if optimizer else {})}
        path, _, last = name.rpartition(".")
        linear = linears.get(path)
        for key, value in values.items():
            value = whole(value)
            if linear is None:
                found[f"{name} {key}"] = value
                continue
            kind = last.rstrip("0123456789")
            if linear.layouts[kind] == "grouped":
                numbers = range(linear.num_experts)
                parts = list(value) if value.dim() else [value] * linear.num_experts
            else:
                numbers, parts = [int(last.removeprefix(kind))], [value]
            for number, part in zip(numbers, parts, strict=True):
                if hasattr(linear, "gate_up_block") and part.dim():
                    part = convert_gate_up(part, linear.gate_up_block, 0, 0)
                found[f"{path}.{kind}{linear.first_expert + number} {key}"] = part
    return found
