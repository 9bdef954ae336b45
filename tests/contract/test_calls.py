# SPDX-License-Identifier: Apache-2.0
"""Models whose units are called in odd ways, and odd steps: each trains as plain torch does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwise as sw
from tests.contract.helpers import (
    WIDTH,
    WITH_BUCKETS,
    WORDS,
    Block,
    Net,
    Trial,
    assert_close,
    average_gradients,
    on,
    options_for,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    trial,
    vector_loss,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks

Forward = Callable[[Any, Tensor], Any]

# ------------------------------------------------------------------------------ models


class Freely(nn.Module):
    """Units, called as a function says. ``left``: what their forwards leave behind."""

    def __init__(self, *hows: Forward, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.hows, self.step = hows, 0
        self.left: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.hows[self.step % len(self.hows)](self, x)


class Around(nn.Module):
    """A unit that uses a unit inside, and none of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Recursive(nn.Linear):
    """A unit that calls itself."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x).tanh()
        return self(x, depth - 1) if depth else x


class Adapted(nn.Module):
    """A frozen linear before a trained one; its input lies in a nested keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.top = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, box: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.top(self.base(box["x"]))}


def called(*plan: int) -> Forward:
    def run(model: Any, x: Tensor) -> Tensor:
        x = model.entry(x)
        for number in plan:
            x = model.blocks[number](x)
        return x

    return run


def detached(model: Any, x: Tensor) -> Tensor:
    first = model.blocks[0](x)
    return model.blocks[2](model.blocks[1](first.detach())) + first


def written(model: Any, x: Tensor) -> Tensor:
    """Outputs are written in place: views, for a linear reshapes rows."""
    for block in model.blocks:
        y = block(x.unsqueeze(0))
        y += x
        x = y.relu_().squeeze(0)
    return x


def in_modes(model: Any, x: Tensor) -> Tensor:
    x = model.entry(x)
    with torch.no_grad():
        scale = model.blocks[0](x).abs().mean()
        with torch.enable_grad():
            y = model.blocks[1](x)
    return model.blocks[0](x) / scale + y


def in_boxes(model: Any, x: Tensor) -> Tensor:
    box = {"x": model.entry(x)}
    for block in model.blocks:
        box = block(box=box)
    return box["x"]


def leaving(model: Any, x: Tensor) -> Tensor:
    """Forwards leave losses in a list, whose backward comes through no output of the unit."""
    for block in model.blocks:
        handle = block.up.register_forward_hook(
            lambda module, args, out: model.left.append((out * module.bias).square().mean())
        )
        x = block(x)
        handle.remove()
    return x


class Lender(nn.Linear):
    """Returns its weight, or a view of it, beside its output."""

    def __init__(self, view: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.view = view

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.weight.t()[1:] if self.view else self.weight


def lent(model: Any, x: Tensor) -> Tensor:
    """Weights that stay are read outside of the unit's forward."""
    penalty = torch.zeros(())
    for block in model.blocks:
        x, weight = block(x)
        penalty = penalty + weight.square().sum()
    return x.tanh() + penalty


linear = partial(nn.Linear, WIDTH, WIDTH)
MODELS: dict[str, Callable[[], Freely]] = {
    "detached inputs": partial(Freely, detached),
    "twice in one forward": partial(Freely, called(0, 1, 0, 2), called(0, 0, 1), called(2, 1, 2)),
    "a unit around a unit": partial(Freely, called(0, 1, 1), make=Around),
    "in another order": partial(Freely, called(1), called(0, 1, 2), called(2, 0), called(2, 1, 0)),
    "outputs written in place": partial(Freely, written, make=linear),
    "a unit that calls itself": partial(Freely, called(0, 1), make=Recursive),
    "modes of gradients": partial(Freely, in_modes),
    "a frozen weight, nested keywords": partial(Freely, in_boxes, make=Adapted),
    "losses in a list": partial(Freely, leaving),
}
LENT = {
    f"lent {view=}": partial(Freely, lent, make=partial(Lender, view)) for view in (False, True)
}


def freely_loss(model: Any, rank: int, step: int) -> Tensor:
    model.step = step
    loss = vector_loss(model, rank, step)
    return loss + sum(model.left.pop() for _ in model.left[:])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", WITH_BUCKETS)
@on_ranks(ranks_for)
def test_odd_models_train_as_plain_torch_does(
    rank: int, world_size: int, strategy: str, name: str
) -> None:
    trial(rank, world_size, strategy, MODELS[name]).train(freely_loss, 4)


@pytest.mark.parametrize("name", LENT)
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "data_parallel"])
@on_ranks(2)
def test_weights_that_stay_may_be_read_outside(
    rank: int, world_size: int, strategy: str, name: str
) -> None:
    trial(rank, world_size, strategy, LENT[name]).train(freely_loss)


class Twice(nn.Module):
    """A list of modules of which the first runs twice before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x)).tanh())  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_list_is_released_when_each_of_its_modules_has_run(rank: int, world_size: int) -> None:
    """Not when as many calls were counted: the weights of the second were gone before it ran."""
    net, plain = pair(Twice)
    sw.fully_shard([net.first, net.second], **options_for("zero3", world_size))
    sw.fully_shard(net, **options_for("zero3", world_size))
    with sw.comm.record() as calls:
        Trial(net, plain, rank, world_size, transient_bytes()).add(vector_loss)
    assert [call.operation for call in calls] == ["all_gather"] * 2 + ["reduce_scatter"]


# ------------------------------------------------------------------------------ structures


@dataclasses.dataclass
class Answer:
    hidden: Tensor
    note: str


pytree.register_dataclass(Answer)
STRUCTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b, None, 3),
    "list": lambda a, b: [a, [b]],
    "dict": lambda a, b: {"a": a, "b": {"c": b}, "n": 1},
    "dataclass": lambda a, b: Answer(a + b, "ok"),
    "view": lambda a, b: (a + b)[:, 1:],
}


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Answer):
        assert value.note == "ok"
        value = value.hidden
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class Structured(nn.Module):
    """Takes and returns tensors in a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = linear(), linear(), kind

    def forward(self, x: Any, *rest: Any, nested: Any = None, scale: float = 1.0) -> Any:
        extra = nested["pair"][1] if nested is not None else 0.0
        return STRUCTURES[self.kind](self.first(x), self.second(x + extra) * scale)


