# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism inside data parallelism: the same numbers as one process, under every
strategy, and the same bits under every strategy of one mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.ranks import on_ranks
from tests.tensor_parallel import (
    adamw_of,
    assert_close,
    batches,
    bucketed,
    data_rank,
    grid,
    muon_of,
    one_process,
    sharded,
    train,
)

STEPS = 2  # the second has momentum
OPTIMIZERS = {"adamw": adamw_of, "muon": muon_of}


def same_bits(found: list[dict[str, Any]], expected: list[dict[str, Any]], what: Any) -> None:
    """Compare the bits of all steps with ``sw.optimizer``; of the gradients of the first step with
    torch's clipping, which rounds the norm of whole tensors otherwise than that of pieces."""
    ours = what[0] == "muon"
    pairs = list(zip(found, expected, strict=True))
    for step, (mine, its) in enumerate(pairs if ours else pairs[:1]):
        names = [name for name in mine if ours or name.startswith(("loss", "grad"))]
        wrong = [name for name in names if not torch.equal(mine[name], its[name])]
        assert not wrong, (what, step, wrong)


@pytest.mark.cpu_only("16 bits: other kernels serve matrices that travel than those that stay")
@pytest.mark.parametrize(("optimizer", "sequence"), [("adamw", False), ("muon", True)])
@on_ranks(4)
def test_two_axes(rank: int, world_size: int, sequence: bool, optimizer: str) -> None:
    mesh, optimize = grid(2, 2), OPTIMIZERS[optimizer]
    mine = batches(STEPS, 2, data_rank(mesh))
    expected = one_process(optimize, STEPS, 2)
    first = None
    # All stages with Muon, which exchanges matrices; the same gradients with the other.
    every = sequence and optimizer == "muon"
    for stage in range(4) if every else (0, 3):
        model = sharded(mesh, sw.zero(stage), sequence)
        found = train(model, optimize(model), mine)
        assert_close(found, expected)
        first = first or found
        same_bits(found, first, (optimizer, "fully_shard", stage))
    for stage in range(3) if every else (2,):
        model = bucketed(mesh, sw.zero(stage), sequence)
        found = train(model, optimize(model), mine)
        assert_close(found, expected)
        same_bits(found, first, (optimizer, "data_parallel", stage))


@pytest.mark.cpu_only("16 bits: other kernels serve matrices that travel than those that stay")
@pytest.mark.parametrize(
    ("sizes", "optimizer"),
    [((1, 2, 2), "muon"), ((2, 1, 2), "adamw")],
    ids=str,
)
@on_ranks(4)
def test_three_axes(
    rank: int, world_size: int, sizes: tuple[int, int, int], optimizer: str
) -> None:
    mesh, optimize = grid(*sizes), OPTIMIZERS[optimizer]
    mine = batches(STEPS, 2, data_rank(mesh))
    first = None
    for placements in (sw.hsdp(), sw.hfsdp()):
        model = sharded(mesh, placements)
        found = train(model, optimize(model), mine)
        assert_close(found, one_process(optimize, STEPS, 2))
        first = first or found
        same_bits(found, first, (optimizer, placements))
