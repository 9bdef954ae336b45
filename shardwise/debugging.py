# SPDX-License-Identifier: Apache-2.0
"""Checks that users switch on: ``with debug(model): ...``.

    before each work of a unit, each        all ranks say what they do next; if one does something
    collective and each step                else, every rank raises and names both
    before a step                           gradients that are missing, on some ranks or on all, and
                                            gradients that are not finite, by name and rank
    after a step                            weights that are not finite, and replicas of a weight
                                            that are not the same bits
    at a save                               replicas of weights and states that are not

A step outside of this file compares nothing: the host exchanges a few bytes for each of these, and
waits for the device.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.core import comm, streams
from shardwise.core.agreement import all_ranks
from shardwise.notices import warn_once
from shardwise.words import quoted

logger = logging.getLogger(__name__)
_always = ExitStack()  # holds the context that the environment has asked for


@contextmanager
def debug(model: nn.Module) -> Iterator[None]:
    """Compare the ranks while the context is open, and look for values that are not finite. Every
    rank enters the context together, with the whole model: not for the stages of a pipeline. The
    environment variable SHARDWISE_DEBUG=1 does the same from the first forward on.

    Work of the library gets NVTX ranges with the names of units.
    """
    with _watching(_Watch({id(p): name for name, p in model.named_parameters()})):
        yield


def watch_if_asked(model: nn.Module) -> None:
    """At the first forward: obey SHARDWISE_DEBUG=1, for the rest of this process."""
    if os.environ.get("SHARDWISE_DEBUG", "0") not in ("", "0") and comm.observer is None:
        _always.enter_context(debug(model))


@contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    before = comm.observer, streams.announce
    comm.observer, streams.announce = watch, watch.begins
    hooks = [
        register_optimizer_step_pre_hook(watch.before_step),
        register_optimizer_step_post_hook(watch.after_step),
    ]
    try:
        yield
    finally:
        comm.observer, streams.announce = before
        for hook in hooks:
            hook.remove()


def compare_replicas(tensors: Mapping[str, Tensor]) -> None:
    """Before a save, in ``debug`` only: raise on all ranks if replicas of a tensor differ."""
    if isinstance(comm.observer, _Watch):
        comm.observer.refuse_unlike(tensors.items())


class _Watch:
    """Compares what ranks do, and looks at gradients and weights around a step."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names  # of parameters, by id; others have the name of their unit's layout
        self.absent: list[str] = []  # parameters that got no gradient here, since the last step
        self.work = ""  # what collectives are for
        self.over = False  # whether ranks were found that do other things; hooks still run then

    # ------------------------------------------------------------------ what comes next

    def begins(self, work: str) -> None:
        """Work of a unit comes next, on all ranks."""
        self.work = f" in '{work}'"
        self._compare(f"'{work}'", all_ranks())

    def issued(self, call: comm.Call, axis: comm.Axis) -> None:
        """A collective comes next, on the ranks of the axis."""
        if axis.group is not None and not axis.pretends:  # else of a plan
            size = "" if call.operation == "all_to_all" else f", {call.nbytes} bytes"
            self._compare(f"{call.operation} over axis '{call.axis}'{size}{self.work}", axis)

    def lacks(self, name: str) -> None:
        """No gradient came for a parameter of a unit that is reduced."""
        self.absent.append(name)

    def _compare(self, doing: str, axis: comm.Axis) -> None:
        if self.over:
            return
        everyone = comm.agree(doing, axis)
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if other is not None:
            self.over = True
            raise RuntimeError(
                f"the ranks are out of step: rank {axis.peers[0]} comes to {everyone[0]}; rank "
                f"{axis.peers[other]} comes to {everyone[other]}. Every rank must run the same "
                f"wrapped modules in the same order, and step together. A rank whose loss does not "
                f"depend on a module calls the module all the same"
            )

    # ------------------------------------------------------------------ around a step

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._compare(f"{type(optimizer).__name__}.step()", all_ranks())
        self.work = " in the step"
        held = [p for group in optimizer.param_groups for p in group["params"]]
        without = [self._name(p) for p in held if p.requires_grad and p.grad is None]
        self._tell_absent(self.absent, without)
        self.absent = []
        self._refuse_broken("gradient", ((p, p.grad) for p in held))

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._refuse_broken("weight", ((p, p) for p in held))
        self.refuse_unlike((self._name(parameter), parameter) for parameter in held)

    def _tell_absent(self, absent: list[str], without: list[str]) -> None:
        everyone = comm.agree((absent, without), all_ranks())
        for name in dict.fromkeys(name for theirs, _ in everyone for name in theirs):
            ranks = [rank for rank, (theirs, _) in enumerate(everyone) if name in theirs]
            if len(ranks) < len(everyone):
                raise RuntimeError(
                    f"'{name}' got no gradient on ranks {ranks}, and got one on the others: its "
                    f"gradient is NaN. If ranks may use different parameters, wrap with "
                    f"unused_parameters='zeros'"
                )
        never = [name for name in without if all(name in theirs for _, theirs in everyone)]
        if never:
            warn_once(logger, "no rank has a gradient for %s", quoted(never), about="no gradient")

    def _refuse_broken(self, kind: str, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Raise on all ranks if a value is not finite on one."""
        mine = []
        for parameter, value in pairs:
            local: Tensor | None = getattr(value, "_local_tensor", value)
            if local is None or not local.is_floating_point() or not local.numel():
                continue
            if broken := int((~torch.isfinite(local)).sum()):
                mine.append(f"{kind} of '{self._name(parameter)}': {broken} elements")
        everyone = comm.agree(mine, all_ranks())
        found = [f"{text} on rank {rank}" for rank, texts in enumerate(everyone) for text in texts]
        if found:
            more = f", and {len(found) - 8} more" if len(found) > 8 else ""
            raise RuntimeError(f"values that are not finite: {'; '.join(found[:8])}{more}")

    def refuse_unlike(self, held: Iterable[tuple[str, Any]]) -> None:
        """Raise on all ranks if replicas of a tensor differ."""
        mine = {
            (name, holders): _checksum(tensor._local_tensor)
            for name, tensor in held
            if isinstance(tensor, DTensor) and len(holders := _holders(tensor)) > 1
        }
        everyone = comm.agree(mine, all_ranks())
        for (name, holders), first in ((k, v) for theirs in everyone for k, v in theirs.items()):
            others = [r for r in holders if everyone[r].get((name, holders), first) != first]
            if others:
                raise RuntimeError(
                    f"replicas of '{name}' differ: ranks {list(holders)} hold the same piece, and "
                    f"{others} have other values. Write to weights alike on all ranks"
                )

    def _name(self, parameter: Any) -> str:
        cut = getattr(parameter, "cut", None)
        return self.names.get(id(parameter)) or (cut.name if cut is not None else "a parameter")


def _holders(parameter: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same piece."""
    mesh: Any = parameter.device_mesh
    pairs = zip(parameter.placements, mesh.get_coordinate(), strict=True)
    held = mesh.mesh[tuple(slice(None) if p.is_replicate() else at for p, at in pairs)]
    return tuple(held.flatten().tolist())


def _checksum(local: Tensor) -> int:
    bits = local.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(bits.cpu().numpy().tobytes())
