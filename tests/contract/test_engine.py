# SPDX-License-Identifier: Apache-2.0
"""The engine called by its own names: a little of everything."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.layout import Layout
from shardwise.shard.codec import Cast
from shardwise.shard.data_parallel import data_parallel
from shardwise.shard.fully_shard import fully_shard
from shardwise.shard.module import units_of
from tests.contract.helpers import (
    STRATEGIES,
    WIDTH,
    Net,
    assert_gradients_equal,
    average_gradients,
    check_backward,
    options_for,
    pair,
    ranks_for,
    vectors,
    word_loss,
)
from tests.ranks import on_ranks


def wrapped(net: Any, world_size: int, strategy: str, **more: Any) -> Any:
    options = options_for(strategy, world_size) | more
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_strategies_train_as_plain_torch_does(rank: int, world_size: int, strategy: str) -> None:
    net, plain = pair(Net)
    wrapped(net, world_size, strategy)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (net, plain)]
    for step in range(3):
        check_backward(net, plain, word_loss, rank, world_size, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2)
def test_buckets_train_as_plain_torch_does(rank: int, world_size: int, overlap: bool) -> None:
    net, plain = pair(Net)
    options = options_for("zero1", world_size)
    data_parallel(net, bucket_mb=0.001, overlap_gather=overlap, **options)
    assert len(net._shardwise_unit.groups) > 2
    for step in range(2):
        check_backward(net, plain, word_loss, rank, world_size, step)


# ------------------------------------------------------------------------------ codecs


class Scaled(Cast):
    """Numbers, and beside them the largest of each shard: two buffers, as codes and scales are."""

    def room(self, layout: Layout) -> Sequence[tuple[torch.dtype, int]]:
        return [(self.dtype, layout.shard_size), (torch.float32, 4)]

    def encode(self, main: Tensor, outs: Sequence[Tensor], layout: Layout, first: int) -> None:
        largest = main.view(outs[1].numel() // 4, -1).abs().amax(1, keepdim=True)
        outs[1].view(-1, 4).copy_(largest.expand(-1, 4))
        outs[0].copy_((main.view(len(largest), -1) / largest).view(-1))

    def view(self, buffers: Sequence[Tensor], layout: Layout, index: int) -> Tensor:
        SEEN.append([tuple(buffer.shape) for buffer in buffers])
        return super().view(buffers, layout, index)

    def is_plain(self, dtype: torch.dtype) -> bool:
        return False


SEEN: list[list[tuple[int, ...]]] = []


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_the_buffers_of_a_codec_are_one_collective(
    rank: int, world_size: int, strategy: str
) -> None:
    net = nn.Linear(8, 16)
    with patch("shardwise.shard.group.Cast", Scaled):
        fully_shard(net, **options_for(strategy, world_size))
    (group,) = net._shardwise_unit.groups  # type: ignore[union-attr]
    plain = nn.Linear(8, 16)
    with torch.no_grad():
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            other.copy_(one.full_tensor())  # type: ignore[attr-defined]
    shards, numel = group.layout.num_shards, group.layout.numel
    assert SEEN[-1] == [(numel,), (4 * shards,)]
    with comm.record() as calls:
        net.unshard()  # type: ignore[operator]
    last = calls[-1]
    assert last.operation == "all_gather" and last.nbytes == 4 * (numel + 4 * shards)
    assert len(calls) == (2 if strategy == "hfsdp" else 1)
    codes, scales = group.whole.tensors
    decoded = (codes.view(shards, -1) * scales.view(shards, 4)[:, :1]).view(-1)
    for index, parameter in enumerate(plain.parameters()):
        start = group.layout.starts[index]
        found = decoded[start : start + parameter.numel()].view(parameter.shape)
        torch.testing.assert_close(found, parameter.detach())


# ------------------------------------------------------------------------------ calls


class Twice(nn.Module):
    """A list of modules of which the first runs twice before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(self.first(x)).tanh())
        return y


