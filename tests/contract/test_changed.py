# SPDX-License-Identifier: Apache-2.0
"""Modules that come and go after wrapping, and weights that are written at a bad moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from tests.models import mesh_of
from tests.ranks import on_ranks, run_ranks

# ------------------------------------------------------------------------------ other parameters


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


class Writer(nn.Module):
    """Treats its weight in ``way`` before it uses it."""

    def __init__(self, way: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64, bias=False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.way == "write":
            weight.data.mul_(2)
        elif self.way == "in place":
            with torch.no_grad():
                weight.mul_(2)
        return self.inner(x)


@on_ranks(2)
def test_a_write_to_whole_main_weights_is_kept(rank: int, world_size: int) -> None:
    """Whole main weights are what forward sees: a write is one to them."""
    for way in ("write", "in place"):
        model = sw.fully_shard(Writer(way), mesh=mesh_of(world_size), placements=sw.zero(0))
        model(torch.randn(2, 64)).sum().backward()
        assert torch.equal(model.inner.weight.full_tensor(), 2 * Writer().inner.weight)


# ------------------------------------------------------------------------------ sparse gradients


# ------------------------------------------------------------------------------ tensor subclasses


class Scaled(Tensor):
    """A tensor whose operations are its own, as those of quantised weights are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


@on_ranks(2)
def test_parameters_with_operations_of_their_own_are_refused(rank: int, world_size: int) -> None:
    for verb in (sw.fully_shard, sw.data_parallel):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(model.weight.detach().as_subclass(Scaled))
        message = raised(lambda w=verb, m=model: w(m, mesh=mesh_of(world_size)), ValueError)
        assert "'weight' is a Scaled" in message and "ignored_params" in message
        verb(model, mesh=mesh_of(world_size), ignored_params={model.weight})


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
