# SPDX-License-Identifier: Apache-2.0
"""``microbatches="auto"``: the largest that fits, recomputation only where it must be."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.placements import STRATEGIES
from shardwise.models.gpt_config import GPTConfig
from shardwise.planning.suggest import largest
from shardwise.train import fit
from shardwise.train.build import named_precision, with_vocabulary
from shardwise.train.config import TrainConfig
from shardwise.train.launch import World
from shardwise.train.recipes import RECIPES

MODEL = GPTConfig(
    dim=256, num_layers=2, num_heads=4, context=1024, vocab_size=1024, recompute="auto"
)
CONFIG = TrainConfig(model=MODEL, batch=32)


def world(device: str = "cuda", size: int = 1) -> World:
    return World(rank=0, size=size, local_rank=0, num_nodes=1, device=torch.device(device))


def fitted(
    monkeypatch: pytest.MonkeyPatch, memory: float, config: TrainConfig = CONFIG
) -> TrainConfig:
    monkeypatch.setattr(fit, "free_memory", lambda world: math.floor(memory))
    made, record, line = fit.fit(config, PRECISION, world())
    assert line is not None and record is not None
    assert (record["microbatches"], record["recompute"]) == (
        made.microbatches,
        made.model.recompute,
    )
    assert line is not None and made.microbatches != "auto" and made.model.recompute != "auto"
    assert f"{made.microbatches} microbatches of {made.share(1)} x 1024" in line
    return made


PRECISION = named_precision("bf16", experts=False)


@pytest.fixture(autouse=True)
def the_same_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "bytes_held", bytes_held)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: CARD)


CARD = SimpleNamespace(name="a card", total_memory=1 << 34)
bytes_held = functools.cache(fit.bytes_held)


def held(config: TrainConfig, recompute: str, sequences: int) -> int:
    return fit.bytes_held(config, recompute, PRECISION, world(), sequences, 2)


def test_the_largest_microbatch_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen, eight, four = (held(CONFIG, "none", count) for count in (16, 8, 4))
    assert sixteen > eight > four
    planned: list[int] = []
    whole = fit.bytes_held
    monkeypatch.setattr(fit, "bytes_held", lambda *args: planned.append(args[4]) or whole(*args))
    for memory, count in ((sixteen, 2), (sixteen - 1, 4), (eight, 4)):
        planned.clear()
        made = fitted(monkeypatch, memory)
        assert len(planned) <= 4, "each plan takes a part of a second"
        assert (made.microbatches, made.model.recompute) == (count, "pointwise")
    # Less than ENOUGH tokens without recomputation: blocks are recomputed, and more fits.
    made = fitted(monkeypatch, eight - 1)
    assert made.model.recompute == "block"
    assert made.share(1) > 4 and held(CONFIG, "block", made.share(1)) <= eight - 1


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    alone = fit.free_memory(world())
    assert alone is not None and 0.9 * 2**30 < alone < 2**30
    assert fit.free_memory(dataclasses.replace(world(), ranks_per_gpu=4)) == alone // 4


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
    assert fit.fit(both, PRECISION, world()) == (both, None, None)


def test_a_resumed_run_sums_in_the_same_order_on_the_same_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = held(CONFIG, "none", 8)
    monkeypatch.setattr(fit, "free_memory", lambda world: memory)
    first, record, _ = fit.fit(CONFIG, PRECISION, world())
    record = json.loads(json.dumps(record))  # as a checkpoint keeps it
    monkeypatch.setattr(fit, "free_memory", lambda world: 4 * memory)  # a neighbour has ended
    again, kept, line = fit.fit(CONFIG, PRECISION, world(), record)
    assert again == first and kept == record and line is not None and "as before" in line
    assert fit.fit(CONFIG, PRECISION, world())[0] != first, "else nothing is seen here"
    other_batch = dataclasses.replace(CONFIG, batch=64)
    for config, ranks in ((CONFIG, 2), (other_batch, 1)):
        made, anew, _ = fit.fit(config, PRECISION, world(size=ranks), record)
        assert anew is not None and anew["settings"] != record["settings"]
        assert made == fit.fit(config, PRECISION, world(size=ranks))[0]
    for change in ({"name": "another card"}, {"total_memory": 1 << 35}):
        card = SimpleNamespace(**vars(CARD) | change)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        assert fit.fit(CONFIG, PRECISION, world(), record)[0] != first


def test_one_rank_of_a_gpu_keeps_the_weights_it_computes_with() -> None:
    """Under zero3 a rank that is alone would cast them anew for each use."""
    assert fit.placements_of(CONFIG, world()) == STRATEGIES["zero2"]
    assert fit.placements_of(CONFIG, world(size=2)) == STRATEGIES["zero3"]
    assert fit.placements_of(CONFIG, world("cpu")) == STRATEGIES["zero3"]


def test_a_cpu_computes_a_batch_whole() -> None:
    on_cpu, record, line = fit.fit(CONFIG, PRECISION, world("cpu"))
    assert (on_cpu.microbatches, on_cpu.model.recompute) == (1, "none")
    assert record is None and line is None


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"1 x 1024 tokens does not fit the 1\.00 MiB of a rank"):
        fitted(monkeypatch, 1 << 20)


# Ranks and GiB of each: one card of 24 GB, one H200, eight cards of 80 GB.
MACHINES = ((1, 23.5), (1, 139.0), (8, 79.0))


def problem(config: TrainConfig, ranks: int, memory: float) -> str | None:
    """The reason why a recipe does not start on such a machine, or None. The smallest microbatch
    with most recomputation decides: ``fit`` takes larger ones where they fit."""
    config = with_vocabulary(config, 8192)
    if config.microbatches != "auto":
        return f"microbatches={config.microbatches}"
    precision = named_precision(
        "bf16" if config.precision == "auto" else config.precision,
        experts=config.model.num_experts > 0,
    )
    most = "block" if config.model.recompute == "auto" else config.model.recompute
    try:
        config.share(ranks)
        found = fit.bytes_held(config, most, precision, world(size=ranks), 1, 2)
    except ValueError as error:
        return str(error)
    return None if found <= fit.HEADROOM * memory * 2**30 else f"{found / 2**30:.1f} GiB"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_starts_on_three_machines_without_a_flag(name: str) -> None:
    """A recipe that fits 24 GB fits an H200; eight ranks are a plan of their own. (The two variants
    of gpt_1b: one where there are nodes, the other where codes are most of a rank.)"""
    only = {"gpt_1b_nodes": MACHINES[2:], "gpt_1b_mxfp8": MACHINES[:1]}
    for ranks, memory in MACHINES[::2]:
        assert RECIPES[name]().share(ranks) > 0 and RECIPES[name]().mesh_shape(ranks)
        if (ranks, memory) in only.get(name, MACHINES):
            assert problem(RECIPES[name](), ranks, memory) is None, ranks


def test_a_recipe_that_does_not_start_is_seen() -> None:
    """The negative control of the test above."""
    config = RECIPES["gpt_1b"]()
    wide = dataclasses.replace(config, model=dataclasses.replace(config.model, dim=4096))
    assert "GiB" in str(problem(wide, *MACHINES[0]))
    assert problem(wide, *MACHINES[1]) is None
    assert "cannot be cut" in str(problem(dataclasses.replace(config, batch=12), *MACHINES[2]))


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
