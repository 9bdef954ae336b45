# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench machine-text``: the sources and documents on this machine, as JSON lines.

Every text file below the roots that packages brought is read once: files that are alike but for
digits, spaces and punctuation count as one, and tables, minified and generated files are left out.
The order is that of a hash of the names, so the end of the lines is a fair sample of all of them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = re.compile(
    r""".*\.(py|pyi|pyx|pxd|h|hh|hpp|hxx|cuh|cu|c|cc|cpp|cxx|inl|ipp|rst|md|txt|pm|pl|pod|js|ts|mjs
    |cmake|sh|bash|tcl|f|f90|go|rs|java|kt|swift|rb|lua|m4|am|ac|in|vim|el|scm|jl|r|tex|texi|adoc
    |proto|td|g4|y|l|asm|s|mk)""",
    re.VERBOSE | re.IGNORECASE,
)
DOCUMENTS = {"man", "doc", "info"}  # folders of compressed texts
SMALLEST, LARGEST = 256, 1 << 20  # bytes of a file
SAMPLE = 24 << 20  # bytes of text that pieces are learned from
PIECE = 256  # files that a worker reads at a time
Text = tuple[str, bytes, str]  # name, digest of what makes it differ from others, text


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was written."""

    files: int  # that look like text by their names
    documents: int
    bytes: int
    seconds: float


def default_roots() -> list[str]:
    places = sysconfig.get_paths()
    roots = ["/usr", "/opt", sys.prefix, sys.base_prefix, places["stdlib"], places["purelib"]]
    return sorted({os.path.realpath(root) for root in roots if os.path.isdir(root)})


def is_wanted(path: str, size: int) -> bool:
    compressed = path.endswith(".gz") and not DOCUMENTS.isdisjoint(path.split("/"))
    return SMALLEST <= size <= LARGEST and (compressed or SOURCE.fullmatch(path) is not None)


def _listed(folder: str) -> tuple[list[str], list[str]]:
    """The folders and the wanted files in a folder."""
    folders, files = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in ("__pycache__", ".git"):
                        folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and is_wanted(
                    entry.path, entry.stat(follow_symlinks=False).st_size
                ):
                    files.append(entry.path)
    except OSError:
        pass  # not ours to read
    return folders, files


def files_below(roots: Sequence[str]) -> list[str]:
    """The wanted files, each once, in an order that no file system decides."""
    found: set[str] = set()
    seen: set[str] = set()
    frontier = list(roots)
    with ThreadPoolExecutor(32) as pool:  # a disk that was not read yet answers late
        while frontier:
            seen.update(frontier)
            below: list[str] = []
            for folders, files in pool.map(_listed, frontier):
                below += folders
                found.update(files)
            frontier = sorted(set(below) - seen)
    return sorted(found)


def read_text(path: str) -> Text | None:
    """A file that is text for people; None if it is something else."""
    try:
        data = Path(path).read_bytes()
        if path.endswith(".gz"):
            data = gzip.decompress(data)[: 4 * LARGEST]
        text = data.decode()
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    if "\0" in text or max(map(len, text.split("\n")), default=0) > 1000:
        return None
    head = data[: 1 << 16]
    if not 0.1 <= len(zlib.compress(head, 1)) / max(1, len(head)) <= 0.75:
        return None
    words = re.sub(rb"[\W\d_]+", b"", data)
    return path, hashlib.sha256(words).digest(), text


def _read_all(paths: Sequence[str]) -> list[Text]:
    return [text for path in paths if (text := read_text(path)) is not None]


def texts_below(roots: Sequence[str], most: int, workers: int) -> tuple[int, list[tuple[str, str]]]:
    """The number of files, and names and texts, in order of a hash of the names, of about ``most``
    bytes."""
    paths = files_below(roots)
    paths.sort(key=lambda path: hashlib.sha256(path.encode()).digest())
    pieces = [paths[at : at + PIECE] for at in range(0, len(paths), PIECE)]
    seen: set[bytes] = set()
    found: list[tuple[str, str]] = []
    size = 0
    with ProcessPoolExecutor(workers) as pool:
        for piece in pool.map(_read_all, pieces):
            for name, digest, text in piece:
                if digest not in seen:
                    seen.add(digest)
                    found.append((name, text))
                    size += len(text)
            if size >= most:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return len(paths), found


def gather(
    folder: Path,
    *,
    roots: Sequence[str] | None = None,
    most: int = 4 << 30,
    sample: int = 0,
    workers: int | None = None,
) -> Found:
    """Write ``sample.jsonl``, the first ``sample`` bytes of text, and ``rest.jsonl`` up to ``most``
    bytes in all."""
    began = time.monotonic()
    workers = workers or os.cpu_count() or 1
    count, texts = texts_below(roots or default_roots(), most, workers)
    folder.mkdir(parents=True, exist_ok=True)
    written = documents = 0
    with (folder / "sample.jsonl").open("w") as first, (folder / "rest.jsonl").open("w") as rest:
        for line, size in _lines(texts):
            if written >= most:
                break
            (first if written < sample else rest).write(line)
            written, documents = written + size, documents + 1
    seconds = time.monotonic() - began
    return Found(files=count, documents=documents, bytes=written, seconds=seconds)


def _lines(texts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    for name, text in texts:
        yield json.dumps({"name": name, "text": text}) + "\n", len(text.encode())


def tokens_of_machine(folder: Path, *, most: int, tokenizer: str = "bpe:8192") -> Path:
    """Token files of this machine's text, made with `shardwise data`; the folder of the files."""
    gather(folder, most=most, sample=SAMPLE)
    return tokenise(folder, tokenizer)


def tokenise(folder: Path, tokenizer: str) -> Path:
    """Tokens of what :func:`gather` wrote; learned pieces come from the sample."""
    sample, tokens = folder / "sample", folder / "tokens"
    data([str(folder / "sample.jsonl")], sample, tokenizer)
    data([str(folder / name) for name in ("sample.jsonl", "rest.jsonl")], tokens, str(sample))
    return tokens


def data(sources: Sequence[str], out: Path, tokenizer: str) -> None:
    """`shardwise data`, as a user types it."""
    words = ["data", *sources, "--out", str(out), "--tokenizer", tokenizer]
    subprocess.run([sys.executable, "-m", "shardwise.cli", *words], check=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="shardwise bench machine-text", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--roots", nargs="+", help="default: /usr, /opt and this Python's folders")
    parser.add_argument("--most", type=float, default=4096, help="MiB of text in all")
    parser.add_argument("--sample", type=float, default=0, help="MiB of text in sample.jsonl")
    options = parser.parse_args(arguments)
    sizes = {"most": int(options.most * 2**20), "sample": int(options.sample * 2**20)}
    print(json.dumps(asdict(gather(options.out, roots=options.roots, **sizes))))


if __name__ == "__main__":
    main(sys.argv[1:])
