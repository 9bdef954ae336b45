# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory, the sources that they come from, and the ledger that counts them.

A :class:`Block` is a flat tensor whose memory comes and goes while the tensor, and every view of it
that autograd saved, stays. A *source* decides where the memory comes from:

- :class:`Caching`: the storage is resized, so torch's allocator recycles it. The default.
- :class:`TracePool` (``memory="trace"``): the first step finds out how many gradients on their way
  to a reduction and MXFP8 planes are alive together, and how large these are. Their storages are
  kept, and later steps use them again. Blocks that are never alive together share a storage:

      backward    | unit 3 | unit 2 | unit 1 |
      gradients 3 ##########                        storage A
      gradients 2        ...#########               storage B
      gradients 1                ...##########      storage A

  It saves calls of the allocator and costs memory; docs/memory.md has the figures.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from sys import getrefcount
from typing import Any, Protocol

import torch
from torch.autograd.function import FunctionCtx


class Ledger:
    """Bytes alive by kind (main, compute, grad, ...), now and at the highest."""

    def __init__(self) -> None:
        self.current: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.total = 0
        self.peak_total = 0
        self.watchers: list[Callable[[str, int], None]] = []
        # Told of every tensor whose memory is counted here, before it is: others need not count it.
        self.adopted: Callable[[torch.Tensor], object] | None = None

    def add(self, kind: str, nbytes: int) -> None:
        """Count ``nbytes`` more (or, negative, less) of ``kind``."""
        now = self.current[kind] = self.current[kind] + nbytes
        self.total += nbytes
        if nbytes > 0:
            if now > self.peak[kind]:
                self.peak[kind] = now
            if self.total > self.peak_total:
                self.peak_total = self.total
        for watcher in self.watchers:
            watcher(kind, nbytes)

    def reset_peak(self) -> None:
        self.peak = defaultdict(int, self.current)
        self.peak_total = self.total

    def snapshot(self) -> dict[str, int]:
        """Bytes alive now, by kind, without the kinds that hold none."""
        return {kind: nbytes for kind, nbytes in sorted(self.current.items()) if nbytes}


ledger = Ledger()
_open_ledger = ledger  # where new blocks count themselves


@contextmanager
def separate_ledger() -> Iterator[Ledger]:
    """A ledger of its own for the blocks that are made while the context is open; blocks on the
    meta device, which hold no bytes, count there what they would hold. For plans."""
    global _open_ledger
    before, _open_ledger = _open_ledger, Ledger()
    try:
        yield _open_ledger
    finally:
        _open_ledger = before


class Source(Protocol):
    """Gives and takes the memory of transient blocks."""

    def acquire(self, block: Block) -> None: ...

    def release(self, block: Block) -> None: ...


class Block:
    """A flat tensor whose memory can be given back and had again.

    ``lane`` names the stream on which the owner allocates and frees it: storages are shared within
    one lane only. ``moved`` is called when the tensor got another storage, for views to follow.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        *,
        lane: str = "compute",
        pin: bool = False,
    ) -> None:
        self.kind, self.lane, self.numel = kind, lane, numel
        self.nbytes = numel * dtype.itemsize
        self.tensor = torch.empty(numel, dtype=dtype, device=device, pin_memory=pin)
        self.storage = self.tensor.untyped_storage()
        self._least, self._begun = 0, 0  # holders when others began to make views, and when
        self._saved = {0}  # numbers of further holders, all of them autograd's
        self.live = True
        self.moved: Callable[[], object] | None = None
        self._counted = _Counted(kind, self.tensor)
        self._counted.set(self._held)
        weakref.finalize(self, self._counted.set, 0).atexit = False

    @property
    def _held(self) -> int:
        """The bytes that the ledger counts while the block is live: the meta device holds none."""
        return 0 if self.tensor.is_meta and self._counted.ledger is ledger else self.nbytes

    def release(self, source: Source) -> None:
        """Give the memory back. The contents are lost."""
        if self.live:
            self.live = False
            self._counted.set(0)  # first: the pool counts the same bytes as idle from here on
            source.release(self)

    def acquire(self, source: Source) -> None:
        """Get memory again. The contents are undefined."""
        if not self.live:
            source.acquire(self)
            self.live = True
            self._counted.set(self._held)

    @property
    def holders(self) -> int:
        """The number of tensors that lie in the memory, its own among them."""
        return torch._C._storage_Use_Count(self.storage._cdata)  # type: ignore[attr-defined,no-any-return]

    def begin_views(self) -> None:
        """From here on others may make views; the owner's own are there."""
        self._least, self._begun = self._least or self.holders, gc.get_count()[2]

    def is_kept(self, ours: Callable[[], Iterable[Any]], for_good: bool) -> bool:
        """Whether somebody keeps a view that was made since ``begin_views``. ``for_good``: also
        autograd; else looked for only where the memory has another number of holders than when
        nobody but autograd kept one."""
        more = self.holders - self._least
        if for_good or more in self._saved:
            return for_good and more > 0
        viewed = self.is_viewed(ours(), self._begun)
        if not viewed:
            self._saved.add(more)
        return viewed

    def is_viewed(self, ours: Iterable[Any], since: int) -> bool:
        """Whether objects of Python (a list, a closure, a module) hold views of the memory, beside
        ``ours``; autograd, which reads its own in backward, does not count. ``since``: what
        ``gc.get_count()[2]`` was before there were any; where it has changed, not all are young."""
        ages = range(2 if gc.get_count()[2] == since else 3)
        found: list[Any] = [
            one
            for age in ages
            for one in gc.get_objects(age)
            if issubclass(type(one), (torch.Tensor, FunctionCtx))
        ]
        # What autograd keeps alone: its nodes, and tensors (DTensors have others inside).
        held = dict(zip(map(id, found), _count_references(found), strict=True))
        alone = [one for one in found if isinstance(one, FunctionCtx) or not held[id(one)]]
        attributes = gc.get_referents(*alone)
        attributes += gc.get_referents(*[one for one in attributes if type(one) is dict])
        inside = Counter(map(id, attributes))
        known, here = set(map(id, ours)), self.storage._cdata
        return any(
            held[id(one)] > inside[id(one)] and torch._C._storage_address(one) == here  # type: ignore[attr-defined]
            for one in found
            if isinstance(one, torch.Tensor) and id(one) not in known and torch._C._has_storage(one)  # type: ignore[attr-defined]
        )

    def leave(self) -> None:
        """Leave the memory to whoever holds views of it, and go on with another."""
        self.move(torch.UntypedStorage(self.nbytes, device=self.tensor.device))

    def move(self, storage: torch.UntypedStorage) -> None:
        """Put the tensor into ``storage``, which has memory: views cannot be made of none. It is no
        view of it for autograd, so its version counter stays its own."""
        with torch.no_grad():
            self.tensor.set_(storage, 0, (self.numel,), (1,))
        self.storage, self._least, self._saved = storage, 0, {0}
        if self.moved is not None:
            self.moved()


