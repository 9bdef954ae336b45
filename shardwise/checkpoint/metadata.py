# SPDX-License-Identifier: Apache-2.0
"""DCP's ``.metadata``: where every piece of every tensor lies. Written as torch writes it, read
without importing or calling anything that it names.

torch reads this file with a bare ``pickle.load``, which runs whatever the file says. ``pickles``
reads it as records, which are checked here field by field and become an ``Index``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint import pickles
from shardwise.checkpoint.errors import CheckpointError, DamagedError, UnsafeError, shown
from shardwise.checkpoint.files import File, check_name
from shardwise.checkpoint.pickles import Name, Pairs, Record
from shardwise.layout import Shape

MAX_DIMENSIONS = 64
DTYPES = {
    f"torch.{name}": value for name, value in vars(torch).items() if type(value) is torch.dtype
}
_TOO_MANY = 1 << 62  # elements or bytes
_MAX_CUT_DIMENSIONS = 10
_DCP_VERSION = "1.0.0"  # of the form in which ``dump`` writes


@dataclass(frozen=True, eq=False)
class Chunk:
    """One box of a tensor, and the bytes that hold it."""

    offsets: Shape
    sizes: Shape
    dtype: torch.dtype
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Entry:
    """One tensor: its shape, and boxes that tile it."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self) -> str | None:
        """Why the chunks do not tile the tensor exactly, if they do not."""
        return tiling_problem(self.shape, [(c.offsets, c.sizes) for c in self.chunks])


Index = dict[str, Entry]


# ------------------------------------------------------------------------------ writing


