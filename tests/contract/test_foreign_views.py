# SPDX-License-Identifier: Apache-2.0
"""Whoever still looks at gradients or weights (numpy, DLPack, a reference) neither ends training
nor sees its memory change."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    STRATEGIES,
    WORDS,
    Net,
    assert_gradients_equal,
    assert_parameters_equal,
    check_backward,
    options_for,
    pair,
    ranks_for,
    word_loss,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

VIEWS = {
    "reference": lambda grad: grad,
    "local": lambda grad: grad.to_local(),
    "view": lambda grad: grad.to_local()[:1],
    "numpy": lambda grad: grad.to_local().numpy(),
    "dlpack": lambda grad: torch.from_dlpack(torch.utils.dlpack.to_dlpack(grad.to_local())),
}


def values(view: Any) -> Tensor:
    local = view.to_local() if isinstance(view, sw.ShardedTensor) else view
    return torch.as_tensor(local).detach().clone()


def hold_gradients(rank: int, world_size: int, strategy: str, kind: str, bucketed: bool) -> int:
    """Three steps of SGD; what was seen of each step's gradients stays as it was."""
    net, plain = pair(Net)
    if bucketed:
        sw.data_parallel(net, **options_for(strategy, world_size), bucket_mb=0.001)
    else:
        wrap(net, world_size, strategy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]
    seen: list[tuple[Any, Tensor]] = []
    for step in range(3):
        word_loss(net, rank, step).backward()
        for each in range(world_size):
            (word_loss(plain, each, step) / world_size).backward()
        assert_gradients_equal(net, plain)
        views = [VIEWS[kind](p.grad) for p in net.parameters() if p.grad.to_local().numel()]
        seen += [(view, values(view)) for view in views]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for view, value in seen:
            assert torch.equal(values(view), value), "the gradient of an earlier step changed"
    assert_parameters_equal(net, plain)
    return len(seen)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@pytest.mark.parametrize("kind", ["reference", "numpy"])
def test_gradients_that_somebody_holds_stay_as_they_were(strategy: str, kind: str) -> None:
    found = run_ranks(hold_gradients, ranks_for(strategy), strategy, kind, False)
    assert min(found) > 5


@pytest.mark.parametrize("kind", ["local", "view", "dlpack"])
def test_every_kind_of_view_of_a_gradient_is_noticed(kind: str) -> None:
    assert min(run_ranks(hold_gradients, 2, "zero3", kind, False)) > 5


@pytest.mark.parametrize("kind", ["reference", "numpy"])
def test_gradients_of_buckets_that_somebody_holds_stay_as_they_were(kind: str) -> None:
    assert min(run_ranks(hold_gradients, 2, "zero1", kind, True)) > 5


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_gradients_of_two_losses_can_be_compared(rank: int, world_size: int, strategy: str) -> None:
    """Gradients of two losses, one after the other, with no forward in between (PCGrad, noise
    scales): the first are no longer the parameters', and stay."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy)
    found: list[list[Tensor]] = []
    for model in (net, plain):
        x = torch.arange(WORDS)[None]
        output = model(x)
        first, second = output.square().mean(), output.sin().mean()
        first.backward(retain_graph=True)
        kept = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        second.backward()
        both = [*kept, *(parameter.grad for parameter in model.parameters())]
        found.append([g.full_tensor() if isinstance(g, sw.ShardedTensor) else g for g in both])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
@on_ranks(2)
def test_gradients_that_nobody_holds_use_the_same_memory_again(
    rank: int, world_size: int, strategy: str, ours: bool
) -> None:
    """The addresses of the main grads after each step."""
    net = Net()
    sw.route(net, elementwise=["*"])
    wrap(net, world_size, strategy)
    if ours:
        optimizer: Any = sw.optimizer(net, matrix=None, elementwise=sw.adamw(lr=1e-3))
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    found = []
    for step in range(4):
        word_loss(net, rank, step).backward()
        if ours:
            optimizer.clip_grad_norm(1.0)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        groups = [group for unit in (net, *net.blocks) for group in unit._shardwise_unit.groups]
        found.append([id(group.gradients.main.buffer) for group in groups])
        optimizer.zero_grad()
    assert found[0] and all(each == found[0] for each in found), "nobody holds these gradients"
    return found[0]


# ------------------------------------------------------------------------------ weights


def dump_weights(rank: int, world_size: int, strategy: str, options: dict[str, Any]) -> int:
    """Every unit's weights are shown to numpy inside its forward, and what was shown is kept."""
    net, plain = pair(Net)
    wrap(net, world_size, strategy, **options)
    shown: list[tuple[numpy.ndarray, numpy.ndarray]] = []
    for module in (*net.blocks, net.head):
        module.register_forward_hook(partial(show_weights, shown), prepend=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]
    for step in range(3):
        check_backward(net, plain, word_loss, rank, world_size, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_equal(net, plain)
    # Weights that stay whole between steps are the parameters themselves, and all units share the
    # storages of a trace pool: there a copy is the way to keep values.
    if strategy in ("zero3", "hsdp", "hfsdp") and "memory" not in options:
        assert all((array == copied).all() for array, copied in shown)
    return len(shown)


def show_weights(
    shown: list[tuple[numpy.ndarray, numpy.ndarray]], module: nn.Module, *_: Any
) -> None:
    for parameter in module.parameters():
        array = parameter.detach().numpy()
        shown.append((array, array.copy()))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [(strategy, {}) for strategy in STRATEGIES]
    + [("zero3", {"reshard_after_forward": False}), ("zero3", {"memory": "trace"})],
)
def test_weights_that_forward_shows_to_numpy(strategy: str, options: dict[str, Any]) -> None:
    assert min(run_ranks(dump_weights, ranks_for(strategy), strategy, options)) > 20


@pytest.mark.parametrize("weights", ["mxfp8_rowcol", "mxfp8_2d"])
@on_ranks(2)
def test_codes_that_forward_shows_to_numpy(rank: int, world_size: int, weights: str) -> None:
    """The planes of MXFP8 weights, too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    options = options_for("zero3", world_size) | {"precision": sw.Precision(weights=weights)}
    for part in (*net, net):
        sw.fully_shard(part, **options)
    shown: list[tuple[numpy.ndarray, numpy.ndarray]] = []

    def show(module: Any, *_: Any) -> None:
        for plane in module.weight.quantised.planes.values():
            codes = plane.codes.view(torch.uint8).numpy()
            shown.append((codes, codes.copy()))

    for part in net:
        part.register_forward_hook(show, prepend=True)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(3):
        loss = net(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        net.zero_grad()
    assert len(shown) >= 6 and all((codes == copied).all() for codes, copied in shown)
    assert losses[2] < losses[1] < losses[0]
