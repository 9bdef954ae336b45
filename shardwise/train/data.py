# SPDX-License-Identifier: Apache-2.0
"""Data: the tokens of a run, and the order in which its ranks read them.

    --data                     FOLDER                a token folder, mapped
                               A:0.7,B:0.3           several, drawn in these proportions
                               A,B                   several, in proportion to their tokens
                               stdlib, texts/*.txt   text: tokens are made first, once

The tokens to train on are cut into windows of ``context`` tokens. An epoch is a permutation of the
windows. It is computed for each index, so it needs no memory, however large the data are. Samples
are counted over all ranks. A step takes the next ``global_batch`` samples and divides them over the
ranks:

    sample     0  1  2  3  4  5  6  7 | 8  9 10 11 ...      a checkpoint saves this number alone
    window    17  3 40  8 22  0 31  5 | ...                 permutation of the epoch
    2 ranks   |--rank 0-|--rank 1-|                         step of 8
    4 ranks   |- 0-|- 1-|- 2-|- 3-|                         the same 8 windows

A run that is resumed with another number of ranks, or another batch, continues at the same sample:
no sample is drawn twice or left out. Of several sources each gets its share of every ``PERIOD``
samples, at places that a permutation of the period chooses, and counts its own samples.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.models.loss import IGNORED
from shardwise.train.tokenise import Tokenizer, make_tokens, open_tokenizer
from shardwise.train.tokens import (
    TOKENIZER,
    DataError,
    TokenInfo,
    Tokens,
    check_range,
    open_tokens,
    token_folder,
)

PERIOD = 10_000  # samples in which every source gets exactly its share: weights have four digits
_STATE_VERSION = 1


@dataclass(frozen=True)
class Part:
    """The tokens of one source to train on, and the fraction of all samples drawn there."""

    tokens: Tokens
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out."""

    name: str  # the data as the user named them
    parts: tuple[Part, ...]
    held_out: Tokens
    info: TokenInfo  # of the first source: vocabulary, end token, bytes of each token
    sha256: str  # equal digests mean equal data
    folder: Path | None = None  # of the tokenizer; None: unknown
    train_rate: float | None = None  # mean bytes of a token to train on; None: unknown
    token_bytes: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_bytes", np.array(self.info.token_bytes, np.int64))
        for what, tokens in (("train on", self.parts[0].tokens), ("score", self.held_out)):
            if len(tokens) < 2:
                raise DataError(
                    f"{self.name!r} leaves {len(tokens)} tokens to {what}, and at least 2 are "
                    f"needed, one to read and one to predict: give more text"
                )

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def num_tokens(self) -> int:
        """The number of tokens to train on."""
        return sum(len(part.tokens) for part in self.parts)

    def tokenizer(self) -> Tokenizer | None:
        return None if self.folder is None else open_tokenizer(self.folder)

    def bits_per_byte(self, loss: float, scored: Tokens | None = None) -> float:
        """A loss in nats per token as bits per byte, or bits per token if bytes are unknown (see
        ``unit``): of the tokens that were scored, or by the mean of the training text."""
        rate = self.train_rate
        if scored is not None and len(self.token_bytes):
            rate = float(self.token_bytes[scored].mean())
        return loss / math.log(2) / (rate or 1.0)

    @property
    def unit(self) -> str:
        return "bits/token" if self.train_rate is None else "bits/byte"

    @property
    def field(self) -> str:
        """The name of ``bits_per_byte`` in events: "bits_per_token" if bytes are unknown."""
        return self.unit.replace("/", "_per_")


def sources_of(spec: str) -> dict[str, float | None]:
    """The sources in ``spec``, each with its weight; ``None`` without weights."""
    if Path(spec).expanduser().exists():
        return {spec: None}
    words = [word.strip() for word in spec.split(",")]
    found = [re.fullmatch(r"(.+):([0-9.e+-]+)", word) for word in words]
    sources: dict[str, float | None] = dict.fromkeys(words)
    if all(found):
        sources = {match[1]: float(match[2]) for match in found if match}
    weights = [weight for weight in sources.values() if weight is not None]
    if len(sources) < len(words) or not all(sources) or not all(0 < w < math.inf for w in weights):
        raise DataError(
            f"{spec!r}: name each source once, with a positive weight for each, as in a:0.7,b:0.3, "
            f"or with none"
        )
    return sources


