# SPDX-License-Identifier: Apache-2.0
"""Reading: a checkpoint on the disk, checked, and the saved boxes that fill the boxes of a rank.

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
read by 3                rank 0 | 0-1 |  rank 1 | 2-4: two boxes |  rank 2 | 5-6 |
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, DamagedError
from shardwise.checkpoint.files import check_bytes, open_listed, read_listed
from shardwise.checkpoint.index import MAX_BYTES, Chunk, Index, parse
from shardwise.checkpoint.manifest import INDEX, NAME, STATE, Manifest, rank_file
from shardwise.checkpoint.pieces import Piece, local_pieces
from shardwise.checkpoint.state import State, check_json_state, model_key, state_key
from shardwise.checkpoint.values import RandomStates
from shardwise.core.tensor import ShardedTensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's manifest, index and values: everything but the tensors."""

    path: Path
    manifest: Manifest
    index: Index
    values: dict[str, Any]

    @staticmethod
    def open(path: Path, manifest: Manifest) -> Checkpoint:
        """Read and check all but tensors and values of a rank. Call ``compare_bytes`` before."""
        manifest.check_sizes(path)
        data = read_listed(path, manifest.file(INDEX), MAX_BYTES)
        index = parse(data, str(path / INDEX), manifest.files)
        if len(index) != manifest.num_tensors:
            raise DamagedError(
                f"{path / INDEX}: {len(index)} tensors, {manifest.num_tensors} were saved"
            )
        values = manifest.read_json(path, STATE)
        check_json_state(values, str(path / STATE), index.keys())
        return Checkpoint(path, manifest, index, values)

    def untie(self, keys: Container[str]) -> None:
        """Undo the ties of parameters whose keys are in ``keys``: give each name the tensor, the
        optimizer's states and the group that were saved under the first name. The model that loads
        may tie other parameters than the model that was saved."""
        optimizer = self.values["optimizer"] or {"tensors": {}, "scalars": {}, "groups": []}
        groups = {name: group for group in optimizer["groups"] for name in group["parameters"]}
        tied = self.values["tied"].items()
        for name, first in ((name, first) for name, first in tied if model_key(name) in keys):
            self.index[model_key(name)] = self.index[model_key(first)]
            for key in optimizer["tensors"].get(first, ()):
                self.index[state_key(name, key)] = self.index[state_key(first, key)]
            for states in (optimizer["tensors"], optimizer["scalars"]):
                states |= {name: states[first]} if first in states else {}
            if first in groups:
                groups[first]["parameters"].append(name)

    def rank_values(self, rank: int) -> tuple[RandomStates, dict[str, Any]]:
        """The random states, not yet set, and the ``extra`` of a rank."""
        where = str(self.path / rank_file(rank))
        values = self.manifest.read_json(self.path, rank_file(rank))
        if type(values) is not dict or type(values.get("extra")) is not dict:
            raise DamagedError(f"{where} is not what shardwise writes")
        return RandomStates(values.get("random"), where), values["extra"]

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Tensor]]:
        """Read chunks, file by file, front to back; a single tensor is in memory at a time."""
        ordered = sorted(chunks, key=lambda chunk: (chunk.rank, chunk.begin))
        for name, wanted in groupby(ordered, key=lambda chunk: chunk.file):
            with open_listed(self.path, self.manifest.file(name)) as stream:
                for chunk in wanted:
                    flat = torch.empty(chunk.num_bytes, dtype=torch.uint8, device="cpu")
                    stream.seek(chunk.begin)
                    count = stream.readinto(flat.numpy())  # type: ignore[arg-type]
                    if count != chunk.num_bytes:
                        raise DamagedError(f"{self.path / name} has become shorter")
                    yield chunk, flat.view(chunk.dtype).view(chunk.sizes)

    def read_whole(self, key: str) -> Tensor:
        """A whole tensor in host memory."""
        entry = self.index[key]
        whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        copies = Copies(self, State(tensors={key: whole}))
        copies.stage()
        copies.write()
        return whole


