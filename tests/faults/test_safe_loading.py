# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is data. One that tries to run code, or to reach outside, is refused by name.

The attacker of these tests can write every file, so sizes and sha256 are always right. Each payload
is shown to be live first: an ordinary reader would run it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    DamagedError,
    Manifest,
    UnsafeError,
    export,
    torch_files,
    verify,
)
from shardwise.checkpoint.reading import Checkpoint
from tests.models import mesh_of
from tests.ranks import run_ranks


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._proof),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sw.save(tmp_path / "one", nn.Linear(3, 4), extra={"step": 1})
    return tmp_path / "one"


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    return tmp_path / "the-code-has-run"


def seal(path: Path, change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
    """Write a manifest that fits the files as they are, as an attacker would."""
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    for file in content["body"]["files"]:
        data = (path / file["name"]).read_bytes()
        file.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    change(content["body"])
    text = json.dumps(content["body"], sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps(content))


def assert_refused(path: Path, proof: Path, kind: type[CheckpointError], *words: str) -> None:
    """By load, verify and export; nothing ran, nothing was loaded, nothing was written."""
    model = nn.Linear(3, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(kind) as caught:
        sw.load(path, model)
    report = verify(path)
    assert not report.ok
    with pytest.raises(kind) as exported:
        export(path, path.parent / "out")
    assert not proof.exists(), "code has run"
    for word in words:
        assert word in str(caught.value), str(caught.value)
        assert word in str(report) and word in str(exported.value)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    assert not (path.parent / "out").exists()


def test_an_honest_checkpoint_resealed_is_accepted(path: Path) -> None:
    """The control: what is refused below is refused for its contents."""
    seal(path)
    assert verify(path).ok
    assert sw.load(path, nn.Linear(3, 4)) == {"step": 1}


# ------------------------------------------------------------------------------ the index


def test_metadata_that_runs_code_is_refused_by_name(path: Path, proof: Path) -> None:
    data = pickle.dumps(Payload(proof))
    pickle.loads(data)
    assert proof.is_dir(), "the payload is live"
    proof.rmdir()
    (path / ".metadata").write_bytes(data)
    seal(path)
    assert_refused(path, proof, UnsafeError, ".metadata", "posix.mkdir")


def test_a_payload_among_honest_entries_is_refused(path: Path, proof: Path) -> None:
    honest: Metadata = pickle.loads((path / ".metadata").read_bytes())
    honest.planner_data = Payload(proof)
    (path / ".metadata").write_bytes(pickle.dumps(honest))
    seal(path)
    assert_refused(path, proof, UnsafeError, ".metadata", "posix.mkdir")


def names(*pairs: tuple[str, str]) -> list[Any]:
    """Pickles that call a named function with one string, in the old and the new spelling."""
    found = []
    for module, name in pairs:
        text = b"X" + len(b"touch me").to_bytes(4, "little") + b"touch me"
        old = b"c" + module.encode() + b"\n" + name.encode() + b"\n" + text + b"\x85R."
        parts = [module.encode(), name.encode()]
        new = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(p)]) + p for p in parts)
        found += [pytest.param(old, f"{module}.{name}", id=f"{module}.{name}")]
        found += [pytest.param(new + b"\x93" + text + b"\x85R.", f"{module}.{name}")]
    return found


