# SPDX-License-Identifier: Apache-2.0
"""A model in buckets is the unsharded model bit for bit, and the same bits as under fully_shard."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.core import buckets
from shardwise.core.placements import PARTIAL, REPLICATE, SHARD
from tests import models
from tests.cases import pairwise
from tests.models import PRECISIONS, loss_of, make_model, mesh_of, shard_model, tokens
from tests.one_card import device_type, ordered_ranks
from tests.ranks import on_ranks, run_ranks

STEPS, DEPTH = 3, 4
THREE = ordered_ranks(3)
SMALL = 0.003  # megabytes: several buckets
CUT = 1 / 32  # for a model of width 64 that has fewer matrices than ranks


def optimizer_of(model: nn.Module) -> Any:
    return sw.optimizer(
        model,
        matrix=sw.muon(lr=0.05, weight_decay=0.1),
        elementwise=sw.adamw(lr=1e-2, weight_decay=0.1),
    )


def train(model: Any, rank: int, world_size: int, microbatches: int, *, alone: bool) -> Any:
    """``alone``: rank 0 has all the data, and powers of two scale it, so that reductions round
    nothing and gradients are the same bits in every world. Else every rank has its own."""
    optimizer = optimizer_of(model)
    wrapped = isinstance(model, sw.ShardedModule)
    for step in range(STEPS):
        for microbatch in range(microbatches):
            if wrapped:
                model.set_is_last_backward(microbatch == microbatches - 1)
            if alone:
                loss = loss_of(model, tokens(step, microbatch))
                loss = loss * (4.0 if rank == 0 else 0.0) if wrapped else loss
            else:
                loss = loss_of(model, tokens(step, microbatch, rank, world_size))
            loss.backward()
        optimizer.clip_grad_norm(0.7)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and states, each as this rank holds it."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in ({"": parameter} | optimizer.state[parameter]).items():
            found[f"{name} {key}"] = value.detach()
    depth = len(model.layers)  # type: ignore[arg-type]
    assert len(found) == (3 + 6 * depth) + 2 * depth + (3 + 4 * depth) * 3, len(found)
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same here; the ranks together see to all of it."""
    assert found and found.keys() == expected.keys()
    wrong = []
    for name, value in found.items():
        whole = expected[name]
        if isinstance(value, sw.ShardedTensor):
            value, whole = value.to_local(), value.cut.take(whole)
        if not torch.equal(value, whole):
            wrong.append(name)
    return wrong


def gathered(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in found.items()}


@cache
def reference(microbatches: int, width: int = 10, depth: int = DEPTH) -> dict[str, Tensor]:
    model = make_model(width, depth)
    return everything(model, train(model, 0, 1, microbatches, alone=True))


def buckets_of(model: Any) -> list[Any]:
    return list(model._shardwise_unit.groups)


# ------------------------------------------------------------------------------ one process


# Three microbatches go with overlapped gathers.
@pytest.mark.parametrize(
    ("world_size", "microbatches", "stage"), pairwise([1, 2, 3, 4], [1, 3], [0, 1, 2])
)
@on_ranks()
def test_the_same_bits_as_one_process(
    rank: int, world_size: int, stage: int, microbatches: int
) -> None:
    expected = reference(microbatches)
    model = sw.data_parallel(
        make_model(depth=DEPTH),
        mesh=mesh_of(world_size),
        placements=sw.zero(stage),
        bucket_mb=SMALL,
        overlap_gather=microbatches == 3,
    )
    model.set_gradient_divide_factor(4.0)
    assert len(buckets_of(model)) >= 3
    optimizer = train(model, rank, world_size, microbatches, alone=True)
    found = everything(model, optimizer)
    assert not differing(found, expected)
    whole = found["layers.0.up.weight "].full_tensor()  # type: ignore[attr-defined]
    assert torch.equal(whole, expected["layers.0.up.weight "])


@pytest.mark.parametrize("main", [[REPLICATE, SHARD], [SHARD, SHARD]], ids=str)
@pytest.mark.parametrize("grad", [[PARTIAL, PARTIAL], [PARTIAL, SHARD]], ids=str)
@on_ranks(4)
def test_two_axes_of_which_the_weights_are_whole(
    rank: int, world_size: int, grad: Any, main: Any
) -> None:
    placements = sw.Placements(compute=[REPLICATE, REPLICATE], grad=grad, main=main)
    model = sw.data_parallel(
        make_model(depth=DEPTH), mesh=mesh_of(2, 2), placements=placements, bucket_mb=SMALL
    )
    model.set_gradient_divide_factor(4.0)
    optimizer = train(model, rank, world_size, 3, alone=True)
    assert not differing(everything(model, optimizer), reference(3))


@on_ranks(4)
def test_cut_matrices_over_more_ranks_than_there_are_matrices(rank: int, world_size: int) -> None:
    expected = reference(1, width=64, depth=1)
    model = sw.data_parallel(make_model(64, 1), mesh=mesh_of(world_size), bucket_mb=CUT)
    model.set_gradient_divide_factor(4.0)
    grains = {str(item.grain) for group in buckets_of(model) for item in group.items}
    optimizer = train(model, rank, world_size, 1, alone=True)
    assert not differing(everything(model, optimizer), expected)
    assert grains == {"row", "element"}


