# SPDX-License-Identifier: Apache-2.0
"""MainGrad: the reduced gradients of one group, as the optimizer sees them.

The buffer is fp32 and holds this rank's shard, like the main weight. ``.grad`` of each parameter at
rest is a view of it.

If the user has dropped a gradient (``zero_grad``) and still holds it, or shows it to numpy, it
keeps its values, as in plain torch: the memory is left to the holder, and the next gradients get
other memory.

Replicas may divide the gradients between themselves. Then ``reduce_shares`` brings some spans to
all replicas, and other spans to one replica each:

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
from shardwise.memory import CACHING, counted
from shardwise.shard.whole_parameter import Whole
from shardwise.tensor import GRAD, Cut, ShardedTensor

read_grad = GRAD.__get__
# Attributes of parameters at rest (.grad and the like) are read many times a step. This context
# avoids __torch_function__, which is slow, and which some torch versions give our DTensors.
plain_attributes = torch._C.DisableTorchFunctionSubclass


class MainGrad:
    """The gradients beside one main weight."""

    def __init__(self, weight: Buffer, sharded: Sequence[nn.Parameter], *, pin: bool) -> None:
        self._weight, self._sharded, self._pin = weight, sharded, pin
        self.buffer: Buffer | None = None  # made when first used, so frozen groups have none
        self._shown: list[ShardedTensor] = []  # what ``.grad`` of each parameter shows
        self._locals: list[Tensor] = []  # the local tensors of those
        self._views: list[Tensor] = []  # the pieces of the buffer
        self.divisions: dict[int, Division] | None = None  # for which ``_shown`` was made
        self._references = 0  # to the memory and to ``_shown``, while no user holds one
        self._shares: dict[int, Shares] = {}  # by axis

    @property
    def fresh(self) -> bool:
        """Whether no parameter shows a gradient, so that the buffer may be overwritten."""
        with plain_attributes():
            return all(map(is_, map(read_grad, self._sharded), repeat(None)))

    def ready(self, unused: bool = False) -> Buffer:
        """The buffer, with memory, which its views need. ``unused``: the buffer will be
        overwritten, so it must not be one that a user still holds."""
        if unused:
            self._leave_to_holders()
        weight = self._weight
        if self.buffer is None:
            device, where = weight.flat.device, (weight.layout, weight.ranks, weight.placements)
            pin = self._pin and device.type == "cpu"
            self.buffer = Buffer(*where, weight.dtype, device, "grad", pin=pin)
        self.buffer.block.acquire(CACHING)
        if self.divisions is not weight.version.divisions:
            self.divisions, self._shares = weight.version.divisions, {}
            self._shown = [self._show(*each) for each in enumerate(self.buffer.views())]
            self._locals = [grad._local_tensor for grad in self._shown]
            self._references = self._count_references(self.buffer)
        return self.buffer

    def _show(self, index: int, local: Tensor) -> ShardedTensor:
        """The gradient of one parameter; only this rank's range, if replicas divide it."""
        assert self.buffer is not None
        cut: Cut = self._sharded[index].cut  # type: ignore[attr-defined]
        division = self._weight.version.divisions.get(index)
        if division is not None:
            cut, whole = cut.divided(division), cut
            local = cut.within(whole, local)
        return ShardedTensor(local, cut, version=self.buffer.version)

    def take(self, grads: Sequence[Tensor]) -> None:
        """Take the gradients to publish next, each in separate memory. Publishing leaves the memory
        to the parameters, so what a user drops is freed at once."""
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
        """The elements that the reduction over an axis brings to each replica."""
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
        """Leave the memory to a user who holds it."""
        main = self.buffer
        if main is None or not main.block.live:
            return
        held = self._count_references(main) > self._references
        if held or not main.flat.untyped_storage().resizable():  # numpy showed it once
            self._forget()

    def _forget(self) -> None:
        """Leave the memory to its holders. The next gradients get other memory."""
        self.buffer, self.divisions = None, None
        self._shown, self._locals, self._views = [], [], []

    def _count_references(self, main: Buffer) -> int:
        """The number of references to the memory and to the tensors that show it, without those of
        ``_views``."""
        count = _count_tensors(main) - len(self._views) + sum(_count_references(self._views))
        return count + sum(map(getrefcount, self._shown)) + sum(map(getrefcount, self._locals))

    def repaired(self) -> Buffer:
        """The buffer with the values of ``.grad``, which the user may have dropped or replaced.

        A replaced gradient may lie in this buffer (the user has exchanged two gradients), so the
        values are brought to other memory.
        """
        with plain_attributes():
            grads = list(map(read_grad, self._sharded))
        shown: list[Any] = list(self._shown) or [None] * len(grads)
        pairs = zip(grads, shown, strict=True)
        if any(grad is not None and grad is not own for grad, own in pairs):
            self._forget()
        main = self.ready()
        for parameter, grad, own in zip(self._sharded, grads, self._shown, strict=True):
            if grad is None:
                own.to_local().zero_()
            elif grad is not own:
                _bring(Tensor.copy_, own, grad)
                GRAD.__set__(parameter, own)  # autograd adds to ``own`` from now on
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
        """Show the gradients as ``.grad`` of the parameters at rest. Returns the parameters with
        hooks to call. ``zeros``: parameters without a gradient show zeros.

        If a loss reads parameters at rest (a penalty on weights), autograd may have brought them
        gradients since the reduction began. These are added."""
        hooked, brought = [], list(brought)
        with plain_attributes():
            grads = list(map(read_grad, self._sharded))
        for index, (grad, own) in enumerate(zip(grads, self._shown, strict=True)):
            if grad is not None and grad is not own:
                _bring(Tensor.add_, own, grad)
                brought[index] = True
        with plain_attributes():
            for index, (parameter, leaf) in enumerate(zip(self._sharded, whole, strict=True)):
                # A gradient that waited is shown, also if the parameter was frozen since then, as
                # in plain torch.
                came = brought[index] or (leaf.requires_grad and zeros)
                # Without a gradient in this step, the sum of the steps before stays, if any.
                if came or (leaf.requires_grad and parameter.grad is not None):
                    GRAD.__set__(parameter, self._shown[index])
                if came and parameter._post_accumulate_grad_hooks:
                    hooked.append(parameter)
        if self.buffer is None:
            self._forget()
        return hooked


