# SPDX-License-Identifier: Apache-2.0
"""Sources: makes a corpus from the argument of ``--data``.

stdlib, stdlib+torch, PATH, DIRECTORY, "GLOB"      text
hf:NAME[:CONFIG[:SPLIT]]                   rows of a dataset, read while a run trains
FILE.bin, DIRECTORY, "GLOB.bin"            token files (``shardwise data`` writes them), mapped
A,B,...                                    several of these, one after another
A:0.7,B:0.3                                several, drawn in these proportions

Token files are memory-mapped, so they may be larger than memory; the end of each file is held out.
The held-out tokens of sources with weights have the proportions of the weights, so the held-out
loss is that of the mixture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.attempt import is_abandoned, whole_folder
from shardwise.notices import warn_once
from shardwise.train.cache import shared_cache
from shardwise.train.codecs import (
    FILE,
    Bytes,
    Codec,
    Pieces,
    codec_named,
    digest_of_codec,
    named_in_headers,
    num_bytes,
    open_codec,
    require,
    saved_codec,
)
from shardwise.train.corpus import (
    Corpus,
    Document,
    digest_of,
    hold_out,
    named_files,
    read_documents,
    refuse_twice,
    token_files,
    warn_beside_tokens,
    warn_of_held_out,
)
from shardwise.train.streaming import open_stream
from shardwise.train.tokens import (
    DataError,
    Tokens,
    join,
    open_tokens,
    read_header,
    write_tokens,
)

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------ names of sources

_MOST_HELD_OUT = 1 << 24  # tokens: enough for four digits of the loss, for files of any size


def sources_of(spec: str) -> dict[str, float | None]:
    """The sources in ``spec``, in order, each with its fraction of the samples; ``None`` without
    weights."""
    if Path(spec).expanduser().exists() or ("," not in spec and _weighted(spec)[1] is None):
        return {spec: None}
    sources = dict(map(_weighted, spec.split(",")))
    weights = [weight for weight in sources.values() if weight is not None]
    if len(sources) < spec.count(",") + 1 or "" in sources:
        raise DataError(f"{spec!r} names a source twice, or an empty source: give each once")
    if not weights:
        return sources
    if len(weights) < len(sources) or not all(0 < w < math.inf for w in weights):
        raise DataError(
            f"{spec!r}: give every source a positive weight, as in a.bin:0.7,b.bin:0.3, or none"
        )
    return {name: (weight or 0.0) / sum(weights) for name, weight in sources.items()}


def _weighted(source: str) -> tuple[str, float | None]:
    """A source and its weight: the number after the last colon, if it is not part of the name."""
    source = source.strip()
    head, *rest = source.split(":")
    if not rest or Path(source).expanduser().exists():
        return source, None
    if head == "hf" and "." not in rest[-1]:  # hf:NAME:CONFIG, where CONFIG may be a number
        return source, None
    try:
        weight = float(rest[-1])
    except ValueError:
        return source, None
    return source.removesuffix(f":{rest[-1]}"), weight


def holds_tokens(spec: str) -> bool:
    """Whether the data are tokens already, so that no tokenizer is needed."""
    return all(map(token_files, sources_of(spec)))


def vocabulary_of(spec: str, tokenizer: str) -> int:
    """The number of different tokens, without reading text. For ``bpe:SIZE`` this is SIZE."""
    source = next(iter(sources_of(spec)))
    if files := token_files(source):
        return read_header(files[0]).vocab_size
    codec = open_codec(tokenizer)
    return codec_named(tokenizer)[1] if codec is None else codec.vocab_size


# ------------------------------------------------------------------------------ load_corpus


def load_corpus(
    spec: str,
    *,
    tokenizer: str = "bytes",
    held_out: float = 0.05,
    cache: str | Path | None = None,
    tokens_needed: int | None = None,
) -> Corpus:
    """Make a corpus. Every rank gets the same corpus, without communication.

    Args:
        spec: the data, see the docstring of this module.
        tokenizer: for text: ``bytes``, ``bpe:SIZE`` or the path of a pretrained tokenizer.
        held_out: fraction of the bytes (or tokens) that is never trained on.
        cache: directory for learned pieces and for tokens made with pieces, which take long to
            make. A rank that finds them there does not make them: call this on one rank per machine
            first.
        tokens_needed: the largest number of tokens to read from a dataset (``hf:``).
    """
    if not 0 < held_out <= 0.5:
        raise DataError(f"held out fraction {held_out}: use more than 0 and at most 0.5")
    sources = sources_of(spec)
    texts = [source for source in sources if not token_files(source)]
    if texts and len(texts) < len(sources):
        raise DataError(
            f"{spec!r} names both tokens and text: make tokens of {texts[0]} with the same "
            f"tokenizer first (shardwise data {texts[0]} --out FILE.bin)"
        )
    if len(sources) > 1:
        refuse_twice(sources, named_files)
    if not texts:
        return _token_corpus(spec, sources, held_out, tokenizer)
    streamed = [source for source in sources if source.startswith("hf:")]
    if streamed and cache is not None:
        if len(sources) > 1:
            raise DataError(
                f"{spec!r}: a dataset can't be mixed with other sources: name {streamed[0]} alone"
            )
        return _dataset_corpus(spec, tokenizer, held_out, Path(cache), tokens_needed)
    documents = {source: read_documents(source) for source in sources}
    sha256 = _mixed_digest({name: digest_of(texts) for name, texts in documents.items()}, sources)
    parts = [hold_out(texts, held_out) for texts in documents.values()]
    warn_of_held_out(spec, parts)
    codec = open_codec(tokenizer)
    if codec is not None and not isinstance(codec, Bytes):
        sha256 = hashlib.sha256(f"{sha256}{digest_of_codec(codec)}".encode()).hexdigest()
    if isinstance(codec, Bytes):
        tokens = _encoded(parts, codec)
    else:
        codec, tokens = _with_pieces(parts, codec or codec_named(tokenizer)[1], cache)
    return _corpus_of(spec, sha256, tokens, sources, codec)


Documents = tuple[list[Document], list[Document]]  # to train on, held out
TokenParts = list[tuple[Tokens, Tokens]]  # to train on and held out, for each source


def _encoded(parts: Sequence[Documents], codec: Codec) -> TokenParts:
    def encode(documents: list[Document]) -> Tokens:
        return codec.encode([document.data for document in documents])

    return [(encode(train), encode(held)) for train, held in parts]


def _mixed_digest(digests: dict[str, str], sources: dict[str, float | None]) -> str:
    """The digest of one source, or of several and their weights."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    words = [f"{digest}:{sources[name]}" for name, digest in digests.items()]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _corpus_of(
    name: str,
    sha256: str,
    parts: TokenParts,
    sources: dict[str, float | None],
    codec: Codec | None,
    vocab_size: int | None = None,
    rates: Sequence[float | None] = (),
) -> Corpus:
    """A corpus of one or several sources.

    Args:
        vocab_size: the number of tokens; ``None``: that of the codec.
        rates: bytes of text per token of each source. If a rate is unknown, the codec counts bytes.
    """
    shares: tuple[tuple[int, float], ...] = ()
    train, held = [part[0] for part in parts], [part[1] for part in parts]
    weights = [weight for weight in sources.values() if weight is not None]
    if len(parts) > 1 and weights:
        shares = tuple(zip(map(len, train), weights, strict=True))
        total = min(len(tokens) / weight for tokens, weight in zip(held, weights, strict=True))
        held = [
            tokens[: max(2, int(weight * total))]
            for tokens, weight in zip(held, weights, strict=True)
        ]

    def count_bytes(arrays: Sequence[Tokens], drawn: Sequence[float]) -> int | None:
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(arrays) and codec is not None:
            known = [num_bytes(codec, tokens) / max(1, len(tokens)) for tokens in arrays]
        if len(known) < len(arrays):
            return None
        mean = sum(rate * part for rate, part in zip(known, drawn, strict=True)) / sum(drawn)
        return round(mean * sum(map(len, arrays)))

    if vocab_size is None:
        assert codec is not None
        vocab_size = codec.vocab_size
    return Corpus(
        name=name,
        train=join(train),
        held_out=join(held),
        vocab_size=vocab_size,
        sha256=sha256,
        codec=codec,
        train_bytes=count_bytes(train, weights if shares else list(map(len, train))),
        held_out_bytes=count_bytes(held, list(map(len, held))),
        shares=shares,
    )


