# SPDX-License-Identifier: Apache-2.0
"""Text: documents from this Python's own sources, files or a dataset, and their way to tokens.

stdlib               the standard library's sources, without tests and tables: about 9 MB
stdlib+torch         the same and torch's sources: about 50 MB
PATH, DIRECTORY/, "GLOB*.txt"       text files, one document each
hf:NAME[:CONFIG[:SPLIT]]            rows of a dataset (an extra)

A codec turns text into tokens and back with no byte lost, so that a loss per token is a loss per
byte. ``bytes`` needs nothing: token i is byte i, and 256 ends a document. ``bpe:SIZE`` learns
SIZE - 1 pieces from the training text with the `tokenizers` package (an extra) and ends documents
with its last token. Both give back the *symbols* of tokens, in which reference entropies are
counted: bytes 0 to 255, and 256 for the end of a document.
"""

from __future__ import annotations

import glob
import importlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.train.tokens import (
    DataError,
    DataNotFoundError,
    EmptyDataError,
    MissingExtraError,
    Tokens,
    dtype_for,
)

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
            documents += _sources("torch", Path(torch.__file__).parent, _NOT_OURS)
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
        logger.warning("%s: passed over %d binary files", spec, len(documents) - len(texts))
    if not texts:
        raise EmptyDataError(
            f"{spec!r} holds no text: {len(found)} files, {len(found) - len(documents)} of them "
            f"empty and {len(documents)} binary; name text files, or a token file by itself"
        )
    return texts


def dataset_documents(spec: str) -> Iterator[Document]:
    """Rows of a `datasets` dataset: its column ``text``, or its only column of strings."""
    name, config, split, *rest = [*spec.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise DataError(f"{spec!r}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    package = require("datasets", "datasets")
    try:
        rows = package.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        raise DataNotFoundError(
            f"{spec!r} could not be loaded ({str(error).splitlines()[0]}): check the name, the "
            f"configuration, the split and the network"
        ) from error
    kinds = {key: getattr(kind, "dtype", "") for key, kind in rows.features.items()}
    strings = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
    column = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
    if column is None:
        raise DataError(f"{spec!r} has no column 'text' (columns of strings: {strings})")
    count = 0
    for index, text in enumerate(rows[column]):
        if text:
            count += 1
            yield Document(f"{name}/{index}", text.encode())
    if count == 0:
        raise EmptyDataError(f"{spec!r} has no row with text in column {column!r}")


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _read(found: Iterable[tuple[str, Path]]) -> list[Document]:
    documents = (Document(name, path.read_bytes()) for name, path in found)
    return [document for document in documents if document.data]


# ------------------------------------------------------------------------------ codecs

END = 256  # the symbol that ends a document
NUM_SYMBOLS = 257


class Codec(Protocol):
    """How documents become tokens."""

    name: str
    vocab_size: int
    end: int  # the token that ends a document

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """All documents, each with the end token after it."""

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        """The bytes that tokens stand for, with 256 where a document ends."""


class Bytes:
    """Token i is byte i."""

    name = "bytes"
    vocab_size = NUM_SYMBOLS
    end = END

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        tokens = np.empty(sum(map(len, documents)) + len(documents), dtype_for(NUM_SYMBOLS))
        at = 0
        for document in documents:
            tokens[at : at + len(document)] = np.frombuffer(document, np.uint8)
            tokens[at + len(document)] = END
            at += len(document) + 1
        return tokens

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        return np.asarray(tokens, np.uint16)


class BytePairs:
    """Pieces of text, learned by merging frequent neighbours, down to single bytes."""

    def __init__(self, tokenizer: Any, asked: int) -> None:
        self.tokenizer = tokenizer
        self.name = f"bpe:{asked}"
        # Not a special token of the tokenizer: no text in a document can be mistaken for it.
        self.end = tokenizer.get_vocab_size()
        self.vocab_size = self.end + 1
        pieces = [_piece_bytes(tokenizer.id_to_token(i)) for i in range(self.end)]
        self._lengths = np.array([len(piece) for piece in pieces] + [1])
        self._begins = np.concatenate(([0], self._lengths[:-1].cumsum()))
        flat = np.frombuffer(b"".join(pieces), np.uint8).astype(np.uint16)
        self._flat = np.concatenate((flat, np.array([END], np.uint16)))

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> BytePairs:
        """Learn the pieces; the same documents in the same order give the same pieces."""
        package = require("tokenizers", "bpe")
        if vocab_size < NUM_SYMBOLS:
            raise DataError(
                f"bpe:{vocab_size}: 256 bytes and the end of a document need at least "
                f"{NUM_SYMBOLS} tokens; use bpe:{NUM_SYMBOLS} or more, or bytes"
            )
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            show_progress=False,
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator(map(_as_text, documents), trainer)
        return cls(tokenizer, vocab_size)

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> BytePairs:
        return cls(require("tokenizers", "bpe").Tokenizer.from_file(str(path)), vocab_size)

    def save(self, path: Path) -> None:
        self.tokenizer.save(str(path))

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        texts = [_as_text(document) for document in documents]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = np.empty(sum(len(one) for one in encodings) + len(texts), self._dtype)
        at = 0
        for encoding in encodings:
            tokens[at : at + len(encoding)] = encoding.ids
            tokens[at + len(encoding)] = self.end
            at += len(encoding) + 1
        return tokens

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        tokens = np.asarray(tokens, np.int64)
        lengths = self._lengths[tokens]
        ends = lengths.cumsum()
        # Each output position reads the flat table at: its token's begin there, plus how far into
        # the token it is.
        shift = self._begins[tokens] - (ends - lengths)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(shift, lengths)
        symbols: NDArray[np.uint16] = self._flat[at]
        return symbols

    @property
    def _dtype(self) -> np.dtype[Any]:
        return dtype_for(self.vocab_size)


def codec_named(name: str) -> tuple[str, int]:
    """``"bytes"`` or ``"bpe:SIZE"``: the kind and the size."""
    kind, _, size = name.partition(":")
    if kind == "bytes" and not size:
        return kind, NUM_SYMBOLS
    if kind == "bpe" and size.isdecimal():
        return kind, int(size)
    raise DataError(f"tokenizer {name!r} does not exist: use bytes, or bpe:SIZE such as bpe:4096")


def require(package: str, extra: str) -> Any:
    """Import a package that only an extra brings."""
    try:
        module = importlib.import_module(package)
        for part in ("models", "pre_tokenizers", "decoders", "trainers") * (extra == "bpe"):
            importlib.import_module(f"{package}.{part}")
    except ImportError as error:
        raise MissingExtraError(
            f"this needs the package {package!r}, which is not installed ({error}): "
            f"pip install 'shardwise[{extra}]'"
        ) from None
    return module


def _as_text(document: bytes) -> str:
    """A document as text. Bytes that are not UTF-8 become U+FFFD before lengths are counted."""
    return document.decode("utf-8", "replace")


def _piece_bytes(piece: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in piece)


def _byte_alphabet() -> dict[str, int]:
    """The characters of byte-level BPE: visible bytes stand for themselves, the others for the
    characters from U+0100 on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