@pytest.mark.parametrize(
    ("data", "name"),
    names(
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "__import__"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch", "hub"),
        ("torch", "__class__"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("functools", "partial"),
        ("copyreg", "_reconstructor"),
        ("shardwise.checkpoint.values", "json.loads"),
        ("pathlib", "PosixPath"),
    ),
)
def test_no_name_outside_the_table_is_even_imported(data: bytes, name: str, path: Path) -> None:
    with pytest.raises(UnsafeError, match=rf"\.metadata asks for '{name}'"):
        torch_files.parse(data, ".metadata", [])
    (path / ".metadata").write_bytes(data)
    seal(path)
    assert_refused(path, path / "never", UnsafeError, name)


@pytest.mark.parametrize(
    "data",
    [
        # the table's own names, called with arguments or given attributes
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nX\x01\x00\x00\x00a\x85R.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x05\x00\x00\x00stateNsb.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00gNs\x86b.",
        b"ctorch\nSize\n}X\x01\x00\x00\x00gNs\x86b.",
        b"\x80\x04.",
        b"",
        b"]" * 5000 + b"a" * 4999 + b".",
        b"K\x01.",
    ],
)
def test_broken_and_hostile_pickles_change_nothing(data: bytes, path: Path) -> None:

    with pytest.raises(CheckpointError):
        torch_files.parse(data, ".metadata", [])

    (path / ".metadata").write_bytes(data)
    seal(path)
    assert_refused(path, path / "never", CheckpointError, ".metadata")


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\x00b", "../one/__0_0.distcp", 7],
)
def test_the_index_can_not_point_outside(name: Any, path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes((path / "__0_0.distcp").read_bytes())
    honest: Metadata = pickle.loads((path / ".metadata").read_bytes())
    assert honest.storage_data
    for info in honest.storage_data.values():
        info.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(honest))
    seal(path)
    assert_refused(path, path / "never", UnsafeError, "no plain file name")


def test_the_index_points_to_listed_bytes_only(path: Path) -> None:
    honest: Metadata = pickle.loads((path / ".metadata").read_bytes())
    key, info = next(iter(honest.storage_data.items()))
    size = (path / "__0_0.distcp").stat().st_size

    def rewrite(change: Callable[[Metadata], None]) -> None:
        data: Metadata = pickle.loads(pickle.dumps(honest))
        change(data)
        (path / ".metadata").write_bytes(pickle.dumps(data))
        seal(path)

    def put(info: _StorageInfo) -> Callable[[Metadata], None]:
        return lambda data: data.storage_data.update({key: info})

    (path / "stranger").write_bytes(b"")
    rewrite(put(_StorageInfo("stranger", 0, 0)))
    assert_refused(path, path / "never", UnsafeError, "not in the manifest")
    (path / "stranger").unlink()
    rewrite(put(_StorageInfo("__0_0.distcp", size - 1, 2)))
    assert_refused(path, path / "never", DamagedError, "behind the end")
    rewrite(put(_StorageInfo("__0_0.distcp", -1, 2)))
    assert_refused(path, path / "never", DamagedError, ".metadata")
    rewrite(put(_StorageInfo("__0_0.distcp", info.offset, info.length, ["zstd"])))
    assert_refused(path, path / "never", UnsafeError, "transform")
    rewrite(lambda data: data.storage_data.update({MetadataIndex("ghost", [0]): info}))
    assert_refused(path, path / "never", DamagedError, "unknown tensors")
    rewrite(lambda data: data.storage_data.pop(key))
    assert_refused(path, path / "never", DamagedError, "no file holds")


def test_objects_and_gaps_in_the_index_are_refused(path: Path) -> None:
    honest: Metadata = pickle.loads((path / ".metadata").read_bytes())
    bytes_entry: Metadata = pickle.loads(pickle.dumps(honest))
    bytes_entry.state_dict_metadata["model.note"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(bytes_entry))
    seal(path)
    assert_refused(path, path / "never", UnsafeError, "BytesStorageMetadata")
    entry = honest.state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size([5, 3])
    (path / ".metadata").write_bytes(pickle.dumps(honest))
    seal(path)
    assert not verify(path).ok and "12 of 15 elements" in str(verify(path))
    with pytest.raises(CheckpointError, match="12 of 15"):
        sw.load(path, nn.Linear(3, 5))


# ------------------------------------------------------------------------------ tensors


