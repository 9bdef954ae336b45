# SPDX-License-Identifier: Apache-2.0
"""An optimizer built before wrapping would update nothing: it is noticed at the first forward."""

from __future__ import annotations

import torch

from tests.contract.helpers import Net, raised, word_loss, words, wrap
from tests.ranks import on_ranks, run_ranks


def built_before(rank: int, world_size: int, which: str) -> str:
    net = Net()
    if which == "some":
        optimizer = torch.optim.SGD(net.blocks[1].parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    wrap(net, world_size)
    message = raised(lambda: net(words(rank)), RuntimeError)
    assert optimizer.param_groups
    return message


def test_an_optimizer_built_before_wrapping_raises_at_the_first_forward() -> None:
    for message in run_ranks(built_before, 2, "all"):
        assert "AdamW" in message and "before" in message and "weight" in message
    for message in run_ranks(built_before, 2, "some"):
        assert "SGD" in message


@on_ranks(2)
def test_the_error_about_an_old_optimizer_stays(rank: int, world_size: int) -> None:
    """Catching the error and going on does not make the optimizer right."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    wrap(net, world_size)
    for _ in range(2):
        assert "before" in raised(lambda: net(words(rank)), RuntimeError)
    assert optimizer.param_groups


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
    assert "build it with foreach=False" in raised(optimizer.step, RuntimeError)
    torch.optim.Adafactor(net.parameters()).step()
