# SPDX-License-Identifier: Apache-2.0
"""Reading: the saved pieces that fill the boxes of a rank, and ``verify``.

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
read by 3                rank 0 | 0-1 |  rank 1 | 2-4: from both |  rank 2 | 5-6 |
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.attempt import MARK
from shardwise.checkpoint.errors import CheckpointError, DamagedError
from shardwise.checkpoint.files import (
    Header,
    check_bytes,
    form,
    open_listed,
    rank_file,
    read_header,
)
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.pieces import Key, Part
from shardwise.checkpoint.values import check_random, from_bytes
from shardwise.core.layout import Shape

VALUES = "values"  # metadata of a rank's file: its random states, its extra, as JSON


def compare_bytes(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check the sha256 of this rank's share of the files; all ranks together check every file."""
    for file in sorted(manifest.files, key=lambda file: -file.size)[rank::world_size]:
        check_bytes(path, file)


@dataclass(frozen=True)
class _Copy:
    """A part of a saved tensor, and the memory that it fills; None: it is only looked up."""

    part: Part
    dtype: torch.dtype
    offsets: Shape  # of the target in the tensor
    target: Tensor | None


class Reader:
    """Fills boxes of tensors from the files of a checkpoint. Call ``compare_bytes`` before."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._copies: list[_Copy] = []

    def add(self, key: Key, offsets: Shape, target: Tensor) -> None:
        """Plan to fill ``target`` with the box of a saved tensor that begins at ``offsets``."""
        entry = self.manifest.tensors[key]
        for part in entry.parts(key, offsets, tuple(target.shape)):
            self._copies.append(_Copy(part, entry.dtype, offsets, target))

    def look_up(self, key: Key) -> None:
        """Plan to look for all pieces of a tensor where the manifest says, without reading them."""
        entry = self.manifest.tensors[key]
        for part in entry.parts(key, (0,) * len(entry.shape), entry.shape):
            self._copies.append(_Copy(part, entry.dtype, (), None))

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """(values in host memory, target of the same shape) for all that was planned. Reads file by
        file, front to back; nothing is written to a target."""
        found: list[tuple[Tensor, Tensor]] = []
        ordered = sorted(self._copies, key=lambda copy: copy.part[:4])
        self._copies = []
        for rank, copies in groupby(ordered, key=lambda copy: copy.part.rank):
            with self.opened(rank) as (stream, header, _):
                for copy in copies:
                    found += self._read(stream, header, copy)
        return found

    def _read(
        self, stream: io.BufferedReader, header: Header, copy: _Copy
    ) -> list[tuple[Tensor, Tensor]]:
        part, dtype, target = copy.part, copy.dtype, copy.target
        label, begin, end = header.get(part.name, (None, 0, 0))
        if label != form(dtype)[0] or end - begin != part.numel * dtype.itemsize:
            where = self.path / rank_file(part.rank)
            raise DamagedError(f"{where} does not hold '{part.name}': {part.numel} of {dtype}")
        if target is None:
            return []
        low = tuple(map(max, copy.offsets, part.offsets))
        high = tuple(map(min, _ends(copy.offsets, target.shape), _ends(part.offsets, part.sizes)))
        if any(first >= last for first, last in zip(low, high, strict=True)):
            return []
        offsets, sizes, first = [*part.offsets], [*part.sizes], part.first
        for dim, size in enumerate(part.sizes):
            if size > 1:  # read the rows that are needed: they are neighbours in the file
                first += (low[dim] - offsets[dim]) * math.prod(part.sizes[dim + 1 :])
                offsets[dim], sizes[dim] = low[dim], high[dim] - low[dim]
                break
        data = torch.empty(math.prod(sizes) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        stream.seek(begin + first * dtype.itemsize)
        if stream.readinto(data.numpy()) != data.numel():  # type: ignore[arg-type]
            raise DamagedError(f"{self.path / rank_file(part.rank)} has become shorter")
        values = data.view(dtype).view(sizes)[_slices(low, high, offsets)]
        if values.numel() < math.prod(sizes):
            values = values.clone()  # the rest of the box can be freed
        return [(values, target[_slices(low, high, copy.offsets)])]

    @contextlib.contextmanager
    def opened(self, rank: int) -> Iterator[tuple[io.BufferedReader, Header, Any]]:
        """The file of a rank, its tensors and its metadata."""
        file = self.manifest.files[rank]
        with open_listed(self.path, file) as stream:
            yield stream, *read_header(stream, file, str(self.path / file.name))

    def rank_values(self, rank: int) -> dict[str, Any]:
        """The checked ``random`` states, the ``extra`` and the digest of ``pieces`` of a rank."""
        where = str(self.path / rank_file(rank))
        with self.opened(rank) as (_, _, metadata):
            text = metadata.get(VALUES) if type(metadata) is dict else None
        values = from_bytes(text.encode(), where) if type(text) is str else None
        if type(values) is not dict or type(values.get("extra")) is not dict:
            raise DamagedError(f"{where} holds no values of its rank")
        check_random(values.get("random"), where)
        return values


def _ends(offsets: Shape, sizes: Shape) -> tuple[int, ...]:
    return tuple(map(sum, zip(offsets, sizes, strict=True)))


def _slices(low: Shape, high: Shape, offsets: Any) -> tuple[slice, ...]:
    bounds = zip(low, high, offsets, strict=True)
    return tuple(slice(begin - offset, end - offset) for begin, end, offset in bounds)


@torch.no_grad()
def write(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Write values to their targets, and free them. This reads no file, so it can't fail on one."""
    while copies:
        values, target = copies.pop()
        target.copy_(values)


# ------------------------------------------------------------------------------ verify


@dataclass
class Verification:
    """The result of ``verify``; ``problems`` is empty for a sound checkpoint."""

    path: Path
    manifest: Manifest | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def num_tensors(self) -> int:
        return 0 if self.manifest is None else self.manifest.num_tensors

    def __str__(self) -> str:
        lines = [f"{self.path}: {'sound' if self.ok else 'NOT SOUND'}"]
        if (saved := self.manifest) is not None:
            step = "" if saved.step is None else f"step {saved.step}, "
            lines += [
                f"  {step}{saved.created}, {saved.world_size} ranks, {self.num_tensors} tensors, "
                f"{saved.num_bytes} bytes, torch {saved.versions['torch']}",
                *(f"  {text}" for text in saved.placements),
            ]
        return "\n".join([*lines, *(f"  problem: {problem}" for problem in self.problems)])


def verify(path: str | os.PathLike[str]) -> Verification:
    """Check a checkpoint as ``load`` does, for all ranks, without a model or a process group.

    Checks the manifest, sizes and every sha256. If all bytes are as written, checks that every
    piece of every tensor is where the manifest says, and random states and extra of each rank.
    """
    report = Verification(Path(os.path.abspath(path)))
    folder, problems = report.path, report.problems

    def collect(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except CheckpointError as error:
            problems.append(str(error))

    report.manifest = manifest = collect(Manifest.read, folder)
    if manifest is None:
        return report
    for file in manifest.files:
        collect(check_bytes, folder, file)
    if report.ok:
        reader = Reader(folder, manifest)
        for rank in range(manifest.world_size):
            collect(reader.rank_values, rank)
        for key in manifest.tensors:
            reader.look_up(key)
        collect(reader.read)
    listed = {file.name for file in manifest.files} | {NAME, MARK}
    others = sorted(entry for entry in folder.iterdir() if entry.name not in listed)
    problems += [f"{entry} is not in the manifest" for entry in others]
    return report