def structured(model: Any, x: Tensor) -> Tensor:
    nested = {"pair": (1, model.entry(x * 2))}
    out = tensors_of(model.blocks[0](model.entry(x), "text", None, nested=nested, scale=0.5))
    return sum((o.square().sum() for o in out), torch.zeros(()))


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_inputs_and_outputs_of_any_structure(
    rank: int, world_size: int, strategy: str, kind: str
) -> None:
    make = partial(Freely, structured, make=partial(Structured, kind))
    t = trial(rank, world_size, strategy, make)
    t.train(freely_loss)
    got, want = (model.blocks[0](vectors(rank)) for model in t.both)
    assert type(got) is type(want)
    for ours, theirs in zip(tensors_of(got), tensors_of(want), strict=True):
        assert_close(ours.detach(), theirs.detach(), kind, 1e-5)


# ------------------------------------------------------------------------------ tied


class TiedNet(Net):
    """The head reads the embedding's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight


class SharedNet(Net):
    """One module registered under two names, and called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


@pytest.mark.parametrize("kind", ["tied", "shared", "list"])
@pytest.mark.parametrize("strategy", WITH_BUCKETS)
@on_ranks(ranks_for)
def test_tied_weights_are_one_parameter(
    rank: int, world_size: int, strategy: str, kind: str
) -> None:
    if strategy == "data_parallel":
        kind = "tied"  # one unit has everything
    net, plain = pair(SharedNet if kind == "shared" else TiedNet)
    if kind == "list":  # tied across the modules of one unit
        sw.fully_shard([net.embedding, net.head], **options_for(strategy, world_size))
    if kind == "shared":
        sw.fully_shard(net.blocks[0], **options_for(strategy, world_size))
        sw.fully_shard(net, **options_for(strategy, world_size))
        assert net.blocks[0] is net.blocks[1]
    else:
        wrap(net, world_size, strategy)
        names = [name for name, _ in net.named_parameters()]
        assert "embedding.weight" in names and "head.weight" not in names
        assert {"embedding.weight", "head.weight"} <= set(net.state_dict())
    Trial(net, plain, rank, world_size, transient_bytes()).train(steps=3)
    assert kind == "shared" or net.head.weight is net.embedding.weight


@on_ranks(2)
def test_weights_tied_across_units_are_refused_by_name(rank: int, world_size: int) -> None:
    net = TiedNet()
    sw.fully_shard(net.embedding, **options_for("zero3", world_size))
    message = raised(lambda: sw.fully_shard(net, **options_for("zero3", world_size)), ValueError)
    assert type(net) is TiedNet, "the refusal changed nothing"
    assert "head.weight" in message and "tied" in message


# ------------------------------------------------------------------------------ odd steps


def evaluated(t: Trial) -> None:
    """Forwards without gradients, of other data and in another number, and inside a step."""
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for step in range(2):
                ours, theirs = (model(words(t.rank, step)) for model in t.both)
                assert not ours.requires_grad
                assert_close(ours, theirs, "output", 1e-6)
    loss = word_loss(t.net, t.rank)
    with torch.no_grad():
        assert_close(t.net(words(t.rank, 1)), t.plain(words(t.rank, 1)), "output", 1e-6)
    loss.backward()
    average_gradients(t.plain, word_loss, t.world_size)


def two_forwards(order: tuple[int, int], t: Trial) -> None:
    """Two forwards before their two backwards, in either order."""
    losses = [word_loss(t.net, t.rank, step) for step in range(2)]
    for position in order:
        losses[position].backward()
    for step in range(2):
        average_gradients(t.plain, partial(word_loss, step=step), t.world_size)


def retained(t: Trial) -> None:
    """Backward twice over one graph."""
    loss = word_loss(t.net, t.rank)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        average_gradients(t.plain, word_loss, t.world_size)


def thrown_away(t: Trial) -> None:
    """Forwards whose backward never comes."""
    for step in range(3):
        assert t.net(words(t.rank, step)).requires_grad
    t.add()


def of_block(model: Any, rank: int) -> Tensor:
    return model.blocks[1](vectors(rank)).square().mean()


def inner_alone(t: Trial) -> None:
    """A unit inside is called by itself, also before its root has ever run."""
    for loss in (of_block, word_loss, of_block):
        t.add(loss)


def anomaly(t: Trial) -> None:
    with torch.autograd.set_detect_anomaly(True):
        t.add()


STEPS = {
    "evaluated": evaluated,
    "two forwards": partial(two_forwards, (0, 1)),
    "two forwards, last first": partial(two_forwards, (1, 0)),
    "retained": retained,
    "thrown away": thrown_away,
    "inner alone": inner_alone,
    "anomaly": anomaly,
}


@pytest.mark.parametrize("name", STEPS)
@on(*WITH_BUCKETS)
def test_odd_steps_have_plain_torchs_gradients(t: Trial, name: str) -> None:
    if name == "inner alone" and type(t.net.blocks[0]) is Block:
        return  # one unit: nothing inside is wrapped
    for _ in range(2):
        STEPS[name](t)
        t.equal()
        t.zero_grad()
    t.backward()
