# SPDX-License-Identifier: Apache-2.0
"""Padding is never read, and neither is memory that was acquired and not yet written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.core.memory import Block
from shardwise.shard.module import units_of
from tests.models import PRECISIONS, STRATEGIES, Model, loss_of, make_model, mesh_of, tokens
from tests.parity.helpers import full_parameters, make_sharded
from tests.ranks import on_ranks, run_ranks


@contextmanager
def poisoned_memory() -> Iterator[list[int]]:
    """Every block that gets memory gets NaN in all of it; counts the blocks."""
    acquire, make, count = Block.acquire, Block.__init__, [0]

    def acquire_poison(self: Block) -> None:
        if not self.live:
            acquire(self)
            self.tensor.fill_(math.nan)
            count[0] += 1

    def make_poison(self: Block, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)  # type: ignore[arg-type]
        self.tensor.fill_(math.nan)
        count[0] += 1

    Block.acquire, Block.__init__ = acquire_poison, make_poison  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Block.acquire, Block.__init__ = acquire, make  # type: ignore[method-assign]


def poison_padding(model: Model) -> int:
    """NaN in every element of the main weights that belongs to no parameter."""
    poisoned = 0
    for unit in units_of(model):
        for group in unit.groups:
            padding = torch.ones(group.main.flat.numel(), dtype=torch.bool)
            for low, high, offset, *_ in group.main.pieces:
                padding[offset : offset + high - low] = False
            with torch.no_grad():
                group.main.flat[padding] = math.nan
            poisoned += int(padding.sum())
    return poisoned


def train(model: Model, rank: int, world_size: int, *, poison: bool) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(2):
        if poison:
            poison_padding(model)
        for microbatch in range(3):
            model.set_is_last_backward(microbatch == 2)
            loss_of(model, tokens(step, microbatch, rank, world_size)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return full_parameters(model) | {"norms": torch.stack(norms)}


def check_poison(rank: int, world_size: int, strategy: str, precision: str) -> tuple[int, int]:
    def make() -> Model:
        if strategy == "buckets":
            model = make_model(depth=2)
            return sw.data_parallel(model, mesh=mesh_of(world_size), bucket_mb=0.003)
        return make_sharded(STRATEGIES[strategy], world_size, precision=PRECISIONS[precision])

    expected = train(make(), rank, world_size, poison=False)
    with poisoned_memory() as count:
        model = make()
        padding = poison_padding(model)
        found = train(model, rank, world_size, poison=True)
    for name, value in found.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, expected[name]), name
    return count[0], padding


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [(strategy, "fp32") for strategy in ("zero0", "zero2", "zero3", "hsdp", "buckets")]
    + [(strategy, "bf16") for strategy in ("zero1", "zero3", "hfsdp")],
)
def test_poison_in_padding_and_in_fresh_memory_reaches_nothing(
    strategy: str, precision: str
) -> None:
    world_size = 4 if strategy in ("hsdp", "hfsdp") else 3
    results = run_ranks(check_poison, world_size, strategy, precision)
    assert all(blocks > 0 for blocks, _ in results)
    assert sum(padding for _, padding in results) > 0, "there was padding to poison"


@on_ranks(2)
def test_poison_in_a_parameter_is_noticed(rank: int, world_size: int) -> None:
    """Negative control: one NaN in an element that does belong to a parameter reaches the loss."""
    model = make_sharded(sw.zero(3), world_size)
    if rank == 0:
        with torch.no_grad():
            model._shardwise_unit.groups[0].main.flat[0] = math.nan
    logits = model(torch.arange(17)[None])  # every row of the embedding is read
    assert logits.isnan().any()
