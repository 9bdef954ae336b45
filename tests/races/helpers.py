# SPDX-License-Identifier: Apache-2.0
"""One process that poses as rank 0 of 4 on torch's fake backend, so that collectives are issued as
NCCL's are; and models under every strategy, whose lanes a checker records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.shard.group import Planes
from shardwise.shard.module import units_of
from tests import models
from tests.models import STRATEGIES, Model, loss_of, make_model, shard_model, tokens
from tests.races.checker import Checker

NUM_RANKS = 4
WIDTH = 32  # the side of an MXFP8 block
FORMATS = ("mxfp8", "fp8_block")
PRECISIONS = models.PRECISIONS | {
    name: sw.Precision(weights=name, reduce="fp32")  # type: ignore[arg-type]
    for name in FORMATS
}


@contextmanager
def posing() -> Iterator[dict[int, DeviceMesh]]:
    """Be rank 0, alone; the meshes by their number of axes."""
    excepthook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        yield {
            1: init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",)),
            2: init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("dp_outer", "dp")),
        }
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def make(
    meshes: dict[int, DeviceMesh], strategy: str, precision: str = "bf16", **options: Any
) -> Model:
    placements = STRATEGIES[strategy]
    model = make_model(width=128 if precision == "fp8_block" else WIDTH, depth=3)
    mesh = meshes[placements.num_axes]
    shard_model(model, placements, mesh, precision=PRECISIONS[precision], **options)
    stored = {group.format for unit in units_of(model) for group in unit.groups} - {None}
    assert stored == ({precision} & set(FORMATS)), "what is checked is there"
    return model


def name_memory(checker: Checker, model: nn.Module) -> None:
    """Call buffers by their names, so that a finding can be read."""
    for unit in units_of(model):
        for number, group in enumerate(unit.groups):
            of = f"{unit.name} group {number}"
            checker.name(group.main.flat, f"main of {of}", on_host=group.offload)
            planes: Any = group.whole
            while isinstance(planes, Planes):
                what = "whole" if planes is group.whole else "made on the way to whole"
                for block in planes.blocks:
                    checker.name(block.tensor, f"{what} of {of}")
                planes = planes.source


def backward(model: nn.Module, microbatch: int = 0, *, keep: bool = False) -> torch.Tensor:
    loss = loss_of(model, tokens(0, microbatch, 0, NUM_RANKS))
    loss.backward(retain_graph=keep)
    return loss


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(tokens(0, 0, 0, NUM_RANKS))
