# SPDX-License-Identifier: Apache-2.0
"""Tokenise: makes token files of texts (``shardwise data``), once for each text and tokenizer.

    stdlib               the sources of Python's standard library, without tests and tables: 9 MB
    stdlib+torch         the same and the sources of torch: 50 MB
    PATH, FOLDER, "*.txt"           text files; each is a document
    .jsonl, .jsonl.gz, .parquet     files of rows; the text of each row is a document
    hf:NAME[:CONFIG[:SPLIT]]        rows of a dataset, streamed

Whole documents are held out, so that held-out text is never the end of a text that was trained on.
Of files they are chosen by a hash of their names, of rows by a hash of their text, so that copies
are on one side and more text does not change the choice. If that leaves too little (a single long
text), the end of all tokens is held out.

No byte is lost, so a loss per token is also a loss per byte. If a pretrained tokenizer changes the
text (a normalizer), the bytes of the changed text are counted. This file does not import torch.
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
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.notices import warn_once
from shardwise.train.tokens import (
    CHUNK,
    INFO,
    TOKENIZER,
    DataError,
    Tokens,
    TokenWriter,
    dtype_for,
    open_tokens,
    read_info,
    tail_begins,
    whole_folder,
)

logger = logging.getLogger(__name__)

BATCH = 4 << 20  # bytes of text that are encoded at a time, by all threads of `tokenizers`
LEARNED_FROM = 256 << 20  # bytes of text, from its begin, that pieces are learned from
MOST_HELD_OUT = 1 << 24  # tokens: enough for four digits of the loss, for texts of any size
END = 256  # the symbol that ends a document; the symbols before are bytes
END_TEXT = "<|endoftext|>"  # the token that ends a document, in tokenizers that shardwise makes
# Files that transformers reads beside tokenizer.json.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Tokens that may end a text in a pretrained tokenizer, if no file beside it names the token.
_ENDS = (END_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_ROWS = (".jsonl", ".ndjson", ".jsonl.gz", ".parquet")
# Folders of tables, and folders that some installations of Python lack.
_NOT_TEXT = {"encodings", "pydoc_data", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
_OTHER = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\xff\xfe")


class MissingExtraError(DataError, ImportError):
    """An optional package, which this kind of data needs, is not installed."""


def require(package: str, extra: str) -> Any:
    """Import a package of an extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"this needs the package {package.partition('.')[0]!r}, which is not installed "
            f"({error}): pip install 'shardwise[{extra}]'"
        ) from None


# ------------------------------------------------------------------------------ tokenizers


class Tokenizer:
    """Text to tokens and back.

    Args:
        pieces: the bytes of each token; empty for special tokens.
        end: the token that ends a document.
        files: what `transformers` loads this tokenizer from, by name.
        engine: the object of the `tokenizers` package; ``None``: token i is byte i.
    """

    def __init__(
        self, pieces: Sequence[bytes], end: int, files: Mapping[str, bytes], engine: Any = None
    ) -> None:
        self.end, self.files, self.engine = end, dict(files), engine
        self.vocab_size = len(pieces)
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self._pieces = list(pieces)

    @property
    def digest(self) -> str:
        """Equal digests mean equal tokens for equal text."""
        return hashlib.sha256(self.files[TOKENIZER]).hexdigest()

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """All documents, each with the end token after it."""
        if self.engine is None:
            found: Sequence[Any] = [np.frombuffer(data, np.uint8) for data in documents]
        else:
            texts = [_as_text(data) for data in documents]
            encodings = self.engine.encode_batch_fast(texts, add_special_tokens=False)
            found = [encoding.ids for encoding in encodings]
        tokens = np.empty(sum(map(len, found)) + len(found), dtype_for(self.vocab_size))
        at = 0
        for document in found:
            tokens[at : at + len(document)] = document
            tokens[at + len(document)] = self.end
            at += len(document) + 1
        return tokens

    def num_bytes(self, tokens: Tokens) -> int:
        """The number of bytes that tokens stand for; the end of a document has none."""
        chunks = (tokens[at : at + CHUNK] for at in range(0, len(tokens), CHUNK))
        return sum(int(self.lengths[chunk].sum()) for chunk in chunks)

    @cached_property
    def _table(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint16]]:
        """Length and begin of each token in an array of the symbols of all."""
        symbols = [list(piece) for piece in self._pieces]
        symbols[self.end] = [END]
        lengths = np.array([len(part) for part in symbols], np.int64)
        flat = np.array([symbol for part in symbols for symbol in part], np.uint16)
        return lengths, lengths.cumsum() - lengths, flat

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        """The bytes that tokens stand for, with 256 where a document ends."""
        lengths, begins, flat = self._table
        tokens = np.asarray(tokens, np.int64)
        sizes = lengths[tokens]
        ends = sizes.cumsum()
        # A symbol is at the begin of its token in the flat array, plus its offset in the token.
        at = np.arange(ends[-1] if len(ends) else 0)
        symbols: NDArray[np.uint16] = flat[at + np.repeat(begins[tokens] - (ends - sizes), sizes)]
        return symbols

    def decode(self, tokens: Sequence[int]) -> str:
        """Text to show: undecodable bytes as U+FFFD, the end of a document as an empty line."""
        symbols = self.symbols(np.array([t for t in tokens if t < self.vocab_size], np.int64))
        parts = np.split(symbols, np.flatnonzero(symbols == END))
        texts = [part[part != END].astype(np.uint8).tobytes() for part in parts]
        return b"\n\n".join(texts).decode("utf-8", "replace")


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i, and 256 ends a document. This needs no package."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    described = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": _BYTE_OF, "merges": []},
    }
    pieces = [bytes([byte]) for byte in range(256)]
    return Tokenizer([*pieces, b""], END, _with_end(described, END))


