# SPDX-License-Identifier: Apache-2.0
"""Corpus: documents of text; tokens to train on and tokens held out; a loss per token as bits per
byte.

stdlib               the sources of the standard library, without tests and tables: about 9 MB
stdlib+torch         the same and the sources of torch: about 50 MB
PATH, DIRECTORY/, "GLOB*.txt"       text files; each is a document
hf:NAME[:CONFIG[:SPLIT]]            rows of a dataset, streamed (an extra)

Whole documents are held out, so that held-out text is never the end of a text that was trained on.
They are chosen by a hash of their names, so that new documents do not change the choice. A corpus
of a few large documents holds out the end of the longest document instead.
:mod:`shardwise.train.sources` makes a corpus from the argument of ``--data``.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import logging
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.notices import warn_once
from shardwise.train.codecs import BESIDE_TOKENS, END, NUM_SYMBOLS, Codec, num_bytes, require
from shardwise.train.tokens import CHUNK, MAGIC, DataError, Tokens, is_token_file

logger = logging.getLogger(__name__)

Split = Literal["train", "held_out"]
# Folders of tables, and folders that some installations of Python lack.
_NOT_TEXT = {"encodings", "pydoc_data", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
_OTHER = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_SHOWN = 3  # names of files that a warning shows, for each reason
# gzip, bzip2, xz, Zstandard, zip, LZ4, 7z: a short file in such a format may contain no zero byte.
_PACKED = re.compile(
    rb"\x1f\x8b|BZh.1AY&SY|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04|\x04\x22M\x18|7z\xbc\xaf", re.S
)


@dataclass(frozen=True)
class Document:
    """One text, held out whole or not at all."""

    name: str
    data: bytes


def read_documents(spec: str) -> list[Document]:
    """The documents of ``spec``, in an order that does not depend on the file system."""
    if spec in ("stdlib", "stdlib+torch"):
        documents = list(stdlib_documents())
        if spec == "stdlib+torch":
            torch_spec = importlib.util.find_spec("torch")  # does not import torch
            assert torch_spec is not None and torch_spec.origin is not None
            documents += _sources("torch", Path(torch_spec.origin).parent, _OTHER)
        return documents
    if spec.startswith("hf:"):
        return list(dataset_documents(spec))
    return file_documents(spec)


def stdlib_documents(folder: Path | None = None) -> Iterator[Document]:
    """Every ``.py`` of the standard library that is text and part of every installation."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    documents = _sources("stdlib", folder, _OTHER | _NOT_TEXT)
    if not documents:
        reason = "it is zipped" if folder.suffix == ".zip" or folder.is_file() else "only compiled"
        raise DataError(
            f"this Python has no readable sources of its standard library in {folder} ({reason}, "
            f"or stripped): name other data, for example --data 'texts/*.txt'"
        )
    yield from documents


def _sources(prefix: str, folder: Path, without: set[str]) -> list[Document]:
    named = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if not without.intersection(parts):
            named.append(("/".join((prefix, *parts)), path))
    documents = (Document(name, read_file(path)) for name, path in sorted(named))
    return [document for document in documents if document.data]


def file_documents(spec: str) -> list[Document]:
    """A document for each text file. Other files are left out, with a warning."""
    paths, left = find_files(spec)
    # Names are relative to the nearest common folder, so that moved data are the same data.
    above = os.path.commonpath([path.parent for path in paths]) if paths else spec
    named = sorted((path.relative_to(above).as_posix(), path) for path in paths)
    json_lines = [name for name, _ in named if name.endswith((".jsonl", ".ndjson"))]
    if json_lines:
        text = "%s: %s is read as plain text, with its JSON: make tokens of its texts with "
        warn_once(logger, text + "shardwise data", spec, json_lines[0])
    documents = []
    for name, path in named:
        data = read_file(path)
        if data.startswith(MAGIC):
            raise DataError(f"{spec!r} holds text and a token file, {path}: name one kind alone")
        if reason := not_text(data):
            left.add(reason, path)
        else:
            documents.append(Document(name, data))
    if not documents:
        raise DataError(
            f"{spec!r} holds no text ({left if left.paths else 'no file'}): name text files, a "
            f"token file by itself, or make tokens of .jsonl.gz and .parquet (shardwise data)"
        )
    left.warn()
    return documents


