# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: hashed while written, and read only if regular and of the listed size.

    header, tensors --> write(bytes) --+--> sha256
                                       +--> file --> flush, fsync, close --> size, sha256

No file is read again for its hash. Tensors are in safetensors files, which any reader of that
format opens. The library can't hash while it writes, so the header is made here:

    | 8 bytes: its length | {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    |                        "__metadata__": {...}} | the bytes of the tensors, one after another |
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError, DamagedError, shown
from shardwise.checkpoint.values import DAMAGE, parse_json

MAX_HEADER_BYTES = 100_000_000  # as in the library
_LARGE = 1 << 20  # bytes: a larger write is hashed in a second thread


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class File(NamedTuple):
    """What the manifest knows of the file of a rank."""

    size: int
    sha256: str


class HashedFile:
    """A new file to write to. ``record`` is set when the context ends without an error."""

    record: File

    def __init__(self, path: Path) -> None:
        # "x": the file must not exist yet. Large writes bypass the buffer.
        self._file = open(path, "xb", buffering=_LARGE)  # noqa: SIM115  (closed by __exit__)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> None:
        view = memoryview(data)
        self._size += view.nbytes
        if view.nbytes < _LARGE:
            self._hash.update(view)
            self._file.write(view)
            return
        hashing = threading.Thread(target=self._hash.update, args=(view,))
        hashing.start()  # hashing and writing both release the GIL
        try:
            self._file.write(view)
        finally:
            hashing.join()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        self.record = File(self._size, self._hash.hexdigest())


def sync_directory(path: Path) -> None:
    """Make changes of the names in a directory durable: files created, renamed and removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path, size: int | None = None) -> Iterator[io.BufferedReader]:
    """Open a regular file, of ``size`` bytes, for reading. Anything else counts as damaged: a link,
    a pipe (nobody waits for its writer), a missing file, and a disk that fails meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path} is no regular file")
            if size is not None and status.st_size != size:
                raise DamagedError(f"{path} has {status.st_size} bytes, {size} were written")
            yield stream
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror or error}") from error


def check_bytes(path: Path, file: File) -> None:
    """Read a file of any size and compare its sha256."""
    with opened(path, file.size) as stream:
        digest = hashlib.file_digest(stream, "sha256")
    if digest.hexdigest() != file.sha256:
        raise DamagedError(f"{path} is damaged: its sha256 is not that of the bytes written")


# ------------------------------------------------------------------------------ safetensors

_LABELS = {
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
for _kind, _sizes in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64))):
    _LABELS |= {getattr(torch, f"{_kind}{n}"): f"{_kind[0].upper()}{n}" for n in _sizes}


def form(dtype: torch.dtype) -> tuple[str, list[int]]:
    """The dtype of a tensor in a file, and the dimensions to add. A complex number is a pair, and
    the format does not know some dtypes of torch: their bytes are stored."""
    if dtype.is_complex:
        return _LABELS[dtype.to_real()], [2]
    return (_LABELS[dtype], []) if dtype in _LABELS else ("U8", [dtype.itemsize])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> File:
    """Write a safetensors file; it is on the disk when this returns. A tensor at a time is copied
    to host memory, if it is elsewhere."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        label, more = form(tensor.dtype)
        begin, end = end, end + tensor.nbytes
        shape = [*tensor.shape, *more]
        header[name] = {"dtype": label, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: the names of {len(tensors)} tensors need {len(text)} bytes")
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            host = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
            if host.numel():
                file.write(host.reshape(-1).view(torch.uint8).numpy())
    return file.record


# By name of a tensor in a file: its dtype, and the first byte and the end of its bytes.
Header = dict[str, tuple[str, int, int]]


def read_header(stream: io.BufferedReader, size: int, where: Path) -> tuple[Header, Any]:
    """The tensors of a safetensors file by name, and its metadata. None lies outside the file.

    Call ``check_bytes`` before: a header is believed as the manifest is."""
    try:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes")
        header = parse_json(stream.read(length))
        metadata = header.pop("__metadata__", {})
        found: Header = {}
        at = 8 + length
        for name, value in header.items():  # in the order of the file, no byte twice
            begin, end = (8 + length + offset for offset in value["data_offsets"])
            if begin != at or end < begin:
                raise ValueError(f"{shown(name)} does not begin where the tensor before it ends")
            found[name], at = (value["dtype"], begin, end), end
        if at != size:
            raise ValueError(f"its tensors end at byte {shown(at)} of {size}")
        return found, metadata
    except DAMAGE as error:
        raise DamagedError(f"{where} is not what shardwise writes: {error}") from error
