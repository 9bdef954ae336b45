# SPDX-License-Identifier: Apache-2.0
"""A file of a checkpoint that is not what shardwise wrote is refused by its name, by every reader,
before anything changes; and a run goes on from the checkpoint before.

*Damaged* files have bytes that differ from their sha256. *Forged* ones are resealed by an attacker
who can write every file: sizes and sha256 are right, the contents are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    DamagedError,
    MismatchError,
    Store,
    loading,
    valid_checkpoints,
    verify,
)
from shardwise.train.exporting import export
from tests.models import fill, filled, mesh_of
from tests.ranks import run_ranks
from tests.resume import helpers
from tests.resume.helpers import trained

MANIFEST, FIRST, SECOND = "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"
MEMORY = 400 << 20  # bytes that a reader of a forged checkpoint may take beyond those it has
Body = dict[str, Any]


# ------------------------------------------------------------------------------ making them


def seal(path: Path, change: Callable[[Body], object] = lambda body: None) -> None:
    """Write a manifest that fits the files as they are, as an attacker would."""
    body = json.loads((path / MANIFEST).read_text())["body"]
    for rank, file in enumerate(sorted(path.glob("rank-*"))):
        data = file.read_bytes()
        body["files"][rank] = [len(data), hashlib.sha256(data).hexdigest()]
    change(body)
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    head = f'{{"format":"shardwise checkpoint 6","sha256":"{digest}","body":'
    (path / MANIFEST).write_text(f"{head}{text}}}")


def reheader(path: Path, change: Callable[[Body], object], name: str = FIRST) -> None:
    """Change the header of a rank's file."""
    data = (path / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (path / name).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def revalue(path: Path, change: Callable[[Body], object], name: str = FIRST) -> None:
    """Change the random states and extra of a rank."""

    def rewrite(header: Body) -> None:
        values = json.loads(header["__metadata__"]["values"])
        change(values)
        header["__metadata__"]["values"] = json.dumps(values)

    reheader(path, rewrite, name)


def put(*place: Any) -> Callable[[Body], object]:
    """A change that sets a value: the keys that lead to it, then the value."""
    *keys, last, value = place

    def change(body: Body) -> None:
        holder: Any = body
        for key in keys:
            holder = holder[key]
        holder[last] = value

    return change


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Every value of this rank."""

    def local(value: Any) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value

    states = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
    values = [
        {name: local(value) for name, value in model.state_dict().items()},
        [{key: local(value) for key, value in state.items()} for state in states],
        len(optimizer.state),
        repr([{**group, "params": 0} for group in optimizer.param_groups]),
        (random.getstate(), numpy.random.get_state(), torch.get_rng_state()),
    ]
    stream = BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The newer one of two checkpoints of one rank."""
    model, optimizer = stepped()
    with Store(tmp_path / "store", keep=None) as store:
        for step in (1, 2):
            store.save(step, model, optimizer, {"step": step})
    return tmp_path / "store" / "step-000002"


def assert_refused(path: Path, name: str, kind: type[CheckpointError] = DamagedError) -> None:
    """By every reader, which names the file and changes nothing; a run goes on from the older."""
    model, optimizer = stepped()
    before = everything(model, optimizer)
    with pytest.raises(kind) as caught:
        sw.load(path, model, optimizer)
    assert name.removeprefix("model.") in str(caught.value) and len(str(caught.value)) < 4000
    assert everything(model, optimizer) == before
    if kind is DamagedError:
        assert not verify(path).ok and name in str(verify(path))
    resumed = Store(path.parent).resume(model, optimizer)
    assert resumed is not None and resumed[0].name == "step-000001" and resumed[1] == {"step": 1}


def test_an_honest_checkpoint_resealed_is_accepted(path: Path) -> None:
    """The control: what is refused below is refused for its contents."""
    for change in (reheader, revalue):
        change(path, lambda values: None)
        seal(path)
        assert verify(path).ok, str(verify(path))
        assert sw.load(path, *stepped()) == {"step": 2}
        assert export(path, path.parent / change.__name__)


# ------------------------------------------------------------------------------ damaged


def flip(path: Path, position: int | None = None, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(data)


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        path.rename(path.parent.with_name("hidden"))
        make(path)

    return replace


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "flipped": flip,
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "link": instead(lambda path: path.symlink_to(path.parent.with_name("hidden"))),
    "pipe": instead(os.mkfifo),
    "zeros": instead(lambda path: path.symlink_to("/dev/zero")),
    "directory": instead(Path.mkdir),
}


@pytest.mark.parametrize("name", [FIRST, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_not_loaded(damage: str, name: str, path: Path) -> None:
    DAMAGES[damage](path / name)
    gone = name == MANIFEST and damage == "missing"  # then it is no checkpoint at all
    with pytest.raises(CheckpointError, match=name):
        export(path, path.parent / "out")
    assert not (path.parent / "out").exists()
    newest = valid_checkpoints(path.parent)[-1][0].name  # what costs no reading is seen at once
    assert newest == ("step-000002" if (name, damage) == (FIRST, "flipped") else "step-000001")
    assert_refused(path, name, CheckpointError if gone else DamagedError)


def test_no_flipped_bit_anywhere_passes(path: Path) -> None:
    rng = random.Random(3)
    for name in (FIRST, MANIFEST):
        whole = (path / name).read_bytes()
        for _ in range(60):
            flip(path / name, rng.randrange(len(whole) - 1), rng.randrange(8))
            with pytest.raises(CheckpointError):
                sw.load(path, *stepped())
            assert not verify(path).ok
            (path / name).write_bytes(whole)
    assert verify(path).ok


def test_nothing_is_interpreted_before_every_sha256_was_compared(path: Path) -> None:
    flip(path / FIRST, -1)
    with mock.patch.object(loading, "read_header") as read, pytest.raises(DamagedError):
        sw.load(path, *stepped())
    read.assert_not_called()


@pytest.mark.parametrize("format", ["shardwise checkpoint 5", "shardwise checkpoint 7", None])
def test_another_form_of_checkpoint_is_named(format: Any, path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(content | {"format": format}))
    assert_refused(path, MANIFEST)
    with pytest.raises(DamagedError, match=r"checkpoint 6.*version"):
        sw.load(path, *stepped())


def test_what_is_no_checkpoint_is_no_damage(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64))
    for given in (path.parent, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"sw\.load_full_state_dict") as caught:
            sw.load(given, nn.Linear(3, 4))
        assert not isinstance(caught.value, DamagedError)


# ------------------------------------------------------------------------------ forged


ALIKE = "table", "alike", 0  # [[dtype, shape, [[offsets, sizes, holders, runs]]], keys]
WEIGHT = (*ALIKE, 0)
TILE = (*WEIGHT, 2, 0)


def add(*place: Any) -> Callable[[Body], object]:
    """A change that appends a value to the list at the keys before it."""

    def change(body: Body) -> None:
        holder: Any = body
        for key in place[:-1]:
            holder = holder[key]
        holder.append(place[-1])

    return change


FORGED: dict[str, Callable[[Body], object]] = {
    "shape": put(*WEIGHT, 1, [5, 3]),
    "a huge shape": put(*WEIGHT, 1, [1 << 40, 1 << 40]),
    "many dimensions": put(*WEIGHT, 1, [1] * 65),
    "no dtype": put(*WEIGHT, 0, "load"),
    "a list for a dtype": put(*WEIGHT, 0, []),
    "too short": put(*TILE, 3, [[0, 11, 1]]),
    "claimed twice": put(*TILE, 3, [[0, 6, 3]]),
    "two tiles in one place": add(*WEIGHT, 2, [[0, 0], [4, 3], 0, [[0, 12, 1]]]),
    "rows twice, rows never": put(*WEIGHT, 2, [[[0, 0], [2, 3], 0, [[0, 6, 1]]]] * 2),
    "two pieces of one rank": put(*TILE, 3, [[0, 6, 2]]),
    "no length": put(*TILE, 3, [[0, 0, 1], [0, 12, 1]]),
    "many pieces": put(*TILE, 3, [[0, 1, 1 << 40]]),
    "outside": put(*TILE, 0, [1, 0]),
    "another holder": put(*TILE, 3, [[1, 12, 1]]),
    "other holders": put(*TILE, 2, -1),
    "another rank": put("table", "groups", 0, [1]),
    "rank True": put("table", "groups", 0, [True]),
    "rank ../secret": put("table", "groups", 0, ["../secret"]),
    "no tiles": put(*WEIGHT, 2, []),
    "no tensors": put("table", [1]),
    "a tensor that stands there twice": add(*ALIKE, 1, ["weight", ""]),
    "no keys": put(*ALIKE, 1, []),
    "states of nobody": add(*ALIKE, 1, ["ghost", "exp_avg"]),
    "a billion ranks": put("files", [[1, "x"]] * 3),
    "no files": put("files", []),
    "a negative size": put("files", 0, [-1, "x"]),
    "no optimizer, and states": put("optimizer", None),
    "an option outside of the table": put("optimizer", "parameters", "weight", 9),
    "options": put("optimizer", "options", [7]),
    "scalars": put("optimizer", "scalars", {"weight": {"exp_avg": 1}}),
    "tied to a ghost": put("tied", {"x": "ghost"}),
    "experts": put("experts", ["ghost"]),
    "extra states": put("extra_states", []),
    "a step of another kind": put("step", "1"),
    "sequence": put("sequence", None),
    "placements": put("placements", [7]),
    "config": put("config", 7),
    "one more field": put("surprise", 1),
    "one field less": lambda body: body.pop("versions"),
    "a tag": put("config", {"a": {"$": "eval", "v": "1"}}),
    "too few bytes": put(
        "config", {"a": {"$": "tensor", "dtype": "float32", "shape": [9], "v": "AAAA"}}
    ),
}
# Right by themselves: a model can't tell them from another model, the file of the rank can.
AGAINST_THE_FILE: dict[str, Callable[[Body], object]] = {
    "dtype": put(*WEIGHT, 0, "int32"),
    "a tensor that is nowhere": add(
        "table", "alike", [["float32", [], [[[], [], 0, [[0, 1, 1]]]]], [["ghost", ""]]]
    ),
}


@pytest.mark.parametrize("change", [*FORGED, *AGAINST_THE_FILE])
def test_a_forged_manifest_is_refused(change: str, path: Path) -> None:
    seal(path, (FORGED | AGAINST_THE_FILE)[change])
    if change in FORGED:
        return assert_refused(path, MANIFEST)
    assert_refused(path, "model.", MismatchError)
    assert FIRST in str(verify(path)) and not verify(path).ok
    with pytest.raises(DamagedError, match=FIRST):
        export(path, path.parent / "out")


HEADERS: dict[str, Callable[[Body], object]] = {
    "a piece is missing": lambda header: header.update(x=header.pop("model.weight")),
    "another dtype": put("model.weight", "dtype", "I32"),
    "a list for a dtype": put("model.weight", "dtype", []),
    "beyond the end": put("model.weight", "data_offsets", [0, 1 << 40]),
    "bytes of another": lambda header: header["model.bias"].update(
        data_offsets=header["model.weight"]["data_offsets"]
    ),
    "backwards": put("model.weight", "data_offsets", [48, 0]),
    "no offsets": put("model.weight", "data_offsets", None),
    "no tensor": put("model.weight", 7),
    "no values": put("__metadata__", {}),
    "no metadata": put("__metadata__", [7]),
}
VALUES: dict[str, Callable[[Body], object]] = {
    "no random states": lambda values: values.pop("random"),
    "extra": put("extra", 7),
    "pieces": lambda values: values.pop("pieces"),
    "python": put("random", "python", {"$": "tuple", "v": [3, 7, None]}),
    "python's last": put("random", "python", "v", 2, "x"),
    "torch": put("random", "torch", 7),
    "cuda": put("random", "cuda", [1]),
    "numpy": put("random", "numpy", {"bit_generator": "MT", "state": 7}),
    # A position behind the end of numpy's state would be read from foreign memory later on.
    "a position beyond the end": put("random", "numpy", "v", 2, 625),
    "a negative position": put("random", "numpy", "v", 2, -1),
    "no position": put("random", "numpy", "v", 2, None),
}


RAW = {
    "empty": b"",
    "a huge header": (1 << 40).to_bytes(8, "little"),
    "a header without an end": b"\xff" * 64,
    "a list": b"\2" + b"\0" * 7 + b"[]",
}


@pytest.mark.parametrize("change", [*HEADERS, *VALUES, *RAW])
def test_a_forged_file_of_a_rank_is_refused(change: str, path: Path) -> None:
    if change in RAW:
        (path / FIRST).write_bytes(RAW[change] + bytes(1000))
    elif change in HEADERS:
        reheader(path, HEADERS[change])
    else:
        revalue(path, VALUES[change])
    seal(path)
    assert_refused(path, FIRST)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000 + "]" * 100_000, "9" * 100_000, "\\ud800"],
    ids=["empty", "list", "deep", "digits", "surrogate"],
)
def test_text_that_is_no_manifest_is_refused(text: str, path: Path) -> None:
    (path / MANIFEST).write_text(text)
    assert_refused(path, MANIFEST)


