# SPDX-License-Identifier: Apache-2.0
"""Token files: integers on disk, mapped into memory, so they may be larger than it; errors of data.

    0       8         12       16                    4064     4096
    | magic | version | length | JSON header, spaces | sha256 | little-endian uint16 or uint32 ... |

The header holds dtype, vocab_size, count, num_bytes (of the text of the tokens, for bits per byte;
null if unknown), tokenizer ("bytes", "tokenizer.json:SHA256" for a file beside this file, or null)
and the sha256 of the tokens. The sha256 after it is that of the first 4064 bytes. A file is written
under another name and renamed when complete, so a reader never sees half of it.

Opening a file checks every byte of the header and the size. A file of up to :data:`CHECKED_BYTES`
is read whole to check its sha256 and every token. That would take too long for a larger file: its
first and last tokens are checked, and each token when it is drawn (:mod:`shardwise.train.sampler`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]  # 1-D, unsigned integers; often a memory map

MAGIC = b"shrdtoks"
VERSION = 2
HEADER_BYTES = 4096  # a page, so that the tokens of a mapped file are aligned
_DIGEST_AT = HEADER_BYTES - hashlib.sha256().digest_size
CHECKED_BYTES = 256 << 20
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
CHUNK = 1 << 22  # tokens read at a time


# ------------------------------------------------------------------------------ errors


class DataError(ValueError):
    """The data can't be used for training. The message has the value, the reason and the fix."""


class MissingExtraError(DataError, ImportError):
    """An optional package, which this kind of data needs, is not installed."""


