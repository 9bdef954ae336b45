# SPDX-License-Identifier: Apache-2.0
"""A happens-before checker: which work on one lane may run while another lane uses its memory.

    compute   | write main |            | read whole |
    gather                 ^ join |read main, write whole| mark ^ wait

Every lane has a vector clock: how much of each lane's work is known to be done before whatever is
issued to it next. ``mark``, ``wait`` and ``join`` carry clocks between lanes; a torch dispatch mode
sees which bytes each operation and collective reads and writes, and on which lane. Two accesses to
the same bytes, one of them a write, on two lanes, neither known to come before the other: a race.

Memory follows CUDA's caching allocator. What is freed goes back to the lane that allocated it, and
whatever is allocated there next may overwrite it: so that lane must have waited for all who used
it. ``host`` is a lane too: offloaded weights are written there, and only
``synchronize`` makes it wait.

Everything runs on the CPU in program order; only the order that the lanes *promise* is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core import streams
from shardwise.core.memory import Block
from shardwise.core.tensor import ShardedTensor

Clock = dict[str, int]
# What collectives do with their first arguments: their schemas do not say.
_COLLECTIVES = {
    "c10d::_allgather_base_": ("written", "read"),
    "c10d::allgather_into_tensor_coalesced_": ("written", "read"),
    "c10d::_reduce_scatter_base_": ("written", "read"),
    "c10d::allreduce_": ("written",),
    "c10d::broadcast_": ("written",),
    "c10d::alltoall_base_": ("written", "read"),
}
_NO_TENSORS = ("c10d::barrier",)
# These change where a tensor lies, not what lies there.
_METADATA = ("aten::set_", "aten::resize_")


@dataclass
class _Memory:
    """One allocation: who made it, and the last access of each lane to each of its ranges."""

    lane: str
    reference: StorageWeakRef
    name: str = ""
    on_host: bool = False
    accesses: dict[tuple[str, bool, int, int], tuple[int, str]] = field(default_factory=dict)


class Checker(TorchDispatchMode):
    """Records what happens while it is entered; ``races`` are the findings, in words."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.lane, self.phase = "compute", ""
        self.num_operations: dict[str, int] = {}
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._lanes = 0
        self._patches = ExitStack()

    def __enter__(self) -> Checker:
        checker = self

        class Lanes(RecordedLanes):
            def __init__(self, device: torch.device) -> None:
                super().__init__(device, checker=checker)

        def acquire(block: Block) -> None:
            if not block.live:
                resize[0](block)
                checker.allocated(block.tensor)

        def release(block: Block) -> None:
            if block.live:
                checker.freed(block.tensor)
                resize[1](block)

        resize = Block.acquire, Block.release
        for target in ("shard.flow", "optim.exchange"):
            self._patches.enter_context(patch(f"shardwise.{target}.Lanes", Lanes))
        self._patches.enter_context(patch.object(Block, "acquire", acquire))
        self._patches.enter_context(patch.object(Block, "release", release))
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self._patches.close()

    # ------------------------------------------------------------------ lanes

    def number_lanes(self) -> int:
        self._lanes += 1
        return self._lanes

    def clock(self, lane: str) -> Clock:
        return self._clocks.setdefault(lane, {})

    def learn(self, lane: str, other: Clock) -> None:
        """Order the next work of ``lane`` after all that ``other`` counts."""
        self.collect()  # who is freed before this does not profit from it
        mine = self.clock(lane)
        for name, count in other.items():
            mine[name] = max(mine.get(name, 0), count)

    def synchronize(self, event: Clock | None) -> None:
        """The host waits, for an event or for every lane; so does all that it issues after."""
        clocks = list(self._clocks.values()) if event is None else [event]
        for clock in [dict(one) for one in clocks]:
            self.learn("host", clock)

    # ------------------------------------------------------------------ memory

    def name(self, tensor: Tensor, name: str, *, on_host: bool = False) -> None:
        memory = self._of(tensor)
        if on_host and not memory.on_host:
            memory.accesses.clear()  # no lane allocates the host's memory
        memory.name, memory.on_host = name, on_host

    def allocated(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        before = self._memory.get(storage._cdata)
        memory = _Memory(self.lane, StorageWeakRef(storage))
        if before is not None:
            memory.name, memory.on_host = before.name, before.on_host
        self._memory[storage._cdata] = memory
        # Whoever had these bytes before used them on this lane, until now.
        self._note(memory, (0, storage.nbytes()), True, self.lane, "allocation")
        return memory

    def freed(self, tensor: Tensor) -> None:
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            self._free(memory)

    def collect(self) -> None:
        """Free what nobody holds any more."""
        gone = [key for key, memory in self._memory.items() if memory.reference.expired()]
        for key in gone:
            self._free(self._memory.pop(key))

    def _free(self, memory: _Memory) -> None:
        known = self.clock(memory.lane)
        for (lane, write, *_), (count, what) in memory.accesses.items():
            if not memory.on_host and lane != memory.lane and known.get(lane, 0) < count:
                self._report(memory, f"is given back to {memory.lane}", f"{what} on {lane}", write)
        memory.accesses.clear()

    def _of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:  # made before anybody watched
            memory = _Memory("compute", StorageWeakRef(storage))
            self._memory[storage._cdata] = memory
        return memory

    # ------------------------------------------------------------------ accesses

    def _note(
        self, memory: _Memory, span: tuple[int, int], write: bool, lane: str, what: str
    ) -> None:
        known = self.clock(lane)
        for (other, wrote, begin, end), (count, before) in memory.accesses.items():
            if other == lane or not (write or wrote) or begin >= span[1] or span[0] >= end:
                continue
            if known.get(other, 0) < count:
                does = "is written" if write else "is read"
                self._report(memory, f"{does} by {what} on {lane}", f"{before} on {other}", wrote)
        memory.accesses[lane, write, *span] = known.get(lane, 0), what

    def _report(self, memory: _Memory, now: str, before: str, wrote: bool) -> None:
        name = memory.name or f"memory of {memory.lane}"
        race = f"{name} {now} while {before} may still {'write' if wrote else 'read'} it"
        if self.phase:
            race = f"{self.phase}: {race}"
        if race not in self.races:
            self.races.append(race)

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, ShardedTensor) for kind in types):
            return NotImplemented  # it runs the same on its pieces, and comes back here
        if (
            func._schema.name == "c10d::alltoall_base_"
        ):  # the fake one minds a rank without messages
            nothing = torch.empty(0)
            result = func(nothing, nothing, args[2], [], [], *args[5:], **kwargs)
        else:
            result = func(*args, **kwargs)
        kinds = _kinds(func)
        if kinds is None:
            return result
        read, written = _accesses(func, kinds, args, kwargs)
        inputs = {t.untyped_storage()._cdata for t in _tensors([args, list(kwargs.values())])}
        fresh = [t for t in _tensors(result) if t.untyped_storage()._cdata not in inputs]
        used = [self._of(tensor) for tensor in read + written]
        on_host = bool(used) and all(memory.on_host for memory in used)
        lane = "host" if on_host else self.lane
        if used or fresh:
            clock, host = self.clock(lane), self.clock("host")
            if host and lane != "host":  # issued after whatever the host has done
                self.learn(lane, host)
            clock[lane] = clock.get(lane, 0) + 1
            self.num_operations[lane] = self.num_operations.get(lane, 0) + 1
        short = func._schema.name.partition("::")[2]
        for write, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                if (span := _span(tensor)) is not None:
                    self._note(self._of(tensor), span, write, lane, short)
        for tensor in fresh:
            memory = self.allocated(tensor)
            memory.on_host = on_host
            if on_host:
                memory.accesses.clear()
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for one in value for t in _tensors(one)] if isinstance(value, (list, tuple)) else []