def dataset_documents(spec: str, first: int = 0) -> Iterator[Document]:
    """The rows of a `datasets` dataset in order, from number ``first`` on: the column ``text``, or
    the only column of strings."""
    name, config, split, *rest = [*spec.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise DataError(f"{spec!r}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    package = require("datasets", "datasets")
    try:
        rows = package.load_dataset(name, config or None, split=split or "train", streaming=True)
        row = next(iter(rows), None)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{spec!r} could not be loaded ({str(error).splitlines()[0]}): check the name, the "
            f"configuration, the split and the network"
        ) from error
    strings = [key for key, value in (row or {}).items() if isinstance(value, str)]
    column = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
    if row is not None and column is None:
        raise DataError(f"{spec!r} has no column 'text' (columns of strings: {strings})")
    count = without = 0
    following = rows.skip(first) if hasattr(rows, "skip") else islice(rows, first, None)
    for index, row in enumerate(following, first):
        if text := row[column]:
            count += 1
            yield Document(f"{name}/{index}", text.encode())
        else:
            without += 1
    if count == 0 and not first:
        raise DataError(f"{spec!r} has no row with text in column {column!r}")
    if without:
        text = "%s: not read: %d of %d rows, which have no text in column %r"
        warn_once(logger, text, spec, without, count + without, column, about=spec)


# ------------------------------------------------------------------------------ files


class LeftOut:
    """The files of a source that are not read, by reason."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.paths: dict[str, list[Path]] = {}

    def add(self, reason: str, path: Path) -> None:
        self.paths.setdefault(reason, []).append(path)

    def __str__(self) -> str:
        return ", ".join(
            f"{len(paths)} {reason} ({', '.join(self._names(paths))})"
            for reason, paths in sorted(self.paths.items())
        )

    def _names(self, paths: list[Path]) -> list[str]:
        above = Path(self.source).expanduser()
        names = sorted(
            str(path.relative_to(above) if above in path.parents else path) for path in paths
        )
        return names if len(names) <= _SHOWN else [*names[:_SHOWN], "..."]

    def warn(self) -> None:
        """Warn once, on one rank, if any file was left out."""
        if self.paths:
            warn_once(logger, "%s: not read: %s", self.source, str(self))


def find_files(source: str) -> tuple[list[Path], LeftOut]:
    """The files of ``source``, in an order that does not depend on the file system, and the files
    in its folders that are not read: hidden files, links to folders, files that are not regular."""
    path, left = Path(source).expanduser(), LeftOut(source)
    if path.is_file():
        return [path], left
    if path.is_dir():
        return _below(path, left), left
    files = []
    for match in sorted({Path(name) for name in glob.glob(str(path), recursive=True)}):
        if match.is_file():
            files.append(match)
        elif not match.is_dir():
            left.add("no regular file", match)
        elif "**" not in source:  # else its files match, too
            left.add("folder", match)
    if not files:
        raise DataError(
            f"{source!r} names no data: there is no such file or directory and the pattern matches "
            f"{left if left.paths else 'nothing'}; give a text, .jsonl or .parquet file, a "
            f"directory, a quoted pattern, a .bin token file, stdlib, stdlib+torch or hf:NAME"
        )
    return files, left


def _below(folder: Path, left: LeftOut) -> list[Path]:
    def stop(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): permit it") from None

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        for name in [*folders, *names]:
            path = Path(parent, name)
            if name.startswith("."):
                left.add("hidden", path)
            elif path.is_dir():
                if path.is_symlink():
                    left.add("link to a folder", path)
            elif path.is_file():
                files.append(path)
            else:
                left.add("no regular file", path)
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(files)


def files_of(source: str) -> list[Path]:
    """The files of ``source`` in order, see :func:`find_files`."""
    return find_files(source)[0]


def read_file(path: Path) -> bytes:
    """The bytes of a file. The error names a file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): permit it, or copy it"
        ) from None


def not_text(data: bytes) -> str | None:
    """The reason why these bytes are no text, or None."""
    if not data:
        return "empty"
    if _PACKED.match(data):
        return "compressed"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "in UTF-16, not UTF-8"
    return "binary" if b"\0" in data[:8192] else None


