# SPDX-License-Identifier: Apache-2.0
"""The trace pool under whole models: planned once, replayed, and right when the plan is broken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.memory import TracePool
from tests.memory.helpers import make, unit_numels
from tests.models import STRATEGIES, Model, loss_of, ranks_for, tokens
from tests.ranks import on_ranks, run_ranks

LOOSE = 1e-6


def pool_of(model: Model) -> TracePool:
    pool = model._shardwise_unit.runtime.source
    assert isinstance(pool, TracePool)
    return pool


def full(model: Model) -> list[Tensor]:
    found = [parameter.full_tensor() for parameter in model.parameters()]
    assert len(found) == 21
    return found


def evaluate(model: Model, rank: int, world_size: int) -> Tensor:
    with torch.no_grad():
        return loss_of(model, tokens(99, 0, rank, world_size))


def run_schedule(
    model: Model, rank: int, world_size: int, schedule: str, steps: int = 4
) -> tuple[list[Tensor], list[float]]:
    """``schedule`` names what happens besides training steps; none of it may change a bit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = loss_of(model, tokens(step, 0, rank, world_size))
        if schedule == "between forward and backward" and step:
            evaluate(model, rank, world_size)
        if schedule == "two forwards at once" and step:
            other = loss_of(model, tokens(step, 1, rank, world_size))
            (other * 0.0).backward()  # its backward comes first
        if schedule == "a graph that is kept" and step == 0:  # where others plan
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule == "between steps":
            evaluate(model, rank, world_size)
    return full(model), losses


def check_replay(rank: int, world_size: int, strategy: str) -> tuple[int, int]:
    model = make(strategy, world_size, memory="trace")
    root, *layers = unit_numels(model)
    expected = run_schedule(make(strategy, world_size), rank, world_size, "plain")
    found = run_schedule(model, rank, world_size, "plain")
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(ours, theirs)
    assert found[1] == expected[1]
    pool = pool_of(model)
    assert pool.fallbacks == 0
    slack = 3 * TracePool.ALIGNMENT
    assert "gather" not in pool.arena_bytes  # autograd holds views of whole weights
    if strategy != "zero0":
        assert pool.planned
        assert 0 < pool.arena_bytes["compute"] <= 2 * max(root, *layers) * 4 + slack
    return pool.fallbacks, sum(pool.arena_bytes.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_is_replayed_without_falling_back_and_fits_the_bound(strategy: str) -> None:
    results = run_ranks(check_replay, ranks_for(strategy), strategy)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    "schedule",
    [
        "between steps",
        "between forward and backward",
        "two forwards at once",
        "a graph that is kept",
    ],
)
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_what_happens_between_steps_changes_no_bit(
    rank: int, world_size: int, strategy: str, schedule: str
) -> None:
    expected = run_schedule(make(strategy, world_size), rank, world_size, "plain")
    model = make(strategy, world_size, memory="trace")
    found = run_schedule(model, rank, world_size, schedule)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        if schedule == "two forwards at once":  # adding zeros may still flip a rounding
            torch.testing.assert_close(ours, theirs, rtol=LOOSE, atol=LOOSE)
        else:
            assert torch.equal(ours, theirs)
    assert pool_of(model).planned


@on_ranks(2)
def test_an_evaluation_before_the_first_step_does_no_harm(rank: int, world_size: int) -> None:
    """Evaluation before the first step is traced too; the plan comes with the first backward."""
    model = make("zero3", world_size, memory="trace")
    first = evaluate(model, rank, world_size)
    assert not pool_of(model).planned
    model.reshard()  # an optimizer is built next
    run_schedule(model, rank, world_size, "plain")
    plain = make("zero3", world_size)
    assert torch.equal(first, evaluate(plain, rank, world_size))
    plain.reshard()
    run_schedule(plain, rank, world_size, "plain")
    for ours, theirs in zip(full(model), full(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert (pool_of(model).planned, pool_of(model).fallbacks) == (True, 0)


# ------------------------------------------------------------------------------ broken plans


def reorder(model: Model, order: list[int]) -> None:
    """The same modules, run in another order; every name stays."""
    layers = list(model.layers)

    def forward(batch: Tensor) -> Tensor:
        hidden = model.embedding(batch)
        for number in order:
            hidden = layers[number](hidden)
        return model.head(hidden)

    model.forward = forward  # type: ignore[method-assign]


@on_ranks(2)
def test_another_order_of_units_stays_right(rank: int, world_size: int) -> None:
    results = {}
    for memory in ("caching", "trace"):
        model = make("zero3", world_size, memory=memory)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step, order in enumerate(
            [[0, 1, 2], [2, 1, 0], [0, 2, 1], [2, 0, 1], [0, 1, 2], [1, 0, 2]]
        ):
            reorder(model, order)
            loss = loss_of(model, tokens(step, 0, rank, world_size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results[memory] = (full(model), losses)
        if memory == "trace":
            pool = pool_of(model)
            outcome = pool.planned, pool.fallbacks
        del model.forward  # it holds the model
    assert results["trace"][1] == results["caching"][1] and len(set(results["trace"][1])) == 6
    for ours, theirs in zip(results["trace"][0], results["caching"][0], strict=True):
        assert torch.equal(ours, theirs)
    planned, fallbacks = outcome
    assert planned and fallbacks == 0  # gradients of one unit are gone before the next ones


def check_new_buffers(rank: int, world_size: int) -> int:
    """``model.to(float64)`` makes new blocks that no plan knows."""
    model = make("zero3", world_size, memory="trace")
    plain = make("zero3", world_size)
    for one in (model, plain):
        run_schedule(one, rank, world_size, "plain", steps=2)
        one.to(torch.float64)
        run_schedule(one, rank, world_size, "plain", steps=2)
    for ours, theirs in zip(full(model), full(plain), strict=True):
        assert ours.dtype == torch.float64 and torch.equal(ours, theirs)
    return pool_of(model).fallbacks


def test_new_buffers_fall_back() -> None:
    assert all(fallbacks > 0 for fallbacks in run_ranks(check_new_buffers, 2))
