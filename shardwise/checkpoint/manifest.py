# SPDX-License-Identifier: Apache-2.0
"""The manifest, written last: a directory with a valid manifest is a complete checkpoint.

    step-000300/
      rank-00000.safetensors    the pieces of tensors that a rank has written; as metadata, its
      rank-00001.safetensors    random states and extra
      manifest.json             size and sha256 of each file, the table of tensors, all other
                                values of model and optimizer, the run, versions

The manifest holds the sha256 of its own contents, so a cut or changed manifest is not valid. A
directory without a valid manifest is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import platform
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any

import numpy
import torch

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.files import File, HashedFile, opened
from shardwise.checkpoint.pieces import Entry, Key, Table
from shardwise.checkpoint.values import DAMAGE, MAX_JSON_BYTES, decode, encode, limited, parse_json

NAME = "manifest.json"
FORMAT = "shardwise checkpoint 5"


def versions() -> dict[str, str]:
    try:
        shardwise = version("shardwise")
    except PackageNotFoundError:
        shardwise = "unknown"  # run from a folder that was never installed
    return {
        "shardwise": shardwise,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": str(numpy.__version__),
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class OptimizerValues:
    """All of an optimizer but its tensors, by parameter; a load makes groups of it again."""

    kind: str  # the class
    options: list[dict[str, Any]]  # a table: parameters of a group share a row
    parameters: dict[str, int]  # the row of each parameter
    scalars: dict[str, dict[str, Any]]  # the states of parameters that are no tensors


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint without its tensors: which file holds which piece, and the run that wrote it."""

    step: int | None
    sequence: int  # number of the save in its folder; a resumed run continues the count
    files: list[File]  # of each rank
    table: Table
    experts: dict[str, int]  # parameters with a dimension of experts: how many
    tied: dict[str, str]  # another name of a parameter -> the name under which it is saved
    extra_states: dict[str, Any]  # of modules that have one
    dtypes: dict[str, str]  # of parameters before they were wrapped, if other than the saved dtype
    optimizer: OptimizerValues | None
    config: dict[str, Any] | None
    placements: list[str]
    facts: dict[str, Any]  # what must be equal for a run to continue bit for bit
    versions: dict[str, str]
    created: str

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(problem)
        self.table.check(self.world_size, self.experts)

    def _problems(self) -> Iterator[str]:
        """What the types of the fields do not say. A file may hold any values."""
        if min(self.sequence, self.step or 0, *(file.size for file in self.files)) < 0:
            yield "a number below 0"
        if sum(len(k) * entry.nbytes for entry, k in self.table.alike.items()) > self.num_bytes:
            yield "more bytes of tensors than of files"
        named = {name for name, state in self.tensors if not state}
        for name in {*self.tied.values(), *self.states, *self.experts} - named:
            yield f"{shown(name)} has another name, states or experts, and is no tensor"
        for name, count in self.experts.items():
            if self.tensors[name, ""].shape[:1] != (count,):
                yield f"{shown(name)} are not {count} experts"
        for name, value in self.extra_states.items():
            block = value.get("gate_up_block", 0) if type(value) is dict else 0
            if type(block) is not int or block < 0:
                yield f"the order of gate and up in {shown(name)} is no size"
        saved = self.optimizer
        rows, parameters = (saved.options, saved.parameters) if saved else ([], {})
        if not all(row in range(len(rows)) for row in parameters.values()):
            yield "a parameter with options that are not in the table"
        if self.states.keys() - parameters.keys():
            yield "states of no parameter"
        if any("params" in options for options in rows) or "torch" not in self.versions:
            yield "options with parameters among them, or no version of torch"

    @property
    def tensors(self) -> dict[Key, Entry]:
        return self.table.entries

    @property
    def world_size(self) -> int:
        return len(self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def saved_name(self, name: str) -> str:
        """The name under which a parameter is saved."""
        return name if (name, "") in self.tensors else self.tied.get(name, name)

    @cached_property
    def states(self) -> dict[str, dict[str, Entry]]:
        """By parameter: the states that are tensors."""
        found: dict[str, dict[str, Entry]] = {}
        for (name, state), entry in self.tensors.items():
            if state:
                found.setdefault(name, {})[state] = entry
        return found

    # ------------------------------------------------------------------ file

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {
            item.name: encode(getattr(self, item.name), item.name)
            for item in dataclasses.fields(self)
            if item.name not in ("files", "table", "optimizer")
        }
        body |= {"files": self.files, "table": self.table.to_json()}
        body["optimizer"] = encode(self.optimizer and vars(self.optimizer), "the optimizer")
        text = json.dumps(body, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return limited(f"{_head(digest)}{text}}}", NAME).encode()

    def write(self, folder: Path) -> None:
        with HashedFile(folder / NAME) as file:
            file.write(self.to_bytes())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a folder if its own sha256 holds, else a ``CheckpointError``."""
        return Manifest.parse(read_bytes(folder), folder)

    @staticmethod
    def parse(data: bytes, folder: Path) -> Manifest:
        try:
            content = parse_json(data)
            if type(content) is not dict or content.get("format") != FORMAT:
                other = content.get("format") if type(content) is dict else content
                raise ValueError(
                    f"its format is {shown(other)}, and only '{FORMAT}' can be read: load it with "
                    f"the version of shardwise that wrote it"
                )
            text = data[len(_head(content["sha256"])) : -1]
            if hashlib.sha256(text).hexdigest() != content["sha256"]:
                raise ValueError("its contents differ from its sha256")
            return _from_body(content["body"])
        except DAMAGE as error:
            raise DamagedError(f"{folder / NAME} is damaged: {error}") from error


def _head(digest: str) -> str:
    """The manifest before its body."""
    return f'{{"format":"{FORMAT}","sha256":"{digest}","body":'


def read_bytes(folder: Path) -> bytes:
    """The bytes of a folder's manifest; the error says what the folder is instead."""
    if (folder / NAME).exists():
        with opened(folder / NAME) as stream:
            data = stream.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise DamagedError(f"{folder / NAME} is longer than {MAX_JSON_BYTES} bytes")
        return data
    if inner := sorted(path.parent for path in folder.glob(f"*/{NAME}")):
        raise CheckpointError(
            f"{folder} is a folder of checkpoints: pass one of them, such as {inner[-1]}"
        )
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint at {folder}: no such directory")
    raise CheckpointError(
        f"{folder} has no {NAME}, which is written last: the save was never finished, or these are "
        f"published weights, which sw.load_full_state_dict(model, weights) takes"
    )


# ------------------------------------------------------------------------------ parsing


def _from_body(body: Any) -> Manifest:
    """The manifest in a body with a correct sha256. Anyone can write such a body: check types."""
    hints = typing.get_type_hints(Manifest)
    files, table = [File(*file) for file in body["files"]], Table.from_json(body["table"])
    if {(type(file.size), type(file.sha256)) for file in files} - {(int, str)}:
        raise TypeError("the size and sha256 of a file")
    values: dict[str, Any] = {"files": files, "table": table}
    for name in body.keys() - values.keys():
        values[name] = _typed(decode(body[name]), hints[name])
    return Manifest(**values)


def _typed(value: Any, hint: Any) -> Any:
    """The value if it has the annotated type, else a TypeError; a dataclass from its fields."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is UnionType:  # of one type and None
        return None if value is None else _typed(value, inner[0])
    if kind is OptimizerValues:
        hints = typing.get_type_hints(kind)
        return kind(**{name: _typed(item, hints[name]) for name, item in value.items()})
    if kind is not Any and type(value) is not kind:
        raise TypeError(f"{shown(value)} is no value that shardwise writes there")
    if kind is dict:
        for key, item in value.items():
            _typed(key, inner[0])
            _typed(item, inner[1])
    if kind is list:
        for item in value:
            _typed(item, inner[0])
    return value
