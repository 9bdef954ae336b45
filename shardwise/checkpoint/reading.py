# SPDX-License-Identifier: Apache-2.0
"""Reading: the saved pieces that fill the boxes of a rank, and ``verify``.

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
read by 3                rank 0 | 0-1 |  rank 1 | 2-4: from both |  rank 2 | 5-6 |
"""

from __future__ import annotations

import contextlib
import heapq
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.attempt import MARK
from shardwise.checkpoint.errors import CheckpointError, DamagedError
from shardwise.checkpoint.files import (
    Stored,
    check_bytes,
    check_size,
    form,
    open_listed,
    rank_file,
    read_header,
)
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.pieces import Piece
from shardwise.checkpoint.table import Entry, Saved
from shardwise.checkpoint.values import RandomStates, from_bytes
from shardwise.core.layout import Box, Shape

VALUES = "values"  # metadata of a rank's file: its random states and extra, as JSON


class Sizes(NamedTuple):
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to read from. Call ``compare_bytes`` before."""

    path: Path
    manifest: Manifest
    _headers: dict[int, tuple[dict[str, Stored], Any]] = field(default_factory=dict)

    def sizes(self, name: str, state: str | None = None) -> Sizes | None:
        """Shape and dtype of a saved parameter or state, of a single expert if ``name`` is one."""
        found = self.manifest.entry(name, state)
        if found is None:
            return None
        _, entry, number = found
        return Sizes(entry.shape if number is None else entry.shape[1:], entry.dtype)

    def rank_values(self, rank: int) -> tuple[RandomStates, dict[str, Any]]:
        """The random states, not yet set, and the ``extra`` of a rank."""
        where = str(self.path / rank_file(rank))
        with self.opened(rank) as (_, _, metadata):
            if type(metadata) is not dict or type(text := metadata.get(VALUES)) is not str:
                raise DamagedError(f"{where} holds no values of its rank")
        values = from_bytes(text.encode(), where)
        if type(values) is not dict or type(values.get("extra")) is not dict:
            raise DamagedError(f"{where} holds values that shardwise does not write")
        return RandomStates(values.get("random"), where), values["extra"]

    def read_whole(self, name: str) -> Tensor:
        """A whole parameter or buffer in host memory."""
        return self.read_all([name])[0]

    def read_all(self, names: Iterable[str], state: str | None = None) -> list[Tensor]:
        """Parameters or states of them, whole, in host memory."""
        copies, found = Copies(self), []
        for name in names:
            sizes = self.sizes(name, state)
            assert sizes is not None, name
            found.append(torch.empty(sizes.shape, dtype=sizes.dtype, device="cpu"))
            copies.add(Piece(name, state, sizes.shape, (0,) * len(sizes.shape), found[-1]))
        copies.stage()
        copies.write()
        return found

    @contextlib.contextmanager
    def opened(self, rank: int) -> Iterator[tuple[io.BufferedReader, dict[str, Stored], Any]]:
        """The file of a rank, its tensors and its metadata. The last header is kept."""
        file = self.manifest.files[rank]
        with open_listed(self.path, file) as stream:
            if rank not in self._headers:
                self._headers.clear()
                self._headers[rank] = read_header(stream, file, str(self.path / file.name))
            yield stream, *self._headers[rank]

    def read(self, wanted: Iterable[_Copy]) -> Iterator[tuple[_Copy, Tensor]]:
        """Read file by file, front to back; a single part is in memory at a time."""
        ordered = sorted(wanted, key=lambda copy: (copy.rank, copy.name, copy.begin))
        for rank, copies in groupby(ordered, key=lambda copy: copy.rank):
            with self.opened(rank) as (stream, header, _):
                for copy in copies:
                    begin = self.begin(header, rank, copy.name, copy.dtype, copy.of_piece)
                    count = math.prod(copy.shape) * copy.dtype.itemsize
                    flat = torch.empty(count, dtype=torch.uint8, device="cpu")
                    stream.seek(begin + copy.begin * copy.dtype.itemsize)
                    if stream.readinto(flat.numpy()) != count:  # type: ignore[arg-type]
                        raise DamagedError(f"{self.path / rank_file(rank)} has become shorter")
                    yield copy, flat.view(copy.dtype).view(copy.shape)

    def begin(
        self, header: dict[str, Stored], rank: int, name: str, dtype: torch.dtype, numel: int
    ) -> int:
        """The offset of a piece in the file of a rank, which must hold just this piece."""
        stored, where = header.get(name), self.path / rank_file(rank)
        if stored is None:
            raise DamagedError(f"{where} does not hold '{name}', which the manifest names")
        label, _ = form(dtype, ())
        if stored.dtype != label or stored.end - stored.begin != numel * dtype.itemsize:
            raise DamagedError(f"{where}: '{name}' is not {numel} elements of {dtype}")
        return stored.begin


def compare_bytes(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check the sha256 of this rank's share of the files; all ranks together check every file."""
    load = [(0, other) for other in range(world_size)]  # a heap: the least loaded rank first
    mine = []
    for file in sorted(manifest.files, key=lambda file: -file.size):
        size, reader = load[0]
        heapq.heapreplace(load, (size + file.size + 1, reader))
        mine += [file] if reader == rank else []
    for file in mine:  # a missing file is named before the others are read
        check_size(path, file)
    for file in mine:
        check_bytes(path, file)


