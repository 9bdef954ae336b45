# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining over wrapped stages: gradients are those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import shardwise as sw
from tests.models import STRATEGIES, Layer
from tests.ranks import on_ranks

WIDTH, ROWS, MICROBATCHES = 6, 8, 4
SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1)}
SCHEDULES |= {"interleaved": (ScheduleInterleaved1F1B, 2)}


@cache
def mesh_of(pp: int, *dp: int) -> DeviceMesh:
    names = {0: (), 1: ("dp",), 2: ("dp_outer", "dp")}[len(dp)]
    return init_device_mesh("cpu", (pp, *dp), mesh_dim_names=("pp", *names))


class Skipped(Layer):
    """A layer that some ranks leave out."""

    used = True

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if self.used else hidden


class Stage(nn.Sequential):
    def use(self, second: bool) -> None:
        self[1].used = second


def stages_of(number: int) -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(Layer(WIDTH), Skipped(WIDTH)) for _ in range(number)]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = torch.randn(2, 2 * ROWS, WIDTH, generator=generator)
    return made[0], made[1]


def wrap(stage: Stage, mesh: DeviceMesh, **options: Any) -> Stage:
    for layer in stage:
        sw.fully_shard(layer, mesh=mesh, **options)
    return sw.fully_shard(stage, mesh=mesh, **options)


def check_schedule(
    rank: int, mesh: DeviceMesh, schedule: str, *, skipped: bool = False, **options: Any
) -> None:
    """Three steps of a schedule and of one process: the same losses and gradients in each.

    ``skipped``: only the first data-parallel rank uses the second layer of each stage.
    """
    kind, per_rank = SCHEDULES[schedule]
    data = mesh["dp_outer", "dp"] if mesh.ndim == 3 else mesh["dp"]
    pipe, copies = mesh["pp"], data.size()
    here, copy, number = pipe.get_local_rank(), rank % copies, 2 * per_rank
    plain = nn.Sequential(*stages_of(number))
    modules = {i: wrap(stages_of(number)[i], data, **options) for i in range(here, number, 2)}
    made = [
        PipelineStage(module, index, number, torch.device("cpu"), group=pipe.get_group())
        for index, module in modules.items()
    ]
    runs = kind(made if per_rank > 1 else made[0], MICROBATCHES, loss_fn=F.mse_loss)
    for module in modules.values():
        module.use(not skipped or copy == 0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, *modules.values())]
    for step in range(3):
        batches = list(zip(*(half.chunk(copies) for half in batch_of(step)), strict=True))
        expected = []
        for number_of_copy, (inputs, targets) in enumerate(batches):
            for stage in plain:
                stage.use(not skipped or number_of_copy == 0)
            expected.append(F.mse_loss(plain(inputs), targets))
            (expected[-1] / copies).backward()
        losses: list[Tensor] = []
        if here == 0:
            runs.step(batches[copy][0])
        else:
            runs.step(target=batches[copy][1], losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), expected[copy])
        for index, module in modules.items():
            for (name, p), (_, other) in zip(
                module.named_parameters(), plain[index].named_parameters(), strict=True
            ):
                torch.testing.assert_close(p.grad.full_tensor(), other.grad, msg=f"{index}.{name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_two_stages_without_data_parallelism(rank: int, world_size: int, schedule: str) -> None:
    check_schedule(rank, mesh_of(2, 1), schedule)


@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [("gpipe", "zero3"), ("1f1b", "zero1"), ("1f1b", "hsdp")]
    + [("interleaved", strategy) for strategy in ("zero0", "zero2", "zero3", "hfsdp")],
)
@on_ranks(4)
def test_gradients_of_one_process(rank: int, world_size: int, schedule: str, strategy: str) -> None:
    placements = STRATEGIES[strategy]
    mesh = mesh_of(2, 2) if placements.num_axes == 1 else mesh_of(2, 2, 1)
    check_schedule(rank, mesh, schedule, placements=placements)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_ranks_that_skip_a_layer(rank: int, world_size: int, schedule: str) -> None:
    check_schedule(rank, mesh_of(2, 2), schedule, skipped=True, unused_parameters="zeros")
