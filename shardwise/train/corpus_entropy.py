# SPDX-License-Identifier: Apache-2.0
"""What simple models score on the held-out text: the lines to compare a loss with.

All in bits per byte, on the same held-out bytes as the model's own figure, ends of documents
included: they have to be guessed too, and count no byte.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.train.corpus import Corpus
from shardwise.train.tokens_codec import END, NUM_SYMBOLS

_MOST = 64 << 20  # symbols counted: more change no digit that is shown
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class References:
    """Bits per byte.

    Args:
        unigram: a model that knows how frequent bytes are in the training text.
        bigram: one that also knows the byte before, backed off to the unigram for unseen pairs.
        bigram_entropy: the conditional entropy of the training text itself, which is what a
            bigram model could reach on the very text it counted.
        zlib: the held-out text compressed at level 9.
    """

    unigram: float
    bigram: float
    bigram_entropy: float
    zlib: float


def references_of(corpus: Corpus) -> References | None:
    """``None`` for tokens whose bytes are unknown. Well under a second for the standard library."""
    if corpus.codec is None or not corpus.held_out_bytes:
        return None
    train = corpus.codec.symbols(corpus.train[:_MOST])[:_MOST]
    held_out = corpus.codec.symbols(corpus.held_out[:_MOST])[:_MOST]
    num_bytes = np.count_nonzero(held_out != END)
    pairs, tested = count_pairs(train), count_pairs(held_out)

    single = pairs.sum(0) + 1.0  # every symbol once more: nothing has no chance at all
    single /= single.sum()
    before = pairs.sum(1, keepdims=True)
    double = (pairs + single) / (before + 1.0)
    seen = np.where(pairs > 0, pairs, 1.0)  # log 1 = 0 for what never comes
    own = (pairs * np.log2(np.where(pairs > 0, before, 1.0) / seen)).sum()

    text = held_out[held_out != END].astype(np.uint8).tobytes()
    return References(
        unigram=float(-(tested.sum(0) * np.log2(single)).sum() / num_bytes),
        bigram=float(-(tested * np.log2(double)).sum() / num_bytes),
        bigram_entropy=float(own / np.count_nonzero(train != END)),
        zlib=8 * len(zlib.compress(text, 9)) / int(num_bytes),
    )


def count_pairs(symbols: NDArray[np.uint16]) -> NDArray[Any]:
    """How often symbol b follows symbol a: [257, 257]."""
    counts = np.zeros(NUM_SYMBOLS**2, np.int64)
    for begin in range(0, len(symbols) - 1, _CHUNK):
        chunk = symbols[begin : begin + _CHUNK + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * NUM_SYMBOLS + chunk[1:], minlength=len(counts))
    return counts.reshape(NUM_SYMBOLS, NUM_SYMBOLS).astype(np.float64)
