# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not run the same units: every rank raises, by name, and none hangs or mixes up
weights."""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import time
import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import comm, lockstep
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    assert_gradients_equal,
    assert_parameters_equal,
    pair,
    raised,
    ranks_for,
    vector_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


class Skipping(nn.Module):
    """Blocks alike, called in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for number in self.order:
            x = x + self.blocks[number](x).tanh()
        return x


def out_of_step(
    rank: int, world_size: int, strategy: str, unused: str, orders: Any, fresh: bool
) -> str:
    lockstep.patience = 0.4
    net = wrap(Skipping(), world_size, strategy, unused_parameters=unused)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if not fresh:
        vector_loss(net, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.order = orders[rank % 2]
    try:
        for _ in range(3):  # at the latest the next gather meets a rank that is elsewhere
            vector_loss(net, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


SKIPS = {
    "one rank skips a block": ((0, 1, 2, 3), (0, 1, 3)),
    "each rank skips another": ((0, 1, 2), (0, 1, 3)),
    "another order": ((0, 1, 2, 3), (0, 2, 1, 3)),
    "one rank calls one twice": ((0, 1, 2, 3), (0, 1, 2, 2, 3)),
}


@pytest.mark.parametrize(
    ("strategy", "skips", "unused", "fresh"),
    [
        ("zero3", "one rank skips a block", "none", True),
        ("zero3", "one rank skips a block", "zeros", False),
        ("zero3", "each rank skips another", "none", False),
        ("zero3", "another order", "zeros", True),
        ("zero3", "one rank calls one twice", "none", False),
        ("zero1", "one rank skips a block", "none", False),
        ("hfsdp", "each rank skips another", "zeros", False),
    ],
)
def test_ranks_that_run_other_units_raise_by_name(
    strategy: str, skips: str, unused: str, fresh: bool
) -> None:
    world_size = ranks_for(strategy)
    found = run_ranks(out_of_step, world_size, strategy, unused, SKIPS[skips], fresh, fresh=True)
    for message in found:
        assert "out of step" in message and "blocks." in message, message


@on_ranks(4, fresh=True)
def test_ranks_that_wait_in_a_circle_over_several_groups_raise(rank: int, world_size: int) -> None:
    """No two of them wait in one group: 0 for 1, 1 for 3, 3 for 2, 2 for 0."""
    lockstep.patience = 0.4
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp"))
    name = "dp" if rank in (0, 3) else "dp_outer"
    axis = comm.as_axis(grid.get_group(name), name)
    out, mine = torch.zeros(8), torch.ones(4)
    message = raised(lambda: comm.all_gather(out, mine, axis).wait(), RuntimeError)
    assert "rank 0 waits in all_gather of 32 bytes and rank 1" in message, message
    assert "rank 3 waits" in message, message


@on_ranks(2, fresh=True)
def test_a_rank_that_saves_alone_is_named(rank: int, world_size: int) -> None:
    lockstep.patience = 0.4
    net = wrap(Skipping(), world_size, "zero3")
    vector_loss(net, rank).backward()
    with tempfile.TemporaryDirectory() as folder:
        work = (lambda: sw.save(folder, net)) if rank == 0 else (lambda: vector_loss(net, rank))
        message = raised(work, RuntimeError)
    assert "rank 0 waits in all_gather of a few bytes, for ranks to agree" in message, message
    assert "rank 1 waits in all_gather of 'Skipping'" in message, message


@on_ranks(2, fresh=True)
def test_a_slow_rank_is_waited_for(rank: int, world_size: int) -> None:
    """A rank that is late is waited for, however long it takes; one warning says for what."""
    lockstep.patience = 100.0 if rank else 0.02
    store = dist.distributed_c10d._get_default_store()
    real = lockstep._look_at_long_waits

    def look() -> None:
        real()
        waits = [wait for wait in list(lockstep._waits.values()) if wait.warned]
        if any("'Skipping'" in wait.ticket.purpose for wait in waits):
            store.add("looks after the warning", 1)

    lockstep._look_at_long_waits = look
    net = wrap(Skipping(), world_size)
    with unittest.TestCase().assertLogs("shardwise.lockstep") as log:
        logging.getLogger("shardwise.lockstep").warning("so that there is one")
        while rank and store.add("looks after the warning", 0) < 50:
            time.sleep(0.01)
        vector_loss(net, rank).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    said = [line for line in log.output if "in all_gather of 'Skipping'" in line]
    assert len(said) == 1 - rank, log.output


# ------------------------------------------------------------------------- the same everywhere


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_units_in_another_order_every_step(rank: int, world_size: int, strategy: str) -> None:
    """Every step runs the units in another order, all ranks in the same one."""
    net, plain = pair(Skipping)
    wrap(net, world_size, strategy)
    dice = random.Random(3)
    order = list(range(4))
    for step in range(5):
        dice.shuffle(order)
        net.order = plain.order = tuple(order)
        vector_loss(net, rank, step).backward()
        for each in range(world_size):
            (vector_loss(plain, each, step) / world_size).backward()
        assert_gradients_equal(net, plain)
        net.zero_grad()
        plain.zero_grad()


# ------------------------------------------------------------------------- gradients of inputs


@pytest.mark.parametrize("unused", ["none", "zeros"])
@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_gradients_of_inputs_alone(rank: int, world_size: int, strategy: str, unused: str) -> None:
    """``torch.autograd.grad`` for inputs: parameters stay as they are, and training goes on."""
    net, plain = pair(Skipping)
    wrap(net, world_size, strategy, unused_parameters=unused)
    for _ in range(2):
        x = torch.randn(3, WIDTH, requires_grad=True)
        ours = torch.autograd.grad(net(x).square().mean(), x)[0]
        theirs = torch.autograd.grad(plain(x).square().mean(), x)[0]
        assert torch.equal(ours, theirs)
        assert all(parameter.grad is None for parameter in net.parameters())
        vector_loss(net, rank).backward()
        for each in range(world_size):
            (vector_loss(plain, each) / world_size).backward()
        assert_gradients_equal(net, plain)
        net.zero_grad()
        plain.zero_grad()


def penalty(model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    return slope.square().mean()


def double_backward(rank: int, world_size: int, strategy: str, keep: bool) -> str:
    """A gradient penalty: right where weights stay, refused by name where they are released."""
    net, plain = pair(Skipping)
    more = {"reshard_after_forward": False} if keep else {}
    wrap(net, world_size, strategy, unused_parameters="zeros", **more)
    net.set_reshard_after_backward(not keep)
    inputs = [torch.full((3, WIDTH), 0.1 * (1 + each)) for each in range(world_size)]
    for step in range(2):
        try:
            penalty(net, inputs[rank].clone()).backward()
        except RuntimeError as error:
            net.reset_iter_state()
            vector_loss(net, rank).backward()
            return str(error)
        for each in range(world_size):
            (penalty(plain, inputs[each].clone()) / world_size).backward()
        compared = 0
        for name, parameter in plain.named_parameters():
            grad = net.get_parameter(name).grad
            if parameter.grad is not None and "bias" not in name:
                low, high = grad.cut.piece
                wanted = parameter.grad.reshape(-1)[low:high]
                assert torch.allclose(grad.to_local().reshape(-1), wanted, atol=1e-6), name
                compared += 1
        assert compared == 5, step
        net.zero_grad()
        plain.zero_grad()
    return ""


@pytest.mark.parametrize(
    ("strategy", "keep"),
    [("zero0", False), ("zero1", False), ("zero2", False), ("zero3", True), ("hsdp", True)],
)
def test_a_gradient_penalty_is_right_where_weights_stay(strategy: str, keep: bool) -> None:
    assert not any(run_ranks(double_backward, ranks_for(strategy), strategy, keep))


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "hfsdp"])
def test_a_gradient_penalty_is_refused_where_weights_are_released(strategy: str) -> None:
    for message in run_ranks(double_backward, ranks_for(strategy), strategy, False):
        assert "create_graph" in message and "reshard_after_forward=False" in message, message


@pytest.mark.parametrize("strategy", ["zero0", "zero2", "data_parallel", "hsdp"])
@on_ranks(ranks_for)
def test_a_graph_of_the_gradients_of_weights_is_refused(
    rank: int, world_size: int, strategy: str
) -> None:
    """``backward(create_graph=True)``: what is reduced over ranks has no graph."""
    net = wrap(Skipping(), world_size, strategy)
    loss = vector_loss(net, rank)
    assert "create_graph=True" in raised(lambda: loss.backward(create_graph=True), RuntimeError)
    net.reset_iter_state()
    vector_loss(net, rank).backward()


# ------------------------------------------------------------------------- steps of optimizers


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_a_closure_that_returns_the_mean_loss_decides(
    rank: int, world_size: int, strategy: str
) -> None:
    """LBFGS searches along a line by the loss."""
    net, plain = pair(lambda: Skipping())
    net = wrap(net, world_size, strategy)
    ours, theirs = (
        torch.optim.LBFGS(one.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        for one in (net, plain)
    )

    def closure() -> Tensor:
        ours.zero_grad()
        loss = vector_loss(net, rank)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / world_size

    def alone() -> Tensor:
        theirs.zero_grad()
        loss = sum(vector_loss(plain, one) for one in range(world_size)) / world_size
        loss.backward()
        return loss

    ours.step(closure)
    theirs.step(alone)
    assert_parameters_equal(net, plain, 1e-4)


@on_ranks(4, fresh=True)
def test_copies_that_were_written_otherwise_are_told_by_the_next_save(
    rank: int, world_size: int
) -> None:
    net = wrap(Skipping(), world_size, "hsdp")
    shared: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    for number, factor in ((1, 2.0), (2, 2.0 + rank // 2)):
        with torch.no_grad():
            net.entry.weight.to_local().mul_(factor)
        with unittest.TestCase().assertLogs("shardwise", logging.WARNING) as heard:
            logging.getLogger("shardwise").warning("nothing else")
            sw.save(f"{shared[0]}/{number}", net)
        told = "ranks differ in 'weights of 2 ranks, 0 to 2'" in str(heard.output)
        assert told == (rank == 0 and number == 2), heard.output
    dist.barrier()
    shutil.rmtree(shared[0], ignore_errors=True)


@pytest.mark.parametrize("strategy", [*MAIN_STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_a_backward_for_parameters_at_rest_is_named(
    rank: int, world_size: int, strategy: str
) -> None:
    """``backward(inputs=...)`` with parameters that no graph knows: the step says so."""
    net, plain = pair(Skipping)
    wrap(net, world_size, strategy)
    at_rest = list(net.parameters())
    optimizer = torch.optim.SGD(at_rest, lr=0.0)
    sleeper = torch.optim.SGD([net.blocks[3].weight], lr=0.1)
    net.order = plain.order = (0, 1, 2)
    loss = vector_loss(net, rank)
    loss.backward(inputs=at_rest)  # torch finds none of them in the graph, and says nothing
    assert "backward(inputs=...)" in raised(optimizer.step, RuntimeError)
    if strategy in ("zero3", "hfsdp"):  # the root's weights stay after forward
        loss = vector_loss(net, rank)
        loss.backward(inputs=[net.entry.weight])  # chosen among those that can be reached
        assert [name for name, p in net.named_parameters() if p.grad is not None] == [
            "entry.weight"
        ]
        net.zero_grad()
    x = torch.randn(3, WIDTH, requires_grad=True)
    torch.autograd.grad(net(x).sum(), x)
    optimizer.step()  # no gradient, and none was asked for
    vector_loss(net, rank).backward(retain_graph=True)
    sleeper.step()  # its parameter took no part
    optimizer.step()  # from now on the optimizer may be one that gets gradients now and then
    net.zero_grad()
    net(x.detach())
    optimizer.step()
    vector_loss(net, rank).backward()
    for each in range(world_size):
        (vector_loss(plain, each) / world_size).backward()
    assert_gradients_equal(net, plain)
