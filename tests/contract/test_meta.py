# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device and given their values after wrapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    STRATEGIES,
    Net,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    full,
    options_for,
    raised,
    ranks_for,
    word_loss,
    words,
    wrap,
)
from tests.ranks import run_ranks


def reset_parameters(model: nn.Module) -> None:
    """As frameworks do it: every module that knows how, in order."""
    count = 0
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
            count += 1
    assert count > 4


def meta_net(world_size: int, strategy: str, **more: Any) -> Any:
    with torch.device("meta"):
        net = Net()
    wrap(net, world_size, strategy, **more)
    assert all(parameter.is_meta for parameter in net.parameters())
    return net


def same_as_eager(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3)
    reset_parameters(plain)
    net = meta_net(world_size, strategy)
    net.to_empty(device="cpu")
    torch.manual_seed(3)
    reset_parameters(net)
    assert_parameters_equal(net, plain, tolerance=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        word_loss(net, rank, step).backward()
        average_gradients(plain, lambda m, r, step=step: word_loss(m, r, step), world_size)
        assert_gradients_equal(net, plain)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_made_after_wrapping_are_those_of_an_eager_model(strategy: str) -> None:
    run_ranks(same_as_eager, ranks_for(strategy), strategy)


def other_seeds(rank: int, world_size: int, strategy: str) -> list[torch.Tensor]:
    net = meta_net(world_size, strategy)
    net.to_empty(device="cpu")
    torch.manual_seed(100 + rank)
    reset_parameters(net)
    with torch.no_grad():
        output = net(words(0))
    return [output, *(full(parameter).clone() for parameter in net.parameters())]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seeds_that_differ_between_ranks_give_one_model_all_the_same(strategy: str) -> None:
    first, *others = run_ranks(other_seeds, ranks_for(strategy), strategy)
    assert len(first) > 10 and first[0].abs().max() > 0
    assert first[1].unique().numel() > 100, "the embedding was initialised"
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)


def too_early(rank: int, world_size: int, strategy: str) -> str:
    net = meta_net(world_size, strategy)
    return raised(lambda: net(words(rank)), RuntimeError)


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
def test_a_forward_before_the_values_exist_names_the_parameters(strategy: str) -> None:
    for message in run_ranks(too_early, ranks_for(strategy), strategy):
        assert "meta" in message and "embedding.weight" in message and "to_empty" in message


def load_instead(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(5)
    plain = Net()
    net = meta_net(world_size, strategy)
    net.to_empty(device="cpu")
    net.load_state_dict(plain.state_dict())
    assert_parameters_equal(net, plain, tolerance=0.0)
    word_loss(net, rank).backward()
    average_gradients(plain, word_loss, world_size)
    assert_gradients_equal(net, plain)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
def test_values_may_be_loaded_instead_of_initialised(strategy: str) -> None:
    run_ranks(load_instead, ranks_for(strategy), strategy)


def half(rank: int, world_size: int, strategy: str) -> None:
    """A model moved to another dtype after wrapping, as ``.to()`` allows."""
    torch.manual_seed(5)
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    wrap(net, world_size, strategy)
    net.double()
    plain.double()
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float64}
    assert_parameters_equal(net, plain, tolerance=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        word_loss(net, rank, step).backward()
        average_gradients(plain, lambda m, r, step=step: word_loss(m, r, step), world_size)
        assert assert_gradients_equal(net, plain, 1e-12)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain, 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrapped_model_can_change_its_dtype(strategy: str) -> None:
    run_ranks(half, ranks_for(strategy), strategy)


def moved(rank: int, world_size: int, stage: int) -> Tensor:
    """One row, so that a rank has no elements; then every tensor is made anew."""
    net = nn.Linear(4, 1, bias=False)
    nn.init.ones_(net.weight)
    options = options_for(f"zero{stage}", world_size)
    sw.fully_shard(net, **options, precision=sw.Precision(weights="bf16"))
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        net._apply(lambda tensor: 2 * tensor)
    return net(torch.ones(1, 4)).detach().float()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_without_elements_take_over_new_tensors_too(stage: int) -> None:
    assert [float(each) for each in run_ranks(moved, 2, stage, timeout=30)] == [16.0, 16.0]