def refuse_twice(sources: Iterable[str], files: Callable[[str], list[Path]] = files_of) -> None:
    """Raise if several sources contain the same file: it would be drawn too often, and a source
    might train on text that another source holds out."""
    first: dict[Path, tuple[int, str]] = {}
    for number, source in enumerate(sources):
        for file in files(source):
            other_number, other = first.setdefault(file.resolve(), (number, source))
            if other_number != number:
                raise DataError(f"{file} is in {other!r} and in {source!r}: name it once")


def token_files(source: str) -> list[Path]:
    """The token files of a source, in the order of their names; empty if the source is text."""
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(filter(is_token_file, path.glob("*.bin")))
    if path.suffix == ".bin" and not glob.has_magic(source):
        return [path]
    if path.is_file():
        return [path] if is_token_file(path) else []
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    return matches if all(map(is_token_file, matches)) else []


def warn_beside_tokens(source: str, files: list[Path]) -> None:
    """Warn of files in a folder of token files that are neither ``files`` nor of a tokenizer."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return
    paths, left = find_files(source)
    for path in paths:
        if path not in files and (path.parent != folder or path.name not in BESIDE_TOKENS):
            left.add("no token file" if path.parent == folder else "in folders below", path)
    left.warn()


def named_files(source: str) -> list[Path]:
    """The files of a source; empty if it is a dataset or stdlib. Raises if there are no files."""
    if source in ("stdlib", "stdlib+torch") or source.startswith("hf:"):
        return []
    return token_files(source) or files_of(source)


# ------------------------------------------------------------------------------ in two parts


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens in two parts: 1-D arrays of unsigned integers, possibly mapped from a file."""

    name: str  # the data as the user named them
    train: Tokens
    held_out: Tokens
    vocab_size: int  # the number of different tokens
    sha256: str  # of the text (or of the token file): equal digests mean equal data
    codec: Codec | None = None  # None for tokens of an unknown tokenizer
    # Bytes of text of the tokens, None if unknown. Sources with weights count by their weights.
    train_bytes: int | None = None
    held_out_bytes: int | None = None
    # For sources with weights: the length of each source's stretch of ``train``, and the fraction
    # of all samples that are drawn there.
    shares: tuple[tuple[int, float], ...] = ()
    # Of a stream: returns the tokens of an epoch, as many as ``train``.
    volumes: Callable[[int], Tokens] | None = None

    def __post_init__(self) -> None:
        for part in ("train", "held_out"):
            if len(getattr(self, part)) < 2:
                raise DataError(
                    f"{self.name!r} leaves {len(getattr(self, part))} tokens for {part}, and at "
                    f"least 2 are needed, one to read and one to predict: give more text"
                )
        if len(self.held_out) < 8 and self.codec and not num_bytes(self.codec, self.held_out[1:]):
            raise DataError(
                f"{self.name!r} leaves {len(self.held_out)} tokens for held_out, and no text to "
                f"predict among them: give more text, or a larger held_out"
            )

    def bytes_per_token(self, split: Split = "held_out") -> float | None:
        """Mean bytes of a token; ``None`` if unknown."""
        count = self.train_bytes if split == "train" else self.held_out_bytes
        tokens = self.train if split == "train" else self.held_out
        return None if count is None else count / len(tokens)

    def bits_per_byte(
        self, loss: float, split: Split = "held_out", scored: Tokens | None = None
    ) -> float:
        """A loss in nats per token as bits per byte, or bits per token if the number of bytes is
        unknown (see ``unit``).

        This uses the mean length of all tokens of the split. If only some tokens were scored, pass
        them as ``scored`` (:attr:`HeldOut.scored`) for the exact figure.
        """
        length = self.bytes_per_token(split) or 1.0
        if scored is not None and self.codec is not None:
            length = num_bytes(self.codec, scored) / len(scored)
        return loss / math.log(2) / length

    @property
    def unit(self) -> str:
        return "bits/token" if self.held_out_bytes is None else "bits/byte"

    @property
    def field(self) -> str:
        """The name of ``bits_per_byte`` in events: "bits_per_token" if bytes are unknown."""
        return self.unit.replace("/", "_per_")


