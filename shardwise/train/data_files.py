# SPDX-License-Identifier: Apache-2.0
"""Data files: the files that a source of data names, and one line about those that are not read."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from shardwise.notices import warn_once
from shardwise.train.codecs import BESIDE_TOKENS
from shardwise.train.tokens import DataError, is_token_file

logger = logging.getLogger(__name__)

_SHOWN = 3  # names of each kind
# gzip, bzip2, xz, Zstandard, zip, LZ4, 7z: a short file of them may hold no zero byte.
_PACKED = re.compile(
    rb"\x1f\x8b|BZh.1AY&SY|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04|\x04\x22M\x18|7z\xbc\xaf", re.S
)


class LeftOut:
    """The files of a source that are not read, by reason."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: dict[str, list[Path]] = {}

    def add(self, reason: str, path: Path) -> None:
        self.found.setdefault(reason, []).append(path)

    def __str__(self) -> str:
        return ", ".join(
            f"{len(paths)} {reason} ({', '.join(self._names(paths))})"
            for reason, paths in sorted(self.found.items())
        )

    def _names(self, paths: list[Path]) -> list[str]:
        above = Path(self.source).expanduser()
        near = [one.relative_to(above) if above in one.parents else one for one in paths]
        return [*sorted(map(str, near))[:_SHOWN], *["..."][: len(paths) > _SHOWN]]

    def tell(self) -> None:
        """Warn once, on one rank, if anything was left out."""
        if self.found:
            warn_once(logger, "%s: not read: %s", self.source, str(self))


def find_files(source: str) -> tuple[list[Path], LeftOut]:
    """The files that ``source`` names, in an order that no file system decides, and those in its
    folders that are not read: hidden ones, links to folders, what is no regular file."""
    path, left = Path(source).expanduser(), LeftOut(source)
    if path.is_file():
        return [path], left
    if path.is_dir():
        return _below(path, left), left
    files = set()  # "**/**" finds one more than once
    for one in sorted({Path(name) for name in glob.glob(str(path), recursive=True)}):
        if one.is_file():
            files.add(one)
        elif not (one.is_dir() and "**" in source):  # its files were found too
            left.add("folder" if one.is_dir() else "no regular file", one)
    if not files:
        raise DataError(
            f"{source!r} names no data: there is no such file or directory and the pattern matches "
            f"{left if left.found else 'nothing'}; give a text, .jsonl or .parquet file, a "
            f"directory, a quoted pattern, a .bin token file, stdlib, stdlib+torch or hf:NAME"
        )
    return sorted(files), left


def _below(folder: Path, left: LeftOut) -> list[Path]:
    def stop(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): permit it") from None

    files: list[Path] = []
    for at, folders, names in os.walk(folder, onerror=stop):
        for name in [*folders, *names]:
            one = Path(at, name)
            if name.startswith("."):
                left.add("hidden", one)
            elif one.is_dir():
                if one.is_symlink():
                    left.add("link to a folder", one)
            elif one.is_file():
                files.append(one)
            else:
                left.add("no regular file", one)
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(files)


def files_of(source: str) -> list[Path]:
    """The files that ``source`` names, in order; in a directory without hidden ones."""
    return find_files(source)[0]


def read_file(path: Path) -> bytes:
    """The bytes of a file; it is named where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): permit it, or copy it"
        ) from None


def not_text(data: bytes) -> str | None:
    """Why these are not the bytes of a text; None where they are."""
    if not data:
        return "empty"
    if _PACKED.match(data):
        return "compressed"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "in UTF-16, not UTF-8"
    return "binary" if b"\0" in data[:8192] else None


def refuse_twice(sources: Iterable[str], files: Callable[[str], list[Path]] = files_of) -> None:
    """Raise where several sources name one file: it would be drawn more often than anybody asked
    for, and one source may train on what another holds out."""
    first: dict[Path, tuple[int, str]] = {}
    for named in enumerate(sources):
        for file in files(named[1]):
            if (other := first.setdefault(file.resolve(), named)) != named:
                raise DataError(f"{file} is in {other[1]!r} and in {named[1]!r}: name it once")


# ------------------------------------------------------------------------------ token files


def token_files(source: str) -> list[Path]:
    """The token files that a source names, in the order of their names; none if it is text."""
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(filter(is_token_file, path.glob("*.bin")))
    if path.suffix == ".bin" and not glob.has_magic(source):
        return [path]
    if path.is_file():
        return [path] if is_token_file(path) else []
    found = sorted(Path(one) for one in glob.glob(str(path), recursive=True))
    return found if found and all(map(is_token_file, found)) else []


def tell_beside_tokens(source: str, files: list[Path]) -> None:
    """Warn of files in a folder of token files that are neither ``files`` nor their tokenizer's."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return
    others, left = find_files(source)
    for one in others:
        if one not in files and (one.parent != folder or one.name not in BESIDE_TOKENS):
            left.add("no token file" if one.parent == folder else "in folders below", one)
    left.tell()


def named_files(source: str) -> list[Path]:
    """The files that a source names; none where it is no file. Raises where there are none."""
    if source in ("stdlib", "stdlib+torch") or source.startswith("hf:"):
        return []
    return token_files(source) or files_of(source)