def folder_of(source: str, tokenizer: str) -> Path:
    """The token folder of a source; of text it is made, once."""
    if (folder := token_folder(source)) is not None:
        return folder
    if source.startswith("hf:") or source.endswith((".jsonl", ".jsonl.gz", ".parquet")):
        raise DataError(
            f"{source!r} holds rows: make tokens of them with shardwise data {source} --out "
            f"FOLDER --tokenizer {tokenizer}, and train with --data FOLDER"
        )
    return make_tokens([source], tokenizer=tokenizer)


def load_corpus(spec: str, *, tokenizer: str = "bytes", eval_data: str | None = None) -> Corpus:
    """Open the data of a run. Every rank gets the same corpus, without communication.

    Args:
        spec: see the docstring of this module.
        tokenizer: for text: ``bytes``, ``bpe:SIZE`` or the path of a pretrained tokenizer.
        eval_data: a source whose tokens are scored instead of the held-out tokens of ``spec``.
    """
    sources = sources_of(spec)
    folders = [folder_of(source, tokenizer) for source in sources]
    opened = [open_tokens(folder) for folder in folders]
    infos, first = [info for _, info in opened], opened[0][1]
    given = [*sources.values()]
    sizes = [w or float(info.held_out_begins) for w, info in zip(given, infos, strict=True)]
    weights = [size / (sum(sizes) or 1.0) for size in sizes]
    if eval_data is not None:
        scored, info = open_tokens(folder_of(eval_data, tokenizer))
        infos.append(info)
    else:  # in the proportions of the weights: the loss is that of the mixture
        held = [tokens[info.held_out_begins :] for tokens, info in opened]
        most = min(len(tokens) / (w or 1.0) for tokens, w in zip(held, weights, strict=True))
        if len(held) > 1:
            pairs = zip(held, weights, strict=True)
            held = [tokens[: max(2, int(w * most))] for tokens, w in pairs]
        scored = held[0] if len(held) == 1 else np.concatenate(held)
    if len({(info.vocab_size, info.tokenizer) for info in infos}) > 1:
        raise DataError(
            f"{spec!r} (eval_data={eval_data!r}): vocabularies of "
            f"{', '.join(str(info.vocab_size) for info in infos)}: make all with one tokenizer"
        )
    infos = infos[: len(opened)]
    rates = [(info.train_bytes or 0) / max(1, info.held_out_begins) for info in infos]
    known = all(info.train_bytes is not None for info in infos)
    words = [f"{info.sha256}:{w}" for info, w in zip(infos, weights, strict=True)]
    mixed = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return Corpus(
        name=spec,
        parts=tuple(
            Part(tokens[: info.held_out_begins], weight)
            for (tokens, info), weight in zip(opened, weights, strict=True)
        ),
        held_out=scored,
        info=first,
        sha256=first.sha256 if len(words) == 1 else mixed,
        folder=_tokenizer_folder(folders[0], first),
        train_rate=sum(map(operator.mul, weights, rates)) if known else None,
    )


def _tokenizer_folder(folder: Path, info: TokenInfo) -> Path | None:
    """The folder, if the tokenizer there is the one that made the tokens."""
    file = folder / TOKENIZER
    if info.tokenizer is None or not file.is_file():
        return None
    if hashlib.sha256(file.read_bytes()).hexdigest() != info.tokenizer:
        raise DataError(
            f"{file} is not the tokenizer of the tokens beside it: put that tokenizer there, or "
            f"make the tokens again"
        )
    return folder


# ------------------------------------------------------------------------------ samples


