# SPDX-License-Identifier: Apache-2.0
"""Other wrappers around or beside a module: averages of weights, DDP, torch.func, JVPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

import shardwise as sw
from tests.contract.helpers import raised
from tests.models import ZERO, Model, loss_of, make_model, mesh_of, shard_model, tokens
from tests.ranks import on_ranks

AVERAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "swa": dict,
    "swa, foreach": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "ema": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    "ema, foreach": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


# Averages read and write pieces at rest, which zero1 to zero3 cut alike.
@pytest.mark.parametrize(
    ("strategy", "average"),
    [(strategy, average) for strategy in ("zero0", "zero3") for average in AVERAGES]
    + [("zero1", "ema, foreach"), ("zero2", "swa")],
)
@on_ranks(2)
def test_averages_of_weights_are_sharded_models(
    rank: int, world_size: int, strategy: str, average: str
) -> None:
    """Made of the plain model, and wrapped like it: each rank averages its own pieces."""
    models = [make_model() for _ in range(2)]
    averages = [AveragedModel(model, **AVERAGES[average]()) for model in models]
    for model in (models[0], averages[0].module):
        shard_model(model, ZERO[strategy], mesh_of(world_size))
    for step in range(3):
        for model, averaged in zip(models, averages, strict=True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + step / 8)
            averaged.update_parameters(model)
    with torch.no_grad():
        assert torch.equal(*(averaged(tokens(0)) for averaged in averages))
    whole = sw.full_state_dict(averages[0])
    assert whole.keys() == averages[1].state_dict().keys()
    assert all(torch.equal(whole[name], value) for name, value in averages[1].state_dict().items())
    message = raised(partial(AveragedModel, models[0]), AssertionError)
    assert "average.module" in message


def gradients_of(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def partly_wrapped(strategy: str, world_size: int) -> Model:
    model = make_model()
    sw.fully_shard(model.layers[0], mesh=mesh_of(world_size), placements=ZERO[strategy])
    return model


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@on_ranks(2)
def test_ddp_beside_a_wrapped_module(rank: int, world_size: int, strategy: str) -> None:
    """DDP reduces its parameters, and shardwise its own."""
    model, plain = partly_wrapped(strategy, world_size), make_model()
    ours = [name for name, _ in model.named_parameters() if name.startswith("layers.0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ours)
    ddp = DistributedDataParallel(model)
    for step in range(2):
        loss_of(ddp, tokens(step, 0, rank, world_size)).backward()
        loss_of(plain, tokens(step)).backward()
    for ours_now, theirs in zip(gradients_of(model), gradients_of(plain), strict=True):
        torch.testing.assert_close(ours_now, theirs)


@on_ranks(2)
def test_ddp_inside_is_refused(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    model = make_model()
    model.layers[1] = DistributedDataParallel(model.layers[1])
    for module in (model, model.layers[1]):
        message = raised(partial(sw.fully_shard, module, mesh=mesh), ValueError)
        assert "is inside DistributedDataParallel" in message
    plain = make_model()
    sw.fully_shard(model, mesh=mesh, ignored_params=set(model.layers[1].parameters()))
    loss_of(model, tokens(0, 0, rank, world_size)).backward()
    loss_of(plain, tokens(0)).backward()
    for ours, theirs in zip(gradients_of(model), gradients_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_matrices_wrapped_one_by_one_have_the_rows_of_chunk(rank: int, world_size: int) -> None:
    """Dion's optimizers read pieces as torch.chunk cuts them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 31, bias=False))
    whole = [one.detach().clone() for one in model.parameters()]
    for module in (*model, model):
        sw.fully_shard(module)
    for found, value in zip(model.parameters(), whole, strict=True):
        assert torch.equal(found.to_local(), value.chunk(2)[rank])
