# SPDX-License-Identifier: Apache-2.0
"""Token files: made once by ``shardwise data``, mapped by ``shardwise train``; errors of data.

    FOLDER/
      tokens.bin      the tokens, little-endian uint16 or uint32, without a header
                      | to train on ........................ | held out ... |
                      0                            held_out_begins      count
      tokens.json     what they are: see :class:`TokenInfo`
      tokenizer.json  the tokenizer, with the files beside it that transformers reads

A folder gets its name when all of it is on the disk, so a reader never sees half of it. Opening a
folder checks every value of ``tokens.json`` and the size of ``tokens.bin``, and the sha256 of a
file of up to :data:`CHECKED_BYTES`. Each token is checked when it is drawn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]  # 1-D, unsigned integers; often a memory map

TOKENS, INFO, TOKENIZER = "tokens.bin", "tokens.json", "tokenizer.json"
VERSION = 1
CHECKED_BYTES = 256 << 20
CHUNK = 1 << 22  # tokens read at a time
_MOST_INFO = 64 << 20  # bytes of tokens.json
_BEFORE = b"shrdtoks"  # the first bytes of a token file of the version before
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class DataError(ValueError):
    """The data can't be used for training. The message has the value, the reason and the fix."""


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """The contents of ``tokens.json``. Only the first six values must be there.

    Args:
        held_out_begins: the number of tokens to train on; the others are held out.
        end_token: the token that ends a document; ``None``: unknown.
        token_bytes: bytes of text of each token, for bits per byte; empty: unknown.
        train_bytes: bytes of text of the tokens to train on; ``held_out_bytes``: of the others.
        tokenizer: sha256 of ``tokenizer.json``; ``None``: unknown.
        key: digest of the texts and settings that the tokens were made from.
        references: bits per byte of simple models on the held-out text.
    """

    version: int = VERSION
    dtype: str
    vocab_size: int
    count: int
    held_out_begins: int
    sha256: str
    end_token: int | None = None
    train_bytes: int | None = None
    held_out_bytes: int | None = None
    tokenizer: str | None = None
    key: str = ""
    source: str = ""
    references: dict[str, Any] = field(default_factory=dict)
    token_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"it has version {self.version}, and this shardwise reads {VERSION}")
        counts = (self.vocab_size, self.count, self.held_out_begins)
        known = (self.end_token, self.train_bytes, self.held_out_bytes)
        numbers = [*counts, *(number for number in known if number is not None), *self.token_bytes]
        if not all(type(number) is int and 0 <= number <= 1 << 60 for number in numbers):
            raise ValueError("its counts are not all whole numbers of 0 or more")
        problems = []
        if not 0 < self.vocab_size <= 1 << 32 or self.dtype != dtype_for(self.vocab_size).name:
            problems.append(f"vocab_size={self.vocab_size} in dtype={self.dtype!r}")
        if self.held_out_begins > self.count:
            problems.append(f"held_out_begins={self.held_out_begins} of count={self.count}")
        if (self.end_token or 0) >= self.vocab_size:
            problems.append(f"end_token={self.end_token} of vocab_size={self.vocab_size}")
        if len(self.token_bytes) not in (0, self.vocab_size):
            problems.append(f"{len(self.token_bytes)} token_bytes")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            problems.append(f"sha256={self.sha256!r}")
        if problems:
            raise ValueError("; ".join(problems))


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smaller of the two dtypes that holds every token."""
    return _DTYPES["uint16" if vocab_size <= 1 << 16 else "uint32"]


# ------------------------------------------------------------------------------ reading


def token_folder(source: str | Path) -> Path | None:
    """The folder of a source that names a token file; ``None`` if the source is something else."""
    path = Path(source).expanduser()
    folder = path.parent if path.name in (TOKENS, INFO) else path
    if (folder / INFO).is_file():
        return folder
    file = folder / TOKENS if folder.is_dir() else path
    if file.suffix != ".bin" or not file.is_file():
        return None
    with file.open("rb") as opened:
        if opened.read(len(_BEFORE)) == _BEFORE:
            raise DataError(
                f"{file} was written by the version before: make it again from its texts, with "
                f"shardwise data TEXTS --out FOLDER --tokenizer NAME"
            )
    raise DataError(
        f"{file} has no {INFO} beside it that says what its tokens are: make both with shardwise "
        f"data TEXTS --out FOLDER, or with shardwise.train.tokens.write_tokens"
    )


def open_tokens(folder: str | Path) -> tuple[Tokens, TokenInfo]:
    """Map the tokens of a folder into memory, after the checks in the docstring of this module."""
    folder = Path(folder)
    file, info = folder / TOKENS, read_info(folder)
    dtype = _DTYPES[info.dtype]
    size = file.stat().st_size if file.is_file() else -1
    expected = info.count * dtype.itemsize
    if size != expected:
        what = "is missing" if size < 0 else f"has {size} bytes"
        raise DataError(
            f"{file} {what}, and {INFO} describes {info.count} tokens of {expected} bytes: copy "
            f"or make it again"
        )
    if not info.count:
        return np.empty(0, dtype), info
    tokens: Tokens = np.memmap(file, dtype=dtype, mode="r")
    if size <= CHECKED_BYTES and hashlib.sha256(tokens.data).hexdigest() != info.sha256:
        raise DataError(f"{file} has other contents than were written: copy or make it again")
    return tokens, info


def read_info(folder: Path) -> TokenInfo:
    path = folder / INFO
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_MOST_INFO))
        return TokenInfo(**values)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} cannot be used ({error}): make the tokens again") from None


def check_range(tokens: Tokens, vocab_size: int, name: str, begin: int = 0) -> None:
    """Raise if a token is outside of the vocabulary."""
    if len(tokens) and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
        at = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
        raise DataError(
            f"{name}: token {begin + at} is {int(tokens[at])}, outside 0 to {vocab_size - 1}: the "
            f"file is damaged, or vocab_size={vocab_size} is not its tokenizer's"
        )


# ------------------------------------------------------------------------------ writing


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill. It gets its name when the block ends without an error; a folder that
    another process has made in the meantime stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    host = f"{socket.gethostname()}-{os.getpid()}"
    partial = folder.with_name(f".{folder.name}.{host}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        try:
            partial.rename(folder)  # replaces an empty folder
        except OSError:
            if not (folder / INFO).is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file. It gets its name when all of it is on the disk."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class TokenWriter:
    """Writes ``tokens.bin`` array by array into a folder, and ``tokens.json`` at the end.

    Held-out tokens wait in a file of their own, because they stand after those to train on.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder, self.vocab_size, self.dtype = folder, vocab_size, dtype_for(vocab_size)
        self.counts = [0, 0]  # to train on, held out
        self._digest = hashlib.sha256()
        self._parts = [folder / TOKENS, folder / "held_out.partial"]
        self._files = [part.open("wb") for part in self._parts]

    def add(self, tokens: Tokens, *, held_out: bool = False) -> None:
        check_range(tokens, self.vocab_size, "not written")
        data = np.ascontiguousarray(tokens, self.dtype).data
        if not held_out:
            self._digest.update(data)
        self._files[held_out].write(data)
        self.counts[held_out] += len(tokens)

    def join(self) -> Tokens:
        """Append the held-out tokens to those to train on; return all, mapped."""
        self._files[1].close()
        with self._parts[1].open("rb") as held_out:
            while data := held_out.read(CHUNK):
                self._digest.update(data)
                self._files[0].write(data)
        self._parts[1].unlink()
        with self._files[0] as file:
            file.flush()
            os.fsync(file.fileno())
        if not sum(self.counts):
            return np.empty(0, self.dtype)
        return np.memmap(self._parts[0], dtype=self.dtype, mode="r")

    def describe(self, **values: Any) -> TokenInfo:
        """Write ``tokens.json``; ``values`` are fields of :class:`TokenInfo`."""
        known = {"dtype": self.dtype.name, "vocab_size": self.vocab_size}
        known |= {"count": sum(self.counts), "held_out_begins": self.counts[0]}
        info = TokenInfo(**{**known, "sha256": self._digest.hexdigest(), **values})
        write_file(self.folder / INFO, json.dumps(asdict(info)).encode())
        return info


def write_tokens(
    folder: str | Path,
    tokens: Tokens,
    vocab_size: int,
    *,
    held_out: float = 0.05,
    token_bytes: Sequence[int] = (),
    end_token: int | None = None,
) -> TokenInfo:
    """Make a token folder of an array, whose end is held out; return its description.

    Args:
        token_bytes: bytes of text of each token. Without them, losses are known per token only.
    """
    with whole_folder(Path(folder)) as partial:
        writer = TokenWriter(partial, vocab_size)
        cut = tail_begins(len(tokens), held_out)
        writer.add(tokens[:cut])
        writer.add(tokens[cut:], held_out=True)
        writer.join()
        lengths = [int(length) for length in token_bytes]
        known: dict[str, Any] = {}
        if lengths:
            table = np.array(lengths)
            known["train_bytes"] = int(table[tokens[:cut]].sum())
            known["held_out_bytes"] = int(table[tokens[cut:]].sum())
        return writer.describe(token_bytes=lengths, end_token=end_token, **known)


def tail_begins(count: int, held_out: float) -> int:
    """Where the held-out end of ``count`` tokens begins: at least two tokens, to read and to
    predict."""
    return max(0, count - max(2, round(held_out * count)))
