# SPDX-License-Identifier: Apache-2.0
"""An optimizer built before wrapping would update nothing: its step is refused."""

from __future__ import annotations

import pytest
import torch

from tests.contract.helpers import Net, raised, word_loss, words, wrap
from tests.ranks import on_ranks


@pytest.mark.parametrize("some", [False, True])
@on_ranks(2)
def test_an_optimizer_built_before_wrapping_is_refused(
    rank: int, world_size: int, some: bool
) -> None:
    """Catching the error and going on does not make the optimizer right."""
    net = Net()
    optimizer = torch.optim.AdamW((net.blocks[1] if some else net).parameters(), lr=0.1)
    if not some:
        net(words(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wrap(net, world_size)
    for _ in range(2):
        word_loss(net, rank).backward()
        message = raised(optimizer.step, RuntimeError)
        assert "AdamW" in message and "before wrapping" in message and ".weight'" in message


@on_ranks(2)
def test_other_optimizers_do_not_matter(rank: int, world_size: int) -> None:
    net, other = Net(), Net()
    stranger = torch.optim.AdamW(other.parameters(), lr=0.1)
    gone = torch.optim.AdamW(net.parameters(), lr=0.1)
    del gone
    wrap(net, world_size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    before = net.head.bias.full_tensor()
    word_loss(net, rank).backward()
    optimizer.step()
    assert not torch.equal(net.head.bias.full_tensor(), before)
    assert stranger.param_groups


@on_ranks(2)
def test_adafactor_with_lists_is_refused_by_name(rank: int, world_size: int) -> None:
    net = wrap(Net(), world_size)
    optimizer = torch.optim.Adafactor(net.parameters(), foreach=True)
    word_loss(net, rank).backward()
    assert "'embedding.weight'" in raised(optimizer.step, RuntimeError)
    torch.optim.Adafactor(net.parameters()).step()
