# SPDX-License-Identifier: Apache-2.0
"""Writes to the weights that forward sees: kept where they are the main weights, else refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.contract.helpers import raised
from tests.models import mesh_of
from tests.ranks import on_ranks, run_ranks


class Writer(nn.Module):
    """Treats its weight in ``way`` before it uses it."""

    def __init__(self, way: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64, bias=False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.way == "assign":
            weight.data = weight.data * 2
        elif self.way == "write":
            weight.data.mul_(2)
        elif self.way == "in place":
            with torch.no_grad():
                weight.mul_(2)
        elif self.way == "set":
            with torch.no_grad():
                weight.set_(torch.ones(64, 64, dtype=weight.dtype))
        elif self.way == "read":
            assert float(weight.data.float().norm()) > 0 and weight.detach().shape == (64, 64)
        return self.inner(x)


def build(way: str, strategy: str, world_size: int) -> Any:
    model: Any = nn.Sequential(Writer(way), nn.Linear(64, 64))
    mesh = mesh_of(world_size)
    weights = "mxfp8_rowcol" if strategy.endswith("mxfp8") else "bf16"
    precision = sw.Precision(weights=weights, reduce="fp32")
    if strategy.startswith("data_parallel"):
        return sw.data_parallel(model, mesh=mesh, precision=precision)
    placements = sw.zero(int(strategy[4]))
    for unit in (model[0], model):
        sw.fully_shard(unit, mesh=mesh, placements=placements, precision=precision)
    return model


WAYS = ("assign", "write", "in place", "set")


@pytest.mark.parametrize(
    "strategy", ["zero3", "zero1", "data_parallel", "zero3 mxfp8", "data_parallel mxfp8"]
)
@on_ranks(2)
def test_what_forward_writes_to_a_weight_is_refused(
    rank: int, world_size: int, strategy: str
) -> None:
    messages = []
    x = torch.randn(4, 64)
    for way in WAYS:
        for grad in (True, False):
            model = build(way, strategy, world_size)
            with torch.set_grad_enabled(grad):
                messages.append(raised(lambda model=model: model(x), RuntimeError))
            model.reset_iter_state()
            model[0].way = "nothing"
            model(x).float().sum().backward()  # and goes on with the weights as they were
            want = Writer().inner.weight
            assert torch.equal(model[0].inner.weight.full_tensor(), want)
    model = build("read", strategy, world_size)
    model(x).float().sum().backward()
    assert len(messages) == 2 * len(WAYS)
    for message in messages:
        lost = "lost" in message or "every gather encodes it" in message
        assert "inner.weight'" in message and lost, message
        assert "under torch.no_grad()" in message


def by_hand(rank: int, world_size: int) -> str:
    model = sw.fully_shard(nn.Linear(8, 8), mesh=mesh_of(world_size))
    model(torch.randn(2, 8))
    model.unshard()  # type: ignore[operator]
    with torch.no_grad():
        model.bias.zero_()
    message = raised(model.reshard, RuntimeError)  # type: ignore[arg-type]
    model(torch.randn(2, 8)).sum().backward()
    return message


def test_what_is_written_between_unshard_and_reshard_is_refused() -> None:
    assert all("'bias'" in message for message in run_ranks(by_hand, 2))


@on_ranks(2)
def test_a_write_to_whole_main_weights_is_kept(rank: int, world_size: int) -> None:
    """Whole main weights are what forward sees: a write is one to them."""
    for way in ("write", "in place"):
        model = sw.fully_shard(Writer(way), mesh=mesh_of(world_size), placements=sw.zero(0))
        model(torch.randn(2, 64)).sum().backward()
        assert torch.equal(model.inner.weight.full_tensor(), 2 * Writer().inner.weight)
    model = sw.fully_shard(Writer("set"), mesh=mesh_of(world_size), placements=sw.zero(0))
    assert "'inner.weight'" in raised(lambda: model(torch.randn(2, 64)), RuntimeError)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_an_embedding_that_renormalises_its_rows_is_refused(
    rank: int, world_size: int, stage: int
) -> None:
    """Each rank would rewrite the rows of its own batch."""
    model = nn.Sequential(nn.Embedding(8, 8, max_norm=0.1))
    made = partial(sw.fully_shard, model, mesh=mesh_of(world_size), placements=sw.zero(stage))
    message = raised(made, ValueError)
    assert "'0.weight'" in message and "max_norm" in message


@on_ranks(2)
def test_modules_of_torch_jit_are_refused(rank: int, world_size: int) -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)))
    message = raised(lambda: sw.fully_shard(model, mesh=mesh_of(world_size)), ValueError)
    assert "'0.weight' belongs to a module of torch.jit" in message


# ------------------------------------------------------------------------------ sparse gradients


@on_ranks(2)
def test_embeddings_with_sparse_gradients_are_refused_at_wrapping(
    rank: int, world_size: int
) -> None:
    mesh, messages = mesh_of(world_size), []
    for made in (nn.Embedding(8, 4, sparse=True), nn.EmbeddingBag(8, 4, sparse=True)):
        model = nn.Sequential(made)
        for wrap in (sw.fully_shard, sw.data_parallel):
            messages.append(raised(lambda wrap=wrap, m=model: wrap(m, mesh=mesh), ValueError))
        assert type(made.weight) is nn.Parameter
    made.weight.requires_grad_(False)
    sw.fully_shard(model, mesh=mesh)  # no gradient, no problem
    for message in messages:
        assert "'0.weight'" in message and "sparse=True" in message and "sparse=False" in message


class Sparse(nn.Module):
    """A table of its own, whose function is asked for a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.table, sparse=True)


@pytest.mark.parametrize("wrap", [sw.fully_shard, sw.data_parallel])
@on_ranks(2)
def test_a_sparse_gradient_that_nobody_could_foresee_is_named(
    rank: int, world_size: int, wrap: Any
) -> None:
    model = wrap(Sparse(), mesh=mesh_of(world_size))
    loss = model(torch.tensor([1, 2])).sum()
    message = raised(loss.backward, RuntimeError)
    assert "'table'" in message and "sparse=False" in message, message


# ------------------------------------------------------------------------------ tensor subclasses


class Scaled(Tensor):
    """A tensor whose operations are its own, as those of quantised weights are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


@on_ranks(2)
def test_parameters_with_operations_of_their_own_are_refused(rank: int, world_size: int) -> None:
    for wrap in (sw.fully_shard, sw.data_parallel):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(model.weight.detach().as_subclass(Scaled))
        message = raised(lambda w=wrap, m=model: w(m, mesh=mesh_of(world_size)), ValueError)
        assert "'weight' is a Scaled" in message and "ignored_params" in message
        wrap(model, mesh=mesh_of(world_size), ignored_params={model.weight})
