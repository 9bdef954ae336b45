# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are computed later than the gradients of the inputs.

    backward       dx2  dx1  ......................  earlier layers wait for these gradients alone
    backward_dw                dW2  dW1  complete    during an exchange or another pipeline stage

Delayed parameters are not inputs of the autograd node, because autograd would call their hooks
before their gradients exist. This file calls the hooks instead, once, after the last gradient. One
leaf, the anchor, is among the inputs of every use of the module: its hook runs after the last use
in a backward.

Two mistakes raise an error: an optimizer step before ``backward_dw``, and parameters that were
swapped after the forward by a wrapper that has already reduced the gradients. ``zero_grad`` drops
no pending gradients: call ``backward_dw`` first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.core.hooks import on_use
from shardwise.moe.weights import Pending, is_wanted, parameters_of
from shardwise.words import quoted


class DelayedGradients:
    """The weight gradients that one module has not computed yet. The second linear comes first,
    then the first linear, then the completion of each parameter."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []  # an entry for each backward
        self._anchor: Tensor | None = None
        self._module: weakref.ref[nn.Module] | None = None  # the module of the gradients
        self._done = True  # whether this backward has passed all uses of the module
        # The parameters that were written since the last completion, and their completions.
        self._seen: set[int] = set()
        self._completions: dict[tuple[int, ...], Callable[[], None]] = {}

    def __reduce__(self) -> tuple[type[DelayedGradients], tuple[()]]:
        return DelayedGradients, ()  # a copy of a module has no gradients to compute

    def anchor(self, x: Tensor, module: nn.Module) -> Tensor:
        """A leaf that leads backward to a node which has no parameters among its inputs. Also marks
        the parameters as delayed."""
        self._module = weakref.ref(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trained:
            return torch.empty(0, device=x.device)
        for parameter in trained:
            if torch.is_grad_enabled() and hasattr(type(parameter), "delayed"):
                parameter.delayed = True  # type: ignore[attr-defined]
        if self._anchor is None or self._anchor.device != x.device:
            with torch.inference_mode(False):  # training may use the anchor of an evaluation
                self._anchor = torch.empty(0, device=x.device, requires_grad=True)
            reference = weakref.ref(self)
            self._anchor.register_post_accumulate_grad_hook(lambda _: _mark_done(reference))
        return self._anchor

    def __len__(self) -> int:
        """The number of backwards whose weight gradients are pending."""
        return len(self._pending)

    def delay(self, gradients: Pending) -> None:
        """Keep gradients for later, unless this backward computes gradients of inputs alone."""
        if self._anchor is not None and not is_wanted(self._anchor):
            return
        self._pending.append(gradients)
        self._done = False
        if not _waiting:
            _watch_steps()
        _waiting.add(self)
        for experts, _ in gradients:
            experts.delay()

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the pending gradients; after the last use of the module in a backward, complete
        each parameter once."""
        pending, self._pending = self._pending, []
        self._refuse_swapped(pending)
        for position in range(max(map(len, pending), default=0)):
            for gradients in pending:
                experts, write = gradients[position]
                experts.accumulate(write, self._seen)
                self._completions[tuple(map(id, experts.parameters))] = experts.complete
        if self._done:
            completions = list(self._completions.values())
            self._reset()
            for complete in completions:
                complete()

    def forget(self) -> None:
        """Drop the pending gradients: the user dropped gradients, or backward raised an error."""
        self._pending = []
        self._done = True
        self._reset()

    def _reset(self) -> None:
        self._seen, self._completions = set(), {}
        _waiting.discard(self)

    def _refuse_swapped(self, pending: list[Pending]) -> None:
        """Raise for parameters that left the module and whose unit expects no delayed gradient."""
        held = set(map(id, self._parameters))
        for parameter in parameters_of([experts for entry in pending for experts, _ in entry]):
            if id(parameter) not in held and not hasattr(type(parameter), "delay"):
                self.forget()
                raise RuntimeError(
                    f"{self} has other parameters than in forward: they were swapped, as torch's "
                    f"fully_shard does, and their gradients were reduced before the delayed "
                    f"gradients were computed. Wrap the module with shardwise.fully_shard, or "
                    f"build it with delay_weight_gradient=False"
                )

    @property
    def _parameters(self) -> list[Tensor]:
        """The parameters that the module has now."""
        module = self._module() if self._module is not None else None
        return [] if module is None else list(module.parameters())

    def __str__(self) -> str:
        module = self._module() if self._module is not None else None
        if module is None:
            return "a module that was deleted"
        names = quoted([name for name, _ in module.named_parameters()])
        return f"{type(module).__name__.removeprefix('FSDP')} ({names})"

    def belongs_to(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the module has some of these parameters."""
        return not {id(parameter) for parameter in parameters}.isdisjoint(map(id, self._parameters))


# The instances that have gradients to compute or to complete.
_waiting: weakref.WeakSet[DelayedGradients] = weakref.WeakSet()
_watching: list[Any] = []


def drop_pending(parameters: Iterable[Tensor]) -> None:
    """Forget the pending gradients of modules with some of these parameters."""
    dropped = list(parameters) if _waiting else []
    for delayed in [delayed for delayed in _waiting if delayed.belongs_to(dropped)]:
        delayed.forget()


def _watch_steps() -> None:
    """From now on, refuse steps and clips while gradients are pending."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_refuse_early_step))
        on_use.append(_refuse_early_use)


def _refuse_early_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _refuse_early_use(trained, f"{type(optimizer).__name__}.step")


def _refuse_early_use(parameters: list[Tensor], what: str) -> None:
    late = [delayed for delayed in _waiting if len(delayed) and delayed.belongs_to(parameters)]
    if late:
        raise RuntimeError(
            f"{what}: the weight gradients of {', '.join(map(str, late))} are pending. Call "
            f"backward_dw() after backward, before gradients are clipped and before the step"
        )


def _mark_done(owner: weakref.ref[DelayedGradients]) -> None:
    delayed = owner()
    if delayed is not None:
        delayed._done = True