def compare_bytes(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check the sha256 of this rank's share of the files; all ranks together check every file."""
    load = [(0, other) for other in range(world_size)]  # a heap: the least loaded rank first
    for file in sorted(manifest.files, key=lambda file: -file.size):
        size, reader = load[0]
        heapq.heapreplace(load, (size + file.size + 1, reader))
        if reader == rank:
            check_bytes(path, file)


# ------------------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class _Copy:
    """A part of a saved chunk and the memory that it fills; by rows if their order differs."""

    target: Tensor
    part: tuple[slice, ...]  # of the saved chunk
    rows: tuple[Tensor, Tensor] | None = None  # indices in the part, and in the target

    @property
    def num_elements(self) -> int:
        if self.rows is None:
            return self.target.numel()
        return len(self.rows[1]) * (self.target.numel() // len(self.target))

    def stage(self, value: Tensor) -> Callable[[], object]:
        """Take the part out of the saved chunk; return the function that writes it."""
        part = value[self.part]
        if self.rows is None:
            if part.numel() != value.numel():
                part = part.clone()  # the rest of the chunk can be freed
            return lambda: self.target.copy_(part)
        source, destination = self.rows
        device, rows = self.target.device, part.index_select(0, source)
        return lambda: self.target.index_copy_(0, destination.to(device), rows.to(self.target))


class Copies:
    """All copies that fill this rank's pieces of tensors, by saved chunk."""

    def __init__(self, checkpoint: Checkpoint, wanted: State) -> None:
        self._checkpoint, self._wanted = checkpoint, list(wanted.tensors.values())
        self._staged: list[Callable[[], object]] = []
        self.chunks: dict[Chunk, list[_Copy]] = {}
        orders = checkpoint.values["extra_states"]
        for key, tensor in wanted.tensors.items():
            stack = wanted.members.get(key)
            for piece in local_pieces(key, tensor):
                if stack is None:
                    self._fill(piece, None)
                    continue
                parts = stack.pieces(piece)
                if not piece.data.dim():
                    parts = parts[:1]  # the step count is the same for all experts
                for part in parts:
                    shape = checkpoint.index[part.key].shape
                    self._fill(part, stack.stored_rows(shape[0], orders) if shape else None)

    def _fill(self, piece: Piece, rows: Tensor | None) -> None:
        """Add the copies that fill a piece. ``rows``: see ``_overlap``."""
        num_elements = 0
        for chunk in self._checkpoint.index[piece.key].chunks:
            copy = _overlap(chunk, piece, rows)
            if copy is not None:
                self.chunks.setdefault(chunk, []).append(copy)
                num_elements += copy.num_elements
        assert num_elements == piece.data.numel(), piece.key

    def stage(self) -> None:
        """Read all chunks into host memory; write nothing."""
        self._staged = [
            copy.stage(value)
            for chunk, value in self._checkpoint.read(self.chunks)
            for copy in self.chunks[chunk]
        ]

    @torch.no_grad()
    def write(self) -> None:
        """Write the staged values into the tensors. This reads no file, so it can't fail on one."""
        for tensor in self._wanted:
            if isinstance(tensor, ShardedTensor) and tensor.buffer is not None:
                tensor.buffer.wrote()  # on every rank, also if it stores nothing of the tensor
        while self._staged:
            self._staged.pop()()


def _overlap(chunk: Chunk, piece: Piece, rows: Tensor | None) -> _Copy | None:
    """The copy from a chunk to the piece, or None if they have no element in common.

    With ``rows``, row i of the tensor is saved as row ``rows[i]``.
    """
    sizes = piece.data.shape
    low = [max(pair) for pair in zip(piece.offsets, chunk.offsets, strict=True)]
    ends = zip(piece.offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
    high = [min(a + size_a, b + size_b) for a, size_a, b, size_b in ends]
    source = _slices(low, high, chunk.offsets)
    target = _slices(low, high, piece.offsets)
    indices = None
    if rows is not None:
        chunk_rows = rows[piece.offsets[0] : piece.offsets[0] + sizes[0]] - chunk.offsets[0]
        inside = (chunk_rows >= 0) & (chunk_rows < chunk.sizes[0])
        piece_rows = inside.nonzero().flatten()
        indices = chunk_rows[piece_rows], piece_rows
        low[0], high[0] = 0, len(piece_rows)
        source = (slice(None), *source[1:])
        target = (slice(None), *target[1:])
    if any(begin >= end for begin, end in zip(low, high, strict=True)):
        return None
    return _Copy(piece.data[target], source, indices)


def _slices(low: list[int], high: list[int], offsets: Iterable[int]) -> tuple[slice, ...]:
    bounds = zip(low, high, offsets, strict=True)
    return tuple(slice(begin - offset, end - offset) for begin, end, offset in bounds)


# ------------------------------------------------------------------------------ load


@dataclass
class Verification:
    """The result of ``verify``; ``problems`` is empty for a sound checkpoint."""

    path: Path
    manifest: Manifest | None = None
    num_tensors: int = 0
    num_elements: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

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
            torch_version = saved.versions["torch"]
            lines += [
                f"  {step}{saved.created}, {saved.world_size} ranks, torch {torch_version}",
                f"  {self.num_tensors} tensors, {self.num_elements} elements, "
                f"{len(saved.files)} files, {saved.num_bytes} bytes",
                *(f"  {text}" for text in saved.placements),
            ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def verify(path: str | os.PathLike[str]) -> Verification:
    """Check a checkpoint as ``load`` does, for all ranks, without a model or a process group.

    A load refuses everything that this reports. Checks sizes and every sha256. If all bytes are as
    written, checks the index, the optimizer's groups, and random states and extra of each rank.
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
    listed = {file.name for file in report.manifest.files} | {NAME}
    for entry in sorted(report.path.iterdir()):
        if entry.name not in listed:
            report.problems.append(f"{entry} is not in the manifest")
    if not as_written:
        return report
    with report.collecting():
        checkpoint = Checkpoint.open(report.path, report.manifest)
        entries = checkpoint.index.values()
        report.num_tensors = len(entries)
        report.num_elements = sum(math.prod(entry.shape) for entry in entries)
        for rank in range(report.manifest.world_size):
            with report.collecting():
                checkpoint.rank_values(rank)
    return report
