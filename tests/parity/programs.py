# SPDX-License-Identifier: Apache-2.0
"""What runs may do differently, by name: schedules that change no bit, programs other than a loop
of steps, and contexts: other ways of the optimizer, other transport, and planted mistakes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardwise.core import buckets
from shardwise.optim import matrix_group
from shardwise.precision.fp8_codec import FP8
from shardwise.shard.gradient import Gradients
from shardwise.shard.group import Group
from shardwise.shard.parameter import CodedLeaf
from tests import models
from tests.models import loss_of, tokens
from tests.parity.helpers import small_rounds
from tests.parity.mxfp8_helpers import STORED, coded, off_in_the_same_groups

# ------------------------------------------------------------------------------ schedules


def without_prefetch(model: Any) -> None:
    for unit in (model, *model.layers):
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])


def eager_prefetch(model: Any) -> None:
    """Everybody gathers everybody: far ahead, and in an order nobody needs."""
    units = [model, *model.layers]
    for unit in units:
        unit.set_modules_to_forward_prefetch(units[::-1])
        unit.set_modules_to_backward_prefetch(units)


def from_codes(model: Any) -> None:
    """Wrong: main weights that start from what the codes say."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in STORED:
                parameter.copy_(coded(parameter.full_tensor()).decode())


CHANGES: dict[str, Callable[[Any], None]] = {
    "without prefetch": without_prefetch,
    "eager prefetch": eager_prefetch,
    "one reduction": lambda model: model.set_reduce_scatter_max_input_buffers(1),
    "many reductions": lambda model: model.set_reduce_scatter_max_input_buffers(8),
    "separate groups": lambda model: model.set_separate_reduce_scatter_group(True),
    "from codes": from_codes,
}

# ------------------------------------------------------------------------------ programs

HELD = [f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("up", "down")]


def backward(model: nn.Module, rank: int, step: int = 0, microbatch: int = 0) -> None:
    loss_of(model, tokens(step, microbatch, rank, 4)).backward()


def unsynced(model: Any, optimizer: Any, rank: int, build: Any) -> Any:
    """Without sync, then twice with it: the second adds to what the first left in ``.grad``."""
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch > 0)
        backward(model, rank, 0, microbatch)
    optimizer.step()


def replaced(model: Any, optimizer: Any, rank: int, build: Any) -> Any:
    """Gradients of the user's: made of ours, given whole, taken away; then added to."""
    backward(model, rank)
    first, second, third, _ = (model.get_parameter(name) for name in HELD)
    first.grad = first.grad * 2
    given = torch.zeros_like(second)
    given.copy_(torch.linspace(-1, 1, second.numel()).view(second.shape))
    second.grad = given
    third.grad = None
    backward(model, rank, 1)
    optimizer.step()
    second.grad = given
    optimizer.clip_grad_norm(0.1)
    optimizer.step()


def rebuilt(model: Any, optimizer: Any, rank: int, build: Any) -> Any:
    """With gradients present, with another division, and with momenta stored otherwise."""
    backward(model, rank)
    again = build(model)
    again.step()
    again.zero_grad()
    backward(model, rank, 1)
    model.layers[1].up.weight.requires_grad_(False)
    build(model).step()
    model.layers[1].up.weight.requires_grad_(True)
    last = build(model)
    last.load_state_dict(again.state_dict())
    backward(model, rank, 2)
    last.step()
    return last


def emptied(model: Any, optimizer: Any, rank: int, build: Any) -> Any:
    """Another division, while the memory of gradients is given back."""
    backward(model, rank)
    optimizer.step()
    model.zero_grad()
    model.layers[1].up.weight.requires_grad_(False)
    fewer = build(model)
    backward(model, rank, 1)
    fewer.step()
    return fewer


def moved(model: Any, optimizer: Any, rank: int, build: Any) -> Any:
    """Buffers made anew under an optimizer."""
    backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    model.to(torch.float64)
    model.to(torch.float32)
    backward(model, rank, 1)
    optimizer.step()


PROGRAMS = {one.__name__: one for one in (unsynced, replaced, rebuilt, emptied, moved)}

# ------------------------------------------------------------------------------ mistakes


def scaled_twice() -> Any:
    once: Any = Gradients._divisor.fget  # type: ignore[attr-defined]
    twice = property(lambda self: 2 * (once(self) or 1.0))
    return mock.patch.object(Gradients, "_divisor", twice)


def sent_by_format() -> Any:
    """Gradients of weights in fp8 travel in a dtype of their own."""
    followed = Gradients.follow

    def follow(self: Gradients, main: Any, sharded: Any, leaves: Any, dtype: Any, *of: Any) -> None:
        wide = any(isinstance(leaf, CodedLeaf) for leaf in leaves)
        followed(self, main, sharded, leaves, torch.float64 if wide else dtype, *of)

    return mock.patch.object(Gradients, "follow", follow)


def left_behind() -> Any:
    """The gradient of each group's first parameter is packed and never published."""
    published = Gradients._publish

    def publish(self: Gradients, flow: Any, ready: Any, came: list[bool]) -> None:
        published(self, flow, ready, [False, *came[1:]])

    return mock.patch.object(Gradients, "_publish", publish)


def written_by_two() -> Any:
    """Memory from the trace pool is written while another reads it."""
    packed = Gradients._pack

    def pack(self: Gradients) -> None:
        packed(self)
        if self.pool is not None and self._flat is not None:
            self._flat[:1] += 2**-20

    return mock.patch.object(Gradients, "_pack", pack)


def stale_codes() -> Any:
    """Codes that are here are taken to be right, whatever main says by now."""

    def is_current(self: Any) -> bool:
        return self.whole is None or (self.whole.made_from is not None and self.whole.live)

    return mock.patch.object(Group, "is_current", property(is_current))


def divided(evenly: bool) -> Any:
    return lambda: mock.patch.object(matrix_group, "evenly_is_cheaper", return_value=evenly)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "small rounds": small_rounds,  # one matrix of each owner at a time
    "evenly": divided(True),  # replicas divide each matrix
    "by matrix": divided(False),
    "at use": off_in_the_same_groups,
    "staged": lambda: mock.patch.object(FP8, "staged_because", return_value="a test"),
    "many words": lambda: mock.patch.object(models, "WORDS", 384),
    "padding is dear": lambda: mock.patch.object(buckets, "CHEAP_PADDING", 0),
    "scaled twice": scaled_twice,
    "sent by format": sent_by_format,
    "left behind": left_behind,
    "written by two": written_by_two,
    "stale codes": stale_codes,
    "nothing": nullcontext,
}
