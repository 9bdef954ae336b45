# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: what is reduced when, and what a step sees."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_

import shardwise as sw
from tests.contract.helpers import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    pair,
    raised,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

REDUCTIONS = ("reduce_scatter", "all_reduce")
MICROBATCHES = 3


def announce(net: Any, how: str, last: bool) -> None:
    """The ways to say that more microbatches come."""
    if how == "no sync":
        net.set_requires_gradient_sync(last)
    elif how == "last backward":
        net.set_is_last_backward(last)
    elif how == "both":
        net.set_requires_gradient_sync(last)
        net.set_is_last_backward(last)
    elif how == "all reduce":
        net.set_requires_all_reduce(last)
    else:
        assert how == "nothing"


def accumulate(
    rank: int, world_size: int, strategy: str, how: str, set_to_none: bool, mixed: bool = False
) -> None:
    net, plain = pair(Net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap(net, world_size, strategy, **({"mp_policy": policy} if mixed else {}))
    before = transient_bytes()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for microbatch in range(MICROBATCHES):
            seed = 10 * step + microbatch
            last = microbatch == MICROBATCHES - 1
            announce(net, how, last)
            with sw.comm.record() as calls:
                word_loss(net, rank, seed).backward()
            if how in ("no sync", "both") and not last:
                assert {call.operation for call in calls} <= {"all_gather"}
                if set_to_none:
                    assert all(p.grad is None for p in net.parameters()), "nothing is shown yet"
            if last:
                assert [call for call in calls if call.operation in REDUCTIONS]
            average_gradients(plain, lambda m, r, seed=seed: word_loss(m, r, seed), world_size)
        assert_gradients_equal(net, plain, 0.05 if mixed else 1e-5)
        assert_at_rest(net, before)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad(set_to_none=set_to_none)
    assert_parameters_equal(net, plain, 0.02 if mixed else 1e-5)


WAYS = [
    ("no sync", True),
    ("last backward", False),
    ("both", False),
    ("all reduce", True),
    ("nothing", False),
]


# Every way under zero3, those that mean something else on two axes under hfsdp, and each strategy
# twice.
@pytest.mark.parametrize(
    ("strategy", "how", "set_to_none"),
    [("zero3", *way) for way in WAYS]
    + [("hfsdp", *way) for way in (WAYS[0], *WAYS[3:])]
    + [(strategy, *way) for strategy in ("zero0", "zero1", "zero2", "hsdp") for way in WAYS[:4:3]]
    + [("data_parallel", *way) for way in WAYS[:2]],
)
def test_microbatches_add_up_however_they_are_announced(
    strategy: str, how: str, set_to_none: bool
) -> None:
    run_ranks(accumulate, ranks_for(strategy), strategy, how, set_to_none)


class Late(nn.Module):
    """A branch that only the last microbatch takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.taken = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        return self.branch(x) if self.taken else x


@pytest.mark.parametrize(
    ("strategy", "mixed"),
    [(name, False) for name in STRATEGIES] + [(name, True) for name in ("zero0", "zero3", "hfsdp")],
)
@on_ranks(ranks_for)
def test_a_parameter_first_used_on_the_last_microbatch(
    rank: int, world_size: int, strategy: str, mixed: bool
) -> None:
    net, plain = pair(Late)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if mixed else {}
    wrap(net, world_size, strategy, unused_parameters="zeros", **options)
    before = transient_bytes()

    def loss(model: Any, which: int, seed: int) -> Tensor:
        return model(vectors(which, seed)).float().square().mean()

    for _ in range(2):
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            net.taken = plain.taken = last
            net.set_requires_gradient_sync(last)
            loss(net, rank, microbatch).backward()
            average_gradients(plain, lambda m, r, s=microbatch: loss(m, r, s), world_size)
        assert net.branch.weight.grad is not None
        assert_gradients_equal(net, plain, 0.05 if mixed else 1e-5)
        assert_at_rest(net, before)
        net.zero_grad()
        plain.zero_grad()


def optimizer_of(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    return sw.optimizer(net, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=0.01))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "muon"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_stepping_while_gradients_wait_unreduced_is_refused(
    rank: int, world_size: int, strategy: str, kind: str, first: bool
) -> None:
    net = wrap(Net(), world_size, strategy)
    optimizer = optimizer_of(net, kind)
    if not first:  # with grads of before: those of the last microbatch are still unreduced
        word_loss(net, rank).backward()
        optimizer.step()
    if first:
        optimizer.zero_grad()
    net.set_requires_gradient_sync(False)
    word_loss(net, rank).backward()
    clip = getattr(optimizer, "clip_grad_norm", partial(clip_grad_norm_, list(net.parameters())))
    checked = [partial(clip, 1.0)] if hasattr(optimizer, "clip_grad_norm") else []
    for call in (optimizer.step, *checked):  # torch's own clipping looks for nothing
        message = raised(call, RuntimeError)
        assert "before the last microbatch" in message and "'embedding.weight'" in message
    net.set_requires_gradient_sync(True)
    word_loss(net, rank).backward()  # the last one after all
    clip(1.0)
    optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("zero3", "no sync"),
        ("zero0", "last backward"),
        ("zero1", "no sync"),
        ("hfsdp", "all reduce"),
    ],
)
@on_ranks(ranks_for)
def test_zero_grad_of_a_model_drops_microbatches_that_wait(
    rank: int, world_size: int, strategy: str, how: str
) -> None:
    """A batch is given up between its microbatches: nothing of it comes back."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    optimizer, other = optimizer_of(net, "sgd"), optimizer_of(plain, "sgd")
    for step in range(3):
        if step == 2:  # on top of gradients that are there
            word_loss(net, rank).backward()
        for microbatch in range(2):
            announce(net, how, False)
            word_loss(net, rank, 10 * step + microbatch).backward()
        net.zero_grad(set_to_none=step == 0)
        announce(net, how, True)
        word_loss(net, rank, 100 + step).backward()
        average_gradients(plain, lambda m, r, s=step: word_loss(m, r, 100 + s), world_size)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        assert_parameters_equal(net, plain, 1e-5)


class Choosing(nn.Module):
    """Blocks, of which each microbatch runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.chosen: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number in self.chosen:
            x = self.blocks[number](x)
        return self.last(x)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_units_that_only_earlier_microbatches_used(
    rank: int, world_size: int, strategy: str
) -> None:
    """The last microbatch reduces what waits in them, though its backward does not come to them."""
    net, plain = pair(Choosing)
    wrap(net, world_size, strategy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]
    for step in range(2):
        for number, chosen in enumerate([(0, 1), (2,), (1,)]):
            net.set_requires_gradient_sync(number == 2)
            net.chosen = plain.chosen = chosen
            vector_loss(net, rank, 10 * step + number).backward()
            for each in range(world_size):
                (vector_loss(plain, each, 10 * step + number) / world_size).backward()
        assert_gradients_equal(net, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
