# SPDX-License-Identifier: Apache-2.0
"""Helpers of the contract tests: a small model, wrapping by the name of a strategy, and the truth.

The truth is one process that runs every rank's microbatch and averages:

    def loss(model, rank): ...                     the same function on both sides

    loss(sharded, rank).backward()                 on every rank
    average_gradients(plain, loss, world_size)     sum over ranks / world_size
    assert_gradients_equal(sharded, plain)         check_backward: these three

``@on("zero0", "zero3", make=Net)`` makes a test of a function of one :class:`Trial`: the wrapped
model and the same plain, on every rank of each strategy.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.shard.module import unit_of
from tests.models import STRATEGIES as STRATEGIES
from tests.models import ranks_for as ranks_for
from tests.ranks import on_ranks

# They differ in when weights are gathered and released. zero2 differs from zero1 in what waits
# between microbatches, hsdp from zero3 in an outer reduction: tests of these run all strategies.
MAIN_STRATEGIES = ("zero0", "zero1", "zero3", "hfsdp")
WITH_BUCKETS = ("zero0", "zero3", "hfsdp", "data_parallel")
WIDTH, WORDS = 10, 17
Loss = Callable[[Any, int], Tensor]


class Block(nn.Module):
    """A residual MLP: rows that divide by neither 2, 3 nor 4."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words(rank: int, step: int = 0) -> Tensor:
    """One rank's microbatch, different on every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (3, 5), generator=generator)


def vectors(rank: int, step: int = 0, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, generator=generator)


def word_loss(model: Any, rank: int, step: int = 0) -> Tensor:
    x = words(rank, step)
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def vector_loss(model: Any, rank: int, step: int = 0) -> Tensor:
    return model(vectors(rank, step)).square().mean()


# ------------------------------------------------------------------------------ wrapping


@functools.cache
def mesh_for(strategy: str, world_size: int) -> DeviceMesh:
    """Cached: a mesh of two axes holds sockets for as long as its process lives."""
    if strategy in ("hsdp", "hfsdp"):
        return sw.init_mesh(dp_outer=2, dp=world_size // 2)
    return sw.init_mesh(dp=world_size)


def options_for(strategy: str, world_size: int) -> dict[str, Any]:
    placements = STRATEGIES[strategy]
    mesh = mesh_for("zero" if placements.num_axes == 1 else "hsdp", world_size)
    return {"mesh": mesh, "placements": placements}


def wrap(model: Any, world_size: int, strategy: str = "zero3", **more: Any) -> Any:
    """Every block of ``model.blocks`` (where it has any), then the model; or all in buckets."""
    if strategy == "data_parallel":
        options = options_for("zero1", world_size) | {"bucket_mb": 0.001}
        return sw.data_parallel(model, **options | more)
    options = options_for(strategy, world_size) | more
    for block in getattr(model, "blocks", ()):
        sw.fully_shard(block, **options)
    return sw.fully_shard(model, **options)


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Two models with the same values: one to wrap, one to stay plain."""
    torch.manual_seed(7)
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    return model, plain


def num_groups(*modules: Any) -> int:
    """How many buffers these wrapped modules own: one collective each (a layout may take several
    buffers for parameters whose rows fit badly together)."""
    units = {id(unit): unit for module in modules if (unit := unit_of(module)) is not None}
    assert units
    return sum(len(unit.groups) for unit in units.values())


# ------------------------------------------------------------------------------ the truth


def average_gradients(plain: nn.Module, loss: Loss, world_size: int) -> None:
    """Add to ``.grad`` what data parallelism over ``world_size`` ranks would."""
    for rank in range(world_size):
        (loss(plain, rank) / world_size).backward()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_close(ours: Tensor, theirs: Tensor, name: str, tolerance: float = 1e-5) -> None:
    assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
    worst = (ours.cpu().double() - theirs.cpu().double()).abs().max().item()
    assert worst <= tolerance, f"{name}: differs by {worst}"


def assert_piece_close(ours: Tensor, theirs: Tensor, name: str, tolerance: float) -> None:
    """This rank's piece of ``ours``; the ranks together see to the whole, without communication."""
    if isinstance(ours, sw.ShardedTensor):
        assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
        low, high = ours.cut.piece
        ours, theirs = ours.to_local().reshape(-1), theirs.reshape(-1)[low:high]
        if low == high:
            return
    assert_close(ours.detach(), theirs.detach(), name, tolerance)


def assert_gradients_equal(sharded: Any, plain: Any, tolerance: float = 1e-5) -> int:
    """Every gradient of the plain model is on the sharded one, and there is at least one."""
    ours, theirs = dict(sharded.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs), (list(ours), list(theirs))
    compared, largest = 0, 0.0
    for name, parameter in theirs.items():
        if parameter.grad is None:
            assert ours[name].grad is None, f"{name} has a gradient, and no one should"
            continue
        grad = ours[name].grad
        assert grad is not None, f"{name} has no gradient"
        assert_piece_close(grad, parameter.grad, f"grad of {name}", tolerance)
        if compared == 0:  # that the pieces make up the whole, once
            assert_close(full(grad), parameter.grad, f"whole grad of {name}", tolerance)
        largest = max(largest, parameter.grad.abs().max().item())
        compared += 1
    assert compared > 0 and largest > 0, "nothing was compared"
    return compared


