# SPDX-License-Identifier: Apache-2.0
"""Forgotten calls: what a training loop owes a router beside the forward, noticed in an optimizer's
step and told once.

    loss     a router with balance, sequence or z-loss returns a loss: backward came to the weights
             of the routes, and not to that loss
    bias     a router with a bias_rate counts choices: ``update_bias`` was never called in STEPS
             steps of an optimizer that trains the router

Compiled graphs have no hooks: a loss is watched in eager forwards, until it is known to be used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.notices import warn_once

logger = logging.getLogger(__name__)

STEPS = 10  # a bias may be meant to move less often than the weights


class _Seen:
    """The facts about one router."""

    def __init__(self) -> None:
        self.weights_reached = self.loss_reached = False  # by a backward
        self.loss_known = False  # whether the loss is used, or has been spoken of
        self.steps: int | None = 0  # without an update of the bias; None: there was one


_watched: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()
_hooks: list[Any] = []


def watch(router: Any) -> _Seen:
    """Look at this router in every step from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))
    return _watched.setdefault(router, _Seen())


def watch_loss(router: Any, weights: Tensor, loss: Tensor) -> None:
    """Note which of the two a backward reaches."""
    seen = watch(router)
    if seen.loss_known or not (loss.requires_grad and weights.requires_grad) or loss.is_meta:
        return
    if not _terms(router.routing):  # without tokens it has a graph all the same
        return

    def reach_weights(gradient: Tensor) -> None:
        seen.weights_reached = True

    def reach_loss(gradient: Tensor) -> None:
        seen.loss_reached = True

    weights.register_hook(reach_weights)
    loss.register_hook(reach_loss)


def bias_was_updated(router: Any) -> None:
    watch(router).steps = None


def warn_of_constant_weights(routing: Any) -> None:
    """Warn of normalised weights of one choice: they are 1 whatever the router scores."""
    if routing.experts_per_token == 1 < routing.num_experts and routing.normalise:
        warn_once(
            logger,
            "a router with experts_per_token=1 and normalised scores weighs every choice by %g, "
            "whatever it scores: the model's loss gives it no gradient but rounding, which Adam "
            "and Muon make steps of. Set normalise=False (normalise_scores=False of a GPTConfig)",
            routing.scale,
            about="constant weights",
        )


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    trained: set[int] | None = None
    for router, seen in list(_watched.items()):
        if seen.weights_reached and not seen.loss_known:
            seen.loss_known = True
            if not seen.loss_reached:
                _warn(
                    router,
                    "%s computes a loss (%s) that no backward has reached: it has no effect, and "
                    "experts may be used unevenly. Add the routes' loss to the model's, or set its "
                    "coefficients to 0",
                    _terms(router.routing),
                )
        if not router.routing.bias_rate or seen.steps is None or not router.training:
            continue
        trained = _trained(optimizer) if trained is None else trained
        if id(router.weight) in trained:
            seen.steps += 1
            if seen.steps == STEPS:
                _warn(
                    router,
                    "%s has a bias (bias_rate=%g) that is never updated: call update_bias() after "
                    "each step, or set bias_rate=0",
                    router.routing.bias_rate,
                )


def _warn(router: Any, text: str, value: Any) -> None:
    named = f"a router of {router.routing.num_experts} experts"
    mesh = getattr(router.weight, "device_mesh", None)
    warn_once(logger, text, named, value, about=text, mesh=mesh)


def _terms(routing: Any) -> str:
    names = ("balance_loss", "sequence_loss", "z_loss")
    given: Iterable[str] = (f"{n}={getattr(routing, n):g}" for n in names if getattr(routing, n))
    return ", ".join(given)


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    every = (one for group in optimizer.param_groups for one in group["params"])
    return {id(one) for one in every if one.grad is not None}
