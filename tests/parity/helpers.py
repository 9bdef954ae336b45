# SPDX-License-Identifier: Apache-2.0
"""Training runs to compare: sharded over ranks, and the slow and obvious one in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.placements import PARTIAL, REPLICATE, SHARD
from shardwise.optim import ownership
from tests.models import Model, loss_of, make_model, mesh_for, shard_model, tokens
from tests.whole import whole_parameters, whole_state

STEPS = 2
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
}


@contextmanager
def small_rounds(nbytes: int = 1) -> Iterator[None]:
    """Optimizers that are built meanwhile exchange so little at a time: one matrix of each owner,
    or more."""
    before = ownership._num_rounds

    def num_rounds(matrices: Any, members_of: Any) -> int:
        owned = [[4 * matrices[index].numel for index in own] for own in members_of.values()]
        return min(max(map(len, owned)), -(-max(map(sum, owned)) // nbytes))

    ownership._num_rounds = num_rounds
    try:
        yield
    finally:
        ownership._num_rounds = before


def full(value: Tensor) -> Tensor:
    """The whole tensor in new memory (collective)."""
    value = value.detach()
    return getattr(value, "full_tensor", value.clone)()  # type: ignore[no-any-return]


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Whole parameters and states of ``make_model(depth=2)`` under ``sw.optimizer``: momenta of
    matrices, or the states of a function; and three states of the rest (collective)."""
    found = whole_state(model, optimizer)
    states, left = divmod(len(found) - 15 - 11 * 3, 4)
    assert states and not left
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: Any = "") -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not wrong, (what, wrong)


def every_two_axis_placements() -> list[sw.Placements]:
    """All lists for two axes that the library takes, hand-written ones included."""
    found = []
    pairs = list(itertools.product((REPLICATE, PARTIAL, SHARD), repeat=2))
    for compute, grad, main in itertools.product(pairs, repeat=3):
        try:
            found.append(sw.Placements(compute=compute, grad=grad, main=main))
        except ValueError:
            continue
    return found


def make_sharded(placements: sw.Placements, world_size: int, **options: Any) -> Model:
    return shard_model(make_model(depth=2), placements, mesh_for(placements, world_size), **options)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    found = whole_parameters(model)
    assert len(found) == 15, "every parameter of the model is compared"
    return found


def mean_over_ranks(value: Tensor, world_size: int) -> float:
    total = value.detach().clone()
    torch.distributed.all_reduce(total)
    return total.item() / world_size


def train(
    model: Model,
    rank: int,
    world_size: int,
    *,
    microbatches: int = 1,
    set_to_none: bool = True,
    optimizer: str = "adamw",
    steps: int = STEPS,
) -> list[float]:
    """Train a sharded model; the losses are means over all ranks."""
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for step in range(steps):
        for microbatch in range(microbatches):
            model.set_is_last_backward(microbatch == microbatches - 1)
            batch = tokens(step, microbatch, rank, world_size)
            loss = loss_of(model, batch) / microbatches
            loss.backward()
            losses.append(mean_over_ranks(loss, world_size))
        stepper.step()
        stepper.zero_grad(set_to_none=set_to_none)
    return losses


@cache
def reference(
    microbatches: int = 1, optimizer: str = "adamw", steps: int = STEPS
) -> tuple[dict[str, Tensor], list[float]]:
    """The same training in one process: parameters and losses."""
    model = make_model(depth=2)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for step in range(steps):
        for microbatch in range(microbatches):
            loss = loss_of(model, tokens(step, microbatch)) / microbatches
            loss.backward()
            losses.append(loss.item())
        stepper.step()
        stepper.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def assert_close_to_reference(
    model: Model, losses: list[float], microbatches: int, optimizer: str
) -> None:
    expected, expected_losses = reference(microbatches, optimizer)
    found = full_parameters(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert len(losses) == STEPS * microbatches
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-5)