def _count_references(found: list[Any]) -> list[int]:
    """How many references objects of Python hold to each, beside this list."""
    alike, *counts = [getrefcount(one) for one in (object(), *found)]
    shared = [isinstance(one, torch.Tensor) and one._use_count() > 1 for one in found]  # type: ignore[attr-defined]
    return [count - alike - 1 - torchs for count, torchs in zip(counts, shared, strict=True)]


class _Counted:
    """The ledger's entry of one block; an object of its own, so that a dead block can be
    uncounted."""

    def __init__(self, kind: str, tensor: torch.Tensor | None = None) -> None:
        self.kind, self.nbytes, self.ledger = kind, 0, _open_ledger
        if tensor is not None and self.ledger.adopted is not None:
            self.ledger.adopted(tensor)

    def set(self, nbytes: int) -> None:
        self.ledger.add(self.kind, nbytes - self.nbytes)
        self.nbytes = nbytes


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method that does not keep its object alive; None comes back once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*rest: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*first, *rest)

    return call


def counted(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """``tensor``, fresh memory of its own, in the ledger for as long as it is alive."""
    entry = _Counted(kind, tensor)
    entry.set(tensor.nbytes)
    weakref.finalize(tensor, entry.set, 0).atexit = False
    return tensor


@contextmanager
def held(nbytes: int, kind: str) -> Iterator[None]:
    """Count bytes that what runs inside takes for a moment, in memory that is not seen here."""
    entry = _Counted(kind)
    entry.set(nbytes)
    try:
        yield
    finally:
        entry.set(0)


class Caching:
    """Resize the storage: torch's caching allocator recycles the bytes on the current stream.

    One that numpy shows cannot be resized, ever after. It stays with whoever looks at it (numpy,
    and what autograd saved), and the block goes on with another.
    """

    def acquire(self, block: Block) -> None:
        block.storage.resize_(block.nbytes)

    def release(self, block: Block) -> None:
        if not block.storage.resizable():
            block.leave()
        block.storage.resize_(0)


CACHING = Caching()


class TracePool:
    """Keep the storages of released blocks for the next blocks of their lane.

    A block takes the free storage that is nearest in size, its own where several are, and enlarges
    it if it must: so in steps that are alike each block has the place that it had in the last one.
    Autograd must hold no view of a block, because blocks move: whole bf16 weights never come here.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, torch.device], list[torch.UntypedStorage]] = defaultdict(list)
        # What the storages hold beyond the blocks that live in them, which count themselves.
        self._idle = _Counted("pool_idle")
        weakref.finalize(self, self._idle.set, 0).atexit = False

    def acquire(self, block: Block) -> None:
        free, own = self._free[block.lane, block.tensor.device], block.storage

        def distance(number: int) -> tuple[int, bool]:
            storage = free[number]
            return abs(storage.nbytes() - block.nbytes), storage._cdata != own._cdata

        nearest = min(range(len(free)), key=distance, default=None)
        storage = torch.UntypedStorage(0, device=own.device)
        if nearest is not None:
            storage = free.pop(nearest)
        idle = storage.nbytes()
        if idle < block.nbytes:
            storage.resize_(0)  # first, so that no contents are copied
            storage.resize_(block.nbytes)
        self._idle.set(self._idle.nbytes - min(idle, block.nbytes))
        if storage._cdata != own._cdata:
            block.move(storage)

    def release(self, block: Block) -> None:
        storage, idle = block.storage, block.nbytes
        if storage.resizable():
            self._free[block.lane, block.tensor.device].append(storage)
        else:  # numpy shows it: it stays with whoever looks at it
            idle -= storage.nbytes()
        self._idle.set(self._idle.nbytes + idle)
