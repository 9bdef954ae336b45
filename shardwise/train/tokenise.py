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
import json
import logging
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.notices import warn_once
from shardwise.train.tokens import (
    INFO,
    TOKENIZER,
    TOKENS,
    DataError,
    Tokens,
    describe,
    dtype_for,
    open_tokens,
    read_info,
    tail_begins,
    whole_folder,
)

logger = logging.getLogger(__name__)

BATCH = 4 << 20  # bytes of text that are encoded at a time, by all threads of `tokenizers`
LEARNED_FROM = 256 << 20  # bytes of text, from its begin, that pieces are learned from
REFERENCE = 16 << 20  # bytes of text of each part that simple models are counted on
MOST_HELD_OUT = 1 << 24  # tokens: enough for four digits of the loss, for texts of any size
END = 256  # the token after the 256 bytes
END_TEXT = "<|endoftext|>"  # the token that ends a document, in tokenizers that shardwise makes
# Files that transformers reads beside tokenizer.json.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Tokens that may end a text in a pretrained tokenizer whose tokenizer_config.json names none.
_ENDS = (END_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_ROWS = (".jsonl", ".ndjson", ".jsonl.gz", ".parquet")
# Folders of tables, and folders that some installations of Python lack.
_NOT_TEXT = {"encodings", "pydoc_data", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
_OTHER = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


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
    def vocab_size(self) -> int:
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """Equal digests mean equal tokens for equal text."""
        return hashlib.sha256(self.files[TOKENIZER]).hexdigest()

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """All documents, each with the end token after it."""
        dtype = dtype_for(self.vocab_size)
        if self.engine is None:
            found = [np.frombuffer(data, np.uint8).astype(dtype) for data in documents]
        else:
            texts = [_as_text(data) for data in documents]
            encodings = self.engine.encode_batch_fast(texts, add_special_tokens=False)
            found = [np.array(encoding.ids, dtype) for encoding in encodings]
        end = np.array([self.end], dtype)
        parts = [part for tokens in found for part in (tokens, end)]
        return np.concatenate(parts) if parts else np.empty(0, dtype)

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
    hidden = [byte for byte in range(256) if byte not in set(visible)]
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
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size - 1,
        show_progress=False,
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
    )

    def texts() -> Iterator[str]:
        left = LEARNED_FROM
        for document in documents:
            if left <= 0:
                return
            yield _as_text(document)
            left -= len(document)

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
    files = {TOKENIZER: file.read_bytes()}
    if files[TOKENIZER] == of_bytes.files[TOKENIZER]:
        return of_bytes
    beside = (file.parent / neighbour for neighbour in BESIDE)
    files |= {path.name: path.read_bytes() for path in beside if path.is_file()}
    return _of_files(files, str(file))


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
    return learned_size(name) or open_tokenizer(name).vocab_size


def _of_files(files: dict[str, bytes], name: str = TOKENIZER) -> Tokenizer:
    package = require("tokenizers")
    try:
        engine = package.Tokenizer.from_str(files[TOKENIZER].decode())
        named = json.loads(files.get(BESIDE[0], b"{}")).get("eos_token")
    except Exception as error:  # the package raises its errors as Exception itself
        raise DataError(f"{name} cannot be read ({error}): copy or make it again") from None
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # the text of a special token in a document is just text
    named = named.get("content") if isinstance(named, dict) else named
    ends = (engine.token_to_id(text) for text in (named, *_ENDS) if isinstance(text, str))
    end = next((number for number in ends if number is not None), None)
    if end is None:
        raise DataError(
            f"{name} does not say which token ends a text: write "
            f'{{"eos_token": "..."}} into tokenizer_config.json beside it'
        )
    vocabulary, added = engine.get_vocab(), engine.get_added_tokens_decoder()
    byte_level = "ByteLevel" in engine.to_str()  # then a character of a piece stands for a byte
    lengths = [0] * (max(vocabulary.values()) + 1)
    for piece, number in vocabulary.items():
        if number in added:
            lengths[number] = 0 if added[number].special else len(piece.encode())
        elif byte_level or re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            lengths[number] = len(piece) if byte_level else 1
        else:
            lengths[number] = len(piece.replace("\u2581", " ").encode())
    lengths[end] = 0
    return Tokenizer(lengths, int(end), files, engine)


def _with_end(described: dict[str, Any], end: int) -> dict[str, bytes]:
    """The files of a tokenizer, with a token that ends a document added to its pieces."""
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": end, "content": END_TEXT, **options, "special": True}
    described = {**described, "added_tokens": [*described["added_tokens"], token]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TEXT}
    return {
        TOKENIZER: json.dumps(described, ensure_ascii=False).encode(),
        BESIDE[0]: json.dumps({**config, "clean_up_tokenization_spaces": False}, indent=2).encode(),
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
        return self.path is None or self.path.name.lower().endswith(_ROWS)

    @property
    def digest(self) -> bytes:
        """A digest of the contents; for a dataset, of its version."""
        if self.path is None:
            return str(_dataset(self.name)[1]).encode()
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()


def find_texts(sources: Sequence[str]) -> list[Texts]:
    """The files and datasets of all sources, in an order that does not depend on the file system.
    Hidden and empty files are left out."""
    found: list[Texts] = []
    for source in sources:
        if source.startswith("hf:"):
            found.append(Texts(source))
        elif source in ("stdlib", "stdlib+torch"):
            library = Path(sysconfig.get_paths()["stdlib"])
            found += _named("stdlib/", library, library.rglob("*.py"), _OTHER | _NOT_TEXT)
            spec = importlib.util.find_spec("torch") if source == "stdlib+torch" else None
            if spec is not None and spec.origin is not None:  # found without importing torch
                torch = Path(spec.origin).parent
                found += _named("torch/", torch, torch.rglob("*.py"), _OTHER)
        else:
            path = Path(source).expanduser()
            matches = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
            files = [f for m in matches for f in (m.rglob("*") if m.is_dir() else [m])]
            files = [f.absolute() for f in files if f.is_file() and f.stat().st_size]
            # Names are relative to the nearest common folder, so that moved data are the same data.
            above = Path(os.path.commonpath([file.parent for file in files])) if files else path
            found += _named("", above, files)
        if not found:
            raise DataError(
                f"{source!r} names no data: there is no such file or folder with text, and the "
                f"pattern matches nothing; give a text, .jsonl or .parquet file, a folder, a "
                f"quoted pattern, a folder of tokens, stdlib, stdlib+torch or hf:NAME"
            )
    return found


def _named(
    prefix: str, above: Path, files: Iterable[Path], without: Iterable[str] = ()
) -> list[Texts]:
    """Texts by their names below a folder, without hidden files and these folders."""
    texts = []
    for file in dict.fromkeys(files):
        parts = file.relative_to(above).parts
        if not any(part.startswith(".") or part in without for part in parts):
            texts.append(Texts(prefix + "/".join(parts), file, file.stat().st_size))
    return sorted((text for text in texts if text.size), key=lambda text: text.name)


def held_out_files(texts: Sequence[Texts], fraction: float) -> set[str]:
    """The names of the text files to hold out: about ``fraction`` of their bytes, or none."""
    files = [text for text in texts if not text.has_rows]
    wanted = min(fraction * sum(text.size for text in files), 4.0 * MOST_HELD_OUT)
    held: set[str] = set()
    size = 0
    for text in sorted(files, key=lambda text: hashlib.sha256(text.name.encode()).digest()):
        if size < wanted and size + text.size <= 1.25 * wanted:
            held.add(text.name)
            size += text.size
    return held if size >= 0.5 * wanted else set()


def documents_of(text: Texts, column: str) -> Iterator[bytes]:
    """The documents of a text."""
    if text.path is not None and not text.has_rows:
        data = text.path.read_bytes()
        if b"\0" in data[:8192]:
            raise DataError(
                f"{text.path} is no text in UTF-8 (compressed, or binary): leave it out, or name "
                f"the text files with a pattern"
            )
        yield data
        return
    for row in _rows(text):
        found = row.get(column, row) if isinstance(row, dict) else row
        if found is not None and not isinstance(found, str):
            keys = f"keys: {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f"{text.path or text.name}: no text under {column!r} ({keys}): name the key of the "
                f"text with --column"
            )
        if found:
            yield found.encode("utf-8", "replace")


def _rows(text: Texts) -> Iterator[Any]:
    if text.path is None:
        yield from _dataset(text.name)[0]
    elif text.path.suffix.lower() == ".parquet":
        options: dict[str, Any] = {"data_files": [str(text.path)], "streaming": True}
        yield from require("datasets").load_dataset("parquet", split="train", **options)
    else:
        try:
            with (
                gzip.open(text.path) if text.path.suffix == ".gz" else text.path.open("rb") as file
            ):
                for line in file:
                    if line.strip():
                        yield json.loads(line)
        except (ValueError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{text.path} cannot be read ({error}): copy it again") from None


def _dataset(spec: str) -> tuple[Any, str]:
    """The rows of a dataset as a stream, and a digest of its files."""
    name, config, split, *_ = [*spec.removeprefix("hf:").split(":"), "", ""]
    package = require("datasets")
    try:
        builder = package.load_dataset_builder(name, config or None)
        return builder.as_streaming_dataset(split=split or "train"), str(builder.hash)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{spec!r} could not be opened ({str(error).splitlines()[0]}): check the name, the "
            f"configuration, the split and the network"
        ) from error


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
    codec = None if size is not None else open_tokenizer(tokenizer)
    digests = [f"{text.name}:{text.digest.hex()}" for text in texts]
    settings = [tokenizer if codec is None else codec.digest, column, held_out]
    if codec is None:
        settings.append(require("tokenizers").__version__)
    key = hashlib.sha256(json.dumps([digests, settings]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise/tokens"
    folder = out or cache / key[:24]
    if (folder / INFO).is_file() and read_info(folder).key == key:
        open_tokens(folder)
        return folder
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and holds something else: remove it, or name another place")
    held = held_out_files(texts, held_out)

    def documents() -> Iterator[tuple[bytes, bool]]:
        for text in texts:
            for data in documents_of(text, column):
                number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
                chosen = number < held_out * 2.0**64 if text.has_rows else text.name in held
                yield data, chosen

    with whole_folder(folder) as partial:
        if codec is None:
            assert size is not None
            codec = learned_tokenizer((data for data, chosen in documents() if not chosen), size)
        for name, contents in codec.files.items():
            (partial / name).write_bytes(contents)
        total = sum(text.size for text in texts)
        counts, references = _encode_all(documents(), codec, partial / TOKENS, total)
        begins, count = counts[0], sum(counts)
        if counts[1] < 2:
            begins = tail_begins(count, min(held_out, MOST_HELD_OUT / max(1, count)))
        if min(begins, count - begins) < 2:
            raise DataError(
                f"{', '.join(sources)}: {begins} tokens to train on and {count - begins} held out "
                f"are too few: give more text, or a larger --held-out"
            )
        described: dict[str, Any] = {"end_token": codec.end, "tokenizer": codec.digest, "key": key}
        described |= {"source": ",".join(sources), "references": references}
        describe(partial, codec.vocab_size, begins, codec.lengths, **described)
    return folder


def _encode_all(
    documents: Iterator[tuple[bytes, bool]], codec: Tokenizer, file: Path, total: int
) -> tuple[list[int], dict[str, float]]:
    """Write the tokens of all documents, those held out last, with a progress bar on a terminal.
    Return the number of tokens of both parts, and the figures of simple models."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=16), DownloadColumn(), TimeRemainingColumn(compact=True))
    waiting: tuple[list[bytes], list[bytes]] = ([], [])  # documents to train on, held out
    sizes, counts, texts = [0, 0], [0, 0], (bytearray(), bytearray())
    held: list[Tokens] = []

    with (
        file.open("wb") as out,
        Progress("tokens", *columns, console=console, disable=not console.is_terminal) as progress,
    ):

        def encode(part: int) -> None:
            tokens = codec.encode(waiting[part])
            if part:
                held.append(tokens)
            else:
                tokens.tofile(out)
            counts[part] += len(tokens)
            waiting[part].clear()
            sizes[part] = 0

        bar = progress.add_task("", total=total or None)
        for data, chosen in documents:
            part = int(chosen and counts[1] < MOST_HELD_OUT)
            waiting[part].append(data)
            sizes[part] += len(data)
            if len(texts[part]) < REFERENCE:
                texts[part].extend(data + b"\0")
            if sizes[part] >= BATCH:
                encode(part)
            progress.update(bar, advance=len(data))
        encode(0)
        encode(1)
        for tokens in held:
            tokens.tofile(out)
    train, scored = map(bytes, texts)
    cut = len(train) if scored else int(0.95 * len(train))
    return counts, references_of(train[:cut], scored or train[cut:])


def references_of(train: bytes, held_out: bytes) -> dict[str, float]:
    """Bits per byte of simple models on the held-out text, to compare a loss with.

    unigram   a model that knows the frequencies of bytes in the training text
    bigram    a model that also knows the byte before, backed off to the unigram
    zlib      the held-out text compressed at level 9
    """
    if len(held_out) < 2:
        return {}
    pairs, tested = (
        np.bincount(
            np.convolve(np.frombuffer(text, np.uint8), [1, 256], "valid"), minlength=1 << 16
        )
        .reshape(256, 256)
        .astype(np.float64)
        for text in (train, held_out)
    )
    single = (pairs.sum(0) + 1.0) / (pairs.sum() + 256.0)  # one more of each: none is impossible
    double = (pairs + single) / (pairs.sum(1, keepdims=True) + 1.0)
    return {
        "unigram": float(-(tested.sum(0) * np.log2(single)).sum() / tested.sum()),
        "bigram": float(-(tested * np.log2(double)).sum() / tested.sum()),
        "zlib": 8 * len(zlib.compress(held_out, 9)) / len(held_out),
    }
