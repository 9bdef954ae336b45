# SPDX-License-Identifier: Apache-2.0
"""Tokenise: text, JSON lines and parquet into token files, on all cores (``shardwise data``).

    files --> pieces of work in one order --> workers: read, parse, encode --> token files in order

A piece of work is a few text files, a range of bytes of a file of JSON lines (the lines that begin
in it) or a row group of a parquet file. Workers read it themselves; the tokens come back in order,
so any number of workers writes the same files. Nothing here imports torch.
"""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.train.codecs import (
    FILE,
    Bytes,
    Codec,
    Pieces,
    codec_named,
    digest_of_codec,
    num_bytes,
    open_codec,
    require,
    saved_codec,
    write_codec,
)
from shardwise.train.corpus import dataset_documents, files_of
from shardwise.train.tokens import (
    DataError,
    Tokens,
    TokenWriter,
)

PIECE = 4 << 20  # bytes of a piece of work
_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz")


@dataclass(frozen=True)
class Work:
    """A piece of work; ``size`` is its bytes on the disk."""

    kind: str  # text, lines, parquet, rows
    paths: tuple[str, ...]
    size: int
    begin: int = 0
    end: int | None = None  # of a file of lines: in bytes; of a parquet file: row groups
    texts: tuple[bytes, ...] = ()  # rows of a dataset, which one process reads


def work_of(sources: Sequence[str], column: str) -> list[Work]:
    """The pieces of work of files, directories and patterns, in an order that no file system
    decides."""
    found: list[Work] = []
    texts: list[Path] = []

    def flush() -> None:
        if texts:
            size = sum(path.stat().st_size for path in texts)
            found.append(Work("text", tuple(map(str, texts)), size))
            texts.clear()

    for path in [path for source in sources for path in files_of(source)]:
        size = path.stat().st_size
        name = path.name.lower()
        if name.endswith((".parquet", *_LINES)):
            flush()
            lines = name.endswith(_LINES)
            found += _lines(path, size) if lines else _parquet(path, size, column)
            continue
        texts.append(path)
        if sum(one.stat().st_size for one in texts) >= PIECE:
            flush()
    flush()
    return found


def _lines(path: Path, size: int) -> list[Work]:
    if path.suffix == ".gz":  # can be read from its beginning alone
        return [Work("lines", (str(path),), size)]
    return [
        Work("lines", (str(path),), min(PIECE, size - at), at, at + PIECE)
        for at in range(0, size, PIECE)
    ]


