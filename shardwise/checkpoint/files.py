# SPDX-License-Identifier: Apache-2.0
"""Files that are hashed while they are written, and on the disk when they are closed.

    torch.save --> write(bytes) --+--> sha256, beside it
                                  +--> file --> flush, fsync, close --> File(name, size, sha256)

One pass: nothing that was written is read again to be hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.errors import DamagedError, UnsafeError

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}")
_BLOCK = 1 << 22
_LARGE = 1 << 20  # bytes from which a second thread for hashing is worth its start


@dataclass(frozen=True)
class File:
    """A file of a checkpoint as the manifest knows it."""

    name: str
    size: int
    sha256: str


class HashedFile(io.RawIOBase):
    """A new file to write to. ``record`` is there once the context has closed without an error."""

    record: File

    def __init__(self, path: Path) -> None:
        self._path = path
        # "x": nobody else may have written under this name. Large writes pass the buffer by.
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115  (closed by __exit__)
        self._hash = hashlib.sha256()
        self._size = 0
        self._refused: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        try:
            if view.nbytes < _LARGE:
                self._hash.update(view)
                self._file.write(view)
            else:  # both let other threads run meanwhile
                hashing = threading.Thread(target=self._hash.update, args=(view,))
                hashing.start()
                try:
                    self._file.write(view)
                finally:
                    hashing.join()
        except OSError as error:
            error.filename = str(self._path)
            self._refused = error
            raise
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """The context flushes once, at its end; torch.save would after every tensor."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            with contextlib.suppress(OSError):  # what went wrong is known already
                self._file.close()
            if self._refused is not None and self._refused is not error:
                # torch.save answers a full disk with a word about positions in its archive.
                raise self._refused from error
            return
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as refused:
            refused.filename = str(self._path)
            raise
        self.record = File(self._path.name, self._size, self._hash.hexdigest())


def write_file(path: Path, data: bytes) -> File:
    """A whole small file, on the disk when this returns."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: created, renamed and removed ones."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------ reading


def check_name(name: Any, where: str) -> str:
    """A plain file name, or an ``UnsafeError``: no folders, no way out of the checkpoint."""
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise UnsafeError(f"{where} names the file {name!r:.200}, which is no plain file name")
    return name


@contextlib.contextmanager
def open_listed(folder: Path, file: File) -> Iterator[io.BufferedReader]:
    """A file of the manifest for reading: a regular one of the right size, not a link."""
    path = folder / check_name(file.name, str(folder))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}; it is in the manifest") from error
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeError(f"{path} is no regular file")
        if status.st_size != file.size:
            raise DamagedError(f"{path} has {status.st_size} bytes, {file.size} were written")
        yield stream


def read_listed(folder: Path, file: File) -> bytes:
    """All of a small file, checked against its sha256."""
    with open_listed(folder, file) as stream:
        data = stream.read()
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise DamagedError(_not_as_written(folder, file))
    return data


def check_bytes(folder: Path, file: File) -> None:
    """Read a file of any size and compare its sha256."""
    digest = hashlib.sha256()
    with open_listed(folder, file) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != file.sha256:
        raise DamagedError(_not_as_written(folder, file))


def check_size(folder: Path, file: File) -> None:
    """That it is there, a regular file, of the right size; no byte is read."""
    path = folder / check_name(file.name, str(folder))
    try:
        status = os.lstat(path)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}; it is in the manifest") from error
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeError(f"{path} is no regular file")
    if status.st_size != file.size:
        raise DamagedError(f"{path} has {status.st_size} bytes, {file.size} were written")


def _not_as_written(folder: Path, file: File) -> str:
    return f"{folder / file.name} is damaged: its sha256 is not that of the bytes that were written"


class Window(io.RawIOBase):
    """A part of a file that looks like a file: one tensor among many."""

    def __init__(self, stream: io.BufferedReader, begin: int, length: int) -> None:
        self._stream, self._begin, self._length, self._at = stream, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._stream.seek(self._begin + self._at)
        read = self._stream.readinto(view[:count])
        self._at += read
        return read
