# SPDX-License-Identifier: Apache-2.0
"""Optimizers that are functions of whole matrices train sharded models bit for bit as one process,
and their states, of any shape, go to any other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.optim import matrix_group
from shardwise.optim.functions import ANY
from shardwise.optim.rules import State
from shardwise.optim.split import Split
from tests.models import (
    STRATEGIES,
    Model,
    Weights,
    loss_of,
    make_model,
    mesh_of,
    shard_model,
    tokens,
)
from tests.parity.helpers import assert_same, full
from tests.ranks import on_ranks, run_ranks
from tests.whole import whole_parameters, whole_state

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {"soap": {"frequency": 2}}
SPLITS = {"layers.0.up.weight": Split.stacked(7, 13, 10), "layers.1.up.weight": Split.heads(3)}


def optimizer_of(model: Model, name: str, **more: Any) -> Any:
    matrix = ANY[name](lr=0.05, weight_decay=0.1, **OPTIONS.get(name, {}), **more)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


def train(model: Model, optimizer: Any, rank: int, world_size: int, steps: range) -> None:
    for step in steps:
        loss_of(model, tokens(step, 0, rank, world_size)).backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()


def build(strategy: str, world_size: int, name: str, seed: int = 0) -> tuple[Model, Any]:
    model = make_model(depth=2, seed=seed)
    sw.route(model, split=SPLITS)
    placements = STRATEGIES.get(strategy)
    if strategy == "data_parallel":
        sw.data_parallel(model, mesh=mesh_of(world_size), bucket_mb=1 / 256)
    elif placements is not None:  # one axis of all ranks, so that sums have one order
        two = placements.num_axes == 2
        shard_model(model, placements, mesh_of(world_size, 1) if two else mesh_of(world_size))
    return model, optimizer_of(model, name)


WAYS = [*STRATEGIES, "data_parallel"]
EVENLY = ("zero0", "hsdp")


def ways_of(name: str) -> list[tuple[bool, str]]:
    """(whether replicas divide matrices evenly, strategy)."""
    return [(False, way) for way in WAYS] + [(True, way) for way in EVENLY]


def check_strategies(rank: int, world_size: int, name: str) -> int:
    """Against the gradients of one process that adds the ranks' losses in their order."""
    expected = None
    steps = range(STEPS if name in OPTIONS else 2)  # four, where bases change every second step
    for evenly, strategy in ways_of(name):
        matrix_group.evenly_is_cheaper = lambda plan, evenly=evenly: evenly  # type: ignore[assignment]
        model, optimizer = build(strategy, world_size, name)
        train(model, optimizer, rank, world_size, steps)
        found = whole_state(model, optimizer)
        expected = expected or found
        assert_same(found, expected, (strategy, evenly))
    # One process: every rank by itself, with the mean of all ranks' gradients.
    model, optimizer = build("alone", world_size, name)
    for step in steps:
        grads = []
        for other in range(world_size):
            loss_of(model, tokens(step, 0, other, world_size)).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
        for parts, parameter in zip(zip(*grads, strict=True), model.parameters(), strict=True):
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            parameter.grad = total / world_size
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(whole_state(model, optimizer), expected or {}, "one process")
    return len(expected or {})


@pytest.mark.cpu_only("NCCL adds three ranks or more in another order in each collective")
@pytest.mark.parametrize("name", ANY)
def test_every_strategy_gives_the_bits_of_one_process(name: str) -> None:
    assert min(run_ranks(check_strategies, 3, name)) > 20


# ------------------------------------------------------------------------------ checkpoints


