# SPDX-License-Identifier: Apache-2.0
"""Codecs: from text to tokens and back with no byte lost, so that a loss per token is one per byte.

bytes                     token i is byte i, and 256 ends a document; needs no package
bpe:SIZE                  SIZE - 1 pieces learned from the training text; the last token ends one
FILE.json, DIRECTORY      a pretrained tokenizer: tokenizer.json, alone or with its neighbours

The last two need the `tokenizers` package (an extra). Every codec gives back the *symbols* of
tokens, in which reference entropies are counted: bytes 0 to 255, and 256 for the end of a document.
A pretrained tokenizer that changes its text (a normalizer, a space put before it) is measured by
the bytes of the changed text.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.notices import warn_once
from shardwise.train.tokens import (
    CHUNK,
    DataError,
    MissingExtraError,
    Tokens,
    check_range,
    dtype_for,
    write_whole,
)

logger = logging.getLogger(__name__)

END = 256  # the symbol that ends a document
NUM_SYMBOLS = 257
LEARNED_FROM = 256 << 20  # bytes of text, from its begin, that pieces are learned from
END_TEXT = "<|endoftext|>"  # how exported tokenizers of ours spell the end of a document
FILE = "tokenizer.json"
# What transformers reads beside tokenizer.json.
_NEIGHBOURS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
BESIDE_TOKENS = {FILE, *_NEIGHBOURS}  # files of a tokenizer that lie beside its tokens
# How pretrained tokenizers spell the end of a text, where no file beside them says it.
_ENDS = (END_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Codec(Protocol):
    """How documents become tokens."""

    name: str
    vocab_size: int
    end: int  # the token that ends a document
    lengths: NDArray[np.int64]  # of each token in symbols

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """All documents, each with the end token after it."""

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        """The bytes that tokens stand for, with 256 where a document ends."""

    def files(self) -> dict[str, bytes]:
        """The files that `transformers` loads this tokenizer from, by name."""


class Bytes:
    """Token i is byte i."""

    name = "bytes"
    vocab_size = NUM_SYMBOLS
    end = END
    lengths = np.ones(NUM_SYMBOLS, np.int64)

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        return _with_ends([np.frombuffer(one, np.uint8) for one in documents], self)

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        return np.asarray(tokens, np.uint16)

    def files(self) -> dict[str, bytes]:
        """Byte-level pieces of one byte each, none merged."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        described = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {**level, "use_regex": False},
            "decoder": {**level, "use_regex": False},
            "model": {"type": "BPE", "vocab": _BYTE_OF, "merges": []},
        }
        return _with_end(described, self.end)


