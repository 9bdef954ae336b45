# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of buffers come from, and the ledger that counts them.

A :class:`Block` is a flat tensor whose memory comes and goes while the tensor, and every view of it
that autograd saved, stays. A *source* decides where the memory comes from:

- :class:`Caching`: the storage is resized, so torch's allocator recycles it. The default.
- :class:`TracePool`: the first step is traced, then every block gets a fixed home in one arena.
  Blocks that are never alive together share a home:

      step        | fwd 1 | fwd 2 | fwd 3 | bwd 3 | bwd 2 | bwd 1 |
      unit 1        #######                                 #######     home A
      unit 2        ...############                 ###########         home B
      unit 3                ...###################                      home A

  A block keeps one home for all its lives, because views saved in forward are read in backward.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class Ledger:
    """Bytes alive by kind (main, compute, grad, ...), now and at the highest."""

    def __init__(self) -> None:
        self.current: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.total = 0
        self.peak_total = 0
        self.watchers: list[Callable[[str, int], None]] = []
        self.counts_meta = False  # a dry run: count what blocks on the meta device would take

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


class Source(Protocol):
    """Gives and takes the memory of transient blocks."""

    def acquire(self, block: Block) -> None: ...

    def release(self, block: Block) -> None: ...

    def ready_for(self, block: Block) -> bool:
        """Whether ``acquire`` would succeed now without taking memory from another block."""

    def make_room(self, block: Block) -> None:
        """Before ``acquire``: have the holder of the block's memory give it up. Lanes wait for each
        other in that, so it is called on the compute lane."""


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
        # Whether autograd may hold views of this block; the owner of the graph answers.
        self.viewed: Callable[[], bool] = _never
        # Give the block up if nobody uses it yet; the owner decides.
        self.evict: Callable[[], object] = _never
        self._counted = _Counted(kind)
        self._counted.set(self._held)
        weakref.finalize(self, self._counted.set, 0).atexit = False

    @property
    def _held(self) -> int:
        """What the ledger counts while the block is live: the meta device holds no bytes."""
        return 0 if self.tensor.is_meta and not ledger.counts_meta else self.nbytes

    def release(self, source: Source) -> None:
        """Give the memory back. The contents are lost."""
        if self.live:
            self.live = False
            self._counted.set(0)  # first: the pool counts the same bytes as idle from here on
            source.release(self)

    def acquire(self, source: Source) -> None:
        """Have memory again. The contents are undefined."""
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
    """What the ledger counts for one block; apart from it, so that a dead block can be
    uncounted."""

    def __init__(self, kind: str) -> None:
        self.kind, self.nbytes = kind, 0

    def set(self, nbytes: int) -> None:
        ledger.add(self.kind, nbytes - self.nbytes)
        self.nbytes = nbytes


