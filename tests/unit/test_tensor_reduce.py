# SPDX-License-Identifier: Apache-2.0
"""Norms, sums, clipping and loss scaling: one value of all pieces, the same on every rank."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.values import encode
from shardwise.core import comm
from shardwise.core.tensor import ShardedTensor
from shardwise.core.tensor_whole import WholeTensor
from tests.worlds import (
    NAN,
    SOME_CASES,
    World,
    full_tensors,
    parameters_of,
    run_case,
)

# ---------------------------------------------------------------------- reductions


def check_reductions(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    fulls = full_tensors()
    close = {"rtol": 1e-5, "atol": 1e-6}
    for name, tensor in world.tensors(fulls).items():
        full = fulls[name]
        for order in (2, 1, 0, 3, -1, math.inf, -math.inf):
            ours = torch.linalg.vector_norm(tensor, order)
            assert type(ours) is WholeTensor
            torch.testing.assert_close(ours, torch.linalg.vector_norm(full, order), **close)
        for op in ("sum", "mean", "max", "min", "amax", "amin", "any", "all", "norm"):
            ours, theirs = getattr(tensor, op)(), getattr(full, op)()
            assert type(ours) is WholeTensor and ours.dtype == theirs.dtype, op
            torch.testing.assert_close(ours, theirs, **close)
        torch.testing.assert_close(torch.norm(tensor), torch.norm(full), **close)
        assert torch.count_nonzero(tensor > 0) == torch.count_nonzero(full > 0)
        assert (tensor > 0).sum() == (full > 0).sum()
        assert not (tensor > 100).any() and (tensor < 100).all()
        assert torch.equal(tensor, tensor.clone()) and torch.equal(tensor, full)
        assert not torch.equal(tensor, tensor + 1)
        if full.ndim == 1:
            torch.testing.assert_close(tensor.dot(tensor), full.dot(full), **close)
            torch.testing.assert_close(tensor.sum(dim=0), full.sum(dim=0), **close)
        if full.ndim == 2:
            torch.testing.assert_close(tensor.sum(dim=(0, 1)), full.sum(), **close)
            torch.testing.assert_close(tensor.sum(dim=0), full.sum(dim=0), **close)
            torch.testing.assert_close(tensor.max(dim=0).indices, full.max(dim=0).indices)
        if full.ndim == 0:
            assert tensor.item() == full.item()
        # NaN somewhere is NaN everywhere, also for a maximum
        poisoned = full.clone().view(-1)
        poisoned[-1] = NAN
        sharded = ShardedTensor(tensor.cut.take(poisoned.view(full.shape)).clone(), tensor.cut)
        for value in (
            sharded.max(),
            sharded.min(),
            sharded.sum(),
            torch.linalg.vector_norm(sharded, math.inf),
            torch.linalg.vector_norm(sharded),
        ):
            assert value.isnan()
    # large half-precision values: partial norms must not overflow when squared
    large = {name: full * 0 + 100.0 for name, full in full_tensors(dtype=torch.float16).items()}
    for name, tensor in world.tensors(large).items():
        expected = torch.linalg.vector_norm(large[name], dtype=torch.float32)
        torch.testing.assert_close(
            torch.linalg.vector_norm(tensor).float(), expected, rtol=1e-3, atol=0
        )


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_reductions_are_global(case: tuple[Any, ...]) -> None:
    run_case(check_reductions, case)


def assert_kept(norm: Tensor) -> None:
    """A norm in a log that is copied, or in a file that torch loads, is the same number."""
    copied, file = copy.deepcopy({"norm": norm})["norm"], io.BytesIO()
    assert type(copied) is WholeTensor and copied is not norm and torch.equal(copied, norm)
    torch.save(norm, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is Tensor and torch.equal(loaded, norm)
    assert encode(norm, "extra") == encode(loaded, "extra")  # sw.save(extra={"norm": norm})


def check_clipping(rank: int, world_size: int, *case: Any) -> list[list[str]]:
    world = World(*case)
    extra = torch.randn(4, 4, generator=torch.Generator().manual_seed(5))
    collectives = []
    for foreach in (None, True, False):
        for order in (2.0, math.inf, 1.0):
            plain = [*parameters_of(full_tensors()).values(), nn.Parameter(extra.clone())]
            ours = [
                *parameters_of(world.tensors(full_tensors())).values(),
                nn.Parameter(extra.clone()),
            ]
            grads = {name: grad * 10 for name, grad in full_tensors(seed=2).items()}
            for one, grad in zip(plain, [*grads.values(), extra], strict=True):
                one.grad = grad.clone()
            for one, grad in zip(ours, [*world.tensors(grads).values(), extra], strict=True):
                one.grad = grad.clone()
            expected = nn.utils.clip_grad_norm_(plain, 1.0, order, foreach=foreach)
            with comm.record() as calls:
                norm = nn.utils.clip_grad_norm_(ours, 1.0, order, foreach=foreach)
            if foreach is not False:
                collectives.append([call.operation for call in calls])
            assert type(norm) is WholeTensor and type(norm.full_tensor()) is Tensor
            assert_kept(norm)
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            for one, other in zip(ours, plain, strict=True):
                grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
                torch.testing.assert_close(grad, other.grad, rtol=1e-6, atol=1e-9)
            total = nn.utils.get_total_norm([one.grad for one in ours], foreach=foreach)
            torch.testing.assert_close(
                total, nn.utils.get_total_norm([one.grad for one in plain]), rtol=1e-5, atol=0
            )
    return collectives


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_clip_grad_norm_equals_unsharded(case: tuple[Any, ...]) -> None:
    _, mesh_shape, sharded, *_ = case
    axes = sum(cut and size > 1 for cut, size in zip(sharded, mesh_shape, strict=True))
    for collectives in run_case(check_clipping, case):
        assert len(collectives) == 6
        # one per sharded axis for the whole list; none over the replicated axis
        assert all(len(calls) == axes for calls in collectives)
        assert collectives[0] == ["all_reduce"] * axes


def check_grad_scaler(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    for fused in (False, True):
        for bad in (False, True):
            ours = parameters_of(world.tensors(full_tensors()))
            plain = parameters_of(full_tensors())
            grads = full_tensors(seed=4)
            if bad:
                grads["wide"][-1, -1] = math.inf  # on one rank only
            sharded = world.tensors({name: grad * 1024 for name, grad in grads.items()})
            runs = []
            for parameters, theirs in ((ours, sharded), (plain, grads)):
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.1, fused=fused)
                scaler.scale(torch.zeros(()))  # makes the scale tensor
                for name, parameter in parameters.items():
                    grad = theirs[name]
                    parameter.grad = grad if parameters is ours else grad * 1024
                scaler.step(optimizer)
                scaler.update()
                runs.append(scaler.get_scale())
            assert runs[0] == runs[1] == (512.0 if bad else 1024.0)
            for name, parameter in ours.items():
                full = parameter.full_tensor()
                torch.testing.assert_close(full, plain[name].data, rtol=2e-6, atol=2e-7)
                assert torch.equal(full, full_tensors()[name]) == bad


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_grad_scaler_skips_on_every_rank_or_none(case: tuple[Any, ...]) -> None:
    run_case(check_grad_scaler, case)
