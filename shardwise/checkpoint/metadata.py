# SPDX-License-Identifier: Apache-2.0
"""DCP's ``.metadata``: where every piece of every tensor lies. Written as torch writes it, read
without importing or calling anything that it names.

torch reads this file with a bare ``pickle.load``, which runs whatever the file says. Here every
name in it is looked up in a short table of inert stand-ins made for this one file:

    torch...metadata.Metadata   ->  a record that keeps its state and can do nothing
    torch.Size                  ->  tuple
    torch.float32               ->  the dtype, a constant
    os.system, anything else    ->  UnsafeError, by name

The records are then checked field by field and become an ``Index``.
"""

from __future__ import annotations

import io
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

from shardwise.checkpoint.errors import DamagedError, UnsafeError
from shardwise.checkpoint.files import File, check_name
from shardwise.layout import Shape

MAX_DIMENSIONS = 64
_DCP_VERSION = "1.0.0"  # of the form in which ``dump`` writes


@dataclass(frozen=True)
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
    return pickle.dumps(metadata, protocol=4)


# ------------------------------------------------------------------------------ reading


class _Record:
    """Stands for an object of the pickle: its state as it was stored, and no behaviour."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        if args:
            raise TypeError(f"a {type(self).__name__} is made in an unknown way")

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise TypeError(f"{type(self).__name__} without '{name}'")
        return self.state[name]


def _stand_ins() -> dict[tuple[str, str], Any]:
    """Fresh ones for every file: what a hostile one could do to a class dies with it."""

    class Key(_Record):  # the key of a dictionary: it must have a hash
        def __hash__(self) -> int:
            return hash((self.get("fqn"), self.get("offset")))

        def __eq__(self, other: object) -> bool:
            return type(other) is Key and all(
                self.get(name) == other.get(name) for name in ("fqn", "offset")
            )

    described = "torch.distributed.checkpoint.metadata"
    found: dict[tuple[str, str], Any] = {
        (described, name): type(name, (_Record,), {})
        for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata")
        + ("TensorProperties", "StorageMeta")
    }
    found[described, "MetadataIndex"] = Key
    found[described, "_MEM_FORMAT_ENCODING"] = int
    stored = "torch.distributed.checkpoint.filesystem"
    found[stored, "_StorageInfo"] = type("_StorageInfo", (_Record,), {})
    found["torch", "Size"] = tuple
    found["torch.serialization", "_get_layout"] = str
    return found


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where, self._stand_ins = where, _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        found = self._stand_ins.get((module, name))
        if found is None and module == "torch" and isinstance(name, str):
            constant = getattr(torch, name, None) if name.isidentifier() else None
            found = constant if isinstance(constant, torch.dtype) else None
        if found is None:
            raise UnsafeError(
                f"{self._where} asks for '{module}.{name}', which no checkpoint needs: "
                f"it was not written by shardwise, and loading it elsewhere could run code"
            )
        return found


def parse(data: bytes, where: str, files: Iterable[File]) -> Index:
    """The index in ``.metadata``, every field checked, every file in the manifest."""
    try:
        metadata = _Reader(data, where).load()
    except UnsafeError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise DamagedError(f"{where} can't be read: {type(error).__name__}: {error}") from error
    try:
        return _index(metadata, where, {file.name: file.size for file in files})
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise DamagedError(f"{where} is not what shardwise writes: {error}") from error


def _index(metadata: Any, where: str, sizes: Mapping[str, int]) -> Index:
    places: dict[tuple[str, Shape], tuple[str, int, int]] = {}
    for key, info in metadata.get("storage_data").items():
        name = check_name(info.get("relative_path"), where)
        begin, length = _number(info.get("offset")), _number(info.get("length"))
        if info.state.get("transform_descriptors"):
            raise UnsafeError(f"{where} asks to transform '{name}' while reading it")
        if name not in sizes:
            raise UnsafeError(f"{where} points to '{name}', which is not in the manifest")
        if begin + length > sizes[name]:
            raise DamagedError(f"{where} points behind the end of '{name}'")
        places[key.get("fqn"), _shape(key.get("offset"))] = (name, begin, length)
    index: Index = {}
    for key, tensor in metadata.get("state_dict_metadata").items():
        if not isinstance(key, str):
            raise TypeError(f"a tensor named {key!r:.80}")
        if type(tensor).__name__ != "TensorStorageMetadata":
            raise UnsafeError(f"{where}: '{key}' is no tensor; objects are never loaded")
        dtype = tensor.get("properties").state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"'{key}' without a dtype")
        chunks = []
        for chunk in tensor.get("chunks"):
            offsets, sides = _shape(chunk.get("offsets")), _shape(chunk.get("sizes"))
            if (key, offsets) not in places:
                raise DamagedError(f"{where}: no file holds '{key}' from {list(offsets)} on")
            name, begin, length = places.pop((key, offsets))
            chunks.append(Chunk(offsets, sides, dtype, name, begin, length))
        index[key] = Entry(_shape(tensor.get("size")), dtype, tuple(chunks))
    if places:
        raise DamagedError(f"{where} places pieces of unknown tensors: {sorted(places)[:3]}")
    return index


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.80} where a size stands")
    return value


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        raise TypeError(f"{value!r:.80} where a shape stands")
    return tuple(_number(size) for size in value)


# ------------------------------------------------------------------------------ tiling


def tiling_problem(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> str | None:
    """Why boxes do not cover a tensor exactly once, or None.

    As many elements as the tensor has, none outside and no two boxes with a common one: together
    they are the whole. Boxes are compared in the order of their first row, so only neighbours meet.
    """
    for offsets, sizes in boxes:
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > end for offset, size, end in zip(offsets, sizes, shape, strict=True)
        ):
            return f"a piece at {list(offsets)} of {list(sizes)} lies outside {list(shape)}"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"its pieces hold {covered} of {math.prod(shape)} elements"
    active: list[tuple[Shape, Shape]] = []
    for box in sorted(box for box in boxes if math.prod(box[1])):
        if box[0]:
            active = [other for other in active if other[0][0] + other[1][0] > box[0][0]]
        if any(_overlap(box, other) for other in active):
            return f"two pieces hold the elements from {list(box[0])} on"
        active.append(box)
    return None


def _overlap(one: tuple[Shape, Shape], other: tuple[Shape, Shape]) -> bool:
    return all(
        a < b + length_b and b < a + length_a
        for a, length_a, b, length_b in zip(*one, *other, strict=True)
    )
