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
import types
import typing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.files import File, rank_file, read_small, write_file
from shardwise.checkpoint.pieces import (
    Entry,
    Key,
    key_text,
    table_from_json,
    table_to_json,
)
from shardwise.checkpoint.values import (
    DAMAGE,
    MAX_JSON_BYTES,
    check_length,
    decode,
    encode,
    parse_json,
)

NAME = "manifest.json"
FORMAT = "shardwise checkpoint 4"


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

    identity: str  # the name of this save's temporary directory
    step: int | None
    sequence: int  # number of the save in its folder; a resumed run continues the count
    files: list[File]  # of each rank
    tensors: dict[Key, Entry]
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
        """Check what the types of the fields do not say. A file may hold any values."""
        if not self.files or min(self.sequence, self.step or 0, *(f.size for f in self.files)) < 0:
            raise ValueError("no ranks, or a number below 0")
        alike: dict[int, list[Key]] = {}
        for key, entry in self.tensors.items():
            alike.setdefault(id(entry), []).append(key)
        room = sum(file.size for file in self.files)
        holders: dict[int, tuple[int, ...]] = {}
        for keys in alike.values():
            entry = self.tensors[keys[0]]
            room -= len(keys) * entry.numel_held * entry.dtype.itemsize
            holders |= {id(tile.ranks): tile.ranks for tile in entry.tiles}
            gaps = all(state and name in self.experts for name, state in keys)
            if (problem := entry.problem(gaps)) is not None:
                raise ValueError(f"{shown(key_text(keys[0]))}: {problem}")
        if room < 0:
            raise ValueError(f"its tensors have {-room} bytes more than its files")
        if any(max(ranks, default=0) >= self.world_size for ranks in holders.values()):
            raise ValueError(f"it names a rank of {self.world_size} that is none")
        for name in self.tied.values():
            if (name, "") not in self.tensors:
                raise ValueError(f"it ties a name to {shown(name)}, which is no tensor")
        for name in self.states:
            if (name, "") not in self.tensors:
                raise ValueError(f"{shown(name)} has states, and is no tensor")
        for name, count in self.experts.items():
            if self.tensors[name, ""].shape[:1] != (count,):
                raise ValueError(f"{shown(name)} are not {shown(count)} experts")
        for name, value in self.extra_states.items():
            block = value.get("gate_up_block", 0) if type(value) is dict else 0
            if type(block) is not int or block < 0:
                raise ValueError(f"the order of gate and up in {shown(name)} is no size")
        saved = self.optimizer
        rows, parameters = (saved.options, saved.parameters) if saved else ([], {})
        if not all(row in range(len(rows)) for row in parameters.values()):
            raise ValueError("a parameter with options that are not in the table")
        if any("params" in options for options in rows):
            raise ValueError("options with parameters among them")
        if lost := [key for key in self.tensors if key[1] and key[0] not in parameters]:
            raise ValueError(f"{shown(key_text(lost[0]))} belongs to no parameter")

    @property
    def world_size(self) -> int:
        return len(self.files)

    @property
    def num_tensors(self) -> int:
        return len(self.tensors)

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
            if item.name not in ("files", "tensors", "optimizer")
        }
        body["files"] = [[file.size, file.sha256] for file in self.files]
        body["tensors"] = table_to_json(self.tensors)
        body["optimizer"] = encode(self.optimizer and vars(self.optimizer), "the optimizer")
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return check_length(
            f'{{"format":"{FORMAT}","sha256":"{digest}","body":{text}}}'.encode(), NAME
        )

    def write(self, folder: Path) -> None:
        write_file(folder / NAME, self.to_bytes())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a folder if its own sha256 holds, else a ``CheckpointError``."""
        return Manifest.parse(read_bytes(folder), folder)

    @staticmethod
    def parse(data: bytes, folder: Path) -> Manifest:
        path = folder / NAME
        content = parse_json(data, str(path))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            other = content.get("format") if isinstance(content, dict) else content
            raise DamagedError(
                f"{path} has the format {shown(other)}, and only '{FORMAT}' can be read: load it "
                f"with the version of shardwise that wrote it"
            )
        try:
            body = content["body"]
            text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            if hashlib.sha256(text.encode()).hexdigest() != content["sha256"]:
                raise ValueError("its contents differ from its sha256")
            return _from_body(body, str(path))
        except DAMAGE as error:
            raise DamagedError(f"{path} is damaged: {error}") from error


def read_bytes(folder: Path) -> bytes:
    """The bytes of a folder's manifest; the error says what the folder is instead."""
    try:
        return read_small(folder / NAME, MAX_JSON_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        pass
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


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

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


# ------------------------------------------------------------------------------ parsing


def _from_body(body: Any, where: str) -> Manifest:
    """The manifest in a body with a correct sha256. Anyone can write such a body: check types."""
    hints = typing.get_type_hints(Manifest)
    values = {name: decode(value, where) for name, value in body.items() if name != "tensors"}
    values["tensors"] = table_from_json(body["tensors"])
    sizes = _typed(values["files"], list[list[Any]])
    values["files"] = [_typed(vars(File(rank_file(r), *f)), File) for r, f in enumerate(sizes)]
    if values.keys() != hints.keys() or "torch" not in values["versions"]:
        raise ValueError("it lacks fields of a manifest, or has others")
    skipped = ("tensors", "files")  # made above
    return Manifest(
        **{name: v if name in skipped else _typed(v, hints[name]) for name, v in values.items()}
    )


def _typed(value: Any, hint: Any) -> Any:
    """The value if it has the annotated type, else a TypeError; a dataclass from its fields."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # of one type and None
        return None if value is None else _typed(value, inner[0])
    kind = dict if dataclasses.is_dataclass(hint) else origin or hint
    if kind is not Any and type(value) is not kind:
        raise TypeError(f"{shown(value)} is no value that shardwise writes there")
    if dataclasses.is_dataclass(hint):
        fields = typing.get_type_hints(hint)
        made = {name: _typed(item, fields[name]) for name, item in value.items()}
        return hint(**made)  # type: ignore[operator]
    for item in value if kind in (dict, list) and inner else ():
        _typed(item, inner[0])
    for item in value.values() if kind is dict and inner else ():
        _typed(item, inner[1])
    return value
