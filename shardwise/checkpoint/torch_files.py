# SPDX-License-Identifier: Apache-2.0
"""The two formats of torch that a checkpoint uses, read without unpickling anything.

    .metadata        DCP's index: which file holds which box of which tensor      -> Index
    __0_0.distcp     archives as torch.save writes them, one after another        -> SavedTensor
        archive/data.pkl    a pickle: which storage, offset, shape, strides    checked
        archive/byteorder   little                                             checked
        archive/data/0      the numbers as in memory, not compressed           read
        the directory       names, sizes and places of these                   bounded

torch reads both with ``pickle``, which runs whatever a file says, and ``torch.load`` would believe
a storage of a gigabyte that is a kilobyte of compressed zeros, one longer than its bytes, or
strides that lead outside. ``pickles`` reads records instead, and here every field is checked.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
from torch.storage import _dtype_to_storage_type_map

from shardwise.checkpoint import pickles
from shardwise.checkpoint.errors import CheckpointError, DamagedError, UnsafeError, shown
from shardwise.checkpoint.files import File, Window, check_name
from shardwise.checkpoint.pickles import Pairs, Record, name_of
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
    """One saved tensor: its shape, and chunks that tile it."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def problem(self) -> str | None:
        """The reason why the chunks do not tile the tensor exactly, or None."""
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
            f"{len(data)} bytes, more than the {pickles.MAX_BYTES} that a load reads: save from "
            f"fewer ranks, or cut parameters by rows"
        )
    return data


# ------------------------------------------------------------------------------ reading


_DESCRIBED = "torch.distributed.checkpoint.metadata"
_SIZE = "torch.Size"
_TENSOR = f"{_DESCRIBED}.TensorStorageMetadata"
_INDEX_NAMES = frozenset(
    {f"{_DESCRIBED}.{name}" for name in ("Metadata", "MetadataIndex", "ChunkStorageMetadata")}
    | {f"{_DESCRIBED}.{name}" for name in ("TensorProperties", "StorageMeta")}
    | {f"{_DESCRIBED}.{name}" for name in ("_MEM_FORMAT_ENCODING", "BytesStorageMetadata")}
    | {"torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout"}
    | {_TENSOR, _SIZE, *DTYPES}
)


def parse(data: bytes, where: str, files: Iterable[File]) -> Index:
    """The index in ``.metadata``; every field is checked, every file is one of the manifest."""
    metadata = pickles.read(data, where, _INDEX_NAMES)
    try:
        return _index(metadata, where, {file.name: file.size for file in files})
    except DamagedError:
        raise
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        raise DamagedError(f"{where} is not what shardwise writes: {error}") from error


def _index(metadata: Record, where: str, sizes: Mapping[str, int]) -> Index:
    """Takes as many steps as the file has entries: each place is used for one chunk."""
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
        dtype = DTYPES[name_of(tensor.get("properties").state[0])]
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
    """The key of a place. It begins with a text, whose hash differs in every process: tuples of
    numbers alone could be chosen to have equal hashes, so that each is compared with all others."""
    return ("at", key, *offsets)


def _dictionary(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) is not Pairs:
        raise TypeError(f"{shown(value)} where a dictionary stands")
    return value.entries()


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{shown(value)} where a name stands")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _TOO_MANY:
        raise TypeError(f"{shown(value)} where a size stands")
    return value


def _shape(value: Any) -> Shape:
    """A ``torch.Size``, or a tuple that stands for one."""
    if isinstance(value, Record) and value.name == _SIZE and len(value.args) == 1:
        [value] = value.args
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
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
            key = _place("corner", tuple(place for place, _ in corner))
            sums[key] = sums.get(key, 0) + sign * math.prod(low for _, low in corner)
    odd = [key[2:] for key, total in sums.items() if total]
    return f"two pieces hold the elements around {list(min(odd))}" if covered and odd else None


# ------------------------------------------------------------------------------ one tensor

_MAX_PICKLE_BYTES = 1 << 14
# The longest comment of a zip file, twice.
_MAX_DIRECTORY_BYTES = 1 << 17
_LOCAL_HEADER_BYTES = 30

_STORAGES = {
    f"torch.{name}": dtype for dtype, name in _dtype_to_storage_type_map().items()
}  # torch.FloatStorage: torch.float32
_UNTYPED = "torch.storage.UntypedStorage"
_TYPED_TENSOR, _UNTYPED_TENSOR = (f"torch._utils._rebuild_tensor_v{n}" for n in (2, 3))
_TENSOR_NAMES = frozenset(
    {*_STORAGES, *DTYPES, _UNTYPED, _TYPED_TENSOR, _UNTYPED_TENSOR, "collections.OrderedDict"}
)


