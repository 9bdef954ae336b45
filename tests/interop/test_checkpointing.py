# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: recomputed forwards inside backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.cases import pairwise
from tests.contract.helpers import (
    WIDTH,
    Block,
    assert_at_rest,
    assert_gradients_equal,
    average_gradients,
    full,
    options_for,
    pair,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
)
from tests.ranks import on_ranks, run_ranks


class Inside(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = Block()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = run(self.part, x, self.reentrant)
        return self.last(x)


def run(module: nn.Module, x: Tensor, reentrant: bool | None) -> Tensor:
    return module(x) if reentrant is None else checkpoint(module, x, use_reentrant=reentrant)


class CheckpointedNet(nn.Module):
    """Checkpoints around each unit, inside each unit, both, or around two units at once."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Inside() for _ in range(3))
        self.exit = nn.Linear(WIDTH, WIDTH)
        self.around: bool | None = None
        self.both_of: bool | None = None

    def tell(self, where: str, reentrant: bool | None) -> None:
        self.around = reentrant if where in ("around", "nested") else None
        self.both_of = reentrant if where == "two units" else None
        for block in self.blocks:
            block.reentrant = reentrant if where in ("inside", "nested") else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        if self.both_of is not None:
            x = run(nn.Sequential(self.blocks[0], self.blocks[1]), x, self.both_of)
            x = self.blocks[2](x)
        else:
            for block in self.blocks:
                x = run(block, x, self.around)
        return self.exit(x)


def gradients(net: CheckpointedNet, rank: int, where: str, reentrant: bool | None) -> list[Tensor]:
    net.tell(where, reentrant)
    net.zero_grad()
    vector_loss(net, rank).backward()
    grads = [full(parameter.grad).clone() for parameter in net.parameters()]
    assert len(grads) == 3 * 10 + 4 and all(grad.abs().max() > 0 for grad in grads)
    return grads


def checkpointed(
    rank: int, world_size: int, strategy: str, where: str, reentrant: bool, keep: bool | None
) -> None:
    net, plain = pair(CheckpointedNet)
    options = options_for(strategy, world_size)
    for block in net.blocks:
        sw.fully_shard(block, **options, reshard_after_forward=keep)
    sw.fully_shard(net, **options)
    before = transient_bytes()
    expected = gradients(net, rank, where, None)
    for _ in range(2):
        found = gradients(net, rank, where, reentrant)
        assert_at_rest(net, before)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), "recomputation changes no bit"
    average_gradients(plain, vector_loss, world_size)
    assert_gradients_equal(net, plain)


@pytest.mark.parametrize(
    ("strategy", "reentrant", "where"),
    pairwise(
        ["zero0", "zero3", "hfsdp"], [True, False], ["around", "inside", "nested", "two units"]
    ),
)
def test_checkpointing_changes_no_bit_and_leaves_all_at_rest(
    strategy: str, reentrant: bool, where: str
) -> None:
    run_ranks(checkpointed, ranks_for(strategy), strategy, where, reentrant, None)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_with_weights_kept_after_forward(reentrant: bool) -> None:
    run_ranks(checkpointed, 2, "zero3", "around", reentrant, False)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@on_ranks(2)
def test_checkpointing_around_nested_units(rank: int, world_size: int, reentrant: bool) -> None:
    """A unit with a unit inside, and the checkpoint around the outer one; the order of units in
    the recomputation is another than forward's."""
    net, _ = pair(CheckpointedNet)
    options = options_for("zero3", world_size)
    for block in net.blocks:
        sw.fully_shard(block.part, **options)
        sw.fully_shard(block, **options)
    sw.fully_shard(net, **options)
    before = transient_bytes()
    expected = gradients(net, rank, "around", None)
    for where in ("around", "inside", "nested"):
        found = gradients(net, rank, where, reentrant)
        assert_at_rest(net, before)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), where


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@on_ranks(2)
def test_checkpointing_gathers_no_more_often(rank: int, world_size: int, reentrant: bool) -> None:
    """A recomputation uses the weights that backward gathers anyway."""
    net, _ = pair(CheckpointedNet)
    options = options_for("zero3", world_size)
    for block in net.blocks:
        sw.fully_shard(block, **options)
    sw.fully_shard(net, **options)
    gradients(net, rank, "around", None)
    counts = []
    for mode in (None, reentrant):
        with sw.comm.record() as calls:
            net.tell("around", mode)
            vector_loss(net, rank).backward()
        counts.append([call.operation for call in calls].count("all_gather"))
    assert counts[0] >= 3 + 1 + 3, counts
    assert counts[1] == counts[0], counts


class FrozenEntry(nn.Module):
    """Backward ends in the checkpoint: no input of the unit needs a gradient, and the gradients of
    ``last`` come first. ``spare`` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.aside = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.entry(x).requires_grad_()  # as libraries do for adapters
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=True)
        if self.aside:  # a way from inputs to outputs that is through before the checkpoints are
            return self.last(y) + x.sum()
        return self.last(y)


def frozen_entry(rank: int, world_size: int, strategy: str, aside: bool, used: bool) -> None:
    net, plain = pair(FrozenEntry)
    if used:
        for model in (net, plain):
            model.spare = None
    if strategy == "data_parallel":
        options = options_for("zero1", world_size) | {"bucket_mb": 0.0001}
        sw.data_parallel(net, **options, unused_parameters="zeros")
    else:
        sw.fully_shard(net, **options_for(strategy, world_size), unused_parameters="zeros")
    before = transient_bytes()
    net.aside = plain.aside = aside

    def loss(model: Any, rank: int, step: int = 0) -> Tensor:
        x = vectors(rank, step)
        return model(x.requires_grad_(aside)).square().mean()

    for step in range(2):
        loss(net, rank, step).backward()
        average_gradients(plain, partial(loss, step=step), world_size)
        for parameter in () if used else plain.spare.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert_gradients_equal(net, plain)
        assert_at_rest(net, before)


@pytest.mark.parametrize(
    ("strategy", "aside", "used"),
    pairwise(["zero0", "zero1", "zero3", "hfsdp", "data_parallel"], [True, False], [True, False]),
)
def test_reentrant_checkpoints_that_unused_parameters_must_wait_for(
    strategy: str, aside: bool, used: bool
) -> None:
    world_size = 2 if strategy == "data_parallel" else ranks_for(strategy)
    run_ranks(frozen_entry, world_size, strategy, aside, used)


class Twice(nn.Module):
    """Reads a weight inside a checkpoint and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        return run(self.part, self.part(x), reentrant)


@pytest.mark.parametrize("needs", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("wrap", [sw.fully_shard, sw.data_parallel])
@on_ranks(2)
def test_weights_read_inside_a_checkpoint_and_outside(
    rank: int, world_size: int, wrap: Any, needs: bool
) -> None:
    """``needs``: whether its inputs need gradients."""
    reference, model = Twice(), Twice()
    model.load_state_dict(reference.state_dict())
    wrap(model, mesh=sw.init_mesh(dp=2, device_type="cpu"))

    def loss(net: nn.Module, rank: int, reentrant: bool | None = None) -> Tensor:
        return net(vectors(rank).requires_grad_(needs), reentrant).square().sum()  # type: ignore[no-any-return]

    average_gradients(reference, loss, world_size)
    for reentrant in (True, False):
        loss(model, rank, reentrant=reentrant).backward()
        assert_gradients_equal(model, reference)
        model.zero_grad()
