# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: hashed while written, and read only if regular and of the listed size.

    torch.save --> write(bytes) --+--> sha256
                                  +--> file --> flush, fsync, close --> File(name, size, sha256)

No file is read again for its hash.
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

from shardwise.checkpoint.errors import DamagedError, UnsafeError, shown

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}")
_HEAD = 1 << 12  # bytes: an archive of torch has fewer before its numbers
_LARGE = 1 << 20  # bytes: a larger write is hashed in a second thread


@dataclass(frozen=True)
class File:
    """A file of a checkpoint, as listed in the manifest."""

    name: str
    size: int
    sha256: str


class HashedFile(io.RawIOBase):
    """A new file to write to. ``record`` is set when the context ends without an error."""

    record: File

    def __init__(self, path: Path) -> None:
        self._path = path
        # "x": the file must not exist yet. Large writes bypass the buffer.
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115  (closed by __exit__)
        self._hash = hashlib.sha256()
        self._size = 0
        self.head = bytearray()  # the first bytes written since a caller emptied it
        self._write_error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if len(self.head) < _HEAD:
            self.head += view.cast("B")[:_HEAD]
        try:
            if view.nbytes < _LARGE:
                self._hash.update(view)
                self._file.write(view)
            else:  # hashing and writing both release the GIL
                hashing = threading.Thread(target=self._hash.update, args=(view,))
                hashing.start()
                try:
                    self._file.write(view)
                finally:
                    hashing.join()
        except OSError as error:
            error.filename = str(self._path)
            self._write_error = error
            raise
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing: torch.save flushes after every tensor, the context once, at its end."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            with contextlib.suppress(OSError):  # the first error is raised
                self._file.close()
            self._remove()
            if self._write_error is not None and self._write_error is not error:
                # torch.save turns a full disk into an error about positions in its archive.
                raise self._write_error from error
            return
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as write_error:
            write_error.filename = str(self._path)
            self._remove()
            raise
        self.record = File(self._path.name, self._size, self._hash.hexdigest())

    def _remove(self) -> None:
        """Remove an incomplete file: the disk may be full, and other ranks write there too."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def write_file(path: Path, data: bytes) -> File:
    """Write a small file; it is on the disk when this returns."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


@contextlib.contextmanager
def naming(path: Path) -> Iterator[Path]:
    """Add the path to errors of the system that name no file, as those of open files do."""
    try:
        yield path
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make changes of the names in a directory durable: files created, renamed and removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------ reading


def check_name(name: Any, where: str) -> str:
    """The name if it is a plain file name without folders, else an ``UnsafeError``."""
    if type(name) is not str or not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise UnsafeError(f"{where} names the file {shown(name)}, which is no plain file name")
    return name


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """Open a regular file for reading; yield the file and its size. Other files, such as pipes, are
    refused without waiting for them. A file that can't be read counts as damaged."""
    try:
        _check_regular(path, os.lstat(path))
        # Non-blocking, in case a pipe has replaced the file since.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            yield stream, _check_regular(path, os.fstat(descriptor))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror or error}") from error


def _check_regular(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeError(f"{path} is no regular file")
    return status.st_size


def read_small(path: Path, limit: int) -> bytes:
    """The contents of a file of at most ``limit`` bytes."""
    with open_regular(path) as (stream, size):
        data = stream.read(limit + 1) if size <= limit else b""
        if size > limit or len(data) > limit:
            raise DamagedError(f"{path} is longer than the limit of {limit} bytes")
        return data


@contextlib.contextmanager
def open_listed(folder: Path, file: File) -> Iterator[io.BufferedReader]:
    """Open a file of the manifest for reading: a regular file of the listed size, no link."""
    path = folder / check_name(file.name, str(folder))
    try:
        with open_regular(path) as (stream, size):
            if size != file.size:
                raise DamagedError(f"{path} has {size} bytes, {file.size} were written")
            yield stream
    except FileNotFoundError as error:
        raise DamagedError(f"{path}: {error.strerror}; it is in the manifest") from error


def read_listed(folder: Path, file: File, limit: int) -> bytes:
    """The contents of a small file, checked against its sha256."""
    if file.size > limit:
        raise DamagedError(f"{folder / file.name} is longer than the limit of {limit} bytes")
    with open_listed(folder, file) as stream:
        data = stream.read(file.size + 1)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise DamagedError(_not_as_written(folder, file))
    return data


def check_bytes(folder: Path, file: File) -> None:
    """Read a file of any size and compare its sha256."""
    with open_listed(folder, file) as stream:
        digest = hashlib.file_digest(stream, "sha256")
    if digest.hexdigest() != file.sha256:
        raise DamagedError(_not_as_written(folder, file))


def check_size(folder: Path, file: File) -> None:
    """Raise unless a file exists, is regular and has the listed size; no byte is read."""
    with open_listed(folder, file):
        pass


def _not_as_written(folder: Path, file: File) -> str:
    return f"{folder / file.name} is damaged: its sha256 differs from that of the bytes written"
