# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are computed later than the gradients of the inputs.

    backward       dx2  dx1  ......................  earlier layers wait for these gradients alone
    backward_dw                dW2  dW1  complete    during an exchange or another pipeline stage

Delayed parameters are not inputs of the autograd node, because autograd would call their hooks
before their gradients exist. This file calls the hooks instead, once, after the last gradient. One
leaf, the anchor, is among the inputs of every use of the module: its hook runs after the last use
in a backward. ``zero_grad`` drops no pending gradients: call ``backward_dw`` first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.moe.weights import Pending, is_wanted


class DelayedGradients:
    """The weight gradients that one module has not computed yet. The second linear comes first,
    then the first linear, then the completion of each parameter."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []  # an entry for each backward
        self._anchor: Tensor | None = None
        self._done = True  # whether this backward has passed all uses of the module
        # The parameters that were written since the last completion, and their completions.
        self._seen: set[int] = set()
        self._completions: dict[tuple[int, ...], Callable[[], None]] = {}

    def __reduce__(self) -> tuple[type[DelayedGradients], tuple[()]]:
        return DelayedGradients, ()  # a copy of a module has no gradients to compute

    def anchor(self, x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
        """A leaf that leads backward to a node which has no parameters among its inputs. Also marks
        the parameters as delayed."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return torch.empty(0, device=x.device)
        for parameter in trained if torch.is_grad_enabled() else ():
            _mark(parameter)
        if self._anchor is None or self._anchor.device != x.device:
            with torch.inference_mode(False):  # training may use the anchor of an evaluation
                self._anchor = torch.empty(0, device=x.device, requires_grad=True)
            reference = weakref.ref(self)
            self._anchor.register_post_accumulate_grad_hook(lambda _: _mark_done(reference))
        return self._anchor

    def delay(self, gradients: Pending) -> None:
        """Keep gradients for later, unless this backward computes gradients of inputs alone."""
        if self._anchor is not None and not is_wanted(self._anchor):
            return
        self._pending.append(gradients)
        self._done = False
        for experts, _ in gradients:
            experts.delay()

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the pending gradients; after the last use of the module in a backward, complete
        each parameter once."""
        pending, self._pending = self._pending, []
        for position in range(max(map(len, pending), default=0)):
            for gradients in pending:
                experts, write = gradients[position]
                experts.accumulate(write, self._seen)
                self._completions[tuple(map(id, experts.parameters))] = experts.complete
        if self._done:
            completions = list(self._completions.values())
            self._seen, self._completions = set(), {}
            for complete in completions:
                complete()

    def forget(self) -> None:
        """Drop the pending gradients of a step that raised an error."""
        self._pending, self._done = [], True
        self._seen, self._completions = set(), {}


def _mark(parameter: Tensor) -> None:
    """Tell a parameter's unit that its gradient will be delayed. Other wrappers have reduced the
    gradients of a backward before the delayed ones exist."""
    if hasattr(type(parameter), "delayed"):
        parameter.delayed = True  # type: ignore[attr-defined]
    elif not hasattr(parameter, "main_grad") and _num_ranks() > 1:
        raise RuntimeError(
            f"delay_weight_gradient: a parameter of shape {list(parameter.shape)} is in no unit of "
            f"shardwise.fully_shard or data_parallel and has no main_grad, so nothing reduces its "
            f"gradient after backward_dw(). Wrap the module, or build it with "
            f"delay_weight_gradient=False"
        )


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _mark_done(owner: weakref.ref[DelayedGradients]) -> None:
    delayed = owner()
    if delayed is not None:
        delayed._done = True
