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


def build(
    placements: sw.Placements, sizes: tuple[int, ...], depth: int, **options: Any
) -> tuple[nn.Module, Any]:
    """Square matrices and nothing else, so that every rank stores as many rows of each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(depth)))
    grain = options.pop("grain", None)
    for layer in model:
        sw.fully_shard(layer, mesh=mesh_of(*sizes), placements=placements, grain=grain)
    sw.fully_shard(model, mesh=mesh_of(*sizes), placements=placements)
    return model, sw.optimizer(model, matrix=sw.muon(**options), elementwise=sw.adamw())


def step(model: nn.Module, optimizer: Any) -> list[comm.Call]:
    model(torch.randn(4, SIDE)).square().sum().backward()
    with comm.record() as calls:
        optimizer.step()
    optimizer.zero_grad()
    return calls


def count_sharded(rank: int, world_size: int, stage: int) -> tuple[int, int]:
    depth = 2 * world_size
    model, optimizer = build(sw.zero(stage), (world_size,), depth)
    step(model, optimizer)
    calls = step(model, optimizer)
    assert [call.operation for call in calls] == ["all_to_all"] * 2, "there and back, once"
    total = depth * SIDE * SIDE
    (group,) = optimizer._matrix_groups
    there, back = reference.sent(group.exchange.ownership, 0, rank)
    assert [call.nbytes for call in calls] == [there * 4, back * 4]
    assert there == back == (world_size - 1) * total // world_size**2
    return sum(call.nbytes for call in calls), total


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (2, 3), (4, 2), (4, 3)])
def test_a_sharded_step_sends_the_formula(world_size: int, stage: int) -> None:
    """2 (N - 1) / N^2 of the matrices' bytes."""
    for sent, total in run_ranks(count_sharded, world_size, stage):
        assert sent == 4 * 2 * (world_size - 1) * total // world_size**2


def count_uneven(rank: int, world_size: int) -> tuple[int, int, int]:
    model, optimizer = build(sw.zero(3), (world_size,), 5)
    calls = step(model, optimizer)
    (group,) = optimizer._matrix_groups
    there, back = reference.sent(group.exchange.ownership, 0, rank)
    assert [call.nbytes for call in calls] == [4 * there, 4 * back]
    return there, back, sum(p.to_local().numel() for p in model.parameters())


def test_uneven_rows_send_what_the_plan_says_and_nothing_more() -> None:
    found = run_ranks(count_uneven, 3)
    assert sum(held for _, _, held in found) == 5 * SIDE * SIDE
    assert sum(there for there, _, _ in found) == sum(back for _, back, _ in found) > 0


def count_replicas(rank: int, world_size: int) -> dict[str, list[int]]:
    model, optimizer = build(sw.hsdp(), (2, 2), 8)
    sent: dict[str, list[int]] = {}
    for call in step(model, optimizer):
        assert call.operation == "all_to_all"
        sent.setdefault(call.axis, []).append(call.nbytes)
    return sent


def test_replicas_split_the_exchange_and_share_updates_by_the_formula() -> None:
    """Inside, 1/R of the exchange; between replicas, (R - 1)/R of the shard once."""
    total, shards, copies = 8 * SIDE * SIDE * 4, 2, 2
    for sent in run_ranks(count_replicas, 4):
        inside = (shards - 1) * total // (shards**2 * copies)
        assert sent == {
            "dp": [inside, inside],
            "dp_outer": [(copies - 1) * total // (copies * shards)],
        }


def count_unsharded(rank: int, world_size: int) -> list[tuple[str, int]]:
    model, optimizer = build(sw.zero(0), (world_size,), 4)
    return [(call.operation, call.nbytes) for call in step(model, optimizer)]


def test_plain_replicas_share_updates() -> None:
    total = 4 * SIDE * SIDE * 4
    for world_size in (2, 4):
        expected = [("all_to_all", (world_size - 1) * total // world_size)]
        assert run_ranks(count_unsharded, world_size) == [expected] * world_size


def count_whole(rank: int, world_size: int) -> int:
    model, optimizer = build(sw.zero(3), (world_size,), 4, grain=sw.TENSOR)
    return len(step(model, optimizer))


def test_whole_tensors_and_single_ranks_send_nothing() -> None:
    assert run_ranks(count_whole, 2) == [0, 0]
    assert run_ranks(count_unsharded, 1) == [[]]


def count_outer(rank: int, world_size: int) -> tuple[list[int], int]:
    model, optimizer = build(sw.hfsdp(), (2, 2), 8)
    calls = step(model, optimizer)
    assert {call.axis for call in calls} == {"dp_outer+dp"}
    return [call.nbytes for call in calls], 8 * SIDE * SIDE * 4


def test_hfsdp_exchanges_over_both_axes_at_once() -> None:
    for sent, total in run_ranks(count_outer, 4):
        assert sent == [3 * total // 16] * 2


class Wide(nn.Module):
    """Equal matrices in one unit, and a vector among them where they are odd in number."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.zeros(SIDE)) if count % 2 else None
        self.matrices = nn.ParameterList(torch.randn(SIDE, SIDE) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight in self.matrices:
            hidden = torch.tanh(hidden @ weight)
        return hidden if self.shift is None else hidden + self.shift


def count_between_replicas(
    rank: int, world_size: int, strategy: str, count: int = 8
) -> dict[str, int]:
    """Bytes that leave this rank by axis, in one whole step after the first; and bytes held."""
    model = Wide(count)
    whole = strategy == "hfsdp"
    sw.fully_shard(
        model,
        mesh=mesh_of(2, 2),
        placements=sw.hfsdp() if whole else sw.hsdp(),
        grain=(lambda name, p: sw.TENSOR) if whole else None,
    )
    if strategy == "adamw":
        optimizer = sw.optimizer(model, matrix=None, elementwise=sw.adamw())
    else:
        optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    sent: dict[str, int] = {}
    for _ in range(2):
        sent = {}
        with comm.record() as calls:
            model(torch.randn(4, SIDE)).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        for call in calls:
            sent[call.axis] = sent.get(call.axis, 0) + call.wire_bytes
    return sent | {"held": sum(p.to_local().nbytes for p in model.parameters())}


def test_matrix_aligned_replicas_send_no_more_than_an_all_reduce() -> None:
    """Gradients reduce-scattered to whole matrices, orthogonalised, weights all-gathered: between
    replicas that is what HSDP's all-reduce costs under AdamW, (R-1)/R P/N (b_g + b_p)."""
    total, shards, copies = 8 * SIDE * SIDE * 4, 2, 2
    formula = 2 * (copies - 1) * total // (copies * shards)
    for sent in run_ranks(count_between_replicas, 4, "adamw"):
        assert sent["dp_outer"] == formula
    for sent in run_ranks(count_between_replicas, 4, "hfsdp"):
        assert set(sent) == {"dp", "dp_outer", "held"}, "no exchange over both"
        assert sent["dp_outer"] == formula
    for sent in run_ranks(count_between_replicas, 4, "hsdp"):
        assert sent["dp_outer"] == formula, "rows cut, main weights on every replica"
    # Seven matrices fall unevenly on two replicas: each inner rank's replicas together send the
    # formula, of what that rank holds.
    uneven = run_ranks(count_between_replicas, 4, "hsdp", 7)
    for inner in range(2):
        replicas = [uneven[outer * 2 + inner] for outer in range(2)]
        assert sum(sent["dp_outer"] for sent in replicas) == 2 * (copies - 1) * replicas[0]["held"]
        assert replicas[0]["held"] == replicas[1]["held"] > 0
