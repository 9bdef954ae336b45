# SPDX-License-Identifier: Apache-2.0
"""One tensor as ``torch.save`` writes it: found and read without ``torch.load``.

    archive/data.pkl    a pickle: which storage, from where on, shape, strides     checked
    archive/byteorder   little                                                     checked
    archive/data/0      the numbers, as they lie in memory, not compressed         read
    the directory       names, sizes and places of these                           bounded

``torch.load`` would believe the pickle: a storage of a gigabyte that is a kilobyte of zeros
compressed, one longer than its bytes, strides that lead outside. Here all of them must agree.
"""

from __future__ import annotations

import math
import sys
import zipfile
from typing import Any

import torch
from torch import Tensor
from torch.storage import _dtype_to_storage_type_map

from shardwise.checkpoint import pickles
from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.files import Window
from shardwise.checkpoint.metadata import DTYPES
from shardwise.checkpoint.pickles import Name, Pairs, Record
from shardwise.layout import Shape

_MAX_PICKLE_BYTES = 1 << 14
# Reading the directory may take as much: the longest comment of a zip file, twice.
_MAX_DIRECTORY_BYTES = 1 << 17
_LOCAL_HEADER_BYTES = 30

_STORAGES = {
    f"torch.{name}": dtype for dtype, name in _dtype_to_storage_type_map().items()
}  # torch.FloatStorage: torch.float32
_UNTYPED = "torch.storage.UntypedStorage"
_TYPED_TENSOR, _UNTYPED_TENSOR = (f"torch._utils._rebuild_tensor_v{n}" for n in (2, 3))
_NAMES = frozenset(
    {*_STORAGES, *DTYPES, _UNTYPED, _TYPED_TENSOR, _UNTYPED_TENSOR, "collections.OrderedDict"}
)


class SavedTensor:
    """A tensor in a part of a file, checked when this is made; ``read`` only reads its numbers."""

    def __init__(self, window: Window, where: str, shape: Shape, dtype: torch.dtype) -> None:
        self._window, self._where, self._shape, self._dtype = window, where, shape, dtype
        self._num_bytes = math.prod(shape) * dtype.itemsize
        try:
            found = self._find()
        except (DamagedError, OSError):
            raise
        except Exception as error:  # of broken bytes zipfile may say anything
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
        """Check all of the archive but the numbers; what is there instead of this tensor."""
        with zipfile.ZipFile(_Directory(self._window)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise DamagedError(f"{self._where}: the archive is compressed, which torch never does")
        pickled = self._small(entries["data.pkl"])
        value = pickles.read(pickled, self._where, _NAMES)
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
        if offset or not _in_order(shape, strides) or len(sizes) > 1:
            return f"a view of {info.file_size} bytes"
        self._begin = self._begin_of(info)
        return None

    def _small(self, info: zipfile.ZipInfo) -> bytes:
        if info.file_size > _MAX_PICKLE_BYTES:
            raise DamagedError(f"{self._where}: '{info.filename[:80]}' is too large")
        self._window.seek(self._begin_of(info))
        return self._window.read(info.file_size)

    def _begin_of(self, info: zipfile.ZipInfo) -> int:
        """Where the contents of an entry begin: behind a header with its name."""
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
    """The same part of a file for who reads its directory, which is short."""

    def __init__(self, window: Window) -> None:
        super().__init__(*window.part)
        self._left = _MAX_DIRECTORY_BYTES

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        self._left -= size if size >= 0 else max(0, len(self) - self.tell())
        if self._left < 0:
            raise ValueError("its directory is too large")
        return super().read(size)


def _described(value: Any) -> tuple[torch.dtype, Any, Any, str, int, int] | None:
    """(dtype, shape, strides, key, bytes of the storage, offset) of a rebuilt tensor."""
    if type(value) is not Record or value.name not in (_TYPED_TENSOR, _UNTYPED_TENSOR):
        return None
    untyped = value.name == _UNTYPED_TENSOR
    storage, offset, shape, strides, _, _, *more = value.args
    if type(storage) is not Record or type(storage.args) is not tuple:
        return None
    word, kind, key, _, count = storage.args
    if untyped:
        if len(more) != 1 or kind != _UNTYPED:
            return None
        [dtype] = more
    elif more:  # conjugated or negated: the numbers are not those that lie there
        return None
    names = (kind, dtype) if untyped else (kind,)
    sound = word == "storage" and all(type(name) is Name for name in names) and type(key) is str
    if not sound or any(type(number) is not int or number < 0 for number in (count, offset)):
        return None
    for sizes in (shape, strides):
        if type(sizes) is not tuple or any(type(size) is not int for size in sizes):
            return None
    found = DTYPES[dtype] if untyped else _STORAGES[kind]
    return found, shape, strides, key, count * (1 if untyped else found.itemsize), offset


def _in_order(shape: Shape, strides: Shape) -> bool:
    """Whether the numbers lie one behind the other, the last dimension innermost."""
    if len(shape) != len(strides):
        return False
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True
