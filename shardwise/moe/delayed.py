# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are computed later than the gradients of the inputs.

    backward       dx2  dx1  ......................  everybody upstream waits for these alone
    backward_dw                dW2  dW1  complete    in the gap of an exchange, or of a pipeline

The parameters are no inputs of the autograd node then: autograd would tell their hooks that they
are done before they are. Each one's completion is fired here instead, once, after the last of its
gradients: autograd says when the last use of the module is through, by a leaf that every use has
among its inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.moe.weights import ExpertTensor, WriteGradient


class DelayedGradients:
    """What one module still owes. Products run second linear first, then completions fire."""

    def __init__(self) -> None:
        # one list per backward: (parameters, how to write their gradient), second linear first
        self._owed: list[list[tuple[ExpertTensor, WriteGradient]]] = []
        self._anchor: Tensor | None = None
        self._through = True  # whether no use of the module is still to come in this backward
        # Paid in part: parameters whose memory is fresh no longer, and whom to tell in the end.
        self._seen: set[int] = set()
        self._completions: dict[tuple[int, ...], Callable[[], None]] = {}

    def __reduce__(self) -> tuple[type[DelayedGradients], tuple[()]]:
        return DelayedGradients, ()  # a copy of a module owes nothing

    def anchor(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Brings backward to a node whose parameters are no inputs of it; and tells them."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return torch.empty(0, device=x.device)
        for parameter in trained:
            if torch.is_grad_enabled() and hasattr(type(parameter), "delayed"):
                parameter.delayed = True  # type: ignore[attr-defined]
        if self._anchor is None or self._anchor.device != x.device:
            with torch.inference_mode(False):  # an evaluation may come first; training needs it too
                self._anchor = torch.empty(0, device=x.device, requires_grad=True)
            me = weakref.ref(self)
            self._anchor.register_post_accumulate_grad_hook(lambda _: _all_through(me))
        return self._anchor

    def __len__(self) -> int:
        """How many backwards are owed their weight gradients."""
        return len(self._owed)

    def owe(self, gradients: list[tuple[ExpertTensor, WriteGradient]]) -> None:
        self._owed.append(gradients)
        self._through = False
        for experts, _ in gradients:
            experts.owe()

    @torch.no_grad()
    def pay(self) -> None:
        """Compute all that is owed, position by position; after the last use of the module in a
        backward, complete each parameter once."""
        owed, self._owed = self._owed, []
        for position in range(max(map(len, owed), default=0)):
            for gradients in owed:
                experts, write = gradients[position]
                experts.accumulate(write, self._seen)
                self._completions[tuple(map(id, experts.parameters))] = experts.complete
        if self._through:
            completions = list(self._completions.values())
            self._start_anew()
            for complete in completions:
                complete()

    def forget(self) -> None:
        """After an exception in backward: drop what is owed."""
        self._owed = []
        self._through = True
        self._start_anew()

    def _start_anew(self) -> None:
        self._seen, self._completions = set(), {}


def _all_through(owner: weakref.ref[DelayedGradients]) -> None:
    delayed = owner()
    if delayed is not None:
        delayed._through = True