def digest_of(documents: Sequence[Document]) -> str:
    """The sha256 of names, lengths and contents of documents."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{len(document.data)}\0".encode())
        digest.update(document.data)
    return digest.hexdigest()


def hold_out(
    documents: Sequence[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and documents to hold out: about ``fraction`` of all bytes."""
    if not 0 < fraction <= 0.5:
        raise DataError(f"held out fraction {fraction}: use more than 0 and at most 0.5")
    wanted = fraction * sum(len(document.data) for document in documents)
    held: set[str] = set()
    size = 0
    for document in sorted(documents, key=lambda item: hashlib.sha256(item.name.encode()).digest()):
        if size >= wanted:
            break
        if size + len(document.data) <= 1.25 * wanted:
            held.add(document.name)
            size += len(document.data)
    if size >= 0.5 * wanted:
        train = [document for document in documents if document.name not in held]
        return train, [document for document in documents if document.name in held]
    return _cut_the_longest(documents, wanted)


def warn_of_held_out(name: str, parts: Sequence[tuple[list[Document], list[Document]]]) -> None:
    """Warn if held-out documents are also trained on: copies under other names."""
    trained = {document.data for train, _ in parts for document in train}
    held = [document for _, held_out in parts for document in held_out]
    copies = [document for document in held if document.data in trained]
    size = sum(len(document.data) for document in held)
    share = sum(len(document.data) for document in copies) / max(1, size)
    if share > 0.01:  # tiny files are often equal
        warn_once(
            logger,
            "%s: %d of %d documents that are held out (%.0f %% of their bytes; for example %r) are "
            "also trained on, word for word: the held-out loss will be too low. Remove copies",
            *(name, len(copies), len(held), 100 * share, copies[0].name),
        )


def _cut_the_longest(
    documents: Sequence[Document], wanted: float
) -> tuple[list[Document], list[Document]]:
    longest = max(documents, key=lambda document: len(document.data))
    cut = max(1, len(longest.data) - math.ceil(wanted))
    newline = longest.data.rfind(b"\n", 0, cut)
    if 0 < newline and cut - newline <= wanted:
        cut = newline + 1  # the end of a line that is near
    head = Document(longest.name, longest.data[:cut])
    tail = Document(f"{longest.name} (end)", longest.data[cut:])
    return [head if document is longest else document for document in documents], [tail]


# ------------------------------------------------------------------------------ references

_MOST = 16 << 20  # symbols to count, about: more would take seconds at every start


def references_of(corpus: Corpus) -> dict[str, float]:
    """Bits per byte of simple models on the held-out text, to compare a loss with; empty if the
    bytes of tokens are unknown. As in the figure of the trained model, ends of documents are
    predicted, but do not count as bytes.

        unigram   a model that knows the frequencies of bytes in the training text
        bigram    a model that also knows the byte before, backed off to the unigram
        zlib      the held-out text compressed at level 9
    """
    if corpus.codec is None or not corpus.held_out_bytes:
        return {}
    most = int(_MOST / max(1.0, corpus.bytes_per_token() or 1.0))  # tokens
    train = corpus.codec.symbols(corpus.train[:most])
    held_out = corpus.codec.symbols(corpus.held_out[:most])
    num_bytes = np.count_nonzero(held_out != END)
    pairs, tested = count_pairs(train), count_pairs(held_out)

    single = pairs.sum(0) + 1.0  # one more of every symbol, so that no probability is 0
    single /= single.sum()
    before = pairs.sum(1, keepdims=True)
    double = (pairs + single) / (before + 1.0)

    text = held_out[held_out != END].astype(np.uint8).tobytes()
    return {
        "unigram": float(-(tested.sum(0) * np.log2(single)).sum() / num_bytes),
        "bigram": float(-(tested * np.log2(double)).sum() / num_bytes),
        "zlib": 8 * len(zlib.compress(text, 9)) / int(num_bytes),
    }


def count_pairs(symbols: NDArray[np.uint16]) -> NDArray[Any]:
    """How often symbol b follows symbol a: [257, 257]."""
    counts = np.zeros(NUM_SYMBOLS**2, np.int64)
    for begin in range(0, len(symbols) - 1, CHUNK):
        chunk = symbols[begin : begin + CHUNK + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * NUM_SYMBOLS + chunk[1:], minlength=len(counts))
    return counts.reshape(NUM_SYMBOLS, NUM_SYMBOLS).astype(np.float64)
