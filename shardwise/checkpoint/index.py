# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint: which file holds which box of which tensor, and where.

    index.json    "model.up.weight": ["float32", [4, 3], [[rank, begin, offsets, sizes], ...]]
    .metadata     the same for torch: its own DCP reads such a folder. Nothing here reads it, since
                  it is a pickle, and a pickle runs whatever it says; the index has its sha256.

``begin`` is where the numbers lie in the rank's file. They stand there inside of the archive that
``torch.save`` writes, as in memory, so a load reads bytes and interprets nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.files import File
from shardwise.checkpoint.manifest import METADATA
from shardwise.checkpoint.values import dtype_name, dtype_of, parse_json
from shardwise.layout import Shape

MAX_BYTES = 1 << 27
MAX_DIMENSIONS = 64
_NUMBERS = b"archive/data/0"  # as torch calls the first storage of an archive
_TOO_MANY = 1 << 62  # elements or bytes
_MAX_CUT_DIMENSIONS = 10
_DCP_VERSION = "1.0.0"  # of the form in which ``for_torch`` writes


@dataclass(frozen=True, eq=False)
class Chunk:
    """One box of a tensor, and the bytes that hold it."""

    offsets: Shape
    sizes: Shape
    dtype: torch.dtype
    rank: int  # whose file it is
    begin: int
    archive: tuple[int, int] = (0, 0)  # where torch finds it: begin and length; known while saving

    @property
    def file(self) -> str:
        return tensor_file(self.rank)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """One saved tensor: its shape, and chunks that tile it."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def problem(self) -> str | None:
        """The reason why the chunks do not tile the tensor exactly, or None."""
        return tiling_problem(self.shape, [(c.offsets, c.sizes) for c in self.chunks])


Index = dict[str, Entry]


def tensor_file(rank: int) -> str:
    """The name that torch's DCP gives to the file of a rank."""
    return f"__{rank}_0.distcp"


# ------------------------------------------------------------------------------ writing


def numbers_in(head: bytes, data: Tensor) -> int:
    """The place of a tensor's numbers in the archive that ``torch.save`` made of it, from its first
    bytes. A header stands before the numbers; a name ends it, and how many bytes of padding follow
    is written before the name."""
    at = head.index(_NUMBERS)
    begin = at + len(_NUMBERS) + int.from_bytes(head[at - 2 : at], "little")
    first = data.reshape(-1).view(torch.uint8)[: max(0, len(head) - begin)]
    assert head[begin : begin + len(first)] == first.numpy().tobytes(), "another form of archive"
    return begin


def dump(index: Mapping[str, Entry], metadata: File) -> bytes:
    """The contents of ``index.json``; ``metadata``: the file for torch."""
    tensors = {
        key: [
            dtype_name(entry.dtype),
            entry.shape,
            [(chunk.rank, chunk.begin, chunk.offsets, chunk.sizes) for chunk in entry.chunks],
        ]
        for key, entry in index.items()
    }
    content = {"byteorder": sys.byteorder, METADATA: metadata.sha256, "tensors": tensors}
    data = json.dumps(content, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"the index of {sum(len(entry.chunks) for entry in index.values())} pieces has "
            f"{len(data)} bytes, more than the {MAX_BYTES} that a load reads: save from "
            f"fewer ranks, or cut parameters by rows"
        )
    return data


def for_torch(index: Mapping[str, Entry]) -> bytes:
    """The pickle that torch's own ``FileSystemReader`` reads."""
    from torch.distributed.checkpoint import metadata as dcp  # a load does without
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    storage = {}
    for key, entry in index.items():
        chunks = []
        for position, chunk in enumerate(entry.chunks):
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
            chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            storage[dcp.MetadataIndex(key, offsets, position)] = _StorageInfo(
                chunk.file, *chunk.archive
            )
        properties = dcp.TensorProperties(dtype=entry.dtype)
        tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    metadata = dcp.Metadata(
        state_dict_metadata=tensors,
        storage_data=storage,
        storage_meta=dcp.StorageMeta(),
        version=_DCP_VERSION,
    )
    return pickle.dumps(metadata, protocol=4)


