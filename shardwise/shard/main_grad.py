# SPDX-License-Identifier: Apache-2.0
"""MainGrad: the reduced gradients of one group, as the optimizer sees them.

Like the main weight, fp32 and this rank's shard; ``.grad`` of each parameter at rest is a view.

A gradient that the user dropped (``zero_grad``) and still holds, or shows to numpy, keeps its
values as in plain torch: the memory is left to the holder, and the next gradients get another.

Replicas may divide the gradients between themselves: ``reduce_shares`` brings some spans to all of
them, others to one.

    parts of one size     one reduce-scatter: what a rank receives does not grow with the replicas
    parts of any sizes    one all-to-all of exact sizes, summed by the receiver
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import is_
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.buffer import Buffer
from shardwise.division import Division, Shares, Span, replica_shares
from shardwise.holders import count_references
from shardwise.memory import CACHING, counted
from shardwise.shard.whole_parameter import Whole
from shardwise.tensor import GRAD, Cut, ShardedTensor

read_grad = GRAD.__get__
# Attributes of parameters at rest (.grad and the like) are read many times a step; not through
# __torch_function__, which some torch versions give our DTensors.
plain_attributes = torch._C.DisableTorchFunctionSubclass


class MainGrad:
    """The gradients beside one main weight."""

    def __init__(self, weight: Buffer, sharded: Sequence[nn.Parameter], *, pin: bool) -> None:
        self._weight, self._sharded, self._pin = weight, sharded, pin
        self.buffer: Buffer | None = None  # made when first used: frozen groups have none
        self._shown: list[ShardedTensor] = []
        self._locals: list[Tensor] = []  # of these
        self._views: list[Tensor] = []
        self.divisions: dict[int, Division] | None = None  # for which these were made
        self._references = 0  # to them and their memory while nobody else has any
        self._shares: dict[int, Shares] = {}  # by axis

    @property
    def fresh(self) -> bool:
        """Whether no parameter shows a gradient: what is here may be overwritten."""
        with plain_attributes():
            return all(map(is_, map(read_grad, self._sharded), repeat(None)))

    def ready(self, unused: bool = False) -> Buffer:
        """The buffer, with memory: views of a buffer that has none cannot be made. ``unused``: it
        will be overwritten, so not the one that somebody still holds."""
        if unused:
            self._leave_to_holders()
        weight = self._weight
        if self.buffer is None:
            self.buffer = Buffer(
                weight.layout,
                weight.ranks,
                weight.placements,
                weight.dtype,
                weight.flat.device,
                "grad",
                pin=self._pin and weight.flat.device.type == "cpu",
            )
        self.buffer.block.acquire(CACHING)
        if self.divisions is not weight.version.divisions:
            self.divisions, self._shares = weight.version.divisions, {}
            self._shown = [self._show(*each) for each in enumerate(self.buffer.views())]
            self._locals = [grad._local_tensor for grad in self._shown]
            self._references = self._count_references(self.buffer)
        return self.buffer

    def _show(self, index: int, local: Tensor) -> ShardedTensor:
        """The gradient of one parameter; this rank's range, where replicas divide it."""
        assert self.buffer is not None
        cut: Cut = self._sharded[index].cut  # type: ignore[attr-defined]
        division = self._weight.version.divisions.get(index)
        if division is not None:
            cut, whole = cut.divided(division), cut
            local = cut.within(whole, local)
        return ShardedTensor(local, cut, version=self.buffer.version)

    def take(self, grads: Sequence[Tensor]) -> None:
        """The next gradients to publish, each in memory of its own, which is left to the
        parameters then: what a user drops is gone at once."""
        self._forget()
        cuts = [parameter.cut for parameter in self._sharded]  # type: ignore[attr-defined]
        pairs = zip(grads, cuts, strict=True)
        self._shown = [ShardedTensor(grad.view(cut.local_shape), cut) for grad, cut in pairs]
        for shown in self._shown:
            counted(shown._local_tensor, "grad")

    def views(self) -> list[Tensor]:
        """The piece of each parameter, as a plain tensor."""
        assert self.buffer is not None
        self._views = self._views or self.buffer.views()
        return self._views

    def shares(self, axis: int) -> Shares:
        """The elements that a reduction brings to each of the replicas that divide a gradient."""
        assert self.divisions is not None
        if axis not in self._shares:
            main, over = self._weight, self._weight.ranks
            pieces = [(low, high, offset) for low, high, offset, *_ in main.pieces]
            self._shares[axis] = replica_shares(
                pieces, self.divisions, main.placements, over.sizes, over.coordinate, axis
            )
        return self._shares[axis]

    # ------------------------------------------------------------------ other holders

    def _leave_to_holders(self) -> None:
        main = self.buffer
        if main is None or not main.block.live:
            return
        held = self._count_references(main) > self._references
        if held or not main.flat.untyped_storage().resizable():  # numpy showed it once
            self._forget()

    def _forget(self) -> None:
        """Leave the memory to its holders; the next gradients get another."""
        self.buffer, self.divisions = None, None
        self._shown, self._locals, self._views = [], [], []

    def _count_references(self, main: Buffer) -> int:
        """The number of references to the memory and to the tensors that show it, own ones to
        ``views`` excepted."""
        found = main.block.holders - len(self._views) + sum(count_references(self._views))
        return found + sum(map(getrefcount, self._shown)) + sum(map(getrefcount, self._locals))

    def repaired(self) -> Buffer:
        """The buffer, which says what ``.grad`` says: some may be gone or replaced by the user's.

        In other memory, where the user's may lie in this one (two gradients exchanged).
        """
        with plain_attributes():
            grads = list(map(read_grad, self._sharded))
        shown: list[Any] = list(self._shown) or [None] * len(grads)
        if any(
            grad is not None and grad is not ours for grad, ours in zip(grads, shown, strict=True)
        ):
            self._forget()
        main = self.ready()
        for parameter, grad, ours in zip(self._sharded, grads, self._shown, strict=True):
            if grad is None:
                ours.to_local().zero_()
            elif grad is not ours:
                _bring(Tensor.copy_, ours, grad)
                GRAD.__set__(parameter, ours)  # what autograd adds from now on, it adds here
        return main

    def give_back(self) -> None:
        """Give back the memory of gradients that the user dropped."""
        if self.buffer is not None and self.buffer.block.live and self.fresh:
            self._leave_to_holders()
            if self.buffer is not None:
                self.buffer.block.release(CACHING)

    def publish(
        self, whole: Sequence[Whole], brought: Sequence[bool], zeros: bool
    ) -> list[nn.Parameter]:
        """Show the gradients on the parameters at rest; those with hooks that want to be told.
        ``zeros``: parameters without a gradient show zeros.

        Where a loss reads parameters at rest (a penalty on weights), autograd may have brought them
        gradients since the reduction began: these are added."""
        hooked, brought = [], list(brought)
        with plain_attributes():
            since = list(map(read_grad, self._sharded))
        for index, (grad, ours) in enumerate(zip(since, self._shown, strict=True)):
            if grad is not None and grad is not ours:
                _bring(Tensor.add_, ours, grad)
                brought[index] = True
        with plain_attributes():
            for parameter, leaf, grad, here in zip(
                self._sharded, whole, self._shown, brought, strict=True
            ):
                # What waited for one that was frozen since is shown, as in plain torch.
                came = here or (leaf.requires_grad and zeros)
                # One without a gradient in this step shows that of the steps before, if any.
                if came or (leaf.requires_grad and parameter.grad is not None):
                    GRAD.__set__(parameter, grad)
                if came and parameter._post_accumulate_grad_hooks:
                    hooked.append(parameter)
        if self.buffer is None:
            self._forget()
        return hooked


