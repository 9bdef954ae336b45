# SPDX-License-Identifier: Apache-2.0
"""Codecs: text to tokens and back, with no byte lost, so that a loss per token is one per byte.

``bytes`` needs nothing: token i is byte i, and 256 ends a document. ``bpe:SIZE`` learns SIZE - 1
pieces from the training text with the `tokenizers` package (an extra) and ends documents with
its last token. Both give back the *symbols* of tokens: bytes 0 to 255, and 256 for the end of a
document, in which reference entropies are counted.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.train.corpus_errors import DataError, MissingExtraError
from shardwise.train.tokens import Tokens, dtype_for

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
    """Import what only an extra brings."""
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
    """Bytes that are not UTF-8 become U+FFFD; lengths are counted after that."""
    return document.decode("utf-8", "replace")


def _piece_bytes(piece: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in piece)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself where it is visible, and
    the characters from U+0100 on, in order, for the others."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
