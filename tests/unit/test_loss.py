# SPDX-License-Identifier: Apache-2.0
"""The loss in chunks: the plain loss to rounding, and never all logits at a time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.loss import IGNORED, linear_cross_entropy, softmax_and_gradient
from tests.ranks import on_ranks

ROWS, WIDTH, WORDS = 37, 16, 53
EPS = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-2}


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor):
                self.found = max(self.found, one.numel())
        return made


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(WORDS, WIDTH, generator=generator) / 4).to(dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (3, ROWS), generator=generator)
    targets[0, :5] = IGNORED
    return hidden, head, targets


@pytest.mark.parametrize("z_coefficient", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_chunks_give_the_plain_loss_and_its_gradients(
    dtype: torch.dtype, z_coefficient: float
) -> None:
    hidden, head, targets = inputs(dtype)
    logits = (hidden @ head.t()).float().flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    scored = targets.flatten() != IGNORED
    expected = expected + z_coefficient * logits[scored].logsumexp(-1).square().mean()
    theirs = torch.autograd.grad(expected / 4, (hidden, head))
    for chunk in (1 << 20, 10 * WORDS, WORDS):
        loss = linear_cross_entropy(hidden, head, targets, z_coefficient=z_coefficient, chunk=chunk)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for _ in range(2):  # a graph that is kept gives the same again
            ours = torch.autograd.grad(loss / 4, (hidden, head), retain_graph=True)
            for one, other in zip(ours, theirs, strict=True):
                assert one.dtype == dtype
                error = (one - other).abs().max() / other.abs().max()
                assert error <= EPS[dtype], (chunk, error)


def test_no_more_logits_than_a_chunk_exist() -> None:
    hidden, head, targets = inputs(torch.float32)
    largest = {}
    for chunk in (1 << 20, 10 * WORDS):
        with Largest() as mode:
            linear_cross_entropy(hidden, head, targets, chunk=chunk).backward()
        largest[chunk] = mode.found
    assert largest[1 << 20] >= 3 * ROWS * WORDS, "the plain loss makes them all"
    assert largest[10 * WORDS] <= max(10 * WORDS, head.numel(), hidden.numel())


def test_without_a_scored_target_the_loss_is_zero() -> None:
    hidden, head, targets = inputs(torch.float32)
    for chunk in (1 << 20, WORDS):
        loss = linear_cross_entropy(hidden, head, targets.fill_(IGNORED), chunk=chunk)
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, head)[0].any()


def test_equal_blocks_compile_into_one_graph() -> None:
    """And evaluation into one more; what they compute stays the same."""
    config = GPTConfig(dim=16, num_layers=3, num_heads=2, context=8)
    torch.manual_seed(0)
    plain, compiled = GPT(config), GPT(config)
    compiled.load_state_dict(plain.state_dict())
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled.compile(backend=count, fullgraph=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    for _ in range(2):
        losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, compiled)]
        torch.testing.assert_close(*losses)  # one of them in chunks
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            assert torch.equal(*(model(tokens[:, :-1]) for model in (plain, compiled)))
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert len(graphs) == 3, "a block, the same without gradients, the softmax of the loss"


@on_ranks(1)
def test_a_wrapped_model_takes_the_loss_in_chunks(rank: int, world_size: int) -> None:
    """Its head is no plain parameter then; a compiled softmax is used however few logits."""
    sizes: list[int] = []

    def softmax(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        sizes.append(len(logits))
        return softmax_and_gradient(logits, *rest)

    config = GPTConfig(dim=16, num_layers=1, num_heads=2, context=16, vocab_size=97)
    tokens = torch.arange(64).view(4, 16)
    for chunk, given, expected in ((16 * 97, None, [16] * 4), (1 << 20, softmax, [64])):
        model = GPT(config)
        sw.fully_shard(model, mesh=sw.init_mesh())
        model.softmax = given
        sizes.clear()
        with (
            mock.patch.dict(linear_cross_entropy.__kwdefaults__, {"chunk": chunk}),
            mock.patch("shardwise.models.loss.softmax_and_gradient", softmax),
        ):
            model(tokens, tokens).backward()
        assert sizes == expected
        assert model.head is not None and model.head.weight.grad is not None


@pytest.mark.parametrize("softmax", [None, softmax_and_gradient])
def test_an_evaluation_computes_no_gradient(softmax: Any) -> None:
    """Its only product is that of the logits; and the loss is the same."""
    hidden = torch.randn(6, 8, requires_grad=True)
    head, targets = torch.randn(10, 8, requires_grad=True), torch.randint(0, 10, (6,))
    product, losses, counts = 2 * 6 * 8 * 10, [], []
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, FlopCounterMode(display=False) as counter:
            loss = linear_cross_entropy(hidden, head, targets, chunk=20, softmax=softmax)
        losses.append(loss.item())
        counts.append(counter.get_total_flops())
    assert losses[0] == losses[1] and counts[1] == product < counts[0]
