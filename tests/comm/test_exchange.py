# SPDX-License-Identifier: Apache-2.0
"""A Muon step sends, counted on real ranks, the formulas of the plan, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core import comm
from tests.models import mesh_of
from tests.ranks import run_ranks
from tests.reference import exchange as reference

pytestmark = pytest.mark.cpu_only("updates travel in 16 bits on a GPU")
SIDE = 16
MATRIX = SIDE * SIDE * 4  # bytes


class Wide(nn.Module):
    """Equal matrices, and a vector among them where they are odd in number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.zeros(SIDE)) if count % 2 else None
        self.matrices = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            hidden = torch.tanh(matrix(hidden))
        return hidden if self.shift is None else hidden + self.shift


def steps(
    sizes: tuple[int, ...], name: str, count: int, grain: Any, each: bool, adamw: bool = False
) -> tuple[Any, list[comm.Call], list[comm.Call]]:
    """The optimizer, and the calls of a second backward and of its step. ``each``: every matrix is
    a unit of its own, so that each rank stores as many of its rows."""
    model = Wide(count)
    placements = {"hsdp": sw.hsdp, "hfsdp": sw.hfsdp}.get(name, lambda: sw.zero(int(name[-1])))()
    choice = None if grain is None else lambda name, parameter: grain
    for matrix in model.matrices if each else ():
        sw.fully_shard(matrix, mesh=mesh_of(*sizes), placements=placements, grain=choice)
    sw.fully_shard(model, mesh=mesh_of(*sizes), placements=placements, grain=choice)
    matrix = None if adamw else sw.muon()
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())
    for _ in range(2):
        with comm.record() as backward:
            model(torch.randn(4, SIDE)).square().sum().backward()
        with comm.record() as step:
            optimizer.step()
        optimizer.zero_grad()
    return optimizer, backward, step


def exchanged(rank: int, world_size: int, *case: Any) -> dict[str, list[int]]:
    """Bytes that this rank sends in a step, by axis."""
    optimizer, _, calls = steps(*case, each=True)
    found: dict[str, list[int]] = {}
    for call in calls:
        assert call.operation == "all_to_all"
        found.setdefault(call.axis, []).append(call.nbytes)
    (group,) = optimizer._matrix_groups
    if group.exchange.replicas is None:
        there, back = reference.sent(group.exchange.ownership, 0, rank)
        planned = [4 * there, 4 * back] if found else []
        assert [nbytes for sent in found.values() for nbytes in sent] == planned
    return found


# With N ranks and R replicas: (N - 1) / N^2 / R of all matrices there and back, and (R - 1) / R of
# a shard to the other replicas, once.
TABLE: list[tuple[tuple[int, ...], str, int, Any, dict[str, list[int]]]] = [
    ((2,), "zero1", 4, None, {"dp": [MATRIX, MATRIX]}),
    ((4,), "zero2", 8, None, {"dp": [3 * MATRIX // 2] * 2}),
    ((2,), "zero3", 4, None, {"dp": [MATRIX, MATRIX]}),
    ((4,), "zero3", 8, None, {"dp": [3 * MATRIX // 2] * 2}),
    ((2,), "zero3", 4, sw.TENSOR, {}),
    ((1,), "zero0", 4, None, {}),
    ((2,), "zero0", 4, None, {"dp": [2 * MATRIX]}),
    ((4,), "zero0", 4, None, {"dp": [3 * MATRIX]}),
    ((2, 2), "hsdp", 8, None, {"dp": [MATRIX, MATRIX], "dp_outer": [2 * MATRIX]}),
    ((2, 2), "hfsdp", 8, None, {"dp_outer+dp": [3 * MATRIX // 2] * 2}),
]


@pytest.mark.parametrize(("sizes", "name", "count", "grain", "expected"), TABLE, ids=str)
def test_a_step_sends_the_formula(
    sizes: tuple[int, ...], name: str, count: int, grain: Any, expected: dict[str, list[int]]
) -> None:
    world_size = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    assert run_ranks(exchanged, world_size, sizes, name, count, grain) == [expected] * world_size


def test_uneven_rows_send_what_the_plan_says_and_nothing_more() -> None:
    found = run_ranks(exchanged, 3, (3,), "zero3", 5, None)
    there, back = (sum(one["dp"][way] for one in found) for way in range(2))
    assert there == back > 0


def between_replicas(rank: int, world_size: int, *case: Any) -> tuple[int, int]:
    """Bytes that leave this rank over ``dp_outer`` in a backward and a step; and bytes held."""
    *case, adamw = case
    optimizer, backward, step = steps((2, 2), *case, each=False, adamw=adamw)
    calls = [call for call in backward + step if call.axis == "dp_outer"]
    held = sum(p.to_local().nbytes for group in optimizer.param_groups for p in group["params"])
    return sum(call.wire_bytes for call in calls), held


def test_matrix_aligned_replicas_send_no_more_than_an_all_reduce() -> None:
    """Gradients reduce-scattered to whole matrices, orthogonalised, weights all-gathered: between
    replicas that is what HSDP's all-reduce costs under AdamW, (R-1)/R P/N (b_g + b_p)."""
    formula = 2 * 8 * MATRIX // (2 * 2)
    for case in (("hsdp", 8, None, True), ("hfsdp", 8, sw.TENSOR, False), ("hsdp", 8, None, False)):
        assert [sent for sent, _ in run_ranks(between_replicas, 4, *case)] == [formula] * 4, case
    # Seven matrices fall unevenly on two replicas: each inner rank's replicas together send the
    # formula, of what that rank holds.
    uneven = run_ranks(between_replicas, 4, "hsdp", 7, None, False)
    for inner in range(2):
        (one, held), (other, also) = uneven[inner], uneven[2 + inner]
        assert one + other == 2 * held and held == also > 0
