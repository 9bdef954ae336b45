# SPDX-License-Identifier: Apache-2.0
"""Codecs: text to tokens and back. No byte is lost, so a loss per token is also a loss per byte.

bytes                     token i is byte i, and 256 ends a document; needs no package
bpe:SIZE                  SIZE - 1 pieces learned from the training text, and a token that ends a
                          document
FILE.json, DIRECTORY      a pretrained tokenizer: tokenizer.json, and files beside it

The last two need the `tokenizers` package (an extra). Every codec also converts tokens to *symbols*
for reference entropies: bytes 0 to 255, and 256 for the end of a document. If a pretrained
tokenizer changes the text (a normalizer, a space before the text), the bytes of the changed text
are counted.
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
END_TEXT = "<|endoftext|>"  # the token that ends a document, in tokenizers that shardwise exports
FILE = "tokenizer.json"
# Files that transformers reads beside tokenizer.json.
_NEIGHBOURS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
BESIDE_TOKENS = {FILE, *_NEIGHBOURS}  # files of a tokenizer in the folder of its tokens
# Tokens that may end a text in a pretrained tokenizer, if no file beside it names the token.
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
        return _with_ends([np.frombuffer(data, np.uint8) for data in documents], self)

    def symbols(self, tokens: Tokens) -> NDArray[np.uint16]:
        return np.asarray(tokens, np.uint16)

    def files(self) -> dict[str, bytes]:
        """A byte-level tokenizer whose pieces are single bytes."""
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
    """The pieces of a tokenizer of the `tokenizers` package, learned or pretrained.

    Args:
        tokenizer: the package's object.
        end: the token that ends a document. ``None``: a new token after those of the tokenizer,
            which no text can contain.
        beside: the files beside a pretrained tokenizer.
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
        self._new_end, self._beside = end is None, dict(beside or {})
        spellings = {number: piece for piece, number in tokenizer.get_vocab().items()}
        last = max(spellings, default=-1)
        self.end = last + 1 if end is None else end
        self.vocab_size = max(last, self.end) + 1
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        byte_level = "ByteLevel" in tokenizer.to_str()
        pieces = [b""] * self.vocab_size
        for number, spelling in spellings.items():
            if number not in added:
                pieces[number] = _piece_bytes(spelling, byte_level)
            elif not added[number].special:
                pieces[number] = str(added[number].content).encode()
        pieces[self.end] = b"\0"  # its symbol is END: see below
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self._begins = np.concatenate(([0], self.lengths[:-1].cumsum()))
        self._flat = np.frombuffer(b"".join(pieces), np.uint8).astype(np.uint16)
        self._flat[self._begins[self.end]] = END

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> Pieces:
        """Learn pieces from the first ``LEARNED_FROM`` bytes of the documents. The same documents
        in the same order give the same pieces."""
        package = require("tokenizers", "bpe")
        if vocab_size < NUM_SYMBOLS:
            raise DataError(
                f"bpe:{vocab_size}: 256 bytes and the end of a document need at least "
                f"{NUM_SYMBOLS} tokens: use bpe:{NUM_SYMBOLS} or more, or bytes"
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

        # Not in the main thread, where Ctrl-C would wait until the end.
        threading.Thread(target=learn, daemon=True).start()
        learned.result()
        return cls(tokenizer, f"bpe:{vocab_size}")

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> Pieces:
        """Load pieces that were learned and saved by ``save``."""
        name = f"bpe:{vocab_size}"
        return cls(_read_tokenizer(path, name), name)

    @classmethod
    def pretrained(cls, path: Path, name: str) -> Pieces:
        """Load a ``tokenizer.json``, or that of a directory."""
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"tokenizer {name!r}: there is no file {file}: give a {FILE} of the `tokenizers` "
                f"package, or a directory that holds one"
            )
        tokenizer = _read_tokenizer(file, name)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # If a document contains the text of a special token, it is ordinary text.
        tokenizer.encode_special_tokens = True
        paths = [file.parent / neighbour for neighbour in _NEIGHBOURS]
        beside = {path.name: path.read_bytes() for path in paths if path.is_file()}
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
        # A symbol is at the begin of its token in the flat table, plus its offset in the token.
        shift = self._begins[tokens] - (ends - lengths)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(shift, lengths)
        symbols: NDArray[np.uint16] = self._flat[at]
        return symbols

    def files(self) -> dict[str, bytes]:
        described = json.loads(self.tokenizer.to_str())
        if self._new_end:
            return _with_end(described, self.end)
        file = {FILE: json.dumps(described, ensure_ascii=False).encode()}
        return file | _names_end(self.tokenizer.id_to_token(self.end)) | self._beside


# ------------------------------------------------------------------------------ names