def counted(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """``tensor``, fresh memory of its own, in the ledger for as long as it is alive."""
    entry = _Counted(kind)
    entry.set(tensor.nbytes)
    weakref.finalize(tensor, entry.set, 0).atexit = False
    return tensor


def _never() -> bool:
    return False


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

    def ready_for(self, block: Block) -> bool:
        return True

    def make_room(self, block: Block) -> None: ...


@dataclass
class _Home:
    """A range of the arena that several blocks share, one at a time."""

    size: int
    offset: int = 0
    lives: list[tuple[int, float]] = field(default_factory=list)
    holder: Block | None = None


class TracePool:
    """Trace one step, plan homes by left-edge interval colouring, replay.

    ``step_done`` is called at the end of every backward; the pool plans at the first. From then on
    a block takes its home if it is free. Where it is not (another order, a validation pass in the
    middle), the block gets memory of its own from the caching allocator, counted in ``fallbacks``.
    """

    ALIGNMENT = 512  # bytes; what torch's CUDA allocator rounds to

    def __init__(self) -> None:
        self.fallbacks = 0
        self.planned = False
        self.arena_bytes: dict[str, int] = {}
        self._caching = Caching()
        self._clock = 0
        self._events: list[tuple[int, str, weakref.ref[Block]]] = []
        self._graph_kept = False  # by the last backward
        self._homes: weakref.WeakKeyDictionary[Block, _Home] = weakref.WeakKeyDictionary()
        self._arenas: dict[str, torch.UntypedStorage] = {}
        # What the arena holds beyond the blocks that live in it, which count themselves.
        self._idle = _Counted("pool_idle")
        weakref.finalize(self, self._idle.set, 0).atexit = False

    def acquire(self, block: Block) -> None:
        self._note("acquire", block)
        home = self._homes.get(block)
        if home is None:
            if self.planned:
                self._fall_back(block, "it was not alive in the traced step")
            self._caching.acquire(block)
            return
        at_home = self._at_home(block)
        if home.holder is None and (at_home or not block.viewed()):
            if not at_home:
                block.move(self._arenas[block.lane], home.offset)
            home.holder = block
            self._idle.set(self._idle.nbytes - block.nbytes)
        elif not at_home:
            self._fall_back(block, "its home is taken: units ran in another order than traced")
            self._caching.acquire(block)
        elif block.viewed():
            holder = home.holder.kind if home.holder is not None else "another block"
            raise RuntimeError(
                f"the trace pool gave a {block.kind} block of {block.nbytes} bytes and a live "
                f"{holder} "
                f"block the same home, and autograd still holds views of the first: the order of "
                f"units changed between forward and backward. Use memory='caching' for this model"
            )
        else:
            self._fall_back(block, "its home is taken: units ran in another order than traced")
            block.move_out()

    def release(self, block: Block) -> None:
        self._note("release", block)
        home = self._homes.get(block)
        if home is not None and home.holder is block:
            home.holder = None
            self._idle.set(self._idle.nbytes + block.nbytes)
        else:
            self._caching.release(block)

    def ready_for(self, block: Block) -> bool:
        home = self._homes.get(block)
        return home is None or home.holder is None or not block.viewed()

    def make_room(self, block: Block) -> None:
        home = self._homes.get(block)
        if block.live or home is None or home.holder is None:
            return
        if block.viewed() and self._at_home(block):
            home.holder.evict()  # gathered ahead, not in use yet: it is gathered again when it is

    def step_done(self, graph_kept: bool = False) -> None:
        """The end of a backward: plan, if there is a trace and no graph holds views of old memory.
        One that was kept (``retain_graph``) does, and what comes after it may be no whole step."""
        kept, self._graph_kept = graph_kept or self._graph_kept, graph_kept
        if kept and not self.planned:
            self._events = []
        if self.planned or not self._events:
            return
        lives = self._lives()
        if not lives:
            return
        if any(block.live or block.viewed() for block in lives):
            self._events = []  # the next step is traced anew
            self._fall_back(next(iter(lives)), "not everything rests after a step: no plan yet")
            return
        self._plan(lives)
        self.planned, self._events = True, []

    def reset(self) -> None:
        """Forget the plan and give the arena back; every block must rest. The next step is
        traced."""
        for block in list(self._homes):
            assert not block.live, "a trace pool is reset between steps only"
            if self._at_home(block):
                block.move_out()
                self._caching.release(block)
        self._homes.clear()
        self._arenas.clear()
        self._idle.set(0)
        self.arena_bytes, self.planned, self._events, self._clock = {}, False, [], 0

    def _note(self, event: str, block: Block) -> None:
        if not self.planned:
            self._clock += 1
            self._events.append((self._clock, event, weakref.ref(block)))

    def _fall_back(self, block: Block, reason: str) -> None:
        self.fallbacks += 1
        if self.fallbacks == 1:
            logger.warning(
                "trace pool: a %s block uses the caching allocator: %s", block.kind, reason
            )

    def _at_home(self, block: Block) -> bool:
        arena = self._arenas.get(block.lane)
        return (
            arena is not None and block.tensor.untyped_storage().data_ptr() == arena.data_ptr() != 0
        )

    def _lives(self) -> dict[Block, list[tuple[int, float]]]:
        lives: dict[Block, list[tuple[int, float]]] = {}
        for time, event, reference in self._events:
            block = reference()
            if block is None:
                continue
            if event == "acquire":
                lives.setdefault(block, []).append((time, float("inf")))
            elif block in lives:
                lives[block][-1] = (lives[block][-1][0], time)
        return lives

    def _plan(self, lives: dict[Block, list[tuple[int, float]]]) -> None:
        by_lane: dict[str, list[Block]] = {}
        for block in sorted(lives, key=lambda block: lives[block][0][0]):
            by_lane.setdefault(block.lane, []).append(block)
        for lane, blocks in by_lane.items():
            homes: list[_Home] = []
            for block in blocks:
                size = -(-block.nbytes // self.ALIGNMENT) * self.ALIGNMENT
                free = [home for home in homes if not _overlap(home.lives, lives[block])]
                # The home nearest in size: growing a small one costs as much as wasting a large
                # one.
                home = min(free, key=lambda home: abs(home.size - size), default=None)
                if home is None:
                    home = _Home(size)
                    homes.append(home)
                home.size = max(home.size, size)
                home.lives += lives[block]
                self._homes[block] = home
            offset = 0
            for home in homes:
                home.offset, offset = offset, offset + home.size
            self.arena_bytes[lane] = offset
            self._arenas[lane] = torch.UntypedStorage(offset, device=blocks[0].tensor.device)
            for block in blocks:
                block.move(self._arenas[lane], self._homes[block].offset)
        self._idle.set(sum(self.arena_bytes.values()))


def _overlap(first: list[tuple[int, float]], second: list[tuple[int, float]]) -> bool:
    return any(a[0] < b[1] and b[0] < a[1] for a in first for b in second)
