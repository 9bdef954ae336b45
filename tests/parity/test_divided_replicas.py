# SPDX-License-Identifier: Apache-2.0
"""Replicas that divide the matrices one by one or evenly give the same bits, from gradients that
are stored on one replica each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardwise as sw
from shardwise.core.placements import PARTIAL, REPLICATE, SHARD
from shardwise.optim import matrix_group
from shardwise.optim.split import Split
from shardwise.shard.diagnose import find_nonfinite, parameter_norms
from tests.models import Model, loss_of, make_model, mesh_for, mesh_of, shard_model, tokens
from tests.one_card import device_type, ordered_ranks
from tests.parity.helpers import assert_same, everything
from tests.ranks import run_ranks

# One replica takes the first of these, another the rest; the others go to one whole.
SPLITS = {"layers.0.up.weight": Split.stacked(7, 13, 10)}
MATRICES = ["layers.0.up.weight", "layers.0.down.weight"]
MATRICES += ["layers.1.up.weight", "layers.1.down.weight"]


WAYS = ("by matrix", "evenly")


def divided_by(way: str) -> None:
    """Have every optimizer that is built from now on divide matrices so, whatever it costs."""
    matrix_group.evenly_is_cheaper = lambda plan: way == "evenly"  # type: ignore[assignment]


def optimizer_of(model: Model) -> Any:
    matrix = sw.muon(lr=0.05, weight_decay=0.1)
    return sw.optimizer(model, matrix=matrix, elementwise=sw.adamw(lr=1e-2))


def build(world_size: int, placements: Any = None, **options: Any) -> tuple[Model, Any]:
    model, placements = make_model(depth=2), placements or sw.hsdp()
    sw.route(model, split=SPLITS)
    shard_model(model, placements, mesh_for(placements, world_size), **options)
    return model, optimizer_of(model)


def backward(model: Model, rank: int, step: int = 0, microbatch: int = 0) -> None:
    loss_of(model, tokens(step, microbatch, rank, 4)).backward()


# ------------------------------------------------------------------------------ ways to train


def plain(model: Model, optimizer: Any, rank: int) -> Any:
    for step in range(2):
        backward(model, rank, step)
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model: Model, optimizer: Any, rank: int) -> Any:
    for step in range(2):
        for microbatch in range(3):
            model.set_is_last_backward(microbatch == 2)
            backward(model, rank, step, microbatch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def unsynced(model: Model, optimizer: Any, rank: int) -> Any:
    """Without sync, then twice with it: the second adds to what the first left in ``.grad``."""
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch > 0)
        backward(model, rank, 0, microbatch)
    optimizer.step()


def divided(model: Model, optimizer: Any, rank: int) -> Any:
    for unit in (model, *model.layers):
        unit.set_gradient_divide_factor(3.0)
        unit.set_force_sum_reduction_for_comms(True)
    backward(model, rank)
    optimizer.step()


def replaced(model: Model, optimizer: Any, rank: int) -> Any:
    """Gradients of the user's: made of ours, given whole, taken away; then added to."""
    backward(model, rank)
    first, second, third, _ = (model.get_parameter(name) for name in MATRICES)
    first.grad = first.grad * 2
    given = torch.zeros_like(second)
    given.copy_(torch.linspace(-1, 1, second.numel()).view(second.shape))
    second.grad = given
    third.grad = None
    backward(model, rank, 1)
    optimizer.step()
    second.grad = given
    norm = optimizer.clip_grad_norm(1e9)
    optimizer.step()
    return norm.item()


def rebuilt(model: Model, optimizer: Any, rank: int) -> Any:
    """With gradients present, with another division, and with momenta stored otherwise."""
    backward(model, rank)
    again = optimizer_of(model)
    again.step()
    again.zero_grad()
    backward(model, rank, 1)
    model.layers[1].up.weight.requires_grad_(False)
    optimizer_of(model).step()
    model.layers[1].up.weight.requires_grad_(True)
    last = optimizer_of(model)
    last.load_state_dict(again.state_dict())
    backward(model, rank, 2)
    last.step()
    optimizer.state = last.state


