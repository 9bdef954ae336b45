# SPDX-License-Identifier: Apache-2.0
"""Tokenise: makes token files of texts (``shardwise data``), once for each text and tokenizer.

    stdlib               the sources of Python's standard library, without tests and tables: 9 MB
    stdlib+torch         the same and the sources of torch: 50 MB
    PATH, FOLDER, "*.txt"           text files; each is a document
    .jsonl, .jsonl.gz, .parquet     files of rows; the text of each row is a document
    hf:NAME[:CONFIG[:SPLIT]]        rows of a dataset, streamed

`tokenizers` encodes, and `datasets` reads parquet files and datasets. Whole documents are held out:
files by a hash of their names, rows by a hash of their text, so that copies are on one side and
more text does not change the choice. If that leaves too little (a single long text), the end of all
tokens is held out. This file does not import torch.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import importlib.util
import itertools
import json
import logging
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.notices import warn_once
from shardwise.train.tokens import (
    TOKENIZER,
    TOKENS,
    DataError,
    Tokens,
    describe,
    dtype_for,
    open_tokens,
    tail_begins,
    token_folder,
    whole_folder,
)

logger = logging.getLogger(__name__)

BATCH = 1 << 10  # documents that are encoded at a time, by all threads of `tokenizers`
LEARNED_FROM = 256 << 20  # bytes of text, from its begin, that pieces are learned from
MOST_HELD_OUT = 1 << 24  # tokens: enough for four digits of the loss, for texts of any size
END = 256  # the token after the 256 bytes
END_TEXT = "<|endoftext|>"  # the token that ends a document, in tokenizers that shardwise makes
BESIDE = "tokenizer_config.json"  # transformers reads it beside tokenizer.json
ROWS = (".jsonl", ".jsonl.gz", ".parquet")
# Folders of tests and tables, and folders that some installations of Python lack.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_NOT_TEXT = {"encodings", "pydoc_data", "idlelib", "lib2to3", "ensurepip", "turtledemo"}


class MissingExtraError(DataError, ImportError):
    """An optional package, which this kind of data needs, is not installed."""


def require(package: str, extra: str = "data") -> Any:
    """Import a package of an extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"this needs the package {package!r}, which is not installed ({error}): "
            f"pip install 'shardwise[{extra}]'"
        ) from None


# ------------------------------------------------------------------------------ tokenizers


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Args:
        lengths: the bytes of text of each token; 0 for special tokens.
        end: the token that ends a document.
        files: what `transformers` loads this tokenizer from, by name.
        engine: the object of the `tokenizers` package; ``None``: token i is byte i.
    """

    lengths: list[int]
    end: int
    files: Mapping[str, bytes]
    engine: Any = None

    @property
    def digest(self) -> str:
        """Equal digests mean equal tokens for equal text."""
        return hashlib.sha256(self.files[TOKENIZER]).hexdigest()

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each document, with the end token after it."""
        if self.engine is None:
            rows: list[Any] = [np.frombuffer(data, np.uint8) for data in documents]
        else:
            texts = [_as_text(data) for data in documents]
            encodings = self.engine.encode_batch_fast(texts, add_special_tokens=False)
            rows = [encoding.ids for encoding in encodings]
        return [np.append(row, self.end).astype(dtype_for(len(self.lengths))) for row in rows]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text to show: undecodable bytes as U+FFFD, special tokens left out."""
        if self.engine is not None:
            return str(self.engine.decode([*tokens]))
        return bytes(token for token in tokens if token < END).decode("utf-8", "replace")


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i, and 256 ends a document. This needs no package."""
    # The alphabet of byte-level BPE: visible characters stand for themselves, and the characters
    # from U+0100 on for the other bytes, in order.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted({*range(256)} - {*visible})
    vocab = {chr(byte): byte for byte in visible}
    vocab |= {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    described = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return Tokenizer([*[1] * 256, 0], END, _with_end(described, END))


def learned_tokenizer(documents: Iterable[bytes], size: int) -> Tokenizer:
    """``size - 1`` pieces learned from the first ``LEARNED_FROM`` bytes, and a token that ends a
    document. The same documents give the same pieces."""
    package = require("tokenizers")
    level = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level, package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size - 1, show_progress=False, initial_alphabet=sorted(level.alphabet())
    )

    def texts() -> Iterator[str]:
        read = 0
        for document in documents:
            yield _as_text(document)
            read += len(document)
            if read >= LEARNED_FROM:
                return

    tokenizer.train_from_iterator(texts(), trainer)
    return _of_files(_with_end(json.loads(tokenizer.to_str()), tokenizer.get_vocab_size()))


