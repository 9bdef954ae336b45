# SPDX-License-Identifier: Apache-2.0
"""Results of forwards: objects, losses on the side, features of frozen units."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.shard.containers import Swaps, cast_floats, put_back
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    assert_gradients_equal,
    check_backward,
    num_groups,
    options_for,
    pair,
    raised,
    ranks_for,
    vector_loss,
    vectors,
    wrap,
)
from tests.contract.test_odd_uses import WAYS, wrapped
from tests.ranks import on_ranks, run_ranks


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.inner = [Slotted(hidden)]


class Closed:
    """Shows its tensor to nobody but its own method."""

    def __init__(self, hidden: Tensor) -> None:
        self.get = lambda: hidden


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make: Callable[[Tensor], Any] = Plain

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x).tanh())


class OpaqueNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Opaque() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            found = block(x)
            if isinstance(found, Plain):
                found = found.inner[0]
            x = x + (found.hidden if isinstance(found, Slotted) else found.get())
        return x


def opaque(rank: int, world_size: int, strategy: str) -> str:
    net, plain = pair(OpaqueNet)
    wrap(net, world_size, strategy)
    for make in (Plain, Slotted):
        for model in (net, plain):
            for block in model.blocks:
                block.make = make
        vector_loss(net, rank).backward()
        for each in range(world_size):
            (vector_loss(plain, each) / world_size).backward()
        assert_gradients_equal(net, plain)
        net.zero_grad()
        plain.zero_grad()
    net.blocks[1].make = plain.blocks[1].make = Closed
    try:
        vector_loss(net, rank).backward()
    except TypeError as error:
        return str(error)
    for each in range(world_size):
        (vector_loss(plain, each) / world_size).backward()
    assert_gradients_equal(net, plain)
    return ""


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
def test_outputs_that_are_objects_are_looked_into_or_refused(strategy: str) -> None:
    for message in run_ranks(opaque, ranks_for(strategy), strategy):
        if strategy in ("zero3", "hsdp", "hfsdp"):
            assert "Closed" in message and "blocks.1" in message, message
        else:  # weights stay, and what nobody can look into is right
            assert message == ""


class SideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.last(self.first(x).tanh())
        self.kept = hidden.square().mean()
        return x + hidden


class SideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SideBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_loss_that_a_module_keeps_on_itself(rank: int, world_size: int, strategy: str) -> None:
    """A loss that a module leaves on itself, as routers of experts do, and nothing else."""
    net, plain = pair(SideNet)
    wrap(net, world_size, strategy, unused_parameters="zeros")
    for step in range(3):
        for model, ranks in ((net, [rank]), (plain, range(world_size))):
            for each in ranks:
                model(torch.full((3, WIDTH), 1.0 + each + step))
                (model.blocks[0].kept / len(ranks)).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                grad = net.get_parameter(name).grad
                low, high = grad.cut.piece
                wanted = parameter.grad.reshape(-1)[low:high]
                assert torch.allclose(grad.to_local().reshape(-1), wanted, atol=1e-6), name
        net.zero_grad()
        plain.zero_grad()


class Leaking(nn.Module):
    """Blocks whose forwards leave losses in a list that no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.left: Callable[[], list[Tensor]] = list
        left: list[Tensor] = []
        for block in self.blocks:
            block.forward = partial(self.leak, block, left)  # type: ignore[method-assign]
        self.left = lambda: [left.pop() for _ in self.blocks]

    @staticmethod
    def leak(block: Any, left: list[Tensor], x: Tensor) -> Tensor:
        y = block[0](x).tanh()
        left.append((block[0](x) * block[0].bias).square().mean())
        return y

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def leaking_loss(model: Any, rank: int, step: int) -> Tensor:
    loss = vector_loss(model, rank, step)
    return loss + sum(model.left())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_losses_that_forwards_leave_in_a_list(
    rank: int, world_size: int, way: str, frozen: bool
) -> None:
    """Their backward reads weights, and comes not through an output of the unit."""
    net, plain = wrapped(way, world_size, Leaking)
    for model in (net, plain) if frozen else ():
        model.blocks[2].requires_grad_(False)
    for step in range(3):
        check_backward(net, plain, leaking_loss, rank, world_size, step)
    if way == "zero3":
        vector_loss(net, rank)
        bias = net.left()[-1]  # of the first block, whose input needs no gradient
        assert "reshard_after_forward=False" in raised(bias.backward, RuntimeError)


