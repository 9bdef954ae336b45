# SPDX-License-Identifier: Apache-2.0
"""Reading: a checkpoint on the disk, and which of its boxes fill which of a rank's.

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
read by 3                rank 0 | 0-1 |  rank 1 | 2-4: two boxes |  rank 2 | 5-6 |
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

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

from shardwise.checkpoint import metadata
from shardwise.checkpoint.errors import CheckpointError, DamagedError, UnsafeError
from shardwise.checkpoint.files import Window, open_listed, read_listed
from shardwise.checkpoint.manifest import METADATA, STATE, Manifest
from shardwise.checkpoint.state import State, model_key
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
    def open(path: Path) -> Checkpoint:
        manifest = Manifest.read(path)
        manifest.check_sizes(path)
        data = read_listed(path, manifest.file(METADATA))
        index = metadata.parse(data, str(path / METADATA), manifest.files)
        values = manifest.read_json(path, STATE)
        if not isinstance(values, dict) or not {"tied", "extra_states", "optimizer"} <= set(values):
            raise DamagedError(f"{path / STATE} is not what shardwise writes")
        return Checkpoint(path, manifest, index, values)

    def read(self, chunks: Iterable[metadata.Chunk]) -> Iterator[tuple[metadata.Chunk, Tensor]]:
        """The tensors of some chunks, file by file, front to back. One is in memory at a time."""
        by_file: dict[str, list[metadata.Chunk]] = {}
        for chunk in chunks:
            by_file.setdefault(chunk.file, []).append(chunk)
        for name, wanted in sorted(by_file.items()):
            file = self.manifest.file(name)
            with open_listed(self.path, file) as stream:
                for chunk in sorted(wanted, key=lambda chunk: chunk.begin):
                    yield chunk, _read_tensor(stream, self.path / name, chunk)

    def inspect(self, chunks: Iterable[metadata.Chunk]) -> None:
        """That each of them is a tensor of the right shape; its numbers are not read."""
        with torch.serialization.skip_data():
            for _ in self.read(chunks):
                pass


def _read_tensor(stream: Any, where: Path, chunk: metadata.Chunk) -> Tensor:
    window = Window(stream, chunk.begin, chunk.length)
    try:
        value = torch.load(cast(IO[bytes], window), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise UnsafeError(
            f"{where} holds something else than a tensor at byte {chunk.begin}, which loading "
            f"could run: {reason}"
        ) from error
    except Exception as error:  # torch's reader of broken bytes may raise anything
        raise DamagedError(f"{where}: no tensor at byte {chunk.begin}: {error!r:.200}") from error
    found = type(value).__name__
    if type(value) is Tensor:
        if value.dtype == chunk.dtype and tuple(value.shape) == chunk.sizes:
            return value
        found = f"{value.dtype} {list(value.shape)}"
    raise DamagedError(
        f"{where}: {found} at byte {chunk.begin}, where the index promises {chunk.dtype} "
        f"{list(chunk.sizes)}"
    )


# ------------------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class _Copy:
    """A part of a saved piece, and the memory it goes to; row by row where rows change places."""

    target: Tensor
    offsets: Shape  # in the saved piece
    lengths: Shape
    rows: tuple[Tensor, Tensor] | None = None  # in the part, in the target

    def run(self, value: Tensor) -> None:
        part = _narrow(value, self.offsets, self.lengths)
        if self.rows is None:
            self.target.copy_(part)
        else:
            taken, put = self.rows
            target = self.target
            target.index_copy_(0, put.to(target.device), part.index_select(0, taken).to(target))


class Copies:
    """What fills this rank's pieces of tensors: for every saved piece, where its parts go."""

    def __init__(self, checkpoint: Checkpoint, wanted: State) -> None:
        self._checkpoint = checkpoint
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

    @torch.no_grad()
    def run(self) -> None:
        for chunk, value in self._checkpoint.read(self.chunks):
            for copy in self.chunks[chunk]:
                copy.run(value)


def read_whole(checkpoint: Checkpoint, key: str) -> Tensor:
    """One tensor, whole, in host memory."""
    entry = checkpoint.index[key]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    Copies(checkpoint, State(tensors={key: whole})).run()
    return whole


def _boxes(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """This rank's boxes. Asking a sharded parameter also marks it as written, on every rank."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        if isinstance(tensor, ShardedTensor):
            if tensor.version is not None:
                tensor.version.write()
            chunks = tensor.chunks()
        else:
            chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        return [chunk for chunk in chunks if chunk.sizes.numel()]
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]


def _overlaps(
    entry: metadata.Entry, offsets: Shape, sizes: Shape, target: Tensor
) -> Iterator[tuple[metadata.Chunk, _Copy]]:
    """What to copy from where: DCP's resharding arithmetic."""
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in entry.chunks
    ]
    by_offset = {chunk.offsets: chunk for chunk in entry.chunks}
    saved = TensorStorageMetadata(
        TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks
    )
    box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    for item in create_read_items_for_chunk_list("", saved, [box]):
        chunk = by_offset[tuple(item.storage_index.offset or ())]
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
