# SPDX-License-Identifier: Apache-2.0
"""What tests of parity share: models, whole values, small rounds of exchange."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

import shardwise as sw
from shardwise.core.placements import PARTIAL, REPLICATE, SHARD
from shardwise.optim import ownership
from tests.models import Model, make_model, mesh_for, shard_model
from tests.whole import whole_parameters, whole_state


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
