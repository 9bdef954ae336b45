# SPDX-License-Identifier: Apache-2.0
"""Kernels that write the gradient of a weight themselves, into ``main_grad``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.cases import pairwise
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    STRATEGIES,
    WIDTH,
    assert_at_rest,
    assert_gradients_equal,
    assert_parameters_equal,
    average_gradients,
    check_backward,
    pair,
    ranks_for,
    transient_bytes,
    vector_loss,
    vectors,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


class FusedLinear(torch.autograd.Function):
    """x @ W.T, whose backward leaves W's gradient in ``W.main_grad`` and returns none."""

    late = False  # whether the weight is read after its gradient was announced

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool, overwrite: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.fused, ctx.overwrite = weight, fused, overwrite
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into = grad.flatten(0, -2).T @ x.flatten(0, -2)
        of_input = None if FusedLinear.late else grad @ weight
        if not ctx.fused:
            return grad @ weight, into, None, None
        parameter = ctx.parameter
        if ctx.overwrite:
            target, fresh = parameter.fresh_main_grad()
            if fresh:
                target.copy_(into)  # whatever was there is not a gradient
            else:
                target.add_(into)
        else:
            parameter.main_grad.add_(into)
        parameter.grad_added_to_main_grad = True
        return grad @ weight if of_input is None else of_input, None, None, None


class Fused(nn.Module):
    """A fused weight between ordinary ones, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(7, WIDTH) / 3)
        self.after = nn.Linear(7, WIDTH)
        self.fused = self.overwrite = self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).to(self.weight.dtype)
        y = FusedLinear.apply(x, self.weight, self.fused, self.overwrite)
        if self.twice:
            y = y + FusedLinear.apply(x * 2, self.weight, self.fused, self.overwrite)
        return self.after(y)


class FusedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fused() for _ in range(2))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)  # the root's, fused too
        self.fused = self.overwrite = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return FusedLinear.apply(x.to(self.weight.dtype), self.weight, self.fused, self.overwrite)


def tell(net: Any, **flags: bool) -> None:
    for module in (net, *net.blocks):
        for name, value in flags.items():
            setattr(module, name, value)


def train_fused(
    rank: int,
    world_size: int,
    strategy: str,
    microbatches: int,
    overwrite: bool,
    set_to_none: bool,
    sync_each: bool,
    mixed: bool,
) -> None:
    net, plain = pair(FusedNet)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    wrap(net, world_size, strategy, **({"mp_policy": policy} if mixed else {}))
    before = transient_bytes()
    tell(net, fused=True, overwrite=overwrite)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(2):
        for microbatch in range(microbatches):
            seed = 10 * step + microbatch
            net.set_is_last_backward(sync_each or microbatch == microbatches - 1)
            vector_loss(net, rank, seed).backward()
            average_gradients(plain, lambda m, r, seed=seed: vector_loss(m, r, seed), world_size)
        assert assert_gradients_equal(net, plain, 0.1 if mixed else 1e-5) == 11
        assert_at_rest(net, before)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad(set_to_none=set_to_none)
    assert_parameters_equal(net, plain, 0.02 if mixed else 1e-5)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "overwrite"), pairwise([*STRATEGIES], [1, 3], [False, True])
)
def test_gradients_written_by_a_kernel_train_like_autograds(
    strategy: str, microbatches: int, overwrite: bool
) -> None:
    run_ranks(
        train_fused,
        ranks_for(strategy),
        strategy,
        microbatches,
        overwrite,
        True,
        False,
        False,
    )


@pytest.mark.parametrize("sync_each", [False, True], ids=["last reduces", "each reduces"])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
def test_gradients_written_by_a_kernel_with_grads_set_to_zero(
    strategy: str, sync_each: bool
) -> None:
    run_ranks(train_fused, ranks_for(strategy), strategy, 3, True, False, sync_each, False)


@pytest.mark.parametrize("overwrite", [False, True], ids=["adds", "overwrites when fresh"])
@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_a_weight_written_twice_in_one_backward(
    rank: int, world_size: int, strategy: str, overwrite: bool
) -> None:
    """The kernel runs twice for one weight in one backward: the second adds to the first."""
    net, plain = pair(FusedNet)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    tell(net, fused=True, overwrite=overwrite, twice=True)
    tell(plain, twice=True)
    for _ in range(2):
        check_backward(net, plain, vector_loss, rank, world_size)
        assert_at_rest(net, before)
        net.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_fresh_memory_is_overwritten_not_added_to(
    rank: int, world_size: int, strategy: str
) -> None:
    """Memory that was never written must not leak into a gradient: it is poisoned here."""
    net, plain = pair(FusedNet)
    wrap(net, world_size, strategy)
    tell(net, fused=True, overwrite=True)
    original = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = original(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() and made.numel() else made

    torch.empty = poisoned
    try:
        for microbatch in range(3):
            net.set_is_last_backward(microbatch == 2)
            vector_loss(net, rank, microbatch).backward()
    finally:
        torch.empty = original
    for microbatch in range(3):
        average_gradients(plain, lambda m, r, s=microbatch: vector_loss(m, r, s), world_size)
    assert_gradients_equal(net, plain)


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_a_kernel_may_read_the_weight_after_it_said_so(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(FusedNet)
    wrap(net, world_size, strategy)
    before = transient_bytes()
    tell(net, fused=True)
    FusedLinear.late = True
    try:
        for _ in range(2):
            check_backward(net, plain, vector_loss, rank, world_size)
            assert_at_rest(net, before)
    finally:
        FusedLinear.late = False


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("strategy", [*MAIN_STRATEGIES, "data_parallel"])
@on_ranks(ranks_for)
def test_a_backward_for_inputs_writes_no_gradient(
    rank: int, world_size: int, strategy: str, overwrite: bool
) -> None:
    """``torch.autograd.grad`` of inputs: what a kernel writes meanwhile, for it does not know
    better, reaches neither microbatches that wait nor gradients that are there."""
    net, plain = pair(FusedNet)
    wrap(net, world_size, strategy)
    tell(net, fused=True, overwrite=overwrite)

    def slope() -> None:
        inputs = [vectors(rank, 9).requires_grad_() for _ in range(2)]
        found = [
            torch.autograd.grad(model(x).square().sum(), x)[0]
            for model, x in zip((net, plain), inputs, strict=True)
        ]
        torch.testing.assert_close(*found)

    for step in range(2):
        slope()
        assert all(one.grad is None for one in net.parameters())
        for last in (False, True):
            net.set_is_last_backward(last)
            net.set_requires_gradient_sync(last)
            vector_loss(net, rank, 2 * step + last).backward()
            slope()
            average_gradients(plain, partial(vector_loss, step=2 * step + last), world_size)
        assert_gradients_equal(net, plain)
        net.zero_grad()
        plain.zero_grad()
