# SPDX-License-Identifier: Apache-2.0
"""Around the step: one norm, one decision, one refresh; and states that travel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardwise as sw
from shardwise.core import comm
from shardwise.core.agreement import all_ranks
from shardwise.optim.gradients import NonFiniteGradient
from tests.models import STRATEGIES, Model, loss_of, make_model, mesh_for, shard_model, tokens
from tests.one_card import device_type
from tests.parity.helpers import assert_same, everything, full
from tests.ranks import run_ranks

LIMIT = 0.02  # of a norm


def ranks_for(strategy: str) -> int:
    return 4 if strategy in ("hsdp", "hfsdp") else 2


def build(strategy: str | None, world_size: int, **options: Any) -> tuple[Model, Any]:
    model = make_model(depth=2)
    if strategy is not None:
        placements = STRATEGIES[strategy]
        shard_model(model, placements, mesh_for(placements, world_size), **options)
    return model, sw.optimizer(model, matrix=sw.muon(lr=0.05), elementwise=sw.adamw(lr=1e-2))


# ------------------------------------------------------------------------------ clipping


def clip(rank: int, world_size: int, strategy: str, kind: float) -> tuple[float, list[str]]:
    model, optimizer = build(strategy, world_size)
    plain, reference = build(None, 1)
    for each in (model, plain):
        loss_of(each, tokens(0)).backward()  # the same on every rank
    with comm.record() as calls:
        ours = optimizer.clip_grad_norm(LIMIT, norm_type=kind)
    theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), LIMIT, norm_type=kind)
    assert theirs > 2 * LIMIT, "there is something to clip"
    torch.testing.assert_close(ours, theirs)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), its.grad)
    assert float(optimizer.clip_grad_norm(1e9, norm_type=kind)) == pytest.approx(LIMIT, rel=1e-3)
    # One process, the same arithmetic: the same float32.
    for parameter in plain.parameters():
        parameter.grad = None
    loss_of(plain, tokens(0)).backward()
    alone = reference.clip_grad_norm(LIMIT, norm_type=kind)
    assert torch.equal(alone, ours)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(mine.grad), its.grad)
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
    matrices, rest = {
        "zero0": (["dp"], []),
        "zero3": (["dp"], []),
        "hsdp": (["dp_outer", "dp"], ["dp"]),
        "hfsdp": (["dp_outer", "dp"], []),
    }[strategy]
    assert all(seen == matrices + rest for _, seen in found), found


def overflow(rank: int, world_size: int, strategy: str, value: float) -> list[str]:
    """A bad element in one rank's piece alone is seen, and raised, by all."""
    model, optimizer = build(strategy, world_size)
    loss_of(model, tokens(0)).backward()
    here = [(n, p) for n, p in model.named_parameters() if p.grad.to_local().numel()]
    name, last = here[-1]
    bad = rank == world_size - 1
    if bad:
        last.grad.to_local().view(-1)[0] = value
    raised = []
    try:
        optimizer.clip_grad_norm(1.0, error_if_nonfinite=True)
    except NonFiniteGradient as error:
        raised.append(str(error))
        assert (f"'{name}'" if bad else "of no parameter are") in raised[0], "who has it names it"
    assert not torch.isfinite(optimizer.clip_grad_norm(1.0))
    return raised


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("strategy", ["zero3", "hfsdp"])
def test_an_overflow_on_one_rank_is_known_to_all(strategy: str, value: float) -> None:
    found = run_ranks(overflow, ranks_for(strategy), strategy, value)
    assert all(len(one) == 1 and "gradient norm" in one[0] for one in found)


def clip_in_step(rank: int, world_size: int, strategy: str) -> None:
    """As clipped before the step; and a gradient that is not finite moves nothing at all."""
    (model, optimizer), (other, before) = (build(strategy, world_size) for _ in range(2))

    def values(which: Any, its: Any) -> list[Tensor]:
        states = [v for p in which.parameters() for v in its.state[p].values()]
        return [full(one).clone() for one in (*which.parameters(), *states)]

    for each, its, late in ((model, optimizer, True), (other, before, False)):
        loss_of(each, tokens(rank)).backward()
        its.clip_grad_norm(LIMIT, in_step=late)
        its.step()
        its.zero_grad()
    expected = values(other, before)
    assert all(map(torch.equal, values(model, optimizer), expected))
    loss_of(model, tokens(rank)).backward()
    last = [p for p in model.parameters() if p.grad.to_local().numel()][-1]
    if rank == world_size - 1:
        last.grad.to_local().view(-1)[0] = float("nan")
    optimizer.clip_grad_norm(LIMIT, in_step=True)
    bad = [name for name, norm in optimizer.last_norms if not torch.isfinite(norm)]
    assert len(bad) == (rank == world_size - 1), bad
    optimizer.step()
    assert all(map(torch.equal, values(model, optimizer), expected)), "nothing has moved"
    optimizer.zero_grad()
    loss_of(model, tokens(rank)).backward()
    optimizer.step()
    assert not torch.equal(full(next(model.parameters())), expected[0]), "the clip was used once"