def _count_tensors(buffer: Buffer) -> int:
    """The number of tensors that use the memory of a buffer."""
    return torch._C._storage_Use_Count(buffer.block.storage._cdata)  # type: ignore[attr-defined,no-any-return]


def _count_references(tensors: Sequence[Any]) -> list[int]:
    """The number of references that Python objects hold to each tensor, beside this list."""
    unreferenced, *counts = [getrefcount(x) for x in (object(), *tensors)]
    # torch holds a reference to each Python object whose tensor C++ uses, too.
    by_torch = [x._use_count() > 1 for x in tensors]
    return [n - unreferenced - 1 - held for n, held in zip(counts, by_torch, strict=True)]


def _bring(write: Callable[[Tensor, Tensor], Any], own: ShardedTensor, grad: Tensor) -> None:
    """Copy or add (``write``) a gradient of the user or of autograd to this rank's piece."""
    if isinstance(grad, ShardedTensor):
        write(own.to_local(), own.cut.within(grad.cut, grad.to_local()))
    else:  # a whole gradient, of which this rank holds a piece
        write(own, grad)


def reduce_shares(
    flat: Tensor, shares: Shares, link: comm.Axis, divisor: float | None
) -> Iterator[comm.Pending]:
    """Reduce in place: shared spans to every rank, each divided span to one rank. On other ranks
    the contents of a divided span are undefined afterwards."""
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
    """A copy of the spans of a buffer, one after another, with zeros up to ``length``."""
    views = [flat[begin:end] for begin, end in spans]
    missing = length - sum(map(len, views))
    if missing > 0:
        views.append(flat.new_zeros(missing))
    return counted(torch.cat(views), "receive")


def _unpack(flat: Tensor, spans: Sequence[Span], packed: Tensor) -> None:
    """Copy packed spans back to their places in a buffer."""
    if spans:
        views = [flat[begin:end] for begin, end in spans]
        lengths = [len(view) for view in views]
        torch._foreach_copy_(views, list(packed[: sum(lengths)].split(lengths)))
