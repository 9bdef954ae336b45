# SPDX-License-Identifier: Apache-2.0
"""Text: documents from this Python's own sources, files or a dataset.

stdlib               the standard library's sources, without tests and tables: about 9 MB
stdlib+torch         the same and torch's sources: about 50 MB
PATH, DIRECTORY/, "GLOB*.txt"       text files, one document each
hf:NAME[:CONFIG[:SPLIT]]            rows of a dataset, streamed (an extra)
"""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.notices import warn_once
from shardwise.train.codecs import require
from shardwise.train.tokens import DataError, DataNotFoundError, EmptyDataError

logger = logging.getLogger(__name__)

# Some Pythons come without tests; encodings and topics are tables rather than text.
_NOT_TEXT = {"encodings", "pydoc_data", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


@dataclass(frozen=True)
class Document:
    """One text, held out whole or not at all."""

    name: str
    data: bytes


def read_documents(spec: str) -> list[Document]:
    """The documents that ``spec`` names, in an order that no file system decides."""
    if spec in ("stdlib", "stdlib+torch"):
        documents = list(stdlib_documents())
        if spec == "stdlib+torch":
            found = importlib.util.find_spec("torch")  # without importing it
            assert found is not None and found.origin is not None
            documents += _sources("torch", Path(found.origin).parent, _NOT_OURS)
        return documents
    if spec.startswith("hf:"):
        return list(dataset_documents(spec))
    return file_documents(spec)


def stdlib_documents(folder: Path | None = None) -> Iterator[Document]:
    """Every ``.py`` of the standard library that is text and part of each installation."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    documents = _sources("stdlib", folder, _NOT_OURS | _NOT_TEXT)
    if not documents:
        why = "it is zipped" if folder.suffix == ".zip" or folder.is_file() else "only compiled"
        raise EmptyDataError(
            f"this Python has no readable sources of its standard library in {folder} ({why}, or "
            f"stripped): name other data, for example --data 'texts/*.txt'"
        )
    yield from documents


def _sources(prefix: str, folder: Path, without: set[str]) -> list[Document]:
    found = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if not without.intersection(parts):
            found.append(("/".join((prefix, *parts)), path))
    return _read(sorted(found))


def file_documents(spec: str) -> list[Document]:
    """One document per text file; hidden and binary files are passed over."""
    path = Path(spec).expanduser()
    if path.is_dir():
        paths = [one for one in path.rglob("*") if one.is_file() and not _hidden(one, path)]
    elif path.is_file():
        paths = [path]
    else:
        matches = map(Path, glob.glob(str(path), recursive=True))
        paths = [one for one in matches if one.is_file()]
        if not paths:
            raise DataNotFoundError(
                f"{spec!r} names no data: there is no such file or directory and the pattern "
                f"matches nothing; give a text file, a directory, a quoted pattern, a .bin token "
                f"file, stdlib, stdlib+torch or hf:NAME"
            )
    # Names from the nearest directory that holds all: data moved elsewhere are the same data.
    above = os.path.commonpath([one.parent for one in paths]) if paths else path
    found = sorted((one.relative_to(above).as_posix(), one) for one in paths)
    documents = _read(found)
    texts = [one for one in documents if b"\0" not in one.data[:8192]]
    if len(texts) < len(documents):
        count = len(documents) - len(texts)
        warn_once(logger, "%s: passed over %d binary files", spec, count)
    if not texts:
        raise EmptyDataError(
            f"{spec!r} holds no text: {len(found)} files, {len(found) - len(documents)} of them "
            f"empty and {len(documents)} binary; name text files, or a token file by itself"
        )
    return texts


def dataset_documents(spec: str) -> Iterator[Document]:
    """Rows of a `datasets` dataset as they come: its column ``text``, or its only column of
    strings."""
    name, config, split, *rest = [*spec.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise DataError(f"{spec!r}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    package = require("datasets", "datasets")
    try:
        rows = package.load_dataset(name, config or None, split=split or "train", streaming=True)
        first = next(iter(rows), None)
    except (OSError, ValueError) as error:
        raise DataNotFoundError(
            f"{spec!r} could not be loaded ({str(error).splitlines()[0]}): check the name, the "
            f"configuration, the split and the network"
        ) from error
    strings = [key for key, value in (first or {}).items() if isinstance(value, str)]
    column = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
    if first is not None and column is None:
        raise DataError(f"{spec!r} has no column 'text' (columns of strings: {strings})")
    count = 0
    for index, row in enumerate(rows):
        if text := row[column]:
            count += 1
            yield Document(f"{name}/{index}", text.encode())
    if count == 0:
        raise EmptyDataError(f"{spec!r} has no row with text in column {column!r}")


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _read(found: Iterable[tuple[str, Path]]) -> list[Document]:
    documents = (Document(name, path.read_bytes()) for name, path in found)
    return [document for document in documents if document.data]
