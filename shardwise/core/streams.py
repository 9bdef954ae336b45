# SPDX-License-Identifier: Apache-2.0
"""Lanes of work on a device: the only file that names CUDA streams, events and NVTX ranges.

    compute  | block 1 ....... | block 2 ....... | block 3 ....... |
    gather   | weights 2 | ... | weights 3 | ... | weights 4 | ... |
    reduce   |           | ... | grads 1   | ... | grads 2   | ... |
    outer    |                 |           | grads 1 over replicas |

``compute`` is the stream that the caller runs on. A block of memory is allocated and freed on one
lane, after that lane has waited for every other lane that read the block. So ``record_stream`` is
not needed, and the peak is the same in every run. On a CPU there is one lane and every method does
nothing, so the calling code is the same for both.

A watcher can draw this picture of a real step; see ``report/trace.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import torch

LaneName = Literal["compute", "gather", "reduce", "outer"]
_NOWHERE: AbstractContextManager[None] = nullcontext()


class Lanes:
    """The streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Whether work runs later than the host issues it; a plan pretends that it does.
        self.asynchronous = device.type == "cuda"
        self._streams: dict[str, Any] = {}
        self._joins: dict[tuple[str, str], Any] = {}
        if self.asynchronous:
            self._index = torch.cuda.current_device() if device.index is None else device.index
            names = ("gather", "reduce", "outer")
            self._streams = {name: torch.cuda.Stream(device, priority=-1) for name in names}
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
        # One event for each pair, recorded again: a wait is bound to the record at that time.
        event = self._joins.get((lane, other))
        if event is None:
            event = self._joins[lane, other] = torch.cuda.Event()
        event.record(awaited)
        waiting.wait_event(event)

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
                f"{what} runs while a CUDA graph is captured: in each step the host decides if "
                f"weights are gathered and gradients reduced, and a replay would repeat the "
                f"decisions of the capture. Call wrapped modules outside of the capture"
            )

    def _stream(self, lane: LaneName) -> Any:
        if lane != "compute":
            return self._streams[lane]
        current = torch.cuda.current_stream(self._index)
        # Inside ``on(...)`` the caller's own stream is not known: join before, not inside.
        assert current.stream_id not in self._own, "name the compute lane outside other lanes"
        return current


@cache
def lanes_apart(device: torch.device) -> Lanes:
    """The lanes of messages that belong to no unit, such as the rows of experts."""
    return Lanes(device)


class _OnStream:
    """Like ``torch.cuda.stream(stream)``, in a third of the host time: 3.6 instead of 10
    microseconds, several times for each unit."""

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
    """A function that returns the values that ``tensor`` has now, and waits for them if needed."""
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


# Called with the label of each work of a unit, before the work; of ``sw.debug``.
announce: Callable[[str], None] | None = None


def annotate(unit: str, work: str) -> AbstractContextManager[Any]:
    """A label and an NVTX range around a unit's work, under a profiler or ``sw.debug``."""
    if _watcher is not None:
        _watcher.begins(f"{unit}: {work}")
        return _watched(partial(_watcher.phase, f"{unit}: {work}"))
    profiling = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    wanted = profiling or announce is not None
    return _labelled(f"{unit}: {work}") if wanted else _NOWHERE


@contextmanager
def _labelled(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.nvtx.range_push(name)
    try:
        if announce is not None:
            announce(name)
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()


# ------------------------------------------------------------------------------ being watched


# It notes when work begins and ends (report/trace.py): ``begins(name)`` and ``phase(name, begin,
# end)`` for the library's own work, ``lane`` for work on a lane other than compute, ``stall`` where
# the compute lane waited, ``flight`` for messages under way, ``mark()`` for a moment on a lane.
_watcher: Any = None


def watcher() -> Any:
    return _watcher


@contextmanager
def watch(watcher: Any) -> Iterator[None]:
    """Call ``watcher`` while the context is open. There can be one watcher at a time."""
    global _watcher
    if _watcher is not None:
        raise RuntimeError("a step is being recorded already: end that recording first")
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def stalling(reason: str) -> AbstractContextManager[Any]:
    """A context around work that makes the compute lane wait."""
    return _NOWHERE if _watcher is None else _watched(partial(_watcher.stall, reason))


@contextmanager
def _watched(
    report: Callable[[Any, Any], None], lane: AbstractContextManager[Any] = _NOWHERE
) -> Iterator[None]:
    """Report when the work inside began and ended, with marks on ``lane``."""
    watcher = _watcher
    with lane:
        begin = watcher.mark()
        try:
            yield
        finally:
            report(begin, watcher.mark())


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
