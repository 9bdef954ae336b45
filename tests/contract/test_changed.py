# SPDX-License-Identifier: Apache-2.0
"""Parameters that change after wrapping: replaced, added, removed, or written at a bad moment."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.func import functional_call

import shardwise as sw
from tests.contract.helpers import (
    WIDTH,
    WORDS,
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
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

# ------------------------------------------------------------------------------ other parameters


def replace(net: Any) -> None:
    net.blocks[1].up.weight = nn.Parameter(torch.zeros(3 * WIDTH, WIDTH))


def tie(net: Any) -> None:
    net.blocks[1].up.weight = net.blocks[0].up.weight


def remove(net: Any) -> None:
    del net.blocks[1].up.bias
    net.blocks[1].up.register_parameter("bias", None)


def remove_module(net: Any) -> None:
    net.blocks[1].up = nn.Identity()


def add(net: Any) -> None:
    net.blocks[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def fill_an_empty_name(net: Any) -> None:
    net.blocks[1].norm.bias = nn.Parameter(torch.zeros(WIDTH))


def add_module(net: Any) -> None:
    net.blocks[1].up.adapter = nn.Linear(WIDTH, 2)


def exchange_module(net: Any) -> None:
    """As adapters are put in place of a layer, whose parameters they keep."""
    net.blocks[1].up = Adapted(net.blocks[1].up)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.low = base, nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.low(x).mean()


CHANGES: dict[Callable[[Any], None], tuple[str, ...]] = {
    replace: ("up.weight' was replaced", "copy_"),
    tie: ("up.weight' was replaced", "before wrapping"),
    remove: ("up.bias' is gone",),
    remove_module: ("up.weight' is gone", "up.bias' is gone"),
    add: ("scale' was added", "neither sharded nor reduced"),
    fill_an_empty_name: ("norm.bias' was added",),
    add_module: ("up.adapter.weight' was added", "up.adapter.bias' was added"),
    exchange_module: ("up.low.weight' was added",),
}


class NetOfOddNorms(Net):
    """A name that holds no parameter, and one that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm = nn.LayerNorm(WIDTH, bias=False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))


def changed(rank: int, world_size: int, strategy: str, change: str, begun: bool) -> str:
    net = NetOfOddNorms()
    if strategy == "data_parallel":
        options = options_for("zero1", world_size)
        sw.data_parallel(net, **options, ignored_params={net.shift}, unused_parameters="zeros")
    else:
        wrap(net, world_size, strategy, ignored_params={net.shift}, unused_parameters="zeros")
    if begun:
        word_loss(net, rank).backward()
    globals()[change](net)
    with sw.comm.record() as calls:
        text = raised(lambda: net(words(rank)), RuntimeError)
    assert not calls, "it was said before anything was gathered"
    return text


@pytest.mark.parametrize("change", [change.__name__ for change in CHANGES])
@pytest.mark.parametrize(
    ("strategy", "begun"), [("zero3", False), ("zero3", True), ("data_parallel", True)]
)
def test_other_parameters_than_were_wrapped_are_named(
    strategy: str, begun: bool, change: str
) -> None:
    for text in run_ranks(changed, 2, strategy, change, begun):
        assert all(part in text for part in CHANGES[globals()[change]]), text


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2"])
def test_a_parameter_that_was_replaced_is_named_under_every_strategy(strategy: str) -> None:
    for text in run_ranks(changed, 2, strategy, "replace", True):
        assert "was replaced" in text


class Restless(nn.Module):
    """Replaces a weight when told, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.now = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.now:
            self.inner.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        return y


@on_ranks(2)
def test_parameters_replaced_at_other_times_are_named(rank: int, world_size: int) -> None:
    """Not before forward, but inside it, before backward, before unshard()."""
    net = sw.fully_shard(Restless(), **options_for("zero3", world_size))
    x = vectors(rank)
    net.now = True
    assert "replaced" in raised(lambda: net(x), RuntimeError)
    net = sw.fully_shard(Restless(), **options_for("zero3", world_size))
    loss = net(x).sum()
    before = net.inner.weight
    net.inner.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    assert "replaced" in raised(loss.backward, RuntimeError)
    assert "replaced" in raised(net.unshard, RuntimeError)
    net.inner.weight = before  # nothing is lost
    net.unshard()
    assert net.inner.weight.shape == (WIDTH, WIDTH)
    net.reshard()
    ones = {name: torch.ones(value.shape) for name, value in net.named_parameters()}
    assert "replaced" in raised(lambda: functional_call(net, ones, (x,)), RuntimeError)
    net(x)


class Swapping(Net):
    """A forward that swaps a weight for another tensor, as conversions do."""

    def forward(self, words: Tensor) -> Tensor:
        torch.utils.swap_tensors(self.head.weight, nn.Parameter(torch.zeros(WORDS, WIDTH)))
        return super().forward(words)


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "data_parallel"])
@on_ranks(2)
def test_a_parameter_swapped_in_forward_is_named(rank: int, world_size: int, strategy: str) -> None:
    net = wrap(Swapping(), world_size, strategy)
    assert "'head.weight' was swapped for a Parameter" in raised(
        lambda: net(words(rank)), RuntimeError
    )


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_two_parameters_of_a_unit_that_were_swapped_are_named(
    rank: int, world_size: int, strategy: str
) -> None:
    net = wrap(Net(), world_size, strategy)
    torch.utils.swap_tensors(net.head.weight, net.embedding.weight)  # both of the root
    assert "swapped with" in raised(lambda: net(words(rank)), RuntimeError)


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


@on_ranks(2)
def test_a_deleted_model_is_gone_at_once(rank: int, world_size: int) -> None:
    """The engine's notes about modules keep none of them alive."""
    net = wrap(Net(), world_size)
    word_loss(net, rank).backward()
    parts = [weakref.ref(module) for module in net.modules()]
    gc.collect()
    gc.disable()
    try:
        del net
        assert len(parts) > 10 and not any(part() is not None for part in parts)
    finally:
        gc.enable()