@on_ranks(4)
def test_an_embedding_fills_the_bucket_of_the_last_matrices(rank: int, world_size: int) -> None:
    """10 matrices over 4 ranks: two rows, and two more with the embedding, which AdamW updates."""
    with (
        mock.patch.object(models, "WORDS", 384),
        mock.patch.object(buckets, "CHEAP_PADDING", 0),
    ):
        expected = reference(1, width=64, depth=5)
        model = sw.data_parallel(
            make_model(64, 5), mesh=mesh_of(world_size), bucket_mb=CUT, overlap_gather=True
        )
        model.set_gradient_divide_factor(4.0)
        mixed = [
            one.items for one in buckets_of(model) if one.items[-1].grain != one.items[0].grain
        ]
        names = [[item.name for item in items] for items in mixed]
        optimizer = train(model, rank, world_size, 1, alone=True)
    assert names == [["layers.0.down.weight", "layers.0.up.weight", "embedding.weight"]]
    assert not differing(everything(model, optimizer), expected)


# ------------------------------------------------------------------------------ fully_shard


@pytest.mark.parametrize(
    ("world_size", "stage", "microbatches", "precision"),
    [
        (2, 1, 1, "fp32"),
        (2, 2, 3, "fp32"),
        (THREE, 1, 3, "fp32"),
        (THREE, 2, 1, "fp32"),
        (2, 1, 3, "bf16"),
    ],
)
@on_ranks()
def test_the_same_bits_as_fully_shard(
    rank: int, world_size: int, stage: int, microbatches: int, precision: str
) -> None:
    """With data of its own on every rank."""
    options: Any = {
        "placements": sw.zero(stage),
        "mesh": mesh_of(world_size),
        "precision": PRECISIONS[precision],
    }
    ours = sw.data_parallel(make_model(depth=DEPTH), bucket_mb=SMALL, **options)
    theirs = shard_model(make_model(depth=DEPTH), **options)
    found, expected = (
        everything(model, train(model, rank, world_size, microbatches, alone=False))
        for model in (ours, theirs)
    )
    assert not differing(found, gathered(expected)) and len(found) == 27 + 8 + 57
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    assert {group.whole.dtype for group in buckets_of(ours)} == {dtype}


# ------------------------------------------------------------------------------ padding


def check_poison(rank: int, world_size: int) -> int:
    results = []
    poisoned = 0
    for poison in (False, True):
        model = sw.data_parallel(make_model(depth=DEPTH), mesh=mesh_of(world_size), bucket_mb=SMALL)
        for group in buckets_of(model) if poison else ():
            used = torch.zeros(group.main.flat.numel(), dtype=torch.bool)
            for low, high, offset, *_ in group.main.pieces:
                used[offset : offset + high - low] = True
            group.main.flat[~used] = float("nan")
            poisoned += int((~used).sum())
        results.append(everything(model, train(model, rank, world_size, 1, alone=False)))
    unpoisoned = gathered(results[0])
    assert not differing(results[1], unpoisoned)
    assert all(value.isfinite().all() for value in gathered(results[1]).values())
    return poisoned


def test_padding_is_never_read() -> None:
    assert all(count > 0 for count in run_ranks(check_poison, 3))


# ------------------------------------------------------------------------------ experts


class Experts(nn.Module):
    """A stack of matrices: [experts, out, in]."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)
        self.bias = nn.Parameter(torch.randn(count, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.einsum("td,ehd->th", hidden, self.weight) + self.bias.sum(0)


class Sparse(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.experts = Experts(3, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(self.dense(hidden))


def make_sparse(seed: int) -> Sparse:
    torch.manual_seed(0)
    model = Sparse()
    torch.manual_seed(seed)  # ranks that have other experts
    model.experts = Experts(3, 8)
    return model


def expert_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """4 ranks: 2 expert-parallel ones, and 2 that hold the same experts: {0, 2} and {1, 3}."""
    grid = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("expert_dp", "ep"))
    return mesh_of(4), grid["expert_dp"]


@on_ranks(4)
def test_experts_are_reduced_over_their_own_mesh(rank: int, world_size: int) -> None:
    mesh, expert_mesh = expert_meshes()

    def batch(of: int) -> Tensor:
        return torch.randn(5, 8, generator=torch.Generator().manual_seed(of))

    plain = make_sparse(100 + rank % 2)
    grads: dict[str, list[Tensor]] = {}
    for other in range(world_size):
        twin = make_sparse(100 + other % 2)
        twin(batch(other)).square().mean().backward()
        for name, parameter in twin.named_parameters():
            # What an expert's ranks saw is summed over them and divided by all ranks.
            if "experts" not in name or other % 2 == rank % 2:
                grads.setdefault(name, []).append(parameter.grad)
    for choice in (
        {"experts": expert_mesh},
        {"experts.*": expert_mesh},
        {"expert?": expert_mesh},
    ):
        model = sw.data_parallel(make_sparse(100 + rank % 2), mesh=mesh, meshes=choice)
        model(batch(rank)).square().mean().backward()
        for name, parameter in model.named_parameters():
            expected = sum(grads[name]) / world_size
            torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=0, atol=1e-6)
            assert parameter.device_mesh.size() == (2 if "experts" in name else 4), name
        weights = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), weights[name]), "no rank lost its experts"
    model.double()  # new buffers: the divisor stays
    model.zero_grad()
    model(batch(rank).double()).square().mean().backward()
    for name, parameter in model.named_parameters():
        expected = (sum(grads[name]) / world_size).double()
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=0, atol=1e-6)
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    with sw.comm.record() as calls:
        optimizer.step()
    assert not calls, "experts stay whole on their ranks"
    assert len(grads) == 4
