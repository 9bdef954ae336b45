# SPDX-License-Identifier: Apache-2.0
"""Parameters that a backward does not reach, on all ranks or on some."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.comm import Call
from shardwise.moe import GroupedMLP, swiglu
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    STRATEGIES,
    WIDTH,
    Block,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    full,
    options_for,
    pair,
    ranks_for,
    transient_bytes,
    vector_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


class Choice(nn.Module):
    """Experts inside a unit: a call uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.chosen: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.chosen:
            x = x + self.experts[number](x)
        return x


class ChoiceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Choice(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


def reference_grads(plain: Any, world_size: int, chosen: dict[int, tuple[int, ...]]) -> None:
    """The average over ranks, where what a rank did not use counts as zeros."""
    for rank in range(world_size):
        plain.blocks[1].chosen = chosen[rank]
        (vector_loss(plain, rank) / world_size).backward()


def with_zeros(
    rank: int, world_size: int, strategy: str, chosen: dict[int, tuple[int, ...]], by_method: bool
) -> None:
    net, plain = pair(ChoiceNet)
    if by_method:
        wrap(net, world_size, strategy)
        net.set_reduce_scatter_unused_params(True)
    else:
        wrap(net, world_size, strategy, unused_parameters="zeros")
    before = transient_bytes()
    net.blocks[1].chosen = chosen[rank]
    for _ in range(2):
        vector_loss(net, rank).backward()
        reference_grads(plain, world_size, chosen)
        compared = 0
        for name, parameter in plain.named_parameters():
            grad = net.get_parameter(name).grad
            # Zeros are a gradient: the optimizer sees the same on every rank.
            assert grad is not None, name
            wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            assert_close(full(grad), wanted, name)
            compared += 1
        assert compared == 20
        assert_at_rest(net, before)
        net.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "by_method"),
    [(strategy, strategy in ("zero1", "hfsdp")) for strategy in STRATEGIES] + [("zero3", True)],
)
def test_unused_parameters_count_as_zeros_where_told(strategy: str, by_method: bool) -> None:
    world_size = ranks_for(strategy)
    run_ranks(with_zeros, world_size, strategy, dict.fromkeys(range(world_size), (0, 2)), by_method)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_used_on_some_ranks_only_average_with_zeros(strategy: str) -> None:
    chosen = {0: (0, 1), 1: (1,), 2: (2,), 3: (0, 1, 2)}
    run_ranks(with_zeros, ranks_for(strategy), strategy, chosen, False)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_unit_that_ran_on_all_ranks_but_used_its_parameters_on_one(
    rank: int, world_size: int, strategy: str
) -> None:
    """One rank's loss does not depend on the parameters of a unit at all."""
    net, plain = pair(ChoiceNet)
    wrap(net, world_size, strategy, unused_parameters="zeros")
    before = transient_bytes()

    def loss(model: Any, which: int) -> Tensor:
        model.blocks[1].chosen = (0, 1, 2) if which == 0 else ()
        return vector_loss(model, which)

    for _ in range(2):
        loss(net, rank).backward()
        for which in range(world_size):
            (loss(plain, which) / world_size).backward()
        for name, parameter in plain.named_parameters():
            assert_close(full(net.get_parameter(name).grad), parameter.grad, name)
        assert_at_rest(net, before)
        net.zero_grad()
        plain.zero_grad()


def _hear(heard: list[str], name: str, parameter: Tensor) -> None:
    heard.append(name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_a_parameter_that_no_rank_used_has_no_gradient(
    rank: int, world_size: int, strategy: str
) -> None:
    """By default, as in plain torch; also where some of its step's microbatches used it."""
    net, plain = pair(ChoiceNet)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for microbatches in ([(0, 2)], [(0, 1), (2, 0)], [(2,), (0, 1), (0,)], [()]):
        heard: list[str] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_hear, heard, name))
            for name, parameter in net.named_parameters()
        ]
        for number, chosen in enumerate(microbatches):
            net.set_is_last_backward(number == len(microbatches) - 1)
            net.blocks[1].chosen = chosen
            vector_loss(net, rank).backward()
            reference_grads(plain, world_size, dict.fromkeys(range(world_size), chosen))
        with_gradient = {name for name, one in plain.named_parameters() if one.grad is not None}
        assert len(with_gradient) == 14 + 2 * len({one for some in microbatches for one in some})
        assert {n for n, p in net.named_parameters() if p.grad is not None} == with_gradient
        assert set(heard) == with_gradient, "hooks of parameters without a gradient stay silent"
        for name in with_gradient:
            assert_close(full(net.get_parameter(name).grad), plain.get_parameter(name).grad, name)
        for handle in handles:
            handle.remove()
        assert_at_rest(net, before)
        net.zero_grad()
        plain.zero_grad()


