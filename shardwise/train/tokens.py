# SPDX-License-Identifier: Apache-2.0
"""Token files: made once by ``shardwise data``, mapped by ``shardwise train``.

    FOLDER/
      tokens.bin      the tokens, little-endian uint16 or uint32, without a header
                      | to train on ........................ | held out ... |
                      0                            held_out_begins      count
      tokens.json     what they are: see :class:`TokenInfo`
      tokenizer.json  the tokenizer, with the files beside it that transformers reads

Opening a folder checks every value of ``tokens.json``, the size of ``tokens.bin``, and the sha256
of a file of up to :data:`CHECKED_BYTES`. Each token is checked when it is drawn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
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
    token_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts = [self.vocab_size, self.count, self.held_out_begins, *self.token_bytes]
        if self.version != VERSION:
            raise ValueError(f"it has version {self.version}, and this shardwise reads {VERSION}")
        if not (
            all(type(number) is int and 0 <= number <= 1 << 60 for number in counts)
            and self.dtype == dtype_for(self.vocab_size).name
            and self.held_out_begins <= self.count
            and (self.end_token or 0) < self.vocab_size <= 1 << 32
            and len(self.token_bytes) in (0, self.vocab_size)
        ):
            raise ValueError("its values do not belong together")


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smaller of the two dtypes that holds every token."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def token_folder(source: str | Path) -> Path | None:
    """The folder of a source that names a token file; ``None`` if the source is something else."""
    path = Path(source).expanduser()
    folder = path.parent if path.name in (TOKENS, INFO) else path
    if path.suffix != ".bin" and not any((folder / name).is_file() for name in (INFO, TOKENS)):
        return None
    if not (folder / INFO).is_file():
        raise DataError(
            f"{source} has no {INFO} beside it that says what its tokens are: make both with "
            f"shardwise data TEXTS --out FOLDER, or with shardwise.train.tokens.write_tokens"
        )
    return folder


def open_tokens(folder: str | Path) -> tuple[Tokens, TokenInfo]:
    """Map the tokens of a folder into memory, after the checks in the docstring of this module."""
    file = Path(folder) / TOKENS
    try:
        values = dict(json.loads((file.parent / INFO).read_bytes()))
        values.pop("references", None)  # of files before 2026-11-20
        info = TokenInfo(**values)
        if (size := file.stat().st_size) != info.count * dtype_for(info.vocab_size).itemsize:
            raise ValueError(f"{TOKENS} has {size} bytes for {info.count} tokens of {info.dtype}")
        tokens = _mapped(file, info.vocab_size)
        if size <= CHECKED_BYTES and hashlib.sha256(tokens.data).hexdigest() != info.sha256:
            raise ValueError(f"{TOKENS} has other contents than were written")
    except (ValueError, TypeError, RecursionError, OSError) as error:
        raise DataError(
            f"{file.parent / INFO} cannot be used ({error}): copy or make the tokens again"
        ) from None
    return tokens, info


def _mapped(file: Path, vocab_size: int) -> Tokens:
    dtype = dtype_for(vocab_size)
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)


def check_range(tokens: Tokens, vocab_size: int, name: str, begin: int = 0) -> None:
    """Raise if a token is outside of the vocabulary."""
    if len(tokens) and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
        at = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
        raise DataError(
            f"{name}: token {begin + at} is {int(tokens[at])}, outside 0 to {vocab_size - 1}: the "
            f"file is damaged, or vocab_size={vocab_size} is not its tokenizer's"
        )


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill. It gets its name when the block ends without an error; a folder of tokens
    that another process has made in the meantime stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        partial = Path(scratch) / "tokens"
        partial.mkdir()
        yield partial
        try:
            partial.rename(folder)  # replaces an empty folder
        except OSError:
            if not (folder / INFO).is_file():
                raise


def describe(
    folder: Path, vocab_size: int, held_out_begins: int, token_bytes: Sequence[int], **more: Any
) -> None:
    """Write ``tokens.json`` for the ``tokens.bin`` in a folder; ``more``: other fields of it."""
    tokens, lengths = _mapped(folder / TOKENS, vocab_size), np.array(token_bytes, np.int64)
    sizes: list[int | None] = [None, None]
    for part in (0, 1) if len(lengths) else ():
        own = np.split(tokens, [held_out_begins])[part]
        chunks = (own[at : at + CHUNK] for at in range(0, len(own), CHUNK))
        sizes[part] = sum(int(lengths[chunk].sum()) for chunk in chunks)
    info = TokenInfo(
        dtype=tokens.dtype.name,
        vocab_size=vocab_size,
        count=len(tokens),
        held_out_begins=held_out_begins,
        sha256=hashlib.sha256(tokens.data).hexdigest(),
        train_bytes=sizes[0],
        held_out_bytes=sizes[1],
        token_bytes=lengths.tolist(),
        **more,
    )
    (folder / INFO).write_text(json.dumps(asdict(info)))


def write_tokens(
    folder: str | Path,
    tokens: Tokens,
    vocab_size: int,
    *,
    held_out: float = 0.05,
    token_bytes: Sequence[int] = (),
    end_token: int | None = None,
) -> None:
    """Make a token folder of an array, whose end is held out. Without ``token_bytes`` (bytes of
    text of each token), losses are known per token only."""
    check_range(tokens, vocab_size, "not written")
    with whole_folder(Path(folder)) as partial:
        np.ascontiguousarray(tokens, dtype_for(vocab_size)).tofile(partial / TOKENS)
        begins = tail_begins(len(tokens), held_out)
        describe(partial, vocab_size, begins, token_bytes, end_token=end_token)


def tail_begins(count: int, held_out: float) -> int:
    """Where the held-out end of ``count`` tokens begins: at least two tokens, to read and to
    predict."""
    return max(0, count - max(2, round(held_out * count)))
