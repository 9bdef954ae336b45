# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` and state dicts, in the same and in another world."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise as sw
from tests.contract.helpers import (
    MAIN_STRATEGIES,
    Net,
    assert_close,
    assert_parameters_equal,
    full,
    raised,
    ranks_for,
    word_loss,
    words,
    wrap,
)
from tests.ranks import on_ranks, run_ranks
from tests.whole import whole_tensors


def trained(rank: int, world_size: int, strategy: str, steps: int, seed: int) -> tuple[Any, Any]:
    """A model and its AdamW after some steps on data that is the same whatever the world."""
    torch.manual_seed(seed)
    net = wrap(Net(), world_size, strategy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        advance(net, optimizer, step)
    return net, optimizer


def advance(net: Any, optimizer: Any, step: int) -> None:
    word_loss(net, 0, step).backward()  # the same batch on every rank
    optimizer.step()
    optimizer.zero_grad()


def values(net: Any, optimizer: Any) -> dict[str, Tensor]:
    found = dict(net.named_parameters())
    for name, parameter in net.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found[f"{name}.{key}"] = torch.as_tensor(optimizer.state[parameter][key])
    assert len(found) > 40
    return whole_tensors(found)


def save(rank: int, world_size: int, strategy: str, path: str) -> dict[str, Tensor]:
    net, optimizer = trained(rank, world_size, strategy, 2, seed=1)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    # A saved model goes on as if nothing had happened.
    saved = values(net, optimizer)
    advance(net, optimizer, 2)
    return saved | whole_tensors({"next." + name: p for name, p in net.named_parameters()})


def load(rank: int, world_size: int, strategy: str, path: str) -> dict[str, Tensor]:
    # Another model, trained elsewhere: nothing of it may survive the load.
    net, optimizer = trained(rank, world_size, strategy, 1, seed=9)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    found = values(net, optimizer)
    advance(net, optimizer, 2)
    return found | whole_tensors({"next." + name: p for name, p in net.named_parameters()})


def compare(saved: dict[str, Tensor], loaded: dict[str, Tensor], tolerance: float) -> None:
    assert set(saved) == set(loaded) and len(saved) > 50
    for name, value in saved.items():
        bound = tolerance if name.startswith("next.") else 0.0
        assert_close(loaded[name], value, name, bound)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero3", 2), ("zero3", 2)),
        (("hsdp", 4), ("hsdp", 4)),
        (("zero3", 2), ("zero3", 4)),
        (("zero3", 4), ("zero1", 2)),
        (("hfsdp", 4), ("zero3", 2)),
        (("zero0", 2), ("hfsdp", 4)),
        (("zero2", 2), ("zero3", 1)),
    ],
    ids=lambda value: f"{value[0]} on {value[1]}",
)
def test_a_checkpoint_loads_in_another_world_and_strategy(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    saved = run_ranks(save, before[1], before[0], str(tmp_path))[0]
    for loaded in run_ranks(load, after[1], after[0], str(tmp_path)):
        compare(saved, loaded, 0.0 if before == after else 1e-6)


def load_alone(path: str) -> dict[str, Tensor]:
    """A plain model in this very process, no process group at all."""
    plain = Net()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=path)
    return state["model"]


def test_a_plain_model_reads_a_sharded_checkpoint(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, "zero3", str(tmp_path))[0]
    found = load_alone(str(tmp_path))
    assert len(found) > 10
    for name, value in found.items():
        assert torch.equal(value, saved[name]), name


def save_plain(path: str) -> dict[str, Tensor]:
    torch.manual_seed(4)
    plain = Net()
    dcp.save({"model": plain.state_dict()}, checkpoint_id=path)
    return {name: value.clone() for name, value in plain.state_dict().items()}


def load_from_plain(rank: int, world_size: int, strategy: str, path: str) -> dict[str, Tensor]:
    net = wrap(Net(), world_size, strategy)
    with torch.no_grad():
        net(words(rank))  # whole weights of before are alive somewhere
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=path)
    with torch.no_grad():
        output = net(words(0))
    found = {name: full(value).clone() for name, value in net.named_parameters()}
    return found | {"output": output}


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
def test_loading_in_place_refreshes_what_forward_reads(strategy: str, tmp_path: Path) -> None:
    saved = save_plain(str(tmp_path))
    plain = Net()
    plain.load_state_dict(saved)
    expected = plain(words(0)).detach()
    for found in run_ranks(load_from_plain, ranks_for(strategy), strategy, str(tmp_path)):
        assert_close(found.pop("output"), expected, "output", 1e-6)
        assert set(found) == set(saved)
        assert all(torch.equal(found[name], value) for name, value in saved.items())


# ------------------------------------------------------------------------------ full state dicts


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_full_state_dicts_leave_and_return(rank: int, world_size: int, strategy: str) -> None:
    net, optimizer = trained(rank, world_size, strategy, 1, seed=2)
    options = StateDictOptions(full_state_dict=True)
    model_state = get_model_state_dict(net, options=options)
    optimizer_state = get_optimizer_state_dict(net, optimizer, options=options)
    truth = values(net, optimizer)
    assert list(model_state) == [name for name, _ in net.named_parameters()]
    for name, value in model_state.items():
        assert not isinstance(value, DTensor), name
        assert torch.equal(value, truth[name]), name
    averages = {name: state["exp_avg"] for name, state in optimizer_state["state"].items()}
    assert set(averages) == set(model_state)
    for name, value in averages.items():
        assert not isinstance(value, DTensor), name
        assert torch.equal(value, truth[f"{name}.exp_avg"]), name
    offloaded = get_model_state_dict(
        net, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert bool(offloaded) == (rank == 0), "rank 0 alone holds the whole"
    # And back, into a model that was somewhere else.
    other, other_optimizer = trained(rank, world_size, strategy, 2, seed=3)
    set_model_state_dict(other, model_state, options=options)
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=options)
    found = values(other, other_optimizer)
    assert set(found) == set(truth)
    wrong = {n: (found[n], v) for n, v in truth.items() if not torch.equal(found[n], v)}
    assert not wrong, str(wrong)[:2000]
    with torch.no_grad():
        assert torch.equal(other(words(rank)), net(words(rank)))