def _parquet(path: Path, size: int, column: str) -> list[Work]:
    try:
        file = _parquet_file(path)
    except DataError:
        raise
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as parquet ({str(error).splitlines()[0]}): copy it again"
        ) from error
    if column not in file.schema_arrow.names:
        raise DataError(
            f"{path} has no column {column!r} (columns: {', '.join(file.schema_arrow.names)}): "
            f"name the one with the text with --column"
        )
    groups = file.num_row_groups
    return [Work("parquet", (str(path),), size // groups, n, n + 1) for n in range(groups)]


def _parquet_file(path: Path) -> Any:
    require("pyarrow", "parquet")
    return require("pyarrow.parquet", "parquet").ParquetFile(path)


# ------------------------------------------------------------------------------ workers


def texts_of(work: Work, column: str) -> Iterator[bytes]:
    """The documents of a piece of work, without empty ones."""
    readers = {"text": _read_texts, "lines": _read_lines, "parquet": _read_rows}
    found = iter(work.texts) if work.kind == "rows" else readers[work.kind](work, column)
    return (text for text in found if text)


def _read_texts(work: Work, column: str) -> Iterator[bytes]:
    for path in work.paths:
        data = Path(path).read_bytes()
        if b"\0" in data[:8192]:
            raise DataError(f"{path} is binary: name text, .jsonl or .parquet files")
        yield data


def _read_lines(work: Work, column: str) -> Iterator[bytes]:
    path = Path(work.paths[0])
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if work.begin:
            file.seek(work.begin - 1)
            file.readline()  # belongs to the piece before, which reads past its end
        at = file.tell()
        while work.end is None or at < work.end:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield _text_in(line, column, f"{path}, byte {at}")
            at += len(line)


def _text_in(line: bytes, column: str, where: str) -> bytes:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: this line is no JSON ({error})") from None
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = f"keys: {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DataError(
            f"{where}: no text under {column!r} ({keys}): name the key of the text with --column"
        )
    return text.encode("utf-8", "replace")


def _read_rows(work: Work, column: str) -> Iterator[bytes]:
    table = _parquet_file(Path(work.paths[0])).read_row_group(work.begin, columns=[column])
    for text in table.column(column).to_pylist():
        if text is not None and not isinstance(text, str):
            raise DataError(f"{work.paths[0]}: column {column!r} holds {type(text).__name__}s")
        yield (text or "").encode("utf-8", "replace")


_codec: Codec | None = None  # of this worker
_column = ""


def _start_worker(codec: str | Codec, column: str) -> None:
    global _codec, _column
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker for every core
    _codec = saved_codec(Path(codec)) if isinstance(codec, str) else codec
    _column = column


def _encode(work: Work) -> tuple[Tokens, int, int]:
    """The tokens of a piece of work, and the numbers of bytes and of documents that they are."""
    assert _codec is not None
    texts = list(texts_of(work, _column))
    tokens = _codec.encode(texts)
    return tokens, num_bytes(_codec, tokens), len(texts)


def _encoded(
    pieces: Iterator[Work], workers: int, setup: tuple[str | Codec, str]
) -> Iterator[tuple[Work, tuple[Tokens, int, int]]]:
    """Each piece and its tokens, in order, from so many processes; few pieces wait at a time."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, setup)
    waiting: deque[tuple[Work, Future[tuple[Tokens, int, int]]]] = deque()
    try:
        for piece in pieces:
            waiting.append((piece, executor.submit(_encode, piece)))
            if len(waiting) >= 4 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker was killed (out of memory?) while {workers} of them made tokens: use fewer "
            f"with --workers"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------ the command


def tokenise(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "bytes",
    column: str = "text",
    workers: int | None = None,
    shard_tokens: int = 1 << 30,
    rows: int | None = None,
) -> list[Path]:
    """Write token files; returns their paths.

    Args:
        out: a file (``.bin``) or a directory that does not exist yet, or is empty.
        column: the key of JSON lines, or the column of parquet files, that holds the text.
        workers: processes; ``None``: one for every core.
        shard_tokens: tokens of a file, about; a directory gets as many files as that takes.
        rows: how many rows of a dataset (``hf:``) are read; ``None``: all.
    """
    if (workers is not None and workers < 1) or shard_tokens < 1 or (rows is not None and rows < 1):
        raise DataError(
            f"--workers {workers}, --shard-tokens {shard_tokens}, --rows {rows}: give 1 or more"
        )
    single = out.suffix == ".bin"
    if out.exists() and (single or not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already: remove it, or name another place")
    streams = [source for source in sources if source.startswith("hf:")]
    if streams and len(sources) > 1:
        raise DataError(f"{streams[0]} is read alone: make its tokens with a command of its own")
    work = None if streams else work_of(sources, column)
    codec = open_codec(tokenizer)

    def pieces() -> Iterator[Work]:
        return _streamed(streams[0], rows) if work is None else iter(work)

    if codec is None:
        texts = (text for piece in pieces() for text in texts_of(piece, column))
        codec = Pieces.train(texts, codec_named(tokenizer)[1])
    folder = out.parent if single else out
    folder.mkdir(parents=True, exist_ok=True)
    named = "bytes"
    if not isinstance(codec, Bytes):
        write_codec(folder, codec)
        named = f"{FILE}:{digest_of_codec(codec)}"
    total = None if work is None else sum(piece.size for piece in work)
    shards = _Shards(out, codec.vocab_size, named, None if single else shard_tokens)
    count = workers or os.cpu_count() or 1
    setup = (codec if isinstance(codec, Bytes) else str(folder), column)
    with _progress() as progress, shards:
        bar = progress.add_task("tokens", total=total, tokens="0")
        for piece, (tokens, read, documents) in _encoded(pieces(), count, setup):
            shards.add(tokens, read, documents)
            progress.update(bar, advance=piece.size, tokens=f"{shards.tokens:,}")
    Console(stderr=True, highlight=False).print(
        f"{shards.documents:,} documents, {shards.bytes:,} bytes, {shards.tokens:,} tokens "
        f"({shards.bytes / max(1, shards.tokens):.2f} bytes each)"
    )
    return shards.paths


def _streamed(spec: str, rows: int | None) -> Iterator[Work]:
    texts: list[bytes] = []
    size = 0
    for document in itertools.islice(dataset_documents(spec), rows):
        texts.append(document.data)
        size += len(document.data)
        if size >= PIECE:
            yield Work("rows", (), size, texts=tuple(texts))
            texts, size = [], 0
    if texts:
        yield Work("rows", (), size, texts=tuple(texts))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )


class _Shards:
    """The token files that are written, one after another. Each appears when it is complete."""

    def __init__(self, out: Path, vocab_size: int, tokenizer: str, size: int | None) -> None:
        self.out, self.size = out, size  # tokens of a file; None: there is one file
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._writer: TokenWriter | None = None
        self._bytes = 0  # of the file that is open
        self.paths: list[Path] = []
        self.tokens = self.bytes = self.documents = 0

    def __enter__(self) -> _Shards:
        return self

    def add(self, tokens: Tokens, read: int, documents: int) -> None:
        if self._writer is None:
            name = f"tokens-{len(self.paths):05d}.bin"
            path = self.out if self.size is None else self.out / name
            self._writer = TokenWriter(path, self._vocab_size, tokenizer=self._tokenizer)
        self._writer.add(tokens)
        self._bytes += read
        self.tokens += len(tokens)
        self.bytes += read
        self.documents += documents
        if self.size is not None and self._writer.count >= self.size:
            self._publish()

    def _publish(self) -> None:
        if self._writer is not None:
            self._writer.close(self._bytes)
            self.paths.append(self._writer.path)
        self._writer, self._bytes = None, 0

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self.documents == 0:
            self._drop()
            raise DataError(f"there is no text in what was named: {self.out} is not written")
        if kind is None:
            self._publish()
        self._drop()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.discard()