# ------------------------------------------------------------------------------------------ pieces


def _with_pieces(
    parts: Sequence[Documents], codec: Codec | int, cache: str | Path | None
) -> tuple[Codec, TokenParts]:
    """The tokens made with a codec. If ``codec`` is a number, learn so many pieces, from the
    training parts alone.

    The tokens are kept in ``cache``, with a copy in :func:`shared_cache` for other runs.
    """

    def make() -> Codec:
        if not isinstance(codec, int):
            return codec
        return Pieces.train((document.data for train, _ in parts for document in train), codec)

    if cache is None:
        made = make()
        return made, _encoded(parts, made)
    # The digest is of both parts: with another fraction held out, other pieces are learned.
    digests = "".join(digest_of(train) + digest_of(held) for train, held in parts)
    name = f"bpe-{codec}"
    if not isinstance(codec, int):
        name, digests = "pieces", digests + digest_of_codec(codec)
    folder = Path(cache) / f"{name}-{hashlib.sha256(digests.encode()).hexdigest()[:16]}"
    shared = shared_cache() / f"{folder.name}-{require('tokenizers', 'bpe').__version__}"
    if not folder.is_dir():
        with _new_folder(folder) as partial:
            try:
                shutil.copytree(shared, partial, dirs_exist_ok=True)
                _cached(partial, codec, len(parts))
            except (OSError, DataError):  # no such folder, or files were removed or damaged
                made = make()
                if isinstance(made, Pieces):
                    made.save(partial / FILE)
                named = named_in_headers(made)
                for number, tokens in enumerate(_encoded(parts, made)):
                    for name, array in zip(_names(number), tokens, strict=True):
                        size, count = made.vocab_size, num_bytes(made, array)
                        write_tokens(partial / name, array, size, num_bytes=count, tokenizer=named)
                shutil.rmtree(shared, ignore_errors=True)
    if not shared.is_dir():
        with contextlib.suppress(OSError), _new_folder(shared) as partial:  # no room, no home
            shutil.copytree(folder, partial, dirs_exist_ok=True)
    return _cached(folder, codec, len(parts))


