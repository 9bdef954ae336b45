# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP8: every member of a grouped weight is quantised for itself, shards hold whole
members, and training equals bf16 weights that are quantised where they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.core import comm
from shardwise.moe import GroupedMLP, MixtureOfExperts, Routing, swiglu
from shardwise.moe.weights import ExpertTensor
from tests.one_card import device_type
from tests.parity.mxfp8_helpers import Kind, coded
from tests.ranks import run_ranks

EXPERTS, HIDDEN, WIDTH, TOKENS, STEPS = 4, 64, 32, 24, 3


class AtUse(ExpertTensor):
    """fp8 off: bf16 weights, encoded member by member where they are read."""

    def value(self, dtype: torch.dtype, phase: Any = "forward") -> Any:
        value = super().value(dtype)
        if value.dim() == 2:  # biases
            return value
        return torch.stack([coded(member, "mxfp8").decode(phase) for member in value])


class BlocksAtUse(ExpertTensor):
    """The same of blocks of 128."""

    def value(self, dtype: torch.dtype, phase: Any = "forward") -> Any:
        value = super().value(dtype)
        if value.dim() == 2:
            return value
        return torch.stack([coded(member, "fp8_block").decode(phase) for member in value])


AT_USE: dict[str, type[ExpertTensor]] = {"mxfp8": AtUse, "fp8_block": BlocksAtUse}


class Net(nn.Module):
    def __init__(self, layout: Any, hidden: int, width: int, delay: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before = nn.Linear(hidden, 17)
        self.after = nn.Linear(17, hidden)
        self.moe = MixtureOfExperts(
            Routing(num_experts=EXPERTS, experts_per_token=2),
            hidden,
            width,
            activation=swiglu(),
            bias=True,
            weight_layout=layout,
            delay_weight_gradient=delay,
        )
        # Columns of very different sizes: small numbers survive in a column plane, and not in a row
        # plane, so that what forward and backward read differs.
        with torch.no_grad():
            for name, parameter in self.moe.experts.named_parameters():
                if "weight" in name:
                    parameter *= 2.0 ** torch.randint(-7, 2, parameter.shape[-1:])

    def forward(self, x: Tensor) -> Tensor:
        mixed, routes = self.moe(x)
        return self.after(self.before(x + mixed)).float().square().mean() + routes.loss


def train(
    world_size: int, rank: int, strategy: str, ep: int, layout: Any, format: Kind, on: bool
) -> dict[str, Tensor]:
    hidden, width = (128, 128) if format == "fp8_block" else (HIDDEN, WIDTH)
    delay = on and format == "fp8_block"  # the same gradients, later
    net, weights = Net(layout, hidden, width, delay), format if on else "bf16"
    for module in () if on else net.modules():
        if isinstance(module, GroupedMLP):
            bundles, at_use = module._bundles, AT_USE[format]
            module._bundles = lambda b=bundles, a=at_use: [a(**vars(one)) for one in b()]  # type: ignore[method-assign]
    precision = sw.Precision(weights=weights, reduce="fp32")
    if strategy == "data_parallel":
        mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
        model: Any = sw.data_parallel(
            net, mesh=mesh, placements=sw.zero(1), bucket_mb=1, precision=precision
        )
    else:
        model = net
        mesh = init_device_mesh(device_type(), (world_size // ep, ep), mesh_dim_names=("dp", "ep"))
        flat = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
        net.moe.spread(comm.as_axis(mesh.get_group("ep"), "ep"), comm.as_axis(flat.get_group()))
        options: Any = {"placements": sw.zero(int(strategy[-1])), "precision": precision}
        sw.fully_shard(net.moe.experts, mesh=mesh["dp"], **options)
        sw.fully_shard(net, mesh=flat, **options)
    if on:
        report = sw.precision_report(model)
        stored, how = report.stored, {row.products for row in report.rows if row.format}
        assert how == {"decoded"}
        assert {name.rpartition(".")[2].rstrip("0123456789") for name in stored} == {"weight"}
        expected = 2 if layout == "grouped" else 2 * EXPERTS // ep
        assert sum("experts." in name for name in stored) == expected == len(stored)
    optimizer = sw.optimizer(net, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-2))
    values: dict[str, Tensor] = {}
    for step in range(STEPS):
        x = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(world_size)[rank].bfloat16().requires_grad_()
        loss = model(mine)
        loss.backward()
        net.moe.backward_dw()  # where nothing is exchanged, delayed gradients wait for it
        assert mine.grad is not None
        values[f"gradient {step}"] = mine.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        values[f"loss {step}"] = loss.detach()
    for name, parameter in net.named_parameters():
        values[name] = parameter.full_tensor().detach().clone()  # type: ignore[attr-defined]
    if on and layout == "grouped" and strategy == "zero3":
        members_are_coded_one_by_one(net, format)
    return values


def members_are_coded_one_by_one(net: Net, format: Kind) -> None:
    whole = net.moe.experts.fc1.weight.full_tensor().detach()  # type: ignore[union-attr]
    net.moe.experts.unshard()  # type: ignore[operator]
    weight = net.moe.experts.fc1.weight
    assert len(whole) == net.moe.experts.num_experts
    parts = weight.codes.chunk(len(whole)), weight.scales.chunk(len(whole))
    for number, value in enumerate(whole):
        alone = coded(value, format)
        assert torch.equal(parts[0][number], alone.codes)
        assert torch.equal(parts[1][number], alone.scales)
    net.moe.experts.reshard()  # type: ignore[operator]


def both(rank: int, world_size: int, strategy: str, ep: int, layout: Any, format: Kind) -> None:
    on, off = (train(world_size, rank, strategy, ep, layout, format, on) for on in (True, False))
    assert on.keys() == off.keys() and len(on) >= 2 * STEPS + 9
    for name, value in off.items():
        assert torch.equal(on[name], value), name


@pytest.mark.parametrize(
    ("ranks", "strategy", "ep", "layout", "format"),
    [
        (2, "zero3", 1, "grouped", "mxfp8"),
        (2, "data_parallel", 1, "grouped", "mxfp8"),
        (4, "zero3", 2, "grouped", "mxfp8"),
        (2, "zero1", 2, "indexed", "mxfp8"),
        (4, "zero3", 2, "grouped", "fp8_block"),
        (2, "data_parallel", 1, "grouped", "fp8_block"),
        (2, "zero3", 2, "indexed", "fp8_block"),
    ],
)
def test_coded_experts_train_as_experts_quantised_at_use(
    ranks: int, strategy: str, ep: int, layout: str, format: str
) -> None:
    run_ranks(both, ranks, strategy, ep, layout, format)