class Tail(nn.Module):
    """A head that is called by itself, chunk by chunk, after the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.entry(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "resharded"])
@on_ranks(2)
def test_a_list_of_modules_of_which_some_run_chunk_by_chunk(
    rank: int, world_size: int, kept: bool
) -> None:
    net, plain = pair(Tail)
    sw.fully_shard(net.entry)
    sw.fully_shard([net.norm, net.head], reshard_after_forward=not kept)
    sw.fully_shard(net)

    def backward(model: Any, which: int, share: int) -> None:
        hidden = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(which)))
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
        for chunk in chunks:
            (model.head(chunk).square().sum() / share).backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))  # type: ignore[misc]

    for _ in range(3):
        backward(net, rank, 1)
        for which in range(world_size):
            backward(plain, which, world_size)
        for name, parameter in plain.named_parameters():
            assert_close(full(net.get_parameter(name).grad), parameter.grad, name)
        net.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_a_gradient_that_only_some_ranks_have_is_loudly_nan(
    rank: int, world_size: int, strategy: str, accumulate: bool
) -> None:
    """On the ranks that have it. The others are right, and what no rank has stays None."""
    net, plain = pair(ChoiceNet)
    wrap(net, world_size, strategy)
    chosen = {one: (0, 1) if one == 0 else (0,) for one in range(world_size)}
    for last in (False, True) if accumulate else (True,):
        net.set_is_last_backward(last)
        net.set_requires_gradient_sync(last)
        net.blocks[1].chosen = chosen[rank] if last else (0,)
        vector_loss(net, rank).backward()
        reference_grads(plain, world_size, chosen if last else dict.fromkeys(chosen, (0,)))
    for name, parameter in net.named_parameters():
        wanted = plain.get_parameter(name).grad
        if "experts.1" not in name:
            assert (parameter.grad is None) == (wanted is None), name
            assert wanted is None or torch.allclose(full(parameter.grad), wanted, atol=1e-6), name
            continue
        assert (parameter.grad is None) == (rank != 0), name
        assert rank != 0 or parameter.grad.to_local().isnan().all(), name


WIDE = 32  # whole blocks
# ------------------------------------------------------------------------------- delayed


class Delayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedMLP(2, WIDE, WIDE, activation=swiglu(), delay_weight_gradient=True)
        self.exit = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, len(x)], dtype=torch.int32)
        return self.exit(self.experts(x, ends, torch.ones(len(x))))


@on_ranks(2)
def test_buckets_wait_for_gradients_that_no_graph_knows_of(rank: int, world_size: int) -> None:
    net, plain = pair(Delayed)
    options = options_for("zero1", world_size) | {"unused_parameters": "zeros"}
    sw.data_parallel(net, **options, bucket_mb=0.005)
    plain.experts.delay_weight_gradient = False
    for model, ranks in ((net, [rank]), (plain, range(world_size))):
        for each in ranks:
            x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(each))
            loss = model(x.requires_grad_()).square().mean()  # so that a gate is there
            (loss / len(ranks)).backward()
    net.experts.backward_dw()
    assert_gradients_equal(net, plain)


# ------------------------------------------------------------------------------- entries


class Pair(nn.ModuleList):
    def forward(self, x: Tensor, partly: bool) -> Tensor:
        return self[0](x) if partly else self[0](x) + self[1](x)


class Entries(nn.Module):
    """Units whose inputs need no gradient, of which one rank uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.ModuleList(
            Pair([nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)]) for _ in range(4)
        )
        self.exit = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor, partly: bool) -> Tensor:
        total = torch.zeros(len(x), WIDE)
        for number, entry in enumerate(self.entries):
            total = total + entry(x, partly and number == 2)
        return self.exit(total)


def entered(rank: int, world_size: int) -> list[Call]:
    net, plain = pair(Entries)
    options = options_for("zero3", world_size) | {"unused_parameters": "zeros"}
    for part in (*net.entries, net):
        sw.fully_shard(part, **options)
    with sw.comm.record() as calls:
        net(torch.full((3, WIDE), 1.0 + rank), rank == 1).square().mean().backward()
    for each in range(world_size):
        loss = plain(torch.full((3, WIDE), 1.0 + each), each == 1).square().mean()
        (loss / world_size).backward()
    assert_gradients_equal(net, plain)
    return calls


def test_units_that_are_used_in_part_reduce_when_others_do() -> None:
    first, second = run_ranks(entered, 2)
    assert len(first) > 12 and first == second
