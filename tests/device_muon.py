# SPDX-License-Identifier: Apache-2.0
"""Muon on a GPU: ``python -m tests.device_muon``. CI has none, so pytest does not collect this.

The kernels' path against fp32 on the CPU, and sharded against whole.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from tests.parity.helpers import small_rounds
from tests.ranks import run_ranks

logger = logging.getLogger("device_muon")
SHAPES = [(256, 256)] * 3 + [(512, 256)] * 2 + [(128, 640), (96, 64), (33, 130), (640, 128)]


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(shape) * 0.05 for shape in SHAPES)
        self.fused = nn.Parameter(torch.randn(192, 128) * 0.05)
        self.experts = nn.Parameter(torch.randn(4, 160, 96) * 0.05)
        self.norm = nn.Parameter(torch.ones(64))

    def forward(self, hidden: Tensor) -> Tensor:
        return sum((p * hidden).square().sum() for p in self.parameters())  # type: ignore[return-value]


def train(model: nn.Module, optimizer: Any, device: str, steps: int = 4) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            full = torch.randn(parameter.shape, generator=generator).to(device)
            parameter.grad = torch.zeros_like(parameter).copy_(full)
        optimizer.clip_grad_norm(10.0)
        optimizer.step()
        optimizer.zero_grad()


def build(device: str, wrap: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    model = Matrices().to(device)
    sw.route(model, split={"fused": sw.Split.interleaved(3)})
    if wrap is not None:
        wrap(model)
    settings = sw.muon(**{"lr": 0.05, "weight_decay": 0.1} | options)
    return model, sw.optimizer(model, matrix=settings, elementwise=sw.adamw())


def values(model: nn.Module) -> list[Tensor]:
    return [getattr(p.detach(), "full_tensor", p.detach)().cpu() for p in model.parameters()]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    start = [p.detach() for p in Matrices().parameters()]
    return max(
        ((one - other).norm() / (other - old).norm()).item()
        for one, other, old in zip(found, expected, start, strict=True)
    )


def against_the_cpu() -> None:
    for options in ({}, {"decay": "cautious"}, {"nesterov": False}):
        found = []
        for device in ("cpu", "cuda"):
            model, optimizer = build(device, **options)
            train(model, optimizer, device)
            found.append(values(model))
        (group,) = optimizer._matrix_groups
        assert group.fused and len(group.local) == len(SHAPES) + 1, group.local.keys()
        error = distance(found[1], found[0])
        logger.info("kernels against fp32 on the CPU, %s: %.4f of the distance", options, error)
        assert 0 < error < 0.03, error


def in_the_step() -> None:
    """Clipped in the step as before it; a gradient that is not finite moves nothing."""
    found = []
    for in_step in (False, True):
        model, optimizer = build("cuda")
        for step in range(3):
            model(torch.tensor(1.0 + step, device="cuda")).backward()
            optimizer.clip_grad_norm(10.0, in_step=in_step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(model))
    error = distance(*found)
    logger.info("clipped in the step and before it: %.2e", error)
    assert error < 1e-4, error  # AdamW divides by the inverse of the factor
    states = [v for p in model.parameters() for v in optimizer.state[p].values()]
    before = [one.detach().clone() for one in (*model.parameters(), *states)]
    model(torch.tensor(1.0, device="cuda")).backward()
    model.fused.grad[3, 5] = float("nan")
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")  # the host must not wait
        norm = optimizer.clip_grad_norm(10.0, in_step=True)
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    assert bool(norm.isnan())
    assert all(map(torch.equal, (*model.parameters(), *states), before)), "nothing moves"


def sharded(rank: int, world_size: int, strategy: str) -> float:
    torch.cuda.set_device(0)
    placements = {"zero3": sw.zero(3), "hsdp": sw.hsdp()}[strategy]
    sizes = (world_size,) if strategy == "zero3" else (2, world_size // 2)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cuda", sizes, mesh_dim_names=("dp_outer", "dp")[-len(sizes) :]
    )
    wrapped, optimizer = build(
        "cuda", lambda model: sw.fully_shard(model, mesh=mesh, placements=placements)
    )
    train(wrapped, optimizer, "cuda")
    assert optimizer._matrix_groups[0].narrow
    with small_rounds():
        again, small = build(
            "cuda", lambda model: sw.fully_shard(model, mesh=mesh, placements=placements)
        )
    train(again, small, "cuda")
    assert all(map(torch.equal, values(again), values(wrapped))), "one matrix at a time: other bits"
    whole, reference = build("cuda")
    train(whole, reference, "cuda")
    return distance(values(wrapped), values(whole))


def against_whole() -> None:
    for strategy, world_size, backend in (
        ("zero3", 1, "cpu:gloo,cuda:nccl"),
        ("zero3", 2, "gloo"),
        ("hsdp", 4, "gloo"),
    ):
        errors = run_ranks(sharded, world_size, strategy, backend=backend, timeout=120)
        logger.info("%s on %d ranks against whole: %.2e", strategy, world_size, max(errors))
        assert max(errors) < 1e-4, errors


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for check in (against_the_cpu, in_the_step, against_whole):
        check()
        logger.info("%s: passed", check.__name__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
