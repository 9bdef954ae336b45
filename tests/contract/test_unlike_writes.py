# SPDX-License-Identifier: Apache-2.0
"""Weights and gradients that ranks write differently: every rank raises in the next backward."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.contract.helpers import (
    Net,
    assert_parameters_equal,
    average_gradients,
    pair,
    raised,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks

Write = Callable[[Any, list[Any], int], Any]  # of the model, its parameters and the rank


def on_one_rank(net: Any, parameters: list[Any], rank: int) -> None:
    for one in parameters if rank == 0 else ():
        one.data.mul_(0.5)


def one_gradient(net: Any, parameters: list[Any], rank: int) -> None:
    if rank == 0:
        net.head.weight.grad.zero_()


def own_values(net: Any, parameters: list[Any], rank: int) -> None:
    torch.manual_seed(rank)
    for one in parameters:
        one.data.copy_(torch.randn(one.shape))


def own_gradients(net: Any, parameters: list[Any], rank: int) -> None:
    torch.manual_seed(rank)
    for one in parameters:
        one.grad = torch.randn(one.shape)


def other_gradients(net: Any, parameters: list[Any], rank: int) -> None:
    for one in parameters:
        one.grad = one.grad / (1 + rank)


def other_copies(net: Any, parameters: list[Any], rank: int) -> None:
    for one in parameters:
        copy = one.grad.clone()
        copy.div_(1 + rank)
        one.grad = copy.detach()


def own_elements(net: Any, parameters: list[Any], rank: int) -> None:
    with torch.no_grad():
        net.head.weight[1] = float(rank)


WRITES: dict[str, tuple[Write, str]] = {
    "on one rank": (on_one_rank, "rank 0 ran aten.mul_.Tensor on 'embedding.weight' with 0.5"),
    "a gradient on one rank": (one_gradient, "ran aten.zero_.default on 'head.weight'"),
    "gradients by other numbers": (
        lambda _, ps, rank: [p.grad.mul_(1.0 + rank) for p in ps],
        "'embedding.weight' with 1 and rank 1 ran aten.mul_.Tensor on 'embedding.weight' with 2",
    ),
    "gradients by other tensors": (
        lambda _, ps, rank: [p.grad.mul_(torch.tensor(1.0 + rank)) for p in ps],
        "'embedding.weight' with 1 and",
    ),
    "lists of gradients": (
        lambda _, ps, rank: torch._foreach_mul_([p.grad for p in ps], 1.0 + rank),
        "more with 1 and rank 1",
    ),
    "weights by another factor": (
        lambda _, ps, rank: [p.data.add_(torch.ones_like(p), alpha=1.0 + rank) for p in ps],
        "with 1 and rank 1",
    ),
    "clipped by another norm": (
        lambda _, ps, rank: nn.utils.clip_grad_norm_(ps, 0.01 * (1 + rank)),
        "ran aten._foreach_mul_",
    ),
    "initialised otherwise": (
        lambda net, _, rank: nn.init.normal_(net.head.weight, std=0.1 * (1 + rank)),
        "with 0, 0.1 and rank 1 ran aten.normal_.default on 'head.weight' with 0, 0.2",
    ),
    "own values": (own_values, "ran aten.copy_.default on 'embedding.weight' with values"),
    "own gradients": (own_gradients, "with plain gradients for"),
    "gradients set anew": (other_gradients, "the gradient of 'embedding.weight' set to pieces"),
    "copies of gradients": (other_copies, "the gradient of 'embedding.weight' set to pieces"),
    "weights set anew": (
        lambda _, ps, rank: [setattr(p, "data", p.data * (1 + rank)) for p in ps],
        "ran aten.copy_.default on 'embedding.weight' with pieces made with numbers",
    ),
    "lists made of gradients": (
        lambda _, ps, rank: torch._foreach_add_(
            [p.grad for p in ps], torch._foreach_mul([p.grad for p in ps], 1.0 + rank)
        ),
        "ran aten._foreach_add_.List on",
    ),
    "gradients of one number": (
        lambda _, ps, rank: [setattr(p, "grad", torch.full_like(p, 1.0 + rank)) for p in ps],
        "the gradient of 'embedding.weight' set to pieces made with numbers",
    ),
    "own elements": (own_elements, "'head.weight' with 0 and rank 1"),
}


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "data_parallel"])
@on_ranks(2, fresh=True)
def test_writes_that_ranks_do_not_share_are_named(
    rank: int, world_size: int, strategy: str
) -> None:
    net = wrap(Net(), world_size, strategy)
    parameters = list(net.parameters())
    shared: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    sw.save(f"{shared[0]}/begin", net)
    for how, (write, told) in WRITES.items():
        sw.load(f"{shared[0]}/begin", net)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        word_loss(net, rank).backward()
        write(net, parameters, rank)
        optimizer.step()
        optimizer.zero_grad()
        message = raised(lambda: word_loss(net, rank).backward(), RuntimeError)
        assert told in message and "write weights and gradients alike" in message, (how, message)
        net.reset_iter_state()
        message = raised(lambda: sw.save(f"{shared[0]}/apart", net), RuntimeError)
        assert "no longer belong together" in message, (how, message)
    dist.barrier()
    shutil.rmtree(shared[0], ignore_errors=True)


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_writes_that_ranks_share_are_right(rank: int, world_size: int, strategy: str) -> None:
    """By hand, by an optimizer of one's own, and by one of torch that passes empty pieces by."""

    class Passing(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for one in self.param_groups[0]["params"]:
                    if not isinstance(one, sw.ShardedTensor) or one.to_local().numel():
                        one.add_(one.grad, alpha=-0.1)

    net, plain = pair(Net)
    net = wrap(net, world_size, strategy)
    for step in range(3):
        word_loss(net, rank, step).backward()
        average_gradients(plain, partial(word_loss, step=step), world_size)
        for model in (net, plain):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            Passing(model.parameters(), {}).step()
            with torch.no_grad():
                for one in model.parameters():
                    one.sub_(0.1 * one.grad)
                    one.grad = (one.grad * 1.5).clone() / 1.5
                    one.grad.mul_(torch.full(one.shape, 0.5))
                    one.add_(one.grad)
                    one.clamp_(min=torch.linspace(-1, 0, one.numel()).view(one.shape))
                    torch.add(one, torch.linspace(0, 1, one.numel()).view(one.shape), out=one.grad)
            model.zero_grad()
    assert_parameters_equal(net, plain)
