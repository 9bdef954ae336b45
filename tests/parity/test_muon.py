# SPDX-License-Identifier: Apache-2.0
"""Sharded Muon and unsharded Muon are the same bits, whatever the strategy and the world."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.kernels import newton_schulz
from shardwise.optim.split import Split
from tests.models import (
    STRATEGIES,
    Model,
    loss_of,
    make_model,
    mesh_for,
    mesh_of,
    shard_model,
    tokens,
)
from tests.one_card import device_type
from tests.parity.helpers import assert_same, everything, small_rounds
from tests.ranks import run_ranks

STEPS = 5
SPLITS = {
    "layers.0.up.weight": Split.stacked(7, 13, 10),
    "layers.1.up.weight": Split.interleaved(3),
    "layers.*.down.weight": Split.heads(3, dim=1),
}
MATRICES = 3 + 3 + 2 * 3  # what falls out of them


def settings(**options: Any) -> sw.optim.muon.MuonSettings:
    return sw.muon(**{"lr": 0.05, "weight_decay": 0.1} | options)


def build(wrap: Callable[[Model], Model] | None, **options: Any) -> tuple[Model, Any]:
    model = make_model(depth=2)
    sw.route(model, split=SPLITS)
    if wrap is not None:
        wrap(model)
    optimizer = sw.optimizer(
        model, matrix=settings(**options), elementwise=sw.adamw(lr=1e-2, weight_decay=0.1)
    )
    return model, optimizer


def train(
    model: Model, optimizer: Any, rank: int, *, sharded: bool, steps: int = STEPS, first: int = 0
) -> None:
    """Rank 0 has all the data, and powers of two scale it: reductions round nothing, so gradients
    are the same bits in every world."""
    for step in range(first, steps):
        loss = loss_of(model, tokens(step))
        if sharded:
            loss = loss * (4.0 if rank == 0 else 0.0)
        loss.backward()
        optimizer.clip_grad_norm(0.7)
        optimizer.step()
        optimizer.zero_grad()


def wrap(placements: sw.Placements, world_size: int, model: Model, **options: Any) -> Model:
    shard_model(model, placements, mesh_for(placements, world_size), **options)
    for unit in (model, *model.layers):
        unit.set_gradient_divide_factor(4.0)
    return model


@cache  # ranks live as long as the test run
def unsharded(rank: int, **options: Any) -> dict[str, Tensor]:
    model, optimizer = build(None, **options)
    before = everything(model, optimizer)
    train(model, optimizer, rank, sharded=False)
    after = everything(model, optimizer)
    assert not [name for name in after if torch.equal(after[name], before[name])], "all changed"
    return after


def check_strategy(rank: int, world_size: int, name: str, options: dict[str, Any]) -> int:
    model, optimizer = build(partial(wrap, STRATEGIES[name], world_size), **options)
    train(model, optimizer, rank, sharded=True)
    found = everything(model, optimizer)
    assert_same(found, unsharded(rank, **options), f"{name} {options}")
    return len(found)


# On two axes: 2 x 1, 1 x 3 and 2 x 2.
WORLDS = [(name, world_size) for name in ("zero0", "zero3", "hfsdp") for world_size in (2, 3, 4)]
WORLDS += [("zero3", 1), ("zero1", 2), ("zero2", 3), ("hsdp", 4)]


@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_steps_equal_those_of_the_unsharded_optimizer(strategy: str, world_size: int) -> None:
    assert all(run_ranks(check_strategy, world_size, strategy, {}))


@pytest.mark.parametrize(
    ("strategy", "world_size", "options"),
    [
        ("zero3", 2, {"nesterov": False}),
        ("hsdp", 4, {"decay": "cautious", "scale": "match_rms_adamw"}),
        ("zero3", 2, {"preset": "polar_express", "scale": "max_side"}),
    ],
    ids=str,
)
def test_settings_keep_their_bits(strategy: str, world_size: int, options: dict[str, Any]) -> None:
    assert all(run_ranks(check_strategy, world_size, strategy, options))


def check_grain(rank: int, world_size: int, grain: Any) -> int:
    model, optimizer = build(partial(wrap, sw.zero(3), world_size, grain=lambda name, p: grain))
    (group,) = optimizer._matrix_groups
    legs = [one.to_owners for one in group.exchange.rounds]
    train(model, optimizer, rank, sharded=True)
    assert_same(everything(model, optimizer), unsharded(rank), str(grain))
    return sum(len(leg.sends) for leg in legs if leg is not None)


@pytest.mark.parametrize("grain", [sw.ELEMENT, sw.rows(3), sw.TENSOR], ids=str)
def test_any_grain_gives_the_same_bits_and_whole_tensors_are_not_sent(grain: Any) -> None:
    """Cut inside rows, in blocks of rows, and not at all."""
    sent = run_ranks(check_grain, 3, grain)
    assert sent == [0, 0, 0] if grain == sw.TENSOR else sum(sent) > 0


def check_rounds(rank: int, world_size: int, strategy: str) -> int:
    expected = unsharded(rank)
    with small_rounds():
        model, optimizer = build(partial(wrap, STRATEGIES[strategy], world_size))
    (group,) = optimizer._matrix_groups
    train(model, optimizer, rank, sharded=True)
    assert_same(everything(model, optimizer), expected, "rounds")
    return len(group.exchange.rounds)


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hsdp", "hfsdp"])
def test_many_rounds_in_flight_give_the_same_bits(strategy: str) -> None:
    world_size = 4 if strategy in ("hsdp", "hfsdp") else 2
    rounds = run_ranks(check_rounds, world_size, strategy)
    # Six matrices: four owners of hsdp have two at most, and two of zero0 three or more.
    assert len(set(rounds)) == 1 and rounds[0] >= (2 if strategy == "hsdp" else 3)


def count_products(rank: int, world_size: int, strategy: str) -> int:
    """How many matrices this rank orthogonalises in one step."""
    model, optimizer = build(partial(wrap, STRATEGIES[strategy], world_size))
    counted = []
    original = newton_schulz.orthogonalise

    def counting(batch: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        counted.append(len(batch))
        return original(batch, *args, **kwargs)

    newton_schulz.orthogonalise = counting  # type: ignore[assignment]
    try:
        train(model, optimizer, rank, sharded=True, steps=1)
    finally:
        newton_schulz.orthogonalise = original
    return sum(counted)


@pytest.mark.cpu_only("counts calls of the CPU's Newton-Schulz")
@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "hfsdp"])
def test_every_matrix_is_orthogonalised_once(strategy: str) -> None:
    world_size = 4 if strategy in ("hsdp", "hfsdp") else 2
    counted = run_ranks(count_products, world_size, strategy)
    assert sum(counted) == MATRICES
    assert max(counted) < MATRICES, "no rank does it all"


# ------------------------------------------------------------------------------ other meshes


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 7))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.sum(0)


class TwoMeshes(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.dense = nn.Linear(6, 9)
        torch.manual_seed(seed)  # every expert-parallel rank has its own experts
        self.experts = Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(self.dense(hidden)[:, :5])


def check_expert_mesh(rank: int, world_size: int) -> float:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "dp"))
    seed = mesh.get_local_rank("ep")
    models = [TwoMeshes(seed), TwoMeshes(seed)]
    sw.fully_shard(models[0].experts, mesh=mesh["dp"], placements=sw.zero(3))
    sw.fully_shard(models[0], mesh=mesh_of(4), placements=sw.zero(3))
    optimizers = [
        sw.optimizer(model, matrix=settings(), elementwise=sw.adamw()) for model in models
    ]
    assert [len(one._matrix_groups) for one in optimizers] == [2, 1]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            for name, parameter in model.named_parameters():
                generator = torch.Generator().manual_seed(step + 31 * seed * ("experts" in name))
                full = torch.randn(parameter.shape, generator=generator)
                parameter.grad = torch.zeros_like(parameter).copy_(full)
            optimizer.step()
    for mine, its in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), its)
    return models[0].experts.weight.full_tensor().sum().item()


def check_expert_norm(rank: int, world_size: int, kind: float, placements: str) -> float:
    """Every expert counts once, wherever it is, and all ranks clip alike."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "dp"))
    seed = mesh.get_local_rank("ep")
    model = TwoMeshes(seed)
    sw.fully_shard(model.experts, mesh=mesh["dp"], placements=STRATEGIES[placements])
    sw.fully_shard(model, mesh=mesh_of(4), placements=sw.zero(3))
    optimizer = sw.optimizer(model, matrix=settings(), elementwise=sw.adamw())
    fulls = [torch.full((2, 5, 7), 1.0 + expert) for expert in range(2)]  # by expert-parallel rank
    for name, parameter in model.named_parameters():
        full = fulls[seed] if "experts" in name else torch.full(parameter.shape, 0.5)
        parameter.grad = torch.zeros_like(parameter).copy_(full)
    everything = [one.flatten() for one in fulls] + [torch.full((6 * 9 + 9,), 0.5)]
    expected = torch.linalg.vector_norm(torch.cat(everything), kind)
    norm = optimizer.clip_grad_norm(1.0, norm_type=kind)
    torch.testing.assert_close(norm, expected)
    dense = model.dense.weight.grad.full_tensor()
    torch.testing.assert_close(dense, torch.full((9, 6), 0.5 / expected.item()))
    return norm.item()


