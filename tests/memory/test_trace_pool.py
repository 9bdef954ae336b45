# SPDX-License-Identifier: Apache-2.0
"""The trace pool under whole models: its storages are used again, and right in any order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.memory.helpers import Books, make, unit_numels
from tests.models import Model, loss_of, ranks_for, tokens
from tests.ranks import on_ranks

LOOSE = 1e-6


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
    if schedule == "before the first step":
        evaluate(model, rank, world_size)
        model.reshard()  # an optimizer is built next
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = loss_of(model, tokens(step, 0, rank, world_size))
        if schedule == "between forward and backward" and step:
            evaluate(model, rank, world_size)
        if schedule == "two forwards at once" and step:
            other = loss_of(model, tokens(step, 1, rank, world_size))
            (other * 0.0).backward()  # its backward comes first
        if schedule == "a graph that is kept" and step == 0:
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule == "between steps":
            evaluate(model, rank, world_size)
    return full(model), losses


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_steps_that_are_alike_use_the_same_storages(
    rank: int, world_size: int, strategy: str
) -> None:
    expected = run_schedule(make(strategy, world_size), rank, world_size, "plain")
    books = Books()
    model = make(strategy, world_size, memory="trace")
    found = run_schedule(model, rank, world_size, "plain")
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(ours, theirs)
    assert found[1] == expected[1]
    held = books().get("pool_idle", 0)
    if strategy != "zero0":  # which sums in the gradient itself
        assert 0 < held <= 2 * max(unit_numels(model)) * 4
    run_schedule(model, rank, world_size, "plain")
    assert books().get("pool_idle", 0) == held


@pytest.mark.parametrize(
    "schedule",
    [
        "before the first step",
        "between steps",
        "between forward and backward",
        "two forwards at once",
        "a graph that is kept",
        "another dtype",
    ],
)
@on_ranks(2)
def test_what_happens_between_steps_changes_no_bit(
    rank: int, world_size: int, schedule: str
) -> None:
    model, plain = make("zero3", world_size, memory="trace"), make("zero3", world_size)
    if schedule == "another dtype":  # new buffers, and the old ones' storages are free
        for one in (model, plain):
            run_schedule(one, rank, world_size, "plain", steps=2)
            one.to(torch.float64)
    expected = run_schedule(plain, rank, world_size, "plain")
    found = run_schedule(model, rank, world_size, schedule)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        if schedule == "two forwards at once":  # adding zeros may still flip a rounding
            torch.testing.assert_close(ours, theirs, rtol=LOOSE, atol=LOOSE)
        else:
            assert torch.equal(ours, theirs)


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
        del model.forward  # it holds the model
    assert results["trace"][1] == results["caching"][1] and len(set(results["trace"][1])) == 6
    for ours, theirs in zip(results["trace"][0], results["caching"][0], strict=True):
        assert torch.equal(ours, theirs)
