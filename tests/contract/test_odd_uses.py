# SPDX-License-Identifier: Apache-2.0
"""Things that users do between the lines: each as in plain torch, or refused by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.contract.helpers import (
    Net,
    assert_at_rest,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    pair,
    raised,
    transient_bytes,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

WAYS = ("zero0", "zero1", "zero3", "data_parallel")


def wrapped(way: str, world_size: int, make: Callable[[], Any] = Net, **more: Any) -> Any:
    """A wrapped model and the same plain."""
    net, plain = pair(make)
    return wrap(net, world_size, way, **more), plain


def backward_of_both(net: Any, plain: Any, rank: int, world_size: int, step: int = 0) -> None:
    check_backward(net, plain, word_loss, rank, world_size, step)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_parameters_frozen_or_trained_since_forward(rank: int, world_size: int, way: str) -> None:
    """``requires_grad_`` between forward and backward, either way, as in plain torch."""
    net, plain = wrapped(way, world_size)
    before = transient_bytes()
    for trains in (False, True):
        for model in (net, plain):
            model.requires_grad_(True)
            model.blocks[0].requires_grad_(not trains)
            model.blocks[1].up.weight.requires_grad_(not trains)
        loss = word_loss(net, rank)
        others = [word_loss(plain, each) / world_size for each in range(world_size)]
        for model in (net, plain):
            model.blocks[0].requires_grad_(trains)
            model.blocks[1].up.weight.requires_grad_(trains)
        loss.backward()
        for other in others:
            other.backward()
        assert_gradients_equal(net, plain)
        assert plain.blocks[0].up.weight.grad is None
        assert_at_rest(net, before)
        for model in (net, plain):
            model.zero_grad()
            model.requires_grad_(True)
        backward_of_both(net, plain, rank, world_size)
        for model in (net, plain):
            model.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_gradients_that_users_exchange_or_make(rank: int, world_size: int, way: str) -> None:
    """Gradients that the user exchanged or made, and a backward that adds to them."""
    net, plain = wrapped(way, world_size)
    backward_of_both(net, plain, rank, world_size)
    for model in (net, plain):
        first, second = model.blocks[0], model.blocks[1]
        for one, other in (
            (first.up.weight, second.up.weight),  # of two units
            (first.up.bias, second.up.bias),
        ):
            one.grad, other.grad = other.grad, one.grad
    backward_of_both(net, plain, rank, world_size, 1)
    for model in (net, plain):
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 0.5)  # whole, and the same on all ranks
    backward_of_both(net, plain, rank, world_size, 2)
    for model in (net, plain):
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 2
        model.head.weight.grad = None
    backward_of_both(net, plain, rank, world_size, 3)
    for model in (net, plain):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        norm, down = model.blocks[0].norm, model.blocks[0].down
        norm.weight.grad, down.bias.grad = down.bias.grad, norm.weight.grad  # of one buffer
        sw.optimizer(model, matrix=None, elementwise=sw.adamw(lr=0.1)).step()
    assert_parameters_equal(net, plain)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_backward_whose_model_was_deleted_is_refused(
    rank: int, world_size: int, way: str
) -> None:
    """A model that is gone when its backward comes says so; another goes on."""
    net, _ = wrapped(way, world_size)
    loss = word_loss(net, rank)
    del net
    gc.collect()
    assert "deleted since its forward" in raised(loss.backward, RuntimeError)
    backward_of_both(*wrapped(way, world_size), rank, world_size)


class Configured(Net):
    """Cannot be built without arguments."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=layers)


@on_ranks(2)
def test_copies_of_wrapped_modules(rank: int, world_size: int) -> None:
    net, plain = wrapped("zero3", world_size, partial(Configured, 2))
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        assert "full_state_dict" in raised(partial(save, net), NotImplementedError)
    assert "deepcopy" in raised(partial(copy.deepcopy, net), AssertionError)
    shallow = copy.copy(net)
    assert type(shallow) is type(net)
    word_loss(shallow, rank).backward()
    average_gradients(plain, word_loss, world_size)
    assert_gradients_equal(net, plain)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_model_may_run_in_inference_mode_first(rank: int, world_size: int, way: str) -> None:
    net, plain = wrapped(way, world_size)
    with torch.inference_mode():  # before the first training step
        net(words(rank))
        whole = sw.full_state_dict(net, only_first_rank=False)
    assert torch.equal(whole["head.weight"], plain.head.weight)
    backward_of_both(net, plain, rank, world_size)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_training_goes_on_after_a_hook_raised(rank: int, world_size: int, way: str) -> None:
    """A forward that ends in a hook's exception, on every rank; then training goes on."""
    net, plain = wrapped(way, world_size)
    backward_of_both(net, plain, rank, world_size)

    def fail(*_: Any) -> None:
        raise KeyError("the user's own")

    for module in (net.blocks[0], net.blocks[1].up, net.head, net):
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            handle = register(fail)
            raised(lambda: word_loss(net, rank), KeyError)
            handle.remove()
            for model in (net, plain):
                model.zero_grad()
            backward_of_both(net, plain, rank, world_size)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_state_dict_inside_forward(rank: int, world_size: int, way: str) -> None:
    """``state_dict()`` and ``parameters()`` inside forward, as loggers and averages do."""
    net, plain = wrapped(way, world_size)
    seen: list[int] = []

    def look(*_: Any) -> None:
        state = net.state_dict()
        assert all(isinstance(value, sw.ShardedTensor) for value in state.values())
        seen.append(len(state))

    net.blocks[0].register_forward_hook(look)
    net.blocks[1].up.register_forward_pre_hook(look)
    backward_of_both(net, plain, rank, world_size)
    assert len(seen) >= 2