class Features(nn.Module):
    """A frozen unit whose features are the loss, and whose output is not used."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(inner(), nn.Tanh())
        self.inner.requires_grad_(False)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inner[0].register_forward_hook(lambda *called: self.kept.append(called[2]))
        return self.inner(self.first(x))


def feature_loss(model: Any, rank: int, step: int = 0) -> Tensor:
    model(vectors(rank, step))
    return model.kept.pop().square().mean()


@on_ranks(2)
def test_features_of_a_frozen_unit_whose_output_is_not_used(rank: int, world_size: int) -> None:
    """Backward would read weights that nobody has gathered for it: named, or right."""
    for inner in (partial(nn.LayerNorm, WIDTH), partial(nn.Linear, WIDTH, WIDTH)):
        for options in ({}, {"reshard_after_forward": False}):
            net, plain = pair(partial(Features, inner))
            sw.fully_shard(net.inner, **options_for("zero3", world_size), **options)
            sw.fully_shard(net, **options_for("zero3", world_size))
            if options:
                check_backward(net, plain, feature_loss, rank, world_size)
                continue
            text = raised(feature_loss(net, rank).backward, RuntimeError)
            # A product saves a view of its weight, of which torch itself finds that it is gone.
            told = "setStorage" if inner.func is nn.Linear else "'inner'"
            assert told in text


class Pair(NamedTuple):
    first: deque[Tensor]
    second: list[Tensor]


class Cache:
    """An object that torch opens by functions which were registered for it."""

    def __init__(self, keys: list[Tensor], last: Tensor) -> None:
        self.keys, self.last, self.seen = keys, last, 0


register_pytree_node(Cache, lambda one: ([one.keys, one.last], None), lambda two, _: Cache(*two))


@dataclasses.dataclass
class Shared:
    """An object that a model hands from block to block, and every block writes to."""

    x: Tensor
    cache: Cache
    by_name: dict[str, Tensor]
    losses: Pair
    not_yet: Tensor = dataclasses.field(init=False)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, shared: Shared, aside: OrderedDict[str, Tensor]) -> tuple[Any, ...]:
        hidden = self.linear(shared.x).tanh()
        shared.losses[0].appendleft(hidden.square().mean())
        shared.losses[1].insert(0, shared.losses[0][-1] * 2)
        shared.by_name["sum"] = shared.by_name.get("sum", 0) + hidden
        aside["last"] = aside.pop("last") * 2 + hidden
        shared.cache.keys.append(hidden)
        shared.cache.seen = len(shared.cache.keys)
        shared.cache.last = hidden
        shared.x = shared.x + hidden
        return hidden, shared, aside  # and in it the tensor of before the block


class WritingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Writing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        shared = Shared(x, Cache([x], x), {}, Pair(deque(), []))
        aside = OrderedDict[str, Any](last=x, first=x)
        aside["itself"] = aside
        for block in self.blocks:
            shared.x = shared.x + block(shared, aside=aside)[0]
        one, two = shared.losses
        assert len(one) == len(two) == 3 and aside["first"] is x
        kept = shared.cache
        assert kept.seen == 4 and kept.keys[0] is x and kept.keys[-1] is kept.last
        return shared.x + shared.by_name["sum"] + aside["last"] + sum(one) + sum(two) + kept.keys[2]


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_what_forward_writes_to_its_arguments_stays(
    rank: int, world_size: int, strategy: str
) -> None:
    """Caches, lists of losses and states that a model hands from block to block."""
    net, plain = pair(WritingNet)
    wrap(net, world_size, strategy)
    with sw.comm.record() as calls:
        check_backward(net, plain, vector_loss, rank, world_size)
    if strategy == "zero3":  # once, though forwards return tensors of before them
        reduced = [call for call in calls if call.operation == "reduce_scatter"]
        assert len(reduced) == num_groups(net, *net.blocks)


class Yielding(nn.Linear):
    yields = True

    def forward(self, x: Tensor) -> Any:
        made = (super(Yielding, self).forward(one) for one in x)
        return made if self.yields else torch.stack(list(made))


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_a_forward_that_yields_is_refused(rank: int, world_size: int, strategy: str) -> None:
    net: Any = Yielding(WIDTH, WIDTH)
    sw.fully_shard(net, **options_for(strategy, world_size))
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            text = raised(lambda: list(net(vectors(rank))), TypeError)
        assert "forward returned a generator" in text and "return a list" in text
    net.yields = False
    net(vectors(rank)).square().sum().backward()
    assert net.weight.grad.full_tensor().any()


@dataclasses.dataclass
class Named(dict[str, Tensor]):
    """Holds each value as an attribute and as an item, as the outputs of transformers do."""

    x: Tensor

    def __setattr__(self, name: str, value: Tensor) -> None:
        super().__setattr__(name, value)
        self[name] = value


def test_both_places_of_a_value_are_cast() -> None:
    given, wide = Named(torch.ones(2)), torch.ones(2)
    made = cast_floats(given, torch.bfloat16)
    assert made.x is made["x"] and made.x.dtype == torch.bfloat16 and given.x is given["x"]
    swaps: Swaps = []
    given.x = wide
    made = cast_floats(given, torch.bfloat16, swaps)
    assert made.x is made["x"] and made.x.dtype == torch.bfloat16 and given.x is given["x"] is wide
    put_back(swaps)
    assert given.x is given["x"] is wide


def recompute(given: dict[str, Any], linear: nn.Linear) -> Tensor:
    return linear(given["x"]).tanh()  # type: ignore[no-any-return]


class Recomputing(nn.Module):
    """A checkpoint keeps a dict that forward was given, and forward writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any], same: dict[str, Any]) -> Tensor:
        hidden: Tensor = checkpoint(recompute, given, self.linear, use_reentrant=False)
        given["losses"].append(hidden.mean())
        given["hidden"], given["z"] = hidden, same.pop("y")
        return hidden


@on_ranks(2)
def test_what_was_cast_is_recomputed_and_what_was_written_stays(rank: int, world_size: int) -> None:
    net = Recomputing()
    precision = sw.Precision(weights="bf16")
    sw.fully_shard(net, **options_for("zero3", world_size), precision=precision)
    x, y = vectors(rank).requires_grad_(), vectors(rank)
    given: dict[str, Any] = {"x": x, "y": y, "losses": [x]}
    hidden = net(given, given)
    assert hidden is given["hidden"] and given["z"] is y and given["x"] is x and "y" not in given
    assert given["losses"][0] is x and given["losses"][1].dtype == torch.bfloat16
    (hidden.float().sum() + given["losses"][1]).backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
