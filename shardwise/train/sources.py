# SPDX-License-Identifier: Apache-2.0
"""Sources: from what a user writes after ``--data`` to a corpus.

stdlib, stdlib+torch, PATH, DIRECTORY, "GLOB"      text
hf:NAME[:CONFIG[:SPLIT]]                   rows of a dataset, read while a run trains
FILE.bin, DIRECTORY, "GLOB.bin"            token files (``shardwise data`` writes them), mapped
A,B,...                                    several of these, one after another
A:0.7,B:0.3                                several, drawn in these proportions

Token files are mapped, so they may be larger than memory; the end of each is held out. Of several
sources with weights as much of each is held out as the weights say, so that the held-out loss is
that of the mixture.
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
    tell_beside_tokens,
    token_files,
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

# ------------------------------------------------------------------------------ what was named

_MOST_HELD_OUT = 1 << 24  # tokens: enough for four digits, whatever the size of the files


def sources_of(spec: str) -> dict[str, float | None]:
    """The sources that ``spec`` names, in order, each with its fraction of the samples; ``None``
    where no weights were given."""
    if Path(spec).expanduser().exists() or ("," not in spec and _weighted(spec)[1] is None):
        return {spec: None}
    found = dict(map(_weighted, spec.split(",")))
    weights = [weight for weight in found.values() if weight is not None]
    if len(found) < spec.count(",") + 1 or "" in found:
        raise DataError(f"{spec!r} names a source twice, or an empty one: give each once")
    if not weights:
        return found
    if len(weights) < len(found) or not all(0 < w < math.inf for w in weights):
        raise DataError(
            f"{spec!r}: give every source a positive weight, as in a.bin:0.7,b.bin:0.3, or none"
        )
    return {name: (weight or 0.0) / sum(weights) for name, weight in found.items()}


def _weighted(source: str) -> tuple[str, float | None]:
    """A source and its weight: the number behind the last colon that is no part of its name."""
    source = source.strip()
    head, *rest = source.split(":")
    if not rest or Path(source).expanduser().exists():
        return source, None
    if head == "hf" and "." not in rest[-1]:  # hf:NAME:CONFIG, whatever number a CONFIG is
        return source, None
    try:
        weight = float(rest[-1])
    except ValueError:
        return source, None
    return source.removesuffix(f":{rest[-1]}"), weight


def holds_tokens(spec: str) -> bool:
    """Whether the data are token numbers already, which no tokenizer reads."""
    return all(map(token_files, sources_of(spec)))


def vocabulary_of(spec: str, tokenizer: str) -> int:
    """The number of different tokens, without reading text: of ``bpe:SIZE`` the size asked for."""
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
    """The same corpus on every rank that asks; no communication.

    Args:
        spec: the data, as the module's docstring lists them.
        tokenizer: ``bytes``, ``bpe:SIZE`` or the path of a pretrained one, for text.
        held_out: fraction of the bytes (or tokens) that is never trained on.
        cache: directory for what is costly to make (learned pieces, tokens made with pieces). A
            rank that finds them there does not make them again: let one rank per machine go first.
        tokens_needed: how many tokens of a dataset (``hf:``) are read at the most.
    """
    if not 0 < held_out <= 0.5:
        raise DataError(f"held out fraction {held_out}: use more than 0 and at most 0.5")
    sources = sources_of(spec)
    kinds = {source: bool(token_files(source)) for source in sources}
    if len(set(kinds.values())) > 1:
        text = next(source for source, tokens in kinds.items() if not tokens)
        raise DataError(
            f"{spec!r} names both tokens and text: make tokens of {text} with the same tokenizer "
            f"first (shardwise data {text} --out FILE.bin)"
        )
    if len(sources) > 1:
        refuse_twice(sources, named_files)
    if all(kinds.values()):
        return _token_corpus(spec, sources, held_out, tokenizer)
    streamed = [source for source in sources if source.startswith("hf:")]
    if streamed and cache is not None:
        if len(sources) > 1:
            raise DataError(
                f"{spec!r}: a dataset is read alone; name {streamed[0]} without the others"
            )
        return _dataset_corpus(spec, tokenizer, held_out, Path(cache), tokens_needed)
    documents = {source: read_documents(source) for source in sources}
    sha256 = _mixed_digest({name: digest_of(found) for name, found in documents.items()}, sources)
    parts = [hold_out(found, held_out) for found in documents.values()]
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
TokenParts = list[tuple[Tokens, Tokens]]  # by source, likewise


def _encoded(parts: Sequence[Documents], codec: Codec) -> TokenParts:
    return [
        (codec.encode([one.data for one in train]), codec.encode([one.data for one in held]))
        for train, held in parts
    ]


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
        vocab_size: the number of tokens where it is not the codec's.
        rates: bytes of text for a token of each source, where known; else the codec counts.
    """
    shares: tuple[tuple[int, float], ...] = ()
    trained, held = [part[0] for part in parts], [part[1] for part in parts]
    weights = [weight for weight in sources.values() if weight is not None]
    if len(parts) > 1 and weights:
        shares = tuple(zip(map(len, trained), weights, strict=True))
        most = min(len(tokens) / share for tokens, share in zip(held, weights, strict=True))
        held = [
            tokens[: max(2, int(share * most))] for tokens, share in zip(held, weights, strict=True)
        ]

    def count(arrays: Sequence[Tokens], drawn: Sequence[float]) -> int | None:
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(arrays) and codec is not None:
            known = [num_bytes(codec, tokens) / max(1, len(tokens)) for tokens in arrays]
        if len(known) < len(arrays):
            return None
        mean = sum(rate * part for rate, part in zip(known, drawn, strict=True)) / sum(drawn)
        return round(mean * sum(map(len, arrays)))

    size = vocab_size if codec is None or vocab_size is not None else codec.vocab_size
    assert size is not None
    return Corpus(
        name=name,
        train=join(trained),
        held_out=join(held),
        vocab_size=size,
        sha256=sha256,
        codec=codec,
        train_bytes=count(trained, weights if shares else list(map(len, trained))),
        held_out_bytes=count(held, list(map(len, held))),
        shares=shares,
    )


