# SPDX-License-Identifier: Apache-2.0
"""Tokenise: text, JSON lines and parquet into token files, on all cores (``shardwise data``).

    files --> pieces of work in one order --> workers: read, parse, encode --> token files in order

A piece of work is a few text files, a range of bytes of a file of JSON lines (the lines that begin
there) or a row group of a parquet file. Workers read the files themselves. The tokens come back in
order, so any number of workers writes the same file. This file does not import torch.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import threading
import zlib
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
    Bytes,
    Codec,
    Pieces,
    codec_named,
    named_in_headers,
    num_bytes,
    open_codec,
    require,
    saved_codec,
    write_codec,
)
from shardwise.train.corpus import find_files, not_text, read_file, refuse_twice
from shardwise.train.tokens import DataError, Tokens, TokenWriter

PIECE = 4 << 20  # bytes of a piece of work
_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz")


@dataclass(frozen=True)
class TextPiece:
    """A piece of work; ``size`` is its bytes on the disk."""

    kind: str  # text, lines, parquet
    paths: tuple[str, ...]
    size: int
    begin: int = 0  # of a file of lines: in bytes; of a parquet file: in row groups
    end: int | None = None


def work_of(sources: Sequence[str], column: str) -> list[TextPiece]:
    """The pieces of work of files, directories and patterns, in an order that does not depend on
    the file system."""
    pieces: list[TextPiece] = []
    texts: list[Path] = []  # for the next piece of text files
    size_of_texts = 0
    refuse_twice(sources)
    paths = [path for source in sources for path in _with_contents(source)]
    for path in [*paths, None]:
        name = "" if path is None else path.name.lower()
        is_text = path is not None and not name.endswith((".parquet", *_LINES))
        if texts and (not is_text or size_of_texts >= PIECE):
            pieces.append(TextPiece("text", tuple(map(str, texts)), size_of_texts))
            texts, size_of_texts = [], 0
        if path is None:
            break
        size = path.stat().st_size
        if is_text:
            texts.append(path)
            size_of_texts += size
        else:
            pieces += _lines(path, size) if name.endswith(_LINES) else _parquet(path, size, column)
    return pieces


def _with_contents(source: str) -> list[Path]:
    """The files of a source that are not empty. Warns of other files."""
    files, left = find_files(source)
    filled = []
    for path in files:
        if path.stat().st_size:
            filled.append(path)
        else:
            left.add("empty", path)
    if not filled:
        raise DataError(
            f"there is no text in {source!r} ({left if left.paths else 'no file'}): name text, "
            f".jsonl, .jsonl.gz or .parquet files"
        )
    left.warn()
    return filled


def _lines(path: Path, size: int) -> list[TextPiece]:
    if path.suffix == ".gz":  # can only be read from its begin
        return [TextPiece("lines", (str(path),), size)]
    return [
        TextPiece("lines", (str(path),), min(PIECE, size - at), at, at + PIECE)
        for at in range(0, size, PIECE)
    ]


def _parquet(path: Path, size: int, column: str) -> list[TextPiece]:
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
            f"name the column of the text with --column"
        )
    groups = file.num_row_groups
    return [TextPiece("parquet", (str(path),), size // groups, n, n + 1) for n in range(groups)]


def _parquet_file(path: Path) -> Any:
    require("pyarrow", "parquet")
    return require("pyarrow.parquet", "parquet").ParquetFile(path)


# ------------------------------------------------------------------------------ workers


def texts_of(work: TextPiece, column: str) -> Iterator[bytes]:
    """The documents of a piece of work that are not empty."""
    return filter(None, _documents(work, column))


def _documents(work: TextPiece, column: str) -> Iterator[bytes]:
    readers = {"text": _read_texts, "lines": _read_lines, "parquet": _read_rows}
    try:
        yield from readers[work.kind](work, column)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{work.paths[0]} cannot be read ({error}): copy it again") from None


def _read_texts(work: TextPiece, column: str) -> Iterator[bytes]:
    for path in work.paths:
        data = read_file(Path(path))
        if reason := not_text(data):
            raise DataError(f"{path} is {reason}: name text, .jsonl, .jsonl.gz or .parquet files")
        yield data


def _read_lines(work: TextPiece, column: str) -> Iterator[bytes]:
    path = Path(work.paths[0])
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if work.begin:
            file.seek(work.begin - 1)
            file.readline()  # the end of a line of the piece before
        position = file.tell()
        while work.end is None or position < work.end:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield _text_in(line, column, f"{path}, byte {position}")
            position += len(line)


def _text_in(line: bytes, column: str, where: str) -> bytes:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: this line is no JSON ({error})") from None
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = f"keys: {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DataError(
            f"{where}: no text under {column!r} ({keys}): name the key of the text with --column"
        )
    return text.encode("utf-8", "replace")


def _read_rows(work: TextPiece, column: str) -> Iterator[bytes]:
    table = _parquet_file(Path(work.paths[0])).read_row_group(work.begin, columns=[column])
    for text in table.column(column).to_pylist():
        if text is not None and not isinstance(text, str):
            raise DataError(f"{work.paths[0]}: column {column!r} holds {type(text).__name__}s")
        yield (text or "").encode("utf-8", "replace")


Encoded = tuple[Tokens, int, int, int]  # see _encode
_codec: Codec | None = None  # of this worker
_column = ""


def _start_worker(codec: str | Codec, column: str) -> None:
    global _codec, _column
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker for every core
    _codec = saved_codec(Path(codec)) if isinstance(codec, str) else codec
    _column = column


def _end_with_parent() -> None:
    """End this worker when its parent ends. Otherwise it would wait for work forever."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _encode(work: TextPiece) -> Encoded:
    """The tokens of a piece of work; its number of bytes, of documents, and of documents without
    text."""
    assert _codec is not None
    documents = list(_documents(work, _column))
    texts = list(filter(None, documents))
    tokens = _codec.encode(texts)
    return tokens, num_bytes(_codec, tokens), len(texts), len(documents) - len(texts)


