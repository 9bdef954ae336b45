# SPDX-License-Identifier: Apache-2.0
"""No file of a checkpoint can hang, crash or flood its reader: it is refused, by its name.

Every reader runs in a process of its own, which may take 400 MiB more than it has: a crash, a
loop or a flood is that process's end and this test's failure. Sizes and sha256 are always right.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    DamagedError,
    Store,
    export,
    valid_checkpoints,
    verify,
)
from tests.faults.test_safe_loading import seal
from tests.ranks import run_ranks

MEMORY = 400 << 20
SECONDS = 30.0
Write = Callable[[Path], None]


def refusals(rank: int, world_size: int, path: str, exported: bool) -> dict[str, str]:
    """The message of each reader for a checkpoint that lies beside a sound one."""
    folder = Path(path)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, limits[1]))
    began = time.process_time()
    try:
        report = verify(folder)
        assert not report.ok, "verify calls it sound"
        found = {"verify": str(report)}
        model, optimizer = stepped()
        before = snapshot(model, optimizer)
        readers: dict[str, Callable[[], object]] = {
            "load": lambda: sw.load(folder, model, optimizer),
            "export": lambda: export(folder, folder.parent / "out"),
        }
        for name in readers if exported else ("load",):
            try:
                readers[name]()
            except DamagedError as error:
                found[name] = str(error)
            else:
                raise AssertionError(f"{name} has taken it")
        assert snapshot(model, optimizer) == before
        # It blocks nobody: a run goes on from the sound one.
        resumed = Store(folder.parent).resume(model, optimizer)
        assert resumed is not None and resumed[0].name == "step-000001"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - began < SECONDS
    return found


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Every value of both, to compare bit for bit."""
    stream = BytesIO()
    values = [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    torch.save(values, stream)
    return stream.getvalue()


def save_two(root: Path) -> Path:
    """A store with two checkpoints."""
    model, optimizer = stepped()
    with Store(root, keep=None) as store:
        for step in (1, 2):
            store.save(step, model, optimizer, {"step": step})
    return root


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two(tmp_path_factory.mktemp("pristine") / "store")


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store")) / "step-000002"


def assert_refused(path: Path, *words: str) -> None:
    exported = "rank-00000.json" not in words  # an export reads no file of a rank
    [found] = run_ranks(refusals, 1, str(path), exported)
    for reader, text in found.items():
        for word in words:
            assert word in text, f"{reader}: {text}"
        assert "weights_only" not in text and len(text) < 4000


# ------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "state.json", "rank-00000.json"])
@pytest.mark.parametrize(
    "text",
    ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "9" * 100_000]
    + ["[" * 500 + "]" * 500, '{"$":"tuple","v":[' * 400 + "]}" * 400, "\\ud800", "\xff\xfe"],
    ids=["lists", "objects", "digits", "500 lists", "400 tuples", "surrogate", "utf-16"],
)
def test_deep_and_odd_json(name: str, text: str, path: Path) -> None:
    (path / name).write_bytes(text.encode("latin-1"))
    if name != "manifest.json":
        seal(path)
    assert_refused(path, name)


def test_equal_hashes_are_no_way_to_wait(path: Path) -> None:
    """Keys of a dictionary that all have the hash 0: each would be compared with all others."""
    modulus = (1 << 61) - 1
    values = json.loads((path / "rank-00000.json").read_text())
    values["extra"] = {"$": "dict", "v": [[modulus * n, 0] for n in range(200_000)]}
    (path / "rank-00000.json").write_text(json.dumps(values))
    seal(path)
    assert_refused(path, "rank-00000.json")


WRONG: dict[str, list[Any]] = {
    "world_size": [10**9, 10**100, -1, 0, 2, True, None, "1", "many", [1]],
    "versions": [None, [], {}, {"torch": 1}, {"torch": "2\x1b[2J"}, "torch", {"torch": ["2"]}],
    "placements": [None, "zero", 7, [7], [None], {"a": "b"}, ["a\nb"]],
    "identity": [None, 7, []],
    "created": [None, 7, [], "\x1b[31m"],
    "step": [-1, True, 1.5, "1", "x", 10**30],
    "surprise": [1],
    "sequence": [None, True, 1.5, "1", 10**30],
    "num_tensors": [None, 0, 7, True, "6", 10**9],
    "optimizer": [7, [], "AdamW"],
    "config": [7, [], "x"],
    "files": [
        None,
        7,
        {},
        "x",
        [],
        [7],
        [None],
        [[]],
        [{"name": "x"}],
        [{"name": "a", "size": 1, "sha256": None}],
    ]
    + [[{"name": "a", "size": True, "sha256": ""}], [{"name": "a", "size": 1e300, "sha256": "a"}]],
}


