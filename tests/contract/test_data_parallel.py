# SPDX-License-Identifier: Apache-2.0
"""Things that a training loop may do with a bucketed model. (Other files, of which "data_parallel"
is a strategy, hold more.)"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import shardwise as sw
from tests.contract.helpers import (
    WIDTH,
    Block,
    Net,
    mesh_for,
    raised,
    vectors,
    word_loss,
    words,
)
from tests.ranks import run_ranks

SMALL = 0.003  # megabytes: several buckets


def wrap(model: Any, world_size: int, stage: int = 1, **options: Any) -> Any:
    mesh = mesh_for("zero", world_size)
    options = {"bucket_mb": SMALL, "overlap_gather": True} | options
    return sw.data_parallel(model, mesh=mesh, placements=sw.zero(stage), **options)


def assert_at_rest(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    assert parameters
    assert all(isinstance(value, sw.ShardedTensor) for value in parameters.values())


# ------------------------------------------------------------------------------ odd parameters


# ------------------------------------------------------------------------------ recomputation


# ------------------------------------------------------------------------------ values


def check_states(rank: int, world_size: int, folder: str) -> int:
    """Saved from buckets, loaded into buckets of another kind and into fully_shard; and whole."""
    torch.manual_seed(3)
    model = wrap(Net(), world_size)
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    word_loss(model, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    sw.save(folder, model, optimizer, extra={"step": 1})
    expected = sw.full_state_dict(model)
    assert len(expected) == 15 and not any(
        isinstance(v, sw.ShardedTensor) for v in expected.values()
    )

    def follow(other: Any, stepper: Any) -> dict[str, Tensor]:
        word_loss(other, rank, 1).backward()
        stepper.step()
        stepper.zero_grad()
        return sw.full_state_dict(other)

    after = follow(model, optimizer)
    for make in (
        lambda: wrap(Net(), world_size, 2, bucket_mb=1),
        lambda: wrap(Net(), world_size, 0),
        lambda: sw.fully_shard(Net(), mesh=mesh_for("zero", world_size)),
    ):
        torch.manual_seed(50)
        other = make()
        stepper = sw.optimizer(other, matrix=sw.muon(), elementwise=sw.adamw())
        assert sw.load(folder, other, stepper) == {"step": 1}
        for name, value in sw.full_state_dict(other).items():
            assert torch.equal(value, expected[name]), name
        for name, value in follow(other, stepper).items():
            assert torch.equal(value, after[name]), f"{name} after a step"
    return len(after)


def test_states_go_from_any_layout_to_any_other(tmp_path: Path) -> None:
    assert run_ranks(check_states, 2, str(tmp_path / "saved")) == [15, 15]


# ------------------------------------------------------------------------------ the object


def check_object(rank: int, world_size: int) -> tuple[int, int]:
    gc.collect()
    before = sw.ledger.total
    model = Net()
    assert wrap(model, world_size) is model
    assert isinstance(model, FSDPModule) and isinstance(model, Net)
    assert type(model).__name__ == "FSDPNet"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = word_loss(model, rank)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(words(rank))
    held = sw.ledger.total - before
    gc.disable()  # at once, not when the collector comes by
    try:
        del model, optimizer, loss
        return held, sw.ledger.total - before
    finally:
        gc.enable()


def test_the_same_module_and_its_memory_is_freed_with_it() -> None:
    for held, left in run_ranks(check_object, 2):
        assert held > 0 and left == 0


def check_rest(rank: int, world_size: int) -> tuple[dict[str, int], int, int]:
    """Bytes at rest: whole weights once, main weights and gradients in shards."""
    gc.collect()
    before = sw.ledger.snapshot()
    model = wrap(Net(), world_size)
    word_loss(model, rank).backward()
    groups = model._shardwise_unit.groups
    whole = sum(group.layout.numel for group in groups)
    shard = sum(group.layout.shard_size for group in groups)
    now = {kind: held - before.get(kind, 0) for kind, held in sw.ledger.snapshot().items()}
    return {kind: held for kind, held in now.items() if held}, whole, shard


def test_bytes_at_rest_are_the_closed_form() -> None:
    for held, whole, shard in run_ranks(check_rest, 2):
        assert held == {"compute": 4 * whole, "main": 4 * shard, "grad": 4 * shard}
        assert whole == 2 * shard


# ------------------------------------------------------------------------------ refusals


class Reader(nn.Module):
    """Reads the weight of a module that it has not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](F.linear(x, self.head.weight, self.head.bias))


def check_refusals(rank: int, world_size: int) -> dict[str, str]:
    mesh = mesh_for("zero", world_size)
    wrapped = wrap(Net(), world_size)
    inner = Net()
    sw.fully_shard(inner.blocks[0], mesh=mesh)
    reader = wrap(Reader(), world_size)
    calls: dict[str, Any] = {
        "stage 3": lambda: wrap(Net(), world_size, 3),
        "two axes": lambda: sw.data_parallel(Net(), mesh=mesh, placements=sw.hsdp()),
        "bucket": lambda: wrap(Net(), world_size, bucket_mb=0),
        "twice": lambda: wrap(wrapped, world_size),
        "inner": lambda: wrap(inner, world_size),
        "pattern": lambda: wrap(Net(), world_size, meshes={"experts": mesh}),
        "matrix": lambda: wrap(Net(), world_size, matrix=0.1, unused_parameters="maybe"),
        # On one rank alone: all of them say so.
        "one rank": lambda: wrap(Net(), world_size, bucket_mb=-1 if rank == 1 else 1),
        "ranks": lambda: wrap(Net(layers=1 + rank), world_size),
    }
    kinds = {"twice": AssertionError}
    found = {name: raised(call, kinds.get(name, ValueError)) for name, call in calls.items()}
    found["reader"] = raised(lambda: reader(vectors(rank)), Exception)
    # As after any exception, what is under way arrives, and the modules hold parameters at rest.
    assert not any(group.pending for group in reader._shardwise_unit.groups)
    assert all(isinstance(parameter, sw.ShardedTensor) for parameter in reader.parameters())
    reader.reset_iter_state()
    return found


def test_what_cannot_work_is_refused_by_name_on_every_rank() -> None:
    expected = {
        "stage 3": "data_parallel: .*compute=\\[S\\].*fully_shard",
        "two axes": "2 data-parallel axes, but the mesh",
        "bucket": "bucket_mb=0: pass a number of megabytes above 0",
        "twice": "only be applied to a module once",
        "inner": "wrapped already: data_parallel takes the whole model",
        "pattern": "'experts' matches no parameter",
        "matrix": "matrix=0.1: use sw.muon.*unused_parameters='maybe'",
        "one rank": "bucket_mb=-1",
        "ranks": "do not wrap the same module",
        "reader": r"'head\.bias'.*call full_tensor\(\) first",
    }
    for found in run_ranks(check_refusals, 2):
        assert found.keys() == expected.keys()
        for name, pattern in expected.items():
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(found[name])
