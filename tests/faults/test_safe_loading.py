# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is data. One that tries to run code, or to reach outside, is refused by name.

The attacker of these tests can write every file, so sizes and sha256 are always right. Each payload
is shown to be live first: an ordinary reader would run it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    DamagedError,
    UnsafeError,
    export,
    verify,
)


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


def test_what_torch_would_unpickle_is_never_read(path: Path, proof: Path) -> None:
    """``.metadata`` is there for torch alone; one that was put there later is refused by name."""
    data = pickle.dumps(Payload(proof))
    pickle.loads(data)
    assert proof.is_dir(), "the payload is live"
    proof.rmdir()
    (path / ".metadata").write_bytes(data)
    seal(path)
    assert_refused(path, proof, DamagedError, ".metadata")
    digest = hashlib.sha256(data).hexdigest()
    rewrite(path, lambda content: content.update({".metadata": digest}))
    assert verify(path).ok and export(path, path.parent / "out")
    assert sw.load(path, nn.Linear(3, 4)) == {"step": 1}
    assert not proof.exists(), "code has run"


def test_a_checkpoint_of_the_first_form_says_what_reads_it(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("checkpoint 2", "checkpoint 1"))
    with pytest.raises(DamagedError, match=r"checkpoint 1.*version that wrote it.*torch\.distr"):
        sw.load(path, nn.Linear(3, 4))


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((path / "index.json").read_text())
    change(content)
    (path / "index.json").write_text(json.dumps(content))
    seal(path)


def weight(content: dict[str, Any]) -> Any:
    """[dtype, shape, [[rank, begin, offsets, sizes]]]"""
    return content["tensors"]["model.weight"]


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "hold 12 of 15 elements": lambda content: weight(content).__setitem__(1, [5, 3]),
    "hold 24 of 12 elements": lambda content: weight(content)[2].append(weight(content)[2][0]),
    "lies outside [4, 3]": lambda content: weight(content)[2][0].__setitem__(2, [1, 0]),
    "beyond the end of __0_0.distcp": lambda content: weight(content)[2][0].__setitem__(1, 10**6),
    "beyond the end of __1_0.distcp": lambda content: weight(content)[2][0].__setitem__(0, 1),
    "-1 in the place of a size": lambda content: weight(content)[2][0].__setitem__(1, -1),
    "True in the place of a size": lambda content: weight(content)[2][0].__setitem__(0, True),
    "'../secret' in the place of a size": lambda content: weight(content)[2][0].__setitem__(
        0, "../secret"
    ),
    "no tensor": lambda content: weight(content).__setitem__(1, [1 << 40, 1 << 40]),
    "in the place of a shape": lambda content: weight(content).__setitem__(1, [1] * 65),
    "'load' is no dtype": lambda content: weight(content).__setitem__(0, "load"),
    "of type list is no dtype": lambda content: weight(content).__setitem__(0, []),
    "byteorder 'big'": lambda content: content.update(byteorder="big"),
    "no attribute 'items'": lambda content: content.update(tensors=[1]),
    "cannot unpack": lambda content: content["tensors"].update(ghost=7),
    "2 were saved": lambda content: content["tensors"].update(ghost=weight(content)),
}


@pytest.mark.parametrize("words", WRONG)
def test_the_index_points_to_whole_tensors_in_listed_bytes(words: str, path: Path) -> None:
    rewrite(path, WRONG[words])
    assert_refused(path, path / "never", DamagedError, "index.json", words)


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
