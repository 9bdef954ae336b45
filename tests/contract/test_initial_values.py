# SPDX-License-Identifier: Apache-2.0
"""Ranks that initialised their models differently."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import comm, lockstep
from tests.contract.helpers import (
    STRATEGIES,
    Net,
    full,
    options_for,
    raised,
    ranks_for,
    word_loss,
    words,
    wrap,
)
from tests.ranks import run_ranks


class Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def wrapped_with_seed(
    rank: int, world_size: int, strategy: str, alike: bool
) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0 if alike else rank)
    net = Net()
    for module in (net.blocks[1].up, net):  # random features, and a mask
        module.register_buffer("features", torch.randn(3, 2, dtype=torch.complex64))
        module.register_buffer("mask", torch.rand(7) > 0.5, persistent=False)
    with torch.no_grad():  # one parameter agrees everywhere
        net.head.bias.fill_(0.5)
    own = {n: v.detach().clone() for n, v in (*net.named_parameters(), *net.named_buffers())}
    notes = Notes()
    logger = logging.getLogger("shardwise")
    logger.addHandler(notes)
    try:
        wrap(net, world_size, strategy)
        values = {name: full(value).clone() for name, value in net.named_parameters()}
        values |= {name: value.clone() for name, value in net.named_buffers()}
        with torch.no_grad():
            output = net(words(0))
        word_loss(net, rank).backward()
    finally:
        logger.removeHandler(notes)
    return notes.messages, own, values, output


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_ranks_values_are_taken_with_a_warning(strategy: str) -> None:
    results = run_ranks(wrapped_with_seed, ranks_for(strategy), strategy, False)
    truth = results[0][1]
    assert len(truth) > 10
    assert not torch.equal(results[1][1]["embedding.weight"], truth["embedding.weight"])
    for _, _, values, output in results:
        for name, value in values.items():
            assert torch.equal(value, truth[name]), name
        assert torch.equal(output, results[0][3])
    # The first rank of an axis speaks: of two axes, a pair that differs may not hold rank 0.
    told = [len(messages) for messages, *_ in results]
    assert told == ([1, 0] if len(results) == 2 else [1, 1, 1, 0])
    assert "differently" in results[0][0][0] and "norm.weight" not in results[0][0][0]


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
def test_equal_values_need_no_warning(strategy: str) -> None:
    for messages, own, values, _ in run_ranks(
        wrapped_with_seed, ranks_for(strategy), strategy, True
    ):
        assert messages == []
        assert values and all(torch.equal(value, own[name]) for name, value in values.items())


def exchanges_of_wrapping(
    rank: int, world_size: int, strategy: str, apart: int | None
) -> tuple[int, list[list[float]]]:
    """How often ranks ask each other while one module is wrapped, and its values then."""
    torch.manual_seed(rank == apart)
    linear, asked = nn.Linear(5, 3), []

    def counted(values: Any, group: Any, agree: Any = comm.agree) -> Any:
        asked.append(group)
        return agree(values, group)

    with mock.patch.object(comm, "agree", counted):
        sw.fully_shard(linear, **options_for(strategy, world_size))
    return len(asked), [
        parameter.full_tensor().flatten().tolist() for parameter in (linear.parameters())
    ]


@pytest.mark.parametrize(("strategy", "axes"), [("zero3", 1), ("hfsdp", 2)])
def test_one_exchange_over_each_axis_wraps_a_module(strategy: str, axes: int) -> None:
    last = ranks_for(strategy) - 1
    alike = run_ranks(exchanges_of_wrapping, last + 1, strategy, None)
    assert [asked for asked, _ in alike] == [axes] * (last + 1)
    # The first rank shares no axis of hfsdp with the last: it hears of it through the others.
    apart = run_ranks(exchanges_of_wrapping, last + 1, strategy, last)
    assert [asked for asked, _ in apart] == [2 * axes] * (last + 1)
    assert all(values == alike[0][1] for _, values in apart)


def permuted(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The same numbers in another order have the same sum, and are not the same."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.head.weight.copy_(net.head.weight.roll(rank, 0))
        net.head.bias.copy_(net.head.bias.roll(rank, 0))
    wrap(net, world_size)
    return {name: full(value).clone() for name, value in net.named_parameters()} | {
        "own": net.head.weight.full_tensor()
    }


def test_values_that_differ_only_in_their_order_are_noticed() -> None:
    torch.manual_seed(0)
    truth = dict(Net().named_parameters())
    for values in run_ranks(permuted, 2):
        for name in ("head.weight", "head.bias"):
            assert torch.equal(values[name], truth[name].detach()), name


def random_writes(rank: int, world_size: int, strategy: str) -> list[list[float]]:
    net = wrap(Net(), world_size, strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    word_loss(net, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.manual_seed(50 + rank)
    nn.init.normal_(net.head.weight)
    with torch.no_grad():
        net.blocks[0].up.weight.add_(torch.randn_like(net.blocks[0].up.weight))
    torch.manual_seed(7)  # the same on all ranks: as one process draws
    nn.init.uniform_(net.head.bias)
    torch.manual_seed(7)
    assert torch.equal(net.head.bias.full_tensor(), torch.empty(len(net.head.bias)).uniform_())
    word_loss(net, rank, 1).backward()
    optimizer.step()
    return [parameter.full_tensor().flatten().tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_writes_leave_replicas_the_same_whatever_their_seeds(strategy: str) -> None:
    first, *others = run_ranks(random_writes, ranks_for(strategy), strategy)
    assert len(first) > 10 and others and all(other == first for other in others)


def random_on_one_rank(rank: int, world_size: int, strategy: str) -> str:
    lockstep.patience = 0.4
    net = wrap(Net(), world_size, strategy)
    word_loss(net, rank).backward()
    if rank == 0:
        return raised(lambda: nn.init.normal_(net.head.weight), RuntimeError)
    return raised(lambda: word_loss(net, rank).backward(), RuntimeError)


def test_a_random_write_on_one_rank_alone_is_named() -> None:
    for message in run_ranks(random_on_one_rank, 2, "zero0", fresh=True):
        assert "out of step" in message and "random" in message, message
