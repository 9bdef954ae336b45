# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory, the sources that they come from, and the ledger that counts them.

A :class:`Block` is a flat tensor whose memory comes and goes, while the tensor and every view of it
that autograd saved stay. A *source* decides where the memory comes from:

- :class:`Caching`: the storage is resized, so torch's allocator recycles it. The default.
- :class:`TracePool` (``memory="trace"``): the first step finds out how many packed gradients and
  MXFP8 planes are alive together, and how large they are. Their storages are kept and used again in
  later steps. Blocks that are never alive together share a storage:

      backward    | unit 3 | unit 2 | unit 1 |
      gradients 3 ##########                        storage A
      gradients 2        ...#########               storage B
      gradients 1                ...##########      storage A

  This saves calls of the allocator and costs memory; docs/memory.md has the figures.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shardwise.core.uncompiled import skip_frames


class Ledger:
    """Bytes alive by kind (main, compute, grad, ...), now and at the peak."""

    def __init__(self) -> None:
        self.current: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.total = 0
        self.peak_total = 0
        self.watchers: list[Callable[[str, int], None]] = []
        # Called with every tensor before its memory is counted: the caller need not count it too.
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
    """A separate ledger for the blocks that are made while the context is open. Blocks on the meta
    device count there the bytes that they would hold. For plans."""
    global _open_ledger
    before, _open_ledger = _open_ledger, Ledger()
    try:
        yield _open_ledger
    finally:
        _open_ledger = before


class Block:
    """A flat tensor whose memory can be released and acquired again.

    ``lane`` names the stream on which the owner allocates and frees the memory: storages are shared
    within one lane only.
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
        self.live = True
        self._counted = _Counted(kind, self.tensor)
        self._counted.set(self._held)

    @property
    def _held(self) -> int:
        """The bytes that the ledger counts while the block is live; on the meta device none."""
        return 0 if self.tensor.is_meta and self._counted.ledger is ledger else self.nbytes

    def release(self, source: Caching | TracePool) -> None:
        """Release the memory. The contents are lost."""
        if self.live:
            self.live = False
            self._counted.set(0)  # first, because the pool counts the same bytes as idle
            source.release(self)

    def acquire(self, source: Caching | TracePool) -> None:
        """Acquire memory again. The contents are undefined."""
        if not self.live:
            source.acquire(self)
            self.live = True
            self._counted.set(self._held)

    def move(self, storage: torch.UntypedStorage) -> None:
        """Put the tensor into ``storage``, which must have memory, because views are made. For
        autograd the tensor is no view of it, so it keeps its own version counter."""
        with torch.no_grad():
            self.tensor.set_(storage, 0, (self.numel,), (1,))
        self.storage = storage


class _Counted:
    """The entry of one block in the ledger; it counts nothing after the block is deleted."""

    def __init__(self, kind: str, tensor: torch.Tensor | None = None) -> None:
        self.kind, self.nbytes, self.ledger = kind, 0, _open_ledger
        if tensor is not None and self.ledger.adopted is not None:
            self.ledger.adopted(tensor)

    def set(self, nbytes: int) -> None:
        self.ledger.add(self.kind, nbytes - self.nbytes)
        self.nbytes = nbytes

    def __del__(self) -> None:
        self.set(0)


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method that does not keep its object alive. After the object is deleted, it returns
    None. torch.compile does not trace the call: autograd makes it inside a compiled step."""
    return partial(_call_weakly, weakref.WeakMethod(method), *first)


def _call_weakly(reference: weakref.WeakMethod[Any], *args: Any) -> Any:
    bound = reference()
    return None if bound is None else bound(*args)


skip_frames(_call_weakly)


def counted(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """``tensor``, which has new memory, counted in the ledger as long as the memory is alive."""
    entry = _Counted(kind, tensor)
    entry.set(tensor.nbytes)
    weakref.finalize(tensor.untyped_storage(), entry.set, 0).atexit = False
    return tensor


@contextmanager
def held(nbytes: int, kind: str) -> Iterator[None]:
    """Count bytes that code inside the context takes temporarily, in memory not seen here."""
    entry = _Counted(kind)
    entry.set(nbytes)
    try:
        yield
    finally:
        entry.set(0)


class Caching:
    """Resize the storage: torch's caching allocator recycles the bytes on the current stream."""

    def acquire(self, block: Block) -> None:
        block.storage.resize_(block.nbytes)

    def release(self, block: Block) -> None:
        block.storage.resize_(0)


CACHING = Caching()


class TracePool:
    """Keep the storages of released blocks for the next blocks of their lane.

    A block takes the free storage that is nearest in size (among equals, the one that it had
    before) and enlarges it if necessary. So in steps that are alike, each block gets the storage of
    the last step again. Autograd must hold no view of a block, because blocks move: whole bf16
    weights never use this source.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, torch.device], list[torch.UntypedStorage]] = defaultdict(list)
        # The bytes of the storages beyond those of the live blocks in them, which count themselves.
        self._idle = _Counted("pool_idle")

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
        self._free[block.lane, block.tensor.device].append(block.storage)
        self._idle.set(self._idle.nbytes + block.nbytes)
