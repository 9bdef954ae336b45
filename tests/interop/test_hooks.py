# SPDX-License-Identifier: Apache-2.0
"""Hooks on parameters and of saved tensors, other methods than forward, and several roots."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    full,
    options_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_post_accumulate_hooks_see_the_reduced_gradient(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    seen: dict[str, Tensor] = {}
    order: list[str] = []

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert isinstance(parameter, DTensor)
            assert parameter is dict(net.named_parameters())[name] or name not in seen
            assert name not in order, "once per backward"
            order.append(name)
            seen[name] = parameter.grad.to_local().clone()

        return hook

    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(note(name))
    for _ in range(2):
        order.clear()
        check_backward(net, plain, word_loss, rank, world_size)
        assert sorted(order) == sorted(name for name, _ in plain.named_parameters())
        for name, parameter in net.named_parameters():
            assert torch.equal(seen[name], parameter.grad.to_local()), "the reduced gradient"
        for model in (net, plain):
            model.zero_grad()


@pytest.mark.parametrize("gather", ["forward", "unshard", "inside"])
@on_ranks(2)
def test_post_accumulate_hooks_on_gathered_weights_are_those_at_rest(
    rank: int, world_size: int, gather: str
) -> None:
    """Weights stay gathered after a forward that no backward followed: who asks the model for its
    parameters then gets these, and its hook saw no gradient."""
    net, plain = pair(Net)
    wrap(net, world_size)
    seen: list[Tensor] = []

    def halve(parameter: Tensor) -> None:
        seen.append(parameter)
        parameter.grad.mul_(0.5)

    def register(*_: Any) -> None:
        net.head.weight.register_post_accumulate_grad_hook(halve)

    if gather == "inside":
        once = net.register_forward_pre_hook(register)
        word_loss(net, rank)
        once.remove()
    else:
        net.unshard() if gather == "unshard" else word_loss(net, rank)
        assert not isinstance(net.head.weight, DTensor)
        register()
    for number in range(2):
        net.zero_grad()
        word_loss(net, rank, number).backward()
        plain.zero_grad()
        average_gradients(plain, lambda m, r, n=number: word_loss(m, r, n), world_size)
        plain.head.weight.grad.mul_(0.5)
        assert_gradients_equal(net, plain)
    assert len(seen) == 2 and all(one is net.head.weight for one in seen)


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hsdp"])
@on_ranks(ranks_for)
def test_post_accumulate_hooks_wait_for_the_reduction(
    rank: int, world_size: int, strategy: str
) -> None:
    net = wrap(Net(), world_size, strategy)
    count = 0

    def hook(parameter: Tensor) -> None:
        nonlocal count
        count += 1

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    net.set_requires_gradient_sync(False)
    word_loss(net, rank).backward()
    assert count == 0, "nothing was reduced yet"
    net.set_requires_gradient_sync(True)
    word_loss(net, rank).backward()
    assert count == len(list(net.parameters())) > 0


@pytest.mark.parametrize("strategy", [*STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_an_optimizer_may_step_inside_backward(rank: int, world_size: int, strategy: str) -> None:
    """The step is taken inside backward, parameter by parameter, and the gradient dropped: weights
    that backward no longer reads may be written."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        word_loss(net, rank, number).backward()
        assert all(parameter.grad is None for parameter in net.parameters())
        average_gradients(plain, lambda m, r, n=number: word_loss(m, r, n), world_size)
        reference.step()
        reference.zero_grad()
    assert_parameters_equal(net, plain)


class Methods(nn.Module):
    """Has an encoder besides its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block()])

    def encode(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": self.linear(x) * scale}

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.linear(x))


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_other_methods_may_act_as_forward(rank: int, world_size: int, strategy: str) -> None:
    net, plain = pair(Methods)
    wrap(net, world_size, strategy, unused_parameters="zeros")
    before = transient_bytes()
    sw.register_fsdp_forward_method(net, "encode")
    sw.register_fsdp_forward_method(plain, "encode")  # not wrapped: nothing to do

    def loss(model: Any, which: int) -> Tensor:
        first = model.encode(vectors(which), scale=3.0)["y"].square().mean()
        return first + model(vectors(which, 1)).square().mean()

    for _ in range(2):
        check_backward(net, plain, loss, rank, world_size)
        assert_at_rest(net, before)
        for model in (net, plain):
            model.zero_grad()
    with torch.no_grad():
        got = net.encode(vectors(rank))["y"]
    assert_close(got, plain.encode(vectors(rank))["y"].detach(), "encoded", 1e-6)
    assert "missing" in raised(lambda: sw.register_fsdp_forward_method(net, "missing"), ValueError)


def unit_lanes(module: nn.Module) -> Any:
    return module._get_fsdp_state().runtime.lanes


@on_ranks(2)
def test_several_roots_share_their_lanes(rank: int, world_size: int) -> None:
    """Two stages of a pipeline on one rank, microbatches interleaved."""
    first, plain_first = pair(Block)
    second, plain_second = pair(lambda: nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)))
    for stage in (first, second):
        sw.fully_shard(stage, **options_for("zero3", world_size))
    sw.share_comm_ctx([first, second])
    for _ in range(2):
        middles, losses = [], []
        for microbatch in range(2):
            middle = first(vectors(rank, microbatch))
            middles.append((middle, middle.detach().requires_grad_()))
            losses.append(second(middles[-1][1]).square().mean())
        for (middle, cut), loss in zip(middles, losses, strict=True):
            loss.backward()
            middle.backward(cut.grad)
        for microbatch in range(2):
            for which in range(world_size):
                out = plain_second(plain_first(vectors(which, microbatch)))
                (out.square().mean() / world_size).backward()
        for stage, plain in ((first, plain_first), (second, plain_second)):
            assert_gradients_equal(stage, plain)
            stage.zero_grad()
            plain.zero_grad()
    assert unit_lanes(first) is unit_lanes(second), "one set of lanes"


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_module_backward_hooks_inside_a_unit(rank: int, world_size: int, strategy: str) -> None:
    """Module hooks of autograd inside a unit run as before."""
    net, plain = pair(Block)
    wrap(net, world_size, strategy)
    calls: list[str] = []
    for model, name in ((net, "net"), (plain, "plain")):
        model.up.register_full_backward_hook(lambda *_, name=name: calls.append(name))
    vector_loss(net, rank).backward()
    average_gradients(plain, vector_loss, world_size)
    assert calls.count("net") == 1 and calls.count("plain") == world_size
    assert_gradients_equal(net, plain)
    assert full(net.up.weight.grad).abs().max() > 0


@on_ranks(2)
def test_a_compiled_model_gathers_between_its_graphs(rank: int, world_size: int) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, "zero3")
    compiled = torch.compile(net, backend="eager")
    for _ in range(2):
        word_loss(compiled, rank).backward()
        average_gradients(plain, word_loss, world_size)
    assert_gradients_equal(net, plain)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_saved_tensors_may_be_written_and_read(rank: int, world_size: int, strategy: str) -> None:
    """As hooks do that keep them on a disk."""

    def pack(saved: Tensor) -> bytes:
        file = io.BytesIO()
        torch.save(saved, file)
        return file.getvalue()

    def loss(model: Any, rank: int) -> Tensor:
        with saved_tensors_hooks(pack, lambda packed: torch.load(io.BytesIO(packed))):
            return word_loss(model, rank)

    net, plain = pair(Net)
    check_backward(wrap(net, world_size, strategy), plain, loss, rank, world_size)