# ------------------------------------------------------------------------------ written too early


def step_sgd(net: Any, parameters: list[Any]) -> None:
    torch.optim.SGD(parameters, lr=0.1).step()


def load(net: Any, parameters: list[Any]) -> None:
    net.load_state_dict(Net().state_dict())


def write_to_pieces(net: Any, parameters: list[Any]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.to_local().mul_(0.5)


WRITES: dict[str, Callable[[Any, list[Any]], None]] = {
    "sgd": step_sgd,
    "load": load,
    "pieces": write_to_pieces,
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
            if how == "pieces" and model is plain:
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            else:
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
    + [("zero1", "pieces"), ("zero2", "load"), ("hsdp", "sgd"), ("hfsdp", "pieces")],
)
def test_weights_written_between_forward_and_backward_are_named(strategy: str, how: str) -> None:
    world_size = 2 if strategy == "data_parallel" else ranks_for(strategy)
    run_ranks(written, world_size, strategy, how, {})


def test_weights_that_stay_after_forward_are_watched_too() -> None:
    run_ranks(written, 2, "zero3", "sgd", {"reshard_after_forward": False})


WHOLE_WRITES: dict[str, Callable[[Any], object]] = {
    "in_place": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.mul_(2),
    "slice": lambda weight: weight[0].zero_(),
}
# What may come after such a write and would lose it.
AFTERWARDS: dict[str, Callable[[Any, Tensor], object]] = {
    "backward": lambda net, loss: loss.backward(),
    "reshard": lambda net, loss: net.reshard(),
    "forward": lambda net, loss: net(words(0)),
    "state_dict": lambda net, loss: net.state_dict(),
    "full_state_dict": lambda net, loss: sw.full_state_dict(net),
    "move": lambda net, loss: net.to(torch.float64),
    "optimizer": lambda net, loss: sw.optimizer(
        net, matrix=sw.muon(lr=0.1), elementwise=sw.adamw(lr=0.1)
    ),
}


class Bag(Net):
    """A head whose weight backward does not read: torch cannot notice that it was written."""

    def forward(self, words: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.embedding(words).detach())).detach() @ (
            self.head.weight.T
        )


@pytest.mark.parametrize(
    ("strategy", "how", "afterwards"),
    [("zero3", "in_place", afterwards) for afterwards in AFTERWARDS]
    + [("zero3", how, "backward") for how in ("data", "slice")]
    + [(strategy, "in_place", "backward") for strategy in ("hsdp", "hfsdp")],
)
def test_writes_to_weights_that_stay_gathered_are_named(
    strategy: str, how: str, afterwards: str
) -> None:
    run_ranks(write_to_whole, ranks_for(strategy), strategy, how, afterwards)


def write_to_whole(rank: int, world_size: int, strategy: str, how: str, afterwards: str) -> None:
    """The root's weights stay whole after its forward; what is written to them then is lost."""
    net, plain = pair(Bag)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    loss = net(words(rank)).sum()
    assert not isinstance(net.head.weight, sw.ShardedTensor), "whole"
    with torch.no_grad():
        WHOLE_WRITES[how](net.head.weight)
    text = raised(partial(AFTERWARDS[afterwards], net, loss), RuntimeError)
    assert "'head.weight'" in text and "is lost" in text, text
    if afterwards != "forward":  # which goes on with main's values at once
        net.reset_iter_state()
    del loss
    assert_parameters_equal(net, plain)
    check_backward(net, plain, word_loss, rank, world_size, 1)  # with main's values
    assert_at_rest(net, before)


@on_ranks(2)
def test_whole_parameters_that_are_held_too_long_show_that_they_are_gone(
    rank: int, world_size: int
) -> None:
    """Their memory is given back: a read is no segmentation fault, and a write does not pass."""
    net = wrap(Net(), world_size)
    for step in range(2):
        loss = word_loss(net, rank, step)
        held = [net.embedding.weight, net.head.weight]
        before = [weight.clone() for weight in held]
        assert not any(weight.isnan().any() for weight in held)
        loss.backward()
        assert all(weight.isnan().all() for weight in held), "the memory is gone"
        assert "single memory" in raised(partial(held[0].detach().mul_, 2), RuntimeError)
        net.unshard()
        assert all(map(torch.equal, held, before)), "and comes back with the next gather"
        net.reshard()
    held[0].detach().zero_()  # torch lets this pass; the next look at the weights does not
    assert "'embedding.weight'" in raised(net.reshard, RuntimeError)
    word_loss(net, rank).backward()


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
    """A forward without a backward, or one that is interrupted, leaves gathered weights in the
    modules; after the step an average of the weights must not read these."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]
    for interrupted in (False, True):
        check_backward(net, plain, word_loss, rank, world_size)
        handle = net.head.register_forward_pre_hook(_interrupt) if interrupted else None
        with suppress(KeyboardInterrupt):
            net(words(rank, 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_parameters_equal(net, plain)
        if handle is not None:
            handle.remove()
    check_backward(net, plain, word_loss, rank, world_size)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


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
