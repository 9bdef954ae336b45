# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory that come and go, and the ledger that counts them.

A :class:`Block` is a flat tensor whose memory is released and acquired again, while the tensor and
every view of it that autograd saved stay. Its storage is resized, so torch's allocator recycles the
bytes.

A :class:`TracePool` (``memory="trace"``) lends memory for packed gradients. The first step shows
how many are alive together, and how large they are; later steps use their storages again:

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
    """A flat tensor whose memory can be released and acquired again, on one lane."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        *,
        pin: bool = False,
    ) -> None:
        self.nbytes = numel * dtype.itemsize
        self.tensor = torch.empty(numel, dtype=dtype, device=device, pin_memory=pin)
        self.storage = self.tensor.untyped_storage()
        self.live = True
        self._counted = _Counted(kind, self.tensor)
        # On the meta device a block has bytes only in the ledger of a plan.
        self._held = 0 if device.type == "meta" and _open_ledger is ledger else self.nbytes
        self._counted.set(self._held)

    def release(self) -> None:
        """Release the memory. The contents are lost."""
        if self.live:
            self.live = False
            self.storage.resize_(0)
            self._counted.set(0)

    def acquire(self) -> None:
        """Acquire memory again. The contents are undefined."""
        if not self.live:
            self.storage.resize_(self.nbytes)
            self.live = True
            self._counted.set(self._held)


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
    tensor.untyped_storage()._shardwise_entry = entry  # type: ignore[attr-defined]
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


class TracePool:
    """Lends storages, and keeps those that come back. A taker gets the free storage that is nearest
    in size, enlarged if necessary."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.UntypedStorage]] = defaultdict(list)
        self._idle = _Counted("pool_idle")

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
        """A flat tensor with undefined contents, counted as ``kind``."""
        free, nbytes = self._free[device], numel * dtype.itemsize
        at = min(range(len(free)), key=lambda at: abs(free[at].nbytes() - nbytes), default=None)
        storage = torch.UntypedStorage(0, device=device) if at is None else free.pop(at)
        self._idle.set(self._idle.nbytes - storage.nbytes())
        if storage.nbytes() < nbytes:
            storage.resize_(0)  # first, so that no contents are copied
            storage.resize_(nbytes)
        made: Any = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))
        made.lent = _Counted(kind, made)
        made.lent.set(storage.nbytes())
        return made  # type: ignore[no-any-return]

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what was lent; other tensors are left alone."""
        if (entry := vars(tensor).pop("lent", None)) is not None:
            entry.set(0)  # first, because the pool counts the same bytes as idle
            storage = tensor.untyped_storage()
            self._idle.set(self._idle.nbytes + storage.nbytes())
            self._free[tensor.device].append(storage)
