# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/experts.md do what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.shard.wrap import wrap_units
from tests.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "experts.md"
CONFIG = GPTConfig(
    vocab_size=64, dim=32, num_layers=2, num_heads=2, context=8, num_experts=4,
    expert_hidden_dim=32, balance_coefficient=0.0,
)  # fmt: skip


def snippet() -> str:
    """For 8 GPUs there, for 4 CPU ranks here."""
    block = next(b for b in PAGE.read_text().split("```") if b.startswith("python\n"))
    code = block.removeprefix("python\n")
    for old, new in (("dp=8", "dp=4"), ("(4, 2)", "(2, 2)"), ('"cuda"', '"cpu"')):
        assert old in code
        code = code.replace(old, new)
    return code


def train(model: GPT, optimizer: Any, rank: int) -> list[float]:
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(64, (2, 8), generator=generator)
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bucketed", [False, True])
@on_ranks(4)
def test_spread_experts_train_as_if_they_were_not(
    rank: int, world_size: int, bucketed: bool
) -> None:
    found = []
    for spread in (False, True):
        model = GPT(CONFIG)
        model.init_weights(0)
        names: dict[str, Any] = {"sw": sw, "model": model, "mesh": sw.init_mesh(dp=world_size)}
        code = snippet()
        if bucketed:  # this line is then not needed
            code = code.replace("    sw.fully_shard(", "    ()  # ")
        if spread:
            exec(code, names)
        if bucketed:
            meshes = {"*.experts": names["grid"]["dp"]} if spread else None
            sw.data_parallel(model, mesh=names["mesh"], meshes=meshes)
        else:
            for module in [model] if spread else wrap_units(model):  # the snippet wraps blocks
                sw.fully_shard(module, mesh=names["mesh"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # knows a gradient's size
        found.append(train(model, optimizer, rank))
    together, apart = found[0], found[1]
    assert apart == pytest.approx(together, rel=1e-5) and together[2] != together[0]
