# SPDX-License-Identifier: Apache-2.0
"""The reference model: shapes, what each option does, initial values, recomputation, experts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.models.gpt import GPT, IGNORED, GPTConfig, RopeScaling
from shardwise.models.layers import (
    BLOCK,
    RMSNorm,
    document_blocks,
    documents_mask,
)

SMALL = GPTConfig(vocab_size=33, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, context=12)
EXPERTS = replace(SMALL, num_experts=4, experts_per_token=2, expert_hidden_dim=16)
VARIANTS = {
    "dense": SMALL,
    "tied": replace(SMALL, tied=True),
    "no qk norm": replace(SMALL, qk_norm=False),
    "one head each": replace(SMALL, num_kv_heads=None),
    "wide heads": replace(SMALL, head_dim=20, hidden_dim=24),
    "experts": EXPERTS,
    "shared expert, first layer dense": replace(
        EXPERTS, shared_hidden_dim=24, num_dense_layers=1, bias_rate=0.01, z_coefficient=0.01
    ),
}


def make(config: GPTConfig, seed: int = 0) -> GPT:
    model = GPT(config)
    model.init_weights(seed)
    return model


def words(config: GPTConfig, count: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, config.vocab_size, (count, config.context + 1), generator=generator)
    return both[:, :-1], both[:, 1:]


# ----------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_documents_packed_in_one_window_are_computed_as_if_alone(recompute: str) -> None:
    model = make(replace(SMALL, recompute=recompute))
    end = model.document_end = 32
    generator = torch.Generator().manual_seed(1)
    lengths = (4, 1, 7)
    texts = [torch.randint(0, end, (length,), generator=generator) for length in lengths]
    begun = [torch.cat((torch.tensor([end]), text))[:-1] for text in texts]  # what is read
    packed = torch.cat(begun)[None]  # [1, 12]
    targets = torch.cat(texts)[None]
    model(packed, targets).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    loss = torch.zeros(())
    for own, text in zip(begun, texts, strict=True):
        loss = loss + model(own[None], text[None]) * len(text) / sum(lengths)
    loss.backward()
    assert torch.allclose(model(packed, targets), loss, atol=1e-6)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5)  # type: ignore[arg-type]
    model.document_end = None
    assert not torch.allclose(model(packed, targets), loss, atol=1e-3), "they see each other"


def test_blocks_of_documents_are_the_dense_mask() -> None:
    """For FlexAttention: a block is listed where a query sees a key, as a whole one where every
    query sees every key, and inside of the others the function decides as the dense mask does."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 9, (3, 3 * BLOCK), generator=generator)
    tokens[0, 1:] = 1  # one document
    tokens[1, ::BLOCK] = 0  # documents that end with blocks
    tokens[1, 1:BLOCK] = tokens[1, 2 * BLOCK + 1 :] = 1
    dense = documents_mask(tokens, 0)
    blocks = document_blocks((tokens == 0).cumsum(1, dtype=torch.int32))
    assert isinstance(dense, Tensor)
    at = torch.arange(3 * BLOCK)
    mask = blocks.mask_mod(torch.arange(3)[:, None, None], at[:1], at[:, None], at[None, :])
    assert torch.equal(mask, dense[:, 0])
    tiles = mask.unflatten(2, (3, BLOCK)).unflatten(1, (3, BLOCK)).transpose(2, 3)
    assert torch.equal(blocks.to_dense()[:, 0].bool(), tiles.any(-1).any(-1))
    assert blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None
    for batch, query in itertools.product(range(3), range(3)):
        count = blocks.full_kv_num_blocks[batch, 0, query]
        listed = sorted(blocks.full_kv_indices[batch, 0, query, :count].tolist())
        whole = tiles[batch, query].all(-1).all(-1).nonzero().flatten().tolist()
        assert listed == [key for key in whole if key < query]
    assert blocks.full_kv_num_blocks.sum() == 3, "of one document; the others end with blocks"


def test_text_without_an_end_takes_no_mask() -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert documents_mask(tokens, None) is None and documents_mask(tokens, 9) is None
    mask = documents_mask(torch.tensor([[1, 9, 3, 9]]), 9)
    assert mask is not None and mask[0, 0].int().tolist() == [
        [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]
    ]  # fmt: skip


# ----------------------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_parameters_are_what_the_config_says(config: GPTConfig) -> None:
    model = GPT(config)
    assert sum(one.numel() for one in model.parameters()) == config.num_parameters > 10_000
    assert model.num_parameters == config.num_parameters
    assert ("head.weight" in model.state_dict()) == (not config.tied)
    if config.num_experts:
        layers = config.num_layers - config.num_dense_layers
        unused = layers * 2 * 3 * config.dim * config.expert_width
        assert config.num_active_parameters == config.num_parameters - unused
    else:
        assert config.num_active_parameters == config.num_parameters


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_flops_are_those_that_torch_counts(config: GPTConfig) -> None:
    """torch counts products as they are called; attention on a CPU it sees as causal or not."""
    tokens, targets = words(config)
    model = make(config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets).backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if "attention" not in str(op))
    heads = config.num_layers * config.num_heads * config.head_width
    attention = 3 * 2 * heads * (config.context + 1)
    # The gradient of tokens, which nobody asks for, is not computed; everything else is.
    if not config.num_experts:  # torch does not count grouped products
        assert products == tokens.numel() * (config.flops_per_token() - attention)
    assert config.flops_per_token(1) == config.flops_per_token() - 3 * 2 * heads * (
        config.context - 1
    )


