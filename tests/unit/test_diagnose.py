# SPDX-License-Identifier: Apache-2.0
"""Broken numbers are found with names and ranks; norms are global; the dump says what is where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core.streams import annotate
from tests.ranks import on_ranks, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 64)  # large enough for every rank to hold rows of it
        self.second = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def wrapped(strategy: str, world_size: int) -> Net:
    torch.manual_seed(3)
    net = Net()
    if strategy == "hsdp":
        mesh, placements = sw.init_mesh(dp_outer=2, device_type="cpu"), sw.hsdp()
    else:
        mesh, placements = sw.init_mesh(device_type="cpu"), sw.zero(int(strategy[-1]))
    sw.fully_shard(net.first, mesh=mesh, placements=placements)
    sw.fully_shard(net, mesh=mesh, placements=placements)
    return net


def poisoned(rank: int, world_size: int, strategy: str) -> list[str]:
    net = wrapped(strategy, world_size)
    net(torch.ones(2, 6)).sum().backward()
    assert sw.find_nonfinite(net) == []
    weight = net.first.weight.to_local()
    if rank == world_size - 1 and weight.numel():
        with torch.no_grad():
            weight.view(-1)[0] = float("nan")
    grad = net.second.weight.grad.to_local()
    if grad.numel():
        grad.view(-1)[:2] = float("inf")
    return [str(found) for found in sw.find_nonfinite(net)]


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hsdp"])
def test_nan_and_inf_are_named_with_their_ranks_on_every_rank(strategy: str) -> None:
    found = run_ranks(poisoned, 4 if strategy == "hsdp" else 2, strategy)
    assert all(report == found[0] for report in found)
    assert any("parameter 'first.weight'" in line and "1 NaN" in line for line in found[0])
    assert any("gradient 'second.weight'" in line and "2 infinite" in line for line in found[0])
    last = "(1, 1)" if strategy == "hsdp" else "(1,)"
    assert [line for line in found[0] if "first.weight" in line and last in line]


def norms(rank: int, world_size: int, strategy: str) -> None:
    net = wrapped(strategy, world_size)
    before = sw.parameter_norms(net)
    assert all(grad is None for _, grad in before.values()) and len(before) == 4
    net(torch.ones(2, 6)).sum().backward()
    for name, (weight, grad) in sw.parameter_norms(net).items():
        parameter = net.get_parameter(name)
        assert weight == pytest.approx(parameter.full_tensor().norm().item(), rel=1e-5)
        assert grad == pytest.approx(parameter.grad.full_tensor().norm().item(), rel=1e-5)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hsdp"])
def test_norms_are_those_of_whole_tensors(strategy: str) -> None:
    run_ranks(norms, 4 if strategy == "hsdp" else 3, strategy)


@on_ranks(2)
def test_the_dump_names_units_parameters_and_shards(rank: int, world_size: int) -> None:
    text = sw.describe(wrapped("zero3", world_size))
    for word in ("unit", "first.weight [64, 6]", "second.bias [3]", "padding", "2 shards"):
        assert word in text, text


def test_labels_reach_the_profiler_and_cost_nothing_without_one() -> None:
    assert type(annotate("unit", "quiet")).__name__ == "nullcontext"
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        annotate("unit", "loud"),
    ):
        torch.ones(2) + 1
    assert any(event.key == "unit: loud" for event in profile.key_averages())


def full_states(rank: int, world_size: int) -> int:
    net = wrapped("zero3", world_size)
    whole = sw.full_state_dict(net)
    assert whole.keys() == dict(net.named_parameters()).keys() and len(whole) == 4
    for name, value in whole.items():
        assert torch.equal(value, net.get_parameter(name).full_tensor())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    sw.load_full_state_dict(net, whole)
    for name, value in whole.items():
        assert torch.equal(value, net.get_parameter(name).full_tensor())
    return len(sw.full_state_dict(net, only_first_rank=True))


def test_full_state_dicts_go_out_and_in() -> None:
    assert run_ranks(full_states, 3) == [4, 0, 0]
