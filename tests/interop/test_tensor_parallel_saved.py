# SPDX-License-Identifier: Apache-2.0
"""Parameters of tensor parallelism that this library sharded further: state dicts, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.ranks import on_ranks
from tests.tensor_parallel import (
    Net,
    adamw_of,
    batches,
    bucketed,
    data_rank,
    grid,
    loss_of,
    muon_of,
    sharded,
    tiled,
    train,
    whole,
)
from tests.whole import assert_same, whole_parameters, whole_state

# ------------------------------------------------------------------------------ state dicts


@on_ranks(4)
def test_whole_state_dicts_go_in_and_out(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    model = bucketed(mesh, sw.zero(1))
    train(model, muon_of(model), batches(1, 2, data_rank(mesh)))
    expected = whole_parameters(model)
    plain = sw.full_state_dict(model)
    assert_same(plain, expected)
    assert not any(isinstance(value, DTensor) for value in plain.values())
    unwrapped = tiled(mesh)
    whole_values = sw.full_state_dict(unwrapped)
    assert_same(whole_values, whole_parameters(unwrapped))
    assert not any(isinstance(value, DTensor) for value in whole_values.values())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = get_model_state_dict(model, options=options)
    if rank == 0:
        assert_same(theirs, expected)
    for load in (
        lambda other: sw.load_full_state_dict(other, plain),
        lambda other: other.load_state_dict(plain),
        lambda other: other.load_state_dict(model.state_dict()),
        lambda other: set_model_state_dict(
            other, dict(plain), options=StateDictOptions(full_state_dict=True)
        ),
        lambda other: set_model_state_dict(
            other,
            dict(plain) if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ),
    ):
        other = sharded(mesh, sw.zero(3))
        assert not torch.equal(whole(other.head.weight), expected["head.weight"])
        load(other)
        assert_same(whole_parameters(other), expected)
        assert loss_of(other, 3).item() == pytest.approx(loss_of(model, 3).item(), rel=1e-5)
    over_tp = tiled(mesh)  # torch's DTensors, which know nothing of dp
    other.load_state_dict(over_tp.state_dict())
    assert_same(whole_parameters(other), whole_parameters(over_tp))


# ------------------------------------------------------------------------------ checkpoints


def trained(sizes: tuple[int, ...], optimize: Any, steps: int, first: int = 0) -> tuple[Any, Any]:
    mesh = grid(*sizes)
    placements = sw.zero(3) if len(sizes) == 2 else sw.hsdp()
    model = sharded(mesh, placements)
    optimizer = optimize(model)
    go_on(model, optimizer, range(first, first + steps))
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:  # the same batch on every rank, whatever the mesh
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("optimize", [adamw_of, muon_of], ids=["adamw", "muon"])
@on_ranks(4)
def test_a_checkpoint_loads_into_any_other_mesh(
    rank: int, world_size: int, tmp_path: Path, optimize: Any
) -> None:
    into = ((4, 1), (1, 2, 2))
    every = {(2, 2): ((1, 4), *into), (2, 1, 2): into}
    for sizes, meshes in every.items() if optimize is muon_of else [((2, 2), into)]:
        model, optimizer = trained(sizes, optimize, 2)
        saved = whole_state(model, optimizer)
        path = tmp_path / f"{len(sizes)}"
        sw.save(path, model, optimizer)
        for others in meshes:
            other, fresh = trained(others, optimize, 1, first=7)
            assert not torch.equal(whole(other.head.weight), saved["head.weight"])
            sw.load(path, other, fresh)
            assert_same(whole_state(other, fresh), saved)
        again, fresh = trained(sizes, optimize, 1, first=7)
        sw.load(path, again, fresh)
        for one, its in ((model, optimizer), (again, fresh)):
            go_on(one, its, range(2, 4))
        assert_same(whole_state(again, fresh), whole_state(model, optimizer))
    alone = Net()  # and into one process, which writes one that all can read
    sw.load(path, alone)
    assert all(torch.equal(p, saved[name]) for name, p in alone.named_parameters())


@on_ranks(4)
def test_torchs_checkpoints(rank: int, world_size: int, tmp_path: Path) -> None:
    """Written here and read by torch's fully_shard with tensor parallelism, and the other way
    round."""
    ours = sharded(grid(2, 2), sw.zero(3))
    with torch.no_grad():
        for number, parameter in enumerate(ours.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 1000.0 * number)
    expected = whole_parameters(ours)
    dcp.save({"model": ours.state_dict()}, checkpoint_id=tmp_path / "ours")
    mesh = grid(1, 4)
    theirs = tiled(grid(2, 2))
    torch_fully_shard(theirs, mesh=grid(2, 2)["dp"])
    for other in (sharded(mesh, sw.zero(3)), bucketed(grid(2, 2), sw.zero(2)), theirs, Net()):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "ours")
        other.load_state_dict(state["model"])
        assert_same(whole_parameters(other), expected)
    dcp.save({"model": theirs.state_dict()}, checkpoint_id=tmp_path / "theirs")
    other = sharded(grid(2, 1, 2), sw.hsdp())
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "theirs")
    assert_same(whole_parameters(other), expected)


@pytest.mark.parametrize("whole_states", [True, False], ids=["whole", "sharded"])
@on_ranks(4)
def test_optimizer_states_go_through_torchs_helpers(
    rank: int, world_size: int, whole_states: bool
) -> None:
    model, optimizer = trained((2, 2), adamw_of, 2)
    options = StateDictOptions(full_state_dict=whole_states)
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    other, fresh = trained((2, 2), adamw_of, 1, first=7)
    set_state_dict(
        other,
        fresh,
        model_state_dict=saved[0],
        optim_state_dict=saved[1],
        options=options,
    )
    for one, its in ((model, optimizer), (other, fresh)):
        go_on(one, its, range(2, 4))
    assert_same(whole_state(other, fresh), whole_state(model, optimizer))
