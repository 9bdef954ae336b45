# SPDX-License-Identifier: Apache-2.0
"""How units are called: often, never, in any order, without gradients, with any structure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    Block,
    Loss,
    Net,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    average_gradients,
    check_backward,
    options_for,
    pair,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

WITH_BUCKETS = (*MAIN_STRATEGIES, "data_parallel")


def check(
    net: Any, plain: Any, loss: Loss, rank: int, world_size: int, before: dict[str, int]
) -> None:
    """One backward on both sides; gradients equal, everything at rest, gradients dropped."""
    check_backward(net, plain, loss, rank, world_size)
    assert_at_rest(net, before)
    for model in (net, plain):
        model.zero_grad()


# ------------------------------------------------------------------------------ without gradients


@pytest.mark.parametrize("strategy", WITH_BUCKETS)
@on_ranks(ranks_for)
def test_forwards_without_gradients_between_training_steps(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    check(net, plain, word_loss, rank, world_size, before)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for step in range(2):
                # Different data, and another number of forwards, than training will see.
                ours, theirs = net(words(rank, step)), plain(words(rank, step))
                assert not ours.requires_grad
                assert_close(ours, theirs, "output", 1e-6)
    net.eval()
    assert_close(net(words(rank)).detach(), plain(words(rank)).detach(), "eval output", 1e-6)
    net.train()
    check(net, plain, word_loss, rank, world_size, before)


@on_ranks(2)
def test_a_forward_without_gradients_between_forward_and_backward(
    rank: int, world_size: int
) -> None:
    """A no_grad forward between a forward and its backward."""
    net, plain = pair(Net)
    wrap(net, world_size)
    before = transient_bytes()
    loss = word_loss(net, rank)
    with torch.no_grad():
        assert_close(net(words(rank, 1)), plain(words(rank, 1)), "output", 1e-6)
    loss.backward()
    average_gradients(plain, word_loss, world_size)
    assert_gradients_equal(net, plain)
    assert_at_rest(net, before)


class Detached(nn.Module):
    """A unit whose input carries no gradient, though an earlier unit has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first.detach())
        return self.blocks[2](second) + first