def learned_tokenizer(documents: Iterable[bytes], size: int) -> Tokenizer:
    """``size - 1`` pieces learned from the first ``LEARNED_FROM`` bytes, and a token that ends a
    document. The same documents give the same pieces."""
    package = require("tokenizers", "data")
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
            if left > 0:
                yield _as_text(document)
            left -= len(document)

    tokenizer.train_from_iterator(texts(), trainer)
    files = _with_end(json.loads(tokenizer.to_str()), tokenizer.get_vocab_size())
    return _of_engine(package.Tokenizer.from_str(files[TOKENIZER].decode()), files)


def open_tokenizer(name: str | Path) -> Tokenizer:
    """``bytes``, or the tokenizer in a ``tokenizer.json`` or in the folder of one."""
    if name == "bytes":
        return byte_tokenizer()
    path = Path(name).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"tokenizer {str(name)!r} does not exist: use bytes, bpe:SIZE such as bpe:4096, or the "
            f"path of a {TOKENIZER} or of its folder"
        )
    files = {TOKENIZER: file.read_bytes()}
    if files[TOKENIZER] == (of_bytes := byte_tokenizer()).files[TOKENIZER]:
        return of_bytes
    beside = (file.parent / neighbour for neighbour in BESIDE)
    files |= {path.name: path.read_bytes() for path in beside if path.is_file()}
    package = require("tokenizers", "data")
    try:
        engine = package.Tokenizer.from_str(files[TOKENIZER].decode())
    except Exception as error:  # the package raises its errors as Exception itself
        raise DataError(f"{file} cannot be read ({error})") from None
    return _of_engine(engine, files, file)


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


def _of_engine(engine: Any, files: dict[str, bytes], file: Path | None = None) -> Tokenizer:
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # the text of a special token in a document is just text
    end = _end_of(engine, files, file)
    spellings = {number: piece for piece, number in engine.get_vocab().items()}
    added: dict[int, Any] = engine.get_added_tokens_decoder()
    byte_level = "ByteLevel" in engine.to_str()
    pieces = [b""] * (max(spellings) + 1)
    for number, spelling in spellings.items():
        if number not in added:
            pieces[number] = _piece_bytes(spelling, byte_level)
        elif not added[number].special:
            pieces[number] = str(added[number].content).encode()
    pieces[end] = b""
    return Tokenizer(pieces, end, files, engine)