class Pieces:
    """The pieces of a tokenizer of the `tokenizers` package, learned here or pretrained.

    Args:
        tokenizer: the package's object.
        end: the token that ends a document. ``None``: one more than the tokenizer has, which no
            text in a document can be mistaken for.
        beside: the files that lay beside a pretrained tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        *,
        end: int | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self.tokenizer, self.name = tokenizer, name
        self._own_end, self._beside = end is None, dict(beside or {})
        known = {number: piece for piece, number in tokenizer.get_vocab().items()}
        self.end = max(known, default=-1) + 1 if end is None else end
        self.vocab_size = max(max(known, default=-1), self.end) + 1
        added = {number: str(one.content) for number, one in _added(tokenizer).items()}
        byte_level = "ByteLevel" in tokenizer.to_str()
        pieces = [
            added[number].encode() * (not _added(tokenizer)[number].special)
            if number in added
            else _piece_bytes(known[number], byte_level)
            if number in known
            else b""
            for number in range(self.vocab_size)
        ]
        pieces[self.end] = b"\0"  # its symbol is END: see below
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self._begins = np.concatenate(([0], self.lengths[:-1].cumsum()))
        self._flat = np.frombuffer(b"".join(pieces), np.uint8).astype(np.uint16)
        self._flat[self._begins[self.end]] = END

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> Pieces:
        """Learn the pieces from the first documents, ``LEARNED_FROM`` bytes; the same ones in
        the same order give the same pieces."""
        package = require("tokenizers", "bpe")
        if vocab_size < NUM_SYMBOLS:
            raise DataError(
                f"bpe:{vocab_size}: 256 bytes and the end of a document need at least "
                f"{NUM_SYMBOLS} tokens; use bpe:{NUM_SYMBOLS} or more, or bytes"
            )
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            show_progress=False,
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        )
        texts, learned = map(_as_text, _first(documents)), Future[None]()

        def learn() -> None:
            try:
                learned.set_result(tokenizer.train_from_iterator(texts, trainer))
            except BaseException as error:
                learned.set_exception(error)

        # Not in the main thread, where Ctrl-C would wait until all is learned.
        threading.Thread(target=learn, daemon=True).start()
        learned.result()
        return cls(tokenizer, f"bpe:{vocab_size}")

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> Pieces:
        """Pieces that were learned here and saved."""
        name = f"bpe:{vocab_size}"
        return cls(_read_tokenizer(path, name), name)

    @classmethod
    def pretrained(cls, path: Path, name: str) -> Pieces:
        """A ``tokenizer.json``, or a directory that holds one."""
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"tokenizer {name!r}: there is no file {file}; give a {FILE} of the `tokenizers` "
                f"package, or a directory that holds one"
            )
        tokenizer = _read_tokenizer(file, name)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A document that spells a special token is text all the same.
        tokenizer.encode_special_tokens = True
        near = {one: file.parent / one for one in _NEIGHBOURS}
        beside = {one: at.read_bytes() for one, at in near.items() if at.is_file()}
        return cls(tokenizer, name, end=_end_of(tokenizer, file, name), beside=beside)

    def save(self, path: Path) -> None:
        write_whole(path, self.tokenizer.to_str().encode())

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        texts = [_as_text(document) for document in documents]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return _with_ends([encoding.ids for encoding in encodings], self)

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        tokens = np.asarray(tokens, np.int64)
        lengths = self.lengths[tokens]
        ends = lengths.cumsum()
        # Each output position reads the flat table at: its token's begin there, plus how far into
        # the token it is.
        shift = self._begins[tokens] - (ends - lengths)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(shift, lengths)
        symbols: NDArray[np.uint16] = self._flat[at]
        return symbols

    def files(self) -> dict[str, bytes]:
        described = json.loads(self.tokenizer.to_str())
        if self._own_end:
            return _with_end(described, self.end)
        made = {FILE: json.dumps(described, ensure_ascii=False).encode()}
        return made | _names_end(self.tokenizer.id_to_token(self.end)) | self._beside


# ------------------------------------------------------------------------------ names


def codec_named(name: str) -> tuple[str, int]:
    """``"bytes"``, ``"bpe:SIZE"`` or the path of a pretrained tokenizer: the kind (``"file"`` for
    the last), and the number of tokens (0 where only the file knows)."""
    kind, _, size = name.partition(":")
    if kind == "bytes" and not size:
        return kind, NUM_SYMBOLS
    if kind == "bpe" and size.isdecimal():
        return kind, int(size)
    if name.endswith(".json") or Path(name).expanduser().is_dir():
        return "file", 0
    raise DataError(
        f"tokenizer {name!r} does not exist: use bytes, bpe:SIZE such as bpe:4096, or the path of "
        f"a {FILE} or of its directory"
    )


def open_codec(name: str) -> Codec | None:
    """The codec of this name; ``None`` for pieces that are learned from the text."""
    kind, _ = codec_named(name)
    if kind == "file":
        path = Path(name).expanduser()
        file = path / FILE if path.is_dir() else path
        if file.is_file() and file.read_bytes() == Bytes().files()[FILE]:
            return Bytes()  # ours: no package is needed
        return Pieces.pretrained(path, name)
    return Bytes() if kind == "bytes" else None


def saved_codec(folder: Path) -> Codec | None:
    """The codec whose :meth:`Codec.files` lie in a folder; ``None`` where none do."""
    return open_codec(str(folder)) if (folder / FILE).is_file() else None


def write_codec(folder: Path, codec: Codec) -> None:
    """Write the files of a codec; raise if those of another one lie there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in codec.files().items():
        path = folder / name
        if path.exists() and path.read_bytes() != contents:
            raise DataError(f"{path} is another tokenizer's: choose another directory")
        write_whole(path, contents)


def digest_of_codec(codec: Codec) -> str:
    """A digest of the pieces: equal digests mean equal tokens for equal text."""
    return hashlib.sha256(codec.files()[FILE]).hexdigest()


def named_in_headers(codec: Codec) -> str:
    """A codec as headers of token files name it."""
    return "bytes" if isinstance(codec, Bytes) else f"{FILE}:{digest_of_codec(codec)}"


def encode_text(codec: Codec, text: str) -> list[int]:
    """The tokens of a prompt, without the token that ends a document."""
    return [int(token) for token in codec.encode([text.encode()])[:-1]]


def decode_text(codec: Codec, tokens: Sequence[int]) -> str:
    """Text to show: undecodable bytes as U+FFFD, the end of a document as an empty line."""
    known = [int(token) for token in tokens if int(token) < codec.vocab_size]
    symbols = codec.symbols(np.array(known, np.int64))
    parts = np.split(symbols, np.flatnonzero(symbols == END))
    texts = [part[part != END].astype(np.uint8).tobytes() for part in parts]
    return b"\n\n".join(texts).decode("utf-8", "replace")