@cache
def _kinds(func: Any) -> tuple[tuple[str, str], ...] | None:
    """For each argument its name, and whether it is read, written or viewed; None: nothing is."""
    name = func._schema.name
    if name in _METADATA:
        return None
    if name in _COLLECTIVES:
        names = [argument.name for argument in func._schema.arguments]
        return tuple(zip(names, _COLLECTIVES[name], strict=False))
    assert not name.startswith("c10d::") or name in _NO_TENSORS, f"what does {name} do?"
    kinds = []
    for argument in func._schema.arguments:
        alias = argument.alias_info
        kind = "read" if alias is None else "written" if alias.is_write else "viewed"
        kinds.append((argument.name, kind))
    viewed = any(kind == "viewed" for _, kind in kinds)
    return None if viewed and not any(kind == "written" for _, kind in kinds) else tuple(kinds)


def _accesses(
    func: Any, kinds: Sequence[tuple[str, str]], args: Any, kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    found: dict[str, list[Tensor]] = {"read": [], "written": [], "viewed": []}
    for position, (name, kind) in enumerate(kinds):
        value = args[position] if position < len(args) else kwargs.get(name)
        found[kind] += _tensors(value)
    return found["read"], found["written"]


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """The bytes of its storage that a tensor reaches."""
    if not tensor.numel():
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    begin, size = tensor.storage_offset(), tensor.element_size()
    return begin * size, (begin + last + 1) * size


class RecordedLanes(streams.Lanes):
    """Lanes of a device that is not there: what they promise is recorded."""

    def __init__(self, device: torch.device, *, checker: Checker) -> None:
        super().__init__(device)
        self.asynchronous, self._checker = True, checker
        self._number = checker.number_lanes()

    def _stream(self, lane: str) -> str:
        """Its name; the compute lane has none inside another, as on a device."""
        if lane != "compute":
            return f"{lane} {self._number}"
        assert self._checker.lane == "compute", "name the compute lane outside other lanes"
        return lane

    def on(self, lane: Any) -> AbstractContextManager[Any]:
        return self._switched(self._checker.lane if lane == "compute" else self._stream(lane))

    @contextmanager
    def _switched(self, lane: str) -> Iterator[None]:
        checker = self._checker
        before, checker.lane = checker.lane, lane
        try:
            yield
        finally:
            checker.lane = before

    def mark(self, lane: Any = "compute") -> Clock:
        return dict(self._checker.clock(self._stream(lane)))

    def wait(self, lane: Any, event: Clock | None) -> None:
        if event is not None:
            self._checker.learn(self._stream(lane), event)

    def join(self, lane: Any, other: Any) -> None:
        self._checker.learn(self._stream(lane), self.mark(other))

    def synchronize(self, event: Clock | None = None) -> None:
        self._checker.synchronize(event)


@contextmanager
def without(method: str, *lanes: str, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Negative control: forget one kind of promise, ``join("gather", "compute")`` for example."""
    original = getattr(RecordedLanes, method)

    def forgets(self: RecordedLanes, *args: Any) -> Any:
        if args[: len(lanes)] == lanes and when():
            return None
        return original(self, *args)

    with patch.object(RecordedLanes, method, forgets):
        yield