@pytest.mark.parametrize("field", WRONG)
def test_every_wrong_value_of_a_manifest_is_refused(field: str, path: Path) -> None:
    whole = (path / "manifest.json").read_bytes()
    for value in WRONG[field]:
        seal(path, lambda body, value=value: body.update({field: value}))  # type: ignore[misc]
        assert_refused(path, "manifest.json" if field != "num_tensors" else "tensors")
        (path / "manifest.json").write_bytes(whole)
    if field != "surprise":  # every other one is missed
        seal(path, lambda body: body.pop(field))
        assert_refused(path, "manifest.json", field)


STATE: dict[str, tuple[tuple[Any, ...], list[Any]]] = {
    "tied": (("tied",), [None, [], 7, {"x": 7}, {"x": "ghost"}, {"x": "x"}, {"x": ["weight"]}]),
    "extra_states": (("extra_states",), [None, [], 7, {"x._extra_state": {"gate_up_block": "a"}}]),
    "optimizer": (("optimizer",), [7, [], {}, "AdamW"]),
    "class": (("optimizer", "class"), [None, 7, []]),
    "groups": (("optimizer", "groups"), [None, 7, {}, [7], [{}], [[]]]),
    "parameters": (("optimizer", "groups", 0, "parameters"), [None, 7, "weight", [7], [["w"]]]),
    "options": (("optimizer", "groups", 0, "options"), [None, 7, [], {"lr": "fast"}]),
    "betas": (("optimizer", "groups", 0, "options", "betas"), [0.9, "x", {"a": 1}]),
    "described": (("optimizer", "groups", 0, "described"), [None, 7, [], {"a": 7}]),
    "scalars": (("optimizer", "scalars"), [None, 7, [], {"weight": 7}, {"weight": {"step": "x"}}]),
    "tensors": (("optimizer", "tensors"), [None, 7, [], {"weight": 7}, {"weight": [7]}]),
    "ghost": (("optimizer", "tensors", "weight"), [["step", "exp_avg", "ghost"], [["a"]]]),
}


def put(value: Any, place: tuple[Any, ...], new: Any) -> None:
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = new


@pytest.mark.parametrize("field", STATE)
def test_every_wrong_value_of_the_state_is_refused(field: str, path: Path) -> None:
    whole = (path / "state.json").read_bytes()
    place, wrong = STATE[field]
    for new in wrong:
        values = json.loads(whole)
        put(values, place, new)
        (path / "state.json").write_text(json.dumps(values))
        seal(path)
        if field in ("options", "betas", "scalars") and new not in (None, 7, []):
            # What only an optimizer can tell: load alone refuses it, and changes nothing.
            model, optimizer = stepped()
            before = snapshot(model, optimizer)
            with pytest.raises(CheckpointError):
                sw.load(path, model, optimizer)
            assert snapshot(model, optimizer) == before
        else:
            assert_refused(path, "state.json")


MT = 624
RANDOM: dict[str, list[Any]] = {
    "random": [None, 7, [], {}],
    "extra": [None, 7, [], "x"],
    "python": [None, 7, {"$": "tuple", "v": [3, 7, None]}, {"$": "tuple", "v": []}],
    "torch": [None, 7, {"$": "tensor", "dtype": "uint8", "shape": [3], "v": "AAAA"}],
    "cuda": [7, "x", [1], {"$": "tensor", "dtype": "float32", "shape": [0], "v": ""}],
    "numpy": [None, 7, {}, {"bit_generator": "PCG64", "state": 7}, "x"],
    "position": [MT + 1, 10**9, -1, "x", None, 10**30],
}


@pytest.mark.parametrize("field", RANDOM)
def test_every_wrong_value_of_a_rank_is_refused(field: str, path: Path) -> None:
    """A position behind the end of numpy's state would be read from foreign memory later on."""
    whole = (path / "rank-00000.json").read_bytes()
    for new in RANDOM[field]:
        values = json.loads(whole)
        place: tuple[Any, ...] = (field,) if field in values else ("random", field)
        put(values, ("random", "numpy", "v", 2) if field == "position" else place, new)
        (path / "rank-00000.json").write_text(json.dumps(values))
        seal(path)
        assert_refused(path, "rank-00000.json")


# ------------------------------------------------------------------------------ no regular files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole name must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "index.json", "state.json", ".metadata", "rank-00000.json", "__0_0.distcp"],
)
@pytest.mark.parametrize("make", [fifo, to_zeros, unix_socket, Path.mkdir])
def test_only_regular_files_are_opened(make: Write, name: str, path: Path) -> None:
    (path / name).unlink()
    make(path / name)
    assert_refused(path, name)


def test_what_stands_beside_checkpoints_blocks_none(path: Path) -> None:
    shutil.rmtree(path)
    fifo(path)
    to_zeros(path.with_name("step-000003"))
    path.with_name("step-000004").write_text("a file")
    path.with_name("step-000005").mkdir()
    model, optimizer = stepped()
    found = Store(path.parent).resume(model, optimizer)
    assert found is not None and found[0].name == "step-000001"
    assert [entry.name for entry, _ in valid_checkpoints(path.parent)] == ["step-000001"]
