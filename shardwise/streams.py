# SPDX-License-Identifier: Apache-2.0
"""Lanes of work on a device: the only file that names CUDA streams, events and NVTX ranges.

    compute  | block 1 ....... | block 2 ....... | block 3 ....... |
    gather   | weights 2 | ... | weights 3 | ... | weights 4 | ... |
    reduce   |           | ... | grads 1   | ... | grads 2   | ... |
    outer    |                 |           | grads 1 over replicas |

``compute`` is whatever stream the caller runs on. A block of memory is allocated and freed on one
lane, after that lane has waited for every other lane that read it: that is what makes
``record_stream`` unnecessary and the peak the same on every run. On a CPU there is one lane and
every method is a no-op, so the code above is the same for both.

Whoever wants to draw that picture of a real step is a :class:`Watcher`; see ``report/trace.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch

LaneName = Literal["compute", "gather", "reduce", "outer"]
_NOWHERE: AbstractContextManager[None] = nullcontext()


class Lanes:
    """The streams of one device. ``unify`` puts all communication on one stream: it overlaps less
    and saves one unit of peak memory, because a gather can then reuse what a reduction freed."""

    def __init__(self, device: torch.device, *, unify: bool = False) -> None:
        self.device = device
        self.unify = unify
        # Whether work runs behind the host, which issues all of it; a plan pretends that it does.
        self.asynchronous = device.type == "cuda"
        self._streams: dict[str, Any] = {}
        self._joins: dict[tuple[str, str], Any] = {}
        if self.asynchronous:
            self._index = torch.cuda.current_device() if device.index is None else device.index
            gather = torch.cuda.Stream(device, priority=-1)
            names = ("gather", "reduce", "outer")
            self._streams = {
                name: gather
                if unify or name == "gather"
                else torch.cuda.Stream(device, priority=-1)
                for name in names
            }
        self._own = {stream.stream_id for stream in self._streams.values()}

    def on(self, lane: LaneName) -> AbstractContextManager[Any]:
        """Run what follows on ``lane``: kernels, collectives and allocations."""
        if not self._streams or lane == "compute":
            return _NOWHERE
        stream = _OnStream(self._streams[lane], self._index)
        return stream if _watcher is None else _watched(partial(_watcher.lane, lane), stream)

    def mark(self, lane: LaneName = "compute") -> Any:
        """An event that is reached when all work issued to ``lane`` so far is done."""
        return self._stream(lane).record_event() if self._streams else None

    def wait(self, lane: LaneName, event: Any) -> None:
        """Work issued to ``lane`` from now on starts after ``event``."""
        if event is not None and self._streams:
            stream = self._stream(lane)
            with stalling("another lane") if lane == "compute" else _NOWHERE:
                stream.wait_event(event)

    def join(self, lane: LaneName, other: LaneName) -> None:
        """``lane`` waits for all that was issued to ``other`` so far."""
        if not self._streams:
            return
        waiting, awaited = self._stream(lane), self._stream(other)
        if waiting is awaited:
            return
        # One event for each pair, recorded anew: a wait keeps to the record that it saw.
        event = self._joins.get((lane, other))
        if event is None:
            event = self._joins[lane, other] = torch.cuda.Event()
        event.record(awaited)
        waiting.wait_event(event)

    def leave(self, tensor: torch.Tensor) -> None:
        """Others go on to read memory of another lane on the compute lane, and free it then."""
        if self._streams:
            tensor.record_stream(self._stream("compute"))

    def synchronize(self, event: Any = None) -> None:
        """The host waits for ``event``, or for every lane: before it reads offloaded gradients, or
        writes offloaded weights."""
        if self._streams and event is None:
            torch.cuda.synchronize(self.device)
        elif self._streams:
            event.synchronize()

    def refuse_capture(self, what: str) -> None:
        """Raise where the caller's stream is being captured into a CUDA graph."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{what} runs while a CUDA graph is captured: whether weights are gathered and "
                f"gradients reduced is decided by the host in each step, and a replay would repeat "
                f"what was decided for the capture. Call wrapped modules outside of the capture"
            )

    def _stream(self, lane: LaneName) -> Any:
        if lane != "compute":
            return self._streams[lane]
        current = torch.cuda.current_stream(self._index)
        # Inside ``on(...)`` the caller's own stream cannot be told: join before, not inside.
        assert current.stream_id not in self._own, "name the compute lane outside other lanes"
        return current


