# SPDX-License-Identifier: Apache-2.0
"""Corpus: documents of text; the tokens to train on, the tokens held out, and what a loss on them
means per byte.

stdlib               the standard library's sources, without tests and tables: about 9 MB
stdlib+torch         the same and torch's sources: about 50 MB
PATH, DIRECTORY/, "GLOB*.txt"       text files, one document each
hf:NAME[:CONFIG[:SPLIT]]            rows of a dataset, streamed (an extra)

Documents are held out whole, chosen by a hash of their names, so that no function is trained on
from its third line on and the choice survives new neighbours. A corpus of few, large documents
holds out the end of its longest one instead. :mod:`shardwise.train.sources` makes a corpus from
what a user names.
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
# Some Pythons come without tests; encodings and topics are tables rather than text.
_NOT_TEXT = {"encodings", "pydoc_data", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_SHOWN = 3  # names of each kind
# gzip, bzip2, xz, Zstandard, zip, LZ4, 7z: a short file of them may hold no zero byte.
_PACKED = re.compile(
    rb"\x1f\x8b|BZh.1AY&SY|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04|\x04\x22M\x18|7z\xbc\xaf", re.S
)


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
        raise DataError(
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
    """One document per text file; what is no text is passed over, and told."""
    paths, left = find_files(spec)
    # Names from the nearest directory that holds all: data moved elsewhere are the same data.
    above = os.path.commonpath([one.parent for one in paths]) if paths else spec
    found = sorted((one.relative_to(above).as_posix(), one) for one in paths)
    if lines := next((name for name, _ in found if name.endswith((".jsonl", ".ndjson"))), None):
        text = "%s: %s is read as it is, JSON and all: make tokens of its texts (shardwise data)"
        warn_once(logger, text, spec, lines)
    documents = []
    for name, path in found:
        data = read_file(path)
        if data.startswith(MAGIC):
            raise DataError(f"{spec!r} holds text and a token file, {path}: name one kind alone")
        if reason := not_text(data):
            left.add(reason, path)
        else:
            documents.append(Document(name, data))
    if not documents:
        raise DataError(
            f"{spec!r} holds no text ({left if left.found else 'no file'}): name text files, a "
            f"token file by itself, or make tokens of .jsonl.gz and .parquet (shardwise data)"
        )
    left.tell()
    return documents


def dataset_documents(spec: str, first: int = 0) -> Iterator[Document]:
    """Rows of a `datasets` dataset as they come, from number ``first`` on: its column ``text``, or
    its only column of strings."""
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


def _read(found: Iterable[tuple[str, Path]]) -> list[Document]:
    documents = (Document(name, read_file(path)) for name, path in found)
    return [document for document in documents if document.data]


# ------------------------------------------------------------------------------ files


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
    # Of text, of several sources with weights as they are drawn; None where unknown.
    train_bytes: int | None = None
    held_out_bytes: int | None = None
    # Lengths of the stretches of ``train`` that came from several sources, each with the fraction
    # of all samples that is drawn there; empty: drawn as they are.
    shares: tuple[tuple[int, float], ...] = ()
    # The tokens of each epoch, as many as ``train``, where they come as a stream.
    volumes: Callable[[int], Tokens] | None = None

    def __post_init__(self) -> None:
        for part in ("train", "held_out"):
            if len(getattr(self, part)) < 2:
                raise DataError(
                    f"{self.name!r} leaves {len(getattr(self, part))} tokens for {part}: at least "
                    f"2 are needed, one to read and one to guess; give more text"
                )
        if len(self.held_out) < 8 and self.codec and not num_bytes(self.codec, self.held_out[1:]):
            raise DataError(
                f"{self.name!r} leaves {len(self.held_out)} tokens for held_out, and the text ends "
                f"there: nothing is left to guess. Give more text, or a larger held_out"
            )

    def bytes_per_token(self, split: Split = "held_out") -> float | None:
        """Mean bytes of a token; ``None`` where the bytes are unknown."""
        count = self.train_bytes if split == "train" else self.held_out_bytes
        tokens = self.train if split == "train" else self.held_out
        return None if count is None else count / len(tokens)

    def bits_per_byte(
        self, loss: float, split: Split = "held_out", scored: Tokens | None = None
    ) -> float:
        """Bits per byte of a loss in nats per token; per token where the bytes are unknown
        (see ``unit``).

        The mean length of a part's tokens holds for the whole part. Where some tokens were scored,
        ``scored`` (:attr:`HeldOut.scored`) gives the exact figure.
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
        """The name of ``bits_per_byte`` in events: no reader takes bits of a token for a byte's."""
        return self.unit.replace("/", "_per_")


def digest_of(documents: Sequence[Document]) -> str:
    """The sha256 of names, lengths and contents; the lengths keep neighbours apart."""
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
    for document in sorted(documents, key=lambda one: hashlib.sha256(one.name.encode()).digest()):
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
    """Warn of text that is held out and trained on all the same: copies, under other names."""
    trained = {one.data for train, _ in parts for one in train}
    held = [one for _, those in parts for one in those]
    copies = [one for one in held if one.data in trained]
    share = sum(len(one.data) for one in copies) / max(1, sum(len(one.data) for one in held))
    if share > 0.01:  # files of a line or two are alike everywhere
        warn_once(
            logger,
            "%s: %d of %d documents that are held out (%.0f %% of their bytes; %r for one) are "
            "also trained on, word for word: the held-out loss comes out too low. Remove copies",
            *(name, len(copies), len(held), 100 * share, copies[0].name),
        )


def _cut_the_longest(
    documents: Sequence[Document], wanted: float
) -> tuple[list[Document], list[Document]]:
    longest = max(documents, key=lambda one: len(one.data))
    at = max(1, len(longest.data) - math.ceil(wanted))
    line = longest.data.rfind(b"\n", 0, at)  # cut at the end of a line, if one is near
    at = line + 1 if 0 < line and at - line <= wanted else at
    head = Document(longest.name, longest.data[:at])
    tail = Document(f"{longest.name} (end)", longest.data[at:])
    return [head if document is longest else document for document in documents], [tail]


# ------------------------------------------------------------------------------ references

_MOST = 16 << 20  # symbols counted, about: more take seconds of every start


def references_of(corpus: Corpus) -> dict[str, float]:
    """Bits per byte of simple models on the held-out text, to compare a loss with; none for tokens
    whose bytes are unknown. Ends of documents are included, as in the model's own figure: they are
    guessed, and are no byte.

        unigram   a model that knows how frequent bytes are in the training text
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

    single = pairs.sum(0) + 1.0  # every symbol once more: no probability is 0
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
