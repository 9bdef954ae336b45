# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory, the sources that they come from, and the ledger that counts them.

A :class:`Block` is a flat tensor whose memory comes and goes while the tensor, and every view of it
that autograd saved, stays. A *source* decides where the memory comes from:

- :class:`Caching`: the storage is resized, so torch's allocator recycles it. The default.
- :class:`TracePool` (``memory="trace"``): the first step is traced, then gradients on their way to
  a reduction and MXFP8 planes get fixed homes in one arena. Blocks that are never alive together
  share a home:

      backward    | unit 3 | unit 2 | unit 1 |
      gradients 3 ##########                        home A
      gradients 2        ...#########               home B
      gradients 1                ...##########      home A

  It saves calls of the allocator and costs memory; docs/memory.md has the figures.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


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

    ``lane`` names the stream on which the owner allocates and frees it: homes are shared within one
    lane only. ``moved`` is called when the tensor got another storage, so that views can follow.
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
        self.live = True
        self.moved: Callable[[], None] | None = None
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

    def move(self, storage: torch.UntypedStorage, offset: int) -> None:
        """Put the tensor into ``storage`` at byte ``offset``. It is no view of it for autograd, so
        its version counter stays its own."""
        with torch.no_grad():
            self.tensor.set_(storage, offset // self.tensor.element_size(), (self.numel,), (1,))
        if self.moved is not None:
            self.moved()

    def move_out(self) -> None:
        """Put the tensor into a storage of its own, with memory: views cannot be made of none."""
        self.move(torch.UntypedStorage(self.nbytes, device=self.tensor.device), 0)


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
        block.tensor.untyped_storage().resize_(block.nbytes)

    def release(self, block: Block) -> None:
        if not block.tensor.untyped_storage().resizable():
            block.move_out()
        block.tensor.untyped_storage().resize_(0)


CACHING = Caching()


@dataclass
class _Home:
    """A range of an arena that several blocks share, one at a time."""

    size: int
    offset: int = 0
    lives: list[tuple[int, float]] = field(default_factory=list)
    holder: Block | None = None


class TracePool:
    """Trace one step, then keep the blocks of later steps in one arena for each lane.

    ``step_done`` is called at the end of every backward, and the first one plans: blocks whose
    lives do not overlap share a home. From then on a block takes its home if it is free. Where it
    is not (another order of units, an evaluation in the middle), the caching allocator serves it,
    counted in ``fallbacks``. Autograd must hold no view of a block, because blocks move: whole bf16
    weights never come here.
    """

    ALIGNMENT = 512  # bytes; what torch's CUDA allocator rounds to

    def __init__(self) -> None:
        self.fallbacks = 0
        self.planned = False
        self.arena_bytes: dict[str, int] = {}
        self._events: list[tuple[bool, weakref.ref[Block]]] = []  # whether acquired, or released
        self._homes: weakref.WeakKeyDictionary[Block, _Home] = weakref.WeakKeyDictionary()
        self._arenas: dict[str, torch.UntypedStorage] = {}
        # What the arenas hold beyond the blocks that live in them, which count themselves.
        self._idle = _Counted("pool_idle")
        weakref.finalize(self, self._idle.set, 0).atexit = False

    def acquire(self, block: Block) -> None:
        home = self._homes.get(block)
        if home is not None and home.holder is None:
            if not self._at_home(block):
                block.move(self._arenas[block.lane], home.offset)
            home.holder = block
            self._idle.set(self._idle.nbytes - block.nbytes)
            return
        if self.planned:
            self.fallbacks += 1
        else:
            self._events.append((True, weakref.ref(block)))
        if self._at_home(block):
            block.move_out()
        else:
            CACHING.acquire(block)

    def release(self, block: Block) -> None:
        home = self._homes.get(block)
        if home is not None and home.holder is block:
            home.holder = None
            self._idle.set(self._idle.nbytes + block.nbytes)
            return
        if not self.planned:
            self._events.append((False, weakref.ref(block)))
        CACHING.release(block)

    def step_done(self) -> None:
        """The end of a backward: plan, if a step has been traced."""
        if self.planned or not self._events:
            return
        lives: dict[Block, list[tuple[int, float]]] = {}
        for time, (acquired, reference) in enumerate(self._events):
            block = reference()
            if block is not None and acquired:
                lives.setdefault(block, []).append((time, float("inf")))
            elif block is not None and block in lives:
                lives[block][-1] = (lives[block][-1][0], time)
        self._plan({block: spans for block, spans in lives.items() if not block.live})
        self.planned, self._events = True, []

    def _at_home(self, block: Block) -> bool:
        arena = self._arenas.get(block.lane)
        return arena is not None and block.tensor.untyped_storage()._cdata == arena._cdata

    def _plan(self, lives: dict[Block, list[tuple[int, float]]]) -> None:
        """Left-edge interval colouring, lane by lane."""
        homes: dict[str, list[_Home]] = {}
        for block, spans in sorted(lives.items(), key=lambda life: life[1][0]):
            size = -(-block.nbytes // self.ALIGNMENT) * self.ALIGNMENT
            mine = homes.setdefault(block.lane, [])
            free = [home for home in mine if not _overlap(home.lives, spans)]
            # The home nearest in size: growing a small one costs as much as wasting a large one.
            home = min(free, key=lambda home: abs(home.size - size), default=None)
            if home is None:
                mine.append(home := _Home(size))
            home.size = max(home.size, size)
            home.lives += spans
            self._homes[block] = home
        devices = {block.lane: block.tensor.device for block in lives}
        for lane, mine in homes.items():
            offset = 0
            for home in mine:
                home.offset, offset = offset, offset + home.size
            self.arena_bytes[lane] = offset
            self._arenas[lane] = torch.UntypedStorage(offset, device=devices[lane])
        self._idle.set(sum(self.arena_bytes.values()))


def _overlap(first: list[tuple[int, float]], second: list[tuple[int, float]]) -> bool:
    return any(a[0] < b[1] and b[0] < a[1] for a in first for b in second)
