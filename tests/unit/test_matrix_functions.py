# SPDX-License-Identifier: Apache-2.0
"""The shipped matrix optimizers beside slow and obvious transcriptions of what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint import CheckpointError
from shardwise.optim.functions import ANY, orthogonalise
from shardwise.optim.rules import State
from shardwise.train.config import OptimizerName
from tests.models import Weights, make_model

ROWS, COLS, STEPS = 12, 8, 6


def gradients(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, ROWS, COLS, generator=generator) for _ in range(STEPS)]


def updates(name: str, **options: Any) -> tuple[list[Tensor], State]:
    """The updates of a few steps on two matrices at once, and the state after them."""
    state: State = {}
    group = {**ANY[name].options, "lr": 0.1, **options}
    run = ANY[name].run
    found = [run(g.clone(), state, group, step).clone() for step, g in enumerate(gradients(), 1)]
    return found, state


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)


def test_normuon_gives_rows_one_length_and_all_one_size() -> None:
    found, state = updates("normuon")
    assert state["second"].shape == (2, ROWS, 1)
    lengths = torch.linalg.vector_norm(found[0], dim=-1)
    close(lengths, lengths[:, :1].expand_as(lengths))
    momentum, second = torch.zeros(ROWS, COLS), torch.zeros(ROWS)
    for gradient, update in zip(gradients(), found, strict=True):
        momentum = 0.95 * momentum + 0.05 * gradient[1]
        orthogonal = orthogonalise(momentum[None])[0]
        second = 0.95 * second + 0.05 * (orthogonal**2).mean(1)
        scaled = orthogonal / (second.sqrt()[:, None] + 1e-8)
        close(update[1], 0.1 * 0.2 * scaled / scaled.square().mean().sqrt())


def test_soap_is_the_authors_code() -> None:
    """Which keeps the mean in the rotated space, and turns it whenever the basis turns."""
    found, _ = updates("soap", frequency=2)
    (first, *rest), left, right = [one[1] for one in gradients()], None, None
    left, right = 0.05 * first @ first.T, 0.05 * first.T @ first
    bases = [torch.linalg.eigh(g).eigenvectors.flip(1) for g in (first @ first.T, first.T @ first)]
    mean, second = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
    assert not found[0].any(), "the first step sets the basis"
    for number, (gradient, update) in enumerate(zip(rest, found[1:], strict=True), 1):
        rotated = bases[0].T @ gradient @ bases[1]
        mean, second = 0.95 * mean + 0.05 * rotated, 0.95 * second + 0.05 * rotated**2
        size = 0.1 * (1 - 0.95**number) ** 0.5 / (1 - 0.95**number)
        inner = size * mean / (second.sqrt() + 1e-8 * (1 - 0.95**number) ** 0.5)
        close(update[1], bases[0] @ inner @ bases[1].T)
        plain = bases[0] @ mean @ bases[1].T
        left, right = (
            0.95 * left + 0.05 * gradient @ gradient.T,
            (0.95 * right + 0.05 * gradient.T @ gradient),
        )
        if number % 2 == 0:
            for side, gram in enumerate((left, right)):
                order = (bases[side].T @ gram @ bases[side]).diagonal().argsort(descending=True)
                second = second.index_select(side, order)
                bases[side] = torch.linalg.qr(gram @ bases[side][:, order]).Q
        mean = bases[0].T @ plain @ bases[1]


@pytest.mark.parametrize("name", ANY)
def test_the_optimizer_calls_the_function_with_its_state(name: str) -> None:
    model, other = (Weights({"a": (ROWS, COLS)}) for _ in range(2))
    optimizer = sw.optimizer(model, matrix=ANY[name](lr=0.1), elementwise=None)
    state: State = {}
    for step, gradient in enumerate(gradients(1), 1):
        model.a.grad = gradient[0].clone()
        with torch.autocast("cpu"):  # which is for models: a step computes as outside of it
            optimizer.step()
        update = ANY[name].run(gradient.clone(), state, {**ANY[name].options, "lr": 0.1}, step)
        with torch.no_grad():
            other.a -= update[0]
        assert torch.equal(model.a, other.a)
    assert optimizer.state[model.a]["step"] == STEPS
    for key, value in state.items():
        assert torch.equal(optimizer.state[model.a][key], value[0])


@pytest.mark.parametrize("name", ANY)
def test_a_plan_counts_the_state_on_the_owners(name: str) -> None:
    model = make_model(depth=2)
    made = sw.optimizer(model, matrix=ANY[name](lr=0.1), elementwise=sw.adamw())
    held = sum(
        value.nbytes
        for states in made.state.values()
        for key, value in states.items()
        if key not in ("step", "steps")
    )
    with torch.device("meta"):
        bare = make_model(depth=2)
    assert sw.plan(bare, {"dp": 1}, "zero3", optimizer=name).optimizer_bytes == held
    spread = sw.plan(bare, {"dp": 4}, "zero3", optimizer=name)
    assert held / 4 <= spread.optimizer_bytes < held, "four matrices, an owner each"


def test_groups_have_rates_and_options_of_their_own() -> None:
    """Two equal weights with equal gradients; one of them in a group of half the rate."""
    model = Weights({"a": (ROWS, COLS)})
    model.b = torch.nn.Parameter(model.a.detach().clone(), requires_grad=False)
    optimizer = sw.optimizer(model, matrix=ANY["normuon"](lr=0.1), elementwise=None)
    model.b.requires_grad_(True)
    optimizer.add_param_group(
        {"params": [model.b], "kind": "function", "lr": 0.05, "weight_decay": 0.1}
    )
    assert [group["beta2"] for group in optimizer.param_groups] == [0.95, 0.95]
    before = model.a.detach().clone()
    model.a.grad, model.b.grad = (gradients()[0][0].clone() for _ in range(2))
    optimizer.step()
    step = before - model.a.detach()
    close(model.b.detach(), before * (1 - 0.05 * 0.1) - step / 2)
    with pytest.raises(ValueError, match="kind='other': a parameter group is one of matrix, func"):
        optimizer.add_param_group({"params": [], "kind": "other"})


def test_the_trainer_knows_them() -> None:
    assert {*get_args(OptimizerName)} == {*ANY, "muon", "adamw"}


def scaled(by: float, runs: list[float]) -> Any:
    @sw.matrix_optimizer
    def mine(gradient: Tensor, state: State, *, lr: float, betas: Any = (0.9,)) -> Tensor:
        runs.append(by)
        int(gradient.sum())  # looks at values, so that no meta tensor will do
        state["n"] = gradient.new_full((len(gradient),), 1 / 3, dtype=torch.float64)
        return by * lr * gradient

    return mine


def test_functions_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    one, other = scaled(1.0, [])(lr=0.1, betas=[0.5]), scaled(-1.0, [])(lr=0.1)
    for number, (settings, factor) in enumerate(((one, 0.1), (other, -0.1), (one, 0.1))):
        model = Weights({"a": (8, 9), "b": (8, 9), "none": (0, 8)})
        model.b.requires_grad_(False)
        optimizer = sw.optimizer(model, matrix=settings, elementwise=sw.adamw(lr=0.1))
        torch.save(optimizer.state_dict(), tmp_path / "state")
        sw.save(tmp_path / f"saved{number}", model, optimizer)
        sw.load(tmp_path / f"saved{number}", model, optimizer)
        optimizer.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        model.b.requires_grad_(True)
        optimizer.add_param_group({"params": [model.b], "kind": "function"})
        before = model.a.detach().clone(), model.b.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[model.a]["n"].item() == 1 / 3, "in its own dtype"
        for was, parameter in zip(before, (model.a, model.b), strict=True):
            torch.testing.assert_close(was - parameter.detach(), torch.full((8, 9), factor))
    soap, normuon = (
        sw.optimizer(model, matrix=ANY[name](lr=0.1), elementwise=sw.adamw(lr=0.1))
        for name in ("soap", "normuon")
    )
    with pytest.raises(ValueError, match=r"kinds \['normuon', .*this optimizer \['soap'"):
        soap.load_state_dict(normuon.state_dict())
    sw.save(tmp_path / "normuon", model, normuon)
    with pytest.raises(CheckpointError):
        sw.load(tmp_path / "normuon", model, soap)
    with pytest.raises(ValueError, match=r"'none' of shape .0, 8. has no elements"):
        sw.route(model, matrix="none")


def test_a_scheduler_costs_no_run_of_the_function() -> None:
    runs: list[float] = []
    settings = scaled(1.0, runs)(lr=0.1)
    model = Weights({"a": (8, 9)})
    optimizer = sw.optimizer(model, matrix=settings, elementwise=sw.adamw(lr=0.1))
    before = len(runs)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        model.a.grad = torch.ones_like(model.a)
        optimizer.step()
    assert len(runs) == before + 3