def check_backward(
    net: Any, plain: Any, loss: Any, rank: int, world_size: int, *args: Any, tolerance: float = 1e-5
) -> int:
    """One backward on both sides, and equal gradients; how many there are."""
    loss(net, rank, *args).backward()
    average_gradients(plain, lambda model, each: loss(model, each, *args), world_size)
    return assert_gradients_equal(net, plain, tolerance)


def assert_parameters_equal(sharded: Any, plain: Any, tolerance: float = 1e-5) -> None:
    ours, theirs = dict(sharded.named_parameters()), dict(plain.named_parameters())
    assert theirs and list(ours) == list(theirs), (list(ours), list(theirs))
    for name, parameter in theirs.items():
        assert_piece_close(ours[name].detach(), parameter, name, tolerance)
    name = next(iter(theirs))  # that the pieces make up the whole, once
    assert_close(full(ours[name]), theirs[name].detach(), f"whole {name}", tolerance)


# ------------------------------------------------------------------------------ at rest


def transient_bytes() -> dict[str, int]:
    """Bytes of the kinds that a model at rest holds only as far as its strategy keeps them."""
    kinds = ("compute", "grad_transient", "grad_accumulator")
    return {kind: sw.ledger.current[kind] for kind in kinds}


def assert_at_rest(model: nn.Module, before: dict[str, int]) -> None:
    """Every unit holds its sharded parameters again, and nothing gathered is left behind."""
    parameters = dict(model.named_parameters())
    assert parameters
    gathered = [name for name, value in parameters.items() if not isinstance(value, DTensor)]
    assert not gathered, f"not at rest: {gathered}"
    assert transient_bytes() == before, (transient_bytes(), before)


# ------------------------------------------------------------------------------ trials


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@dataclass
class Trial:
    """A wrapped model and the same plain, as one rank sees them."""

    net: Any
    plain: Any
    rank: int
    world_size: int
    before: dict[str, int]

    @property
    def both(self) -> tuple[Any, Any]:
        return self.net, self.plain

    def add(self, loss: Any = word_loss, *args: Any) -> None:
        """One backward on both sides."""
        loss(self.net, self.rank, *args).backward()
        average_gradients(self.plain, lambda m, each: loss(m, each, *args), self.world_size)

    def equal(self, tolerance: float = 1e-5) -> int:
        """Equal gradients, and nothing gathered is left; how many gradients there are."""
        compared = assert_gradients_equal(self.net, self.plain, tolerance)
        assert_at_rest(self.net, self.before)
        return compared

    def backward(self, loss: Any = word_loss, *args: Any, tolerance: float = 1e-5) -> int:
        self.add(loss, *args)
        return self.equal(tolerance)

    def zero_grad(self) -> None:
        for model in self.both:
            model.zero_grad()

    def train(
        self, loss: Any = word_loss, steps: int = 2, make: Any = sgd, tolerance: float = 1e-5
    ) -> None:
        """Gradients in each step, and weights at the end, are those of plain torch."""
        optimizers = [make(model) for model in self.both]
        for step in range(steps):
            self.backward(loss, step, tolerance=tolerance)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_parameters_equal(self.net, self.plain, tolerance)


def trial(
    rank: int, world_size: int, strategy: str, make: Callable[[], Any] = Net, **options: Any
) -> Trial:
    net, plain = pair(make)
    wrap(net, world_size, strategy, **options)
    return Trial(net, plain, rank, world_size, transient_bytes())


def on(*strategies: str, make: Callable[[], Any] = Net, **options: Any) -> Any:
    """Make a test of a function of a trial (and of the test's other parameters)."""

    def decorate(function: Any) -> Any:
        def run(rank: int, world_size: int, strategy: str, *values: Any) -> None:
            function(trial(rank, world_size, strategy, make, **options), *values)

        _, *others = inspect.signature(function).parameters.values()
        *known, _ = inspect.signature(run).parameters.values()
        run.__signature__ = inspect.Signature([*known, *others])  # type: ignore[attr-defined]
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(run, name, getattr(function, name))
        return pytest.mark.parametrize("strategy", strategies)(on_ranks(ranks_for)(run))

    return decorate


def raised(call: Callable[[], Any], kind: type[BaseException]) -> str:
    """The message of the exception that ``call`` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"nothing was raised; expected a {kind.__name__}")


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages that the library logs meanwhile."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    yield texts
    logging.getLogger("shardwise").removeHandler(handler)
