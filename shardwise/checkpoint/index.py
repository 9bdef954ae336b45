# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint: which file holds which box of which tensor, and where.

    index.json    "model.up.weight": ["float32", [4, 3], [[rank, begin, offsets, sizes], ...]]
    .metadata     the same for torch's DCP, which can read such a folder. shardwise never reads it:
                  it is a pickle, and a pickle can run any code. The index has its sha256.

``begin`` is the offset of the numbers in the rank's file. They are stored as in memory, inside the
archive that ``torch.save`` writes, so a load reads bytes and interprets nothing.
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
from shardwise.core.layout import Shape

MAX_BYTES = 1 << 27
MAX_DIMENSIONS = 64
_NUMBERS = b"archive/data/0"  # torch's name for the first storage of an archive
_TOO_MANY = 1 << 62  # elements or bytes
_MAX_CUT_DIMENSIONS = 10
_DCP_VERSION = "1.0.0"  # of the metadata that ``for_torch`` writes


@dataclass(frozen=True, eq=False)
class Chunk:
    """One box of a tensor, and the bytes that hold it."""

    offsets: Shape
    sizes: Shape
    dtype: torch.dtype
    rank: int  # the box is in the file of this rank
    begin: int
    archive: tuple[int, int] = (0, 0)  # begin and length of the archive; known in a save only

    @property
    def file(self) -> str:
        return tensor_file(self.rank)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """One saved tensor: its shape, its dtype, and the chunks that tile it."""

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
    """The offset of a tensor's numbers in the archive that ``torch.save`` made of it.

    ``head`` is the begin of the archive. The numbers follow a zip header, which ends with the
    length of the padding (2 bytes), the name of the storage, and the padding.
    """
    at = head.index(_NUMBERS)
    begin = at + len(_NUMBERS) + int.from_bytes(head[at - 2 : at], "little")
    first = data.reshape(-1).view(torch.uint8)[: max(0, len(head) - begin)]
    assert head[begin : begin + len(first)] == first.numpy().tobytes(), "an unknown form of archive"
    return begin


def dump(index: Mapping[str, Entry], metadata: File) -> bytes:
    """The contents of ``index.json``. ``metadata`` is the file for torch's DCP."""
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
            f"{len(data)} bytes, and a load reads at most {MAX_BYTES}: save from fewer ranks, or "
            f"cut parameters by rows"
        )
    return data


def for_torch(index: Mapping[str, Entry]) -> bytes:
    """The pickle that torch's ``FileSystemReader`` reads."""
    from torch.distributed.checkpoint import metadata as dcp  # slow, and a load does not need it
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
            raise ValueError(f"a piece of {shown(key)} lies beyond the end of {chunk.file}")
        chunks.append(chunk)
    entry = Entry(_shape(shape), dtype, tuple(chunks))
    if (problem := entry.problem()) is not None:
        raise ValueError(f"{shown(key)}: {problem}")
    return entry


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _TOO_MANY:
        raise TypeError(f"{shown(value)} in the place of a size")
    return value


def _shape(value: Any) -> Shape:
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        raise TypeError(f"{shown(value)} in the place of a shape")
    shape = tuple(_number(size) for size in value)
    if math.prod(size or 1 for size in shape) >= _TOO_MANY:
        raise TypeError(f"{list(shape)} is the shape of no tensor")
    return shape


# ------------------------------------------------------------------------------ tiling


def tiling_problem(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> str | None:
    """The reason why boxes do not cover a tensor exactly once, or None.

    The boxes must have as many elements as the tensor, none outside, none in two boxes. The last
    check uses corners, in time linear in the number of boxes. A corner counts +1 if it is the high
    end of its box in an even number of dimensions, else -1. The running totals of these numbers
    along all dimensions are how often each element is covered. So the corners of the boxes must add
    up to the corners of the whole tensor.

        +-----+-----+         inner corners cancel: +1 and -1 of neighbours
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
            # The hash of a text differs in every process. A hostile file could choose tuples of
            # numbers alone so that their hashes are equal, and each would be compared with all.
            key = ("corner", *(place for place, _ in corner))
            sums[key] = sums.get(key, 0) + sign * math.prod(low for _, low in corner)
    odd = [key[1:] for key, total in sums.items() if total]
    return f"two pieces hold the elements around {list(min(odd))}" if covered and odd else None