class SavedTensor:
    """A tensor in a part of a file. Construction checks it; ``read`` only reads its numbers."""

    def __init__(self, window: Window, where: str, shape: Shape, dtype: torch.dtype) -> None:
        self._window, self._where, self._shape, self._dtype = window, where, shape, dtype
        self._num_bytes = math.prod(shape) * dtype.itemsize
        try:
            found = self._find()
        except (DamagedError, OSError):
            raise
        except Exception as error:  # zipfile raises anything for broken bytes
            text = f"{where}: no tensor as torch.save writes one: {error!s:.200}"
            raise DamagedError(text) from error
        if found is not None:
            raise DamagedError(f"{where}: {found}, where the index promises {dtype} {list(shape)}")

    def read(self) -> Tensor:
        flat = torch.empty(self._num_bytes, dtype=torch.uint8)
        view = memoryview(flat.numpy())  # type: ignore[arg-type]
        self._window.seek(self._begin)
        try:
            while len(view) and (count := self._window.readinto(view)):
                view = view[count:]
        except OSError as error:
            raise DamagedError(f"{self._where} can't be read: {error.strerror}") from error
        if len(view):
            raise DamagedError(f"{self._where}: the file has become shorter")
        return flat.view(self._dtype).view(self._shape)

    def _find(self) -> str | None:
        """Check all of the archive but the numbers; return what is there instead of this tensor."""
        with zipfile.ZipFile(_Directory(self._window)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise DamagedError(f"{self._where}: the archive is compressed, which torch never does")
        pickled = self._small(entries["data.pkl"])
        value = pickles.read(pickled, self._where, _TENSOR_NAMES)
        described = _described(value)
        if described is None:
            return f"a {'dict' if type(value) is Pairs else type(value).__name__}"
        dtype, shape, strides, key, num_bytes, offset = described
        if (dtype, shape) != (self._dtype, self._shape):
            return f"{dtype} {list(shape)}"
        if self._small(entries["byteorder"]).decode() != sys.byteorder:
            return "a tensor of a machine with another order of bytes"
        info = entries[f"data/{key}"]
        sizes = {num_bytes, info.file_size, info.compress_size, self._num_bytes}
        if offset or not _is_contiguous(shape, strides) or len(sizes) > 1:
            return f"a view of {info.file_size} bytes"
        self._begin = self._begin_of(info)
        return None

    def _small(self, info: zipfile.ZipInfo) -> bytes:
        if info.file_size > _MAX_PICKLE_BYTES:
            raise DamagedError(f"{self._where}: '{info.filename[:80]}' is too large")
        self._window.seek(self._begin_of(info))
        return self._window.read(info.file_size)

    def _begin_of(self, info: zipfile.ZipInfo) -> int:
        """The position of an entry's contents: behind a header with its name."""
        self._window.seek(info.header_offset)
        header = self._window.read(_LOCAL_HEADER_BYTES)
        if len(header) != _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
            raise ValueError(f"no entry at {info.header_offset}")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = info.header_offset + _LOCAL_HEADER_BYTES + lengths
        if begin + info.file_size > len(self._window):
            raise ValueError("an entry behind the end")
        return begin


class _Directory(Window):
    """The same part of a file, from which only a short directory may be read."""

    def __init__(self, window: Window) -> None:
        super().__init__(*window.part)
        self._left = _MAX_DIRECTORY_BYTES

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        self._left -= size if size >= 0 else max(0, len(self) - self.tell())
        if self._left < 0:
            raise ValueError("its directory is too large")
        return super().read(size)


def _described(value: Any) -> tuple[torch.dtype, Any, Any, str, int, int] | None:
    """(dtype, shape, strides, key, bytes of the storage, offset) of a pickled tensor, or None."""
    if not isinstance(value, Record) or value.name not in (_TYPED_TENSOR, _UNTYPED_TENSOR):
        return None
    untyped = value.name == _UNTYPED_TENSOR
    storage, offset, shape, strides, _, _, *more = value.args
    if not isinstance(storage, Record) or type(storage.args) is not tuple:
        return None
    word, kind, key, _, count = storage.args
    # With more than a dtype it is conjugated or negated: the stored numbers are not the values.
    if len(more) != untyped or (untyped and name_of(kind) != _UNTYPED):
        return None
    dtype = DTYPES.get(name_of(more[0])) if untyped else _STORAGES.get(name_of(kind))
    if word != "storage" or type(key) is not str or dtype is None:
        return None
    if any(type(number) is not int or number < 0 for number in (count, offset)):
        return None
    for sizes in (shape, strides):
        if type(sizes) is not tuple or any(type(size) is not int for size in sizes):
            return None
    return dtype, shape, strides, key, count * (1 if untyped else dtype.itemsize), offset


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether strides are those of a contiguous tensor."""
    if len(shape) != len(strides):
        return False
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True
