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
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from shardwise.checkpoint import table
from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.files import File, rank_file, read_small, write_file
from shardwise.checkpoint.table import Entry
from shardwise.checkpoint.values import (
    DAMAGE,
    MAX_JSON_BYTES,
    check_length,
    decode,
    dtype_name,
    dtype_of,
    encode,
    parse_json,
)

NAME = "manifest.json"
FORMAT = "shardwise checkpoint 3"
_WEIGHTS = (
    ". Read published weights with safetensors.torch.load_file(file), or torch.load(file, "
    "weights_only=True), and give them to sw.load_full_state_dict(model, weights)"
)


def model_key(name: str) -> str:
    return f"model.{name}"


def state_key(name: str, key: str) -> str:
    return f"optimizer.state.{name}.{key}"


@dataclass(frozen=True, kw_only=True)
class OptimizerValues:
    """All of an optimizer but its tensors, by parameter; ``load`` makes groups of it again."""

    kind: str  # the class
    options: list[dict[str, Any]]  # a table: parameters with equal options share a row
    described: list[dict[str, str]]  # for each row, the options that JSON can't hold, as text
    parameters: dict[str, int]  # the row of each parameter
    states: list[list[str]]  # a table of the keys of states that are tensors
    tensors: dict[str, int]  # the row of each parameter that has such states
    scalars: dict[str, dict[str, Any]]  # the other states of each parameter


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint without its tensors: which file holds which piece, and the run that wrote it."""

    identity: str  # the name of this save's temporary directory
    step: int | None
    sequence: int  # number of the save in its folder; a resumed run continues the count
    files: list[File]  # of each rank
    tensors: dict[str, Entry]
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
        num_ranks, has = len(self.files), self.tensors
        if not num_ranks or self.sequence < 0 or (self.step or 0) < 0:
            raise ValueError("no ranks, or a step before the first")
        room = sum(file.size for file in self.files)
        if sum(entry.numel * entry.dtype.itemsize for entry in has.values()) > room:
            raise ValueError(f"its tensors have more bytes than its files, {room}")
        for key, entry in has.items():
            if (problem := table.problem_of(entry, num_ranks)) is not None:
                raise ValueError(f"{shown(key)}: {problem}")
        for name in self.tied.values():
            if self.entry(name) is None:
                raise ValueError(f"it ties a name to {shown(name)}, which is no tensor")
        for name, count in self.experts.items():
            stack = has.get(model_key(name))
            if stack is None or stack.shape[:1] != (count,):
                raise ValueError(f"{shown(name)} are not {shown(count)} experts")
        for name, value in self.extra_states.items():
            block = value.get("gate_up_block", 0) if type(value) is dict else 0
            if type(block) is not int or block < 0:
                raise ValueError(f"the order of gate and up in {shown(name)} is no size")
        states = {key for key in has if not key.startswith("model.")}
        saved = self.optimizer
        if saved is not None:
            rows = range(min(len(saved.options), len(saved.described)))
            if not all(row in rows for row in saved.parameters.values()):
                raise ValueError("a parameter with options that are not in the table")
            for options in saved.options:
                if "params" in options:
                    raise ValueError("options with parameters among them")
            for name, row in saved.tensors.items():
                if row not in range(len(saved.states)):
                    raise ValueError(f"states of {shown(name)} that are not in the table")
                for key in saved.states[row]:
                    if state_key(name, key) not in has:
                        raise ValueError(f"the state {shown(key)} of {shown(name)} is no tensor")
                    states.discard(state_key(name, key))
        if states:
            raise ValueError(f"{shown(min(states))} belongs to no parameter of the optimizer")

    @property
    def world_size(self) -> int:
        return len(self.files)

    @property
    def num_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    # ------------------------------------------------------------------ names

    def entry(self, name: str, state: str | None = None) -> tuple[str, Entry, int | None] | None:
        """The key and the entry of a parameter or buffer, or of a state of it. The last value is
        the number of an expert, if the entry holds the experts of all numbers. None: not saved."""
        for one in (name, self.tied.get(name)):
            if one is None:
                continue
            key = model_key(one) if state is None else state_key(one, state)
            if (entry := self.tensors.get(key)) is not None:
                return key, entry, None
            if (stack := self.stack_of(one)) is not None:
                base, number = stack
                if (found := self.entry(base, state)) is not None and found[2] is None:
                    return found[0], found[1], number
        return None

    def stack_of(self, name: str) -> tuple[str, int] | None:
        """(name, number) of an expert that is saved with all others under one name, or None."""
        match = re.fullmatch(r"(.*\D)(\d{1,9})", name, re.DOTALL)
        if match is None:
            return None
        base, number = match[1], int(match[2])
        return (base, number) if number < self.experts.get(self.tied.get(base, base), 0) else None

    def names(self, name: str) -> list[str]:
        """The names under which values of a parameter may be saved."""
        stack, first = self.stack_of(name), self.tied.get(name)
        found = [name, *([stack[0]] if stack else []), *([first] if first else [])]
        if stack and (base := self.tied.get(stack[0])):
            found += [base, f"{base}{stack[1]}"]
        return found

    # ------------------------------------------------------------------ file

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {
            item.name: encode(getattr(self, item.name), item.name)
            for item in dataclasses.fields(self)
            if item.name not in ("files", "tensors", "optimizer")
        }
        body["files"] = [[file.size, file.sha256] for file in self.files]
        body["tensors"] = {
            key: table.to_json(entry, dtype_name(entry.dtype))
            for key, entry in self.tensors.items()
        }
        values = None if self.optimizer is None else vars(self.optimizer)
        body["optimizer"] = encode(values, "the optimizer")
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        data = f'{{"format":"{FORMAT}","sha256":"{digest}","body":{text}}}'.encode()
        check_length(data, NAME)
        return data

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
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, and a checkpoint is a folder{_WEIGHTS}")
    try:
        return read_small(folder / NAME, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise CheckpointError(_nothing_there(folder)) from None


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
    fields = {item.name for item in dataclasses.fields(Manifest)}
    if type(body) is not dict or body.keys() != fields:
        raise ValueError(f"it lacks fields of a manifest, or has others: {shown(body)}")
    values = {name: decode(value, where) for name, value in body.items() if name != "tensors"}
    files = [_typed(entry, [int, str]) for entry in _typed(values["files"], [list, ...])]
    values["files"] = [File(rank_file(r), size, sha) for r, (size, sha) in enumerate(files)]
    values["tensors"] = {
        key: _entry(key, value) for key, value in _typed(body["tensors"], {str: list}).items()
    }
    for name, kind in _TYPES.items():
        _typed(values[name], kind)
    if values["optimizer"] is not None:
        for name, kind in _OPTIMIZER.items():
            _typed(values["optimizer"][name], kind)
        values["optimizer"] = OptimizerValues(**values["optimizer"])
    if "torch" not in values["versions"]:
        raise ValueError("no version of torch")
    return Manifest(**values)


def _entry(key: str, value: list[Any]) -> Entry:
    name, shape, tiles = value
    return Entry(table.shape_from(shape), dtype_of(name, key), table.tiles_from(tiles))


_TYPES: dict[str, Any] = {
    "identity": str,
    "step": (int, type(None)),
    "sequence": int,
    "experts": {str: int},
    "tied": {str: str},
    "extra_states": {str: object},
    "dtypes": {str: str},
    "optimizer": ({str: object}, type(None)),
    "config": ({str: object}, type(None)),
    "placements": [str, ...],
    "facts": {str: object},
    "versions": {str: str},
    "created": str,
}
_OPTIMIZER: dict[str, Any] = {
    "kind": str,
    "options": [{str: object}, ...],
    "described": [{str: str}, ...],
    "parameters": {str: int},
    "states": [[str, ...], ...],
    "tensors": {str: int},
    "scalars": {str: {str: object}},
}


def _typed(value: Any, kind: Any) -> Any:
    """The value if it has the form ``kind``, else a TypeError. ``[int, ...]``: a list of numbers;
    ``[int, str]``: a pair; ``{str: int}``: a dictionary; ``(int, str)``: one of several."""
    if isinstance(kind, tuple):
        for one in kind:
            try:
                return _typed(value, one)
            except TypeError as error:
                last = error
        raise last
    fits = type(value) is kind or kind is object
    if isinstance(kind, dict):
        [(of_keys, of_values)] = kind.items()
        fits = type(value) is dict and all(type(key) is of_keys for key in value)
        for item in value.values() if fits else ():
            _typed(item, of_values)
    elif isinstance(kind, list):
        many = kind[-1] is ...
        fits = type(value) is list and (many or len(value) == len(kind))
        for index, item in enumerate(value if fits else ()):
            _typed(item, kind[0 if many else index])
    if not fits:
        raise TypeError(f"{shown(value)} is no value that shardwise writes there")
    return value


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
