# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are computed later than the gradients of the inputs.

    backward       dx2  dx1  ......................  layers upstream wait only for these
    backward_dw                dW2  dW1  complete    while an exchange or a pipeline stage is waited
                                                     for

Delayed parameters are not inputs of the autograd node: autograd would call their hooks before their
gradients exist. Their hooks are called here instead, once, after the last gradient. The anchor, a
leaf that every use of the module has among its inputs, tells when the last use is done.

Two mistakes are refused: an optimizer step before ``backward_dw``, and parameters that were swapped
for others after the forward, whose owner has already reduced the gradients it found. Gradients that
are pending when the user drops gradients (``zero_grad``) are dropped with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.moe.weights import Pending, is_wanted
from shardwise.tensor import ShardedTensor
from shardwise.tensor_steps import on_use, on_zero_grad
from shardwise.words import quoted


class DelayedGradients:
    """The weight gradients that one module has still to compute: first those of the second linear,
    then those of the first, then the completion of each parameter."""

    def __init__(self) -> None:
        # one list per backward: (parameters, writer of their gradient), second linear first
        self._pending: list[Pending] = []
        self._anchor: Tensor | None = None
        self._module: weakref.ref[nn.Module] | None = None  # the module of the gradients
        self._done = True  # whether this backward has passed all uses of the module
        # The parameters that were written to since the last completion, and their completions.
        self._seen: set[int] = set()
        self._completions: dict[tuple[int, ...], Callable[[], None]] = {}

    def __reduce__(self) -> tuple[type[DelayedGradients], tuple[()]]:
        return DelayedGradients, ()  # a copy of a module has no gradients to compute

    def anchor(self, x: Tensor, module: nn.Module) -> Tensor:
        """A leaf that brings backward to a node without parameters among its inputs. Marks the
        parameters as delayed."""
        self._module = weakref.ref(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trained:
            return torch.empty(0, device=x.device)
        for parameter in trained:
            if torch.is_grad_enabled() and hasattr(type(parameter), "delayed"):
                parameter.delayed = True  # type: ignore[attr-defined]
        if self._anchor is None or self._anchor.device != x.device:
            with torch.inference_mode(False):  # training uses the anchor of an earlier evaluation
                self._anchor = torch.empty(0, device=x.device, requires_grad=True)
            me = weakref.ref(self)
            self._anchor.register_post_accumulate_grad_hook(lambda _: _mark_done(me))
        return self._anchor

    def __len__(self) -> int:
        """The number of backwards whose weight gradients are pending."""
        return len(self._pending)

    def delay(self, gradients: Pending) -> None:
        """Keep these for later, unless the backward that runs now is for chosen inputs alone."""
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
        """Drop the pending gradients: the user did, or backward raised an exception."""
        self._pending = []
        self._done = True
        self._reset()

    def _reset(self) -> None:
        self._seen, self._completions = set(), {}
        _waiting.discard(self)

    def _refuse_swapped(self, pending: list[Pending]) -> None:
        """Raise for parameters that left the module and whose owner expects no delayed gradient."""
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
        names = quoted([name for name, _ in module.named_parameters()])
        return f"{type(module).__name__.removeprefix('FSDP')} ({names})"

    def belongs_to(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the module has some of these parameters."""
        held = set(map(id, parameters))
        module = self._module() if self._module is not None else None
        return module is not None and any(id(one) in held for one in module.parameters())


# Those with gradients to compute or to complete.
_waiting: weakref.WeakSet[DelayedGradients] = weakref.WeakSet()
_watching: list[Any] = []


def drop_pending(parameters: Iterable[Tensor]) -> None:
    """Forget the pending gradients of modules with some of these parameters."""
    held = list(parameters) if _waiting else []
    for delayed in [delayed for delayed in _waiting if delayed.belongs_to(held)]:
        delayed.forget()


def _drop_with_others(parameters: Iterable[Tensor]) -> None:
    """A wrapped module's unit waits for its gradients, so only ``reset_iter_state`` drops them."""
    drop_pending(one for one in parameters if not isinstance(one, ShardedTensor))


def _watch_steps() -> None:
    """Refuse, from now on, steps and clips that come before pending gradients, and drop these with
    all others."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_refuse_early_step))
        on_use.append(_refuse_early_use)
        on_zero_grad.append(_drop_with_others)


def _refuse_early_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    _refuse_early_use(trained, f"{type(optimizer).__name__}.step")


def _refuse_early_use(parameters: list[Tensor], what: str) -> None:
    late = [delayed for delayed in _waiting if len(delayed) and delayed.belongs_to(parameters)]
    if late:
        raise RuntimeError(
            f"{what}: the weight gradients of {', '.join(map(str, late))} are pending: call "
            f"backward_dw() after the backward, before gradients are clipped and the step"
        )


def _mark_done(owner: weakref.ref[DelayedGradients]) -> None:
    delayed = owner()
    if delayed is not None:
        delayed._done = True