# ------------------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class _Copy:
    """A box of a saved piece and the memory that it fills; by rows if their order differs."""

    rank: int  # the piece is in the file of this rank
    name: str  # of the piece in that file
    of_piece: int  # elements of the piece
    dtype: torch.dtype
    begin: int  # the first element of the box in the piece
    shape: Shape  # of the box
    part: tuple[slice, ...]  # of the box
    target: Tensor
    rows: tuple[Tensor, Tensor] | None = None  # indices in the box, and in the target

    @property
    def num_elements(self) -> int:
        if self.rows is None:
            return self.target.numel()
        return len(self.rows[1]) * (self.target.numel() // len(self.target))

    def stage(self, value: Tensor) -> Callable[[], object]:
        """Take the part out of the box; return the function that writes it."""
        part = value[self.part]
        if self.rows is None:
            if part.numel() != value.numel():
                part = part.clone()  # the rest of the box can be freed
            return lambda: self.target.copy_(part)
        source, destination = self.rows
        device, rows = self.target.device, part.index_select(0, source)
        return lambda: self.target.index_copy_(0, destination.to(device), rows.to(self.target))


class Copies:
    """The copies that fill pieces of live tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._copies: list[_Copy] = []
        self._staged: list[Callable[[], object]] = []

    def add(self, piece: Piece, rows: Tensor | None = None) -> list[Saved]:
        """Add the copies that fill a piece; return the saved pieces that they come from. With
        ``rows``, row i of the tensor is saved as row ``rows[i]``."""
        found = self._checkpoint.manifest.entry(piece.name, piece.state)
        assert found is not None, piece
        key, entry, number = found
        expert = () if number is None else (number,)  # of a tensor of all experts
        begins, sizes = list(piece.offsets), list(piece.data.shape)
        if rows is not None:
            begins[0], sizes[0] = 0, piece.shape[0]
        copies, sources = [], []
        for tile in entry.tiles:
            for saved in tile.overlap((*expert, *begins), (*(1 for _ in expert), *sizes)):
                sources.append(saved)
                name = entry.piece_name(key, tile, saved)
                for box, first in tile.boxes(saved):
                    if number is not None:
                        (before, *offsets), (count, *sides) = box
                        if not before <= number < before + count:
                            continue
                        first += (number - before) * math.prod(sides)
                        box = tuple(offsets), tuple(sides)
                    copy = _overlap(entry.dtype, saved, name, box, first, piece, rows)
                    copies += [] if copy is None else [copy]
        assert sum(copy.num_elements for copy in copies) == piece.data.numel(), piece
        self._copies += copies
        return sources

    def stage(self) -> None:
        """Read everything into host memory; write nothing."""
        self._staged = [copy.stage(value) for copy, value in self._checkpoint.read(self._copies)]

    @torch.no_grad()
    def write(self) -> None:
        """Write the staged values. This reads no file, so it can't fail on one."""
        while self._staged:
            self._staged.pop()()


def _overlap(
    dtype: torch.dtype,
    saved: Saved,
    name: str,
    box: Box,
    first: int,
    piece: Piece,
    rows: Tensor | None,
) -> _Copy | None:
    """The copy from a box of a saved piece, or None if it has no element of the wanted piece.
    ``first``: the first element of the box in the saved piece. ``rows``: see ``Copies.add``."""
    begins, sides = box
    low = [max(pair) for pair in zip(piece.offsets, begins, strict=True)]
    ends = zip(piece.offsets, piece.data.shape, begins, sides, strict=True)
    high = [min(a + size_a, b + size_b) for a, size_a, b, size_b in ends]
    target = _slices(low, high, piece.offsets)
    indices = None
    if rows is not None:
        mine = slice(piece.offsets[0], piece.offsets[0] + len(piece.data))
        in_box = rows[mine] - begins[0]
        of_target = ((in_box >= 0) & (in_box < sides[0])).nonzero().flatten()
        indices = in_box[of_target], of_target
        low[0], high[0] = begins[0], begins[0] + (sides[0] if len(of_target) else 0)
        target = (slice(None), *target[1:])
    if any(begin >= end for begin, end in zip(low, high, strict=True)):
        return None
    if sides:  # read the rows that are needed; they are neighbours in the file
        first += (low[0] - begins[0]) * math.prod(sides[1:])
        begins, sides = (low[0], *begins[1:]), (high[0] - low[0], *sides[1:])
    return _Copy(
        rank=saved.rank,
        name=name,
        of_piece=saved.high - saved.low,
        dtype=dtype,
        begin=first,
        shape=sides,
        part=_slices(low, high, begins),
        target=piece.data[target],
        rows=indices,
    )


def _slices(low: list[int], high: list[int], offsets: Iterable[int]) -> tuple[slice, ...]:
    bounds = zip(low, high, offsets, strict=True)
    return tuple(slice(begin - offset, end - offset) for begin, end, offset in bounds)


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

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Turn an error into one of the problems."""
        try:
            yield
        except CheckpointError as error:
            self.problems.append(str(error))

    def __str__(self) -> str:
        lines = [f"{self.path}: {'sound' if self.ok else 'NOT SOUND'}"]
        if self.manifest is not None:
            saved = self.manifest
            step = "" if saved.step is None else f"step {saved.step}, "
            num_elements = sum(entry.numel for entry in saved.tensors.values())
            torch_version = saved.versions["torch"]
            lines += [
                f"  {step}{saved.created}, {saved.world_size} ranks, torch {torch_version}",
                f"  {self.num_tensors} tensors, {num_elements} elements, "
                f"{len(saved.files)} files, {saved.num_bytes} bytes",
                *(f"  {text}" for text in saved.placements),
            ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def verify(path: str | os.PathLike[str]) -> Verification:
    """Check a checkpoint as ``load`` does, for all ranks, without a model or a process group.

    Checks the manifest, sizes and every sha256. If all bytes are as written, checks that every
    piece of every tensor is where the manifest says, and random states and extra of each rank.
    """
    report = Verification(Path(os.path.abspath(path)))
    with report.collecting():
        report.manifest = Manifest.read(report.path)
    if report.manifest is None:
        return report
    for file in report.manifest.files:
        with report.collecting():
            check_bytes(report.path, file)
    as_written = report.ok
    listed = {file.name for file in report.manifest.files} | {NAME, MARK}
    for entry in sorted(report.path.iterdir()):
        if entry.name not in listed:
            report.problems.append(f"{entry} is not in the manifest")
    if as_written:
        checkpoint = Checkpoint(report.path, report.manifest)
        by_rank: dict[int, list[tuple[str, Entry, Saved]]] = {}
        for key, saved_as in report.manifest.tensors.items():
            for tile in saved_as.tiles:
                for saved in tile.pieces(0, tile.numel):
                    name = saved_as.piece_name(key, tile, saved)
                    by_rank.setdefault(saved.rank, []).append((name, saved_as, saved))
        for rank in range(report.manifest.world_size):
            with report.collecting():
                checkpoint.rank_values(rank)
                with checkpoint.opened(rank) as (_, header, _):
                    for name, saved_as, saved in by_rank.get(rank, ()):
                        count = saved.high - saved.low
                        checkpoint.begin(header, rank, name, saved_as.dtype, count)
    return report