def dump(index: Mapping[str, Entry]) -> bytes:
    """The pickle that torch's own ``FileSystemReader`` reads."""
    tensors: dict[str, STORAGE_TYPES] = {}
    storage = {}
    for key, entry in index.items():
        chunks = []
        for position, chunk in enumerate(entry.chunks):
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            place = _StorageInfo(chunk.file, chunk.begin, chunk.length)
            storage[MetadataIndex(key, offsets, position)] = place
        properties = TensorProperties(dtype=entry.dtype)
        tensors[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    metadata = Metadata(
        state_dict_metadata=tensors,
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=_DCP_VERSION,
    )
    data = pickle.dumps(metadata, protocol=4)
    if len(data) > pickles.MAX_BYTES:
        raise CheckpointError(
            f"the index of {sum(len(entry.chunks) for entry in index.values())} pieces has "
            f"{len(data)} bytes, more than the {pickles.MAX_BYTES} that are read: save from fewer "
            f"ranks, or cut parameters by rows"
        )
    return data


# ------------------------------------------------------------------------------ reading


_DESCRIBED = "torch.distributed.checkpoint.metadata"
_SIZE = "torch.Size"
_TENSOR = f"{_DESCRIBED}.TensorStorageMetadata"
_NAMES = frozenset(
    {f"{_DESCRIBED}.{name}" for name in ("Metadata", "MetadataIndex", "ChunkStorageMetadata")}
    | {f"{_DESCRIBED}.{name}" for name in ("TensorProperties", "StorageMeta")}
    | {f"{_DESCRIBED}.{name}" for name in ("_MEM_FORMAT_ENCODING", "BytesStorageMetadata")}
    | {"torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout"}
    | {_TENSOR, _SIZE, *DTYPES}
)


def parse(data: bytes, where: str, files: Iterable[File]) -> Index:
    """The index in ``.metadata``, every field checked, every file in the manifest."""
    metadata = pickles.read(data, where, _NAMES)
    try:
        return _index(metadata, where, {file.name: file.size for file in files})
    except (TypeError, LookupError, AttributeError) as error:
        raise DamagedError(f"{where} is not what shardwise writes: {error}") from error


def _index(metadata: Record, where: str, sizes: Mapping[str, int]) -> Index:
    """As many steps as the file has entries: each place is used for one chunk."""
    places: dict[tuple[Any, ...], tuple[str, int, int]] = {}
    for box, info in _dictionary(metadata.get("storage_data")):
        name = check_name(info.get("relative_path"), where)
        begin, length = _number(info.get("offset")), _number(info.get("length"))
        with contextlib.suppress(LookupError):  # not in every version of torch
            if (transform := info.get("transform_descriptors")) is not None and transform != []:
                raise UnsafeError(f"{where} asks to transform '{name}' while reading it")
        if name not in sizes:
            raise UnsafeError(f"{where} points to '{name}', which is not in the manifest")
        if begin + length > sizes[name]:
            raise DamagedError(f"{where} points behind the end of '{name}'")
        place = _place(_text(box.get("fqn")), _shape(box.get("offset")))
        if place in places:
            raise DamagedError(f"{where} places a piece of {shown(place[1])} twice")
        places[place] = (name, begin, length)
    index: Index = {}
    for key, tensor in _dictionary(metadata.get("state_dict_metadata")):
        _text(key)
        if tensor.name != _TENSOR:
            kind = tensor.name.rpartition(".")[2]
            raise UnsafeError(f"{where}: {shown(key)} is a {kind}; objects are never loaded")
        if key in index:
            raise DamagedError(f"{where} describes {shown(key)} twice")
        dtype = DTYPES[_text(tensor.get("properties").state[0], Name)]
        described = tensor.get("chunks")
        if type(described) is not list:
            raise TypeError(f"chunks {shown(described)}")
        chunks = []
        for chunk in described:
            offsets, sides = _shape(chunk.get("offsets")), _shape(chunk.get("sizes"))
            if (found := places.pop(_place(key, offsets), None)) is None:
                raise DamagedError(f"{where}: no file holds {shown(key)} from {list(offsets)} on")
            chunks.append(Chunk(offsets, sides, dtype, *found))
        index[key] = Entry(_shape(tensor.get("size")), dtype, tuple(chunks))
    if places:
        names = ", ".join(shown(place[1]) for place in [*places][:3])
        raise DamagedError(f"{where} places pieces of unknown tensors: {names}")
    for key, entry in index.items():
        if (problem := entry.problem()) is not None:
            raise DamagedError(f"{where}: {shown(key)}: {problem}")
    return index


def _place(key: str, offsets: Shape) -> tuple[Any, ...]:
    """The key of a place. It begins with a text, whose hash nobody knows before this process ran:
    tuples of numbers alone could be chosen to have equal hashes, each compared with all others."""
    return ("at", key, *offsets)


def _dictionary(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) is not Pairs:
        raise TypeError(f"{shown(value)} where a dictionary stands")
    return value.entries()


def _text(value: Any, kind: type = str) -> str:
    if type(value) is not kind:
        raise TypeError(f"{shown(value)} where a name stands")
    return str(value)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _TOO_MANY:
        raise TypeError(f"{shown(value)} where a size stands")
    return value


def _shape(value: Any) -> Shape:
    """A ``torch.Size``, or a tuple that stands for one."""
    if type(value) is Record and value.name == _SIZE and len(value.args) == 1:
        [value] = value.args
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        raise TypeError(f"{shown(value)} where a shape stands")
    shape = tuple(_number(size) for size in value)
    if math.prod(size or 1 for size in shape) >= _TOO_MANY:
        raise TypeError(f"{list(shape)} is the shape of no tensor")
    return shape


# ------------------------------------------------------------------------------ tiling


def tiling_problem(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> str | None:
    """Why boxes do not cover a tensor exactly once, or None.

    As many elements as the tensor has, none outside, none in two boxes. Corners tell the last,
    in time linear in the number of boxes: a corner counts + where it is the high end of its box in
    an even number of dimensions, else -. Running totals of these sums along all dimensions say how
    often each element is covered, so the sums must be those of the whole tensor.

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
            key = _place("corner", tuple(place for place, _ in corner))
            sums[key] = sums.get(key, 0) + sign * math.prod(low for _, low in corner)
    odd = [key[2:] for key, total in sums.items() if total]
    return f"two pieces hold the elements around {list(min(odd))}" if covered and odd else None