def encode_each(codec: Codec, documents: Sequence[bytes]) -> list[Tokens]:
    """The tokens of each document, with the end token after it; several threads at once."""
    tokens = codec.encode(documents)
    ends = np.flatnonzero(tokens == codec.end) + 1
    if len(ends) != len(documents):  # a text that names the end token of a pretrained tokenizer
        return [codec.encode([one]) for one in documents]
    return np.split(tokens, ends[:-1])


def num_bytes(codec: Codec, tokens: Tokens) -> int:
    """The bytes that tokens stand for; the end of a document is none."""
    counts = np.zeros(codec.vocab_size, np.int64)
    for begin in range(0, len(tokens), CHUNK):
        chunk = tokens[begin : begin + CHUNK]
        check_range(chunk, codec.vocab_size, f"tokens of {codec.name}", begin)
        counts += np.bincount(chunk, minlength=codec.vocab_size)
    counts[codec.end] = 0
    return int(counts @ codec.lengths)


def require(package: str, extra: str) -> Any:
    """Import a package that only an extra brings."""
    try:
        module = importlib.import_module(package)
        for part in ("models", "pre_tokenizers", "decoders", "trainers") * (extra == "bpe"):
            importlib.import_module(f"{package}.{part}")
    except ImportError as error:
        raise MissingExtraError(
            f"this needs the package {package!r}, which is not installed ({error}): "
            f"pip install 'shardwise[{extra}]'"
        ) from None
    return module


# ------------------------------------------------------------------------------ pieces


def _read_tokenizer(file: Path, name: str) -> Any:
    package = require("tokenizers", "bpe")
    try:
        return package.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises its errors as Exception itself
        raise DataError(f"tokenizer {name!r}: {file} cannot be read ({error})") from None


def _end_of(tokenizer: Any, file: Path, name: str) -> int:
    """The token that ends a text: by the files beside a tokenizer, or by its usual spellings."""
    for neighbour in ("tokenizer_config.json", "special_tokens_map.json"):
        spelled = _json_at(file.parent / neighbour).get("eos_token")
        spelled = spelled.get("content") if isinstance(spelled, dict) else spelled
        found = tokenizer.token_to_id(spelled) if isinstance(spelled, str) else None
        if found is not None:
            return int(found)
    for neighbour in ("generation_config.json", "config.json"):
        number = _json_at(file.parent / neighbour).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and tokenizer.id_to_token(number) is not None:
            return number
    for spelled in _ENDS:
        found = tokenizer.token_to_id(spelled)
        if found is not None:
            return int(found)
    raise DataError(
        f"tokenizer {name!r} does not say which token ends a text: write "
        f'{{"eos_token": "..."}} into {file.parent / "tokenizer_config.json"}'
    )


def _json_at(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): repair or remove it") from None
    return found if isinstance(found, dict) else {}


def _added(tokenizer: Any) -> dict[int, Any]:
    found: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return found


def _with_end(described: dict[str, Any], end: int) -> dict[str, bytes]:
    """The files of a tokenizer of ours, with the token that ends a document among its pieces."""
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": end, "content": END_TEXT, **options, "special": True}
    described = {**described, "added_tokens": [*described["added_tokens"], token]}
    return {FILE: json.dumps(described, ensure_ascii=False).encode(), **_names_end(END_TEXT)}


def _names_end(spelled: str) -> dict[str, bytes]:
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": spelled}
    values |= {"clean_up_tokenization_spaces": False}  # type: ignore[dict-item]
    return {"tokenizer_config.json": json.dumps(values, indent=2).encode()}


def _with_ends(documents: Sequence[Any], codec: Codec) -> Tokens:
    """The tokens of all documents, each with the end token after it."""
    tokens = np.empty(sum(map(len, documents)) + len(documents), dtype_for(codec.vocab_size))
    at = 0
    for document in documents:
        tokens[at : at + len(document)] = document
        tokens[at + len(document)] = codec.end
        at += len(document) + 1
    return tokens


def _first(documents: Iterable[bytes]) -> Iterator[bytes]:
    left = LEARNED_FROM
    for document in documents:
        yield document
        left -= len(document)
        if left <= 0:
            return


def _as_text(document: bytes) -> str:
    """A document as text. Bytes that are not UTF-8 become U+FFFD before lengths are counted."""
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        text = "text is not UTF-8 (%r): such bytes are lost, each becomes U+FFFD. Convert it first"
        part = document[max(0, error.start - 16) : error.end + 16]
        warn_once(logger, text, part, about="not UTF-8")
        return document.decode("utf-8", "replace")


def _piece_bytes(piece: str, byte_level: bool) -> bytes:
    if byte_level:
        return bytes(_BYTE_OF[character] for character in piece if character in _BYTE_OF)
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):  # a byte that no piece spells
        return bytes([int(found[1], 16)])
    return piece.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters of byte-level BPE: visible bytes stand for themselves, the others for the
    characters from U+0100 on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
