# SPDX-License-Identifier: Apache-2.0
"""Models that come in bf16 or fp16, as those of Hugging Face do: main weights and optimizer states
are fp32 where an optimizer trains them, and weights are computed with in the dtype they came in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise as sw
from tests.contract.helpers import (
    STRATEGIES,
    Net,
    full,
    logged,
    mesh_for,
    ranks_for,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

WAYS = (*STRATEGIES, "data_parallel")


def born(dtype: torch.dtype, frozen: bool = False) -> Net:
    torch.manual_seed(3)
    net = Net().to(dtype)
    net.head.requires_grad_(not frozen)
    return net


def wrapped(net: Net, world_size: int, way: str, **options: Any) -> Net:
    if way == "data_parallel":
        return sw.data_parallel(net, mesh=mesh_for("zero", world_size), **options)
    return wrap(net, world_size, way, **options)


def optimizer_of(model: nn.Module, lr: float = 1e-4) -> Any:
    return sw.optimizer(model, matrix=sw.muon(lr=lr), elementwise=sw.adamw(lr=lr))


def train(rank: int, world_size: int, way: str) -> tuple[float, list[str]]:
    """The share of elements that five small steps have moved."""
    net = born(torch.bfloat16, frozen=True)
    seen: set[torch.dtype] = set()
    net.blocks[0].up.register_forward_pre_hook(lambda m, _: seen.add(m.weight.dtype))
    wrapped(net, world_size, way)
    before = {name: full(p).clone() for name, p in net.named_parameters()}
    with logged() as texts:
        optimizer = optimizer_of(net)
    for name, p in net.named_parameters():
        frozen = name.startswith("head")
        assert p.dtype == (torch.bfloat16 if frozen else torch.float32), name
        states = [v for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        assert frozen is not bool(states) and all(v.dtype == torch.float32 for v in states), name
    for step in range(5):
        word_loss(net, rank, step).backward()
        assert {p.grad.dtype for p in net.parameters() if p.requires_grad} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    assert seen == {torch.bfloat16}, "computed with as it came"
    moved = total = 0
    for name, p in net.named_parameters():
        changed = full(p) != before[name]
        if name.startswith("head"):
            assert not changed.any()
        elif "embedding" not in name:  # of which only the rows that were read have gradients
            moved, total = moved + int(changed.sum()), total + changed.numel()
    return moved / total, texts


@pytest.mark.parametrize("way", WAYS)
def test_small_steps_move_a_model_that_came_in_bf16(way: str) -> None:
    found = run_ranks(train, ranks_for(way), way)
    assert all(share > 0.99 for share, _ in found), found
    assert not any(texts for _, texts in found), "nothing to warn about"


@on_ranks(2)
def test_the_choice_of_the_user_holds(rank: int, world_size: int) -> None:
    """The dtype asked for is taken; ``.to`` follows; fp64 and integers keep their dtype."""
    net = wrap(born(torch.bfloat16), world_size, precision=sw.Precision(main="bf16"))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    net = wrap(born(torch.float16), world_size, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    net.to(torch.bfloat16)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    net = wrap(born(torch.float64), world_size)
    assert {p.dtype for p in net.parameters()} == {torch.float64}