@pytest.mark.parametrize(
    "change",
    [
        put("optimizer", "options", 0, "lr", "fast"),
        put("optimizer", "kind", "Other"),
        put("extra_states", {"_extra_state": {"a": 1}}),
        put("dtypes", {"weight": "float16"}),
    ],
    ids=["lr", "kind", "extra states", "dtypes"],
)
def test_what_verify_passes_resume_loads_or_passes_over(
    change: Callable[[Body], object], path: Path
) -> None:
    """Of these only a model or an optimizer can tell that they do not fit."""
    seal(path, change)
    assert verify(path).ok
    found = Store(path.parent).resume(*stepped())
    assert found is not None and found[1] == {"step": int(found[0].name[-1])}


def test_what_stands_beside_checkpoints_blocks_none(path: Path) -> None:
    shutil.rmtree(path)
    os.mkfifo(path)
    path.with_name("step-000003").symlink_to("/dev/zero")
    path.with_name("step-000004").write_text("a file")
    path.with_name("step-000005").mkdir()
    assert [entry.name for entry, _ in valid_checkpoints(path.parent)] == ["step-000001"]
    found = Store(path.parent).resume(*stepped())
    assert found is not None and found[0].name == "step-000001"


# ------------------------------------------------------------------------------ fuzz


OTHERS: tuple[Any, ...] = (None, True, -1, 0, 1, 10**9, 10**30, 1.5, "", "x", "\x1b", [], {}, [[]])
OTHERS += ({"$": "tuple", "v": [1]}, {"$": "x"}, {"$": "bytes", "v": "AAAA"}, float("nan"))


