# SPDX-License-Identifier: Apache-2.0
"""``load_corpus``: from what a user writes after ``--data`` to tokens.

stdlib, stdlib+torch, PATH, DIRECTORY, "GLOB", hf:NAME[:CONFIG[:SPLIT]]     text
FILE.bin                                   a token file (:mod:`shardwise.train.tokens`)
raw16:FILE:VOCAB, raw32:FILE:VOCAB         bare integers, which say nothing of themselves
random:VOCAB                               noise, to measure speed with
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np

from shardwise.checkpoint import owner
from shardwise.train.corpus import Corpus, digest_of, hold_out, num_bytes
from shardwise.train.corpus_errors import DataError, DataNotFoundError
from shardwise.train.corpus_sources import Document, read_documents
from shardwise.train.tokens import (
    Tokens,
    dtype_for,
    is_token_file,
    open_raw_tokens,
    open_tokens,
    write_tokens,
)
from shardwise.train.tokens_codec import BytePairs, Bytes, Codec, codec_named

_RANDOM_TOKENS = 1 << 22
_MOST_HELD_OUT = 1 << 24  # tokens: enough for four digits, whatever the size of the file


def load_corpus(
    spec: str,
    *,
    tokenizer: str = "bytes",
    held_out: float = 0.05,
    cache: str | Path | None = None,
) -> Corpus:
    """The same corpus on every rank that asks; no communication.

    Args:
        spec: see the module.
        tokenizer: ``bytes`` or ``bpe:SIZE``, for text.
        held_out: fraction of the bytes (or tokens) that is never trained on.
        cache: directory for what is costly to make (learned pieces and the tokens made with them).
            Whoever finds them there doesn't make them again: let one rank per machine go first.
    """
    kind, size = codec_named(tokenizer)
    head, _, rest = spec.partition(":")
    if head == "random":
        return _random_corpus(spec, rest)
    path = Path(spec).expanduser()
    if head in ("raw16", "raw32") or is_token_file(path) or path.suffix == ".bin":
        if kind != "bytes":
            raise DataError(f"{spec!r} holds tokens already: --tokenizer {tokenizer} is for text")
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
    """All of it or nothing: written beside, then renamed. Two writers write the same."""
    if folder.parent.is_dir():
        for left in filter(owner.is_abandoned, folder.parent.iterdir()):
            shutil.rmtree(left, ignore_errors=True)  # by a writer that was killed
    partial = owner.temporary(folder)
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
    """``raw16:PATH:VOCAB``; its digest is of the size and the ends, for want of a header."""
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
    """Token files don't say where documents begin: their end is held out."""
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