def _cached(folder: Path, codec: Codec | int, count: int) -> tuple[Codec, TokenParts]:
    """The codec and the tokens of ``count`` sources in a cache folder."""
    made = Pieces.load(folder / FILE, codec) if isinstance(codec, int) else codec
    opened = [open_tokens(folder / name) for n in range(count) for name in _names(n)]
    if any(header.tokenizer not in (None, named_in_headers(made)) for _, header in opened):
        raise DataError(
            f"{folder / FILE} is not the tokenizer of the tokens there: remove {folder}"
        )
    arrays = [tokens for tokens, _ in opened]
    return made, list(zip(arrays[::2], arrays[1::2], strict=True))


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A cache folder to fill; it gets its name when it is complete. Two writers write the same."""
    for abandoned in filter(is_abandoned, folder.parent.glob("*")):
        shutil.rmtree(abandoned, ignore_errors=True)  # of a writer that was killed
    try:
        with whole_folder(folder) as partial:
            yield partial
    except OSError as error:
        if not folder.is_dir():  # else another rank was quicker
            error.filename = error.filename or str(folder)
            raise


def _names(number: int) -> tuple[str, str]:
    """The cached files of a source."""
    suffix = f"-{number}" if number else ""
    return f"train{suffix}.bin", f"held_out{suffix}.bin"


# ------------------------------------------------------------------------------------ datasets


def _dataset_corpus(
    spec: str, tokenizer: str, held_out: float, cache: Path, needed: int | None
) -> Corpus:
    """The rows of a dataset, as a stream (see :mod:`shardwise.train.streaming`)."""
    stream = open_stream(spec, tokenizer, held_out, cache, needed)
    (train, header), (held, held_header) = (open_tokens(stream.folder / name) for name in _names(0))
    sha256 = hashlib.sha256(f"{header.sha256}{held_header.sha256}".encode()).hexdigest()
    rate = (header.num_bytes or 0) / header.count
    corpus = _corpus_of(spec, sha256, [(train, held)], {spec: None}, stream.codec, rates=[rate])
    return dataclasses.replace(corpus, volumes=stream.volume)


# ------------------------------------------------------------------------------------ token files


@dataclass(frozen=True, kw_only=True)
class _TokenSource:
    """The tokens of the files of one source."""

    arrays: list[Tokens]
    vocab_size: int
    sha256: str
    tokenizer: str | None = None  # the name in the headers
    codec: Codec | None = None
    rate: float | None = None  # bytes of text per token


def _token_corpus(
    spec: str, sources: dict[str, float | None], held_out: float, tokenizer: str
) -> Corpus:
    kind, _ = codec_named(tokenizer)
    if kind == "bpe":
        raise DataError(
            f"{spec!r} holds tokens already, and --tokenizer {tokenizer} is for text: leave it out"
        )
    opened = {name: _open_source(name) for name in sources}
    sizes = {source.vocab_size for source in opened.values()}
    codecs = {source.codec and digest_of_codec(source.codec) for source in opened.values()}
    if len(sizes) > 1 or len(codecs) > 1:
        vocabularies = [f"{source.vocab_size} in {name}" for name, source in opened.items()]
        raise DataError(
            f"{spec!r} mixes tokens of different tokenizers (vocabularies of "
            f"{', '.join(vocabularies)}): make them with one tokenizer"
        )
    first = next(iter(opened.values()))
    codec = first.codec
    if kind == "file":  # for token files that do not name their tokenizer
        codec = open_codec(tokenizer)
        assert codec is not None
        others = {source.tokenizer for source in opened.values()} - {None, named_in_headers(codec)}
        if others or codec.vocab_size > first.vocab_size:
            raise DataError(
                f"--tokenizer {tokenizer} has {codec.vocab_size} tokens and {spec!r} "
                f"{first.vocab_size}: the tokens were made with another tokenizer; name that one, "
                f"or make the tokens again"
            )
    parts = [_cut_ends(name, source.arrays, held_out) for name, source in opened.items()]
    sha256 = _mixed_digest({name: source.sha256 for name, source in opened.items()}, sources)
    rates = [source.rate for source in opened.values()]
    return _corpus_of(spec, sha256, parts, sources, codec, first.vocab_size, rates)


def _open_source(source: str) -> _TokenSource:
    files = token_files(source)
    warn_beside_tokens(source, files)
    opened = [open_tokens(file) for file in files]
    headers = [header for _, header in opened]
    first, codec = headers[0], _codec_beside(files[0], headers[0].tokenizer)
    for file, header in zip(files, headers, strict=True):
        if (header.vocab_size, header.tokenizer) != (first.vocab_size, first.tokenizer):
            raise DataError(
                f"{file} has another tokenizer than {files[0]} (vocab_size={header.vocab_size}, "
                f"{header.tokenizer!r}; {first.vocab_size}, {first.tokenizer!r}): make all files "
                f"of a source with one tokenizer"
            )
    if isinstance(codec, Bytes) and first.vocab_size != codec.vocab_size:
        raise DataError(
            f"{files[0]} says that its tokens are bytes, but it has vocab_size={first.vocab_size} "
            f"and bytes have {codec.vocab_size}: write it again"
        )
    sha256 = first.sha256
    if len(headers) > 1:
        digests = "".join(header.sha256 for header in headers)
        sha256 = hashlib.sha256(digests.encode()).hexdigest()
    counts = [header.num_bytes for header in headers if header.num_bytes is not None]
    total = sum(header.count for header in headers)
    return _TokenSource(
        arrays=[tokens for tokens, _ in opened],
        vocab_size=first.vocab_size,
        sha256=sha256,
        tokenizer=first.tokenizer,
        codec=codec,
        rate=sum(counts) / total if len(counts) == len(headers) and total else None,
    )


def _codec_beside(file: Path, tokenizer: str | None) -> Codec | None:
    """The codec that a header names; ``None`` if it names none, or there is no such file."""
    if tokenizer is None:
        return None
    if tokenizer == "bytes":
        return Bytes()
    name, _, digest = tokenizer.partition(":")
    codec = saved_codec(file.parent) if name == FILE else None
    if codec is None:
        text = (
            "%s was made with a tokenizer (%s) that is not in its folder: texts are shown as "
            "numbers, and exports have no tokenizer"
        )
        warn_once(logger, text, file, name)
    elif digest_of_codec(codec) != digest:
        raise DataError(
            f"{file.parent / name} is not the tokenizer that {file.name} was made with: put that "
            f"tokenizer there, or make the tokens again"
        )
    return codec


def _cut_ends(name: str, arrays: Sequence[Tokens], fraction: float) -> tuple[Tokens, Tokens]:
    """Hold out the end of every file, as token files do not mark the begin of documents."""
    total = sum(map(len, arrays))
    if total == 0:
        raise DataError(f"{name} holds no tokens: write it again")
    train, held = [], []
    for tokens in arrays:
        most = _MOST_HELD_OUT * len(tokens) // total
        cut = max(0, len(tokens) - min(max(2, round(fraction * len(tokens))), most))
        train.append(tokens[:cut])
        held.append(tokens[cut:])
    return join(train), join(held)
