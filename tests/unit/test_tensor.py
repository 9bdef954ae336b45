# SPDX-License-Identifier: Apache-2.0
"""ShardedTensor at rest: gathering, modules, checkpoints, state dicts."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.core.layout import ELEMENT, ROW, Grain
from shardwise.core.tensor import ShardedTensor
from tests.ranks import on_ranks, run_ranks
from tests.worlds import (
    CASES,
    SHAPES,
    SOME_CASES,
    World,
    as_bytes,
    check,
    full_of,
    full_tensors,
    run_case,
)

# ---------------------------------------------------------------------- pieces and gathering


def check_full_tensor(rank: int, world_size: int, *case: Any) -> list[tuple[int, int]]:
    world = World(*case)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        fulls = {name: full.to(dtype) for name, full in full_tensors().items()}
        if dtype != torch.float32:  # NaN padding exists for floats only
            for cut, full in zip(world.cuts, fulls.values(), strict=True):
                tensor = ShardedTensor(cut.take(full).clone(), cut)
                assert torch.equal(as_bytes(tensor.full_tensor()), as_bytes(full))
            continue
        for name, tensor in world.tensors(fulls).items():
            check(tensor, fulls[name])
            assert isinstance(tensor, DTensor)
            replicated = tensor.redistribute(placements=[Replicate()] * world.mesh.ndim)
            assert type(replicated) is DTensor or not any(world.sharded)
            assert torch.equal(replicated.to_local(), fulls[name])
            assert tensor.redistribute(placements=tensor.placements) is tensor
    # -0.0 and NaN payloads survive both ways of gathering
    odd = torch.full(SHAPES["tall"], -0.0)
    tensor = ShardedTensor(world.cuts[3].take(odd).clone(), world.cuts[3])
    assert torch.equal(as_bytes(tensor.full_tensor()), as_bytes(odd))
    return [cut.piece for cut in world.cuts]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_full_tensor_is_right_for_every_parameter(case: tuple[Any, ...]) -> None:
    pieces = run_case(check_full_tensor, case)
    if case[0] > 1 and any(case[2]):
        # no empty comparison: the cases must contain what makes this hard
        rows = {hi - lo for piece in pieces for lo, hi in piece}
        assert 0 in rows and len(rows) > 2


# ---------------------------------------------------------------------- modules


class Model(nn.Module):
    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


@on_ranks(2)
def test_modules_copy_convert_and_swap(rank: int, world_size: int) -> None:
    world = World((2,), (True,), 1, ROW)
    fulls = full_tensors()
    model = Model(world.tensors(fulls))
    # deepcopy: the same cut, other memory, its own version, and the grad comes along
    model.wide.grad = torch.ones_like(model.wide)
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        assert type(parameter) is ShardedTensor and isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad and parameter.cut is getattr(model, name).cut
        check(parameter.detach(), fulls[name])
        with torch.no_grad():
            parameter.zero_()
        check(getattr(model, name).detach(), fulls[name])
    check(twin.wide.grad, torch.ones(7, 13))
    # conversions swap parameters in place
    twin.to(torch.bfloat16)
    assert twin.wide.dtype == torch.bfloat16 and type(twin.wide) is ShardedTensor
    twin.float().load_state_dict(fulls)  # plain full tensors
    for name, parameter in twin.named_parameters():
        check(parameter.detach(), fulls[name])
    # meta to real
    on_meta = model.to("meta")
    assert on_meta.wide.is_meta and on_meta.wide.to_local().is_meta
    on_meta.to_empty(device="cpu")
    assert type(on_meta.wide) is ShardedTensor and on_meta.wide.device.type == "cpu"
    on_meta.load_state_dict(twin.state_dict())
    for name, parameter in on_meta.named_parameters():
        check(parameter.detach(), fulls[name])
    # swapping keeps the object that others hold; torch swaps no DTensor with a plain tensor
    held = model.wide
    torch.utils.swap_tensors(held, nn.Parameter(world.tensors(full_tensors(8))["wide"]))
    assert model.wide is held and type(held) is ShardedTensor
    check(held.detach(), full_tensors(8)["wide"])
    with pytest.raises(RuntimeError, match="different slots"):
        torch.utils.swap_tensors(nn.Parameter(torch.zeros(7, 13)), held)
    # autograd at rest: a penalty on a parameter
    held.grad = None
    (held * 2).sum().backward()
    assert torch.equal(torch.as_tensor(2.0).expand(7, 13), full_of(held.grad))
    held.requires_grad_(False)
    assert not held.requires_grad


# ---------------------------------------------------------------------- checkpoints


def check_save(rank: int, world_size: int, *case: Any) -> None:
    *case_, folder = case
    tensors = World(*case_).tensors(full_tensors())
    dcp.save({"model": tensors, "step": torch.tensor(3)}, checkpoint_id=folder)


def check_load(rank: int, world_size: int, *case: Any) -> None:
    *case_, folder = case
    fulls = full_tensors()
    tensors = World(*case_).tensors({name: full * 0 for name, full in fulls.items()})
    versions = {name: tensor.buffer.writes for name, tensor in tensors.items()}
    state = {"model": tensors, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 3
    for name, tensor in tensors.items():
        check(tensor, fulls[name])
        if tensor.to_local().numel():
            assert tensor.buffer.writes > versions[name]


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_checkpoint_round_trip_and_reshard(case: tuple[Any, ...], tmp_path: Path) -> None:
    run_case(check_save, case, str(tmp_path))
    # what is on disk is each element once
    metadata = dcp.FileSystemReader(str(tmp_path)).read_metadata()
    for name, shape in SHAPES.items():
        chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
        assert sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(shape)
    run_case(check_load, case, str(tmp_path))
    other = CASES[(CASES.index(case) + 7) % len(CASES)]
    assert other[1:] != case[1:]
    run_case(check_load, other, str(tmp_path))
    # and a plain reader sees plain tensors
    state = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    for name, full in full_tensors().items():
        assert torch.equal(state["model"][name], full)


def check_plain_to_ours(rank: int, world_size: int, *case: Any) -> None:
    """A checkpoint of torch's own DTensors loads into ours, and the other way round."""
    world = World(*case[:-1])
    folder = case[-1]
    fulls = {name: full for name, full in full_tensors().items() if full.ndim}
    chunked = {
        name: distribute_tensor(full, world.mesh, [Shard(0)]) for name, full in fulls.items()
    }
    dcp.save(dict(chunked), checkpoint_id=folder + "/torch")
    ours = world.tensors({name: full * 0 for name, full in full_tensors().items()})
    del ours["scalar"]
    dcp.load(dict(ours), checkpoint_id=folder + "/torch")
    for name, tensor in ours.items():
        check(tensor, fulls[name])
    dcp.save(dict(ours), checkpoint_id=folder + "/ours")
    for tensor in chunked.values():
        tensor.zero_()
    dcp.load(dict(chunked), checkpoint_id=folder + "/ours")
    for name, tensor in chunked.items():
        assert torch.equal(tensor.full_tensor(), fulls[name])
    # asynchronous saves stage a copy first
    future = dcp.async_save(dict(ours), checkpoint_id=folder + "/async")
    for tensor in ours.values():
        tensor.zero_()
    future.result()
    dcp.load(dict(ours), checkpoint_id=folder + "/async")
    for name, tensor in ours.items():
        check(tensor, fulls[name])
        assert tensor.data_ptr() == 0  # a shell: torch's staging takes anything else for memory


