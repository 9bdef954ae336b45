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
samples, at places that a permutation chooses, and counts its own samples.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.models.loss import IGNORED
from shardwise.train.tokenise import ROWS, make_tokens
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
    bytes_per_token: float | None = None  # mean of the tokens to train on; None: unknown

    def bits_per_byte(self, loss: float, scored: Tokens | None = None) -> float | None:
        """A loss in nats per token as bits per byte, if bytes are known: of the tokens that were
        scored, or by the mean of the training text."""
        rate = self.bytes_per_token
        if scored is not None and self.info.token_bytes:
            rate = float(np.array(self.info.token_bytes)[scored].mean())
        return loss / math.log(2) / rate if rate else None


def load_corpus(spec: str, *, tokenizer: str = "bytes", eval_data: str | None = None) -> Corpus:
    """Open the data of a run. Every rank gets the same corpus, without communication.

    Args:
        spec: see the docstring of this module.
        tokenizer: for text: ``bytes``, ``bpe:SIZE`` or the path of a pretrained tokenizer.
        eval_data: a source whose tokens are scored instead of the held-out tokens of ``spec``.
    """
    sources = _sources_of(spec)
    folders = [_folder_of(source, tokenizer) for source in sources]
    opened = [open_tokens(folder) for folder in folders]
    infos = [info for _, info in opened]
    sizes = [w or i.held_out_begins for w, i in zip(sources.values(), infos, strict=True)]
    weights = [size / (sum(sizes) or 1) for size in sizes]
    held = [tokens[info.held_out_begins :] for tokens, info in opened]
    if eval_data is not None:
        held = [(scored := open_tokens(_folder_of(eval_data, tokenizer)))[0]]
        infos.append(scored[1])
    elif len(held) > 1:  # in the proportions of the weights: the loss is that of the mixture
        most = min(len(tokens) / w for tokens, w in zip(held, weights, strict=True))
        held = [tokens[: int(w * most)] for tokens, w in zip(held, weights, strict=True)]
    if len({(info.vocab_size, info.tokenizer) for info in infos}) > 1:
        raise DataError(
            f"{spec!r} (eval_data={eval_data!r}): vocabularies of "
            f"{', '.join(str(info.vocab_size) for info in infos)}: make all with one tokenizer"
        )
    parts = [tokens[: info.held_out_begins] for tokens, info in opened]
    scored_tokens = held[0] if len(held) == 1 else np.concatenate(held)
    if min(map(len, (*parts, scored_tokens))) < 2:
        raise DataError(f"{spec!r}: at least 2 tokens to train on and 2 held out: give more text")
    digests = [f"{info.sha256}:{w}" for (_, info), w in zip(opened, weights, strict=True)]
    mixed = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    known = [(i.train_bytes or 0) / i.held_out_begins for _, i in opened]
    return Corpus(
        name=spec,
        parts=tuple(map(Part, parts, weights)),
        held_out=scored_tokens,
        info=infos[0],
        sha256=infos[0].sha256 if len(opened) == 1 else mixed,
        folder=_tokenizer_folder(folders[0], infos[0]),
        bytes_per_token=float(np.dot(weights, known)) if all(known) else None,
    )


def _sources_of(spec: str) -> dict[str, float | None]:
    """The sources in ``spec``, each with its weight; ``None`` without weights."""
    words = [spec] if Path(spec).expanduser().exists() else spec.split(",")
    found = [re.fullmatch(r"(.+?)(?::([0-9.]+))?", word.strip()) for word in words]
    sources = {match[1]: float(match[2]) if match[2] else None for match in found if match}
    weights = [weight for weight in sources.values() if weight is not None]
    if len(sources) < len(words) or len(weights) not in (0, len(words)) or not all(weights):
        raise DataError(
            f"{spec!r}: name each source once, with a positive weight for each, as in a:0.7,b:0.3, "
            f"or with none"
        )
    return sources


def _folder_of(source: str, tokenizer: str) -> Path:
    """The token folder of a source; of text it is made, once."""
    if (folder := token_folder(source)) is not None:
        return folder
    if source.startswith("hf:") or source.endswith(ROWS):
        raise DataError(
            f"{source!r} holds rows: make tokens of them with shardwise data {source} --out "
            f"FOLDER --tokenizer {tokenizer}, and train with --data FOLDER"
        )
    return make_tokens([source], tokenizer=tokenizer)