@pytest.mark.parametrize("kind", [2.0, float("inf")], ids=str)
@pytest.mark.parametrize("placements", ["zero3", "zero0"])
def test_one_norm_over_dense_and_expert_meshes(kind: float, placements: str) -> None:
    norms = run_ranks(check_expert_norm, 4, kind, placements)
    assert len(set(norms)) == 1


def matrices_of(model: TwoMeshes) -> list[Any]:
    """The matrices, which decay even where their gradient is zero."""
    return [model.dense.weight, model.experts.weight]


def check_expert_overflow(rank: int, world_size: int, placements: str) -> list[bool]:
    """An infinity in one rank's experts, then in its dense weights, then nowhere."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "dp"))
    model = TwoMeshes(mesh.get_local_rank("ep"))
    sw.fully_shard(model.experts, mesh=mesh["dp"], placements=sw.zero(3))
    sw.fully_shard(model, mesh=mesh_of(4), placements=STRATEGIES[placements])
    optimizer = sw.optimizer(model, matrix=settings(), elementwise=sw.adamw())
    scaler = GradScaler(device_type(), init_scale=4.0)
    moved = []
    for broken in ("experts", "dense.weight", "nothing"):
        before = [parameter.to_local().clone() for parameter in matrices_of(model)]
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        for name, parameter in model.named_parameters():
            # Its last element: of one rank alone, but for replicas, whose gradients are the same.
            here = parameter.cut.piece[1] == parameter.numel() and (rank > 1 or "dense" in name)
            if broken in name and here:
                parameter.grad.to_local().view(-1)[-1:].fill_(float("inf"))
        scaler.unscale_(optimizer)
        heard = sum(one.item() for one in scaler._found_inf_per_device(optimizer).values())
        assert (heard > 0) == (broken != "nothing"), broken  # else some would wait in the step
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [parameter.to_local() for parameter in matrices_of(model)]
        pairs = [(a, b) for a, b in zip(after, before, strict=True) if a.numel()]
        changed = {not torch.equal(a, b) for a, b in pairs}
        assert len(changed) == 1, (broken, "all of it steps, or nothing")
        moved.append(changed.pop())
    assert scaler.get_scale() == 1.0
    return moved


@pytest.mark.parametrize("placements", ["zero3", "zero0"])
def test_an_overflow_in_one_expert_stops_the_step_of_all_ranks(placements: str) -> None:
    moved = run_ranks(check_expert_overflow, 4, placements)
    assert moved == [[False, False, True]] * 4


def test_dense_and_expert_meshes_in_one_optimizer() -> None:
    sums = run_ranks(check_expert_mesh, 4)
    assert sums[0] == sums[1] != sums[2] == sums[3]


# ------------------------------------------------------------------------------ bad input


def check_one_bad_rank(rank: int, world_size: int, strategy: str) -> str:
    """The last rank forgot half of it; nobody waits for it."""
    model = make_model(depth=2)
    wrap(STRATEGIES[strategy], world_size, model)
    last = rank == world_size - 1
    with pytest.raises(ValueError, match="this optimizer cannot work") as caught:
        sw.optimizer(model, matrix=settings(), elementwise=None if last else sw.adamw())
    with pytest.raises(ValueError, match=r"sw\.Muon cannot work: group 0 has"):
        sw.Muon([{"params": [model.layers[0].up.weight]} | ({"beta": 1} if last else {})])
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
def test_what_one_rank_finds_wrong_is_raised_by_all(strategy: str) -> None:
    world_size = 4 if strategy == "hsdp" else 2
    messages = run_ranks(check_one_bad_rank, world_size, strategy)
    assert len(set(messages)) == 1 and "belong to no optimizer" in messages[0]
