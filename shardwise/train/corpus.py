# SPDX-License-Identifier: Apache-2.0
"""Corpus: the tokens to train on, the tokens held out, and what a loss on them means per byte.

``load_corpus`` makes one from what a user writes after ``--data``:

stdlib, stdlib+torch, PATH, DIRECTORY, "GLOB", hf:NAME[:CONFIG[:SPLIT]]     text
FILE.bin                                   a token file (:mod:`shardwise.train.tokens`)
raw16:FILE:VOCAB, raw32:FILE:VOCAB         bare integers without a header
random:VOCAB                               noise, to measure speed with

Documents are held out whole, chosen by a hash of their names, so that no function is trained on
from its third line on and the choice survives new neighbours. A corpus of few, large documents
holds out the end of its longest one instead.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.attempt import is_abandoned, temporary
from shardwise.train.text import (
    END,
    NUM_SYMBOLS,
    BytePairs,
    Bytes,
    Codec,
    Document,
    codec_named,
    read_documents,
)
from shardwise.train.tokens import (
    DataError,
    DataNotFoundError,
    ShortDataError,
    Tokens,
    dtype_for,
    is_token_file,
    open_raw_tokens,
    open_tokens,
    write_tokens,
)

Split = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens in two parts.

    Args:
        name: the data as the user named them.
        train, held_out: 1-D arrays of unsigned integers, possibly mapped from a file.
        vocab_size: the number of different tokens.
        sha256: digest of the text (or of the token file); equal digests mean equal data.
        codec: from text to tokens and back; ``None`` for a token file without that knowledge.
        train_bytes, held_out_bytes: bytes of text in each part; ``None`` where unknown.
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

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, without the token that ends a document."""
        if self.codec is None:
            raise DataError(f"{self.name!r} is tokens of an unknown tokenizer: give token numbers")
        return [int(token) for token in self.codec.encode([text.encode()])[:-1]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text to show: undecodable bytes as U+FFFD, the end of a document as an empty line."""
        if self.codec is None:
            return " ".join(str(int(token)) for token in tokens)
        known = [int(token) for token in tokens if int(token) < self.codec.vocab_size]
        symbols = self.codec.symbols(np.array(known, np.int64))
        parts = np.split(symbols, np.flatnonzero(symbols == END))
        texts = [part[part != END].astype(np.uint8).tobytes() for part in parts]
        return b"\n\n".join(texts).decode("utf-8", "replace")


def num_bytes(codec: Codec, tokens: Tokens) -> int:
    """The bytes that tokens stand for; the end of a document is none."""
    return len(codec.symbols(tokens)) - int(np.count_nonzero(tokens == codec.end))


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

_MOST = 64 << 20  # symbols counted: more would change no digit that is shown
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class References:
    """Bits per byte of simple models on the held-out text, to compare a loss with.

    Ends of documents are included, as in the model's own figure: they are guessed, and are no byte.

    Args:
        unigram: a model that knows how frequent bytes are in the training text.
        bigram: a model that also knows the byte before, backed off to the unigram.
        zlib: the held-out text compressed at level 9.
    """

    unigram: float
    bigram: float
    zlib: float


def references_of(corpus: Corpus) -> References | None:
    """The references of a corpus; ``None`` for tokens whose bytes are unknown."""
    if corpus.codec is None or not corpus.held_out_bytes:
        return None
    train = corpus.codec.symbols(corpus.train[:_MOST])[:_MOST]
    held_out = corpus.codec.symbols(corpus.held_out[:_MOST])[:_MOST]
    num_bytes = np.count_nonzero(held_out != END)
    pairs, tested = count_pairs(train), count_pairs(held_out)

    single = pairs.sum(0) + 1.0  # every symbol once more: no probability is 0
    single /= single.sum()
    before = pairs.sum(1, keepdims=True)
    double = (pairs + single) / (before + 1.0)

    text = held_out[held_out != END].astype(np.uint8).tobytes()
    return References(
        unigram=float(-(tested.sum(0) * np.log2(single)).sum() / num_bytes),
        bigram=float(-(tested * np.log2(double)).sum() / num_bytes),
        zlib=8 * len(zlib.compress(text, 9)) / int(num_bytes),
    )


def count_pairs(symbols: NDArray[np.uint16]) -> NDArray[Any]:
    """How often symbol b follows symbol a: [257, 257]."""
    counts = np.zeros(NUM_SYMBOLS**2, np.int64)
    for begin in range(0, len(symbols) - 1, _CHUNK):
        chunk = symbols[begin : begin + _CHUNK + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * NUM_SYMBOLS + chunk[1:], minlength=len(counts))
    return counts.reshape(NUM_SYMBOLS, NUM_SYMBOLS).astype(np.float64)


# ------------------------------------------------------------------------------ load_corpus

_RANDOM_TOKENS = 1 << 22
_MOST_HELD_OUT = 1 << 24  # tokens: enough for four digits, whatever the size of the file


def holds_tokens(spec: str) -> bool:
    """Whether the data are token numbers already, which no tokenizer reads."""
    path = Path(spec).expanduser()
    head = spec.partition(":")[0]
    return head in ("raw16", "raw32", "random") or path.suffix == ".bin" or is_token_file(path)


def load_corpus(
    spec: str,
    *,
    tokenizer: str = "bytes",
    held_out: float = 0.05,
    cache: str | Path | None = None,
) -> Corpus:
    """The same corpus on every rank that asks; no communication.

    Args:
        spec: the data, as the module's docstring lists them.
        tokenizer: ``bytes`` or ``bpe:SIZE``, for text.
        held_out: fraction of the bytes (or tokens) that is never trained on.
        cache: directory for what is costly to make (learned pieces and the tokens made with them).
            A rank that finds them there does not make them again: let one rank per machine go
            first.
    """
    kind, size = codec_named(tokenizer)
    head, _, rest = spec.partition(":")
    if head == "random":
        return _random_corpus(spec, rest)
    if holds_tokens(spec):
        if kind != "bytes":
            raise DataError(f"{spec!r} holds tokens already: --tokenizer {tokenizer} is for text")
        path = Path(spec).expanduser()
        return _raw_corpus(spec, held_out) if head.startswith("raw") else _bin(path, held_out)
    documents = read_documents(spec)
    sha256 = digest_of(documents)
    train, held = hold_out(documents, held_out)
    if kind == "bpe":
        return _byte_pair_corpus(spec, sha256, train, held, size, cache)
    return _text_corpus(spec, sha256, train, held, Bytes())


def _text_corpus(
    name: str, sha256: str, train: list[Document], held: list[Document], codec: Codec
) -> Corpus:
    parts = [codec.encode([document.data for document in part]) for part in (train, held)]
    return _corpus_of(name, sha256, parts[0], parts[1], codec)


def _corpus_of(name: str, sha256: str, train: Tokens, held_out: Tokens, codec: Codec) -> Corpus:
    sizes = [num_bytes(codec, tokens) for tokens in (train, held_out)]
    return Corpus(
        name=name,
        train=train,
        held_out=held_out,
        vocab_size=codec.vocab_size,
        sha256=sha256,
        codec=codec,
        train_bytes=sizes[0],
        held_out_bytes=sizes[1],
    )


# ----------------------------------------------------------------------------------- learned pieces


def _byte_pair_corpus(
    name: str,
    sha256: str,
    train: list[Document],
    held: list[Document],
    size: int,
    cache: str | Path | None,
) -> Corpus:
    """Pieces are learned from the training part alone."""
    if cache is None:
        codec = BytePairs.train((document.data for document in train), size)
        return _text_corpus(name, sha256, train, held, codec)
    # The digest of both parts: another fraction held out learns other pieces.
    key = hashlib.sha256((digest_of(train) + digest_of(held)).encode()).hexdigest()[:16]
    folder = Path(cache) / f"bpe-{size}-{key}"
    if not folder.is_dir():
        codec = BytePairs.train((document.data for document in train), size)
        _write_folder(folder, _text_corpus(name, sha256, train, held, codec), codec)
    codec = BytePairs.load(folder / "tokenizer.json", size)
    parts = [open_tokens(folder / f"{part}.bin")[0] for part in ("train", "held_out")]
    return _corpus_of(name, sha256, parts[0], parts[1], codec)


def _write_folder(folder: Path, corpus: Corpus, codec: BytePairs) -> None:
    """Write a cache folder whole or not at all. Two writers write the same."""
    if folder.parent.is_dir():
        for left in filter(is_abandoned, folder.parent.iterdir()):
            shutil.rmtree(left, ignore_errors=True)  # of a writer that was killed
    partial = temporary(folder)
    partial.mkdir(parents=True)
    try:
        codec.save(partial / "tokenizer.json")
        size, train, held = corpus.vocab_size, corpus.train_bytes, corpus.held_out_bytes
        write_tokens(partial / "train.bin", corpus.train, size, num_bytes=train)
        write_tokens(partial / "held_out.bin", corpus.held_out, size, num_bytes=held)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # not another rank that was quicker
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ------------------------------------------------------------------------------------ token files


def _bin(path: Path, held_out: float) -> Corpus:
    tokens, header = open_tokens(path)
    train, held = _cut_end(str(path), tokens, held_out)
    if header.tokenizer == "bytes":
        codec = Bytes()
        if header.vocab_size != codec.vocab_size:
            raise DataError(
                f"{path} says that its tokens are bytes, but vocab_size={header.vocab_size} and "
                f"bytes have {codec.vocab_size}: write it again"
            )
        return _corpus_of(str(path), header.sha256, train, held, codec)
    rate = None if header.num_bytes is None else header.num_bytes / header.count
    return Corpus(
        name=str(path),
        train=train,
        held_out=held,
        vocab_size=header.vocab_size,
        sha256=header.sha256,
        train_bytes=None if rate is None else round(rate * len(train)),
        held_out_bytes=None if rate is None else round(rate * len(held)),
    )


def _raw_corpus(spec: str, held_out: float) -> Corpus:
    """A corpus of ``raw16:PATH:VOCAB``. The digest is of the size and both ends of the file."""
    kind, _, rest = spec.partition(":")
    name, _, vocab = rest.rpartition(":")
    if not name or not vocab.isdecimal() or int(vocab) < 1:
        raise DataError(f"{spec!r}: write {kind}:PATH:VOCAB, for example {kind}:train.bin:50257")
    tokens = open_raw_tokens(Path(name).expanduser(), int(kind.removeprefix("raw")), int(vocab))
    digest = hashlib.sha256(str(len(tokens)).encode())
    for end in (tokens[: 1 << 20], tokens[-(1 << 20) :]):
        digest.update(np.ascontiguousarray(end).data)
    train, held = _cut_end(spec, tokens, held_out)
    return Corpus(
        name=spec, train=train, held_out=held, vocab_size=int(vocab), sha256=digest.hexdigest()
    )


def _cut_end(name: str, tokens: Tokens, fraction: float) -> tuple[Tokens, Tokens]:
    """Hold out the end: token files do not say where documents begin."""
    if not 0 < fraction <= 0.5:
        raise DataError(f"held out fraction {fraction}: use more than 0 and at most 0.5")
    if len(tokens) == 0:
        raise DataNotFoundError(f"{name} holds no tokens: write it again")
    at = len(tokens) - min(max(2, round(fraction * len(tokens))), _MOST_HELD_OUT)
    return tokens[: max(at, 0)], tokens[max(at, 0) :]


def _random_corpus(spec: str, vocab: str) -> Corpus:
    if not vocab.isdecimal() or not 1 <= int(vocab) <= 1 << 32:
        raise DataError(f"{spec!r}: write random:VOCAB, for example random:50304")
    size = int(vocab)
    tokens = np.random.default_rng(0).integers(0, size, _RANDOM_TOKENS, dtype=np.uint32)
    train, held = _cut_end(spec, tokens.astype(dtype_for(size)), 1 / 64)
    sha256 = hashlib.sha256(spec.encode()).hexdigest()
    return Corpus(name=spec, train=train, held_out=held, vocab_size=size, sha256=sha256)