@pytest.mark.parametrize("way", ["zero0", "zero3"])
@on_ranks(2)
def test_a_forward_past_the_hooks_is_refused(rank: int, world_size: int, way: str) -> None:
    """``module.forward(x)`` is called past the hooks that gather."""
    net, _ = wrapped(way, world_size)
    x = torch.randn(3, 10)
    raised(lambda: net.blocks[0].forward(x), NotImplementedError)
    raised(lambda: nn.functional.embedding(torch.arange(3), net.head.weight), NotImplementedError)
    # The first step of a product, a transposed copy, works: torch refuses the second.
    mixed = raised(lambda: nn.functional.linear(x, net.head.weight), RuntimeError)
    assert "mixed torch.Tensor and DTensor" in mixed


def anomaly(rank: int, world_size: int, way: str) -> None:
    net, plain = wrapped(way, world_size)
    with torch.autograd.set_detect_anomaly(True):
        backward_of_both(net, plain, rank, world_size)


def test_anomaly_detection_sees_nothing_odd() -> None:
    run_ranks(anomaly, 2, "zero3")


def penalty_of(model: Any) -> Tensor:
    return sum((0.1 * one.square().sum() for one in model.parameters()), torch.zeros(()))


def distance_of(model: Any) -> Tensor:
    """From values that weights had: elastic weight consolidation."""
    pairs = zip(model.parameters(), model.earlier, strict=True)
    return sum((0.1 * ((one - was) * was).sum() for one, was in pairs), torch.zeros(()))


def penalised(
    model: Any, rank: int, step: int, first: bool, of: Callable[[Any], Tensor] = penalty_of
) -> Tensor:
    """A loss with a penalty on weights that lie outside of any forward. Backward comes to what was
    computed ``first`` last: while other gradients of these weights are being reduced."""
    penalty = of(model) if first else torch.zeros(())
    loss = word_loss(model, rank, step) + penalty
    return loss if first else loss + of(model)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_penalty_on_weights_at_rest(rank: int, world_size: int, way: str) -> None:
    net, plain = wrapped(way, world_size)
    for step, (first, sync) in enumerate([(True, True), (False, True), (True, False)]):
        net.set_requires_gradient_sync(sync)
        loss = partial(penalised, step=step, first=first)
        loss(net, rank).backward()
        average_gradients(plain, loss, world_size)
    net.set_requires_gradient_sync(True)
    check_backward(net, plain, penalised, rank, world_size, 9, True)
    for model in (net, plain):
        penalty_of(model).backward()
    assert_gradients_equal(net, plain)
    for model in (net, plain):
        model.zero_grad()
        model.earlier = [one.detach().clone() for one in model.parameters()]
    late = partial(penalised, step=10, first=False, of=distance_of)
    if way == "zero3":  # the root's weights are not at rest then
        text = raised(lambda: late(net, rank).backward(), NotImplementedError)
        assert "would not be reduced" in text
        net.reset_iter_state()
    else:
        check_backward(net, plain, late, rank, world_size)
    check_backward(net, plain, penalised, rank, world_size, 11, True, distance_of)


def through_full_tensors(model: Any, rank: int, step: int) -> Tensor:
    """Products of a rank's own values with weights outside of any forward."""
    head, inner = model.head.weight, model.blocks[0].up.weight * 2
    if isinstance(head, DTensor):
        head, inner = head.full_tensor(), inner.full_tensor()
    seen = vectors(rank, step)
    return (
        word_loss(model, rank, step) + (seen @ head.t()).square().mean() + (seen @ inner.t()).std()
    )


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_gradients_flow_through_full_tensors(rank: int, world_size: int, way: str) -> None:
    """Reduced over ranks like any other: what a rank computes with them is its own."""
    net, plain = wrapped(way, world_size)
    for step in range(2):
        check_backward(net, plain, through_full_tensors, rank, world_size, step)
    with torch.no_grad():
        assert not net.head.weight.full_tensor().requires_grad


@on_ranks(2)
def test_gradients_that_replicas_divide_take_what_is_added_to_them(
    rank: int, world_size: int
) -> None:
    """A penalty, and weight decay by hand."""
    net, plain = wrapped("zero0", world_size)
    optimizers = [
        sw.optimizer(one, matrix=sw.muon(), elementwise=sw.adamw()) for one in (net, plain)
    ]
    for step in range(2):
        check_backward(net, plain, penalised, rank, world_size, step, True)
        for model, optimizer in zip((net, plain), optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            torch._foreach_add_([p.grad for p in model.parameters()], list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_equal(net, plain, tolerance=1e-4)
