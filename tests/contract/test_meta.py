# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device and given their values after wrapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    Net,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    full,
    options_for,
    pair,
    raised,
    ranks_for,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


def reset_parameters(model: nn.Module) -> None:
    """As frameworks do it: every module that knows how, in order."""
    count = 0
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
            count += 1
    assert count > 4


def meta_net(world_size: int, strategy: str, **more: Any) -> Any:
    with torch.device("meta"):  # wrapped inside of it, as torch's own tests do
        net = Net()
        wrap(net, world_size, strategy, **more)
    assert all(parameter.is_meta for parameter in net.parameters())
    return net


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_values_made_after_wrapping_are_those_of_an_eager_model(
    rank: int, world_size: int, strategy: str
) -> None:
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
        check_backward(net, plain, word_loss, rank, world_size, step)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)


def other_seeds(rank: int, world_size: int, strategy: str) -> list[torch.Tensor]:
    net = meta_net(world_size, strategy)
    net.to_empty(device="cpu")
    torch.manual_seed(100 + rank)
    reset_parameters(net)
    with torch.no_grad():
        output = net(words(0))
    return [output, *(full(parameter).clone() for parameter in net.parameters())]


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
def test_seeds_that_differ_between_ranks_give_one_model_all_the_same(strategy: str) -> None:
    first, *others = run_ranks(other_seeds, ranks_for(strategy), strategy)
    assert len(first) > 10 and first[0].abs().max() > 0
    assert first[1].unique().numel() > 100, "the embedding was initialised"
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp", "data_parallel"])
@on_ranks(ranks_for)
def test_a_forward_before_the_values_exist_names_the_parameters(
    rank: int, world_size: int, strategy: str
) -> None:
    net = meta_net(world_size, strategy)
    message = raised(lambda: net(words(rank)), RuntimeError)
    assert "meta" in message and "embedding.weight" in message and "to_empty" in message


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp", "data_parallel"])
@on_ranks(ranks_for)
def test_values_may_be_loaded_instead_of_initialised(
    rank: int, world_size: int, strategy: str
) -> None:
    torch.manual_seed(5)
    plain = Net()
    net = meta_net(world_size, strategy)
    net.to_empty(device="cpu")
    net.load_state_dict(plain.state_dict())
    assert_parameters_equal(net, plain, tolerance=0.0)
    check_backward(net, plain, word_loss, rank, world_size)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_wrapped_model_can_change_its_dtype(rank: int, world_size: int, strategy: str) -> None:
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
        assert check_backward(net, plain, word_loss, rank, world_size, step, tolerance=1e-12)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain, 1e-12)


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
    assert [float(each) for each in run_ranks(moved, 2, stage)] == [16.0, 16.0]


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_module_inside_a_unit_moves_alone(rank: int, world_size: int, strategy: str) -> None:
    """Its parameters leave the flat buffer, which forward gathers: the next one takes them over."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.1))]
    pairs += [(plain, torch.optim.SGD(plain.parameters(), lr=0.1))]
    for step in range(3):
        check_backward(net, plain, word_loss, rank, world_size, step)
        for model, optimizer in pairs:
            inner = model.blocks[0].up
            inner.double()
            inner._apply(lambda tensor: 2 * tensor)
            inner.float()  # with the gradients that the optimizer reads next
            optimizer.step()
            optimizer.zero_grad()
            model.head._apply(lambda tensor: 2 * tensor)
        assert_parameters_equal(net, plain)
    net.head.double()
    message = raised(lambda: net(words(rank)), ValueError)
    assert "'head.weight' to torch.float64" in message and "together" in message


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
@on_ranks(ranks_for)
def test_gradients_move_with_their_parameters(rank: int, world_size: int, strategy: str) -> None:
    """Gradients of microbatches that wait to be reduced move too."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    for step in range(3):
        net.set_is_last_backward(step == 2)
        word_loss(net, rank, step).backward()
        average_gradients(
            plain, lambda model, each, step=step: word_loss(model, each, step), world_size
        )
        for model in (net, plain):
            model.double() if step % 2 == 0 else model.float()
    assert assert_gradients_equal(net, plain) > 10


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_modules_may_be_materialised_one_by_one(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3)
    reset_parameters(plain)
    net = meta_net(world_size, strategy)
    torch.manual_seed(3)
    for module in net.modules():
        module.to_empty(device="cpu", recurse=False)
        if module is net.blocks[0].up:
            assert "head.weight" in raised(lambda: net(words(rank)), RuntimeError)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_parameters_equal(net, plain, tolerance=0.0)
    check_backward(net, plain, word_loss, rank, world_size)
