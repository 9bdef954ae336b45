# SPDX-License-Identifier: Apache-2.0
"""All changes to torch itself, so that its optimizers and functions work on our parameters.

    before a step   parameters of before wrapping are refused, and other libraries' Muon; states
                    that torch loaded are cut like their parameters; microbatches that wait are
                    refused; gathers that read the weights end
    after a step    the write is counted, so that the next gather refreshes the weights
    foreach         optimizers and clipping take lists of ShardedTensors, as they do for DTensors
    operations      on ShardedTensors are dispatched to ShardedTensor, before torch 2.13 too

Importing this file applies the changes. An optimizer that does a part of this work itself has an
attribute that says so: ``marks_writes``, ``places_states``.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._library.simple_registry import GenericTorchDispatchRuleHolder as RuleHolder
from torch.optim.optimizer import _foreach_supported_types as _optimizer_foreach_types
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_types

from shardwise.cut import Cut, Version
from shardwise.tensor import GRAD, UNREDUCED, ShardedTensor
from shardwise.uncompiled import skip_frames, uncompiled
from shardwise.words import quoted

logger = logging.getLogger(__name__)
OWNER = "_shardwise_owner"  # attribute of a parameter of before wrapping: its name in its unit
BEFORE_2_13 = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def _ours(optimizer: torch.optim.Optimizer) -> list[ShardedTensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) is ShardedTensor
    ]


def _versions_of(optimizer: torch.optim.Optimizer) -> list[Version]:
    """The versions of the buffers that a step may write: those of trainable parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        found = {id(p.version): p.version for p in _ours(optimizer) if p.requires_grad}
    return [version for version in found.values() if version is not None]


_seen_states: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()