# ------------------------------------------------------------------------------------------ pieces


def _with_pieces(
    parts: Sequence[Documents], codec: Codec | int, cache: str | Path | None
) -> tuple[Codec, TokenParts]:
    """The tokens made with a codec. A number: learn so many pieces, from the training parts alone.

    They are kept in ``cache``, and a copy for the next run of this user: see :func:`shared_cache`.
    """

    def make() -> Codec:
        if not isinstance(codec, int):
            return codec
        return Pieces.train((one.data for train, _ in parts for one in train), codec)

    if cache is None:
        made = make()
        return made, _encoded(parts, made)
    # The digest of both parts: another fraction held out learns other pieces.
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
            except (OSError, DataError):  # not there, or some of its files were removed or damaged
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
    """The codec and the tokens of so many sources in a cache folder."""
    made = Pieces.load(folder / FILE, codec) if isinstance(codec, int) else codec
    opened = [open_tokens(folder / name) for n in range(count) for name in _names(n)]
    if any(header.tokenizer not in (None, named_in_headers(made)) for _, header in opened):
        raise DataError(f"{folder / FILE} is not what its tokens were made with: remove {folder}")
    arrays = [tokens for tokens, _ in opened]
    return made, list(zip(arrays[::2], arrays[1::2], strict=True))


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A cache folder to fill; it appears whole or not at all. Two writers write the same."""
    for left in filter(is_abandoned, folder.parent.glob("*")):
        shutil.rmtree(left, ignore_errors=True)  # of a writer that was killed
    try:
        with whole_folder(folder) as partial:
            yield partial
    except OSError as error:
        if not folder.is_dir():  # not another rank that was quicker
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
    """Rows of a dataset as they come (see :mod:`shardwise.train.streaming`)."""
    stream = open_stream(spec, tokenizer, held_out, cache, needed)
    (train, first), (held, second) = (open_tokens(stream.folder / name) for name in _names(0))
    sha256 = hashlib.sha256(f"{first.sha256}{second.sha256}".encode()).hexdigest()
    rate = (first.num_bytes or 0) / first.count
    made = _corpus_of(spec, sha256, [(train, held)], {spec: None}, stream.codec, rates=[rate])
    return dataclasses.replace(made, volumes=stream.volume)


# ------------------------------------------------------------------------------------ token files


@dataclass(frozen=True, kw_only=True)
class _TokenSource:
    """The tokens of the files of one source."""

    arrays: list[Tokens]
    vocab_size: int
    sha256: str
    tokenizer: str | None = None  # as its headers name it
    codec: Codec | None = None
    rate: float | None = None  # bytes of text for each token


def _token_corpus(
    spec: str, sources: dict[str, float | None], held_out: float, tokenizer: str
) -> Corpus:
    kind, _ = codec_named(tokenizer)
    if kind == "bpe":
        raise DataError(f"{spec!r} holds tokens already: --tokenizer {tokenizer} is for text")
    found = {source: _open_source(source) for source in sources}
    sizes = {one.vocab_size for one in found.values()}
    codecs = {None if one.codec is None else digest_of_codec(one.codec) for one in found.values()}
    if len(sizes) > 1 or len(codecs) > 1:
        raise DataError(
            f"{spec!r} mixes tokens of different tokenizers (vocabularies of "
            f"{', '.join(f'{one.vocab_size} in {name}' for name, one in found.items())}): make "
            f"them with one tokenizer"
        )
    first = next(iter(found.values()))
    codec = first.codec
    if kind == "file":  # for tokens whose files do not name it
        codec = open_codec(tokenizer)
        assert codec is not None
        known = {one.tokenizer for one in found.values()} - {None, named_in_headers(codec)}
        if known or codec.vocab_size > first.vocab_size:
            raise DataError(
                f"--tokenizer {tokenizer} has {codec.vocab_size} tokens and {spec!r} "
                f"{first.vocab_size}: it is not the one that they were made with; make them again "
                f"with it, or name theirs"
            )
    parts = [_cut_ends(name, one.arrays, held_out) for name, one in found.items()]
    sha256 = _mixed_digest({name: one.sha256 for name, one in found.items()}, sources)
    rates = [one.rate for one in found.values()]
    return _corpus_of(spec, sha256, parts, sources, codec, first.vocab_size, rates)


def _open_source(source: str) -> _TokenSource:
    files = token_files(source)
    tell_beside_tokens(source, files)
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
            f"{files[0]} says that its tokens are bytes, but vocab_size={first.vocab_size} and "
            f"bytes have {codec.vocab_size}: write it again"
        )
    counts = [header.num_bytes for header in headers if header.num_bytes is not None]
    total = sum(header.count for header in headers)
    return _TokenSource(
        arrays=[tokens for tokens, _ in opened],
        vocab_size=first.vocab_size,
        sha256=first.sha256
        if len(headers) == 1
        else hashlib.sha256("".join(header.sha256 for header in headers).encode()).hexdigest(),
        tokenizer=first.tokenizer,
        codec=codec,
        rate=sum(counts) / total if len(counts) == len(headers) and total else None,
    )


def _codec_beside(file: Path, tokenizer: str | None) -> Codec | None:
    """The codec that a header names; ``None`` if it names none, or its file is not there."""
    if tokenizer is None or tokenizer == "bytes":
        return None if tokenizer is None else Bytes()
    name, _, digest = tokenizer.partition(":")
    codec = saved_codec(file.parent) if name == FILE else None
    if codec is None:
        text = (
            "%s was made with a tokenizer (%s) that does not lie beside it: texts are shown as "
            "numbers, and exports have no tokenizer"
        )
        warn_once(logger, text, file, name)
    elif digest_of_codec(codec) != digest:
        raise DataError(
            f"{file.parent / name} is not the tokenizer that {file.name} was made with: put that "
            f"one there, or make the tokens again"
        )
    return codec


def _cut_ends(name: str, arrays: Sequence[Tokens], fraction: float) -> tuple[Tokens, Tokens]:
    """Hold out the end of every file: token files do not say where documents begin."""
    total = sum(map(len, arrays))
    if total == 0:
        raise DataError(f"{name} holds no tokens: write it again")
    train, held = [], []
    for tokens in arrays:
        most = _MOST_HELD_OUT * len(tokens) // total
        at = max(0, len(tokens) - min(max(2, round(fraction * len(tokens))), most))
        train.append(tokens[:at])
        held.append(tokens[at:])
    return join(train), join(held)