def places_in(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        inner = [place for key, item in pairs[:12] for place in places_in(item, (*before, key))]
        return [before] * bool(before) + inner
    return [before]


def mutate(body: Body, rng: random.Random) -> None:
    place, holder = rng.choice(places_in(body)), body
    for key in place[:-1]:
        holder = holder[key]
    if rng.random() < 0.2:
        del holder[place[-1]]
    else:
        holder[place[-1]] = rng.choice(OTHERS)


def fuzz(rank: int, world_size: int, path: str, rounds: int) -> dict[str, int]:
    """Read many forged checkpoints: only named errors come out; a refused one changes nothing."""
    rng, folder = random.Random(rounds), Path(path)
    whole = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, limits[1]))
    counts = {"refused": 0, "taken": 0}
    model, optimizer = stepped()
    try:
        for _ in range(rounds):
            kind = rng.choice(("manifest", "header", "values", "bytes"))
            if kind == "bytes":
                flip(folder / FIRST, rng.randrange(len(whole[FIRST])), rng.randrange(8))
            elif kind != "manifest":
                change = reheader if kind == "header" else revalue
                change(folder, lambda values: mutate(values, rng))
            seal(folder, (lambda body: mutate(body, rng)) if kind == "manifest" else lambda body: 0)
            before, report = everything(model, optimizer), verify(folder)
            str(report).encode()
            error: CheckpointError | None = None
            try:
                sw.load(folder, model, optimizer)
            except CheckpointError as refused:
                error = refused
            about = f"{kind}: {error!r:.999}; {report!s:.999}"
            if error is None:
                assert report.ok, f"verify refuses what load takes: {about}"
                model, optimizer = stepped()
            else:
                assert everything(model, optimizer) == before, f"changed: {about}"
                # What does not fit a model or an optimizer, verify cannot tell.
                assert isinstance(error, DamagedError | MismatchError), about
                assert isinstance(error, MismatchError) or not report.ok, about
            counts["taken" if error is None else "refused"] += 1
            for known, data in whole.items():
                (folder / known).write_bytes(data)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return counts