# ------------------------------------------------------------------------------ reading


def parse(data: bytes, where: str, files: Iterable[File]) -> Index:
    """The index in ``index.json``; every field is checked, every byte lies in a listed file."""
    content = parse_json(data, where)
    listed = {file.name: file for file in files}
    try:
        if content["byteorder"] != sys.byteorder:
            raise ValueError(f"tensors of a machine with byteorder {shown(content['byteorder'])}")
        sizes = {name: file.size for name, file in listed.items()}
        index = {key: _entry(key, value, sizes) for key, value in content["tensors"].items()}
    except (DamagedError, TypeError, LookupError, AttributeError, ValueError) as error:
        raise DamagedError(f"{where} is not what shardwise writes: {error}") from error
    if content.get(METADATA) != listed[METADATA].sha256:
        raise DamagedError(f"{METADATA} is not the file that was written with {where}")
    return index


def _entry(key: str, value: Any, sizes: Mapping[str, int]) -> Entry:
    name, shape, described = value
    dtype = dtype_of(name, key)
    chunks = []
    for rank, begin, offsets, sides in described:
        chunk = Chunk(_shape(offsets), _shape(sides), dtype, _number(rank), _number(begin))
        if chunk.begin + chunk.num_bytes > sizes.get(chunk.file, -1):
            raise ValueError(f"a piece of {shown(key)} lies behind the end of {chunk.file}")
        chunks.append(chunk)
    entry = Entry(_shape(shape), dtype, tuple(chunks))
    if (problem := entry.problem()) is not None:
        raise ValueError(f"{shown(key)}: {problem}")
    return entry


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _TOO_MANY:
        raise TypeError(f"{shown(value)} where a size stands")
    return value


def _shape(value: Any) -> Shape:
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        raise TypeError(f"{shown(value)} where a shape stands")
    shape = tuple(_number(size) for size in value)
    if math.prod(size or 1 for size in shape) >= _TOO_MANY:
        raise TypeError(f"{list(shape)} is the shape of no tensor")
    return shape


# ------------------------------------------------------------------------------ tiling


def tiling_problem(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> str | None:
    """The reason why boxes do not cover a tensor exactly once, or None.

    The boxes must have as many elements as the tensor, none outside, none in two boxes. The last
    is decided by corners, in time linear in the number of boxes: a corner counts + where it is the
    high end of its box in an even number of dimensions, else -. Running totals of these sums along
    all dimensions say how often each element is covered, so they must be the whole tensor's.

        +-----+-----+         inner corners cancel: + and - of neighbours
        |     |     |
        +-----+-----+
    """
    for offsets, sizes in boxes:
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > end for offset, size, end in zip(offsets, sizes, shape, strict=True)
        ):
            return f"a piece at {list(offsets)} of {list(sizes)} lies outside {list(shape)}"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"its pieces hold {covered} of {math.prod(shape)} elements"
    boxes = [box for box in boxes if math.prod(box[1])]
    cut = [dim for dim, end in enumerate(shape) if any(sizes[dim] != end for _, sizes in boxes)]
    if len(cut) > _MAX_CUT_DIMENSIONS:
        return f"it is cut along {len(cut)} dimensions, {_MAX_CUT_DIMENSIONS} can be checked"
    whole = ((0,) * len(shape), shape)
    sums: dict[tuple[Any, ...], int] = {}
    for sign, (offsets, sizes) in ((-1, whole), *((1, box) for box in boxes)):
        ends = (((offsets[d], 1), (offsets[d] + sizes[d], -1)) for d in cut)
        for corner in itertools.product(*ends):
            # A text comes first, whose hash differs in every process: tuples of numbers alone could
            # be chosen to have equal hashes, so that each is compared with all others.
            key = ("corner", *(place for place, _ in corner))
            sums[key] = sums.get(key, 0) + sign * math.prod(low for _, low in corner)
    odd = [key[1:] for key, total in sums.items() if total]
    return f"two pieces hold the elements around {list(min(odd))}" if covered and odd else None