def _encoded(
    pieces: Sequence[TextPiece], workers: int, setup: tuple[str | Codec, str]
) -> Iterator[tuple[TextPiece, Encoded]]:
    """Each piece and its tokens, in order, computed by worker processes. At most four pieces per
    worker are in progress."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, setup)
    waiting: deque[tuple[TextPiece, Future[Encoded]]] = deque()
    try:
        for piece in pieces:
            # `submit` starts workers, which must ignore Ctrl-C: they may hold the lock of a queue.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            waiting.append((piece, executor.submit(_encode, piece)))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if len(waiting) >= 4 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise DataError(
            f"one of {workers} workers was killed (out of memory?): use fewer with --workers"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------ the command


def tokenise(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "bytes",
    column: str | None = None,
    workers: int | None = None,
) -> Path:
    """Write a token file; return its path.

    Args:
        out: a file (``.bin``), or a directory that does not exist yet, or is empty.
        column: the key of JSON lines, or the column of parquet files, that holds the text
            (``None``: "text").
        workers: number of processes; ``None``: one for every core.
    """
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers}: give 1 or more")
    if any(source.startswith("hf:") for source in sources):
        raise DataError("shardwise data reads files; shardwise train --data hf:NAME reads datasets")
    single = out.suffix == ".bin"
    if out.exists() and (single or not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists already: remove it, or name another place")
    work = work_of(sources, column or "text")
    if column is not None and all(piece.kind == "text" for piece in work):
        raise DataError(
            f"--column {column} has no effect on text files, which are read whole: leave it out, "
            f"or name files that end in .parquet or {', '.join(_LINES)}"
        )
    column = column or "text"
    codec = open_codec(tokenizer)
    if codec is None:
        texts = (text for piece in work for text in texts_of(piece, column))
        codec = Pieces.train(texts, codec_named(tokenizer)[1])
    folder = out.parent if single else out
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(codec, Bytes):
        write_codec(folder, codec)
    setup = (codec if isinstance(codec, Bytes) else str(folder), column)
    path = out if single else out / "tokens.bin"
    writer = TokenWriter(path, codec.vocab_size, tokenizer=named_in_headers(codec))
    writer.num_bytes = num_texts = num_empty = 0
    try:
        with _progress() as progress:
            bar = progress.add_task("tokens", total=sum(piece.size for piece in work), tokens="0")
            for piece, (tokens, read, documents, empty) in _encoded(
                work, workers or os.cpu_count() or 1, setup
            ):
                writer.add(tokens)
                num_texts, writer.num_bytes = num_texts + documents, writer.num_bytes + read
                num_empty += empty
                progress.update(bar, advance=piece.size, tokens=f"{writer.count:,}")
        if not num_texts:
            raise DataError(f"{', '.join(sources)}: no document has text; {out} is not written")
        writer.close()
    finally:
        writer.discard()
    text = (
        f"{num_texts:,} documents, {writer.num_bytes:,} bytes, {writer.count:,} tokens "
        f"({writer.num_bytes / writer.count:.2f} bytes each)"
    )
    if num_empty:
        text += f"; left out: {num_empty:,} documents without text"
    Console(stderr=True, highlight=False).print(text)
    return writer.path


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )
