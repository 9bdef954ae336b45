# SPDX-License-Identifier: Apache-2.0
"""Optimizers that are functions of whole matrices: the bits of one process under every strategy,
states of any shape that go to any other strategy, and the contract of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.optim.functions import ANY
from shardwise.optim.rules import State
from tests.models import Weights, loss_of, make_model, mesh_of, shard_model, tokens
from tests.parity.runs import NAMED, Run, assert_pair, run
from tests.ranks import on_ranks
from tests.whole import whole_parameters

Pair = tuple[Run, Run]


def functions() -> Iterator[Pair]:
    """SOAP, whose states have most shapes, every way; the other where ways differ most."""
    for strategy in [*NAMED, "buckets zero1"]:
        yield run(strategy, 3, "soap", steps=4), run("plain", 1, "soap", steps=4)
    for strategy, ranks, way in (
        ("zero3", 3, "by matrix"), ("hsdp", 4, "evenly"), ("zero0", 3, "evenly"),
        ("buckets zero1", 3, "evenly"),
    ):  # fmt: skip
        yield run(strategy, ranks, "normuon", under=(way,)), run("plain", 1, "normuon")
    yield run("zero0", 3, "soap", steps=4, under=("evenly",)), run("plain", 1, "soap", steps=4)


def resumed() -> Iterator[Pair]:
    """Saved half way and loaded under another strategy, the same as never stopped."""
    for optimizer in ("soap", "normuon"):
        for after in ("zero3", "hsdp", "buckets zero1"):
            one = run("zero0", 4, optimizer, steps=4, under=("evenly",))
            yield one.but(into=after), one


SAME = {
    f"{family.__name__}: {one}": (one, expected)
    for family in (functions, resumed)
    for one, expected in family()
}


@pytest.mark.parametrize("case", SAME)
def test_the_bits_of_one_process(case: str) -> None:
    assert_pair(*SAME[case])


# ------------------------------------------------------------------------------ the contract


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, tokens(step)).backward()  # the same on all ranks: a mean of two is exact
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_states_follow_their_matrices_to_other_owners(rank: int, world_size: int) -> None:
    """A group that is added changes who owns what."""
    found = []
    for strategy in (sw.zero(3), sw.zero(0), None):
        model = make_model(depth=2)
        late = model.layers[0].up.weight.requires_grad_(False)
        if strategy is not None:
            shard_model(model, strategy, mesh_of(world_size))
            late = model.layers[0].up.weight
        matrix = ANY["soap"](lr=0.05, weight_decay=0.1, frequency=2)
        optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))
        before = [group.exchange.ownership.owners for group in optimizer._matrix_groups]
        train(model, optimizer, range(2))
        late.requires_grad_(True)
        optimizer.add_param_group({"params": [late], "kind": "function", "lr": 0.02})
        after = [group.exchange.ownership.owners for group in optimizer._matrix_groups]
        assert before[0] != after[0][1:] or strategy is None, "the test is of states that move"
        train(model, optimizer, range(2, 4))
        found.append(whole_parameters(model))
    for name, value in found[-1].items():
        assert torch.equal(found[0][name], value) and torch.equal(found[1][name], value), name


@sw.matrix_optimizer
def breaks(gradient: Tensor, state: State, *, lr: float, how: str, when: int = 2) -> Tensor:
    """Goes wrong in step ``when`` of the matrices of 30 rows alone."""
    if not state:
        state["count"] = gradient.new_zeros(len(gradient))
        state["mean"] = torch.zeros_like(gradient)
    state["count"] += 1
    if gradient.is_meta or float(state["count"][0]) < when or gradient.shape[1] != 30:
        return lr * gradient
    if how == "state":
        state["mean"] = state["mean"][:, :2]
    if how == "raises":
        raise ArithmeticError
    wrong = {"shape": gradient[:, :1], "dtype": gradient.double(), "nan": gradient * float("nan")}
    return wrong.get(how, gradient)


@on_ranks(1)
def test_what_goes_wrong_names_the_matrix(rank: int, world_size: int) -> None:
    """The owner raises; others wait for it, as for any rank that died."""
    for how in ("state", "raises", "shape", "dtype"):
        model = shard_model(make_model(depth=2), sw.zero(3), mesh_of(world_size))
        matrix = breaks(lr=0.1, how=how)
        optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())
        train(model, optimizer, range(1))
        before = whole_parameters(model)
        with pytest.raises(RuntimeError, match=r"breaks.*|'layers\..\.up\.weight'"):
            train(model, optimizer, range(1, 2))
        after = whole_parameters(model)
        assert all(torch.equal(after[n], v) for n, v in before.items() if n.endswith("up.weight"))


@pytest.mark.parametrize("how", ["nan", "raises"])
@on_ranks(2)
def test_what_fails_in_the_first_step_is_raised_on_every_rank(
    rank: int, world_size: int, how: str
) -> None:
    model = shard_model(make_model(depth=1), sw.zero(3), mesh_of(world_size))
    matrix = breaks(lr=0.1, how=how, when=1)
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())
    with pytest.raises((RuntimeError, ValueError), match=r"'layers\.0\.up.weight'"):
        train(model, optimizer, range(1))


@sw.matrix_optimizer
def counts(gradient: Tensor, state: State, *, lr: float, step: int) -> Tensor:
    """Returns the number of the step, and checks the contract of a call."""
    assert bool(state) == (step > 1)
    if not state:
        state["steps"] = gradient.new_zeros(len(gradient))
        state["replaced"] = torch.zeros_like(gradient[:, 0])
    state["steps"] += 1
    state["replaced"] = state["replaced"] + 2
    if not gradient.is_meta:
        assert state["steps"].eq(step).all() and state["replaced"].eq(2 * step).all()
        CALLS.append(len(gradient))
    return torch.full_like(gradient, float(step))


CALLS: list[int] = []


@pytest.mark.parametrize("batched", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("late", range(3))
def test_a_call_gets_matrices_of_one_age(late: int, batched: bool) -> None:
    """Three matrices of one shape, of which one misses a step, the middle one or an outer one."""
    model = Weights(dict.fromkeys("abc", (4, 3)))
    optimizer = sw.optimizer(model, matrix=counts(lr=1.0), elementwise=None)
    (group,) = optimizer._matrix_groups
    group.one_by_one = not batched
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        CALLS.clear()
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = None if (step, number) == (1, late) else torch.ones(4, 3)
        optimizer.step()
        together = {0: [3], 1: [2]}.get(step, [1, 2])
        assert sorted(CALLS) == (together if batched else [1] * (2 if step == 1 else 3)), step
    for number, parameter in enumerate(model.parameters()):
        steps = 3 if number == late else 4
        torch.testing.assert_close(parameter.detach(), before[number] - sum(range(1, steps + 1)))
        assert optimizer.state[parameter]["step"] == optimizer.state[parameter]["steps"] == steps


def test_bad_functions_and_options_are_refused_at_once() -> None:
    model = make_model()

    def returns(value: Any, name: str) -> Any:
        def function(gradient: Tensor, state: State, *, lr: float) -> Any:
            state["kept"] = torch.zeros(3) if name == "counted" else gradient
            return value(gradient)

        function.__name__ = name
        return sw.matrix_optimizer(function)(lr=0.1)

    for matrix, name in (
        (returns(lambda g: g[:, :1], "short"), "short"),
        (returns(lambda g: g.half(), "narrow"), "narrow"),
        (returns(lambda g: None, "nothing"), "nothing"),
        (returns(lambda g: g, "counted"), "kept"),
        (ANY["soap"], "soap"),  # not called
    ):
        with pytest.raises(ValueError, match=name):
            sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())
    for options, error, name in (
        ({"lr": 0.1, "beta2": 0.5}, TypeError, "beta2"), ({}, TypeError, "lr"),
        ({"lr": -1}, ValueError, "lr"),
    ):  # fmt: skip
        with pytest.raises(error, match=name):
            ANY["soap"](**options)
    with pytest.raises(TypeError, match="gradient"):
        sw.matrix_optimizer(lambda gradient, lr: gradient)
    with pytest.raises(TypeError):
        breaks(torch.ones(1, 2, 2), {}, lr=0.1)
    with pytest.raises(ValueError, match="bias"):
        sw.route(model, matrix="layers.0.up.bias")