def emptied(model: Model, optimizer: Any, rank: int) -> Any:
    """Another division, while the memory of gradients is given back."""
    backward(model, rank)
    model.zero_grad()
    model.layers[1].up.weight.requires_grad_(False)
    fewer = optimizer_of(model)
    backward(model, rank, 1)
    fewer.step()
    optimizer.state.update(fewer.state)


def moved(model: Model, optimizer: Any, rank: int) -> Any:
    """Buffers made anew under an optimizer."""
    backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    model.to(torch.float64)
    model.to(torch.float32)
    backward(model, rank, 1)
    optimizer.step()


PROGRAMS: list[Callable[..., Any]] = [
    plain,
    accumulated,
    unsynced,
    divided,
    replaced,
    rebuilt,
    emptied,
    moved,
]


def check_program(rank: int, world_size: int, program: Callable[..., Any]) -> int:
    found, returned = [], []
    for way in WAYS:
        divided_by(way)
        model, optimizer = build(world_size)
        returned.append(program(model, optimizer, rank))
        found.append(everything(model, optimizer))
        assert_same(found[0], found[-1])
        assert returned[0] == returned[-1]
    return len(found[0])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_both_ways_to_divide_matrices_give_the_same_bits(program: Callable[..., Any]) -> None:
    assert all(run_ranks(check_program, 4, program))


# ------------------------------------------------------------------------------ what .grad says


