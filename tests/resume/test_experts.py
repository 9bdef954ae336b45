# SPDX-License-Identifier: Apache-2.0
"""Experts are stored as one tensor: any layout and number of ranks reads any other, optimizer
states included, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import CheckpointError, MismatchError, verify
from shardwise.moe import GroupedMLP, swiglu
from tests.moe_models import EXPERTS, Way, batch, build, by_expert, optimizer_of
from tests.ranks import run_ranks
from tests.resume.test_anything import Counter

WAYS = {
    "plain": Way(block=2),
    "plain, one by one": Way(weights="indexed", block=2),
    "two ranks, biases one by one": Way(biases="indexed", block=2, ranks=2, strategy="zero3"),
    "two ranks, ep 2": Way(weights="indexed", block=2, ranks=2, ep=2, strategy="zero3"),
    "four ranks, ep 2": Way(block=2, ranks=4, ep=2, strategy="zero3"),
}
Values = dict[str, Tensor]


def trained(rank: int, way: Way) -> tuple[Any, Any]:
    net = build(way)
    optimizer = optimizer_of(net)
    for step in range(2):
        net(batch(step, rank, way.ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def save(rank: int, world_size: int, way: Way, path: str) -> Values:
    net, optimizer = trained(rank, way)
    sw.save(path, net, optimizer, {"step": 2})
    return by_expert(net, optimizer)


def load(rank: int, world_size: int, way: Way, paths: list[str]) -> list[Values]:
    net, optimizer = build(way), None
    optimizer = optimizer_of(net)
    found = []
    for path in paths:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert sw.load(path, net, optimizer) == {"step": 2}
        found.append(by_expert(net, optimizer))
        net(batch(5, rank, way.ranks)).backward()  # what forward reads is what was loaded
        optimizer.step()
        optimizer.zero_grad()
    return found


def on_ranks(call: Any, way: Way, argument: Any) -> list[Any]:
    if way.strategy == "plain":
        return [call(0, 1, way, argument)]
    return run_ranks(call, way.ranks, way, argument)


def test_any_way_of_holding_experts_reads_any_other(tmp_path: Path) -> None:
    paths, saved = [], []
    for number, way in enumerate(WAYS.values()):
        paths.append(str(tmp_path / str(number)))
        parts = on_ranks(save, way, paths[-1])
        saved.append({name: value for part in parts for name, value in part.items()})
        report = verify(paths[-1])
        assert report.ok, str(report)
    # Of each expert 2 matrices and 2 biases, 5 other parameters; a matrix has 1 state, others 3.
    assert {len(values) for values in saved} == {4 * (2 * 2 + 2 * 4) + 3 * 2 + 2 * 4}
    for way in WAYS.values():
        for found in on_ranks(load, way, paths):
            for values, expected in zip(found, saved, strict=True):
                assert set(values) <= set(expected) and len(values) > 30
                assert (len(values) == len(expected)) == (way.ep == 1)
                for name, value in values.items():
                    assert torch.equal(value, expected[name]), (way, name)


def mlp(block: int = 0, layout: Any = "grouped", experts: int = 3, **options: Any) -> GroupedMLP:
    options |= {"gate_up_block": block, "weight_layout": layout}
    return GroupedMLP(experts, 8, 4, activation=swiglu(), **options)


def test_modules_that_stand_there_twice_come_back(tmp_path: Path) -> None:
    one, layer = mlp(), nn.Linear(2, 2)
    twice = nn.ModuleList([one, one, layer, *[Counter(3)] * 2])
    twice.register_parameter("borrowed", one.fc2.weight)
    expected = {name: value.clone() for name, value in twice.named_parameters()}
    sw.save(tmp_path / "one", twice, torch.optim.AdamW(twice.parameters()))
    assert verify(tmp_path / "one").ok and len(expected) > 3
    with torch.no_grad():
        for value in twice.parameters():
            value.zero_()
    twice[3].count = 0
    sw.load(tmp_path / "one", twice, torch.optim.AdamW(twice.parameters()))
    assert all(torch.equal(value, expected[name]) for name, value in twice.named_parameters())
    assert twice[4].count == 3
    apart = nn.ModuleList([one, mlp(), layer, *[Counter(1)] * 2])
    apart.register_parameter("borrowed", one.fc2.weight)
    sw.load(tmp_path / "one", apart)
    assert torch.equal(apart[1].fc1.weight, one.fc1.weight) and one.fc1.weight.any()


def step(model: GroupedMLP, optimizer: Any) -> tuple[Any, Any]:
    rows, ends = torch.randn(6, 8), torch.tensor([2, 4, 6], dtype=torch.int32)
    model(rows, ends, torch.ones(6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_what_does_not_fit_other_experts_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "three", mlp())
    for experts in (2, 4):
        with pytest.raises(MismatchError, match=r"'fc1\.weight' has shape \[3, 8, 8\] in it"):
            sw.load(tmp_path / "three", mlp(experts=experts))
    for strict in (True, False):  # gate and up in another order, also where weights alone are read
        other = mlp(block=2)
        before = other.fc1.weight.clone()
        with pytest.raises(MismatchError, match=r"gate_up_block=0"):
            sw.load(tmp_path / "three", other, strict=strict)
        assert torch.equal(other.fc1.weight, before)
    made = mlp()
    sw.save(tmp_path / "factored", *step(made, torch.optim.Adafactor(made.parameters())))
    made = mlp(layout="indexed")
    sw.load(tmp_path / "factored", made, torch.optim.Adafactor(made.parameters()))
    made = mlp(bias=True)
    with pytest.raises(CheckpointError, match=r"fc1.bias.col_var' .* has no part for each of 3"):
        sw.save(tmp_path / "biases", *step(made, torch.optim.Adafactor(made.parameters())))
    made = mlp(layout="indexed")
    late = torch.optim.AdamW(made.parameters())
    for frozen in (True, False):
        made.fc1.weight1.requires_grad_(not frozen)
        step(made, late)
    with pytest.raises(CheckpointError, match=r"'step' of .* 'fc1.weight2' is 2.0|'fc1.weight1'"):
        sw.save(tmp_path / "late", made, late)


def load_whole(rank: int, world_size: int, way: Way, state: dict[str, Any]) -> Values:
    net = build(way)
    net.moe.experts.load_state_dict(state)
    return by_expert(net, None)


def test_a_whole_state_dict_loads_into_spread_experts() -> None:
    """Each rank takes its own from all experts, in any layout and order."""
    source = build(Way(weights="indexed", block=2))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(3)
    expected = by_expert(source, None)
    way = WAYS["two ranks, ep 2"]
    parts = run_ranks(load_whole, 2, way, source.moe.experts.state_dict())
    seen = 0
    for part in parts:
        for name, value in part.items():
            if ".experts." in name:
                seen += 1
                assert torch.equal(value, expected[name]), name
    assert seen == 4 * EXPERTS