def test_no_forgery_gets_through_as_anything_but_a_named_error(
    path: Path, pytestconfig: pytest.Config
) -> None:
    rounds = 500 if pytestconfig.getoption("nightly") else 60
    [counts] = run_ranks(fuzz, 1, str(path), rounds)
    assert counts["refused"] > rounds // 3, "the mutations are wrong ones"
    assert counts["taken"] > 0, "and not all of them matter"


# ------------------------------------------------------------------------------ on several ranks


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


def remembering(
    strategy: str, optimizer: str, rank: int, world_size: int, seed: int
) -> tuple[Any, torch.optim.Optimizer]:
    net, stepper = trained(strategy, optimizer, rank, world_size, seed)
    net.remembering = Remembering()
    net.remembering.memory = {"count": seed}
    return net, stepper


def save_both(rank: int, world_size: int, folder: str) -> None:
    for optimizer in ("adamw", "muon"):
        made = remembering("zero3", optimizer, rank, world_size, seed=1)
        sw.save(f"{folder}/{optimizer}", *made, {"step": rank})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_both, 2, str(folder))
    return folder


MEMORY_OF = "remembering._extra_state"
LATE: dict[str, Callable[[Path], object]] = {
    "values of rank 1": lambda path: revalue(path, VALUES["numpy"], SECOND),
    "a piece of rank 1": lambda path: reheader(
        path, lambda header: header.update(x=header.pop([*header][-1])), SECOND
    ),
    "kind": lambda path: seal(path, put("optimizer", "kind", "Other")),
    "refused by its module": lambda path: seal(path, put("extra_states", MEMORY_OF, "count", -1)),
    "fails in its module": lambda path: seal(path, put("extra_states", MEMORY_OF, 7)),
    "disk": lambda path: None,
    "memory": lambda path: None,
}
FAILS = {"disk": OSError(5, "Input/output error"), "memory": MemoryError("no more")}


