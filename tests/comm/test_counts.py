# SPDX-License-Identifier: Apache-2.0
"""Exactly which collectives a step issues, in order and in bytes, against formulas by hand.

A unit's whole buffer has F elements, of `w` bytes as compute weight and `g` bytes as gradient on
the wire. Under zero(3) on one axis, for a model of a root and layers 1..L:

    forward    root  1 2 ... L                  gathers of F*w
    backward           L ... 2 1                gathers of F*w; the root was kept
               L ... 2 1 root                   reduce-scatters of F*g
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.core import comm
from tests.models import Model, loss_of, make_model, mesh_for, mesh_of, shard_model, tokens
from tests.ranks import on_ranks, run_ranks

DEPTH = 3
Calls = list[tuple[str, str, int]]  # (operation, axis, bytes)
PRECISIONS = {
    "fp32": (None, 4, 4),
    "bf16": (sw.Precision(weights="bf16", reduce="fp32"), 2, 4),
    "bf16 wire": (sw.Precision(weights="bf16"), 2, 2),
}


def make(placements: sw.Placements, world_size: int, **options: object) -> Model:
    mesh = mesh_for(placements, world_size)
    return shard_model(make_model(depth=DEPTH), placements, mesh, **options)


def sizes_of(model: Model) -> list[int]:
    """Elements of the whole buffer of the root, then of each layer."""
    units = [unit._shardwise_unit for unit in (model, *model.layers)]
    assert all(len(unit.groups) == 1 for unit in units), "one buffer per unit in this model"
    return [unit.groups[0].layout.numel for unit in units]


def list_calls(calls: list[comm.Call]) -> Calls:
    return [(call.operation, call.axis, call.nbytes) for call in calls]


def one_step(model: Model, rank: int, world_size: int, microbatches: int) -> Calls:
    with comm.record() as calls:
        for microbatch in range(microbatches):
            model.set_is_last_backward(microbatch == microbatches - 1)
            loss_of(model, tokens(0, microbatch, rank, world_size)).backward()
    return list_calls(calls)


def forget_gradients_and_step(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)  # a write, as an optimizer's
    model.zero_grad()


def assert_equal_calls(found: Calls, expected: Calls) -> None:
    assert expected, "nothing to compare"
    assert Counter(found) == Counter(expected)


# ------------------------------------------------------------------------------ one axis


def expected_zero(stage: int, sizes: list[int], microbatches: int, w: int, g: int) -> Calls:
    calls: Calls = []
    if stage == 0:
        calls = [("all_reduce", "dp", size * g) for size in sizes]  # once, with the last microbatch
    if stage in (1, 2):
        calls = [("all_gather", "dp", size * w) for size in sizes]  # once per optimizer step
        times = 1 if stage == 1 else microbatches
        calls += [("reduce_scatter", "dp", size * g) for size in sizes] * times
    if stage == 3:
        root, *layers = sizes
        gathers = [root, *layers, *reversed(layers)]  # the root stays between forward and backward
        calls = [("all_gather", "dp", size * w) for size in gathers]
        calls += [("reduce_scatter", "dp", size * g) for size in sizes]
        calls *= microbatches
    return calls


def check_zero(rank: int, world_size: int, stage: int, precision: str) -> int:
    policy, w, g = PRECISIONS[precision]
    steps = 0
    for microbatches in (1, 3):
        model = make(sw.zero(stage), world_size, precision=policy)
        sizes = sizes_of(model)
        for _ in range(3):  # the first step knows no order of units yet; the counts are the same
            found = one_step(model, rank, world_size, microbatches)
            assert_equal_calls(found, expected_zero(stage, sizes, microbatches, w, g))
            forget_gradients_and_step(model)
            steps += 1
    return steps


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_issues_exactly_these_collectives(stage: int, precision: str) -> None:
    assert run_ranks(check_zero, 2, stage, precision) == [6, 6]


def test_zero_issues_the_same_on_three_ranks() -> None:
    for stage in range(4):
        assert run_ranks(check_zero, 3, stage, "bf16") == [6] * 3


def check_order(rank: int, world_size: int) -> tuple[Calls, list[int]]:
    torch.manual_seed(0)
    model = make_model(depth=DEPTH)
    # Layers of different widths, so that bytes tell which unit a collective belongs to.
    for number, layer in enumerate(model.layers):
        layer.up = torch.nn.Linear(10, 30 + 64 * number)
        layer.down = torch.nn.Linear(30 + 64 * number, 10)
    shard_model(model, sw.zero(3), mesh_of(world_size))
    one_step(model, rank, world_size, 1)
    model.zero_grad()
    return one_step(model, rank, world_size, 1), sizes_of(model)


def test_the_order_is_the_next_unit_ahead_both_ways() -> None:
    assert_the_next_ahead(run_ranks(check_order, 2))


def assert_the_next_ahead(results: list[Any]) -> None:
    """Each unit's gather is issued while the one before it computes; grads go as they come."""
    for found, sizes in results:
        assert len(set(sizes)) == DEPTH + 1, "bytes name units"
        unit = {size * 4: number for number, size in enumerate(sizes)}
        names = {"all_gather": "gather", "reduce_scatter": "reduce"}
        assert [f"{names[operation]} {unit[nbytes]}" for operation, _, nbytes in found] == [
            "gather 0",
            "gather 1",
            "gather 2",
            "gather 3",
            # backward begins with the root, which was kept, and gathers ahead
            "gather 3",
            "gather 2",
            "reduce 3",
            "gather 1",
            "reduce 2",
            "reduce 1",
            "reduce 0",
        ]


