# SPDX-License-Identifier: Apache-2.0
"""Routing against a slow reading of its definition; balance, and a layer on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.moe import router as routers
from shardwise.moe.activation import swiglu
from shardwise.moe.layer import MixtureOfExperts
from shardwise.moe.router import Router, Routing

EXPERTS, CHOICES, HIDDEN, TOKENS = 6, 2, 10, 40


def routing(**options: Any) -> Routing:
    return Routing(num_experts=EXPERTS, experts_per_token=CHOICES, **options)


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2))


def make(**options: Any) -> Router:
    torch.manual_seed(1)
    router = Router(routing(**options), HIDDEN)
    nn.init.normal_(router.weight)
    return router


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [False, True])
def test_each_token_goes_to_its_highest_scores(score: Any, normalise: bool) -> None:
    router = make(score=score, normalise=normalise, scale=2.5)
    x = tokens()
    routes = router(x)
    logits = x @ router.weight.T
    for token in range(TOKENS):
        row = logits[token].tolist()
        if score == "softmax":
            total = sum(map(math.exp, row))
            scores = [math.exp(value) / total for value in row]
        else:
            scores = [1 / (1 + math.exp(-value)) for value in row]
        best = sorted(range(EXPERTS), key=lambda expert: -scores[expert])[:CHOICES]
        assert routes.experts[token].tolist() == best
        wanted = [scores[expert] for expert in best]
        if normalise:
            wanted = [value / sum(wanted) for value in wanted]
        expected = torch.tensor([2.5 * value for value in wanted])
        torch.testing.assert_close(routes.weights[token].detach(), expected)
    counts = torch.bincount(routes.experts.flatten(), minlength=EXPERTS)
    assert routes.counts.tolist() == counts.tolist()
    assert router(torch.zeros_like(x)).experts.tolist() == [[0, 1]] * TOKENS, "of equal ones, these"


def test_logits_are_fp32_whatever_the_tokens_are() -> None:
    router = make().bfloat16()
    routes = router(tokens().bfloat16())
    assert routes.weights.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = router(tokens().bfloat16())
    assert torch.equal(again.weights, routes.weights)


def test_the_products_of_a_gpu_are_those_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 tokens on matrix units: logits exact but for the order of sums, and gradients of the
    weight as exact before they are rounded (one 16-bit number for that of a logit is not)."""
    wide: list[Tensor] = []
    product = lambda a, b: wide.append(a.float() @ b.float()) or wide[-1]  # noqa: E731
    monkeypatch.setattr(routers, "_wide_product", product)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randn(50, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(8, 64, generator=generator).bfloat16().requires_grad_()
    change = torch.randn(50, 8, generator=generator)
    found: Tensor = routers._Logits.apply(tokens, weight)  # type: ignore[no-untyped-call]
    exact = tokens.double() @ weight.double().t()
    assert found.dtype == torch.float32 and torch.allclose(found.double(), exact, atol=1e-4)
    ours = torch.autograd.grad(found, (tokens, weight), change, retain_graph=True)
    theirs = torch.autograd.grad(exact, (tokens, weight), change.double())
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one.double(), two.double(), rtol=2**-7, atol=1e-2)
    high, low = wide[-1].chunk(2)
    exact_weight = change.double().t() @ tokens.double()
    assert torch.allclose((high + low).double(), exact_weight, atol=1e-3)
    assert not torch.allclose(high.double(), exact_weight, atol=1e-3)


def test_the_balance_loss_is_zero_when_even_and_pushes_busy_experts_down() -> None:
    router = make(balance_loss=1.0)
    nn.init.zeros_(router.weight)
    even = router(tokens()).routes()
    assert abs(even.loss.item()) < 1e-6
    router = make(balance_loss=1.0)
    router.weight.data.mul_(0.1)
    router.weight.data[0] = 0.3  # expert 0 wants whatever has a positive sum
    x = tokens().abs()
    before = router(x).routes()
    assert before.loss > 0.2 and int(before.counts[0]) == TOKENS
    before.loss.backward()
    router.weight.data -= 0.5 * router.weight.grad
    assert router(x).routes().loss < before.loss


def test_losses_add_up_and_the_z_loss_is_the_mean_square() -> None:
    router = make(z_loss=0.25)
    logits = tokens() @ router.weight.T
    expected = 0.25 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(router(tokens()).routes().loss, expected)
    both, balance = make(z_loss=0.25, balance_loss=2.0), make(balance_loss=2.0)
    torch.testing.assert_close(
        both(tokens()).routes().loss, expected + balance(tokens()).routes().loss
    )


def test_the_bias_evens_the_load_without_touching_weights() -> None:
    router = make(score="sigmoid", bias_rate=0.01)
    router.weight.data[0] += 0.6  # busy from the start
    x = tokens(400).abs()
    first = router(x)
    for _ in range(150):
        router(x)
        router.update_bias()
    last = router(x)
    assert last.counts.max() < 0.6 * first.counts.max()
    assert last.routes().loss.item() == 0
    scores = (x @ router.weight.T).sigmoid().gather(-1, last.experts)
    torch.testing.assert_close(last.weights, scores / scores.sum(-1, keepdim=True))
    assert "expert_bias" in router.state_dict() and "load" not in router.state_dict()
    before = router.load.clone()
    router.eval()
    router(x)
    assert torch.equal(router.load, before)  # evaluation does not count


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_choices_are_counted_once_whatever_is_computed_again(reentrant: bool | None) -> None:
    router = make(bias_rate=0.5)

    def forward(x: Tensor) -> Tensor:
        return router(x).weights.square().sum()

    for _ in range(2):
        with torch.no_grad():
            router.eval()(tokens())  # an evaluation counts nothing
        router.train()
        for _ in range(3):  # microbatches
            x = tokens().requires_grad_()
            if reentrant is None:
                forward(x).backward()
            else:
                checkpoint(forward, x, use_reentrant=reentrant).backward()
        counts = router.tally()
        assert counts.sum() == 3 * TOKENS * CHOICES
        before = router.expert_bias.clone()
        router.update_bias()
        assert not torch.equal(router.expert_bias, before) and not router.tally().any()


