# SPDX-License-Identifier: Apache-2.0
"""Reading: a checkpoint on the disk, and which of its boxes fill which of a rank's.

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
read by 3                rank 0 | 0-1 |  rank 1 | 2-4: two boxes |  rank 2 | 5-6 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shardwise.checkpoint import metadata, random_state
from shardwise.checkpoint.errors import CheckpointError, DamagedError
from shardwise.checkpoint.files import Window, check_bytes, open_listed, read_listed
from shardwise.checkpoint.manifest import METADATA, STATE, Manifest, rank_file
from shardwise.checkpoint.pickles import MAX_BYTES
from shardwise.checkpoint.state import State, check_saved, model_key
from shardwise.checkpoint.tensors import SavedTensor
from shardwise.checkpoint.world import World, share
from shardwise.layout import Shape
from shardwise.tensor import ShardedTensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's manifest, index and values: everything but the tensors."""

    path: Path
    manifest: Manifest
    index: metadata.Index
    values: dict[str, Any]

    @staticmethod
    def open(path: Path, manifest: Manifest | None = None) -> Checkpoint:
        """Read and check what belongs to all ranks. ``compare_bytes`` comes before."""
        manifest = manifest or Manifest.read(path)
        manifest.check_sizes(path)
        data = read_listed(path, manifest.file(METADATA), MAX_BYTES)
        index = metadata.parse(data, str(path / METADATA), manifest.files)
        if len(index) != manifest.num_tensors:
            raise DamagedError(
                f"{path / METADATA}: {len(index)} tensors, {manifest.num_tensors} were saved"
            )
        values = manifest.read_json(path, STATE)
        check_saved(values, str(path / STATE), index.keys())
        return Checkpoint(path, manifest, index, values)

    def rank_values(self, rank: int) -> tuple[random_state.States, dict[str, Any]]:
        """The random states, not yet set, and the ``extra`` of a rank."""
        where = str(self.path / rank_file(rank))
        values = self.manifest.read_json(self.path, rank_file(rank))
        if type(values) is not dict or type(values.get("extra")) is not dict:
            raise DamagedError(f"{where} is not what shardwise writes")
        return random_state.States(values.get("random"), where), values["extra"]

    def read(self, chunks: Iterable[metadata.Chunk]) -> Iterator[tuple[metadata.Chunk, Tensor]]:
        """The tensors of some chunks, file by file, front to back. One is in memory at a time."""
        for chunk, archive in self._archives(chunks):
            yield chunk, archive.read()

    def inspect(self, chunks: Iterable[metadata.Chunk]) -> None:
        """That each of them is a tensor that ``read`` would return; its numbers are not read."""
        for _ in self._archives(chunks):
            pass

    def _archives(
        self, chunks: Iterable[metadata.Chunk]
    ) -> Iterator[tuple[metadata.Chunk, SavedTensor]]:
        by_file: dict[str, list[metadata.Chunk]] = {}
        for chunk in chunks:
            by_file.setdefault(chunk.file, []).append(chunk)
        for name, wanted in sorted(by_file.items()):
            with open_listed(self.path, self.manifest.file(name)) as stream:
                for chunk in sorted(wanted, key=lambda chunk: chunk.begin):
                    window = Window(stream, chunk.begin, chunk.length)
                    where = f"{self.path / name}, byte {chunk.begin}"
                    yield chunk, SavedTensor(window, where, chunk.sizes, chunk.dtype)


def compare_bytes(path: Path, manifest: Manifest, world: World) -> None:
    """Compare the sha256 of this rank's share of the files: the ranks together compare all."""
    sizes = [file.size for file in manifest.files]
    for file in share(manifest.files, sizes, world.rank, world.size):
        check_bytes(path, file)


# ------------------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class _Copy:
    """A part of a saved piece, and the memory it goes to; row by row where rows change places."""

    target: Tensor
    offsets: Shape  # in the saved piece
    lengths: Shape
    rows: tuple[Tensor, Tensor] | None = None  # in the part, in the target

    def stage(self, value: Tensor) -> Callable[[], object]:
        """Take the part out of the saved piece; what is returned puts it in its place."""
        part = _narrow(value, self.offsets, self.lengths)
        if self.rows is None:
            whole = part.numel() == value.numel()
            part = part if whole else part.clone()  # so that the rest of the piece can go
            return lambda: self.target.copy_(part)
        taken, put = self.rows
        device, moved = self.target.device, part.index_select(0, taken)
        return lambda: self.target.index_copy_(0, put.to(device), moved.to(self.target))