@pytest.mark.parametrize("strategy", ["zero0", "zero2", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_detached_inputs(rank: int, world_size: int, strategy: str) -> None:
    net, plain = pair(Detached)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for _ in range(2):
        check(net, plain, vector_loss, rank, world_size, before)


# ------------------------------------------------------------------------------ how often


class Around(nn.Module):
    """A unit that uses a unit inside, and none of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Repeated(nn.Module):
    """Calls its units by a plan: any number of times, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks += [(around := Around()).inner, around]
        self.head = nn.Linear(WIDTH, WIDTH)
        self.plan = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.plan:
            x = self.blocks[number](x)
        return x if number == 4 else self.head(x)


def planned(rank: int, world_size: int, strategy: str, plans: tuple[tuple[int, ...], ...]) -> None:
    net, plain = pair(Repeated)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for plan in plans:
        net.plan = plain.plan = plan
        check(net, plain, vector_loss, rank, world_size, before)


@pytest.mark.parametrize("strategy", WITH_BUCKETS)
def test_a_unit_called_twice_in_one_forward(strategy: str) -> None:
    plans = ((0, 1, 0, 2), (0, 0, 1, 2), (2, 1, 2, 1, 0), (0, 4, 4, 4))
    run_ranks(planned, ranks_for(strategy), strategy, plans)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
def test_units_called_in_another_order_or_not_at_all(strategy: str) -> None:
    plans = ((0, 1, 2), (0, 2), (2, 0), (1,), (0, 1, 2), (2, 1, 0))
    run_ranks(planned, ranks_for(strategy), strategy, plans)


class WritesOutputs(nn.Module):
    """Writes to what its units return: views, for a linear reshapes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x.unsqueeze(0))
            y += x
            x = y.relu_().squeeze(0)
        return x


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_outputs_that_are_written_in_place(rank: int, world_size: int, strategy: str) -> None:
    net, plain = pair(WritesOutputs)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for _ in range(2):
        check(net, plain, vector_loss, rank, world_size, before)


@on_ranks(2)
def test_units_left_out_of_the_very_first_forward(rank: int, world_size: int) -> None:
    planned(rank, world_size, "zero3", ((1,), (0, 1, 2)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "last first"])
@pytest.mark.parametrize("strategy", WITH_BUCKETS)
@on_ranks(ranks_for)
def test_two_forwards_before_two_backwards(
    rank: int, world_size: int, strategy: str, order: tuple[int, int]
) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for _ in range(2):
        losses = [word_loss(net, rank, step) for step in range(2)]
        # Each backward reduces by itself: the gradients of both add up.
        for position in order:
            losses[position].backward()
        for step in range(2):
            average_gradients(plain, lambda m, r, step=step: word_loss(m, r, step), world_size)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)
        for model in (net, plain):
            model.zero_grad()


@pytest.mark.parametrize("strategy", WITH_BUCKETS)
@on_ranks(ranks_for)
def test_backward_twice_over_a_retained_graph(rank: int, world_size: int, strategy: str) -> None:
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    loss = word_loss(net, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    average_gradients(plain, word_loss, world_size)
    average_gradients(plain, word_loss, world_size)
    assert_gradients_equal(net, plain)
    assert_at_rest(net, before)
    for model in (net, plain):
        model.zero_grad()
    check(net, plain, word_loss, rank, world_size, before)


@on_ranks(2)
def test_forwards_whose_backward_never_comes(rank: int, world_size: int) -> None:
    net, plain = pair(Net)
    wrap(net, world_size)
    before = transient_bytes()
    for step in range(3):
        assert net(words(rank, step)).requires_grad  # built, and thrown away
    check(net, plain, word_loss, rank, world_size, before)


@on_ranks(2)
def test_an_inner_unit_called_by_itself(rank: int, world_size: int) -> None:
    """A wrapped module inside a wrapped model, called by itself before and after the model."""
    net, plain = pair(Net)
    wrap(net, world_size)
    before = transient_bytes()

    def of_block(model: Any, which: int) -> Tensor:
        return model.blocks[1](vectors(which)).square().mean()

    check(net, plain, word_loss, rank, world_size, before)
    check(net, plain, of_block, rank, world_size, before)
    check(net, plain, word_loss, rank, world_size, before)


@on_ranks(2)
def test_an_inner_unit_that_ran_before_its_root(rank: int, world_size: int) -> None:
    """An inner unit that ran before the root did; the root then takes it over."""
    net, plain = pair(Net)
    wrap(net, world_size)
    before = transient_bytes()
    with torch.no_grad():
        ours, theirs = (model.blocks[0](vectors(rank)) for model in (net, plain))
    assert_close(ours, theirs, "output", 1e-6)
    for _ in range(2):
        check(net, plain, word_loss, rank, world_size, before)


# ------------------------------------------------------------------------------ inputs and outputs


@dataclasses.dataclass
class Answer:
    hidden: Tensor
    note: str


pytree.register_dataclass(Answer)


@dataclasses.dataclass
class Unregistered:
    """A dataclass that torch's pytree knows nothing of, as most models' outputs are."""

    hidden: Tensor
    note: str


class Structured(nn.Module):
    """Takes and returns tensors in the structure it is told."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Any, *rest: Any, nested: Any = None, scale: float = 1.0) -> Any:
        extra = nested["pair"][1] if nested is not None else 0.0
        a, b = self.first(x), self.second(x + extra) * scale
        return {
            "tuple": (a, b, None, 3),
            "list": [a, [b]],
            "dict": {"a": a, "b": {"c": b}, "n": 1},
            "dataclass": Answer(a + b, "ok"),
            "plain dataclass": Unregistered(a + b, "ok"),
            "view": (a + b)[:, 1:],
        }[self.kind]


def tensors_of(value: Any) -> list[Tensor]:
    if dataclasses.is_dataclass(value):
        assert value.note == "ok"
        value = value.hidden
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class StructuredNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Structured(kind)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        nested = {"pair": (1, self.inner(x * 2))}
        out = tensors_of(self.blocks[0](h, "text", None, nested=nested, scale=0.5))
        assert out
        return sum((o.square().sum() for o in out), torch.zeros(()))


KINDS = ("tuple", "list", "dict", "dataclass", "plain dataclass", "view")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_inputs_and_outputs_of_any_structure(
    rank: int, world_size: int, strategy: str, kind: str
) -> None:
    net, plain = pair(lambda: StructuredNet(kind))
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for _ in range(2):
        check(net, plain, vector_loss, rank, world_size, before)
    got = net.blocks[0](vectors(rank))
    want = plain.blocks[0](vectors(rank))
    assert type(got) is type(want)
    for ours, theirs in zip(tensors_of(got), tensors_of(want), strict=True):
        assert_close(ours.detach(), theirs.detach(), kind, 1e-6)


class Frozen(nn.Module):
    """A frozen linear and a trainable one, so that completion needs the inputs' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.top = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, box: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.top(self.base(box["x"]))}


class KeywordNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Frozen(), Frozen()])

    def forward(self, x: Tensor) -> Tensor:
        box = {"x": self.inner(x)}
        for block in self.blocks:
            box = block(box=box)
        return box["x"]


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_a_frozen_weight_with_inputs_in_a_nested_keyword(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(KeywordNet)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for _ in range(2):
        check(net, plain, vector_loss, rank, world_size, before)


class InPlace(nn.Module):
    """A unit whose output is changed in place by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x *= 2
        x = self.blocks[1](x)
        x += 1
        return x


@on_ranks(2)
def test_an_output_changed_in_place(rank: int, world_size: int) -> None:
    net, plain = pair(InPlace)
    wrap(net, world_size)
    before = transient_bytes()
    for _ in range(2):
        check(net, plain, vector_loss, rank, world_size, before)


class Recursive(nn.Module):
    """A unit that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.linear(x).tanh()
        return self(x, depth - 1) if depth else x


@on_ranks(2)
def test_a_unit_that_calls_itself(rank: int, world_size: int) -> None:
    net, plain = pair(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Recursive()))
    sw.fully_shard(net[1], **options_for("zero3", world_size))
    sw.fully_shard(net, **options_for("zero3", world_size))
    before = transient_bytes()
    for _ in range(2):
        check(net, plain, vector_loss, rank, world_size, before)