class _OnStream:
    """Does what ``torch.cuda.stream(stream)`` does in a third of its host time: 3.6 instead of 10
    microseconds, several times in each unit."""

    __slots__ = ("_before", "_device", "_index", "_stream")

    def __init__(self, stream: Any, index: int) -> None:
        self._stream, self._index = stream, index

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = torch.cuda.current_stream(self._index)
        torch.cuda.set_stream(self._stream)  # makes its device the current one

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._index:
            torch.cuda.set_device(self._device)


def read_later(tensor: torch.Tensor) -> Callable[[], list[float]]:
    """A function that returns the values that ``tensor`` has now, and waits for them if it must."""
    if tensor.device.type != "cuda":
        values = tensor.tolist()
        return lambda: values
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()  # type: ignore[no-untyped-call]

    def read() -> list[float]:
        arrived.synchronize()  # type: ignore[no-untyped-call]
        return host.tolist()

    return read


def annotate(unit: str, work: str) -> AbstractContextManager[Any]:
    """A profiler label and an NVTX range around a unit's work; nothing unless profiling."""
    if _watcher is not None:
        _watcher.begins(f"{unit}: {work}")
        return _watched(partial(_watcher.phase, f"{unit}: {work}"))
    profiling = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return _labelled(f"{unit}: {work}") if profiling else _NOWHERE


@contextmanager
def _labelled(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()


# ------------------------------------------------------------------------------ being watched


class Watcher(Protocol):
    """Someone who notes when things happen. A mark is a moment on the lane that is current."""

    def mark(self) -> Any: ...

    def begins(self, name: str) -> None:
        """A phase of that label begins; :meth:`phase` tells when it is over."""

    def phase(self, name: str, begin: Any, end: Any) -> None:
        """A piece of the library's own work, by its label."""

    def lane(self, lane: str, begin: Any, end: Any) -> None:
        """Work on a lane beside compute."""

    def stall(self, reason: str, begin: Any, end: Any) -> None:
        """The compute lane waited."""

    def flight(self, operation: str, axis: str, nbytes: int) -> Callable[[], None]:
        """Messages are under way; what is returned is called when the last has arrived."""


_watcher: Watcher | None = None


def watcher() -> Watcher | None:
    return _watcher


@contextmanager
def watch(who: Watcher) -> Iterator[None]:
    """Tell ``who`` what happens while the context is open; one at a time."""
    global _watcher
    if _watcher is not None:
        raise RuntimeError("a step is being recorded already: end that recording first")
    _watcher = who
    try:
        yield
    finally:
        _watcher = None


def stalling(reason: str) -> AbstractContextManager[Any]:
    """A context around whatever makes the compute lane wait."""
    return _NOWHERE if _watcher is None else _watched(partial(_watcher.stall, reason))


@contextmanager
def _watched(
    tell: Callable[[Any, Any], None], around: AbstractContextManager[Any] = _NOWHERE
) -> Iterator[None]:
    """Tell the watcher when what runs inside began and ended, by marks on the lane ``around``."""
    who = _watcher
    assert who is not None
    with around:
        begin = who.mark()
        try:
            yield
        finally:
            tell(begin, who.mark())


class Clock:
    """Moments as seconds since the clock was made: of the host, or of a device's streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_device = device.type == "cuda"
        self._begin = self.mark()

    def mark(self) -> Any:
        """Now; on a device, when the current stream gets here."""
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait until every mark has been reached."""
        if self.on_device:
            torch.cuda.synchronize(self._device)

    def seconds(self, mark: Any, since: Any = None) -> float:
        """The seconds from ``since`` (None: when the clock was made) to a mark; waits for it."""
        since = self._begin if since is None else since
        if not self.on_device:
            return float(mark - since)
        mark.synchronize()
        return float(since.elapsed_time(mark)) / 1e3