def _as_text(document: bytes) -> str:
    """A document as text. Bytes that are not UTF-8 become U+FFFD, also for counts of bytes."""
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        text = "text is not UTF-8 (%r): such bytes are lost, each becomes U+FFFD. Convert it first"
        part = document[max(0, error.start - 16) : error.end + 16]
        warn_once(logger, text, part, about="not UTF-8")
        return document.decode("utf-8", "replace")


def _end_of(engine: Any, files: Mapping[str, bytes], file: Path | None) -> int:
    """The token that ends a text: from the files beside a tokenizer, or a usual spelling."""
    spellings: list[Any] = []
    for name in BESIDE[:2]:
        named = _json_of(files.get(name, b"{}"), name).get("eos_token")
        spellings.append(named.get("content") if isinstance(named, dict) else named)
    for name in ("generation_config.json", "config.json"):
        path = None if file is None else file.parent / name
        if path is not None and path.is_file():
            number = _json_of(path.read_bytes(), str(path)).get("eos_token_id")
            number = number[0] if isinstance(number, list) and number else number
            spellings.append(engine.id_to_token(number) if isinstance(number, int) else None)
    for spelling in [*spellings, *_ENDS]:
        number = engine.token_to_id(spelling) if isinstance(spelling, str) else None
        if number is not None:
            return int(number)
    raise DataError(
        f"{file or TOKENIZER} does not say which token ends a text: write "
        f'{{"eos_token": "..."}} into tokenizer_config.json beside it'
    )


