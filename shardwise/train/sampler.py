# SPDX-License-Identifier: Apache-2.0
"""Samplers: the windows of tokens that a rank reads, in the same order for any number of ranks.

The tokens are cut into windows of ``context`` tokens. An epoch is a permutation of the windows. It
is computed for each index, so it needs no memory, however large the data are. Samples are counted
over all ranks. A step takes the next ``global_batch`` samples and divides them over the ranks:

    sample     0  1  2  3  4  5  6  7 | 8  9 10 11 ...      a checkpoint saves this number alone
    window    17  3 40  8 22  0 31  5 | ...                 permutation of the epoch
    2 ranks   |--rank 0-|--rank 1-|                         step of 8
    4 ranks   |- 0-|- 1-|- 2-|- 3-|                         the same 8 windows

A run that is resumed with another number of ranks, or another batch, continues at the same sample:
no sample is drawn twice or left out.

Several sources with weights are stretches of the tokens. Each source gets its share of every
``PERIOD`` samples, at places that a permutation of the period chooses, and counts its own samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.models.loss import IGNORED
from shardwise.train.corpus import Corpus
from shardwise.train.tokens import DataError, Tokens, check_range

PERIOD = 10_000  # samples in which every source gets exactly its share: weights have four digits
_STATE_VERSION = 1


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
        lengths = [length for length, _ in corpus.shares] or [len(corpus.train)]
        if min(lengths) < context + 1:
            raise DataError(
                f"{min(lengths)} training tokens do not fill a window of context={context} and the "
                f"token after it: give more text or shorten the context"
            )
        self.corpus, self.context, self.global_batch = corpus, context, global_batch
        self.rank, self.world_size = rank, world_size
        self.fingerprint = corpus.sha256
        # For each stretch: windows, first window, first token, samples of each period.
        self._counts = np.array([(length - 1) // context for length in lengths])
        self._firsts = self._counts.cumsum() - self._counts
        self._begins = np.cumsum(lengths) - lengths
        self._parts = divide(PERIOD, [weight for _, weight in corpus.shares] or [1.0])
        self.num_windows = int(self._counts.sum())
        self.seed = seed
        self.position = 0  # samples drawn so far by all ranks together

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.position // self.num_windows

    def described(self, steps: int) -> str:
        """The number of tokens, and how often a run of this number of steps draws each token, for
        each source with a weight."""
        corpus = self.corpus
        text = f"{len(corpus.train) / 1e6:.2f}M tokens, {len(corpus.held_out) / 1e6:.2f}M held out"
        if corpus.volumes is not None:  # the number of rows in a stream is unknown
            return text
        times = steps * self.global_batch * self._parts / PERIOD / self._counts
        return f"{text}, drawn {' / '.join(f'{number:.2g}' for number in times)} times"

    @property
    def batch_size(self) -> int:
        """The number of windows of one step on this rank."""
        return self.global_batch // self.world_size

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next step's tokens and targets, both [batch_size, context]; advances the position."""
        batch = self.batch(self.position)
        self.position += self.global_batch
        return batch

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """This rank's share of the step that begins at sample ``position``."""
        windows = self.windows(position)
        stretch = np.searchsorted(self._firsts, windows, side="right") - 1
        begins = self._begins[stretch] + (windows - self._firsts[stretch]) * self.context
        at = begins[:, None] + np.arange(self.context + 1)  # [batch, context + 1]
        rows = self._rows(position, at)
        if rows.max() >= self.corpus.vocab_size:
            for row, first in zip(rows, at[:, 0], strict=True):
                check_range(row, self.corpus.vocab_size, "the training tokens", int(first))
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _rows(self, position: int, at: NDArray[np.int64]) -> Tokens:
        """The tokens at these positions; of a stream, in the volume of each sample's epoch."""
        if self.corpus.volumes is None:
            return self.corpus.train[at]
        begin = position + self.rank * self.batch_size
        epochs = np.arange(begin, begin + self.batch_size) // self.num_windows
        volumes = {int(epoch): self.corpus.volumes(int(epoch)) for epoch in np.unique(epochs)}
        parts = [tokens[at[epochs == epoch]] for epoch, tokens in volumes.items()]
        return np.concatenate(parts)  # epochs rise with the samples

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
        firsts = np.cumsum(self._parts) - self._parts
        stretches = np.searchsorted(firsts, places, side="right") - 1
        own = periods * self._parts[stretches] + places - firsts[stretches]
        windows = np.empty_like(samples)
        for stretch in np.unique(stretches):
            here = stretches == stretch
            windows[here] = self._shuffled(own[here], int(stretch)) + self._firsts[stretch]
        return windows

    def _shuffled(self, samples: NDArray[np.int64], stretch: int) -> NDArray[np.int64]:
        """The windows of a stretch for these samples of the stretch."""
        size = int(self._counts[stretch])
        epochs = samples // size
        windows = np.empty_like(samples)
        for epoch in np.unique(epochs):  # rarely more than one
            here = epochs == epoch
            windows[here] = permute(samples[here] % size, size, self.seed, int(epoch))
        return windows

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank, as values for JSON."""
        return {
            "version": _STATE_VERSION,
            "position": self.position,
            "epoch": self.epoch,
            "seed": self.seed,
            "context": self.context,
            "num_windows": self.num_windows,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``, with its seed."""
        problems = []
        if state.get("version") != _STATE_VERSION:
            problems.append(f"version {state.get('version')!r}, now {_STATE_VERSION}")
        for key in ("context", "num_windows", "fingerprint"):
            if state.get(key) != getattr(self, key):
                problems.append(f"{key} {state.get(key)!r}, now {getattr(self, key)!r}")
        for key in ("position", "seed"):
            value = state.get(key)
            if not isinstance(value, int) or value < 0:
                problems.append(f"{key} {value!r}, which must be a number of 0 or more")
        if problems:
            raise DataError(
                f"the saved position is of other data ({'; '.join(problems)}): resume with the "
                f"data and the context of the saved run, or start a new run"
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
