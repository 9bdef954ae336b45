# SPDX-License-Identifier: Apache-2.0
"""The manifest: written last, so a directory with a valid one is a whole checkpoint.

    step-000300/
      __0_0.distcp  __1_0.distcp    tensors, one file per rank, in torch DCP's format
      .metadata                     where every piece of every tensor is (DCP's)
      state.json                    optimizer groups, tied names, other values of the model
      rank-00000.json ...           random states and extra of each rank
      manifest.json                 all of the above: names, sizes, sha256; and what made it

The manifest carries the sha256 of its own contents: half of one, or one with a changed byte, is
none, and a directory without a valid manifest does not exist.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from shardwise.checkpoint.errors import CheckpointError, DamagedError, UnsafeError
from shardwise.checkpoint.files import File, check_name, check_size, read_listed, write_file
from shardwise.checkpoint.values import decode, encode, from_bytes

NAME = "manifest.json"
FORMAT = "shardwise checkpoint 1"
METADATA, STATE = ".metadata", "state.json"
_MAX_BYTES = 1 << 28
_VALUES = ("config", "optimizer")  # fields that hold any values, tagged in JSON


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is: its files, and the run that wrote it."""

    identity: str  # of this one save
    step: int | None
    sequence: int  # the order of saves in one folder; a run that went back goes on counting
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
        write_file(folder / NAME, text.encode())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """A manifest whose own sha256 holds, or a ``CheckpointError`` that says what is there."""
        path = folder / NAME
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise DamagedError(f"{path} is too large to be a manifest")
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(_nothing_there(folder)) from None
        except (OSError, ValueError) as error:
            raise DamagedError(f"{path} can't be read: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise DamagedError(f"{path} is of the format {found!r:.80}; this reads '{FORMAT}'")
        body = content.get("body")
        if not isinstance(body, dict) or _digest(body) != content.get("sha256"):
            raise DamagedError(f"{path} is damaged: its sha256 is not that of what was written")
        return _from_body(body, path)

    def check_sizes(self, folder: Path) -> None:
        """That every file is there with its size (no byte is read)."""
        for file in self.files:
            check_size(folder, file)

    def read_json(self, folder: Path, name: str) -> Any:
        """The contents of one of the JSON files, checked by sha256."""
        return from_bytes(read_listed(folder, self.file(name)), str(folder / name))


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        ours = version("shardwise")
    except PackageNotFoundError:
        ours = "unknown"  # run from a folder that was never installed
    return {
        "shardwise": ours,
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
    """A sound sha256 says that the bytes are as written, not who wrote them: check the types."""
    try:
        files = tuple(File(**entry) for entry in body["files"])
        values = {name: decode(body[name], str(path)) for name in _VALUES}
        manifest = Manifest(**{**body, **values, "files": files})
        names = [check_name(file.name, str(path)) for file in files]
        sound = (
            all(type(f.size) is int and f.size >= 0 and type(f.sha256) is str for f in files)
            and all(type(n) is int for n in (manifest.sequence, manifest.world_size))
            and manifest.world_size >= 1
            and (manifest.step is None or type(manifest.step) is int)
            and all(value is None or type(value) is dict for value in values.values())
            and len(set(names)) == len(names)
            and {METADATA, STATE, *map(rank_file, range(manifest.world_size))} <= set(names)
        )
    except UnsafeError:
        raise
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} lacks what a manifest holds: {error}") from error
    if not sound:
        raise DamagedError(f"{path} is no manifest of a whole checkpoint")
    return manifest


def _nothing_there(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no checkpoint at {folder}: no such directory"
    inner = sorted(path.name for path in folder.glob(f"*/{NAME}") for path in [path.parent])
    if inner:
        return (
            f"{folder} is a folder of checkpoints, not one: pass {os.path.join(folder, inner[-1])}"
        )
    return (
        f"there is no checkpoint at {folder}: it has no {NAME}, which is written last, "
        f"so what is there was never finished"
    )
