# SPDX-License-Identifier: Apache-2.0
"""Experts are stored one by one: any layout, order of gate and up, and number of ranks reads any
other, optimizer states included, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import CheckpointError, MismatchError, verify
from shardwise.moe import GroupedMLP, convert_gate_up, swiglu
from tests.moe_models import EXPERTS, Way, batch, build, by_expert, optimizer_of
from tests.ranks import run_ranks
from tests.resume.test_anything import Counter

WAYS = {
    "plain": Way(),
    "plain, one by one": Way(weights="indexed", biases="grouped", block=2),
    "two ranks": Way(biases="indexed", block=4, ranks=2, strategy="zero3"),
    "two ranks, ep 2": Way(weights="indexed", biases="indexed", ranks=2, ep=2, strategy="zero3"),
    "four ranks, ep 2": Way(biases="indexed", block=1, ranks=4, ep=2, strategy="zero3"),
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


def test_experts_and_extra_states_that_two_modules_share_come_back(tmp_path: Path) -> None:
    def layers(shared: bool) -> nn.ModuleList:
        first = GroupedMLP(3, 8, 4, activation=swiglu())
        second = first if shared else GroupedMLP(3, 8, 4, activation=swiglu(), gate_up_block=2)
        return nn.ModuleList([first, second])

    saved = layers(True)
    sw.save(tmp_path / "one", saved, torch.optim.AdamW(saved.parameters()))
    assert verify(tmp_path / "one").ok
    for shared in (True, False):
        other = layers(shared)
        sw.load(tmp_path / "one", other, torch.optim.AdamW(other.parameters()))
        for one in other:
            order = one.fc1.gate_up_block
            rows = convert_gate_up(saved[0].fc1.weight, 0, order, 1)
            assert torch.equal(one.fc1.weight, rows) and one.fc1.weight.any()
            assert torch.equal(one.fc2.weight, saved[0].fc2.weight)
    twice = nn.ModuleList([nn.Linear(2, 2), *[Counter(3)] * 2])
    sw.save(tmp_path / "twice", twice)
    twice[1].count = 0
    sw.load(tmp_path / "twice", twice)
    assert twice[2].count == 3
    other.register_parameter("borrowed", saved[0].fc2.weight)
    sw.save(tmp_path / "borrowed", nn.ModuleList([*saved, other]))
    with torch.no_grad():
        saved[0].fc2.weight.zero_()
    sw.load(tmp_path / "borrowed", nn.ModuleList([*saved, other]))
    assert other.borrowed.any()


def test_what_says_nothing_of_gate_and_up_or_has_other_experts_is_refused(tmp_path: Path) -> None:
    def mlp(experts: int = 3, block: int = 0) -> GroupedMLP:
        return GroupedMLP(experts, 8, 4, activation=swiglu(), gate_up_block=block)

    sw.save(tmp_path / "three", mlp())
    with pytest.raises(MismatchError, match=r"'fc1\.weight' has shape \[3, 8, 8\] in it, \[4"):
        sw.load(tmp_path / "three", mlp(4))
    with pytest.raises(MismatchError, match=r"'fc2\.weight' has shape \[3, 8, 4\] in it, \[2"):
        sw.load(tmp_path / "three", mlp(2))
    silent = mlp()
    silent.fc1.__class__ = type(silent.fc2)  # a linear that does not say in which order they stand
    sw.save(tmp_path / "silent", silent)
    with pytest.raises(MismatchError, match=r"missing from it: 'fc1\._extra_state'"):
        sw.load(tmp_path / "silent", mlp(block=2))


def test_states_that_no_expert_or_no_row_can_be_found_in_are_refused(tmp_path: Path) -> None:
    def made(block: int = 0, layout: Any = "grouped", bias: bool = False) -> tuple[Any, Any]:
        mlp = GroupedMLP(
            2, 8, 4, activation=swiglu(), gate_up_block=block, weight_layout=layout, bias=bias
        )
        return mlp, torch.optim.Adafactor(mlp.parameters())

    def step(mlp: Any, optimizer: Any) -> tuple[Any, Any]:
        rows, ends = torch.randn(4, 8), torch.tensor([2, 4], dtype=torch.int32)
        mlp(rows, ends, torch.ones(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return mlp, optimizer

    sw.save(tmp_path / "factored", *step(*made()))
    sw.load(tmp_path / "factored", *made(layout="indexed"))
    with pytest.raises(
        MismatchError, match=r"fc1.weight.col_var' has not the shape of its parameter"
    ):
        sw.load(tmp_path / "factored", *made(block=2))
    with pytest.raises(
        CheckpointError, match=r"fc1.bias.col_var' of shape \[1, 8\] has no part for eac"
    ):
        sw.save(tmp_path / "biases", *step(*made(bias=True)))
    mlp, _ = made(layout="indexed")
    some = torch.optim.AdamW([p for n, p in mlp.named_parameters() if n != "fc2.weight1"])
    sw.save(tmp_path / "some", *step(mlp, some))
    whole, _ = made()
    with pytest.raises(MismatchError, match=r"'fc2.weight': only some of its experts have it"):
        sw.load(tmp_path / "some", whole, torch.optim.AdamW(whole.parameters()))
    mlp, _ = made(layout="indexed")
    late = torch.optim.AdamW(mlp.parameters())
    for frozen in (True, False):
        mlp.fc1.weight1.requires_grad_(not frozen)
        step(mlp, late)
    sw.save(tmp_path / "late", mlp, late)
    again, _ = made(layout="indexed")
    sw.load(tmp_path / "late", again, torch.optim.AdamW(again.parameters()))
    whole, _ = made()
    with pytest.raises(MismatchError, match=r"fc1.weight.step' of the experts .*\[1.0, 2.0\]"):
        sw.load(tmp_path / "late", whole, torch.optim.AdamW(whole.parameters()))


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
