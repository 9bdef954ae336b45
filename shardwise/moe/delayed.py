# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are computed later than the gradients of the inputs.

    backward       dx2  dx1  ......................  everybody upstream waits for these alone
    backward_dw                dW2  dW1  complete    in the gap of an exchange, or of a pipeline

The parameters are no inputs of the autograd node then: autograd would tell their hooks that they
are done before they are. Each one's completion is fired here instead, once, after the last of its
gradients: autograd says when the last use of the module is through, by a leaf that every use has
among its inputs.

Two mistakes are refused: an optimizer that steps before ``backward_dw``, and parameters that were
swapped for others meanwhile, whose owner has reduced the gradients that it found.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.moe.weights import ExpertTensor, WriteGradient


class DelayedGradients:
    """The weight gradients that one module has still to compute. Products run second linear first,
    then completions fire."""

    def __init__(self) -> None:
        # one list per backward: (parameters, how to write their gradient), second linear first
        self._pending: list[list[tuple[ExpertTensor, WriteGradient]]] = []
        self._anchor: Tensor | None = None
        self._module: weakref.ref[nn.Module] | None = None  # whose gradients they are
        self._through = True  # whether no use of the module is still to come in this backward
        # Paid in part: parameters whose memory is fresh no longer, and whom to tell in the end.
        self._seen: set[int] = set()
        self._completions: dict[tuple[int, ...], Callable[[], None]] = {}

    def __reduce__(self) -> tuple[type[DelayedGradients], tuple[()]]:
        return DelayedGradients, ()  # a copy of a module has none to compute

    def anchor(self, x: Tensor, module: nn.Module) -> Tensor:
        """Brings backward to a node whose parameters are no inputs of it; and tells them."""
        self._module = weakref.ref(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
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
        """How many backwards wait for their weight gradients."""
        return len(self._pending)

    def delay(self, gradients: list[tuple[ExpertTensor, WriteGradient]]) -> None:
        self._pending.append(gradients)
        self._through = False
        if not _waiting:
            _watch_steps()
        _waiting.add(self)
        for experts, _ in gradients:
            experts.delay()

    @torch.no_grad()
    def pay(self) -> None:
        """Compute all that is pending, position by position; after the last use of the module in a
        backward, complete each parameter once."""
        pending, self._pending = self._pending, []
        _waiting.discard(self)
        self._refuse_strangers(pending)
        for position in range(max(map(len, pending), default=0)):
            for gradients in pending:
                experts, write = gradients[position]
                experts.accumulate(write, self._seen)
                self._completions[tuple(map(id, experts.parameters))] = experts.complete
        if self._through:
            completions = list(self._completions.values())
            self._start_anew()
            for complete in completions:
                complete()

    def forget(self) -> None:
        """After an exception in backward: drop what is pending."""
        self._pending = []
        _waiting.discard(self)
        self._through = True
        self._start_anew()

    def _start_anew(self) -> None:
        self._seen, self._completions = set(), {}

    def _refuse_strangers(self, pending: list[list[tuple[ExpertTensor, WriteGradient]]]) -> None:
        """Parameters that the module has no longer, and that nobody waits for."""
        module = self._module() if self._module is not None else None
        here = {id(parameter) for parameter in module.parameters()} if module is not None else set()
        for experts, _ in [each for gradients in pending for each in gradients]:
            for parameter in experts.parameters:
                if id(parameter) not in here and not hasattr(type(parameter), "delay"):
                    self.forget()
                    raise RuntimeError(
                        f"{self} has other parameters than in forward: they were swapped, as "
                        f"torch's own fully_shard does, and their gradients were reduced before "
                        f"the delayed ones came. Wrap it with shardwise.fully_shard, or build it "
                        f"with delay_weight_gradient=False"
                    )

    def __str__(self) -> str:
        module = self._module() if self._module is not None else None
        if module is None:
            return "a module that is gone"
        names = [name for name, _ in module.named_parameters()]
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        return f"{type(module).__name__.removeprefix('FSDP')} ({shown})"

    def trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters of the module."""
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        module = self._module() if self._module is not None else None
        return module is not None and any(id(one) in held for one in module.parameters())


_waiting: weakref.WeakSet[DelayedGradients] = weakref.WeakSet()  # with gradients to compute
_watching: list[Any] = []


def _watch_steps() -> None:
    """Have every optimizer's step refused that comes before gradients it is to use."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_refuse_early_step))


def _refuse_early_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    late = [delayed for delayed in _waiting if delayed.trained_by(optimizer)]
    if late:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: the weight gradients of {', '.join(map(str, late))} "
            f"are still to come: call backward_dw() after the backward, before the step"
        )


def _all_through(owner: weakref.ref[DelayedGradients]) -> None:
    delayed = owner()
    if delayed is not None:
        delayed._through = True