def _tokenizer_folder(folder: Path, info: TokenInfo) -> Path | None:
    """The folder, if the tokenizer that made the tokens lies there."""
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
        self._counts = [(len(part.tokens) - 1) // context for part in corpus.parts]  # windows
        if not all(self._counts):
            shortest = min(len(part.tokens) for part in corpus.parts)
            raise DataError(
                f"{shortest} training tokens do not fill a window of context={context} and the "
                f"token after it: give more text or shorten the context"
            )
        weights = np.array([part.weight for part in corpus.parts])
        ends = np.round(weights.cumsum() / weights.sum() * PERIOD).astype(np.int64)
        self._shares = np.diff(ends, prepend=0)  # samples of each source in a period
        if not all(self._shares):
            raise DataError(
                f"{corpus.name!r}: a weight gives less than one of {PERIOD} samples: raise it, or "
                f"leave that source out"
            )
        # The source of each sample of a period, and which of the source's samples it is.
        places = permute(np.arange(PERIOD), PERIOD, 0, 0)
        self._sources = np.repeat(np.arange(len(ends)), self._shares)[places]
        self._turns = np.empty(PERIOD, np.int64)
        for source, share in enumerate(self._shares):
            self._turns[self._sources == source] = np.arange(share)
        self.corpus, self.context, self.global_batch = corpus, context, global_batch
        self.batch_size = global_batch // world_size  # windows of one step on this rank
        self.first = rank * self.batch_size
        self.seed = seed
        self.position = 0  # samples drawn so far by all ranks together

    def described(self, steps: int) -> str:
        """The number of tokens, and how often a run of this number of steps draws each token, for
        each source."""
        corpus = self.corpus
        numel = sum(len(part.tokens) for part in corpus.parts)
        times = steps * self.global_batch * self._shares / PERIOD / self._counts
        return (
            f"{numel / 1e6:.2f}M tokens, {len(corpus.held_out) / 1e6:.2f}M held out, "
            f"drawn {' / '.join(f'{number:.2g}' for number in times)} times"
        )

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """The tokens and the targets of this rank, both [batch_size, context], in the step that
        begins at sample ``position``."""
        rows = []
        for source, window in self.windows(position):
            begin = window * self.context
            rows.append(self.corpus.parts[source].tokens[begin : begin + self.context + 1])
        both = np.stack(rows).astype(np.int64)
        check_range(both.ravel(), self.corpus.info.vocab_size, f"samples from {position} on")
        tokens = torch.from_numpy(both)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def windows(self, position: int) -> list[tuple[int, int]]:
        """(source, window in it) of this rank's samples in that step, in order."""
        samples = position + self.first + np.arange(self.batch_size)
        periods, places = np.divmod(samples, PERIOD)
        sources = self._sources[places]
        own = periods * self._shares[sources] + self._turns[places]
        found = np.empty_like(own)
        for source in np.unique(sources):
            size = self._counts[source]
            epochs, indices = np.divmod(own, size)
            for epoch in np.unique(epochs[sources == source]):  # rarely more than one
                here = (sources == source) & (epochs == epoch)
                found[here] = permute(indices[here], size, self.seed, int(epoch))
        return [*zip(sources.tolist(), found.tolist(), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank, as values for JSON."""
        data = {"context": self.context, "fingerprint": self.corpus.sha256}
        return {"position": self.position, "seed": self.seed, **data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``, with its seed."""
        own, numbers = self.state_dict(), (state.get("position"), state.get("seed"))
        same = all(state.get(key) == own[key] for key in ("context", "fingerprint"))
        if not same or not all(type(number) is int and number >= 0 for number in numbers):
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
        sampler, position = self.sampler, self.sampler.position
        sampler.position += sampler.global_batch
        if self._thread is None:
            return sampler.batch(position)
        ahead = self._ahead
        if ahead is None or ahead[0] != position:  # the first step, also after a resume
            ahead = position, self._thread.submit(self._pinned, position)
        batch = ahead[1].result()
        self._ahead = sampler.position, self._thread.submit(self._pinned, sampler.position)
        return tuple(part.to(self.device, non_blocking=True) for part in batch)

    def _pinned(self, position: int) -> tuple[Tensor, ...]:
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
        max_windows: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.corpus, self.context, self.batch_size = corpus, context, batch_size
        self.rank, self.world_size = rank, world_size
        count = -(-(len(corpus.held_out) - 1) // context)  # the last window may be short
        most = min(count, max_windows)
        self.windows = np.arange(most, dtype=np.int64) * count // most

    @property
    def scored(self) -> Tokens:
        """The target tokens of all ranks together."""
        begins = (self.windows * self.context + 1).tolist()
        return np.concatenate([self.corpus.held_out[at : at + self.context] for at in begins])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Tokens and targets, both [batch_size, context], and the number of scored targets."""
        each = self.batch_size * self.world_size
        for first in range(0, len(self.windows), each):
            begin = first + self.rank * self.batch_size
            tokens = torch.zeros(self.batch_size, self.context, dtype=torch.int64)
            targets, scored = torch.full_like(tokens, IGNORED), 0
            for row, window in enumerate(self.windows[begin : begin + self.batch_size].tolist()):
                at = window * self.context
                part = self.corpus.held_out[at : at + self.context + 1]
                check_range(part, self.corpus.info.vocab_size, "the held-out tokens", at)
                both, length = torch.from_numpy(part.astype(np.int64)), len(part) - 1
                tokens[row, :length], targets[row, :length] = both[:-1], both[1:]
                scored += length
            yield tokens, targets, scored


# ------------------------------------------------------------------------------------- permutations


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