def _json_of(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DataError(f"{name} is no JSON ({error}): repair or remove it") from None
    return value if isinstance(value, dict) else {}


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


def _piece_bytes(piece: str, byte_level: bool) -> bytes:
    if byte_level:
        return bytes(_BYTE_OF[character] for character in piece if character in _BYTE_OF)
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    if match is not None:  # a single byte, for text that other pieces can't spell
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level BPE. Visible characters stand for themselves; the
    characters from U+0100 on stand for the other bytes, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


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


def find_texts(sources: Sequence[str]) -> list[Texts]:
    """The files and datasets of all sources, in an order that does not depend on the file system.
    Hidden and empty files are left out."""
    found: list[Texts] = []
    for source in sources:
        if source.startswith("hf:"):
            found.append(Texts(source))
        elif source in ("stdlib", "stdlib+torch"):
            library = Path(sysconfig.get_paths()["stdlib"])
            found += _python_sources("stdlib", library, _OTHER | _NOT_TEXT)
            if not found:
                raise DataError(
                    f"this Python has no readable sources of its standard library in {library}: "
                    f"name other data, for example --data 'texts/*.txt'"
                )
            spec = importlib.util.find_spec("torch") if source == "stdlib+torch" else None
            if spec is not None and spec.origin is not None:  # found without importing torch
                found += _python_sources("torch", Path(spec.origin).parent, _OTHER)
        else:
            found += _files(source)
    places = [text.path or text.name for text in found]
    if len(set(places)) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise DataError(f"{twice} is in several of the sources: name it once")
    return found


def _python_sources(prefix: str, folder: Path, without: set[str]) -> list[Texts]:
    named = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if not without.intersection(parts):
            named.append(Texts("/".join((prefix, *parts)), path, path.stat().st_size))
    return [text for text in sorted(named, key=lambda text: (text.name, text.path)) if text.size]


def _files(source: str) -> list[Texts]:
    path = Path(source).expanduser()
    matches = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    paths = [file for match in matches for file in (_below(match) if match.is_dir() else [match])]
    paths = [file for file in dict.fromkeys(paths) if file.is_file() and file.stat().st_size]
    if not paths:
        raise DataError(
            f"{source!r} names no data: there is no such file or folder with text, and the pattern "
            f"matches nothing; give a text, .jsonl or .parquet file, a folder, a quoted pattern, "
            f"a folder of tokens, stdlib, stdlib+torch or hf:NAME"
        )
    # Names are relative to the nearest common folder, so that moved data are the same data.
    above = os.path.commonpath([file.parent.absolute() for file in paths])
    named = [(file.absolute().relative_to(above).as_posix(), file) for file in paths]
    return [Texts(name, file, file.stat().st_size) for name, file in sorted(named)]


def _below(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return files


def digest_of(texts: Sequence[Texts]) -> str:
    """The sha256 of names, sizes and contents."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text.name}\0{text.size}\0".encode())
        if text.path is None:
            digest.update(_dataset(text.name)[1].encode())
            continue
        with text.path.open("rb") as file:
            while data := file.read(CHUNK):
                digest.update(data)
    return digest.hexdigest()


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


def documents_of(text: Texts, column: str) -> Iterator[tuple[bytes, int]]:
    """The documents of a text, and the bytes on the disk that each takes."""
    if text.path is None:
        yield from ((data, 0) for data in _strings(_dataset(text.name)[0], column, text.name))
    elif text.path.name.lower().endswith(".parquet"):
        package = require("datasets", "data")
        options: dict[str, Any] = {"data_files": [str(text.path)], "streaming": True}
        rows = package.load_dataset("parquet", split="train", **options)
        groups = _strings(rows, column, str(text.path))
        yield from ((data, len(data)) for data in groups)
    elif text.has_rows:
        yield from _lines(text.path, column)
    else:
        data = text.path.read_bytes()
        if data.startswith(_PACKED) or b"\0" in data[:8192]:
            raise DataError(
                f"{text.path} is no text in UTF-8 (compressed, or binary): leave it out, or name "
                f"the text files with a pattern"
            )
        yield data, len(data)


def _lines(path: Path, column: str) -> Iterator[tuple[bytes, int]]:
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    for data in _strings([json.loads(line)], column, where):
                        yield data, len(line)
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read ({error}): repair it, or copy it again") from None


def _dataset(spec: str) -> tuple[Any, str]:
    """The rows of a dataset as a stream, and a digest of its files."""
    name, config, split, *rest = [*spec.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise DataError(f"{spec!r}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    package = require("datasets", "data")
    try:
        builder = package.load_dataset_builder(name, config or None)
        rows = builder.as_streaming_dataset(split=split or "train")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{spec!r} could not be opened ({str(error).splitlines()[0]}): check the name, the "
            f"configuration, the split and the network"
        ) from error
    return rows, str(builder.hash)


def _strings(rows: Iterable[Any], column: str, where: str) -> Iterator[bytes]:
    """The texts of rows that have any."""
    for row in rows:
        text = row.get(column, row) if isinstance(row, dict) else row
        if text is not None and not isinstance(text, str):
            keys = f"keys: {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f"{where}: no text under {column!r} ({keys}): name the key of the text with "
                f"--column"
            )
        if text:
            yield text.encode("utf-8", "replace")


# ------------------------------------------------------------------------------ making tokens


def cache_folder() -> Path:
    """Where token files are kept that no ``--out`` names. It may be deleted at any time."""
    try:
        place = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # a user without a home
        raise DataError("there is no home for a cache: set XDG_CACHE_HOME to a folder") from None
    return place / "shardwise" / "tokens"


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
            folder of the cache.
        column: the key or column of rows that holds the text.
        held_out: fraction of the text that is never trained on.
    """
    if not 0 < held_out <= 0.5:
        raise DataError(f"held_out={held_out}: use more than 0 and at most 0.5")
    texts, size = find_texts(sources), learned_size(tokenizer)
    codec = None if size is not None else open_tokenizer(tokenizer)
    settings = [tokenizer if codec is None else codec.digest, held_out]
    settings += [column] * any(text.has_rows for text in texts)
    if codec is None:
        settings.append(require("tokenizers", "data").__version__)
    key = hashlib.sha256(json.dumps([digest_of(texts), *settings]).encode()).hexdigest()
    folder = out or cache_folder() / key[:24]
    if (folder / INFO).is_file() and read_info(folder).key == key:
        open_tokens(folder)
        return folder
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and holds something else: remove it, or name another place")
    held = held_out_files(texts, held_out)

    def documents() -> Iterator[tuple[bytes, bool, int]]:
        for text in texts:
            for data, taken in documents_of(text, column):
                chosen = text.name in held
                if text.has_rows:
                    number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
                    chosen = number < held_out * 2.0**64
                yield data, chosen, taken

    with whole_folder(folder) as partial:
        if codec is None:
            assert size is not None
            codec = learned_tokenizer((data for data, chosen, _ in documents() if not chosen), size)
        for name, contents in codec.files.items():
            (partial / name).write_bytes(contents)
        writer = TokenWriter(partial, codec.vocab_size)
        label = f"tokens of {sources[0]}" + f" and {len(sources) - 1} more" * (len(sources) > 1)
        _encode_all(documents(), codec, writer, label, sum(text.size for text in texts))
        tokens = writer.join()
        cut = writer.counts[0]
        if len(tokens) - cut < 2:
            cut = tail_begins(len(tokens), min(held_out, MOST_HELD_OUT / max(1, len(tokens))))
        train, scored = tokens[:cut], tokens[cut:]
        if min(len(train), len(scored)) < 2 or not codec.num_bytes(scored[1:]):
            raise DataError(
                f"{', '.join(sources)}: {len(train)} tokens to train on and {len(scored)} held "
                f"out are too few: give more text, or a larger --held-out"
            )
        writer.describe(
            held_out_begins=cut,
            end_token=codec.end,
            train_bytes=codec.num_bytes(train),
            held_out_bytes=codec.num_bytes(scored),
            tokenizer=codec.digest,
            key=key,
            source=",".join(sources),
            references=references_of(codec, train, scored),
            token_bytes=codec.lengths.tolist(),
        )
    return folder


def _encode_all(
    documents: Iterator[tuple[bytes, bool, int]],
    codec: Tokenizer,
    writer: TokenWriter,
    label: str,
    total: int,
) -> None:
    """Encode all documents, in batches, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=16), DownloadColumn(), TextColumn("{task.fields[made]} tokens"))
    console = Console(stderr=True)
    batches: tuple[list[bytes], list[bytes]] = ([], [])  # to train on, held out
    sizes = [0, 0]

    def encode(held_out: bool) -> None:
        writer.add(codec.encode(batches[held_out]), held_out=held_out)
        batches[held_out].clear()
        sizes[held_out] = 0

    with Progress(
        TextColumn("{task.description}"),
        *columns,
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task(label, total=total or None, made="0")
        for data, chosen, taken in documents:
            part = chosen and writer.counts[1] < MOST_HELD_OUT
            batches[part].append(data)
            sizes[part] += len(data)
            if sizes[part] >= BATCH:
                encode(part)
            progress.update(bar, advance=taken, made=f"{sum(writer.counts):,}")
        encode(False)
        encode(True)


# ------------------------------------------------------------------------------ references

_MOST = 16 << 20  # symbols to count, about: more would take seconds


def references_of(codec: Tokenizer, train: Tokens, held_out: Tokens) -> dict[str, float]:
    """Bits per byte of simple models on the held-out text, to compare a loss with. As in the figure
    of the trained model, ends of documents are predicted, but do not count as bytes.

        unigram   a model that knows the frequencies of bytes in the training text
        bigram    a model that also knows the byte before, backed off to the unigram
        zlib      the held-out text compressed at level 9
    """
    most = int(_MOST / max(1.0, codec.num_bytes(held_out) / len(held_out)))  # tokens
    symbols = codec.symbols(held_out[:most])
    num_bytes = int(np.count_nonzero(symbols != END))
    pairs, tested = count_pairs(codec.symbols(train[:most])), count_pairs(symbols)

    single = pairs.sum(0) + 1.0  # one more of every symbol, so that no probability is 0
    single /= single.sum()
    before = pairs.sum(1, keepdims=True)
    double = (pairs + single) / (before + 1.0)

    text = symbols[symbols != END].astype(np.uint8).tobytes()
    return {
        "unigram": float(-(tested.sum(0) * np.log2(single)).sum() / num_bytes),
        "bigram": float(-(tested * np.log2(double)).sum() / num_bytes),
        "zlib": 8 * len(zlib.compress(text, 9)) / num_bytes,
    }


def count_pairs(symbols: NDArray[np.uint16]) -> NDArray[Any]:
    """How often symbol b follows symbol a: [257, 257]."""
    counts = np.zeros((END + 1) ** 2, np.int64)
    for begin in range(0, len(symbols) - 1, CHUNK):
        chunk = symbols[begin : begin + CHUNK + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * (END + 1) + chunk[1:], minlength=len(counts))
    return counts.reshape(END + 1, END + 1).astype(np.float64)