def check_reshard(rank: int, world_size: int, path: str, name: str) -> int:
    model, optimizer = build("zero0", world_size, name)
    train(model, optimizer, rank, world_size, range(2))
    sw.save(path, model, optimizer)
    saved = whole_state(model, optimizer)
    train(model, optimizer, rank, world_size, range(2, STEPS))
    after = whole_state(model, optimizer)
    for strategy in ("zero3", "hsdp", "data_parallel"):
        other, again = build(strategy, world_size, name, seed=5)
        sw.load(path, other, again)
        assert_same(whole_state(other, again), saved, strategy)
        train(other, again, rank, world_size, range(2, STEPS))
        assert_same(whole_state(other, again), after, strategy)
        other, third = build(strategy, world_size, name, seed=6)
        third.load_state_dict(again.state_dict())
        for key, value in again.state[next(iter(again.state))].items():
            theirs = third.state[next(iter(third.state))][key]
            assert torch.equal(full(value), full(theirs))
    return len(saved)


@pytest.mark.cpu_only("NCCL adds three ranks or more in another order in each collective")
@pytest.mark.parametrize("name", ["soap", "normuon"])
def test_states_are_saved_and_resharded(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "saved")
    (count, *_) = run_ranks(check_reshard, 4, path, name)
    model, optimizer = build("alone", 1, name, seed=5)  # and to one process
    sw.load(path, model, optimizer)
    found = whole_state(model, optimizer)
    assert len(found) == count
    state, shape = {"soap": ("left_basis", (13, 13)), "normuon": ("second", (13, 1))}[name]
    assert found[f"layers.0.up.weight {state}.1"].shape == shape
    assert found["layers.0.down.weight step"] == 2


@pytest.mark.cpu_only("NCCL adds three ranks or more in another order in each collective")
@on_ranks(4)
def test_states_follow_their_matrices_to_other_owners(rank: int, world_size: int) -> None:
    """A group that is added changes who owns what."""
    found = []
    for strategy in ("zero3", "zero0", "alone"):
        model = make_model(depth=2)
        late = model.layers[0].up.weight.requires_grad_(False)
        if strategy != "alone":
            shard_model(model, STRATEGIES[strategy], mesh_of(world_size))
            late = model.layers[0].up.weight
        optimizer = optimizer_of(model, "soap")
        owners = [group.exchange.ownership.owners for group in optimizer._matrix_groups]
        for step in range(STEPS):
            if step == 2:
                late.requires_grad_(True)
                optimizer.add_param_group({"params": [late], "kind": "function", "lr": 0.02})
            loss_of(model, tokens(0, 0, 0, 1)).backward()  # the same on all: a mean is exact
            optimizer.step()
            optimizer.zero_grad()
        again = [group.exchange.ownership.owners for group in optimizer._matrix_groups]
        moved = [a for a, b in zip(owners[0], again[0][1:], strict=False) if a != b]
        assert moved or strategy == "alone", "the test is of states that move"
        found.append(whole_parameters(model))
        assert_same(found[-1], found[0], strategy)


# ------------------------------------------------------------------------------ what goes wrong


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
        return gradient
    if how == "raises":
        raise ArithmeticError("no inverse")
    if how == "nan":
        return gradient * float("nan")
    return gradient[:, :1] if how == "shape" else gradient.double()


MESSAGES = {
    "state": r"'layers\..\.up.weight': ValueError: breaks changed its state",
    "raises": r"'layers\..\.up.weight': ArithmeticError: no inverse",
    "shape": r"returned \[\d, 1, 10\] of torch.float32",
    "dtype": r"returned \[\d, 30, 10\] of torch.float64",
}


@on_ranks(1)
def test_what_goes_wrong_names_the_matrix(rank: int, world_size: int) -> None:
    """The owner raises; others wait for it, as for any rank that died."""
    for how, message in MESSAGES.items():
        model = make_model(depth=2)
        shard_model(model, sw.zero(3), mesh_of(world_size))
        optimizer = sw.optimizer(model, matrix=breaks(lr=0.1, how=how), elementwise=sw.adamw())
        train(model, optimizer, rank, world_size, range(1))
        before = {name: full(p) for name, p in model.named_parameters() if "up" in name}
        with pytest.raises(RuntimeError, match=message):
            train(model, optimizer, rank, world_size, range(1, 2))
        weights = [name for name in before if name.endswith("weight")]
        for name in weights:
            assert torch.equal(full(model.get_parameter(name)), before[name]), "nothing changed"