@contextmanager
def failing_read(error: Exception | None) -> Iterator[None]:
    """This rank's disk or memory fails, after every sha256 was right."""
    original, count = loading.opened, 0

    @contextmanager
    def opened(*where: Any) -> Iterator[Any]:
        with original(*where) as stream:
            through = partial(read, stream)
            yield SimpleNamespace(read=stream.read, seek=stream.seek, readinto=through)

    def read(stream: Any, buffer: Any) -> int:
        nonlocal count
        count += 1
        if count == 20 and error is not None:
            raise error
        return int(stream.readinto(buffer))

    with mock.patch.object(loading, "opened", opened):
        yield


KINDS = dict.fromkeys(("values of rank 1", "a piece of rank 1", "disk"), "DamagedError")
KINDS["memory"] = "CheckpointError"


def make_late(honest: Path, folder: Path) -> None:
    for name, damage in LATE.items():
        damage(shutil.copytree(honest, folder / name))
        seal(folder / name)


def refuse(
    rank: int, world_size: int, folder: str, strategy: str, optimizer: str, fresh: bool
) -> dict[str, tuple[str, str, bool]]:
    """By damage: what is raised, and whether nothing has changed. ``fresh``: the optimizer has no
    states yet."""
    if fresh:
        net, stepper = helpers.make(strategy, optimizer, world_size, 5)
        net.remembering = Remembering()
    else:
        net, stepper = remembering(strategy, optimizer, rank, world_size, seed=5)
    found, before = {}, everything(net, stepper)
    for damage in LATE:
        fails = FAILS.get(damage) if rank == 1 else None
        with failing_read(fails), pytest.raises(CheckpointError) as caught:
            sw.load(f"{folder}/{damage}", net, stepper)
        found[damage] = (
            type(caught.value).__name__,
            str(caught.value),
            everything(net, stepper) == before,
        )
    return found


