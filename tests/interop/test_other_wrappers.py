# SPDX-License-Identifier: Apache-2.0
"""Other wrappers around or beside a module: averages of weights, DDP, torch.func, JVPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

import shardwise as sw
from tests.contract.helpers import raised
from tests.models import ZERO, Layer, Model, loss_of, make_model, mesh_of, shard_model, tokens
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
    message = raised(partial(AveragedModel, models[0]), NotImplementedError)
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
    """DDP reduces its parameters, and shardwise its own; whoever gives both to DDP is told."""
    taken = DistributedDataParallel(partly_wrapped(strategy, world_size))
    message = raised(lambda: taken(tokens(0)), RuntimeError)
    assert "norm.weight" in message and "_set_params_and_buffers_to_ignore_for_model" in message
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
def test_ddp_around_and_inside_is_refused(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    around = DistributedDataParallel(shard_model(make_model(), sw.zero(0), mesh))
    assert "sw.zero(0)" in raised(lambda: around(tokens(0)), RuntimeError)
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


def layers(wrapped: bool, world_size: int) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(Layer(6), Layer(6))
    for module in (*made, made) if wrapped else ():
        sw.fully_shard(module, mesh=mesh_of(world_size))
    return made


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "jvp": lambda model, x: jvp(model, (x,), (x,)),
    "grad": lambda model, x: grad(lambda y: model(y).sum())(x),
    "vjp": lambda model, x: vjp(model, x),
    "jacrev": lambda model, x: jacrev(model)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@on_ranks(2)
def test_transforms_of_torch_func_are_refused(rank: int, world_size: int, transform: str) -> None:
    model, x = layers(True, world_size), torch.ones(3, 6)
    message = raised(partial(TRANSFORMS[transform], model, x), NotImplementedError)
    assert f"torch.func.{transform}" in message or transform in ("vjp", "jacrev")
    assert "around the forward of unit" in message
    assert torch.equal(model(x), layers(False, world_size)(x)), "and all goes on"


@pytest.mark.parametrize("export", [torch.jit.trace, torch.export.export])
@on_ranks(2)
def test_programs_are_not_made_of_gathered_weights(
    rank: int, world_size: int, export: Callable[..., Any]
) -> None:
    x = torch.ones(3, 6)
    model = sw.fully_shard(
        layers(False, world_size), mesh=mesh_of(world_size), placements=sw.zero(1)
    )
    with torch.no_grad():
        expected = model(x)  # and the whole weights are there
        message = raised(lambda: export(model, (x,)), NotImplementedError)
        assert "sw.full_state_dict(model)" in message
        assert torch.equal(model(x), expected), "and all goes on"


@on_ranks(2)
def test_units_are_not_traced_by_fx(rank: int, world_size: int) -> None:
    model, x = layers(True, world_size), torch.ones(3, 6)
    message = raised(lambda: torch.fx.symbolic_trace(model), NotImplementedError)
    assert "torch.fx of unit" in message and "before it is wrapped" in message
    assert torch.equal(model(x), layers(False, world_size)(x)), "and all goes on"


@on_ranks(2)
def test_functional_call_is_refused(rank: int, world_size: int) -> None:
    model, x = layers(True, world_size), torch.ones(3, 6)
    values = {name: value.detach() + 1 for name, value in model.named_parameters()}
    message = raised(lambda: functional_call(model, values, (x,)), RuntimeError)
    assert "functional_call" in message
    assert torch.equal(model(x), layers(False, world_size)(x)), "and all goes on"


@on_ranks(2)
def test_forward_mode_derivatives(rank: int, world_size: int) -> None:
    x = torch.linspace(-1, 1, 18).view(3, 6)
    found = []
    for wrapped in (True, False):
        model = layers(wrapped, world_size)
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent)
    assert torch.equal(*found)


# ------------------------------------------------------------------------------ dion's optimizers


class Dion2(torch.optim.SGD):
    """Stands for dion's class of this name, which is known by its module."""

    __module__ = "dion.dion2"


class NorMuon(Dion2):
    __module__ = "dion.normuon"


@on_ranks(2)
def test_dion_gets_rows_as_chunks_or_a_refusal(rank: int, world_size: int) -> None:
    """On matrices wrapped one by one it finds torch.chunk's rows; packed ones, and what of dion
    slices columns, are refused on every rank before anything is written."""

    def step(kind: Any, *, alone: bool, **group: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 31, bias=False))
        whole = [one.detach().clone() for one in model.parameters()]
        if alone:
            for linear in model:
                sw.fully_shard(linear)
        sw.fully_shard(model)
        optimizer = kind([{"params": list(model.parameters()), **group}], lr=0.1)
        model(torch.ones(2, 32)).sum().backward()
        if alone:
            for found, value in zip(model.parameters(), whole, strict=True):
                assert torch.equal(found.to_local(), value.chunk(2)[rank])
        optimizer.step()

    step(Dion2, alone=True)
    step(NorMuon, alone=False, algorithm="adamw")
    for kind, alone in ((Dion2, False), (NorMuon, True), (torch.optim.Muon, True)):
        message = raised(partial(step, kind, alone=alone), RuntimeError)
        assert "sw.Muon" in message and ("wrapped by itself" in message) == (kind is Dion2)