@on_ranks(2)
def test_what_fails_in_the_first_step_is_raised_on_every_rank(rank: int, world_size: int) -> None:
    for how, message in (("nan", "returned NaN or infinity in its first step"),
                         ("raises", "no inverse")):  # fmt: skip
        model = make_model(depth=1)
        shard_model(model, sw.zero(3), mesh_of(world_size))
        matrix = breaks(lr=0.1, how=how, when=1)
        optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())
        with pytest.raises((RuntimeError, ValueError), match=rf"'layers\.0\.up.weight'.*{message}"):
            train(model, optimizer, rank, world_size, range(1))


@sw.matrix_optimizer
def counts(gradient: Tensor, state: State, *, lr: float, step: int) -> Tensor:
    """Returns the number of the step, and checks the contract of a call."""
    if not state:
        assert step == 1
        state["steps"] = gradient.new_zeros(len(gradient))
        state["replaced"] = torch.zeros_like(gradient[:, 0])
    else:
        assert step > 1
    state["steps"] += 1
    state["replaced"] = state["replaced"] + 2
    if not gradient.is_meta:
        assert state["steps"].eq(step).all() and state["replaced"].eq(2 * step).all()
        CALLS.append((step, len(gradient)))
    return torch.full_like(gradient, float(step))


CALLS: list[tuple[int, int]] = []


@pytest.mark.parametrize("batched", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_a_call_gets_matrices_of_one_age(batched: bool) -> None:
    """Three matrices of one shape, of which one misses a step, the middle one or an outer one."""
    for late in range(3):
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
            together = {0: [3], 1: [2]}.get(step, [2, 1])
            sizes = together if batched else [1] * (2 if step == 1 else 3)
            assert sorted(n for _, n in CALLS) == sorted(sizes), (step, CALLS)
        for number, parameter in enumerate(model.parameters()):
            steps = 3 if number == late else 4
            moved = sum(range(1, steps + 1))
            torch.testing.assert_close(parameter.detach(), before[number] - moved)
            assert optimizer.state[parameter]["step"] == steps
            assert optimizer.state[parameter]["steps"] == steps


def test_bad_functions_and_options_are_refused_at_once() -> None:
    model = make_model()
    assert repr(breaks).startswith("breaks(gradient: 'Tensor', state: 'State', *, lr: 'float'")
    with pytest.raises(TypeError):
        breaks(torch.ones(1, 2, 2), {}, lr=0.1)

    def build(matrix: Any) -> Any:
        return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())

    def returns(value: Any, name: str) -> Any:
        def function(gradient: Tensor, state: State, *, lr: float) -> Any:
            state["kept"] = torch.zeros(3) if name == "counted" else gradient
            return value(gradient)

        function.__name__ = name
        return sw.matrix_optimizer(function)

    for value, name, message in (
        (lambda g: g[:, :1], "short", r"short, .* \[\d, 1, 10\]"),
        (lambda g: g.half(), "narrow", r"narrow, .* of torch.float16"),
        (lambda g: None, "nothing", r"nothing, .* NoneType"),
        (lambda g: g, "counted", r"left state\['kept'\] = \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            build(returns(value, name)(lr=0.1))
    with pytest.raises(ValueError, match=r"use sw.muon\(...\), your own, called: soap\(lr=...\)"):
        build(ANY["soap"])
    with pytest.raises(TypeError, match=r"soap.*beta2"):
        ANY["soap"](lr=0.1, beta2=0.5)
    with pytest.raises(TypeError, match=r"soap.*missing=.*lr"):
        ANY["soap"]()
    with pytest.raises(ValueError, match=r"soap.*lr=-1"):
        ANY["soap"](lr=-1)
    with pytest.raises(TypeError, match=r"a matrix optimizer takes \(gradient, state, \*, lr"):
        sw.matrix_optimizer(lambda gradient, lr: gradient)
    with pytest.raises(ValueError, match="bias"):
        sw.route(model, matrix="layers.0.up.bias")