@pytest.mark.parametrize(
    ("strategy", "optimizer", "fresh"),
    [("zero3", "adamw", True), ("zero1", "adamw", False), ("hsdp", "muon", True)],
)
def test_a_refused_load_changes_nothing_on_any_rank(
    strategy: str, optimizer: str, fresh: bool, saved: Path, tmp_path: Path
) -> None:
    make_late(saved / optimizer, tmp_path)
    first, second = run_ranks(refuse, 2, str(tmp_path), strategy, optimizer, fresh)
    assert first == second, "every rank raises the same"
    for name, (kind, text, unchanged) in first.items():
        assert unchanged, f"changed, and refused: {text}"
        assert kind == KINDS.get(name, "MismatchError")


def save_two(rank: int, world_size: int, root: str) -> None:
    model = sw.fully_shard(filled(0.0), mesh=mesh_of(world_size))
    with Store(root, keep=3) as store:
        for step in (1, 2):
            fill(model, step)
            store.save(step, model, extra={"step": step})


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "store"
    run_ranks(save_two, 2, str(folder))
    return folder


@pytest.fixture
def root(two_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "two"))


def go_on(rank: int, world_size: int, root: str) -> tuple[str, list[list[str]]]:
    model = sw.fully_shard(filled(-1.0), mesh=mesh_of(world_size))
    try:
        sw.load(f"{root}/step-000002", model)
    except DamagedError as error:
        refused = str(error)
    assert all((p.full_tensor() == -1.0).all() for p in model.parameters()), "nothing was loaded"
    seen = []
    with Store(root, keep=2) as store:
        resumed = store.resume(model)
        assert resumed is not None and resumed[1] == {"step": 1}
        for step in (2, 4):
            store.save(step, model, extra={"step": step})
            store.wait()
            seen.append([path.name for path in store.checkpoints()])
    return refused, seen


@pytest.mark.parametrize("name", [FIRST, SECOND])
@pytest.mark.parametrize("damage", ["flipped", "missing", "pipe"])
def test_ranks_fall_back_together(damage: str, name: str, root: Path) -> None:
    """Each file is hashed by one rank; all hear of it. What is damaged is not counted among those
    that are kept, and does not block its step."""
    DAMAGES[damage](root / "step-000002" / name)
    (refused, seen), (other, _) = run_ranks(go_on, 2, str(root))
    assert refused == other and name in refused
    assert "step-000001" in seen[0] and "step-000002-r2" in seen[0], "one sound one was too few"
    assert seen[1] == ["step-000002-r2", "step-000004"]


def test_nothing_sound_is_an_error_and_nothing_at_all_is_none(root: Path, tmp_path: Path) -> None:
    assert Store(tmp_path / "empty").resume(filled(0.5)) is None
    for step in (1, 2):
        flip(root / f"step-00000{step}" / FIRST)
    with pytest.raises(DamagedError, match="step-000002"):
        Store(root).resume(filled(0.5))
