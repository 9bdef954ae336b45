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

from shardwise import cli
from shardwise.core.placements import STRATEGIES
from shardwise.models.gpt_config import GPTConfig
from shardwise.train import fit
from shardwise.train.config import TrainConfig
from shardwise.train.launch import World
from shardwise.train.recipes import RECIPES

MODEL = GPTConfig(
    dim=256, num_layers=2, num_heads=4, context=1024, vocab_size=1024, recompute="auto"
)
CONFIG = TrainConfig(model=MODEL, batch=32)
CARD = SimpleNamespace(name="a card", total_memory=1 << 34)
bytes_held = functools.cache(fit.bytes_held)


def world(device: str = "cuda", size: int = 1) -> World:
    return World(rank=0, size=size, local_rank=0, num_nodes=1, device=torch.device(device))


@pytest.fixture(autouse=True)
def the_same_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "bytes_held", bytes_held)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: CARD)


def fitted(
    monkeypatch: pytest.MonkeyPatch, memory: float, config: TrainConfig = CONFIG
) -> TrainConfig:
    monkeypatch.setattr(fit, "free_memory", lambda world: math.floor(memory))
    made, record, line = fit.fit(config, world())
    assert line is not None and record is not None
    decision = (made.microbatches, made.model.recompute)
    assert (record["microbatches"], record["recompute"]) == decision and "auto" not in decision
    assert f"{made.microbatches} microbatches of {made.share(1)} x 1024" in line
    return made


def held(recompute: str, sequences: int) -> int:
    return fit.bytes_held(fit.decided(CONFIG, 32 // sequences, recompute), world())


def test_the_largest_microbatch_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen, eight, four = (held("pointwise", count) for count in (16, 8, 4))
    assert sixteen > eight > four
    for memory, count in ((sixteen, 2), (sixteen - 1, 4), (eight, 4)):
        made = fitted(monkeypatch, memory)
        assert (made.microbatches, made.model.recompute) == (count, "pointwise")
    # Less than ENOUGH tokens without recomputation: blocks are recomputed, and more fits.
    made = fitted(monkeypatch, eight - 1)
    assert made.model.recompute == "block"
    assert made.share(1) > 4 and held("block", made.share(1)) <= eight - 1
    with pytest.raises(ValueError, match=r"1 x 1024 tokens does not fit the 1\.00 MiB of a rank"):
        fitted(monkeypatch, 1 << 20)


def test_a_cpu_computes_a_batch_whole() -> None:
    on_cpu, record, line = fit.fit(CONFIG, world("cpu"))
    assert (on_cpu.microbatches, on_cpu.model.recompute) == (1, "none")
    assert record is None and line is None


def test_what_is_given_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dataclasses.replace(CONFIG, microbatches=8)
    made = fitted(monkeypatch, held("pointwise", 4), given)
    assert (made.microbatches, made.model.recompute) == (8, "pointwise")
    eager = dataclasses.replace(given, compile="off")
    assert fitted(monkeypatch, held("none", 4), eager).model.recompute == "none"
    keep = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, recompute="none"))
    assert fitted(monkeypatch, held("none", 4), keep).model.recompute == "none"
    both = dataclasses.replace(keep, microbatches=8)
    assert fit.fit(both, world()) == (both, None, None)


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    alone = fit.free_memory(world())
    assert alone is not None and 0.9 * 2**30 < alone < 2**30
    assert fit.free_memory(dataclasses.replace(world(), ranks_per_gpu=4)) == alone // 4


def test_a_resumed_run_sums_in_the_same_order_on_the_same_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = held("none", 8)
    monkeypatch.setattr(fit, "free_memory", lambda world: memory)
    first, record, _ = fit.fit(CONFIG, world())
    record = json.loads(json.dumps(record))  # as a checkpoint keeps it
    monkeypatch.setattr(fit, "free_memory", lambda world: 4 * memory)  # a neighbour has ended
    again, kept, line = fit.fit(CONFIG, world(), record)
    assert again == first and kept == record and line is not None and "as before" in line
    assert fit.fit(CONFIG, world())[0] != first, "else nothing is seen here"
    other_batch = dataclasses.replace(CONFIG, batch=64)
    for config, ranks in ((CONFIG, 2), (other_batch, 1)):
        made, anew, _ = fit.fit(config, world(size=ranks), record)
        assert anew is not None and anew["settings"] != record["settings"]
        assert made == fit.fit(config, world(size=ranks))[0]
    for change in ({"name": "another card"}, {"total_memory": 1 << 35}):
        card = SimpleNamespace(**vars(CARD) | change)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        assert fit.fit(CONFIG, world(), record)[0] != first


def test_one_rank_of_a_gpu_keeps_the_weights_it_computes_with() -> None:
    """Under zero3 a rank that is alone would cast them anew for each use."""
    assert fit.placements_of(CONFIG, world()) == STRATEGIES["zero2"]
    assert fit.placements_of(CONFIG, world(size=2)) == STRATEGIES["zero3"]
    assert fit.placements_of(CONFIG, world("cpu")) == STRATEGIES["zero3"]


def test_the_command_plans_what_train_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--memory``: the verdict first, and the plan of those microbatches."""
    assert cli.run(["plan", "gpt_124m", "--ranks", "1", "--memory", "24GB"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert "train would take" in first and "512" not in first and "fits 22.4 GiB" in rest
    assert cli.run(["plan", "gpt_1b", "--ranks", "1", "--memory", "8GiB"]) == 3
    said = capsys.readouterr().out
    assert said.startswith("a microbatch of 1 x 2048 tokens does not fit the 7.44 GiB")


# Ranks and GiB of each: one card of 24 GB, one H200, eight cards of 80 GB.
MACHINES = ((1, 23.5), (1, 139.0), (8, 79.0))


def problem(config: TrainConfig, ranks: int, memory: float) -> str | None:
    """The reason why a recipe does not start on such a machine, or None. The smallest microbatch
    with most recomputation decides: ``fit`` takes larger ones where they fit."""
    config = fit.with_vocabulary(config, 8192)
    try:
        smallest = fit.decided(config, config.share(ranks), "block")
        found = fit.bytes_held(smallest, world(size=ranks))
    except ValueError as error:
        return str(error)
    return None if found <= fit.HEADROOM * memory * 2**30 else f"{found / 2**30:.1f} GiB"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_starts_on_three_machines_without_a_flag(name: str) -> None:
    """A recipe that fits 24 GB fits an H200; eight ranks are a plan of their own."""
    for ranks, memory in MACHINES[::2]:
        assert RECIPES[name]().share(ranks) > 0 and RECIPES[name]().mesh_shape(ranks)
        assert problem(RECIPES[name](), ranks, memory) is None, ranks


def test_a_recipe_that_does_not_start_is_seen() -> None:
    """The negative control of the test above."""
    config = RECIPES["gpt_1b"]()
    wide = dataclasses.replace(config, model=dataclasses.replace(config.model, dim=4096))
    assert "GiB" in str(problem(wide, *MACHINES[0]))
    assert problem(wide, *MACHINES[1]) is None
    assert "cannot be cut" in str(problem(dataclasses.replace(config, batch=12), *MACHINES[2]))
