# SPDX-License-Identifier: Apache-2.0
"""Choices that must not change a single bit: the ZeRO stage, overlap, the source of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardwise as sw
from tests import models
from tests.models import STRATEGIES, ZERO, Model, ranks_for
from tests.one_card import ordered_ranks
from tests.parity.helpers import full_parameters, make_sharded, train
from tests.ranks import on_ranks, run_ranks

THREE = ordered_ranks(3)
PRECISIONS = models.PRECISIONS | {"bf16 wire": sw.Precision(weights="bf16", reduce="bf16")}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys() and len(found) == 15
    for name, value in found.items():
        assert torch.equal(value, expected[name]), f"{what}: {name}"


@pytest.mark.parametrize(
    ("precision", "world_size"),
    [("fp32", THREE), ("fp32", ordered_ranks(4)), ("bf16", 2), ("bf16 wire", THREE)],
)
@on_ranks()
def test_all_zero_stages_train_to_the_same_bits(rank: int, world_size: int, precision: str) -> None:
    runs = {}
    for name, placements in ZERO.items():
        model = make_sharded(placements, world_size, precision=PRECISIONS[precision])
        losses = train(model, rank, world_size)
        runs[name] = full_parameters(model) | {"losses": torch.tensor(losses)}
    untrained = full_parameters(make_sharded(sw.zero(3), world_size))
    parameters = {
        name: {k: v for k, v in run.items() if k != "losses"} for name, run in runs.items()
    }
    assert all(not torch.equal(parameters["zero0"][k], v) for k, v in untrained.items())
    for name in ("zero1", "zero2", "zero3"):
        assert torch.equal(runs[name]["losses"], runs["zero0"]["losses"]), name
        assert_same_bits(parameters[name], parameters["zero0"], name)


@on_ranks(2)
def test_the_comparison_of_bits_can_tell_precisions_apart(rank: int, world_size: int) -> None:
    runs = {}
    for name, precision in PRECISIONS.items():
        model = make_sharded(sw.zero(3), world_size, precision=precision)
        train(model, rank, world_size)
        runs[name] = full_parameters(model)
    for first, second in (("fp32", "bf16"), ("bf16", "bf16 wire")):
        with pytest.raises(AssertionError):
            assert_same_bits(runs[first], runs[second], "they differ")


def without_prefetch(model: Model) -> None:
    for unit in (model, *model.layers):
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])


def eager_prefetch(model: Model) -> None:
    """Everybody gathers everybody: far ahead, and in an order nobody needs."""
    units = [model, *model.layers]
    for unit in units:
        unit.set_modules_to_forward_prefetch(units[::-1])
        unit.set_modules_to_backward_prefetch(units)


def one_reduction(model: Model) -> None:
    model.set_reduce_scatter_max_input_buffers(1)


def many_reductions(model: Model) -> None:
    model.set_reduce_scatter_max_input_buffers(8)


def separate_groups(model: Model) -> None:
    model.set_separate_reduce_scatter_group(True)


CHANGES = (without_prefetch, eager_prefetch, one_reduction, many_reductions, separate_groups)
OPTIONS = (
    {"memory": "trace"},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
)


def check_schedules(rank: int, world_size: int, strategy: str) -> int:
    """Two microbatches a step, so that accumulation is scheduled too."""
    placements = STRATEGIES[strategy]

    def run(change: object = None, **options: object) -> dict[str, Tensor]:
        model = make_sharded(placements, world_size, **options)
        if callable(change):
            change(model)
        train(model, rank, world_size, microbatches=2)
        return full_parameters(model)

    expected = run()
    for change in CHANGES:
        assert_same_bits(run(change), expected, change.__name__)
    for options in OPTIONS:
        assert_same_bits(run(**options), expected, str(options))
    return len(CHANGES) + len(OPTIONS)


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hfsdp"])
def test_overlap_prefetch_and_memory_do_not_change_a_bit(strategy: str) -> None:
    world_size = ranks_for(strategy)
    assert run_ranks(check_schedules, world_size, strategy) == [8] * world_size
