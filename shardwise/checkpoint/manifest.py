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
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.files import File, HashedFile, opened
from shardwise.checkpoint.pieces import Entry, Key, Table
from shardwise.checkpoint.values import (
    DAMAGE,
    MAX_JSON_BYTES,
    decode,
    dtype_name,
    encode,
    limited,
    parse_json,
    typed,
)

NAME = "manifest.json"
FORMAT = "shardwise checkpoint 6"
_PLAIN = ("files", "table")  # fields in types of JSON; the values of others may need tags


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
    experts: list[str]  # parameters whose first dimension counts experts
    tied: dict[str, str]  # another name of a parameter -> the name under which it is saved
    extra_states: dict[str, Any]  # of modules that have one
    dtypes: dict[str, str]  # of parameters before they were wrapped, if other than the saved dtype
    optimizer: OptimizerValues | None
    config: dict[str, Any] | None
    placements: list[str]
    facts: dict[str, Any]  # what must be equal for a run to continue bit for bit
    versions: dict[str, str]
    created: str = field(default_factory=lambda: f"{datetime.datetime.now(datetime.UTC):%FT%TZ}")

    def __post_init__(self) -> None:
        """What the types of the fields do not say. A file may hold any values."""
        self.table.check(self.world_size, self.num_bytes)
        named = {name for name, state in self.tensors if not state}
        saved, states = self.optimizer, self.states
        rows, scalars = (saved.parameters, saved.scalars) if saved else ({}, {})
        sound = {
            "tied": named.issuperset(self.tied.values()),
            "experts": all(self.tensors[name, ""].shape for name in self.experts),
            "states": states.keys() <= named & rows.keys(),
            "options": all(row < len(saved.options) for row in rows.values()) if saved else True,
            "scalars": not any(
                scalars.get(name, {}).keys() & of.keys() for name, of in states.items()
            ),
        }
        for what, fits in sound.items():
            if not fits:
                raise ValueError(f"its {what} do not fit its tensors")

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
        names = [item.name for item in dataclasses.fields(self) if item.name not in _PLAIN]
        body = {name: encode(getattr(self, name), name) for name in names if name != "optimizer"}
        body["optimizer"] = encode(self.optimizer and vars(self.optimizer), "the optimizer")
        body |= {"files": self.files, "table": self.table.as_json()}
        text = json.dumps(body, separators=(",", ":"), default=dtype_name)
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
        """Anyone can write a body with a correct sha256: its types are checked."""
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
            body = {
                name: value if name in _PLAIN else decode(value)
                for name, value in content["body"].items()
            }
            return typing.cast(Manifest, typed(Manifest)(body))
        except DAMAGE as error:
            raise DamagedError(f"{folder / NAME} is damaged: {error}") from error


def _head(digest: str) -> str:
    """The manifest before its body."""
    return f'{{"format":"{FORMAT}","sha256":"{digest}","body":'


def read_bytes(folder: Path) -> bytes:
    """The bytes of a folder's manifest; the error says what the folder may be instead."""
    if not (folder / NAME).exists():
        raise CheckpointError(
            f"{folder} is no checkpoint: {NAME}, which is written last, is not there. It may be a "
            f"save that was never finished, a folder of checkpoints (pass one of them), or "
            f"published weights, which sw.load_full_state_dict(model, weights) takes"
        )
    with opened(folder / NAME) as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise DamagedError(f"{folder / NAME} is longer than {MAX_JSON_BYTES} bytes")
    return data