class Sampler:
    """This rank's share of an endless, shuffled stream of windows of a corpus.

    Args:
        context: tokens in a window; the target of each token is the next token.
        global_batch: windows of one step, over all ranks; a multiple of their number.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        context: int,
        global_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        shortest = min(len(part.tokens) for part in corpus.parts)
        if shortest < context + 1:
            raise DataError(
                f"{shortest} training tokens do not fill a window of context={context} and the "
                f"token after it: give more text or shorten the context"
            )
        self.corpus, self.context, self.global_batch = corpus, context, global_batch
        self.rank, self.world_size = rank, world_size
        self.fingerprint = corpus.sha256
        # For each source: windows, first window, samples of each period.
        self._counts = np.array([(len(part.tokens) - 1) // context for part in corpus.parts])
        self._firsts = self._counts.cumsum() - self._counts
        self._shares = divide(PERIOD, [part.weight for part in corpus.parts])
        self.num_windows = int(self._counts.sum())
        self.seed = seed
        self.position = 0  # samples drawn so far by all ranks together

    @property
    def batch_size(self) -> int:
        """The number of windows of one step on this rank."""
        return self.global_batch // self.world_size

    def described(self, steps: int) -> str:
        """The number of tokens, and how often a run of this number of steps draws each token, for
        each source."""
        corpus = self.corpus
        times = steps * self.global_batch * self._shares / PERIOD / self._counts
        return (
            f"{corpus.num_tokens / 1e6:.2f}M tokens, {len(corpus.held_out) / 1e6:.2f}M held out, "
            f"drawn {' / '.join(f'{number:.2g}' for number in times)} times"
        )

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next step's tokens and targets, both [batch_size, context]; advances the position."""
        batch = self.batch(self.position)
        self.position += self.global_batch
        return batch

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """This rank's share of the step that begins at sample ``position``."""
        windows = self.windows(position)
        sources = np.searchsorted(self._firsts, windows, side="right") - 1
        rows = np.empty((len(windows), self.context + 1), np.int64)
        for source in np.unique(sources):
            here = sources == source
            begins = (windows[here] - self._firsts[source]) * self.context
            rows[here] = self.corpus.parts[source].tokens[
                begins[:, None] + np.arange(self.context + 1)
            ]
        check_range(rows.reshape(-1), self.corpus.vocab_size, f"samples from {position} on")
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def windows(self, position: int) -> NDArray[np.int64]:
        """The windows of this rank's share of that step, in order."""
        begin = position + self.rank * self.batch_size
        samples = np.arange(begin, begin + self.batch_size, dtype=np.int64)
        if len(self._counts) == 1:
            return self._shuffled(samples, 0)
        periods, places = samples // PERIOD, samples % PERIOD
        for period in np.unique(periods):
            here = periods == period
            # The number differs from that of any epoch, so the permutations are independent.
            places[here] = permute(places[here], PERIOD, self.seed, int(period) + (1 << 62))
        firsts = np.cumsum(self._shares) - self._shares
        sources = np.searchsorted(firsts, places, side="right") - 1
        own = periods * self._shares[sources] + places - firsts[sources]
        windows = np.empty_like(samples)
        for source in np.unique(sources):
            here = sources == source
            windows[here] = self._shuffled(own[here], int(source)) + self._firsts[source]
        return windows

    def _shuffled(self, samples: NDArray[np.int64], source: int) -> NDArray[np.int64]:
        """The windows of a source for these samples of the source."""
        size = int(self._counts[source])
        epochs = samples // size
        windows = np.empty_like(samples)
        for epoch in np.unique(epochs):  # rarely more than one
            here = epochs == epoch
            windows[here] = permute(samples[here] % size, size, self.seed, int(epoch))
        return windows

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank, as values for JSON."""
        names = ("position", "seed", "context", "num_windows", "fingerprint")
        return {"version": _STATE_VERSION, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``, with its seed."""
        own = self.state_dict() | {key: state.get(key) for key in ("position", "seed")}
        different = [key for key, value in own.items() if state.get(key) != value]
        numbers = [state.get(key) for key in ("position", "seed")]
        if different or not all(type(number) is int and number >= 0 for number in numbers):
            raise DataError(
                f"the saved position {state} is of other data than {own}: resume with the data and "
                f"the context of the saved run, or start a new run"
            )
        self.position, self.seed = state["position"], state["seed"]


