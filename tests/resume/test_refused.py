# SPDX-License-Identifier: Apache-2.0
"""A load that is refused has changed nothing, on any rank, whatever was wrong and whoever saw it.

Each case damages one thing of a sound checkpoint and reseals it, so that the refusal comes late;
then every value of the model, the optimizer and the generators is compared bit for bit.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    DamagedError,
    MismatchError,
    SaveError,
    Store,
    verify,
)
from shardwise.checkpoint import reading as reading_module
from tests.faults.test_safe_loading import seal
from tests.one_card import device_type
from tests.ranks import run_ranks
from tests.resume import helpers
from tests.resume.helpers import trained


class Remembering(nn.Module):
    """Has an extra state, and refuses a bad one."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = {"count": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.memory

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.memory = dict(state)
        if state["count"] < 0:
            raise ValueError("a count below 0")


def local_of(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Every value of this rank."""
    weights = {name: local_of(value) for name, value in net.state_dict().items()}
    states = [
        {key: local_of(value) for key, value in optimizer.state.get(parameter, {}).items()}
        for parameter in net.parameters()
    ]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    memories = [module.memory for module in net.modules() if isinstance(module, Remembering)]
    assert len(weights) > 10 and len(states) > 10 and len(memories) == 1
    found = [weights, states, len(optimizer.state), groups, generators, memories]
    return pickle.dumps(_plain(found))


def _plain(value: Any) -> Any:
    """Tensors and arrays as bytes: two that are equal pickle alike."""
    if isinstance(value, torch.Tensor):
        flat = value.cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).cpu().numpy().tobytes()
    if isinstance(value, numpy.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(str(key), _plain(item)) for key, item in value.items()]
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def remembering(
    strategy: str, optimizer: str, rank: int, world_size: int, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    net, stepper = trained(strategy, optimizer, rank, world_size, seed)
    net.remembering = Remembering()
    net.remembering.memory = {"count": seed}
    return net, stepper


def save(rank: int, world_size: int, path: str, strategy: str, optimizer: str) -> None:
    sw.save(path, *remembering(strategy, optimizer, rank, world_size, seed=1), {"step": rank})


def edit(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        values = json.loads((path / name).read_text())
        change(values)
        (path / name).write_text(json.dumps(values))

    return damage


def cut_off(path: Path) -> None:
    """The last tensors of rank 1's file are not there any more."""
    data = (path / "__1_0.distcp").read_bytes()
    (path / "__1_0.distcp").write_bytes(data[: len(data) // 2])


def groups_of(values: Any) -> Any:
    return values["optimizer"]["groups"][0]


MEMORY = "remembering._extra_state"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "no random states": edit("rank-00001.json", lambda values: values.pop("random")),
    "no extra": edit("rank-00001.json", lambda values: values.update(extra=7)),
    "numpy": edit("rank-00001.json", lambda v: put(v["random"]["numpy"]["v"], 2, 10**6)),
    "python": edit("rank-00001.json", lambda v: put(v["random"]["python"]["v"], 1, 7)),
    "torch": edit("rank-00001.json", lambda v: put(v["random"], "torch", 7)),
    "tensor": cut_off,
    "groups": edit("state.json", lambda values: groups_of(values).pop("options")),
    "lr": edit("state.json", lambda values: groups_of(values)["options"].update(lr="fast")),
    "scalars": edit("state.json", lambda v: v["optimizer"]["scalars"].update({"head": {"x": 1}})),
    "tied": edit("state.json", lambda values: values["tied"].update(a="b")),
    "refused by its module": edit(
        "state.json", lambda values: values["extra_states"][MEMORY].update(count=-1)
    ),
    "fails in its module": edit(
        "state.json", lambda values: values["extra_states"].update({MEMORY: 7})
    ),
}


def put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def refuse(
    rank: int, world_size: int, folder: str, strategy: str, optimizer: str, fresh: bool
) -> dict[str, tuple[str, str, bool]]:
    """By damage: what is raised, and whether nothing has changed. One model loads one damaged
    checkpoint after the other. ``fresh``: the optimizer has no states yet."""
    if fresh:
        net, stepper = helpers.make(strategy, optimizer, world_size, 5)
        net.remembering = Remembering()
    else:
        net, stepper = remembering(strategy, optimizer, rank, world_size, seed=5)
    found, before = {}, bits(net, stepper)
    for damage in DAMAGES:
        with pytest.raises(CheckpointError) as caught:
            sw.load(f"{folder}/{damage}", net, stepper)
        now = bits(net, stepper)
        found[damage] = type(caught.value).__name__, str(caught.value), now == before
        before = now
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for optimizer in ("adamw", "muon"):
        found[optimizer] = tmp_path_factory.mktemp("saved") / "one"
        run_ranks(save, 2, str(found[optimizer]), "zero3", optimizer)
    return found


@pytest.fixture
def copied(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda optimizer: Path(shutil.copytree(saved[optimizer], tmp_path / "one"))


Outcomes = tuple[Path, list[dict[str, tuple[str, str, bool]]]]


@pytest.fixture(scope="module")
def outcomes(
    saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Outcomes]:
    """The damaged checkpoints and what each rank has to say of them, once for each model."""

    @cache
    def found(strategy: str, optimizer: str, fresh: bool) -> Outcomes:
        folder = tmp_path_factory.mktemp("damaged")
        for name, damage in DAMAGES.items():
            damage(shutil.copytree(saved[optimizer], folder / name))
            seal(folder / name)
        return folder, run_ranks(refuse, 2, str(folder), strategy, optimizer, fresh)

    return found


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("strategy", "optimizer", "fresh"),
    [("zero3", "adamw", True), ("zero1", "adamw", False), ("hsdp", "muon", True)],
)
def test_a_refused_load_changes_nothing(
    strategy: str, optimizer: str, fresh: bool, damage: str, outcomes: Callable[..., Outcomes]
) -> None:
    folder, ranks = outcomes(strategy, optimizer, fresh)
    path, (first, *others) = folder / damage, [found[damage] for found in ranks]
    assert all(one[2] for one in (first, *others)), f"changed, and refused: {first[1]}"
    assert all(other == first for other in others), "every rank raises the same"
    # What a model or an optimizer alone can tell is no fault of the files.
    told_by_them = damage in ("lr", "scalars", "refused by its module", "fails in its module")
    assert verify(path).ok == told_by_them
    assert (first[0] == "DamagedError") != told_by_them


def load_in_vain(rank: int, world_size: int, path: str, when: str) -> str:
    """One rank's disk or memory fails, after every sha256 was right."""
    net, stepper = remembering("zero3", "adamw", rank, world_size, seed=5)
    before = bits(net, stepper)
    original = reading_module.open_listed
    count = 0

    @contextmanager
    def opened(*where: Any) -> Iterator[Any]:
        with original(*where) as stream:
            yield SimpleNamespace(seek=stream.seek, readinto=partial(read, stream))

    def read(stream: Any, buffer: Any) -> int:
        nonlocal count
        count += 1
        if rank == 1 and count == 20:
            raise MemoryError("no more") if when == "memory" else OSError(5, "Input/output error")
        return int(stream.readinto(buffer))

    patched = mock.patch.object(reading_module, "open_listed", opened)
    with patched, pytest.raises(CheckpointError) as caught:
        sw.load(path, net, stepper)
    assert bits(net, stepper) == before
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("when", ["disk", "memory"])
def test_a_rank_that_cannot_read_changes_nothing_on_the_others(
    when: str, saved: dict[str, Path]
) -> None:
    one, other = run_ranks(load_in_vain, 2, str(saved["adamw"]), when)
    assert one == other and "rank 1" in one
    assert one.startswith("DamagedError") == (when == "disk")


def mismatch(rank: int, world_size: int, path: str) -> str:
    """Rank 1 alone has another shape."""
    torch.manual_seed(3)
    net = helpers.Net(width=10 if rank == 0 else 12)
    net.remembering = Remembering()
    stepper = helpers.one_group(net)
    before = bits(net, stepper)
    with pytest.raises(MismatchError) as caught:
        sw.load(path, net, stepper)
    assert bits(net, stepper) == before and not stepper.state
    return str(caught.value)


def test_a_shape_that_differs_on_one_rank_changes_nothing(saved: dict[str, Path]) -> None:
    one, other = run_ranks(mismatch, 2, str(saved["adamw"]))
    assert one == other and "rank 1" in one and "shape" in one


def save_halves(rank: int, world_size: int, path: str, strategy: str) -> str:
    """A model on ranks 0 and 1, another of the same names on ranks 2 and 3, saved at once."""
    half = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("half", "dp"))["dp"]
    torch.manual_seed(0)
    net = nn.Linear(6, 5)
    sw.fully_shard(net, mesh=half, placements=sw.zero(int(strategy[-1])))
    sw.save(f"{path}/alike", net)
    with torch.no_grad():
        net.bias.add_(rank // 2)
    with pytest.raises(SaveError) as caught:
        sw.save(f"{path}/apart", net)
    sw.load(f"{path}/alike", net)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_two_models_are_not_saved_as_one(strategy: str, tmp_path: Path) -> None:
    """The checkpoint held the first model alone, and a load gave it to everybody."""
    for message in run_ranks(save_halves, 4, str(tmp_path), strategy):
        assert (
            "'model.bias': rank 2 holds other values than rank 0" in message or "rank 3" in message
        )
        assert "weight" not in message
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ""] == ["alike"]


# ------------------------------------------------------------------------------ falling back


def zeros(*paths: Path) -> None:
    for path in paths:
        path.write_bytes(bytes(path.stat().st_size))


NEWEST: dict[str, Callable[[Path], None]] = {
    "zeros": lambda path: zeros(path / "__1_0.distcp"),
    "zeros in both": lambda path: zeros(*path.glob("__*.distcp")),
    "a rank's values": lambda path: zeros(path / "rank-00001.json"),
    "index": lambda path: zeros(path / "index.json"),
    "a pipe": lambda path: make_pipe(path / "__1_0.distcp"),
    "resealed values": lambda path: [DAMAGES["numpy"](path), seal(path)][1],
}


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def save_two(rank: int, world_size: int, root: str) -> None:
    net, stepper = remembering("zero3", "adamw", rank, world_size, seed=1)
    with Store(root, keep=None) as store:
        for step in (1, 2):
            net.remembering.memory = {"count": step}
            store.save(step, net, stepper, {"step": step})


def resume(rank: int, world_size: int, root: str) -> tuple[str, Any, int, str]:
    net, stepper = remembering("zero2", "adamw", rank, world_size, seed=5)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardwise.checkpoint.store")
    log.addHandler(handler)
    try:
        found = Store(root).resume(net, stepper)
    finally:
        log.removeHandler(handler)
    assert found is not None
    return found[0].name, found[1], net.remembering.memory["count"], "\n".join(lines)


@pytest.mark.parametrize("damage", NEWEST)
def test_ranks_that_see_different_damage_fall_back_together(damage: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    run_ranks(save_two, 2, str(root))
    NEWEST[damage](root / "step-000002")
    for name, extra, count, log in run_ranks(resume, 2, str(root)):
        assert (name, extra, count) == ("step-000001", {"step": 1}, 1)
        assert "weights_only" not in log
    assert not verify(root / "step-000002").ok


def test_nothing_is_interpreted_before_every_sha256_was_compared(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, copied: Callable[[str], Path]
) -> None:
    """A wrong last byte of the last file is found before the index is looked at."""
    path = copied("adamw")
    seen: list[str] = []
    monkeypatch.setattr(reading_module, "parse", lambda *args: seen.append("parsed") or {})
    data = bytearray((path / "__1_0.distcp").read_bytes())
    data[-1] ^= 1
    (path / "__1_0.distcp").write_bytes(data)
    with pytest.raises(DamagedError, match="sha256"):
        sw.load(path, helpers.Net())
    assert not verify(path).ok and "sha256" in str(verify(path))
    assert seen == []
