# SPDX-License-Identifier: Apache-2.0
"""The order of samples: a permutation, the same for all numbers of ranks, kept when saved."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.train.data import PERIOD, Corpus, HeldOut, Part, Sampler, permute
from shardwise.train.tokens import DataError, TokenInfo, dtype_for

CONTEXT = 4


def corpus_of(*parts: Any, vocab_size: int = 1 << 16, weights: Any = (1.0,)) -> Corpus:
    """A corpus that trains on these tokens, and holds the first of them out."""
    info = TokenInfo(
        dtype=dtype_for(vocab_size).name,
        vocab_size=vocab_size,
        count=0,
        held_out_begins=0,
        sha256="0" * 64,
    )
    made = tuple(Part(tokens, weight) for tokens, weight in zip(parts, weights, strict=True))
    return Corpus(name="x", sha256="", parts=made, held_out=parts[0], info=info)


def sampler(num_windows: int, sha256: str = "", **options: Any) -> Sampler:
    """Over tokens that name their own place."""
    corpus = corpus_of(np.arange(num_windows * CONTEXT + 1, dtype=np.uint32))
    corpus = replace(corpus, sha256=sha256)
    return Sampler(corpus, context=CONTEXT, **{"global_batch": 4} | options)


def advance(one: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    batch = one.batch(one.position)
    one.position += one.global_batch
    return batch


def windows_of(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Which windows a batch holds, after checking that each is whole and its targets come next."""
    tokens, targets = batch
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(tokens - tokens[:, :1], torch.arange(CONTEXT).expand_as(tokens))
    assert (tokens[:, 0] % CONTEXT == 0).all()
    return (tokens[:, 0] // CONTEXT).tolist()


# ------------------------------------------------------------------------------------ permutations


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 100))
def test_every_index_goes_to_one_place(size: int, seed: int, epoch: int) -> None:
    found = permute(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(found), np.arange(size))
    some = np.arange(size)[:: max(1, size // 7)]
    assert np.array_equal(permute(some, size, seed, epoch), found[some])


# ------------------------------------------------------------------------------------------- order

splits = st.sampled_from([(1, 12), (2, 12), (3, 12), (4, 12), (2, 2), (3, 3), (4, 8), (1, 1)])


@settings(max_examples=60)
@given(
    num_windows=st.integers(1, 70),
    phases=st.lists(st.tuples(splits, st.integers(1, 5)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_no_sample_is_repeated_or_left_out_whatever_the_ranks(
    num_windows: int, phases: list[tuple[tuple[int, int], int]], seed: int
) -> None:
    """Runs of different world sizes and batches, one resumed from another, see one stream."""
    state = sampler(num_windows, global_batch=1, seed=seed).state_dict()
    seen: list[int] = []
    for (world_size, global_batch), steps in phases:
        ranks = [
            sampler(num_windows, global_batch=global_batch, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for one in ranks:
            one.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            for one in ranks:
                seen += windows_of(advance(one))
        states = [one.state_dict() for one in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert state["position"] == len(seen) == sum(batch * n for (_, batch), n in phases)
    assert seen == windows_of(sampler(num_windows, global_batch=len(seen), seed=seed).batch(0))
    for begin in range(0, len(seen), num_windows):  # epoch by epoch
        epoch = seen[begin : begin + num_windows]
        assert len({*epoch}) == len(epoch)
        if len(epoch) == num_windows:
            assert {*epoch} == {*range(num_windows)}


# ------------------------------------------------------------------------------------------ errors


def test_a_token_outside_the_vocabulary_is_named_when_it_is_drawn() -> None:
    tokens = np.arange(41, dtype=np.uint16)
    tokens[22] = 999
    corpus = corpus_of(tokens, vocab_size=41)
    one = Sampler(corpus, context=CONTEXT, global_batch=10)
    with pytest.raises(DataError, match="is 999, outside 0 to 40"):
        advance(one)
    with pytest.raises(DataError, match="held-out tokens: token 22 is 999"):
        list(HeldOut(corpus, context=CONTEXT, batch_size=2, max_windows=99))


def test_a_position_in_other_data_is_refused() -> None:
    state = sampler(20, sha256="abc").state_dict()
    wrong: list[dict[str, Any]] = [
        {"position": -1},
        {"position": "0"},
        {"seed": None},
    ]
    for damage in ({}, *wrong):
        one = sampler(20, sha256="abc") if damage else sampler(30, sha256="xyz")
        with pytest.raises(DataError, match="saved position"):
            one.load_state_dict(state | damage)


# ---------------------------------------------------------------------------------------- held out


@settings(max_examples=60)
@given(
    count=st.integers(2, 60),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    most=st.sampled_from([1, 3, 20, 999]),
)
def test_each_held_out_token_is_scored_once_and_no_rank_waits(
    count: int, world_size: int, batch_size: int, most: int
) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    options: dict[str, Any] = {"context": CONTEXT, "batch_size": batch_size}
    ranks = [
        HeldOut(corpus_of(tokens), rank=rank, world_size=world_size, max_windows=most, **options)
        for rank in range(world_size)
    ]
    scored: list[int] = []
    for one in ranks:
        batches = list(one)
        assert len(batches) == len(list(ranks[0])) >= 1
        for inputs, targets, number in batches:
            assert inputs.shape == targets.shape == (batch_size, CONTEXT)
            real = targets != -100
            assert real.sum() == number
            assert torch.equal(inputs[real] + 1, targets[real])
            scored += targets[real].tolist()
    assert len({*scored}) == len(scored)
    assert sorted(scored) == sorted(ranks[0].scored.tolist())
    if most == 999:
        assert {*scored} == {*range(1, count)}
    else:
        assert (most - 1) * CONTEXT < len(scored) <= most * CONTEXT or len(scored) == count - 1


def test_the_mean_over_ranks_is_the_mean_over_tokens() -> None:
    """Weighed by what was scored, uneven ranks give what one process gives."""
    tokens = np.random.default_rng(0).integers(0, 20, 103).astype(np.uint16)
    logits = torch.randn(20, 20)

    def mean(world_size: int, batch_size: int) -> float:
        total, count = 0.0, 0
        for rank in range(world_size):
            where = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
            where["max_windows"] = 999
            held = HeldOut(corpus_of(tokens), context=CONTEXT, **where)
            for inputs, targets, number in held:
                loss = F.cross_entropy(logits[inputs].flatten(0, 1), targets.flatten())
                total += loss.nan_to_num().item() * number
                count += number
        assert count == 102
        return total / count

    assert mean(3, 4) == pytest.approx(mean(1, 7)) == pytest.approx(mean(4, 1))


# ------------------------------------------------------------------------------------- mixtures


def test_a_mixture_draws_its_weights_exactly_and_resumes_anywhere() -> None:
    lengths, weights = (50, 5000, 900), (0.2, 0.7, 0.1)
    parts = [np.full(length, number) for number, length in enumerate(lengths)]
    corpus = corpus_of(*parts, vocab_size=3, weights=weights)
    made = {"context": 4, "global_batch": 2000}
    whole = Sampler(corpus, **made)
    assert whole.described(steps=10).endswith("held out, drawn 3.3e+02 / 11 / 8.9 times")
    rows = torch.cat([advance(whole)[0] for _ in range(2 * PERIOD // 2000)])
    assert (rows == rows[:, :1]).all(), "no window spans two sources"
    counts = torch.bincount(rows[:, 0])
    assert counts.tolist() == [0.2 * 2 * PERIOD, 0.7 * 2 * PERIOD, 0.1 * 2 * PERIOD]
    first = torch.bincount(rows[:400, 0]) / 400
    assert (first - torch.tensor(weights)).abs().max() < 0.06, "everywhere, not one after another"
    # Each source goes through its own epochs: every window as often as every other, within one.
    drawn = [w for step in range(2 * PERIOD // 2000) for w in whole.windows(2000 * step)]
    for source, size in enumerate((12, 1249, 224)):
        often = np.bincount([w for own, w in drawn if own == source], minlength=size)
        assert len(often) == size and often.max() - often.min() <= 1
    later = Sampler(corpus, rank=1, world_size=2, **made)
    later.load_state_dict({**whole.state_dict(), "position": 8_000})
    assert torch.equal(advance(later)[0], rows[9_000:10_000])
    with pytest.raises(DataError, match="less than one of 10000 samples"):
        Sampler(corpus_of(*parts, vocab_size=3, weights=(1e-9, 1.0, 1.0)), **made)
    with pytest.raises(DataError, match="4 training tokens"):
        Sampler(corpus_of(parts[0][:4], parts[1], vocab_size=3, weights=(0.5, 0.5)), **made)
