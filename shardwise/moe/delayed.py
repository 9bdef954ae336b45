# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are computed later than the gradients of the inputs.

    backward       dx2  dx1  ......................  everybody upstream waits for these alone
    backward_dw                dW2  dW1  complete    in the gap of an exchange, or of a pipeline

The parameters are no inputs of the autograd node then: autograd would tell their hooks that they
are done before they are. Each one's completion is fired here instead, once, after the last of its
gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.moe.weights import ExpertTensor, WriteGradient


class DelayedGradients:
    """What one module still owes. Products run second linear first, then completions fire."""

    def __init__(self) -> None:
        # one list per backward: (parameters, how to write their gradient), second linear first
        self._owed: list[list[tuple[ExpertTensor, WriteGradient]]] = []

    def __len__(self) -> int:
        """How many backwards are owed their weight gradients."""
        return len(self._owed)

    def owe(self, gradients: list[tuple[ExpertTensor, WriteGradient]]) -> None:
        self._owed.append(gradients)
        for experts, _ in gradients:
            experts.owe()

    @torch.no_grad()
    def pay(self) -> None:
        """Compute all that is owed, position by position, then complete each parameter once."""
        owed, self._owed = self._owed, []
        seen: set[int] = set()
        done: dict[tuple[int, ...], Callable[[], None]] = {}
        for position in range(max(map(len, owed), default=0)):
            for gradients in owed:
                experts, write = gradients[position]
                experts.accumulate(write, seen)
                done[tuple(map(id, experts.parameters))] = experts.complete
        for complete in done.values():
            complete()

    def forget(self) -> None:
        """After an exception in backward: drop what is owed."""
        self._owed = []
