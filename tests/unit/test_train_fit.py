# SPDX-License-Identifier: Apache-2.0
"""``microbatches="auto"``: the largest that fits, recomputation only where it must be."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.models.gpt_config import GPTConfig
from shardwise.report.suggest import largest
from shardwise.train import fit
from shardwise.train.build import named_precision, with_vocabulary
from shardwise.train.config import TrainConfig
from shardwise.train.recipes import RECIPES
from shardwise.train.world import World

MODEL = GPTConfig(
    dim=256, num_layers=4, num_heads=4, context=1024, vocab_size=1024, recompute="auto"
)
CONFIG = TrainConfig(model=MODEL, batch=32)


def world(device: str = "cuda", size: int = 1) -> World:
    return World(rank=0, size=size, local_rank=0, num_nodes=1, device=torch.device(device))


def fitted(
    monkeypatch: pytest.MonkeyPatch, memory: float, config: TrainConfig = CONFIG
) -> TrainConfig:
    monkeypatch.setattr(fit, "free_memory", lambda world: math.floor(memory))
    made, line = fit.fit(config, PRECISION, world())
    assert line is not None and made.microbatches != "auto" and made.model.recompute != "auto"
    assert f"{made.microbatches} microbatches of {made.share(1)} x 1024" in line
    return made


PRECISION = named_precision("bf16", experts=False)


def held(config: TrainConfig, recompute: str, sequences: int) -> int:
    return fit.bytes_held(config, recompute, PRECISION, world(), sequences, 2)


def test_the_largest_microbatch_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen, eight, four = (held(CONFIG, "none", count) for count in (16, 8, 4))
    assert sixteen > eight > four
    for memory, count in ((sixteen, 2), (sixteen - 1, 4), (eight, 4)):
        made = fitted(monkeypatch, memory)
        assert (made.microbatches, made.model.recompute) == (count, "pointwise")
    # Less than ENOUGH tokens without recomputation: blocks are recomputed, and more fits.
    made = fitted(monkeypatch, eight - 1)
    assert made.model.recompute == "block"
    assert made.share(1) > 4 and held(CONFIG, "block", made.share(1)) <= eight - 1


def test_what_is_given_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given_count = dataclasses.replace(CONFIG, microbatches=8)
    made = fitted(monkeypatch, held(CONFIG, "none", 4), given_count)
    assert (made.microbatches, made.model.recompute) == (8, "pointwise")
    eager = dataclasses.replace(given_count, compile="off")
    assert fitted(monkeypatch, held(CONFIG, "none", 4), eager).model.recompute == "none"
    keep = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, recompute="none"))
    made = fitted(monkeypatch, held(CONFIG, "none", 4), keep)
    assert (made.microbatches, made.model.recompute) == (8, "none")
    both = dataclasses.replace(keep, microbatches=8)
    assert fit.fit(both, PRECISION, world()) == (both, None)


def test_a_cpu_computes_a_batch_whole() -> None:
    on_cpu, line = fit.fit(CONFIG, PRECISION, world("cpu"))
    assert (on_cpu.microbatches, on_cpu.model.recompute, line) == (1, "none", None)


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"1 x 1024 tokens does not fit the 1\.00 MiB of a rank"):
        fitted(monkeypatch, 1 << 20)


@pytest.mark.parametrize("name", ["gpt_124m", "gpt_1b", "moe_1b"])
def test_a_large_recipe_starts_on_a_card_of_24_gb_without_a_flag(name: str) -> None:
    """And so on one of 139 GiB, and on 8 of 80 GB, where a rank holds a part of the states. The
    small recipes take less; only ``smoke``, a batch of 12, does not fall over 8 ranks. A plan of
    gpt_1b_mxfp8 takes too long for a test."""
    config = with_vocabulary(RECIPES[name](), 8192)
    precision = named_precision("bf16", experts=config.model.num_experts > 0)
    assert config.microbatches == "auto" and config.share(8) * 8 == config.batch
    most = "block" if config.model.recompute == "auto" else config.model.recompute
    held = fit.bytes_held(config, most, precision, world(), 1, 2)
    assert held <= fit.HEADROOM * 23.5 * 2**30


@given(
    flat=st.integers(0, 20), rise=st.integers(1, 50), room=st.integers(0, 900),
    first=st.integers(1, 64),
)  # fmt: skip
def test_the_most_that_fits_is_found_where_bytes_begin_flat(
    flat: int, rise: int, room: int, first: int
) -> None:
    """Recomputed blocks: the first sequences cost nothing beside the optimizer's step."""

    def total(count: int) -> int:
        return 1000 + rise * max(0, count - flat)

    found = largest(total, 1000 + room, first)
    assert total(found) <= 1000 + room < total(found + 1)