def _bring(write: Callable[[Tensor, Tensor], Any], ours: ShardedTensor, grad: Tensor) -> None:
    """Write a gradient that is not ours into this rank's piece, or add it there."""
    if isinstance(grad, ShardedTensor):
        write(ours.to_local(), ours.cut.within(grad.cut, grad.to_local()))
    else:  # the whole of it, of which this rank holds a piece
        write(ours, grad)


def reduce_shares(
    flat: Tensor, shares: Shares, link: comm.Axis, divisor: float | None
) -> Iterator[comm.Pending]:
    """Reduce in place: the shared spans to every rank, the divided ones to one rank each. The
    memory of those that go elsewhere is undefined afterwards."""
    if shares.shared:
        packed = _pack(flat, shares.shared)
        yield comm.all_reduce(packed, link, divisor=divisor)
        _unpack(flat, shares.shared, packed)
    if not shares.divided:
        return
    if shares.even:
        length = shares.sizes[0]
        packed = _pack(flat, shares.divided, link.size * length)
        mine = packed.view(link.size, length)[link.rank]
        yield comm.reduce_scatter(mine, packed, link, divisor=divisor)
    else:
        packed = _pack(flat, shares.divided)
        mine = counted(packed.new_empty(shares.sizes[link.rank]), "receive")
        yield comm.reduce_parts(mine, packed, shares.sizes, link, divisor=divisor)
    _unpack(flat, shares.mine, mine)


def _pack(flat: Tensor, spans: Sequence[Span], length: int = 0) -> Tensor:
    """The spans of a buffer one after another, in memory of their own; zeros up to ``length``."""
    views = [flat[begin:end] for begin, end in spans]
    missing = length - sum(map(len, views))
    if missing > 0:
        views.append(flat.new_zeros(missing))
    return counted(torch.cat(views), "receive")


def _unpack(flat: Tensor, spans: Sequence[Span], packed: Tensor) -> None:
    if spans:
        views = [flat[begin:end] for begin, end in spans]
        lengths = [len(view) for view in views]
        torch._foreach_copy_(views, list(packed[: sum(lengths)].split(lengths)))