def check_gradients(rank: int, world_size: int) -> dict[str, int]:
    """Honest on every rank, and to everybody who asks; and how much of each is here."""
    model, optimizer = build(world_size)
    other = shard_model(make_model(depth=2), sw.hsdp(), mesh_for(sw.hsdp(), world_size))
    for one in (model, other):
        backward(one, rank)
    for name, parameter in model.named_parameters():
        theirs = other.get_parameter(name).grad
        assert torch.equal(parameter.grad.full_tensor(), theirs.full_tensor()), name
    here = {name: model.get_parameter(name).grad.to_local().numel() for name in MATRICES}
    norms = [parameter_norms(one) for one in (model, other)]
    assert norms[0].keys() == norms[1].keys()
    for name, (weight, grad) in norms[0].items():
        assert (weight, pytest.approx(grad, rel=1e-6)) == norms[1][name], name
    for kind in (2.0, float("inf")):
        torchs, expected = (
            torch.nn.utils.get_total_norm([p.grad for p in one.parameters()], kind).item()
            for one in (model, other)
        )
        ours = optimizer.clip_grad_norm(1e9, norm_type=kind).item()
        assert torchs == pytest.approx(expected, rel=1e-6)
        assert ours == pytest.approx(expected, rel=1e-6)
    for one in (model, other):
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), other.get_parameter(name).grad.full_tensor()
        )
    # A broken number is named by the one rank that has it, and stops the step of all.
    broken = next(name for name in MATRICES if here[name]) if rank == 3 else None
    if broken:
        model.get_parameter(broken).grad.to_local().view(-1)[-1:].fill_(float("nan"))
    found = find_nonfinite(model)
    assert [(one.kind, one.coordinate, one.num_nan) for one in found] == [("gradient", (1, 1), 1)]
    before = everything(model, optimizer)
    scaler = GradScaler(device_type(), init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(everything(model, optimizer), before)
    with pytest.raises(NotImplementedError, match=r"up\.weight"):
        torch.optim.AdamW(model.parameters()).step()
    return here


def test_gradients_lie_on_one_replica_each_and_everybody_reads_them_right() -> None:
    everyone = run_ranks(check_gradients, 4)
    for name in MATRICES:
        assert sum(here[name] for here in everyone) == 300, name
    held = [sum(here.values()) for here in everyone]
    assert min(held[0] + held[1], held[2] + held[3]) > 500, "about half of 1200 each"


# ------------------------------------------------------------------------------ other meshes


def check_three_axes(rank: int, world_size: int, precision: str) -> list[int]:
    """Two axes of replicas: gradients go one axis at a time, to the replica that needs them."""
    placements = sw.Placements(
        compute=[REPLICATE, REPLICATE, SHARD],
        grad=[PARTIAL, PARTIAL, SHARD],
        main=[REPLICATE, REPLICATE, SHARD],
    )
    found, held = [], []
    for way in WAYS:
        model = make_model(depth=2)
        sw.route(model, split=SPLITS)
        wire = sw.Precision(weights=precision)
        shard_model(model, placements, mesh_of(2, 2, 1), precision=wire)
        divided_by(way)
        optimizer = optimizer_of(model)
        plain(model, optimizer, rank)
        found.append(everything(model, optimizer))
        assert_same(found[0], found[-1])
        momenta = [optimizer.state[model.get_parameter(name)] for name in MATRICES]
        held.append(sum(one["momentum_buffer"].to_local().numel() for one in momenta))
    return held


@pytest.mark.cpu_only("NCCL rounds a sum in bf16 on each axis, ours once")
def test_two_axes_of_replicas_and_gradients_in_bf16() -> None:
    by_matrix, evenly = zip(*run_ranks(check_three_axes, 4, "bf16"), strict=True)
    assert sum(by_matrix) == sum(evenly) == 4 * 300, "every momentum once"
    assert sorted(evenly) == [240, 320, 320, 320], "two buffers in parts of 160"


# ------------------------------------------------------------------------------ torch's checkpoints


def check_torch_checkpoint(rank: int, world_size: int, path: str, way: str) -> int:
    """torch's own: saved here, loaded under zero(3) and here, and gone on with."""
    divided_by(way)
    model, optimizer = build(world_size)
    plain(model, optimizer, rank)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)
    expected = everything(model, optimizer)
    written = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name in MATRICES:
        chunks = written[f"optimizer.state.{name}.momentum_buffer"].chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == 300, "each element once"
    for placements in (sw.zero(3), sw.hsdp()):
        other, again = build(world_size, placements)
        backward(other, rank)  # nothing of it may survive
        again.step()
        again.zero_grad()
        states = get_state_dict(other, again)
        loaded = dict(zip(("model", "optimizer"), states, strict=True))
        dcp.load(loaded, checkpoint_id=path)
        set_state_dict(
            other,
            again,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert_same(everything(other, again), expected, placements)
    plain(model, optimizer, rank)
    plain(other, again, rank)
    assert_same(everything(other, again), everything(model, optimizer))
    return len(expected)


@pytest.mark.parametrize("way", WAYS[:2])
def test_torch_writes_momenta_once_and_reads_them_anywhere(tmp_path: Path, way: str) -> None:
    assert run_ranks(check_torch_checkpoint, 4, str(tmp_path), way) == [52] * 4


# ------------------------------------------------------------------------------ our checkpoints


def check_our_checkpoint(rank: int, world_size: int, path: str) -> int:
    """Saved by four replicas in even parts, loaded under other strategies and gone on with."""
    divided_by("evenly")
    model = shard_model(make_model(depth=2), sw.zero(0), mesh_of(world_size))
    optimizer = optimizer_of(model)
    plain(model, optimizer, rank)
    sw.save(path, model, optimizer)
    before = everything(model, optimizer)
    plain(model, optimizer, rank)
    after = everything(model, optimizer)
    for way, placements in (("by matrix", sw.hsdp()), ("evenly", sw.hsdp()), ("", sw.zero(3))):
        divided_by(way)
        other = make_model(depth=2, seed=5)
        mesh = mesh_of(world_size, 1) if placements == sw.hsdp() else mesh_of(world_size)
        shard_model(other, placements, mesh)
        again = optimizer_of(other)
        sw.load(path, other, again)
        assert_same(everything(other, again), before, placements)
        plain(other, again, rank)
        assert_same(everything(other, again), after, placements)
    return len(before)


def test_even_parts_are_saved_and_loaded_anywhere(tmp_path: Path) -> None:
    assert all(run_ranks(check_our_checkpoint, ordered_ranks(4), str(tmp_path / "saved")))
