# SPDX-License-Identifier: Apache-2.0
"""Forgotten calls: an optimizer's step warns once if a training loop does not use a router fully.

    loss     a router with balance, sequence or z-loss returns a loss: backward reached the weights
             of the routes, but not this loss
    bias     a router with a bias_rate counts choices: ``update_bias`` was never called in STEPS
             steps of an optimizer that trains the router

Compiled graphs have no hooks, so losses are watched in eager forwards alone, until one is used.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.notices import warn_once

logger = logging.getLogger(__name__)

STEPS = 10  # a user may want to move the bias less often than the weights


class _Seen:
    """The facts about one router."""

    def __init__(self) -> None:
        self.weights_reached = self.loss_reached = False  # by a backward
        self.loss_known = False  # whether the loss is used, or a warning was given
        self.steps: int | None = 0  # steps without an update of the bias; None: it was updated


_watched: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()
_hooks: list[Any] = []


def watch(router: Any) -> _Seen:
    """Check this router in every step from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))
    return _watched.setdefault(router, _Seen())


def watch_loss(router: Any, weights: Tensor, loss: Tensor) -> None:
    """Record whether a backward reaches ``weights``, and whether it reaches ``loss``."""
    seen = watch(router)
    if seen.loss_known or not (loss.requires_grad and weights.requires_grad) or loss.is_meta:
        return
    if not _terms(router.routing):  # without tokens even a zero loss has a graph
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
    """Warn where each token has one expert and weights are normalised: all weights are equal."""
    if routing.experts_per_token == 1 < routing.num_experts and routing.normalise:
        warn_once(
            logger,
            "a router with experts_per_token=1 and normalised scores gives every choice the weight "
            "%g, for any score: its gradient from the model's loss is rounding noise, which Adam "
            "and Muon scale up to steps. Set normalise=False (in a GPTConfig: "
            "normalise_scores=False)",
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
                    "%s computes a loss (%s) that no backward has reached: the loss has no effect, "
                    "and experts may be used unevenly. Add the loss of the routes to the loss of "
                    "the model, or set its coefficients to 0",
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
    name = f"a router of {router.routing.num_experts} experts"
    mesh = getattr(router.weight, "device_mesh", None)
    warn_once(logger, text, name, value, about=text, mesh=mesh)


def _terms(routing: Any) -> str:
    names = ("balance_loss", "sequence_loss", "z_loss")
    return ", ".join(f"{n}={getattr(routing, n):g}" for n in names if getattr(routing, n))


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that have a gradient."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter) for parameter in parameters if parameter.grad is not None}
