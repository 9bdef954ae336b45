# SPDX-License-Identifier: Apache-2.0
"""Ranks that initialised their models differently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contract.helpers import (
    STRATEGIES,
    Net,
    full,
    ranks_for,
    word_loss,
    wrap,
)
from tests.ranks import run_ranks


def with_own_seed(rank: int, world_size: int, strategy: str) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(rank)
    net = Net()
    own = {name: value.detach().clone() for name, value in net.named_parameters()}
    wrap(net, world_size, strategy)
    return [own, {name: full(value).clone() for name, value in net.named_parameters()}]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_begin_with_the_values_of_the_first(strategy: str) -> None:
    """Sharded main weights have no copies: each rank brings its piece, as in FSDP2."""
    (own, first), *others = run_ranks(with_own_seed, ranks_for(strategy), strategy)
    assert not torch.equal(own["embedding.weight"], others[0][0]["embedding.weight"])
    for _, values in others:
        assert all(torch.equal(value, first[name]) for name, value in values.items())
    if strategy == "zero0":
        assert all(torch.equal(value, first[name]) for name, value in own.items())


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