class Copies:
    """What fills this rank's pieces of tensors: for every saved piece, where its parts go."""

    def __init__(self, checkpoint: Checkpoint, wanted: State) -> None:
        self._checkpoint, self._wanted = checkpoint, list(wanted.tensors.values())
        self._staged: list[Callable[[], object]] = []
        self.chunks: dict[metadata.Chunk, list[_Copy]] = {}
        tied, orders = checkpoint.values["tied"], checkpoint.values["extra_states"]
        for key, tensor in wanted.tensors.items():
            name = key.removeprefix("model.")
            source = model_key(tied[name]) if key.startswith("model.") and name in tied else key
            stack = wanted.members.get(key)
            for box in _boxes(tensor):
                place = tuple(box.offsets), tuple(box.sizes), _box_of(tensor, box)
                if stack is None:
                    self._fill(source, *place, None)
                    continue
                parts = stack.split(*place)
                for one, offsets, sizes, target in parts if box.sizes else parts[:1]:
                    num_rows = checkpoint.index[one].shape[0] if sizes else 0
                    rows = stack.stored_rows(num_rows, orders) if sizes else None
                    self._fill(one, offsets, sizes, target, rows)

    def _fill(
        self, key: str, offsets: Shape, sizes: Shape, target: Tensor, rows: Tensor | None
    ) -> None:
        """Find what fills a box of a saved tensor, whose rows may stand elsewhere in it."""
        entry = self._checkpoint.index[key]
        found = (
            _overlaps(entry, offsets, sizes, target)
            if rows is None
            else _scattered(entry, offsets, sizes, target, rows)
        )
        read = 0
        for chunk, copy in found:
            self.chunks.setdefault(chunk, []).append(copy)
            lengths = copy.lengths if copy.rows is None else (len(copy.rows[0]), *copy.lengths[1:])
            read += math.prod(lengths)
        if read != math.prod(sizes):
            raise CheckpointError(
                f"{read} of {math.prod(sizes)} elements of '{key}' would be read: this is a bug"
            )

    def stage(self) -> None:
        """Read all of it into host memory; nothing is written yet."""
        self._staged = [
            copy.stage(value)
            for chunk, value in self._checkpoint.read(self.chunks)
            for copy in self.chunks[chunk]
        ]

    @torch.no_grad()
    def write(self) -> None:
        """Put what was read into the tensors. No file is touched: nothing can be missing."""
        for tensor in self._wanted:
            _mark_written(tensor)
        while self._staged:
            self._staged.pop()()


def read_whole(checkpoint: Checkpoint, key: str) -> Tensor:
    """One tensor, whole, in host memory."""
    entry = checkpoint.index[key]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    copies = Copies(checkpoint, State(tensors={key: whole}))
    copies.stage()
    copies.write()
    return whole


def _boxes(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """This rank's boxes."""
    if isinstance(tensor, ShardedTensor):
        return [ChunkStorageMetadata(*box) for box in tensor.cut.boxes if box[1].numel()]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        return [chunk for chunk in chunks if chunk.sizes.numel()]
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]


def _mark_written(tensor: Tensor) -> None:
    """Count a write, on every rank: also on one that holds nothing of the tensor."""
    if isinstance(tensor, ShardedTensor) and tensor.version is not None:
        tensor.version.write()


def _overlaps(
    entry: metadata.Entry, offsets: Shape, sizes: Shape, target: Tensor
) -> Iterator[tuple[metadata.Chunk, _Copy]]:
    """What to copy from where: DCP's resharding arithmetic."""
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in entry.chunks
    ]
    saved = TensorStorageMetadata(
        TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks
    )
    box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    for item in create_read_items_for_chunk_list("", saved, [box]):
        assert item.storage_index.index is not None
        chunk = entry.chunks[item.storage_index.index]
        part = _narrow(target, item.dest_offsets, item.lengths)
        yield chunk, _Copy(part, tuple(item.storage_offsets), tuple(item.lengths))


def _scattered(
    entry: metadata.Entry, offsets: Shape, sizes: Shape, target: Tensor, rows: Tensor
) -> Iterator[tuple[metadata.Chunk, _Copy]]:
    """The same where row ``i`` of the whole tensor is saved as row ``rows[i]``."""
    wanted = rows[offsets[0] : offsets[0] + sizes[0]]
    for chunk in entry.chunks:
        first, count = chunk.offsets[0], chunk.sizes[0]
        put = ((wanted >= first) & (wanted < first + count)).nonzero().flatten()
        low = [max(pair) for pair in zip(offsets[1:], chunk.offsets[1:], strict=True)]
        ends = zip(offsets[1:], sizes[1:], chunk.offsets[1:], chunk.sizes[1:], strict=True)
        high = [min(a + length_a, b + length_b) for a, length_a, b, length_b in ends]
        lengths = [end - begin for begin, end in zip(low, high, strict=True)]
        if len(put) and all(length > 0 for length in lengths):
            here = [begin - offset for begin, offset in zip(low, offsets[1:], strict=True)]
            there = [begin - offset for begin, offset in zip(low, chunk.offsets[1:], strict=True)]
            part = _narrow(target, (0, *here), (sizes[0], *lengths))
            moved = wanted[put] - first, put
            yield chunk, _Copy(part, (0, *there), (count, *lengths), moved)


def _box_of(tensor: Tensor, box: ChunkStorageMetadata) -> Tensor:
    if isinstance(tensor, DTensor):
        index = MetadataIndex("", box.offsets)
        view: Tensor = tensor.__get_tensor_shard__(index)
        return view.detach()
    return tensor.detach()


def _narrow(tensor: Tensor, offsets: Shape, lengths: Shape) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
