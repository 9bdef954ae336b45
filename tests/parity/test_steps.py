# SPDX-License-Identifier: Apache-2.0
"""Around an optimizer's step: gradients that lie on one replica each, one norm, one decision of all
ranks, one refresh, and torch's checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.core import comm
from shardwise.core.agreement import all_ranks
from shardwise.optim.gradients import NonFiniteGradient
from shardwise.report.describe import find_nonfinite, parameter_norms
from tests.models import (
    STRATEGIES,
    Model,
    loss_of,
    make_model,
    mesh_for,
    mesh_of,
    ranks_for,
    shard_model,
    tokens,
)
from tests.one_card import device_type
from tests.parity.helpers import everything, full
from tests.parity.programs import CONTEXTS, HELD
from tests.parity.runs import assert_same, run, train
from tests.ranks import on_ranks, run_ranks

LIMIT = 0.02  # of a norm


def build(strategy: str | None, world_size: int) -> tuple[Model, Any]:
    model = make_model(depth=2)
    if strategy is not None:
        placements = STRATEGIES[strategy]
        shard_model(model, placements, mesh_for(placements, world_size))
    return model, sw.optimizer(model, matrix=sw.muon(lr=0.05), elementwise=sw.adamw(lr=1e-2))


# ------------------------------------------------------------------------------ gradients


def check_gradients(rank: int, world_size: int) -> dict[str, int]:
    """Honest on every rank, and to everybody who asks; and how much of each is here."""
    model, optimizer = build("hsdp", world_size)
    other = shard_model(make_model(depth=2), sw.hsdp(), mesh_for(sw.hsdp(), world_size))
    for one in (model, other):
        loss_of(one, tokens(0, 0, rank, 4)).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter.grad), full(other.get_parameter(name).grad)), name
    here = {name: model.get_parameter(name).grad.to_local().numel() for name in HELD}
    for (name, mine), its in zip(
        parameter_norms(model).items(), parameter_norms(other).values(), strict=True
    ):
        assert mine == pytest.approx(its, rel=1e-6), name
    for kind in (2.0, float("inf")):
        grads = [[p.grad for p in one.parameters()] for one in (model, other)]
        torchs, expected = (nn.utils.get_total_norm(one, kind).item() for one in grads)
        assert torchs == pytest.approx(expected, rel=1e-6)
        ours = optimizer.clip_grad_norm(1e9, norm_type=kind).item()
        assert ours == pytest.approx(expected, rel=1e-6)
    for one in (model, other):
        nn.utils.clip_grad_norm_(one.parameters(), 0.05)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), full(other.get_parameter(name).grad))
    # A broken number is named by the one rank that has it.
    broken = next(name for name in HELD if here[name]) if rank == 3 else None
    if broken:
        model.get_parameter(broken).grad.to_local().view(-1)[-1:].fill_(float("nan"))
    found = find_nonfinite(model)
    assert [(one.kind, one.coordinate, one.num_nan) for one in found] == [("gradient", (1, 1), 1)]
    with pytest.raises(NotImplementedError, match=r"up\.weight"):
        torch.optim.AdamW(model.parameters()).step()
    return here


def test_gradients_lie_on_one_replica_each_and_everybody_reads_them_right() -> None:
    everyone = run_ranks(check_gradients, 4)
    for name in HELD:
        assert sum(here[name] for here in everyone) == 300, name
    held = [sum(here.values()) for here in everyone]
    assert min(held[0] + held[1], held[2] + held[3]) > 500, "about half of 1200 each"


@on_ranks(2)
def test_a_factor_holds_for_the_unit_it_was_given_to(rank: int, world_size: int) -> None:
    models = [shard_model(make_model(depth=2), sw.zero(3), mesh_of(world_size)) for _ in range(2)]
    models[0].set_gradient_divide_factor(0.5)
    for model in models:
        loss_of(model, tokens(0, 0, rank, world_size)).backward()
    for (name, mine), its in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        times = 1.0 if name.startswith("layers.") else world_size / 0.5
        assert torch.equal(full(mine.grad), times * full(its.grad)), name
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            models[0].set_gradient_divide_factor(factor)


# ------------------------------------------------------------------------------ clipping


def clip(rank: int, world_size: int, strategy: str, kind: float) -> tuple[float, list[str]]:
    model, optimizer = build(strategy, world_size)
    plain, alone = build(None, 1)
    for each in (model, plain):
        loss_of(each, tokens(0)).backward()  # the same on every rank
    with comm.record() as calls:
        ours = optimizer.clip_grad_norm(LIMIT, norm_type=kind)
    grads = [one.grad.clone() for one in plain.parameters()]
    torchs = nn.utils.get_total_norm(grads, kind)
    assert torchs > 2 * LIMIT, "there is something to clip"
    torch.testing.assert_close(ours, torchs)
    assert torch.equal(alone.clip_grad_norm(LIMIT, norm_type=kind), ours), "the same float32"
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(mine.grad), its.grad)
    assert float(optimizer.clip_grad_norm(1e9, norm_type=kind)) == pytest.approx(LIMIT, rel=1e-3)
    return ours.item(), [call.axis for call in calls]


# Every kind where matrices and the rest are reduced over other axes (hsdp), and once where both are
# reduced over one.
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(strategy, 2.0) for strategy in ("zero0", "zero3", "hsdp", "hfsdp")]
    + [("zero3", 1.0), ("hsdp", 1.0), ("zero0", math.inf), ("hsdp", math.inf)],
)
def test_one_norm_over_shard_axes_only(strategy: str, kind: float) -> None:
    found = run_ranks(clip, ranks_for(strategy), strategy, kind)
    assert len({norm for norm, _ in found}) == 1, "the same on every rank"
    # Replicas take turns at matrices, and hold the same gradients of the rest.
    axes = {"hsdp": ["dp_outer", "dp", "dp"], "hfsdp": ["dp_outer", "dp"]}.get(strategy, ["dp"])
    assert all(seen == axes for _, seen in found), found


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("strategy", ["zero3", "hfsdp"])
@on_ranks(ranks_for)
def test_an_overflow_on_one_rank_is_known_to_all(
    rank: int, world_size: int, strategy: str, value: float
) -> None:
    """Clipping raises, or returns a norm that is not finite; a step that clips moves nothing."""
    model, optimizer = build(strategy, world_size)
    loss_of(model, tokens(0)).backward()
    name, last = [(n, p) for n, p in model.named_parameters() if p.grad.to_local().numel()][-1]
    bad = rank == world_size - 1
    if bad:
        last.grad.to_local().view(-1)[0] = value
    with pytest.raises(NonFiniteGradient) as caught:
        optimizer.clip_grad_norm(1.0, error_if_nonfinite=True)
    assert (f"'{name}'" in str(caught.value)) == bad, "who has it names it"
    assert not torch.isfinite(optimizer.clip_grad_norm(1.0))
    before = everything(model, optimizer)
    optimizer.clip_grad_norm(LIMIT, in_step=True)
    optimizer.step()
    optimizer.zero_grad()
    assert_same(everything(model, optimizer), before)
    loss_of(model, tokens(0)).backward()
    optimizer.step()
    assert not torch.equal(full(model.head.weight), before["head.weight"]), "it was used once"


@pytest.mark.cpu_only("a fused kernel of a GPU clips and rounds at once")
@pytest.mark.parametrize("strategy", ["zero1", "hfsdp"])
@on_ranks(ranks_for)
def test_a_step_clips_as_before_it(rank: int, world_size: int, strategy: str) -> None:
    found = []
    for late in (True, False):
        model, optimizer = build(strategy, world_size)
        loss_of(model, tokens(rank)).backward()
        optimizer.clip_grad_norm(LIMIT, in_step=late)
        optimizer.step()
        found.append(everything(model, optimizer))
    assert_same(*found)


@on_ranks(1)
def test_bad_norms_are_refused(rank: int, world_size: int) -> None:
    _, optimizer = build(None, 1)
    with pytest.raises(ValueError, match="max_norm=0"):
        optimizer.clip_grad_norm(0)
    with pytest.raises(ValueError, match="norm_type=-1"):
        optimizer.clip_grad_norm(1, norm_type=-1)
    assert optimizer.clip_grad_norm(1.0) == 0.0, "no gradients yet"


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
@on_ranks(ranks_for)
def test_a_loss_scaler_skips_the_step_everywhere(rank: int, world_size: int, strategy: str) -> None:
    model, optimizer = build(strategy, world_size)
    scaler = GradScaler(device_type(), init_scale=256.0, growth_interval=100)
    for step in range(3):
        before = full(model.layers[0].up.weight)
        loss = loss_of(model, tokens(step)) * (float("inf") if (step, rank) == (1, 0) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, full(model.layers[0].up.weight)) == (step == 1)


@on_ranks(2)
def test_every_buffer_is_marked_once_and_refreshed_once(rank: int, world_size: int) -> None:
    model, optimizer = build("zero1", world_size)
    loss_of(model, tokens(0)).backward()
    watched: Any = {id(p.buffer): p.buffer for p in model.parameters()}  # type: ignore[attr-defined]
    before = [buffer.writes for buffer in watched.values()]
    optimizer.step()
    assert [buffer.writes - old for buffer, old in zip(watched.values(), before, strict=True)] == [
        1
    ] * len(watched)
    optimizer.zero_grad()
    with comm.record() as calls:
        model(tokens(1))
        model(tokens(1))
    gathers = sum(call.operation == "all_gather" for call in calls)
    assert gathers == len(watched) >= 3, "two forwards, one refresh of each buffer"


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
@on_ranks(ranks_for)
def test_what_one_rank_finds_wrong_is_raised_by_all(
    rank: int, world_size: int, strategy: str
) -> None:
    model = make_model(depth=2)
    shard_model(model, STRATEGIES[strategy], mesh_for(STRATEGIES[strategy], world_size))
    last = rank == world_size - 1
    with pytest.raises(ValueError, match="belong to no optimizer"):
        sw.optimizer(model, matrix=sw.muon(), elementwise=None if last else sw.adamw())
    with pytest.raises(ValueError, match=r"sw\.Muon cannot work"):
        sw.Muon([{"params": [model.layers[0].up.weight]} | ({"beta": 1} if last else {})])


# ------------------------------------------------------------------------------ torch's checkpoints


def advance(model: Model, optimizer: Any, strategy: str, steps: range) -> dict[str, Tensor]:
    one = run(strategy, 1, data="lost")  # every rank the same batch
    train(model, optimizer, one, 0, steps, {})
    return everything(model, optimizer)


def states(model: Model, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save(rank: int, world_size: int, strategy: str, way: str, path: str) -> list[dict[str, Tensor]]:
    with CONTEXTS[way]():
        model, optimizer = build(strategy, world_size)
        saved = advance(model, optimizer, strategy, range(2))
        dcp.save(states(model, optimizer), checkpoint_id=path)
        return [saved, advance(model, optimizer, strategy, range(2, 4))]


def load(rank: int, world_size: int, strategy: str, path: str) -> list[dict[str, Tensor]]:
    model, optimizer = build(strategy, world_size)
    # States exist before the first step, with the same keys on every rank.
    keys = [sorted(optimizer.state[p]) for p in model.parameters()]
    assert all(theirs == keys for theirs in comm.agree(keys, all_ranks()))
    advance(model, optimizer, strategy, range(7, 8))  # nothing of it may survive
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return [everything(model, optimizer), advance(model, optimizer, strategy, range(2, 4))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero3", 2, "nothing"), ("zero3", 2)),
        (("hsdp", 4, "evenly"), ("zero3", 2)),
        (("hsdp", 4, "by matrix"), ("hfsdp", 4)),
        (("zero2", 4, "nothing"), ("zero0", 1)),
    ],
    ids=str,
)
def test_torchs_checkpoint_goes_on_in_another_world_bit_for_bit(
    before: tuple[str, int, str], after: tuple[str, int], tmp_path: Path
) -> None:
    strategy, ranks, way = before
    saved = run_ranks(save, ranks, strategy, way, str(tmp_path))[0]
    for loaded in run_ranks(load, after[1], after[0], str(tmp_path)):
        for mine, its in zip(loaded, saved, strict=True):
            assert_same(mine, its)
    written = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    for name in HELD:
        chunks = written[f"optimizer.state.{name}.momentum_buffer"].chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == 300, "each element once"


# ------------------------------------------------------------------------------ two meshes


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


def two_meshes(of_experts: str, dense: str = "zero3") -> tuple[TwoMeshes, Any, int]:
    """Dense weights on four ranks, and two pairs of ranks that hold experts of their own."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "dp"))
    half = mesh.get_local_rank("ep")
    model = TwoMeshes(half)
    sw.fully_shard(model.experts, mesh=mesh["dp"], placements=STRATEGIES[of_experts])
    sw.fully_shard(model, mesh=mesh_of(4), placements=STRATEGIES[dense])
    matrix = sw.muon(lr=0.05, weight_decay=0.1)
    return model, sw.optimizer(model, matrix=matrix, elementwise=sw.adamw()), half