def put_in_place_of_a_tensor(path: Path, data: bytes) -> None:
    """Append bytes to the file of tensors and have the index call them 'weight'."""
    index = Checkpoint.open(path, Manifest.read(path)).index
    file = path / "__0_0.distcp"
    begin = file.stat().st_size
    with open(file, "ab") as stream:
        stream.write(data)
    [chunk] = index["model.weight"].chunks
    moved = replace(chunk, begin=begin, length=len(data))
    index["model.weight"] = replace(index["model.weight"], chunks=(moved,))
    (path / ".metadata").write_bytes(torch_files.dump(index))
    seal(path)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_a_tensor_that_runs_code_is_refused_by_name(form: str, path: Path, proof: Path) -> None:
    stream = io.BytesIO()
    if form == "bare":
        stream.write(pickle.dumps(Payload(proof)))
    else:
        torch.save(Payload(proof), stream, _use_new_zipfile_serialization=form == "zip")
    if form == "zip":
        torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
        assert proof.is_dir(), "the payload is live"
        proof.rmdir()
    put_in_place_of_a_tensor(path, stream.getvalue())
    # Only a zip file is looked into at all.
    kind = UnsafeError if form == "zip" else DamagedError
    assert_refused(path, proof, kind, "__0_0.distcp")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"a": torch.zeros(4, 3)}, "dict"),
        (torch.zeros(3, 4), "[3, 4]"),
        (torch.nn.Parameter(torch.zeros(4, 3)), "_rebuild_parameter"),
        (torch.zeros(4, 3, dtype=torch.int32), "int32"),
        ("text", "str"),
    ],
    ids=["dict", "shape", "parameter", "dtype", "text"],
)
def test_anything_but_the_tensor_of_the_index_is_refused(value: Any, word: str, path: Path) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    put_in_place_of_a_tensor(path, stream.getvalue())
    assert word in str(verify(path)) and not verify(path).ok
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        sw.load(path, nn.Linear(3, 4))


# ------------------------------------------------------------------------------ names and values


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", None, ["x"]])
def test_the_manifest_can_not_point_outside(name: Any, path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes((path / "state.json").read_bytes())

    def change(body: dict[str, Any]) -> None:
        body["files"].append({**body["files"][0], "name": name})

    seal(path, change)
    assert_refused(path, path / "never", UnsafeError, "manifest.json", "no plain file name")


@pytest.mark.parametrize(
    "text",
    [
        '{"$": "array", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="}',
        '{"$": "eval", "v": "1"}',
        '{"$": "tensor", "dtype": "load", "shape": [1], "v": "AAAA"}',
        '{"$": "tensor", "dtype": "float32", "shape": [9], "v": "AAAA"}',
        '{"$": "bytes", "v": "?"}',
        "[1, 2",
        "7",
    ],
)
def test_values_can_only_be_values(text: str, path: Path) -> None:
    for name in ("state.json", "rank-00000.json"):
        whole = (path / name).read_bytes()
        (path / name).write_text(text)
        seal(path)
        with pytest.raises(DamagedError, match=name):
            sw.load(path, nn.Linear(3, 4))
        (path / name).write_bytes(whole)


# ------------------------------------------------------------------------------ every rank


def load_hostile(rank: int, world_size: int, path: str) -> str:
    model = sw.fully_shard(nn.Linear(30, 50), mesh=mesh_of(world_size))
    before = model.weight.full_tensor()
    try:
        sw.load(path, model)
    except UnsafeError as error:
        assert torch.equal(model.weight.full_tensor(), before), "on neither rank"
        return str(error)
    raise AssertionError("loaded")


def save_sharded(rank: int, world_size: int, path: str) -> None:
    sw.save(path, sw.fully_shard(nn.Linear(30, 50), mesh=mesh_of(world_size)))


def test_every_rank_refuses_what_one_alone_has_read(tmp_path: Path, proof: Path) -> None:
    path = tmp_path / "one"
    run_ranks(save_sharded, 2, str(path))
    index = Checkpoint.open(path, Manifest.read(path)).index
    stream = io.BytesIO()
    torch.save(Payload(proof), stream)
    # Only the piece that rank 1 reads.
    entry = index["model.weight"]
    assert len(entry.chunks) == 2
    file = path / entry.chunks[1].file
    begin = file.stat().st_size
    file.write_bytes(file.read_bytes() + stream.getvalue())
    moved = replace(entry.chunks[1], begin=begin, length=len(stream.getvalue()))
    index["model.weight"] = replace(entry, chunks=(entry.chunks[0], moved))
    (path / ".metadata").write_bytes(torch_files.dump(index))
    seal(path)
    messages = run_ranks(load_hostile, 2, str(path))
    assert messages[0] == messages[1] and "rank 1" in messages[0] and file.name in messages[0]
    assert not proof.exists()
    shutil.rmtree(path)