def _cut_states(optimizer: torch.optim.Optimizer) -> None:
    """Cut like their parameter those states that were loaded whole, in torch's own chunks, or in
    the pieces of another strategy (collective). Every load gives an optimizer a new dictionary of
    states, on all ranks, so this looks at each dictionary once."""
    if _seen_states.get(optimizer) is optimizer.state:
        return
    _seen_states[optimizer] = optimizer.state
    _refuse_matrix_optimizers(optimizer)
    for parameter in _ours(optimizer):
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for name, value in sorted(state.items()):
            foreign = isinstance(value, Tensor) and type(value) is not ShardedTensor
            if type(value) is ShardedTensor and not getattr(optimizer, "places_states", False):
                foreign = not parameter.cut.matches(value.cut)
            if foreign and value.ndim and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _refuse_originals(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that was built before wrapping: its tensors have left the model."""
    plain = (p for group in optimizer.param_groups for p in group["params"])
    held = [getattr(p, OWNER) for p in plain if type(p) is not ShardedTensor and hasattr(p, OWNER)]
    if held:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built before fully_shard and holds the old parameters "
            f"({quoted(held)}): it would update nothing. Build the optimizer after wrapping"
        )


def _refuse_matrix_optimizers(optimizer: torch.optim.Optimizer) -> None:
    """Raise for other libraries' Muon on pieces that it cannot work with (torch's treats a piece as
    a matrix, dion's expects the rows that torch.chunk gives), and for Adafactor(foreach=True)."""
    kind, torch_muon = type(optimizer), getattr(torch.optim, "Muon", None)
    foreach = any(group.get("foreach") for group in optimizer.param_groups)
    if kind is getattr(torch.optim, "Adafactor", None) and foreach and _ours(optimizer):
        raise RuntimeError(
            "torch.optim.Adafactor(foreach=True) multiplies lists of whole means by lists of "
            "pieces: build it with foreach=False, or leave foreach out"
        )
    if kind.__module__.split(".")[0] != "dion" and kind is not torch_muon:
        return
    takes_chunks = kind is not torch_muon and kind.__name__ in ("Muon", "Dion2")
    needs, fix = "whole matrices", ""
    if takes_chunks:
        needs += ", or rows as torch.chunk cuts them"
        fix = " A matrix wrapped by itself, fully_shard(linear), has such rows."
    for group in optimizer.param_groups:
        if group.get("algorithm") in ("adamw", "lion"):
            continue  # dion's names for elementwise updates
        for parameter in group["params"]:
            if type(parameter) is not ShardedTensor or not parameter.cut.axes:
                continue
            if not (takes_chunks and _in_chunks(parameter.cut)):
                raise RuntimeError(
                    f"{kind.__module__}.{kind.__name__} on '{parameter.cut.name}': it needs "
                    f"{needs}, and this parameter is cut in another way.{fix} Use "
                    f"sw.Muon(parameters, lr=...) or sw.optimizer"
                )


def _in_chunks(cut: Cut) -> bool:
    """Whether every holder has the rows that torch.chunk gives it: the same answer on all ranks."""
    size = -(-cut.shape[0] // cut.num_holders) * cut.stride[0]
    chunks = [(n * size, min((n + 1) * size, cut.numel)) for n in range(cut.num_holders)]
    pairs = zip(cut.pieces, chunks, strict=True)
    return cut.tile is None and all(piece == chunk for piece, chunk in pairs if any(piece))


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
        _check_gradients(optimizer)
    for version in _versions_of(optimizer):
        version.before_step()
        version.await_readers()


@functools.cache
def _leave_pieces_alone() -> None:
    """Keep our pieces out of the graphs of torch's compiler, which would take them for DTensors. A
    compiled step calls this file's hooks before it touches a parameter, so this comes in time."""
    skip_frames(ShardedTensor.__torch_dispatch__)
    torch._dynamo.config.nontraceable_tensor_subclasses.add(ShardedTensor)


# Called with parameters whose gradients are about to be used, and with the name of the use.
on_use: list[Callable[[list[Tensor], str], None]] = []


def refuse_unreduced(parameters: Iterable[Tensor], what: str) -> None:
    """Raise if microbatches of these parameters wait to be reduced: ``.grad`` lacks them."""
    parameters = list(parameters)
    for refuse in on_use:
        refuse(parameters, what)
    waiting = [
        p.cut.name
        for p in parameters
        if type(p) is ShardedTensor and p.version is not None and p.cut.index in p.version.waiting
    ]
    if waiting:
        raise RuntimeError(
            f"{what} before the last microbatch: gradients of {waiting} still wait unreduced, and "
            f"would be left out. {UNREDUCED}, or model.zero_grad() to drop them"
        )


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if microbatches wait unreduced, or if a forward ran and no parameter has a gradient."""
    parameters = _ours(optimizer)
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [(p.cut.name, GRAD.__get__(p)) for p in parameters if p.requires_grad]
    refuse_unreduced(parameters, "the optimizer steps")
    kind = f"{type(optimizer).__name__}.step()"
    lacking = [name for name, gradient in gradients if gradient is None]
    versions = {id(p.version): p.version for p in parameters if p.version is not None}.values()
    failed = any(version.failed() for version in versions)
    if len(lacking) < len(gradients):
        _had_gradients.setdefault(optimizer, False)
        if failed:
            raise RuntimeError(
                f"{kind}: the last backward raised an exception, and left a part of its gradients "
                f"({len(gradients) - len(lacking)} of {len(gradients)} parameters have one). Drop "
                f"them: call zero_grad(), or reset_iter_state() on the root module"
            )
    elif failed:
        logger.warning("%s: the last backward raised an exception: nothing moves", kind)
    elif (
        gradients
        and not _had_gradients.get(optimizer)
        and any(version.unanswered() for version in versions)
    ):
        message = (
            f"{kind}: none of its {len(gradients)} parameters has a gradient, and no backward has "
            f"followed the last forward. backward(inputs=...) reaches no parameter at rest: call "
            f"backward() without inputs=, and requires_grad_(False) on parameters that shall have "
            f"no gradient; or leave out the step"
        )
        if optimizer not in _had_gradients:
            raise RuntimeError(message)
        logger.warning(message)  # gradients may be meant to come in some iterations only
        _had_gradients[optimizer] = True


# Optimizers that had a gradient in a step, with whether they were warned since of a step without.
_had_gradients: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count the write to the weights: a kernel may have written them past the version counters."""
    if not getattr(optimizer, "marks_writes", False):
        for version in _versions_of(optimizer):
            version.count += 1


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


# ------------------------------------------------------------------------------ other places

# torch.optim and clip_grad_norm_ choose their foreach code by exact type.
for _types in (_optimizer_foreach_types, _foreach_types):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)  # type: ignore[arg-type]


def _find_rule(self: RuleHolder, torch_dispatch_class: type) -> Any:
    """Our rule for every operation on our class, found before torch's own.

    Before 2.13 torch sends all DTensors, subclasses too, to its C++ rules, which take pieces for
    torch's chunks. Only rules for a class and modes come earlier, and no mode is active while
    autograd runs a backward.
    """
    if torch_dispatch_class is ShardedTensor:
        return _dispatch
    return _torch_find_rule(self, torch_dispatch_class)


_dispatch: Any = ShardedTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
_torch_find_rule = RuleHolder.find
if BEFORE_2_13:
    RuleHolder.find = _find_rule  # type: ignore[method-assign]