def test_all_problems_of_a_config_come_at_once() -> None:
    with pytest.raises(ValueError, match="vocab_size=0") as caught:
        GPTConfig(vocab_size=0, norm_eps=0.0, recompute="some", num_experts=-1)  # type: ignore[arg-type]
    choices = "recompute='some': one of auto, none, pointwise, block"
    for part in ("norm_eps=0.0", choices, "num_experts=-1"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="no multiple of num_heads=3") as caught:
        GPTConfig(dim=128, num_heads=3, num_kv_heads=2, num_experts=2, experts_per_token=4)
    for part in ("num_kv_heads=2", "experts_per_token=4", "head_dim"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="width 3 cannot be rotated"):
        GPTConfig(dim=12, num_heads=4)
    with pytest.raises(ValueError, match="below high_frequency_factor"):
        RopeScaling(low_frequency_factor=4.0, high_frequency_factor=4.0)


# ------------------------------------------------------------------------------------ what it does


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_no_token_sees_a_later_one(config: GPTConfig) -> None:
    model = make(config)
    tokens, _ = words(config)
    before = model(tokens)
    assert before.shape == (3, config.context, config.vocab_size)
    tokens = tokens.clone()
    tokens[:, 7] = (tokens[:, 7] + 1) % config.vocab_size
    after = model(tokens)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-6)
    assert (after[:, 7:] - before[:, 7:]).abs().amax((0, 2)).min() > 1e-4


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_loss_is_the_mean_over_scored_targets(config: GPTConfig) -> None:
    model = make(config).eval()
    tokens, targets = words(config)
    targets = targets.clone()
    targets[0, :5] = IGNORED
    targets[2] = IGNORED
    scored = targets != IGNORED
    expected = F.cross_entropy(model(tokens)[scored], targets[scored])
    torch.testing.assert_close(model(tokens, targets), expected)
    nothing = model(tokens, torch.full_like(targets, IGNORED))
    assert nothing.item() == 0.0
    nothing.backward()
    assert all(one.grad is not None and one.grad.abs().max() == 0 for one in model.parameters())


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 3, 4, 8)])
def test_norm_is_torchs_with_its_gradients(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(shape[-1], eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    inputs = (x, norm.weight)
    expected = F.rms_norm(x, (shape[-1],), norm.weight, 1e-3)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad(norm(x), inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_recomputation_changes_no_bit_and_keeps_less(config: GPTConfig) -> None:
    tokens, targets = words(config)
    grads, kept = [], []
    for recompute in ("none", "block"):
        model = make(replace(config, recompute=recompute))  # type: ignore[arg-type]
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens, targets)
        kept.append(sum(saved))
        loss.backward()
        grads.append([loss.detach(), *(one.grad for one in model.parameters())])
    assert kept[1] < 0.5 * kept[0]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_compiled_blocks_compute_norms_and_gated_products_again() -> None:
    """By torch's own division of a graph into forward and backward: of every block two norms and a
    gated product are not kept; the loss and gradients are the same to rounding (those of norms are
    summed in another order), and evaluation runs too. In fp64: the norm of fp32 on a CPU is a
    function of its own, whose results torch 2.11 keeps."""
    config = replace(SMALL, hidden_dim=48)
    tokens, targets = words(config)
    grads, kept = [], []
    for recompute in ("none", "pointwise"):
        model = make(replace(config, recompute=recompute)).double()  # type: ignore[arg-type]
        model.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens, targets)
        kept.append(sum(saved.values()))
        loss.backward()
        grads.append([loss.detach(), *(one.grad for one in model.parameters())])
    with torch.no_grad():  # of the one that computes again: to trace it takes as long as to train
        assert torch.allclose(model(tokens, targets), loss, atol=1e-6)
    row = tokens.numel() * 8  # bytes of a channel
    assert kept[0] - kept[1] >= config.num_layers * row * (2 * config.dim + 48) * 0.99, kept
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------- initial values


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_values_are_the_same_by_way_of_the_meta_device(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert all(one.is_meta for one in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # nothing may be left as it was
    model.init_weights(7)
    expected = make(config, seed=7)
    found = dict(model.named_parameters())
    assert len(found) > 10 and found.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name], parameter), name
    tokens, targets = words(config)
    assert torch.equal(model(tokens, targets), expected(tokens, targets))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_step_without_values_has_the_right_shapes(config: GPTConfig) -> None:
    """A dry run takes such steps."""
    with torch.device("meta"):
        model = GPT(replace(config, recompute="block"))
        tokens = torch.zeros(2, config.context, dtype=torch.int64)
        loss = model(tokens, tokens)
        loss.backward()
        assert model(tokens).shape == (2, config.context, config.vocab_size)
    assert loss.shape == () and loss.is_meta
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name


# ----------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("name", ["balance_coefficient", "z_coefficient"])
def test_the_terms_of_experts_belong_to_training_alone(name: str) -> None:
    tokens, targets = words(EXPERTS)
    quiet = replace(EXPERTS, balance_coefficient=0.0)
    plain, pushed = (make(replace(quiet, **{name: c})) for c in (0.0, 10.0))  # type: ignore[arg-type]
    assert pushed(tokens, targets) > plain(tokens, targets) + 1e-3
    assert pushed.eval()(tokens, targets) == plain.eval()(tokens, targets)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_choices_are_counted_once_a_forward(recompute: str) -> None:
    """Recomputation sees the same tokens again, evaluation sees others: neither counts."""
    model = make(replace(EXPERTS, recompute=recompute, bias_rate=0.01))  # type: ignore[arg-type]
    tokens, targets = words(EXPERTS)
    model(tokens, targets).backward()
    model.eval()(tokens)
    for block in model.train().blocks:
        router = block.feed_forward.router  # type: ignore[union-attr]
        assert router.tally().sum() == 2 * tokens.numel()
        router.update_bias()
        assert router.expert_bias.abs().max() > 0 and router.tally().sum() == 0