def give(model: nn.Module, half: int, value: Any) -> None:
    for name, parameter in model.named_parameters():
        full = value(parameter.shape, half if "experts" in name else None)
        parameter.grad = torch.zeros_like(parameter).copy_(full)


@on_ranks(4)
def test_dense_and_expert_meshes_in_one_optimizer(rank: int, world_size: int) -> None:
    model, optimizer, half = two_meshes("zero3")
    plain = TwoMeshes(half)
    alone = sw.optimizer(plain, matrix=sw.muon(lr=0.05, weight_decay=0.1), elementwise=sw.adamw())
    assert len(optimizer._matrix_groups) == 2
    for step in range(3):
        for each, steps in ((model, optimizer), (plain, alone)):

            def drawn(shape: Any, of: int | None, step: int = step) -> Tensor:
                seed = step + 31 * (of or 0)
                return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

            give(each, half, drawn)
            steps.step()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(mine), its)


@pytest.mark.parametrize("kind", [2.0, float("inf")], ids=str)
@pytest.mark.parametrize("placements", ["zero3", "zero0"])
@on_ranks(4)
def test_one_norm_over_dense_and_expert_meshes(
    rank: int, world_size: int, kind: float, placements: str
) -> None:
    """Every expert counts once, wherever it is, and all ranks clip alike."""
    model, optimizer, half = two_meshes(placements)
    give(model, half, lambda shape, of: torch.full(shape, 0.5 if of is None else 1.0 + of))
    values = [torch.full((2 * 5 * 7,), 1.0), torch.full((2 * 5 * 7,), 2.0), torch.full((63,), 0.5)]
    expected = torch.linalg.vector_norm(torch.cat(values), kind)
    torch.testing.assert_close(optimizer.clip_grad_norm(1.0, norm_type=kind), expected)
    dense = full(model.dense.weight.grad)
    torch.testing.assert_close(dense, torch.full((9, 6), 0.5 / expected.item()))


@pytest.mark.parametrize("dense", ["zero3", "zero0"])
@on_ranks(4)
def test_an_overflow_in_one_expert_stops_the_step_of_all_ranks(
    rank: int, world_size: int, dense: str
) -> None:
    """An infinity in one rank's experts, then in its dense weights, then nowhere."""
    model, optimizer, _ = two_meshes("zero3", dense)
    scaler = GradScaler(device_type(), init_scale=4.0)
    matrices: list[Any] = [model.dense.weight, model.experts.weight]
    for broken in ("experts", "dense.weight", "nothing"):
        before = [one.to_local().clone() for one in matrices]
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        for name, parameter in model.named_parameters():
            # Its last element: of one rank alone, but for replicas, whose gradients are the same.
            here = parameter.cut.piece[1] == parameter.numel() and (rank > 1 or "dense" in name)
            if broken in name and here:
                parameter.grad.to_local().view(-1)[-1:].fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for one, old in zip(matrices, before, strict=True):
            same = torch.equal(one.to_local(), old)
            assert same == (broken != "nothing") or not old.numel(), (broken, rank)
    assert scaler.get_scale() == 1.0