# ------------------------------------------------------------------------------ files


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """The header of a token file."""

    dtype: str
    vocab_size: int
    count: int
    sha256: str
    num_bytes: int | None = None
    tokenizer: str | None = None


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smaller of the two dtypes that holds every token."""
    return _DTYPES["uint16" if vocab_size <= 1 << 16 else "uint32"]


class TokenWriter:
    """Writes a token file array by array: ``add`` each array, then ``close``, which gives the file
    its name. ``discard`` removes a file that was not closed."""

    def __init__(self, path: str | Path, vocab_size: int, *, tokenizer: str | None = None) -> None:
        if not 0 < vocab_size <= 1 << 32:
            raise ValueError(
                f"vocab_size={vocab_size}: a token file holds 1 to 2**32 different tokens"
            )
        self.path, self.vocab_size, self.tokenizer = Path(path), vocab_size, tokenizer
        self.count = 0
        self.num_bytes: int | None = None  # of text that the tokens stand for
        self._digest = hashlib.sha256()
        self._partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        self._file = self._partial.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def add(self, tokens: Tokens) -> None:
        check_range(tokens, self.vocab_size, f"{self.path.name}: not written", self.count)
        data = np.ascontiguousarray(tokens, dtype_for(self.vocab_size)).data
        self._digest.update(data)
        self._file.write(data)
        self.count += len(tokens)

    def close(self) -> TokenHeader:
        """Write the header and give the file its name."""
        header = TokenHeader(
            dtype=dtype_for(self.vocab_size).name,
            vocab_size=self.vocab_size,
            count=self.count,
            sha256=self._digest.hexdigest(),
            num_bytes=self.num_bytes,
            tokenizer=self.tokenizer,
        )
        self._file.seek(0)
        self._file.write(_encode_header(header))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
        return header

    def discard(self) -> None:
        """Remove the file unless it was closed."""
        with contextlib.suppress(OSError):  # buffered bytes do not fit on a full disk
            self._file.close()
        self._partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
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


def write_tokens(
    path: str | Path,
    tokens: Tokens | Iterable[Tokens],
    vocab_size: int,
    *,
    num_bytes: int | None = None,
    tokenizer: str | None = None,
) -> TokenHeader:
    """Write a token file from an array, or from arrays that are joined; return the header.

    Args:
        num_bytes: the number of bytes of text that the tokens stand for. Without it, losses are
            known per token only.
        tokenizer: ``"bytes"`` if token i < 256 is byte i, so that generated text can be read.
    """
    writer = TokenWriter(path, vocab_size, tokenizer=tokenizer)
    try:
        for array in [tokens] if isinstance(tokens, np.ndarray) else tokens:
            writer.add(array)
        writer.num_bytes = num_bytes
        return writer.close()
    finally:
        writer.discard()


class Joined:
    """Several arrays of tokens, such as mapped files, joined to one array without a copy.

    It supports what samplers need: the length, slices, and an array of positions as the index. Only
    the tokens of an access are read.
    """

    def __init__(self, arrays: Iterable[Tokens]) -> None:
        self.arrays = [array for array in arrays if len(array)]
        self.dtype = np.result_type(*(array.dtype for array in self.arrays))
        lengths = [len(array) for array in self.arrays]
        self._ends = np.cumsum(lengths)
        self._begins = self._ends - lengths

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, at: slice | NDArray[np.int64]) -> Tokens:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self))
            assert step == 1, "tokens are read forwards"
            parts = [
                array[max(0, begin - first) : max(0, end - first)]
                for array, first in zip(self.arrays, self._begins, strict=True)
            ]
            return np.concatenate([np.empty(0, self.dtype), *(p for p in parts if len(p))])
        tokens = np.empty(at.shape, self.dtype)
        which = np.searchsorted(self._ends, at, side="right")
        for number in np.unique(which):
            here = which == number
            tokens[here] = self.arrays[number][at[here] - self._begins[number]]
        return tokens


def join(arrays: Sequence[Tokens]) -> Tokens:
    """The only array, or several arrays joined."""
    return arrays[0] if len(arrays) == 1 else cast(Tokens, Joined(arrays))


def open_tokens(path: str | Path) -> tuple[Tokens, TokenHeader]:
    """Map a token file into memory, after the checks in the docstring of this module."""
    path = Path(path)
    header = read_header(path)
    tokens: Tokens = np.empty(0, _DTYPES[header.dtype])
    if header.count:
        tokens = np.memmap(path, dtype=tokens.dtype, mode="r", offset=HEADER_BYTES)
    if tokens.nbytes <= CHECKED_BYTES:
        _verify(path, tokens, header)
    else:
        for begin in (0, max(0, len(tokens) - CHUNK)):
            check_range(tokens[begin : begin + CHUNK], header.vocab_size, str(path), begin)
    return tokens, header


def is_token_file(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> TokenHeader:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; give the path of a token file")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is no token file (it begins with {head[:8]!r}, not {MAGIC!r}): make token "
            f"files with shardwise data, or with shardwise.train.tokens.write_tokens"
        )
    if len(head) < HEADER_BYTES:
        raise DataError(
            f"{path} is truncated: it has {len(head)} bytes, and the header has {HEADER_BYTES}: "
            f"copy or write it again"
        )
    version, length = (int(number) for number in np.frombuffer(head, "<u4", 2, len(MAGIC)))
    if version != VERSION:
        raise DataError(
            f"{path} has format version {version}, and this shardwise reads version {VERSION}: "
            f"write it again"
        )
    try:
        header = TokenHeader(**json.loads(head[16 : 16 + length]))
        _check_values(header)
        # Finds changed bytes that the values of the header do not show: digest, spaces, version.
        if _encode_header(header) != head:
            raise ValueError("some of its bits have changed")
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} has a damaged header ({error}): write it again") from None
    _check_size(path, header)
    return header


def _check_values(header: TokenHeader) -> None:
    counts = [header.vocab_size, header.count, 0 if header.num_bytes is None else header.num_bytes]
    if not all(type(count) is int and 0 <= count <= 1 << 63 for count in counts):
        raise ValueError(f"{header}")
    if not 0 < header.vocab_size <= 1 << 32 or header.dtype != dtype_for(header.vocab_size).name:
        raise ValueError(f"vocab_size={header.vocab_size} in {header.dtype!r}")
    if not re.fullmatch("[0-9a-f]{64}", str(header.sha256)):
        raise ValueError(f"sha256 {header.sha256!r}")
    if not isinstance(header.tokenizer, str | None):
        raise ValueError(f"tokenizer {header.tokenizer!r}")


def _check_size(path: Path, header: TokenHeader) -> None:
    size = path.stat().st_size
    expected = HEADER_BYTES + header.count * _DTYPES[header.dtype].itemsize
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise DataError(
            f"{path} is {what}: {header.count} tokens take {expected} bytes, and it has {size}: "
            f"copy or write it again"
        )


def _encode_header(header: TokenHeader) -> bytes:
    text = json.dumps(asdict(header)).encode()
    start = MAGIC + np.array([VERSION, len(text)], "<u4").tobytes() + text
    if len(start) > _DIGEST_AT:
        raise ValueError(f"a header of {len(start)} bytes: tokenizer={header.tokenizer!r:.40}")
    start = start.ljust(_DIGEST_AT)
    return start + hashlib.sha256(start).digest()


def _verify(path: Path, tokens: Tokens, header: TokenHeader) -> None:
    digest = hashlib.sha256()
    for begin in range(0, len(tokens), CHUNK):
        chunk = tokens[begin : begin + CHUNK]
        check_range(chunk, header.vocab_size, str(path), begin)
        digest.update(np.ascontiguousarray(chunk).data)
    if digest.hexdigest() != header.sha256:
        raise DataError(
            f"{path} has other contents than were written (sha256 {digest.hexdigest()[:12]}…, in "
            f"the header {header.sha256[:12]}…): copy or write it again"
        )


def check_range(tokens: Tokens, vocab_size: int, name: str, begin: int) -> None:
    if len(tokens) and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
        at = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
        raise DataError(
            f"{name}: token {begin + at} is {int(tokens[at])}, outside 0 to {vocab_size - 1}: the "
            f"file is damaged, or vocab_size={vocab_size} is not its tokenizer's"
        )