@pytest.mark.parametrize("flattened", [False, True], ids=["plain mesh", "flattened mesh"])
@on_ranks(4)
def test_a_tensor_that_torch_cuts_over_two_axes_is_copied_whole(
    rank: int, world_size: int, flattened: bool
) -> None:
    """torch 2.13's gather over a flattened mesh takes padding for rows."""
    mesh = sw.init_mesh(dp_outer=2, dp=2)
    net = sw.fully_shard(torch.nn.Linear(3, 17), mesh=mesh, placements=sw.hfsdp())
    sw.optimizer(net, matrix=sw.muon(lr=1e-2), elementwise=sw.adamw(lr=1e-2))
    assert not mesh._get_root_mesh()._flatten_mapping, "nothing is left on the user's mesh"
    if flattened:
        mesh._flatten("both")
    whole = torch.arange(1.0, 52.0).view(17, 3)
    theirs = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    with torch.no_grad():
        net.weight.copy_(theirs)
    assert torch.equal(net.weight.full_tensor(), whole)


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_a_full_state_dict_may_come_from_rank_zero_alone(
    rank: int, world_size: int, strategy: str
) -> None:
    """Only rank 0 has read the file."""
    torch.manual_seed(4)
    plain = Net()
    state = plain.state_dict() if rank == 0 else {}
    torch.manual_seed(5)
    net = wrap(Net(), world_size, strategy)
    set_model_state_dict(
        net, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    assert_parameters_equal(net, plain, 0.0)
    with torch.no_grad():
        assert_close(net(words(rank)), plain(words(rank)), "output", 1e-6)


# ------------------------------------------------------------------------------ load_state_dict


@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
@on_ranks(ranks_for)
def test_load_state_dict_takes_whole_plain_tensors(
    rank: int, world_size: int, strategy: str
) -> None:
    torch.manual_seed(4)
    plain = Net()
    torch.manual_seed(5)
    net = wrap(Net(), world_size, strategy)
    with torch.no_grad():
        before = net(words(rank))
    result = net.load_state_dict(plain.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert_parameters_equal(net, plain, 0.0)
    with torch.no_grad():
        after = net(words(rank))
        assert not torch.allclose(before, after)
        assert_close(after, plain(words(rank)), "output", 1e-6)
    # The model's own state dict is a fixed point.
    net.load_state_dict(net.state_dict())
    assert_parameters_equal(net, plain, 0.0)


@on_ranks(2)
def test_assigned_values_move_in_and_wrong_shapes_are_refused(rank: int, world_size: int) -> None:
    plain = Net()
    net = wrap(Net(), world_size)
    parameters = list(net.parameters())
    net.load_state_dict(plain.state_dict(), assign=True)
    assert all(map(operator.is_, parameters, net.parameters())), "an optimizer may hold them"
    assert_parameters_equal(net, plain, tolerance=0.0)
    untouched = {name: full(value).clone() for name, value in net.named_parameters()}
    wrong = dict(plain.state_dict())
    wrong["head.weight"] = torch.zeros(3, 3)
    shape = raised(lambda: net.load_state_dict(wrong), RuntimeError)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    del wrong["head.weight"]
    missing = net.load_state_dict(wrong, strict=False).missing_keys
    assert missing == ["head.weight"]
    assert torch.equal(full(net.head.weight), untouched["head.weight"])
    assert "head.weight" in shape


def communication_free(rank: int, world_size: int) -> int:
    """``state_dict()`` on one rank alone: it must not wait for anybody."""
    net = wrap(Net(), world_size, reshard_after_forward=False)
    loss = word_loss(net, rank)  # weights are kept, and yet the state dict shows the sharded ones
    count = 0
    if rank == 0:
        state = net.state_dict()
        count = len(state)
        assert all(isinstance(value, DTensor) for value in state.values())
    loss.backward()
    return count


def test_state_dict_communicates_nothing() -> None:
    counts = run_ranks(communication_free, 2)
    assert counts[0] > 10 and counts[1] == 0


@pytest.mark.parametrize(
    ("strategy", "into"), [*((one, one) for one in MAIN_STRATEGIES), ("zero3", "zero0")]
)
@on_ranks(ranks_for)
def test_optimizer_state_dicts_load_into_a_twin(
    rank: int, world_size: int, strategy: str, into: str
) -> None:
    """The optimizer's own state dict, loaded into a fresh one of the same shape, whose pieces may
    lie elsewhere."""
    net, optimizer = trained(rank, world_size, strategy, 2, seed=2)
    other, other_optimizer = trained(rank, world_size, into, 1, seed=3)
    other.load_state_dict(net.state_dict())
    # Copied: torch's optimizers keep the tensors of a state dict that they load.
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2, 4):
        advance(net, optimizer, step)
        advance(other, other_optimizer, step)
    mine, theirs = values(net, optimizer), values(other, other_optimizer)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
