# SPDX-License-Identifier: Apache-2.0
"""The manifest, written last: a directory with a valid manifest is a complete checkpoint.

    step-000300/
      __0_0.distcp  __1_0.distcp    tensors, one file per rank, in torch DCP's format
      index.json                    file and offset of every piece of every tensor
      .metadata                     the same for torch's DCP; shardwise never reads it
      state.json                    optimizer groups, tied names, other values of the model
      rank-00000.json ...           random states and extra of each rank
      manifest.json                 names, sizes and sha256 of all these files; the run, versions

The manifest holds the sha256 of its own contents, so a cut or changed manifest is not valid. A
directory without a valid manifest is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.files import (
    File,
    check_name,
    check_size,
    read_listed,
    read_small,
    write_file,
)
from shardwise.checkpoint.values import (
    MAX_JSON_BYTES,
    check_length,
    decode,
    encode,
    from_bytes,
    parse_json,
)

NAME = "manifest.json"
FORMAT = "shardwise checkpoint 2"
INDEX, METADATA, STATE = "index.json", ".metadata", "state.json"
_VALUES = ("config", "optimizer")  # fields with any values, tagged in JSON
_WEIGHTS = (
    ". Read published weights with safetensors.torch.load_file(file), or torch.load(file, "
    "weights_only=True), and give them to sw.load_full_state_dict(model, weights)"
)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and the run that wrote it."""

    identity: str  # the name of this save's temporary directory
    step: int | None
    sequence: int  # number of the save in its folder; a resumed run continues the count
    world_size: int
    num_tensors: int
    placements: list[str]
    optimizer: dict[str, Any] | None  # class and options: the momentum convention is among them
    config: dict[str, Any] | None
    versions: dict[str, str]
    created: str
    files: tuple[File, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def file(self, name: str) -> File:
        for file in self.files:
            if file.name == name:
                return file
        raise DamagedError(f"the manifest lists no file '{name}'")

    def write(self, folder: Path) -> None:
        body = asdict(self)
        for name in _VALUES:
            body[name] = encode(body[name], name)
        text = json.dumps({"format": FORMAT, "sha256": _digest(body), "body": body}, indent=1)
        check_length(text.encode(), NAME)
        write_file(folder / NAME, text.encode())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a folder if its own sha256 holds, else a ``CheckpointError``."""
        path = folder / NAME
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file, and a checkpoint is a folder{_WEIGHTS}")
        try:
            content = parse_json(read_small(path, MAX_JSON_BYTES), str(path))
        except FileNotFoundError:
            raise CheckpointError(_nothing_there(folder)) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            other = content.get("format") if isinstance(content, dict) else content
            raise DamagedError(
                f"{path} has the format {shown(other)}, and only '{FORMAT}' can be read: load it "
                f"with the version that wrote it, or its tensors with torch.distributed.checkpoint"
            )
        body = content.get("body")
        if not isinstance(body, dict) or _digest(body) != content.get("sha256"):
            raise DamagedError(f"{path} is damaged: its contents differ from its sha256")
        return _from_body(body, path)

    def check_sizes(self, folder: Path) -> None:
        """Raise unless every file exists and has its size; no byte is read."""
        for file in self.files:
            check_size(folder, file)

    def read_json(self, folder: Path, name: str) -> Any:
        """The contents of one of the JSON files, checked by sha256."""
        data = read_listed(folder, self.file(name), MAX_JSON_BYTES)
        return from_bytes(data, str(folder / name))


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


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _from_body(body: dict[str, Any], path: Path) -> Manifest:
    """The manifest in a body with a correct sha256. Anyone can write such a body: check types."""
    fields = {item.name for item in dataclasses.fields(Manifest)}
    if body.keys() != fields:
        different = ", ".join(shown(name) for name in sorted(body.keys() ^ fields)[:5])
        raise DamagedError(f"{path} lacks fields of a manifest, or has others: {different}")
    for name in _VALUES:
        body[name] = decode(body[name], str(path))
    for name, is_valid in _IS_VALID.items():
        if not is_valid(body[name]):
            raise DamagedError(f"{path}: '{name}' is {shown(body[name])}, which no save writes")
    for file in body["files"]:
        check_name(file["name"], str(path))
    files = tuple(File(**file) for file in body["files"])
    names = {file.name for file in files}
    # The numbers are compared first: a billion ranks would make a set of a billion names.
    complete = len(names) == len(files) > body["world_size"]
    if not complete or not names.issuperset(
        (INDEX, METADATA, STATE, *map(rank_file, range(body["world_size"])))
    ):
        raise DamagedError(f"{path} does not list all files of a checkpoint")
    return Manifest(**{**body, "files": files})


def _is_line(value: Any) -> bool:
    """Whether a value is a text that can be printed: no control characters, not too long."""
    return type(value) is str and len(value) <= 2000 and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_file(value: Any) -> bool:
    """Whether a value describes a file; ``check_name`` checks its name."""
    return (
        type(value) is dict
        and value.keys() == {"name", "size", "sha256"}
        and _is_count(value["size"])
        and _is_line(value["sha256"])
    )


_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "identity": lambda value: type(value) is str,
    "step": lambda value: value is None or _is_count(value),
    "sequence": _is_count,
    "world_size": lambda value: _is_count(value) and value >= 1,
    "num_tensors": _is_count,
    "placements": lambda value: type(value) is list and all(map(_is_line, value)),
    "optimizer": lambda value: value is None or type(value) is dict,
    "config": lambda value: value is None or type(value) is dict,
    "versions": lambda value: (
        type(value) is dict and "torch" in value and all(map(_is_line, [*value, *value.values()]))
    ),
    "created": _is_line,
    "files": lambda value: type(value) is list and all(map(_is_file, value)),
}


def _nothing_there(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no checkpoint at {folder}: no such directory"
    inner = sorted(path.parent for path in folder.glob(f"*/{NAME}"))
    if inner:
        return f"{folder} is a folder of checkpoints: pass one of them, such as {inner[-1]}"
    if any(folder.glob("*.safetensors")):
        return f"{folder} has no {NAME}: it is no checkpoint of sw.save{_WEIGHTS}"
    return (
        f"there is no checkpoint at {folder}: it has no {NAME}, which is written last, so the save "
        f"was never finished"
    )