def test_no_tokens_at_all() -> None:
    router = make(balance_loss=1.0, z_loss=1.0)
    routes = router(tokens(0)).routes()
    assert routes.counts.tolist() == [0] * EXPERTS and routes.loss.item() == 0
    assert all(value.isfinite() for value in routes.statistics().values())


def test_routing_that_cannot_work_is_refused_with_every_problem() -> None:
    with pytest.raises(ValueError, match="experts_per_token=9") as caught:
        Routing(
            num_experts=4, experts_per_token=9, score="tanh", z_loss=-1,  # type: ignore[arg-type]
        )  # fmt: skip
    for part in ("'tanh'", "z_loss=-1"):
        assert part in str(caught.value)


# ------------------------------------------------------------------------------ the layer


def layer(**options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    extra = {key: options.pop(key) for key in ("shared", "delay_weight_gradient") if key in options}
    made = MixtureOfExperts(routing(**options), HIDDEN, 8, activation=swiglu(), bias=True, **extra)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def slow(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    """Token by token, choice by choice."""
    routes = moe.router(x)
    rows = []
    for token in range(len(x)):
        total = torch.zeros(HIDDEN)
        for expert, weight in zip(routes.experts[token], routes.weights[token], strict=True):
            w1, b1 = moe.experts.fc1.weight[expert], moe.experts.fc1.bias[expert]
            w2, b2 = moe.experts.fc2.weight[expert], moe.experts.fc2.bias[expert]
            gate, up = (w1 @ x[token] + b1).chunk(2)
            total = total + weight * (w2 @ (nn.functional.silu(gate) * up) + b2)
        rows.append(total)
    out = torch.stack(rows)
    return out if moe.shared is None else out + moe.shared(x)


@pytest.mark.parametrize(
    "options",
    [{}, {"shared": nn.Linear(HIDDEN, HIDDEN)}],
    ids=["plain", "shared"],
)
def test_the_layer_equals_token_by_token(options: Any) -> None:
    moe = layer(**options)
    x = tokens().requires_grad_()
    out, _ = moe(x.view(4, 10, HIDDEN))
    assert out.shape == (4, 10, HIDDEN)
    out.square().sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    got["x"] = x.grad.clone()  # type: ignore[union-attr]
    moe.zero_grad()
    x.grad = None
    expected = slow(moe, x)
    torch.testing.assert_close(out.flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()
    want = {name: parameter.grad for name, parameter in moe.named_parameters()} | {"x": x.grad}
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_training_is_the_same_with_evaluation_between() -> None:
    def train(evaluate: bool) -> list[Tensor]:
        moe = layer(bias_rate=0.01, balance_loss=0.1)
        optimizer = torch.optim.SGD(moe.parameters(), lr=0.01)
        for step in range(3):
            out, routes = moe(tokens() + step)
            ((out - 1).square().mean() + routes.loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            moe.router.update_bias()
            if evaluate:
                moe.eval()
                with torch.no_grad():
                    moe(tokens() * 3)
                moe.train()
        return [value.clone() for value in moe.state_dict().values() if isinstance(value, Tensor)]

    plain, mixed = train(False), train(True)
    assert len(plain) == 6 and all(map(torch.equal, plain, mixed))


# ------------------------------------------------------------------------------ groups, sequences


def test_a_token_stays_within_its_best_groups() -> None:
    router = make(score="sigmoid", groups=3, groups_per_token=1, bias_rate=0.1)
    router.expert_bias.copy_(torch.linspace(0.3, -0.3, EXPERTS))
    x = tokens()
    scores = (x @ router.weight.T).sigmoid() + router.expert_bias
    for token, chosen in enumerate(router(x).experts.tolist()):
        row = scores[token].tolist()
        group = max(range(3), key=lambda n: row[2 * n] + row[2 * n + 1])
        assert sorted(chosen) == [2 * group, 2 * group + 1]
    free = make(groups=3, groups_per_token=3)(x).experts
    assert torch.equal(free, make()(x).experts), "all groups are no limit"
    for options, said in (
        ({"groups": 4}, "groups=4 must divide num_experts=6"),
        ({"groups": 6}, "groups_per_token=1 of groups=6 must hold experts_per_token=2"),
    ):
        with pytest.raises(ValueError, match=said):
            routing(**options)


def test_each_sequence_is_balanced_by_itself() -> None:
    router = make(score="sigmoid", sequence_loss=0.5)
    x = tokens()
    expected = []
    for part in x.split(10):
        scores = (part @ router.weight.T).sigmoid()
        chances = (scores / scores.sum(-1, keepdim=True)).mean(0)
        chosen = scores.topk(CHOICES).indices.flatten()
        shares = torch.bincount(chosen, minlength=EXPERTS) / len(chosen)
        expected.append(EXPERTS * (shares * chances).sum() - 1)
    found = router(x).routes(10).loss
    torch.testing.assert_close(found, 0.5 * torch.stack(expected).mean())
    whole = router(x).routes().loss  # of one sequence of all tokens
    assert not torch.isclose(found, whole, rtol=1e-3)
    found.backward()
    assert router.weight.grad is not None and router.weight.grad.abs().max() > 0
