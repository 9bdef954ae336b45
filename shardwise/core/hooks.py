# SPDX-License-Identifier: Apache-2.0
"""Hooks of torch's optimizers that hold our parameters, all public.

    before a step   parameters of before wrapping are refused; states that torch loaded are cut like
                    their parameters; microbatches that wait are refused; gathers that read the
                    weights end
    after a step    the write is counted, so that the next gather refreshes the weights
    foreach         optimizers and clipping take lists of ShardedTensors, as they do for DTensors

An optimizer that does a part of this work itself has an attribute that says so: ``marks_writes``,
``places_states``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types as _optimizer_foreach_types
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_types

from shardwise.core.compat import plain_attributes
from shardwise.core.cut import Backing
from shardwise.core.tensor import UNREDUCED, ShardedTensor
from shardwise.core.uncompiled import skip_frames, uncompiled

OWNER = "_shardwise_owner"  # attribute of tensors that are not at rest: the name in the unit


def _ours(optimizer: torch.optim.Optimizer) -> list[ShardedTensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) is ShardedTensor
    ]


def _buffers_of(optimizer: torch.optim.Optimizer) -> list[Backing]:
    """The buffers that a step may write: those of trainable parameters."""
    with plain_attributes():
        found = {id(p.buffer): p.buffer for p in _ours(optimizer) if p.requires_grad}
    return [buffer for buffer in found.values() if buffer is not None]


_seen_states: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()


def _cut_states(optimizer: torch.optim.Optimizer) -> None:
    """Cut like their parameter those states that were loaded whole, in torch's own chunks, or in
    the pieces of another strategy (collective). Every load gives an optimizer a new dictionary of
    states, on all ranks, so this looks at each dictionary once."""
    if _seen_states.get(optimizer) is optimizer.state:
        return
    _seen_states[optimizer] = optimizer.state
    for parameter in _ours(optimizer):
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for name, value in sorted(state.items()):
            foreign = isinstance(value, Tensor) and type(value) is not ShardedTensor
            if type(value) is ShardedTensor and not getattr(optimizer, "places_states", False):
                foreign = not parameter.cut.matches(value.cut)
            if foreign and value.ndim and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _refuse_originals(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that holds tensors which are not the parameters at rest."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is not ShardedTensor and hasattr(parameter, OWNER):
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds '{getattr(parameter, OWNER)}' as it was "
                    f"before wrapping, or as gathered for a forward: its updates would be lost. "
                    f"Build the optimizer after fully_shard or data_parallel, and after reshard()"
                )


@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Prepare a step: gathers that still read main weights end before the optimizer writes them.
    A closure brings gradients later, so they are not checked then."""
    if "torch._dynamo" in sys.modules:
        _leave_pieces_alone()
    _refuse_originals(optimizer)
    _cut_states(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        refuse_unreduced(_ours(optimizer), "the optimizer steps")
    for buffer in _buffers_of(optimizer):
        buffer.before_step()
        buffer.await_readers()


@functools.cache
def _leave_pieces_alone() -> None:
    """Keep our pieces out of the graphs of torch's compiler, which would take them for DTensors. A
    compiled step calls this file's hooks before it touches a parameter, so this comes in time."""
    skip_frames(ShardedTensor.__torch_dispatch__)
    torch._dynamo.config.nontraceable_tensor_subclasses.add(ShardedTensor)


def refuse_unreduced(parameters: Iterable[Tensor], what: str) -> None:
    """Raise if microbatches of these parameters wait to be reduced: ``.grad`` lacks them."""
    waiting = [
        p.cut.name
        for p in parameters
        if type(p) is ShardedTensor and p.buffer is not None and p.cut.index in p.buffer.waiting
    ]
    if waiting:
        raise RuntimeError(
            f"{what} before the last microbatch: gradients of {waiting} still wait unreduced, and "
            f"would be left out. {UNREDUCED}, or model.zero_grad() to drop them"
        )


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count the write to the weights."""
    if not getattr(optimizer, "marks_writes", False):
        for buffer in _buffers_of(optimizer):
            buffer.writes += 1


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
# torch.optim and clip_grad_norm_ choose their foreach code by exact type.
for _types in (_optimizer_foreach_types, _foreach_types):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)  # type: ignore[arg-type]
