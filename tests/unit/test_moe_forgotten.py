# SPDX-License-Identifier: Apache-2.0
"""Calls of a router that a training loop may forget: each is told once, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import notices
from shardwise.moe import forgotten
from shardwise.moe.activation import swiglu
from shardwise.moe.layer import MixtureOfExperts
from shardwise.moe.router import Router, Routing
from tests.cases import pairwise

HIDDEN = 8


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_warned", set())


def layer(**options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    options = {"num_experts": 4, "experts_per_token": 2} | options
    return MixtureOfExperts(Routing(**options), HIDDEN, 16, activation=swiglu())


def train(
    mixture: MixtureOfExperts,
    steps: int,
    *,
    add: Any = lambda loss: loss,
    update: bool = True,
    recompute: bool | None = None,
    optimizer: Any = None,
) -> None:
    """``add``: of the routes' loss to the model's; ``recompute``: a reentrant checkpoint or not."""
    optimizer = optimizer or torch.optim.SGD(mixture.parameters(), lr=0.1)
    x = torch.randn(2, 12, HIDDEN, requires_grad=True)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        out, routes = mixture(x)
        return out, routes.loss

    for _ in range(steps):
        found = forward(x) if recompute is None else checkpoint(forward, x, use_reentrant=recompute)
        loss = found[0].square().mean()
        (loss if add is None else loss + add(found[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if update:
            mixture.router.update_bias()


def test_a_router_without_losses_owes_none_where_it_has_no_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank without tokens has a loss with a graph, whatever the coefficients."""
    mixture = layer()
    optimizer = torch.optim.SGD(mixture.parameters(), lr=0.1)
    for tokens in (0, 5):
        mixture(torch.randn(tokens, HIDDEN, requires_grad=True))[0].sum().backward()
        optimizer.step()
    assert not caplog.records


LOSSES: list[dict[str, Any]] = [{"balance_loss": 0.1}, {"sequence_loss": 0.1}, {"z_loss": 0.1}]


@pytest.mark.parametrize(
    ("options", "add", "recompute"),
    pairwise(LOSSES, [None, Tensor.detach, Tensor.item], [None, False]),
)
def test_a_loss_that_no_backward_reaches_is_told_once(
    options: Any, add: Any, recompute: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train(layer(**options), 3, add=add, recompute=recompute)
    train(copy.deepcopy(layer(**options)), 1, add=add)
    [said] = [one.getMessage() for one in caplog.records]
    name = next(iter(options))
    assert f"a router of 4 experts computes a loss ({name}=0.1) that no backward" in said


@pytest.mark.parametrize("options", [*LOSSES, {}])
@pytest.mark.parametrize("recompute", [None, False, True])
def test_a_loss_that_is_used_is_not_told(
    options: Any, recompute: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train(layer(**options), 2, recompute=recompute)
    if not options:
        train(layer(), 2, add=None, recompute=recompute)
    mixture = layer(**options)
    mixture(torch.randn(5, HIDDEN))  # a forward without a backward, an evaluation
    with torch.no_grad():
        mixture(torch.randn(5, HIDDEN))
    mixture.eval()(torch.randn(5, HIDDEN))[0].sum().backward()
    train(mixture.train(), 2)
    assert not caplog.records


def test_a_loss_of_its_own_backward_is_used(caplog: pytest.LogCaptureFixture) -> None:
    mixture = layer(balance_loss=0.1)
    out, routes = mixture(torch.randn(9, HIDDEN))
    out.sum().backward(retain_graph=True)
    routes.loss.backward()
    torch.optim.SGD(mixture.parameters(), lr=0.1).step()
    assert not caplog.records and not out.isnan().any()


def test_hooks_end_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = layer(balance_loss=0.1)
    train(mixture, 1)
    monkeypatch.setattr(Tensor, "register_hook", None)
    mixture(torch.randn(9, HIDDEN))


def test_a_bias_that_is_never_updated_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mixture = layer(bias_rate=0.01)
    train(mixture, forgotten.STEPS - 1, update=False)
    assert not caplog.records
    train(mixture, forgotten.STEPS, update=False)
    [said] = [one.getMessage() for one in caplog.records]
    assert "a bias (bias_rate=0.01) that is never updated: call update_bias()" in said


def test_a_bias_that_moves_now_and_then_or_belongs_to_others_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mixture = layer(bias_rate=0.01)
    train(mixture, 1)
    train(mixture, 2 * forgotten.STEPS, update=False)
    other = layer(bias_rate=0.01)  # an optimizer of experts alone; a model that is not trained
    only = torch.optim.SGD(other.experts.parameters(), lr=0.1)
    train(other, 2 * forgotten.STEPS, update=False, optimizer=only)
    train(layer(), 2 * forgotten.STEPS, update=False)
    assert not caplog.records


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_that_are_always_one_are_told(score: Any, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"num_experts": 4, "experts_per_token": 1, "score": score}
    Router(Routing(**options, normalise=False), HIDDEN)
    Router(Routing(num_experts=1, experts_per_token=1), HIDDEN)
    assert not caplog.records
    mixture = layer(**options)
    [said] = [one.getMessage() for one in caplog.records]
    assert "gives every choice the weight 1, for any score" in said and "normalise=False" in said
    mixture(torch.randn(9, HIDDEN))[0].square().sum().backward()
    grad = mixture.router.weight.grad
    assert grad is not None and grad.abs().max() < 1e-5, "rounding alone"


def test_a_gpt_that_is_trained_by_a_loop_of_ones_own_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(layer(bias_rate=0.01, balance_loss=0.1))
    optimizer = sw.optimizer(model, matrix=sw.muon(lr=0.01), elementwise=sw.adamw())
    train(model[0], forgotten.STEPS, add=None, update=False, optimizer=optimizer)
    said = " ".join(one.getMessage() for one in caplog.records)
    assert "balance_loss=0.1" in said and "update_bias()" in said
