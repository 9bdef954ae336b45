# SPDX-License-Identifier: Apache-2.0
"""Activations in a plan: against figures of an H200, by hand, and for people."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks import models as bench
from benchmarks.report import RESULTS
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.planning.activations import Follower
from shardwise.planning.figures import Plan
from shardwise.planning.plan import plan

BF16 = sw.Precision(weights="bf16", reduce="fp32")
SMALL = GPTConfig(dim=64, num_layers=3, num_heads=2, hidden_dim=128, vocab_size=512, context=64)


def gpt(**changes: Any) -> GPT:
    with torch.device("meta"):
        return GPT(dataclasses.replace(SMALL, **changes))


# ------------------------------------------------------------------------------ a real GPU


class Scored(bench.GPT):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return bench.token_loss(super().forward(tokens), targets)


def recorded(title: str) -> float:
    """GiB at the peak of shardwise's zero(3) in the table of that title."""
    tables = json.loads((RESULTS / "fsdp-gpu-fake-nvidia-h200.json").read_text())["tables"]
    (table,) = [table for table in tables if table["title"] == title]
    (row,) = [row for row in table["rows"] if row["system"] == "zero3"]
    return float(row["peak"])


@pytest.mark.parametrize(
    ("ranks", "title"), [(1, "GPT step, 1 nccl rank"), (8, "GPT step, rank 0 of 8 (`fake`)")]
)
def test_the_peak_is_what_an_h200_measured(ranks: int, title: str) -> None:
    """The 0.96B GPT of ``benchmarks.fsdp``: 8 x 2048 tokens, vocabulary 32768, fused AdamW."""
    config = bench.GPTConfig()
    with torch.device("meta"):
        model = Scored(config)
    made = plan(model, {"dp": ranks}, precision=BF16, batch=(config.batch, config.length))
    assert made.total / 2**30 == pytest.approx(recorded(title), rel=0.005)


# ------------------------------------------------------------------------------ by hand


class Squares(nn.Module):
    """Everything that is held can be counted: an embedding, a product, a square, a sum."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens)).square().sum()


def test_what_one_can_count() -> None:
    with torch.device("meta"):
        model = Squares()
    rows, width = 8 * 128, 256
    made = plan(model, {"dp": 1}, "zero0", batch=(8, 128), device="cpu", optimizer="none")
    hidden, ids = 4 * rows * width, 2 * 8 * rows  # fp32; tokens and targets
    # Backward of the square: rows in, products, their gradient, and twice what it is made of
    # (2 x, and that times the gradient); the sum's own gradient is a scalar, expanded.
    assert made.activations in range(4 * hidden + ids, 5 * hidden + ids + 4096)
    assert made.followed is not None and made.followed >= made.peak_total
    assert made.total == made.followed, "no workspaces on a CPU"
    twice = plan(model, {"dp": 1}, "zero0", batch=(16, 128), device="cpu", optimizer="none")
    assert twice.activations - made.activations == pytest.approx(made.activations, rel=0.01)


def test_attention_saves_no_matrix_of_all_pairs() -> None:
    """Twice the context, half the sequences: as many bytes, but for tables of positions."""
    wide = gpt(context=1024)
    short, long = (
        plan(wide, {"dp": 1}, batch=batch, precision=BF16) for batch in ((8, 512), (4, 1024))
    )
    assert long.activations == pytest.approx(short.activations, rel=0.02)


@pytest.mark.parametrize("experts", [0, 4])
def test_recomputed_blocks_hold_less(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"precision": BF16, "optimizer": "muon", "microbatches": 2}

    def planned(recompute: str) -> Plan:
        model = gpt(num_experts=experts, num_layers=3, vocab_size=64, recompute=recompute)
        return plan(model, {"dp": 4}, batch=(16, 64), **options)

    asked: list[Any] = []  # the calls whose results torch was asked for, of those that may be known
    remember = Follower._remember

    def note(self: Follower, call: Any, result: Any) -> None:
        asked.append(call)
        remember(self, call, result)

    monkeypatch.setattr(Follower, "_remember", note)
    held = {recompute: planned(recompute) for recompute in ("none", "block")}
    once = len(asked)
    monkeypatch.setattr(Follower, "_remember", lambda self, call, made: asked.append(call))
    assert all(planned(recompute).as_dict() == one.as_dict() for recompute, one in held.items())
    assert 0 < 2 * once < len(asked)
    assert held["block"].activations < 0.6 * held["none"].activations
    few, many = held["block"].peak, held["none"].peak  # the library's own bytes
    # Before torch 2.13 a recomputed block with experts ends before the next one is gathered.
    assert few.keys() == many.keys() and all(few[kind] <= many[kind] for kind in few)


def test_the_optimizers_step_may_be_the_highest_moment() -> None:
    few = plan(gpt(), {"dp": 1}, optimizer="muon", batch=(1, 8), precision=BF16)
    without = plan(gpt(), {"dp": 1}, optimizer="adamw", batch=(1, 8), precision=BF16)
    assert few.followed is not None and without.followed is not None
    assert few.followed > without.followed
