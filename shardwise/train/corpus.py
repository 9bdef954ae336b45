# SPDX-License-Identifier: Apache-2.0
"""Corpus: the tokens to train on, the tokens held out, and what a loss on them means per byte.

Documents are held out whole, chosen by a hash of their names, so that no function is trained on
from its third line on and the choice survives new neighbours. A corpus of few, large documents
gives the end of its longest one instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwise.train.corpus_errors import DataError, ShortDataError
from shardwise.train.corpus_sources import Document
from shardwise.train.tokens import Tokens
from shardwise.train.tokens_codec import END, Codec

Split = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens in two parts.

    Args:
        name: as the user wrote it.
        train, held_out: 1-D arrays of unsigned integers, possibly mapped from a file.
        vocab_size: tokens that exist.
        sha256: of the text (or of the token file); two runs with one digest had the same data.
        codec: from text to tokens and back; ``None`` for a token file that doesn't say.
        train_bytes, held_out_bytes: the text that each part stands for; ``None`` where unknown.
    """

    name: str
    train: Tokens
    held_out: Tokens
    vocab_size: int
    sha256: str
    codec: Codec | None = None
    train_bytes: int | None = None
    held_out_bytes: int | None = None

    def __post_init__(self) -> None:
        for part in ("train", "held_out"):
            if len(getattr(self, part)) < 2:
                raise ShortDataError(
                    f"{self.name!r} leaves {len(getattr(self, part))} tokens for {part}: at least "
                    f"2 are needed, one to read and one to guess; give more text"
                )

    def bytes_per_token(self, split: Split = "held_out") -> float | None:
        """``None`` where the bytes are unknown."""
        count = self.train_bytes if split == "train" else self.held_out_bytes
        tokens = self.train if split == "train" else self.held_out
        return None if count is None else count / len(tokens)

    def bits_per_byte(
        self, loss: float, split: Split = "held_out", scored: Tokens | None = None
    ) -> float:
        """From a loss in nats per token; per token where the bytes are unknown (see `unit`).

        A part's tokens are of its mean length only on the whole: where some of them were scored,
        ``scored`` (:attr:`HeldOut.scored`) gives the exact figure.
        """
        length = self.bytes_per_token(split) or 1.0
        if scored is not None and self.codec is not None:
            length = num_bytes(self.codec, scored) / len(scored)
        return loss / math.log(2) / length

    @property
    def unit(self) -> str:
        return "bits/token" if self.held_out_bytes is None else "bits/byte"

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, without the token that ends a document."""
        if self.codec is None:
            raise DataError(f"{self.name!r} is tokens of an unknown tokenizer: give token numbers")
        return [int(token) for token in self.codec.encode([text.encode()])[:-1]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text to show: undecodable bytes as U+FFFD, a document's end as an empty line."""
        if self.codec is None:
            return " ".join(str(int(token)) for token in tokens)
        known = [int(token) for token in tokens if int(token) < self.codec.vocab_size]
        symbols = self.codec.symbols(np.array(known, np.int64))
        parts = np.split(symbols, np.flatnonzero(symbols == END))
        texts = [part[part != END].astype(np.uint8).tobytes() for part in parts]
        return b"\n\n".join(texts).decode("utf-8", "replace")


def num_bytes(codec: Codec, tokens: Tokens) -> int:
    """Every symbol is a byte, but for one end per document."""
    return len(codec.symbols(tokens)) - int(np.count_nonzero(tokens == codec.end))


def digest_of(documents: Sequence[Document]) -> str:
    """Of names, lengths and contents, so that no two corpora run together to the same."""
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


def _cut_the_longest(
    documents: Sequence[Document], wanted: float
) -> tuple[list[Document], list[Document]]:
    longest = max(documents, key=lambda one: len(one.data))
    at = max(1, len(longest.data) - math.ceil(wanted))
    line = longest.data.rfind(b"\n", 0, at)  # a line is not cut, unless it is all there is
    at = line + 1 if 0 < line and at - line <= wanted else at
    head = Document(longest.name, longest.data[:at])
    tail = Document(f"{longest.name} (end)", longest.data[at:])
    return [head if document is longest else document for document in documents], [tail]