def codec_named(name: str) -> tuple[str, int]:
    """The kind of a tokenizer (bytes, bpe, or file for the path of a pretrained tokenizer), and its
    number of tokens (0 for a file)."""
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
    """The codec of this name; ``None`` for pieces that must be learned from the text."""
    kind, _ = codec_named(name)
    if kind == "file":
        path = Path(name).expanduser()
        file = path / FILE if path.is_dir() else path
        if file.is_file() and file.read_bytes() == Bytes().files()[FILE]:
            return Bytes()  # which needs no package
        return Pieces.pretrained(path, name)
    return Bytes() if kind == "bytes" else None


def saved_codec(folder: Path) -> Codec | None:
    """The codec whose :meth:`Codec.files` are in a folder; ``None`` if there are none."""
    return open_codec(str(folder)) if (folder / FILE).is_file() else None


def write_codec(folder: Path, codec: Codec) -> None:
    """Write the files of a codec; raise if the folder has those of another codec."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in codec.files().items():
        path = folder / name
        if path.exists() and path.read_bytes() != contents:
            raise DataError(f"{path} belongs to another tokenizer: choose another directory")
        write_whole(path, contents)


def digest_of_codec(codec: Codec) -> str:
    """A digest of a codec: equal digests mean equal tokens for equal text."""
    return hashlib.sha256(codec.files()[FILE]).hexdigest()


def named_in_headers(codec: Codec) -> str:
    """The name of a codec in the headers of token files."""
    return "bytes" if isinstance(codec, Bytes) else f"{FILE}:{digest_of_codec(codec)}"


def encode_text(codec: Codec, text: str) -> list[int]:
    """The tokens of a prompt, without the token that ends a document."""
    return [int(token) for token in codec.encode([text.encode()])[:-1]]


def decode_text(codec: Codec, tokens: Sequence[int]) -> str:
    """Text to show: undecodable bytes as U+FFFD, the end of a document as an empty line."""
    valid = [int(token) for token in tokens if int(token) < codec.vocab_size]
    symbols = codec.symbols(np.array(valid, np.int64))
    parts = np.split(symbols, np.flatnonzero(symbols == END))
    texts = [part[part != END].astype(np.uint8).tobytes() for part in parts]
    return b"\n\n".join(texts).decode("utf-8", "replace")


def encode_each(codec: Codec, documents: Sequence[bytes]) -> list[Tokens]:
    """The tokens of each document, with the end token after it, made by several threads."""
    tokens = codec.encode(documents)
    ends = np.flatnonzero(tokens == codec.end) + 1
    if len(ends) != len(documents):  # a text contains the end token of a pretrained tokenizer
        return [codec.encode([document]) for document in documents]
    return np.split(tokens, ends[:-1])


def num_bytes(codec: Codec, tokens: Tokens) -> int:
    """The number of bytes that tokens stand for; the end of a document has none."""
    counts = np.zeros(codec.vocab_size, np.int64)
    for begin in range(0, len(tokens), CHUNK):
        chunk = tokens[begin : begin + CHUNK]
        check_range(chunk, codec.vocab_size, f"tokens of {codec.name}", begin)
        counts += np.bincount(chunk, minlength=codec.vocab_size)
    counts[codec.end] = 0
    return int(counts @ codec.lengths)


def require(package: str, extra: str) -> Any:
    """Import a package of an extra."""
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
    """The token that ends a text: from the files beside a tokenizer, or a usual spelling."""
    for neighbour in ("tokenizer_config.json", "special_tokens_map.json"):
        spelling = _json_at(file.parent / neighbour).get("eos_token")
        spelling = spelling.get("content") if isinstance(spelling, dict) else spelling
        number = tokenizer.token_to_id(spelling) if isinstance(spelling, str) else None
        if number is not None:
            return int(number)
    for neighbour in ("generation_config.json", "config.json"):
        number = _json_at(file.parent / neighbour).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and tokenizer.id_to_token(number) is not None:
            return number
    for spelling in _ENDS:
        number = tokenizer.token_to_id(spelling)
        if number is not None:
            return int(number)
    raise DataError(
        f"tokenizer {name!r} does not say which token ends a text: write "
        f'{{"eos_token": "..."}} into {file.parent / "tokenizer_config.json"}'
    )


def _json_at(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): repair or remove it") from None
    return value if isinstance(value, dict) else {}


def _with_end(described: dict[str, Any], end: int) -> dict[str, bytes]:
    """The files of a tokenizer, with a token that ends a document added to its pieces."""
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": end, "content": END_TEXT, **options, "special": True}
    described = {**described, "added_tokens": [*described["added_tokens"], token]}
    return {FILE: json.dumps(described, ensure_ascii=False).encode(), **_names_end(END_TEXT)}


def _names_end(spelling: str) -> dict[str, bytes]:
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": spelling,
        "clean_up_tokenization_spaces": False,
    }
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
    """A document as text. Bytes that are not UTF-8 become U+FFFD, also for counts of bytes."""
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
