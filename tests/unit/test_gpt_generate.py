# SPDX-License-Identifier: Apache-2.0
"""The reference model: generation, and wrapped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig, _likeliest, generate
from tests.models import mesh_of
from tests.ranks import on_ranks
from tests.unit.test_gpt import EXPERTS, SMALL, VARIANTS, make, words


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
    found = generate(model, start, 14, temperature=0.0)  # past the context: the window moves on
    assert found[0, :8].tolist() == list(range(8)) and found.shape == (1, 16)
    assert model.training
    draws = [
        generate(model, start, 10, temperature=3.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    answers = iter([False, False, True])
    assert torch.equal(
        generate(model, start, 14, temperature=0.0, until=lambda: next(answers)), found[:, :5]
    )
    with pytest.raises(ValueError, match="temperature=-1"):
        generate(model, start, 1, temperature=-1)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, start[:, :0], 1)


@pytest.mark.parametrize("name", ["dense", "tied", "shared expert, first layer dense"])
def test_kept_keys_and_values_change_no_logits(name: str) -> None:
    """Tokens one by one and several at once, with documents apart; and the same text is drawn."""
    model = make(VARIANTS[name]).eval()
    model.document_end = 5
    tokens, _ = words(model.config)
    tokens[0, 3], tokens[1, :2], tokens[2] = 5, 5, 1
    for end in (5, None):
        model.document_end = end
        held, found = model.empty_cache(), []
        for upto in (4, 5, 6, 9, 12):
            found.append(model(tokens[:, :upto], held=held))
        assert torch.allclose(torch.cat(found, 1), model(tokens), atol=1e-5)
    with pytest.raises(ValueError, match="targets with held"):
        model(tokens, tokens, held=model.empty_cache())
    drawn = generate(model, tokens[:, :3], 12, temperature=0.0)  # past the context
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    model.empty_cache = lambda: None  # type: ignore[method-assign]
    assert torch.equal(generate(model, tokens[:, :3], 12, temperature=0.0), drawn)
    assert len(calls) == 12


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
    text = generate(model, tokens[:1, :3], 6, temperature=0.0)
    assert torch.equal(text, generate(plain, tokens[:1, :3], 6, temperature=0.0))


def test_draws_come_from_the_likeliest_tokens() -> None:
    chances = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert _likeliest(chances, None, None) is chances
    assert _likeliest(chances, 2, None).tolist() == torch.tensor([[0, 0.4, 0, 0.3]]).tolist()
    assert (_likeliest(chances, None, 0.4) > 0).tolist() == [[False, True, False, False]]
    assert (_likeliest(chances, None, 0.65) > 0).tolist() == [[False, True, False, True]]
    assert (_likeliest(chances, 1, 1.0) > 0).tolist() == [[False, True, False, False]]
    model, prompt = make(SMALL), torch.tensor([[1, 2]])
    likeliest = generate(model, prompt, 5, temperature=0)
    assert torch.equal(generate(model, prompt, 5, top_k=1), likeliest)
    assert torch.equal(generate(model, prompt, 5, top_p=1e-6), likeliest)
    with pytest.raises(ValueError, match="top_k=0 must be 1 or more"):
        generate(model, prompt, 1, top_k=0)