class Batches:
    """The batches of a sampler on a device. For a GPU, a thread prepares the next batch in pinned
    memory, which is copied while the GPU computes."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        self.sampler, self.device = sampler, device
        self._thread = ThreadPoolExecutor(1) if device.type == "cuda" else None
        self._ahead: tuple[int, Future[tuple[Tensor, ...]]] | None = None

    def next(self) -> tuple[Tensor, ...]:
        """The next step's tokens and targets; advances the sampler's position."""
        if self._thread is None:
            return self.sampler.next_batch()
        position, ahead = self.sampler.position, self._ahead
        if ahead is None or ahead[0] != position:  # the first step, also after a resume
            ahead = position, self._thread.submit(self._prepare, position)
        batch = ahead[1].result()
        self.sampler.position += self.sampler.global_batch
        later = self.sampler.position
        self._ahead = later, self._thread.submit(self._prepare, later)
        return tuple(part.to(self.device, non_blocking=True) for part in batch)

    def _prepare(self, position: int) -> tuple[Tensor, ...]:
        return tuple(part.pin_memory() for part in self.sampler.batch(position))


class HeldOut:
    """The held-out tokens in order, each scored once, divided over the ranks.

    Every rank iterates over the same number of batches, because a forward pass communicates. Rows
    without a window have no scored target. Weigh the mean loss of a batch by its number of scored
    targets.

    Args:
        batch_size: windows of one batch on one rank.
        max_windows: the largest number of windows to score; they are evenly spaced.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        context: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        max_windows: int | None = None,
    ) -> None:
        self.tokens = tokens = corpus.held_out
        self.context, self.batch_size = context, batch_size
        self.vocab_size = corpus.vocab_size
        self.rank, self.world_size = rank, world_size
        count = -(-(len(tokens) - 1) // context)  # the last window may be short
        most = count if max_windows is None else min(count, max_windows)
        self.windows = np.arange(most, dtype=np.int64) * count // most

    def __len__(self) -> int:
        """The number of batches of each rank."""
        return -(-len(self.windows) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Tokens and targets, both [batch_size, context], and the number of scored targets."""
        for index in range(len(self)):
            first = (index * self.world_size + self.rank) * self.batch_size
            yield self._batch(self.windows[first : first + self.batch_size])

    @property
    def scored(self) -> Tokens:
        """The target tokens of all ranks together."""
        begins = self.windows * self.context + 1
        return np.concatenate([self.tokens[at : at + self.context] for at in begins.tolist()])

    def _batch(self, windows: NDArray[np.int64]) -> tuple[Tensor, Tensor, int]:
        tokens = torch.zeros(self.batch_size, self.context, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        scored = 0
        for row, window in enumerate(windows.tolist()):
            begin = window * self.context
            part = self.tokens[begin : begin + self.context + 1]
            check_range(part, self.vocab_size, "the held-out tokens", begin)
            both = torch.from_numpy(part.astype(np.int64))
            length = len(both) - 1
            tokens[row, :length], targets[row, :length] = both[:-1], both[1:]
            scored += length
        return tokens, targets, scored


# ------------------------------------------------------------------------------------- permutations


def divide(total: int, weights: Sequence[float]) -> NDArray[np.int64]:
    """Whole numbers that sum to ``total``, in proportion to the weights."""
    ends = np.round(np.cumsum(weights) / sum(weights) * total).astype(np.int64)
    parts = np.diff(ends, prepend=0)
    if parts.min() < 1:
        least = weights[int(parts.argmin())] / sum(weights)
        raise DataError(
            f"a weight of {least:.2g} gives less than one of {total} samples: raise it, or leave "
            f"that source out"
        )
    return parts


def permute(index: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The images of indices under a permutation of ``range(size)`` chosen by seed and epoch.

    This is a Feistel network. A number of 2n bits is cut into halves, and each round changes one
    half by a hash of the other half. Each round can be undone, so no two numbers get the same
    image. The network permutes ``range(4**n)``, at most 4 times ``size``. A number whose image is
    not below ``size`` passes through the network again until it is.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [_mix(np.uint64(seed), np.uint64(epoch), np.uint64(n)) for n in range(6)]
    result = index.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_hash(right ^ key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _mix(*numbers: np.uint64) -> np.uint64:
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = _hash(key ^ number)
    return np.uint64(key[0])


def _hash(values: Any) -> NDArray[np.uint64]:
    """The 64-bit hash of splitmix64: a change of one bit changes about half of the result."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))  # type: ignore[no-any-return]
