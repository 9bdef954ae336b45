# SPDX-License-Identifier: Apache-2.0
"""Parameters that are registered in several places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    WORDS,
    Block,
    Net,
    assert_at_rest,
    assert_parameters_equal,
    check_backward,
    mesh_for,
    options_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks


class TiedNet(Net):
    """The head reads the embedding's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_weights_tied_inside_a_unit_are_one_parameter(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(TiedNet)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    assert net.head.weight is net.embedding.weight
    names = [name for name, _ in net.named_parameters()]
    assert "embedding.weight" in names and "head.weight" not in names
    assert {"embedding.weight", "head.weight"} <= set(net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        check_backward(net, plain, word_loss, rank, world_size, step)
        assert_at_rest(net, before)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)
    assert net.head.weight is net.embedding.weight


@on_ranks(2)
def test_weights_tied_across_units_are_refused_by_name(rank: int, world_size: int) -> None:
    net = TiedNet()
    mesh = mesh_for("zero", world_size)
    sw.fully_shard(net.embedding, mesh=mesh)
    message = raised(lambda: sw.fully_shard(net, mesh=mesh), ValueError)
    assert type(net) is TiedNet, "the refusal changed nothing"
    assert "head.weight" in message and "tied" in message


@on_ranks(2)
def test_weights_tied_across_a_list_of_modules_work(rank: int, world_size: int) -> None:
    net, plain = pair(TiedNet)
    options = options_for("zero3", world_size)
    sw.fully_shard([net.embedding, net.head], **options)
    wrap(net, world_size)
    before = transient_bytes()
    for step in range(2):
        check_backward(net, plain, word_loss, rank, world_size, step)
        assert_at_rest(net, before)
    assert net.head.weight is net.embedding.weight


class SharedBlock(nn.Module):
    """One module registered under two names, and called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first = Block()
        self.second = self.first
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embedding(x))))


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_a_unit_registered_under_two_names_works(rank: int, world_size: int, strategy: str) -> None:
    net, plain = pair(SharedBlock)
    options = options_for(strategy, world_size)
    sw.fully_shard(net.first, **options)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    assert net.second is net.first
    for step in range(2):
        check_backward(net, plain, word_loss, rank, world_size, step)
        assert_at_rest(net, before)
    assert torch.allclose(net(words(rank)), plain(words(rank)), atol=1e-5)