def open_tokenizer(name: str | Path) -> Tokenizer:
    """``bytes``, or the tokenizer in a ``tokenizer.json`` or in the folder of one."""
    of_bytes = byte_tokenizer()
    if name == "bytes":
        return of_bytes
    path = Path(name).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"tokenizer {str(name)!r} does not exist: use bytes, bpe:SIZE such as bpe:4096, or the "
            f"path of a {TOKENIZER} or of its folder"
        )
    named = {TOKENIZER: file, BESIDE: file.with_name(BESIDE)}
    files = {key: path.read_bytes() for key, path in named.items() if path.is_file()}
    same = files[TOKENIZER] == of_bytes.files[TOKENIZER]
    return of_bytes if same else _of_files(files, str(file))


def learned_size(name: str) -> int | None:
    """SIZE of ``bpe:SIZE``; ``None`` for other tokenizers."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return None
    if not size.isdecimal() or int(size) <= END:
        raise DataError(
            f"tokenizer {name!r}: 256 bytes and the end of a document need at least 257 tokens: "
            f"use bpe:257 or more, or bytes"
        )
    return int(size)


def vocabulary_of(name: str) -> int:
    """The number of tokens of a tokenizer; of one to learn, the number that is asked for."""
    return learned_size(name) or len(open_tokenizer(name).lengths)


def _of_files(files: dict[str, bytes], name: str = TOKENIZER) -> Tokenizer:
    package = require("tokenizers")
    try:
        engine = package.Tokenizer.from_str(files[TOKENIZER].decode())
        named = json.loads(files.get(BESIDE, b"{}")).get("eos_token", END_TEXT)
    except Exception as error:  # the package raises its errors as Exception itself
        raise DataError(f"{name} cannot be read ({error}): copy or make it again") from None
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # the text of a special token in a document is just text
    named = named.get("content") if isinstance(named, dict) else named
    end = engine.token_to_id(str(named))
    if end is None:
        raise DataError(
            f"{name} does not say which token ends a text: write "
            f'{{"eos_token": "..."}} into {BESIDE} beside it'
        )
    vocabulary, added = engine.get_vocab(), engine.get_added_tokens_decoder()
    byte_level = "ByteLevel" in engine.to_str()  # then a character of a piece stands for a byte
    lengths = [0] * (max(vocabulary.values()) + 1)
    for piece, number in vocabulary.items():
        if number in added:
            lengths[number] = 0 if added[number].special else len(piece.encode())
        elif byte_level:
            lengths[number] = len(piece)
        else:  # "<0x0A>" is a byte, and U+2581 a space
            is_byte = piece.startswith("<0x") and len(piece) == 6
            lengths[number] = 1 if is_byte else len(piece.replace("\u2581", " ").encode())
    lengths[end] = 0
    return Tokenizer(lengths, int(end), files, engine)


def _with_end(described: dict[str, Any], end: int) -> dict[str, bytes]:
    """The files of a tokenizer, with a token that ends a document added to its pieces."""
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": end, "content": END_TEXT, **options, "special": True}
    described = {**described, "added_tokens": [*described["added_tokens"], token]}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TEXT}
    config["clean_up_tokenization_spaces"] = False
    return {
        TOKENIZER: json.dumps(described, ensure_ascii=False).encode(),
        BESIDE: json.dumps(config, indent=2).encode(),
    }


def _as_text(document: bytes) -> str:
    text = document.decode("utf-8", "replace")
    if "\ufffd" in text:
        words = "text is not UTF-8: each such byte becomes U+FFFD. Convert it first"
        warn_once(logger, words, about="not UTF-8")
    return text


# ------------------------------------------------------------------------------ texts


@dataclass(frozen=True)
class Texts:
    """A file of text or of rows, or a dataset."""

    name: str
    path: Path | None = None  # None: a dataset
    size: int = 0  # bytes

    @property
    def has_rows(self) -> bool:
        return self.path is None or self.path.name.endswith(ROWS)

    @property
    def digest(self) -> str:
        """A digest of the contents; for a dataset, of its version."""
        if self.path is None:
            return str(_dataset(self.name)[0].hash)
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def documents(self, column: str) -> Iterator[bytes]:
        if self.path is not None and not self.has_rows:
            data = self.path.read_bytes()
            if b"\0" in data[:8192]:
                raise DataError(f"{self.path} is no text in UTF-8: name text files with a pattern")
            yield data
            return
        for row in self._rows():
            text = row.get(column, row) if isinstance(row, dict) else row
            if isinstance(text, str | None):
                yield (text or "").encode("utf-8", "replace")
                continue
            keys = f"keys: {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f"{self.path or self.name}: no text under {column!r} ({keys}): name the key of the "
                f"text with --column"
            )

    def _rows(self) -> Iterator[Any]:
        if self.path is None:
            builder, split = _dataset(self.name)
            yield from builder.as_streaming_dataset(split=split)
        elif self.path.suffix == ".parquet":
            options: dict[str, Any] = {"data_files": [str(self.path)], "streaming": True}
            yield from require("datasets").load_dataset("parquet", split="train", **options)
        else:
            try:
                with (gzip.open if self.path.suffix == ".gz" else open)(self.path, "rb") as file:
                    yield from (json.loads(line) for line in file if line.strip())
            except (ValueError, OSError, EOFError, zlib.error) as error:
                raise DataError(f"{self.path} cannot be read ({error}): copy it again") from None


def _dataset(spec: str) -> tuple[Any, str]:
    """The dataset of hf:NAME[:CONFIG[:SPLIT]], and the split."""
    name, config, split, *_ = [*spec.removeprefix("hf:").split(":"), "", ""]
    package = require("datasets")
    try:
        builder = package.load_dataset_builder(name, config or None)
    except (OSError, ValueError) as error:
        raise DataError(f"{spec!r} could not be opened ({str(error).splitlines()[0]})") from error
    return builder, split or "train"


def find_texts(sources: Sequence[str]) -> list[Texts]:
    """The files and datasets of all sources, in an order that does not depend on the file system.
    Hidden and empty files are left out."""
    found: list[Texts] = []
    for source in sources:
        before = len(found)
        if source.startswith("hf:"):
            found.append(Texts(source))
        elif source in ("stdlib", "stdlib+torch"):
            library = Path(sysconfig.get_paths()["stdlib"])
            found += _named("stdlib/", library, library.rglob("*.py"), _LEFT_OUT | _NOT_TEXT)
            spec = importlib.util.find_spec("torch") if source == "stdlib+torch" else None
            if spec is not None and spec.origin is not None:  # found without importing torch
                torch = Path(spec.origin).parent
                found += _named("torch/", torch, torch.rglob("*.py"), _LEFT_OUT)
        else:
            path = Path(source).expanduser()
            matches = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
            files = [f.absolute() for m in matches for f in (m.rglob("*") if m.is_dir() else [m])]
            # Names are relative to the nearest common folder, so that moved data are the same data.
            above = Path(os.path.commonpath([file.parent for file in files])) if files else path
            found += _named("", above, files)
        if len(found) == before:
            raise DataError(
                f"{source!r} names no data: there is no such file or folder with text, and the "
                f"pattern matches nothing; give a text, .jsonl or .parquet file, a folder, a "
                f"quoted pattern, a folder of tokens, stdlib, stdlib+torch or hf:NAME"
            )
    return found


def _named(
    prefix: str, above: Path, files: Iterable[Path], without: Iterable[str] = ()
) -> list[Texts]:
    """Texts by their names below a folder, without hidden and empty files and these folders."""
    texts = []
    for file in files:
        parts = file.relative_to(above).parts
        hidden = any(part.startswith(".") or part in without for part in parts)
        if not hidden and file.is_file() and (size := file.stat().st_size):
            texts.append(Texts(prefix + "/".join(parts), file, size))
    return sorted(texts, key=lambda text: text.name)


def held_out_files(texts: Sequence[Texts], fraction: float) -> set[str]:
    """The names of the text files to hold out: about ``fraction`` of their bytes, or none."""
    files = [text for text in texts if not text.has_rows]
    wanted = min(fraction * sum(text.size for text in files), 4.0 * MOST_HELD_OUT)
    held, size = set(), 0
    for text in sorted(files, key=lambda text: hashlib.sha256(text.name.encode()).digest()):
        if size < wanted and size + text.size <= 1.25 * wanted:
            held.add(text.name)
            size += text.size
    return held if size >= 0.5 * wanted else set()


# ------------------------------------------------------------------------------ making tokens


def make_tokens(
    sources: Sequence[str],
    out: Path | None = None,
    *,
    tokenizer: str = "bytes",
    column: str = "text",
    held_out: float = 0.05,
) -> Path:
    """Make a token folder of texts, unless there is one; return it.

    Args:
        out: a folder that does not exist yet, is empty, or holds the same tokens; ``None``: a
            folder of the cache (``$XDG_CACHE_HOME``), which may be deleted at any time.
        column: the key or column of rows that holds the text.
        held_out: fraction of the text that is never trained on.
    """
    if not 0 < held_out <= 0.5:
        raise DataError(f"held_out={held_out}: use more than 0 and at most 0.5")
    texts, size = find_texts(sources), learned_size(tokenizer)
    codec = open_tokenizer(tokenizer) if size is None else None
    version = codec.digest if codec else [tokenizer, require("tokenizers").__version__]
    about = [[f"{text.name}:{text.digest}" for text in texts], version, column, held_out]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise/tokens"
    folder = out or cache / key[:24]
    if token_folder(folder) is not None and open_tokens(folder)[1].key == key:
        return folder
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and holds something else: remove it, or name another place")
    held = held_out_files(texts, held_out)

    def documents() -> Iterator[tuple[bytes, bool]]:
        for text in texts:
            for data in filter(None, text.documents(column)):
                number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
                yield data, number < held_out * 2.0**64 if text.has_rows else text.name in held

    with whole_folder(folder) as partial:
        if size is not None:
            codec = learned_tokenizer((data for data, chosen in documents() if not chosen), size)
        assert codec is not None
        for name, contents in codec.files.items():
            (partial / name).write_bytes(contents)
        total = sum(text.size for text in texts)
        begins, count = _encode_all(documents(), codec, partial / TOKENS, total)
        if count - begins < 2:
            begins = tail_begins(count, min(held_out, MOST_HELD_OUT / max(1, count)))
        if min(begins, count - begins) < 2:
            raise DataError(
                f"{', '.join(sources)}: {begins} tokens to train on and {count - begins} held out "
                f"are too few: give more text, or a larger --held-out"
            )
        described: dict[str, Any] = {"end_token": codec.end, "tokenizer": codec.digest, "key": key}
        described["source"] = ",".join(sources)
        describe(partial, len(codec.lengths), begins, codec.lengths, **described)
    return folder


def _encode_all(
    documents: Iterator[tuple[bytes, bool]], codec: Tokenizer, file: Path, total: int
) -> tuple[int, int]:
    """Write the tokens of all documents, those held out last, with a progress bar on a terminal.
    Return where these begin, and the number of all tokens."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    held: list[Tokens] = []
    trained = scored = 0  # tokens
    with file.open("wb") as out, Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokens", total=total or None)
        while batch := [*itertools.islice(documents, BATCH)]:
            encoded = codec.encode([data for data, _ in batch])
            for (_, chosen), tokens in zip(batch, encoded, strict=True):
                if chosen and scored < MOST_HELD_OUT:
                    held.append(tokens)
                    scored += len(tokens)
                else:
                    out.write(tokens.data)
                    trained += len(tokens)
            bar.update(task, advance=sum(len(data) for data, _ in batch))
        for tokens in held:
            out.write(tokens.data)
    return trained, trained + scored