# ------------------------------------------------------------------------------ two axes


def check_hsdp(rank: int, world_size: int, strategy: str, precision: str) -> int:
    policy, w, g = PRECISIONS[precision]
    inner_ranks = world_size // 2
    steps = 0
    for microbatches in (1, 3):
        model = make(getattr(sw, strategy)(), world_size, precision=policy)
        sizes = sizes_of(model)
        root, *layers = sizes
        for _ in range(2):
            inner: Calls = [("all_gather", "dp", size * w) for size in (root, *layers, *layers)]
            inner += [("reduce_scatter", "dp", size * g) for size in sizes]
            inner = inner * microbatches if inner_ranks > 1 else []
            # Over the outer axis go only the shards of the inner one, once per step.
            if strategy == "hsdp":
                outer = [("all_reduce", "dp_outer", size // inner_ranks * g) for size in sizes]
            else:
                outer = [("reduce_scatter", "dp_outer", size // inner_ranks * g) for size in sizes]
                outer += [("all_gather", "dp_outer", size // inner_ranks * w) for size in sizes]
            found = one_step(model, rank, world_size, microbatches)
            assert_equal_calls(found, inner + outer)
            forget_gradients_and_step(model)
            steps += 1
    return steps


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_the_outer_axis_is_used_once_per_step(strategy: str, precision: str) -> None:
    """HSDP: one outer all-reduce per group; HFSDP: none, but a reduce-scatter and a gather."""
    assert run_ranks(check_hsdp, 4, strategy, precision) == [4] * 4
    assert run_ranks(check_hsdp, 2, strategy, precision) == [4] * 2  # inner axis of one rank


@on_ranks(4)
def test_a_hand_written_strategy_costs_what_its_placements_say(rank: int, world_size: int) -> None:
    """ZeRO-1 over two axes: gradients are scattered inside at once, outside at the end."""
    r, p, s = sw.Replicate(), sw.Partial(), sw.Shard()
    placements = sw.Placements(compute=[r, r], grad=[p, s], main=[s, s])
    for microbatches in (1, 3):
        model = make(placements, world_size)
        sizes = sizes_of(model)
        for _ in range(2):
            expected: Calls = []
            for size in sizes:
                expected += [("reduce_scatter", "dp", size * 4)] * microbatches
                expected += [("reduce_scatter", "dp_outer", size * 2)]
                expected += [("all_gather", "dp_outer", size * 2), ("all_gather", "dp", size * 4)]
            assert_equal_calls(one_step(model, rank, world_size, microbatches), expected)
            forget_gradients_and_step(model)


# ------------------------------------------------------------------------------ without a step


def check_evaluation(rank: int, world_size: int, strategy: str) -> tuple[list[Calls], list[int]]:
    placements = getattr(sw, strategy)() if strategy[0] == "h" else sw.zero(int(strategy[-1]))
    model = make(placements, world_size)
    found = []
    for _ in range(3):
        with comm.record() as calls, torch.no_grad():
            model(tokens(0, 0, rank, world_size))
        found.append(list_calls(calls))
    model.reshard()  # the root's module holds its whole weights since its forward
    forget_gradients_and_step(model)
    with comm.record() as calls, torch.no_grad():
        model(tokens(0, 0, rank, world_size))
    return [*found, list_calls(calls)], sizes_of(model)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp"])
def test_forwards_without_gradients_gather_only_what_was_released(strategy: str) -> None:
    world_size = 4 if strategy[0] == "h" else 2
    for (first, second, third, after_write), sizes in run_ranks(
        check_evaluation, world_size, strategy
    ):
        everything = [("all_gather", "dp", size * 4) for size in sizes]
        # The root's weights stay; what zero(1) and zero(2) gathered stays until it is written.
        layers_only = everything[1:] if strategy in ("zero3", "hsdp", "hfsdp") else []
        outer = [("all_gather", "dp_outer", size * 2) for size in sizes]
        once = outer if strategy == "hfsdp" else []
        if strategy == "zero0":
            everything = []
        assert Counter(first) == Counter(everything + once)
        assert Counter(second) == Counter(third) == Counter(layers_only)
        assert Counter(after_write) == Counter(everything + once)


@on_ranks(2)
def test_the_optimizer_communicates_nothing(rank: int, world_size: int) -> None:
    model = make(sw.zero(3), world_size)
    one_step(model, rank, world_size, 1)
    with comm.record() as calls:
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.eval()
        model.train()
        list(model.state_dict())
    assert len(calls) == 0


def check_reshard(rank: int, world_size: int, reshard: object) -> tuple[Calls, list[int]]:
    model = make(sw.zero(3), world_size, reshard_after_forward=reshard)
    return one_step(model, rank, world_size, 1), sizes_of(model)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_what_is_kept_after_forward_is_not_gathered_again(reshard: bool | None) -> None:
    for found, sizes in run_ranks(check_reshard, 2, reshard):
        again = {True: sizes, False: [], None: sizes[1:]}[reshard]
        expected = [("all_gather", "dp", size * 4) for size in [*sizes, *again]]
        expected += [("reduce_scatter", "dp", size * 4) for size in sizes]
        assert_equal_calls(found, expected)


def test_a_part_kept_after_forward_is_gathered_from_neighbours() -> None:
    for found, sizes in run_ranks(check_reshard, 4, 2):
        expected = [("all_gather", "dp", size * 4) for size in sizes]
        expected += [("all_gather", "dp/2", size * 4) for size in sizes]
        expected += [("reduce_scatter", "dp", size * 4) for size in sizes]
        assert_equal_calls(found, expected)


class Recomputed(nn.Sequential):
    """A unit whose backward comes in parts: those of its reentrant checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = checkpoint(part, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_reentrant_checkpoints_inside_a_unit_reduce_once(
    rank: int, world_size: int, stage: int
) -> None:
    model = Recomputed(*(nn.Linear(8, 8) for _ in range(4)))
    sw.fully_shard(model, mesh=mesh_of(world_size), placements=sw.zero(stage))
    with comm.record() as calls:
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    reductions = [call.operation for call in calls if call.operation != "all_gather"]
    assert reductions == ["reduce_scatter" if stage else "all_reduce"]


def test_one_rank_communicates_nothing() -> None:
    assert [found for found, _ in run_ranks(check_reshard, 1, None)] == [[]]


def test_a_missing_or_extra_collective_is_noticed() -> None:
    """Negative control of the comparison itself."""
    calls: Calls = [("all_gather", "dp", 8), ("all_gather", "dp", 8), ("reduce_scatter", "dp", 8)]
    assert_equal_calls(calls, calls[::-1])
    for wrong in (calls[1:], [*calls, calls[0]], [("all_gather", "dp", 4), *calls[1:]], []):
        with pytest.raises(AssertionError):
            assert_equal_calls(calls, wrong)
