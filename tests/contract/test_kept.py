# SPDX-License-Identifier: Apache-2.0
"""Memory that autograd alone keeps is given back; gradients that were dropped keep their values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.shard.module import unit_of
from tests.contract.helpers import (
    WIDTH,
    Net,
    assert_gradients_equal,
    average_gradients,
    options_for,
    pair,
    vector_loss,
    vectors,
    word_loss,
)
from tests.contract.helpers import wrap as wrap_net
from tests.ranks import on_ranks


class Keeping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Turning(Keeping):
    """Autograd saves a view of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


def wrap(net: nn.Sequential, strategy: str, world_size: int, **options: Any) -> list[Any]:
    """The blocks of the whole weights of each layer."""
    options = options_for(strategy, world_size) | options
    wrapped = [sw.fully_shard(one, **options) for one in (*net, net)]
    return [unit_of(one).groups[0].whole.block for one in wrapped[:-1]]  # type: ignore[union-attr]


class Product(torch.autograd.Function):
    """A kernel that keeps what it needs as attributes, past save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.turned, ctx.more = weight.detach().t(), {"rows": [weight.detach()[:3], (weight[1:],)]}
        ctx.save_for_backward(x)
        return x @ weight.detach().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        rows = ctx.more["rows"]
        assert torch.equal(ctx.turned.t()[:3], rows[0]) and torch.equal(
            ctx.turned.t()[1:], rows[1][0]
        )
        return grad @ ctx.turned.t(), grad.t() @ x


class ByKernel(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias  # type: ignore[no-any-return,no-untyped-call]


class Recomputed(Turning):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


HOOKS = {
    "none": nullcontext,
    "kept": lambda: graph.saved_tensors_hooks(lambda x: (x,), lambda packed: packed[0]),
    "copied": lambda: graph.saved_tensors_hooks(torch.clone, lambda packed: packed),
    "on the host": graph.save_on_cpu,
}


@pytest.mark.parametrize("hooks", HOOKS)
@on_ranks(2)
def test_what_autograd_keeps_is_given_back(rank: int, world_size: int, hooks: str) -> None:
    """Also under hooks for saved tensors, as those that offload activations set."""
    kinds = (Keeping, Turning, ByKernel, Recomputed)
    net, plain = pair(lambda: nn.Sequential(*(kind() for kind in kinds)))
    blocks = wrap(net, "zero3", world_size)
    for step in range(3):
        before = [block.storage for block in blocks]
        with HOOKS[hooks]():
            loss = vector_loss(net, rank, step)
        assert all(block.storage is old for block, old in zip(blocks, before, strict=True))
        assert not any(block.live or block.storage.nbytes() for block in blocks)
        loss.backward()
        assert not any(block.live or block.storage.nbytes() for block in blocks)
        average_gradients(plain, partial(vector_loss, step=step), world_size)
        assert_gradients_equal(net, plain)
        net.zero_grad(), plain.zero_grad()


@on_ranks(2)
def test_inputs_written_between_forwards_are_read_anew(rank: int, world_size: int) -> None:
    """Also by ways that no version tells of: no codes of an activation outlive a forward."""
    net = nn.Linear(128, 128, bias=False)
    precision = sw.Precision(weights="fp8_block")
    sw.fully_shard(net, **options_for("zero3", world_size), precision=precision)
    x = vectors(rank, 0, 128).bfloat16()
    with torch.no_grad():
        for _ in range(2):
            net(x)
            x.data.copy_(vectors(rank, 1, 128))
            assert torch.equal(net(x), net(x.clone()))


# ------------------------------------------------------------------------------ at rest

AT_REST: dict[str, Callable[[Any, Any], list[Any]]] = {
    "gradients": lambda net, opt: [p.grad for p in net.parameters()],
    "pieces of gradients": lambda net, opt: [p.grad.to_local() for p in net.parameters()],
    "rows of gradients": lambda net, opt: [p.grad.to_local()[:1] for p in net.parameters()],
    "whole gradients": lambda net, opt: [p.grad.full_tensor() for p in net.parameters()],
}
ALIVE: dict[str, Callable[[Any, Any], list[Any]]] = {
    "pieces of weights": lambda net, opt: [p.to_local() for p in net.parameters()],
    "a state dict": lambda net, opt: list(net.state_dict().values()),
    "states": lambda net, opt: [
        one for state in opt.state.values() for one in state.values() if isinstance(one, Tensor)
    ],
}


@pytest.mark.parametrize("matrix", [None, sw.muon(lr=0.02)], ids=["adamw", "muon"])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "data_parallel"])
@on_ranks(2)
def test_what_is_at_rest(rank: int, world_size: int, strategy: str, matrix: Any) -> None:
    """Gradients stay what they were when they were dropped; weights and states are today's, and
    what ``.to()`` has left behind stays too."""
    net = wrap_net(Net(), world_size, strategy)
    opt = sw.optimizer(net, matrix=matrix, elementwise=sw.adamw(lr=1e-3))
    dropped: list[tuple[Any, Tensor]] = []
    alive: list[tuple[str, list[Any]]] = []
    for step in range(3):
        word_loss(net, rank, step).backward()
        for find in AT_REST.values():
            dropped += [(one, local(one).clone()) for one in find(net, opt)]
        opt.step()
        opt.zero_grad()
        alive += [(name, find(net, opt)) for name, find in ALIVE.items()]
        assert all(torch.equal(local(one), then) for one, then in dropped), f"step {step}"
        for name, kept in alive:
            pairs = zip(kept, ALIVE[name](net, opt), strict=True)
            assert all(torch.equal(local(one), local(now)) for one, now in pairs), f"{name}, {step}"
    pieces = alive[0][1]
    then = [one.clone() for one in pieces]
    net.to(torch.float64)
    word_loss(net, rank)
    assert all(map(torch.equal, pieces, then))
    assert all(torch.equal(local(one), then) for one, then in dropped)


def local(one: Any) -> Tensor:
    return one.to_local() if hasattr(one, "to_local") else one  # type: ignore[no-any-return]