@pytest.mark.cpu_only("a fused kernel of a GPU clips and rounds at once")
@pytest.mark.parametrize("strategy", ["zero1", "hfsdp"])
def test_a_step_clips(strategy: str) -> None:
    run_ranks(clip_in_step, ranks_for(strategy), strategy)


def test_bad_norms_are_refused() -> None:
    _, optimizer = build(None, 1)
    with pytest.raises(ValueError, match="max_norm=0"):
        optimizer.clip_grad_norm(0)
    with pytest.raises(ValueError, match="norm_type=-1"):
        optimizer.clip_grad_norm(1, norm_type=-1)
    assert optimizer.clip_grad_norm(1.0) == 0.0, "no gradients yet"


def scaled(rank: int, world_size: int, strategy: str) -> list[bool]:
    model, optimizer = build(strategy, world_size)
    scaler = GradScaler(device_type(), init_scale=256.0, growth_interval=100)
    moved = []
    for step in range(3):
        before = full(model.layers[0].up.weight)
        loss = loss_of(model, tokens(step))
        if step == 1 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, full(model.layers[0].up.weight)))
    return moved


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp"])
def test_a_loss_scaler_skips_the_step_everywhere(strategy: str) -> None:
    world_size = ranks_for(strategy)
    assert run_ranks(scaled, world_size, strategy) == [[True, False, True]] * world_size


# ------------------------------------------------------------------------------ one refresh


def versions(rank: int, world_size: int, strategy: str) -> tuple[list[int], int]:
    model, optimizer = build(strategy, world_size)
    loss_of(model, tokens(0)).backward()
    watched: Any = {id(p.buffer): p.buffer for p in model.parameters()}  # type: ignore[attr-defined]
    before = [buffer.writes for buffer in watched.values()]
    optimizer.step()
    after = [buffer.writes for buffer in watched.values()]
    optimizer.zero_grad()
    with comm.record() as calls:
        model(tokens(1))
        model(tokens(1))
    gathered = sum(call.operation == "all_gather" for call in calls)
    return [new - old for new, old in zip(after, before, strict=True)], gathered


def test_every_buffer_is_marked_once_and_refreshed_once() -> None:
    found = run_ranks(versions, 2, "zero1")
    for marks, gathered in found:
        assert marks == [1] * len(marks) and len(marks) >= 3
        assert gathered == len(marks), "two forwards, one refresh of each buffer"


# ------------------------------------------------------------------------------ states that travel


def advance(model: Model, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(rank: int, world_size: int, strategy: str, path: str) -> dict[str, Tensor]:
    model, optimizer = build(strategy, world_size)
    advance(model, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    saved = everything(model, optimizer)
    advance(model, optimizer, range(2, 4))
    return saved | {"later " + name: value for name, value in everything(model, optimizer).items()}


def load(rank: int, world_size: int, strategy: str, path: str) -> dict[str, Tensor]:
    model, optimizer = build(strategy, world_size)
    # States exist before the first step, with the same keys on every rank.
    keys = [sorted(optimizer.state[p]) for p in model.parameters()]
    assert all(theirs == keys for theirs in comm.agree(keys, all_ranks()))
    advance(model, optimizer, range(7, 8))  # nothing of it may survive
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    loaded = everything(model, optimizer)
    advance(model, optimizer, range(2, 4))
    return loaded | {"later " + name: value for name, value in everything(model, optimizer).items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero3", 2), ("zero3", 2)),
        (("zero3", 2), ("hsdp", 4)),
        (("hfsdp", 4), ("zero1", 2)),
        (("zero2", 4), ("zero0", 1)),
    ],
    ids=lambda value: f"{value[0]} on {value[1]}",
)
def test_a_checkpoint_goes_on_in_another_world_bit_for_bit(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    saved = run_ranks(save, before[1], before[0], str(tmp_path))[0]
    for loaded in run_ranks(load, after[1], after[0], str(tmp_path)):
        assert len(saved) == 2 * 52
        assert_same(loaded, saved)
