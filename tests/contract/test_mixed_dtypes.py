# SPDX-License-Identifier: Apache-2.0
"""Parameters of several dtypes in one unit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.contract.helpers import (
    STRATEGIES,
    WIDTH,
    assert_at_rest,
    assert_close,
    average_gradients,
    full,
    pair,
    ranks_for,
    transient_bytes,
    vector_loss,
    wrap,
)
from tests.ranks import on_ranks


class Gated(nn.Module):
    """A bf16 projection under an fp32 router, as MoE models have it, and integers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x.to(self.router.weight.dtype)).sigmoid().float()
        y = self.projection(x.to(self.projection.weight.dtype)).float() * gate
        return (y[..., self.order] * self.mask).double() * self.gain


def main_dtype(parameter: Tensor) -> torch.dtype:
    """fp32 for what is trained in fewer bits; any other keeps its dtype."""
    return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_parameters_of_several_dtypes_share_a_unit(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Gated)
    dtypes = {name: parameter.dtype for name, parameter in plain.named_parameters()}
    assert len(set(dtypes.values())) == 5
    wrap(net, world_size, strategy)
    before = transient_bytes()
    for step in range(3):
        vector_loss(net, rank, step).backward()
        average_gradients(plain, lambda m, r, step=step: vector_loss(m, r, step), world_size)
        assert_at_rest(net, before)
        compared = 0
        for name, parameter in plain.named_parameters():
            ours = net.get_parameter(name)
            assert ours.dtype == main_dtype(parameter), name
            if not parameter.requires_grad:
                assert ours.grad is None
                assert torch.equal(full(ours), parameter), name
                continue
            assert ours.grad.dtype == main_dtype(parameter), name
            tolerance = 2e-2 if parameter.dtype == torch.bfloat16 else 1e-6
            assert parameter.grad.abs().max() > 0
            assert_close(full(ours.grad), parameter.grad, name, tolerance)
            compared += 1
        assert compared == 5
        net.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for model in (net, plain):
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(0.5)  # exact in every dtype


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_mixed_precision_casts_floats_of_every_dtype_and_no_integers(
    rank: int, world_size: int, strategy: str
) -> None:
    net, plain = pair(Gated)
    seen: dict[str, torch.dtype] = {}

    def look(module: nn.Module, args: object) -> None:
        seen.update({name: value.dtype for name, value in module.named_parameters()})

    net.register_forward_pre_hook(look)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap(net, world_size, strategy, mp_policy=policy)
    vector_loss(net, rank).backward()
    average_gradients(plain, vector_loss, world_size)
    assert seen.pop("order") == torch.int64 and seen.pop("mask") == torch.bool, "never cast"
    assert set(seen.values()) == {torch.bfloat16}, seen
    assert torch.equal(full(net.order), plain.order)
    for name in ("router.weight", "projection.weight", "gain"):
        ours, theirs = net.get_parameter(name), plain.get_parameter(name)
        assert ours.dtype == main_dtype(theirs) == ours.grad.dtype, name
        assert_close(full(ours.grad), theirs.grad, name, 2e-2)