@on_ranks(2)
def test_a_list_is_released_when_each_of_its_modules_has_run(rank: int, world_size: int) -> None:
    """Not when as many calls were counted: the weights of the second were gone before it ran."""
    net, plain = pair(Twice)
    options = options_for("zero3", world_size)
    fully_shard([net.first, net.second], **options)
    fully_shard(net, **options)
    with comm.record() as calls:
        net(vectors(rank)).square().mean().backward()
    average_gradients(plain, lambda m, r: m(vectors(r)).square().mean(), world_size)
    assert_gradients_equal(net, plain)
    found = [call.operation for call in calls]
    assert found == ["all_gather"] * 2 + ["reduce_scatter"], found


@on_ranks(2)
def test_gradients_of_inputs_reduce_nothing(rank: int, world_size: int) -> None:
    net, plain = pair(Net)
    wrapped(net, world_size, "zero3")
    net.set_requires_gradient_sync(False)
    word_loss(net, rank, 0).backward()
    average_gradients(plain, word_loss, world_size)
    net.set_requires_gradient_sync(True)
    with comm.record() as calls:
        x = vectors(rank).requires_grad_()
        (found,) = torch.autograd.grad(net.blocks[0](x).sum(), x)
    assert {call.operation for call in calls} == {"all_gather"} and found.shape == x.shape
    assert all(parameter.grad is None for parameter in net.parameters())
    check_backward(net, plain, word_loss, rank, world_size, 1)  # with what has waited


# ------------------------------------------------------------------------------ gradients


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.used(x)
        return y + self.other(x) if both else y


@pytest.mark.parametrize("unused", ["none", "zeros"])
@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_is_loud_or_zero(
    rank: int, world_size: int, unused: str
) -> None:
    net, plain = pair(Choice)
    fully_shard(net, **options_for("zero3", world_size), unused_parameters=unused)
    net(vectors(rank), rank == 0).sum().backward()
    for each in range(world_size):
        (plain(vectors(each), each == 0).sum() / world_size).backward()
    pieces = [p.grad.to_local() for p in net.other.parameters() if p.grad is not None]
    if unused == "zeros":
        for parameter in plain.never.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert_gradients_equal(net, plain)
    else:
        assert len(pieces) == (2 if rank == 0 else 0)
        assert all(piece.isnan().all() for piece in pieces)
        assert all(parameter.grad is None for parameter in net.never.parameters())
        assert all(p.grad.to_local().isfinite().all() for p in net.used.parameters())


# ------------------------------------------------------------------------------ writes and messages


@on_ranks(2)
def test_one_rank_may_use_its_pieces(rank: int, world_size: int) -> None:
    """``to_local()`` is no write, nor what is done to it: counted on one rank, a write would gather
    there alone."""
    net, _ = pair(Net)
    wrapped(net, world_size, "zero1")
    word_loss(net, rank).backward()
    if rank == 0:
        assert all(p.to_local().detach().mul_(1.0).norm() >= 0 for p in net.parameters())
    with comm.record() as calls:
        net(torch.zeros(1, 2, dtype=torch.long))
    assert not calls
    with torch.no_grad():
        net.head.weight.mul_(2)
    with comm.record() as calls:
        net(torch.zeros(1, 2, dtype=torch.long))
    assert [call.operation for call in calls] == ["all_gather"]


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_a_step_sends_what_is_recorded_and_nothing_else(
    rank: int, world_size: int, strategy: str
) -> None:
    net, _ = pair(Net)
    wrapped(net, world_size, strategy)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        word_loss(net, rank).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    sent, isend = [], dist.isend

    def counted(tensor: Tensor, *args: Any) -> Any:
        sent.append(tensor.numel())
        return isend(tensor, *args)

    dist.isend = counted
    try:
        with comm.record() as calls:
            step()
    finally:
        dist.isend = isend
    assert calls and len(sent) == len(calls), (sent, calls)  # one message each, on two ranks


@on_ranks(2)
def test_a_deleted_model_is_gone_at_once(rank: int, world_size: int) -> None:
    net, _ = pair(Net)
    wrapped(net, world_size, "zero1")
    word_loss(net, rank).backward()
    memory = [
        weakref.ref(group.main.flat.untyped_storage()) for u in units_of(net) for group in u.groups
    ]
    assert memory and all(reference() is not None for reference in memory)
    gc.disable()
    try:
        del net
        assert all(reference() is None for reference in memory)
    finally:
        gc.enable()
