# SPDX-License-Identifier: Apache-2.0
"""Every contribution is divided exactly once: gradients against sums written out by hand."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import shardwise as sw
from tests.models import PRECISIONS, STRATEGIES, Model, loss_of, make_model, ranks_for, tokens
from tests.parity.helpers import every_two_axis_placements, make_sharded
from tests.ranks import on_ranks, run_ranks
from tests.whole import whole_tensors


@cache
def summed_gradients(world_size: int, microbatches: int) -> dict[str, Tensor]:
    """The sum over ranks and microbatches of the gradients of each one's own loss."""
    model = make_model(depth=2)
    for rank in range(world_size):
        for microbatch in range(microbatches):
            loss_of(model, tokens(0, microbatch, rank, world_size)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def accumulate(model: Model, rank: int, world_size: int, microbatches: int) -> None:
    for microbatch in range(microbatches):
        model.set_is_last_backward(microbatch == microbatches - 1)
        loss_of(model, tokens(0, microbatch, rank, world_size)).backward()


def assert_gradients(model: Model, world_size: int, microbatches: int, divisor: float) -> None:
    expected = summed_gradients(world_size, microbatches)
    found = whole_tensors({name: p.grad for name, p in model.named_parameters()})
    assert found.keys() == expected.keys() and len(found) == 15
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name] / divisor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_divisors(
    rank: int, world_size: int, placements: sw.Placements, factors: dict[int, float | None]
) -> None:
    """``factors``: by number of microbatches."""
    for microbatches, factor in factors.items():
        model = make_sharded(placements, world_size)
        if factor is not None:
            for unit in (model, *model.layers):
                unit.set_gradient_divide_factor(factor)
        accumulate(model, rank, world_size, microbatches)
        assert_gradients(model, world_size, microbatches, factor or world_size)
        # A second time without clearing: the divisor meets only what is new.
        accumulate(model, rank, world_size, microbatches)
        assert_gradients(model, world_size, microbatches, (factor or world_size) / 2)


MEAN_OF_THREE, MEAN_OF_ONE = {1: 5.0, 3: None}, {1: None, 3: 5.0}


# For two axes: meshes (1, 1), (2, 1), (1, 3), (2, 2).
# A factor with several microbatches under every strategy, the other pair under zero3 and hfsdp.
@pytest.mark.parametrize(
    ("strategy", "world_size", "factors"),
    [("zero0", 2, MEAN_OF_ONE), ("zero1", 3, MEAN_OF_ONE), ("zero2", 2, MEAN_OF_ONE)]
    + [("zero3", 4, MEAN_OF_ONE), ("zero3", 4, MEAN_OF_THREE)]
    + [("hsdp", 4, MEAN_OF_ONE), ("hfsdp", 4, MEAN_OF_ONE)]
    + [("zero0", 1, MEAN_OF_THREE), ("zero3", 1, MEAN_OF_THREE), ("hfsdp", 1, MEAN_OF_THREE)]
    + [("hfsdp", 2, MEAN_OF_THREE), ("hfsdp", 3, MEAN_OF_THREE)],
    ids=str,
)
def test_gradients_are_divided_once_by_the_chosen_factor(
    strategy: str, world_size: int, factors: dict[int, float | None]
) -> None:
    run_ranks(check_divisors, world_size, STRATEGIES[strategy], factors)


@on_ranks(4)
def test_gradients_are_divided_once_under_hand_written_placements(
    rank: int, world_size: int
) -> None:
    placements = [p for p in every_two_axis_placements() if p not in (sw.hsdp(), sw.hfsdp())]
    for one in placements:
        model = make_sharded(one, world_size)
        for unit in (model, *model.layers):
            unit.set_gradient_divide_factor(5.0)
        for microbatches in (1, 3):
            accumulate(model, rank, world_size, microbatches)
            assert_gradients(model, world_size, microbatches, 5.0)
            model.zero_grad()
    assert len(placements) == 12


@on_ranks(2)
def test_a_factor_holds_for_the_unit_it_was_given_to(rank: int, world_size: int) -> None:
    """The factor is a unit's own: the layers still take the mean."""
    model = make_sharded(sw.zero(3), world_size)
    model.set_gradient_divide_factor(1.0)
    accumulate(model, rank, world_size, 1)
    expected = summed_gradients(world_size, 1)
    for name, parameter in model.named_parameters():
        divisor = world_size if name.startswith("layers.") else 1.0
        torch.testing.assert_close(
            parameter.grad.full_tensor(), expected[name] / divisor, rtol=1e-4, atol=1e-6
        )


# Each strategy with a factor of its own, and each factor where most is scaled.
@pytest.mark.parametrize(
    ("strategy", "factor", "microbatches"),
    [(strategy, 5.0, 3) for strategy in STRATEGIES]
    + [(one, *how) for one in ("zero1", "hfsdp") for how in ((None, 1), (None, 3), (1.0, 3))],
)
@on_ranks(ranks_for)
def test_forcing_sums_on_the_wire_does_not_change_gradients(
    rank: int, world_size: int, strategy: str, factor: float | None, microbatches: int
) -> None:
    """torch's words: "even if it comes at the cost of separate pre- or post-scaling"."""
    model = make_sharded(STRATEGIES[strategy], world_size)
    for unit in (model, *model.layers):
        unit.set_force_sum_reduction_for_comms(True)
        if factor is not None:
            unit.set_gradient_divide_factor(factor)
    accumulate(model, rank, world_size, microbatches)
    assert_gradients(model, world_size, microbatches, factor or world_size)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
@on_ranks(1)
def test_a_factor_that_is_not_positive_is_refused(
    rank: int, world_size: int, factor: float
) -> None:
    model = make_sharded(sw.zero(3), world_size)
    with pytest.raises(ValueError, match="must be positive"):
        model.set_gradient_divide_factor(factor)


def check_no_sync(rank: int, world_size: int, placements: sw.Placements, precision: str) -> None:
    model = make_sharded(placements, world_size, precision=PRECISIONS[precision])
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    for _ in range(2):  # the second round reuses what the first one left
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            loss_of(model, tokens(0, microbatch, rank, world_size)).backward()
            if microbatch < 2:
                assert all(p.grad is None for p in model.parameters()), "nothing is shown yet"
        expected = summed_gradients(world_size, 3)
        compared, whole = 0, whole_tensors({n: p.grad for n, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            found = whole[name]
            assert (found - expected[name] / world_size).abs().max() < tolerance, name
            compared += found.abs().max().item() > 0
            parameter.grad = None
        assert compared == 15


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [(strategy, "fp32") for strategy in STRATEGIES]
    + [("zero0", "bf16"), ("zero3", "bf16"), ("hfsdp", "bf16")],
)
def test_accumulating_without_sync_gives_the_mean_of_the_sums(
    strategy: str, precision: str
) -> None:
    run_ranks(check_no_sync, ranks_for(strategy), STRATEGIES[strategy], precision)
    if precision == "fp32":
        run_ranks(check_no_sync, 1, STRATEGIES[strategy], precision)


def check_early_step(rank: int, world_size: int, placements: sw.Placements) -> None:
    """Weights that change while gradients wait would mix two steps: every rank is told."""
    model = make_sharded(placements, world_size)
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens(0, 0, rank, world_size)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with pytest.raises(RuntimeError, match="stepped before the last microbatch"):
        loss_of(model, tokens(0, 1, rank, world_size))


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hsdp"])
def test_a_step_before_the_last_microbatch_is_refused(strategy: str) -> None:
    run_ranks(check_early_step, 2, STRATEGIES[strategy])
