# SPDX-License-Identifier: Apache-2.0
"""The reference model: generation, and wrapped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig, generate
from tests.models import mesh_of
from tests.ranks import on_ranks
from tests.unit.test_gpt import EXPERTS, SMALL, make, words


def test_generate_repeats_what_was_learned_and_itself() -> None:
    config = replace(SMALL, vocab_size=8, context=8)
    model = make(config)
    pattern = torch.arange(8).repeat(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(pattern[None, :8], pattern[None, 1:9]) + model(
            pattern[None, 3:11], pattern[None, 4:12]
        )
        loss.backward()
        optimizer.step()
    start = pattern[None, :2]
    found = generate(
        model, start, 14, context=8, temperature=0.0
    )  # past the context: the window moves on
    assert found[0, :8].tolist() == list(range(8)) and found.shape == (1, 16)
    assert model.training
    draws = [
        generate(
            model,
            start,
            10,
            context=8,
            temperature=3.0,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


# ---------------------------------------------------------------------------------------- wrapped


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, tied=True, recompute="block"),
        replace(EXPERTS, recompute="block"),
        EXPERTS,
    ],
    ids=["tied, recomputed", "experts, recomputed", "experts"],
)
@on_ranks(2)
def test_wrapped_model_computes_the_same(rank: int, world_size: int, config: GPTConfig) -> None:
    """Sharded or not: the same loss, gradients, initial values and text."""
    plain = make(config, seed=3)
    with torch.device("meta"):
        model = GPT(config)
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh_of(world_size), placements=sw.zero(3))
    sw.fully_shard(model, mesh=mesh_of(world_size), placements=sw.zero(3))
    model.to_empty(device="cpu")
    model.init_weights(3)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name  # type: ignore[attr-defined]
    tokens, targets = words(config, count=4)
    for step in range(2):
        loss, reference = model(tokens, targets), plain(tokens, targets)
        torch.testing.assert_close(loss, reference)
        loss.backward()
        reference.backward()
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(grad, expected[name].grad, rtol=1e-4, atol=1e-6)
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
        assert step or reference > 0
    drawn = [
        generate(one, tokens[:1, :3], 6, context=config.context, temperature=0.0)
        for one in (model, plain)
    ]
    assert torch.equal(*drawn)
