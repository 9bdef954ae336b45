# SPDX-License-Identifier: Apache-2.0
"""Parameters without gradients: whole units, some of a unit, and changes of mind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.cases import pairwise
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    WIDTH,
    Net,
    assert_at_rest,
    assert_close,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    full,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


def freeze(model: nn.Module, *parts: str) -> None:
    touched = 0
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.requires_grad_(False)
            touched += 1
    assert touched, parts


def steps(net: nn.Module, plain: nn.Module, rank: int, world_size: int, count: int) -> None:
    before = transient_bytes()
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for step in range(count):
        check_backward(net, plain, word_loss, rank, world_size, step)
        assert_at_rest(net, before)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_parameters_equal(net, plain)


FROZEN = {
    "first unit": ("blocks.0",),
    "last unit": ("blocks.2",),
    "all but the middle unit": ("embedding", "blocks.0", "blocks.2", "head"),
    "some of every unit": ("up", "embedding"),
    "the root's own": ("embedding", "head"),
}


def train_frozen(rank: int, world_size: int, strategy: str, parts: tuple[str, ...]) -> None:
    net, plain = pair(lambda: Net(layers=3))
    freeze(net, *parts)
    freeze(plain, *parts)
    kept = {n: p.detach().clone() for n, p in net.named_parameters() if not p.requires_grad}
    wrap(net, world_size, strategy)
    steps(net, plain, rank, world_size, 2)
    for name, value in kept.items():
        assert net.get_parameter(name).grad is None
        assert torch.equal(full(net.get_parameter(name)), value), name


# Each part where weights are gathered again for backward, and one more time where they stay.
@pytest.mark.parametrize(
    ("strategy", "frozen"),
    [("zero3", frozen) for frozen in FROZEN]
    + [("zero0", "first unit"), ("zero0", "some of every unit"), ("zero1", "the root's own")]
    + [("zero1", "last unit"), ("zero1", "some of every unit")]
    + [("hfsdp", "all but the middle unit"), ("hfsdp", "some of every unit")],
)
def test_frozen_parameters_stay_and_the_others_train(strategy: str, frozen: str) -> None:
    run_ranks(train_frozen, ranks_for(strategy), strategy, FROZEN[frozen])


class Adapted(nn.Module):
    """Low-rank adaptation. The frozen weight comes first in forward, so backward reads it last:
    after both adapters have their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.up(self.down(y))


class AdaptedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hsdp", "hfsdp"])
@on_ranks(ranks_for)
def test_a_frozen_model_passes_gradients_through_and_reduces_nothing(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(AdaptedNet)
    for model in (net, plain):
        model.requires_grad_(False)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for step in range(2):
        ours = vectors(rank, step).requires_grad_()
        theirs = vectors(rank, step).requires_grad_()
        with sw.comm.record() as calls:
            net(ours).square().mean().backward()
        plain(theirs).square().mean().backward()
        assert ours.grad is not None and ours.grad.abs().sum() > 0
        assert_close(ours.grad, theirs.grad, "gradient of the input", 1e-6)
        assert all(p.grad is None for p in net.parameters())
        assert_at_rest(net, before)
        assert not [c for c in calls if c.operation in ("reduce_scatter", "all_reduce")]


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train_then_change(
    rank: int, world_size: int, strategy: str, mixed: bool, first: bool, part: str
) -> None:
    """``part`` starts trainable or not (``first``), then changes to the other."""
    net, plain = pair(Net)
    for model in (net, plain):
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.requires_grad_(first)
    wrap(net, world_size, strategy, **({"mp_policy": MIXED} if mixed else {}))
    before = transient_bytes()
    tolerance = 0.03 if mixed else 1e-5
    count = 0
    for step, trainable in enumerate((first, first, not first, not first, first)):
        for model in (net, plain):
            for name, parameter in model.named_parameters():
                if part in name:
                    parameter.requires_grad_(trainable)
                    count += 1
        word_loss(net, rank, step).float().backward()
        average_gradients(plain, lambda m, r, step=step: word_loss(m, r, step), world_size)
        assert_gradients_equal(net, plain, tolerance)
        assert_at_rest(net, before)
        for parameter in net.parameters():
            assert parameter.grad is None or parameter.grad.dtype == torch.float32
        for model in (net, plain):
            model.zero_grad()
    assert count


CASES = [("zero3", False), ("zero1", True), ("zero3", True), ("hfsdp", True)]


@pytest.mark.parametrize(
    ("case", "first", "part"), pairwise(CASES, [False, True], ["blocks.0", "up", "embedding"])
)
def test_frozen_and_trained_in_turn(case: tuple[str, bool], first: bool, part: str) -> None:
    strategy, mixed = case
    run_ranks(train_then_change, ranks_for(strategy), strategy, mixed, first, part)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_parameter_that_only_some_ranks_train_is_loudly_nan(
    rank: int, world_size: int, strategy: str
) -> None:
    net = wrap(Net(), world_size, strategy)
    net.blocks[1].up.weight.requires_grad_(rank == 0)
    word_loss(net, rank).backward()
    grad = net.blocks[1].up.weight.grad
    assert (grad is None) == (rank != 0) and (rank or grad.to_local().isnan().all())


@on_ranks(2)
def test_freezing_gathered_weights_outlives_them(rank: int, world_size: int) -> None:
    """``requires_grad_`` of weights that unshard() shows, or that stayed after a forward."""
    net, plain = pair(Net)
    wrap(net, world_size)
    word_loss(net, rank).backward()
    net.zero_grad()
    net.blocks[0].unshard()
    net.blocks[0].requires_grad_(False)
    net.blocks[0].reshard()
    plain.blocks[0].requires_grad_(False)
    check_backward(net, plain, word_loss, rank, world_size)
    net(words(rank))
    assert not isinstance(net.embedding.weight, DTensor)
    net.embedding.requires_grad_(False)
    plain.embedding.requires_grad_(False)
    check_backward(net, plain, word_loss, rank, world_size)
    assert not net.embedding.weight.requires_grad


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "data_parallel"])
@on_ranks(ranks_for)
def test_microbatches_before_a_freeze_count(rank: int, world_size: int, strategy: str) -> None:
    """As in plain torch, where gradients of earlier microbatches stay; not lost without a word."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.set_requires_gradient_sync(False)
    word_loss(net, rank, 0).backward()
    average_gradients(plain, lambda model, each: word_loss(model, each, 0), world_size)
    for model in (net, plain):
        model.blocks[1].up.requires_grad_(False)
    assert "still wait unreduced" in raised(optimizer.step, RuntimeError)
    net.set_requires_gradient_sync(True)
    check_backward(net, plain, word_loss, rank, world_size, 1)
    assert net.blocks[1].up.weight.grad is not None
    for model in (net, plain):  # all of a unit
        model.zero_grad()
    net.set_requires_gradient_sync(False)
    word_loss(net, rank, 0).backward()
    average_gradients(plain, lambda model, each: word_loss(model, each, 0), world_size)
    net.set_requires_gradient_sync(True)
    for model in (net, plain):
        model.blocks[0].requires_grad_(False)
    check_backward(net, plain, word_loss, rank, world_size, 1)
    assert net.blocks[0].up.weight.grad is not None
    optimizer.step()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks(2)
def test_a_change_of_mind_between_forward_and_backward_lasts(
    rank: int, world_size: int, strategy: str
) -> None:
    """There the modules of a root hold whole weights."""
    net, plain = pair(Net)
    for model in (net, plain):
        freeze(model, "head", "blocks.0.up")
    wrap(net, world_size, strategy)
    for step, wanted in enumerate([True, True, False, False]):
        for model in (net, plain):
            ranks = [rank] if model is net else range(world_size)
            loss = sum(word_loss(model, one, step) for one in ranks) / len(ranks)
            model.head.requires_grad_(wanted)
            model.blocks[0].requires_grad_(wanted)
            loss.backward()
        assert_gradients_equal(net, plain)
        assert [p.requires_grad for p in net.parameters()] == [
            p.requires_grad for p in plain.parameters()
        ]
        for model in (net, plain):
            model.zero_grad()


@pytest.mark.parametrize("frozen", ["blocks.1.up", "blocks"])
@pytest.mark.parametrize("strategy", ["zero0", "zero3", "data_parallel"])
@on_ranks(ranks_for)
def test_what_is_frozen_for_an_evaluation_alone_gets_its_gradient(
    rank: int, world_size: int, strategy: str, frozen: str
) -> None:
    """Frozen after its forward, for one more, and trained again before backward."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    for model in (net, plain):
        ranks = [rank] if model is net else range(world_size)
        loss = sum(word_loss(model, one, 0) for one in ranks) / len(ranks)
        model.get_submodule(frozen).requires_grad_(False)
        word_loss(model, rank, 1)
        model.get_submodule(frozen).requires_grad_(True)
        loss.backward()
    assert_gradients_equal(net, plain)
    assert net.blocks[1].up.weight.grad is not None


class AdaptedInside(nn.Module):
    """A frozen body with trained adapters in reentrant checkpoints, as transformers train LoRA: the
    graph of the outer backward has no parameter that is trained, and no gate of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_adapters_inside_reentrant_checkpoints_of_a_frozen_model(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(AdaptedInside)
    wrap(net, world_size, strategy)
    for step in range(2):
        check_backward(net, plain, vector_loss, rank, world_size, step)
    assert all(p.grad is not None for p in net.blocks.parameters())
    assert net.head.weight.grad is None