@pytest.mark.parametrize("grain", [ROW, ELEMENT], ids=str)
def test_checkpoints_exchange_with_torch(grain: Grain, tmp_path: Path) -> None:
    run_ranks(check_plain_to_ours, 3, (3,), (True,), 1, grain, str(tmp_path))


def check_state_dict_helpers(rank: int, world_size: int, *case: Any) -> None:
    world = World(*case)
    fulls = full_tensors()
    model = Model(world.tensors(fulls))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for name, grad in world.tensors(full_tensors(2)).items():
        getattr(model, name).grad = grad
    optimizer.step()
    optimizer.zero_grad()
    expected = {name: p.full_tensor() for name, p in model.named_parameters()}
    gathered = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert sorted(gathered) == (sorted(SHAPES) if rank == 0 else [])
    for name, tensor in gathered.items():
        assert type(tensor) is Tensor and torch.equal(tensor, expected[name])
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    states = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    moments = {
        name: optimizer.state[p]["exp_avg"].full_tensor() for name, p in model.named_parameters()
    }
    for name in SHAPES:
        assert torch.equal(full[name], expected[name])
        assert torch.equal(states["state"][name]["exp_avg"], moments[name])

    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        fresh = Model(world.tensors({name: value * 0 for name, value in fulls.items()}))
        versions = {name: p.buffer.writes for name, p in fresh.named_parameters()}
        others = torch.optim.AdamW(fresh.parameters(), lr=0.1, foreach=True)
        source = dict(full) if rank == 0 or not broadcast else {}
        if broadcast and any(not c.in_rows and len(c.shape) and any(c.sharded) for c in world.cuts):
            # a cut inside rows is no block of rows: torch's way of loading is refused on every rank
            with pytest.raises(NotImplementedError, match="cut inside its rows"):
                set_model_state_dict(fresh, source, options=options)
            continue
        set_model_state_dict(fresh, source, options=options)
        set_optimizer_state_dict(
            fresh, others, states if rank == 0 or not broadcast else {}, options=options
        )
        for name, parameter in fresh.named_parameters():
            assert type(parameter) is ShardedTensor
            check(parameter.detach(), expected[name])
            assert parameter.buffer.writes > versions[name]
            moment = others.state[parameter]["exp_avg"]
            assert torch.equal(full_of(moment), moments[name]), (name, broadcast)
    # a sharded state dict, loaded back
    sharded = get_model_state_dict(model)
    fresh = Model(world.tensors({name: value * 0 for name, value in fulls.items()}))
    set_model_state_dict(fresh, sharded)
    for name, parameter in fresh.named_parameters():
        check(parameter.detach(), expected[name])


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_state_dict_helpers(case: tuple[Any, ...]) -> None:
    # fresh: a refusal in the middle of torch's broadcasts may leave one of them in flight
    world_size, *rest = case
    run_ranks(check_state_dict_helpers, world_size, *rest, fresh=case[-1] == ELEMENT)
