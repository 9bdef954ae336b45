# SPDX-License-Identifier: Apache-2.0
"""Modules that come and go after wrapping, and weights that are written at a bad moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    WIDTH,
    Net,
    assert_at_rest,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    options_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

# ------------------------------------------------------------------------------ other parameters


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_modules_without_parameters_may_come_and_go(
    rank: int, world_size: int, strategy: str
) -> None:
    """Modules without parameters, modules wrapped themselves, the same weight tied again."""
    net, plain = pair(Net)
    for model in (net, plain):
        model.head.weight = model.embedding.weight
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for step in range(3):
        check_backward(net, plain, word_loss, rank, world_size, step)
        for model in (net, plain):
            model.zero_grad()
            model.head.weight = model.embedding.weight
            model.extra = nn.Sequential(nn.Identity(), nn.Dropout())
            model.blocks[0].register_parameter(f"none{step}", None)
            model.blocks[0].register_buffer(f"counter{step}", torch.zeros(1))
    assert_at_rest(net, before)


class Grown(Net):
    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(words))
        if hasattr(self, "adapter"):
            x = x + self.adapter(x)
        return self.head(self.blocks[1](x))


@on_ranks(2)
def test_a_module_with_a_unit_of_its_own_may_be_added(rank: int, world_size: int) -> None:
    """A module that is wrapped itself may be added at any time."""
    net, plain = pair(Grown)
    wrap(net, world_size)
    for step in range(3):
        for model in (net, plain):
            model.zero_grad()
            if step == 1:
                torch.manual_seed(3)
                model.adapter = nn.Linear(WIDTH, WIDTH)
        if step == 1:
            sw.fully_shard(net.adapter, **options_for("zero3", world_size))
        check_backward(net, plain, word_loss, rank, world_size, step)


# ------------------------------------------------------------------------------ written too early


def step_sgd(net: Any, parameters: list[Any]) -> None:
    torch.optim.SGD(parameters, lr=0.1).step()


def load(net: Any, parameters: list[Any]) -> None:
    net.load_state_dict(Net().state_dict())


WRITES: dict[str, Callable[[Any, list[Any]], None]] = {
    "sgd": step_sgd,
    "load": load,
}


def written(rank: int, world_size: int, strategy: str, how: str, options: dict[str, Any]) -> None:
    net, plain = pair(Net)
    if strategy == "data_parallel":
        sw.data_parallel(net, **options_for("zero1", world_size), **options)
    else:
        wrap(net, world_size, strategy, **options)
    before = transient_bytes()
    texts = []
    for model in (net, plain):
        word_loss(model, rank).backward()
        parameters = list(model.parameters())  # at rest; the root's are whole after its forward
        loss = word_loss(model, rank)
        with torch.no_grad():
            WRITES[how](model, parameters)
        model.zero_grad()
        texts.append(raised(loss.backward, RuntimeError))
    assert "between a forward and its backward" in texts[0], texts[0]
    assert "inplace" in texts[1], "torch says so too"
    net.reset_iter_state()
    del loss
    plain.load_state_dict(sw.full_state_dict(net))
    plain.zero_grad()
    check_backward(net, plain, word_loss, rank, world_size, 1)
    assert_at_rest(net, before)


# Every write where the optimizer's weights are those that forward reads (zero0), where they are
# gathered again (zero3) and in buckets; one write where only the mesh or the reduction differs.
@pytest.mark.parametrize(
    ("strategy", "how"),
    [(strategy, how) for strategy in ("zero0", "zero3", "data_parallel") for how in WRITES]
    + [("zero1", "sgd"), ("zero2", "load"), ("hsdp", "sgd"), ("hfsdp", "load")],
)
def test_weights_written_between_forward_and_backward_are_named(strategy: str, how: str) -> None:
    world_size = 2 if strategy == "data_parallel" else ranks_for(strategy)
    run_ranks(written, world_size, strategy, how, {})


def test_weights_that_stay_after_forward_are_watched_too() -> None:
    run_ranks(written, 2, "zero3", "sgd", {"reshard_after_forward": False})


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
@on_ranks(2)
def test_a_second_backward_after_a_step_is_refused(
    rank: int, world_size: int, strategy: str
) -> None:
    """The second backward of a graph whose weights the first one's step changed."""
    net = wrap(Net(), world_size, strategy)
    loss = word_loss(net, rank)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)  # nothing was written
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert "between a forward" in raised(loss.backward, RuntimeError)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_parameters_read_after_a_step_are_those_of_the_step(
    rank: int, world_size: int, strategy: str
) -> None:
    """A forward without a backward leaves gathered weights in the modules; after the step an
    average of the weights must not read these."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]
    check_backward(net, plain, word_loss, rank, world_size)
    net(words(rank, 1))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_parameters_equal(net, plain)
    check_backward(net, plain, word_loss, rank, world_size)


def saved_in_between(rank: int, world_size: int, folder: str) -> None:
    """Reading is not writing."""
    net, plain = pair(Net)
    wrap(net, world_size)
    loss = word_loss(net, rank)
    net.state_dict()
    sw.full_state_dict(net)
    dcp.save(net.state_dict(), checkpoint_id=f"{folder}/dcp")
    sw.save(f"{folder}/own", net)
    with torch.no_grad():
        net(words(rank, 1))
    loss.backward()
    average_gradients(plain, word_loss, world_size)
    assert_gradients_equal(net, plain)


def test_a_save_between_forward_and_backward_is_no_write(tmp_path: Any) -> None:
    run_ranks(saved_in_between, 2, str(tmp_path))
