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
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

LaneName = Literal["compute", "gather", "reduce", "outer"]
_NOWHERE: AbstractContextManager[None] = nullcontext()


class Lanes:
    """The streams of one device. ``unify`` puts all communication on one stream: it overlaps less
    and saves one unit of peak memory, because a gather can then reuse what a reduction freed."""

    def __init__(self, device: torch.device, *, unify: bool = False) -> None:
        self.device = device
        self.unify = unify
        self.asynchronous = device.type == "cuda"
        self._streams: dict[str, Any] = {}
        if self.asynchronous:
            gather = torch.cuda.Stream(device, priority=-1)
            names = ("gather", "reduce", "outer")
            self._streams = {
                name: gather
                if unify or name == "gather"
                else torch.cuda.Stream(device, priority=-1)
                for name in names
            }

    def on(self, lane: LaneName) -> AbstractContextManager[Any]:
        """Run what follows on ``lane``: kernels, collectives and allocations."""
        if not self.asynchronous or lane == "compute":
            return _NOWHERE
        return torch.cuda.stream(self._streams[lane])

    def mark(self, lane: LaneName = "compute") -> Any:
        """An event that is reached when all work issued to ``lane`` so far is done."""
        if not self.asynchronous:
            return None
        return self._stream(lane).record_event()

    def wait(self, lane: LaneName, event: Any) -> None:
        """Work issued to ``lane`` from now on starts after ``event``."""
        if event is not None:
            self._stream(lane).wait_event(event)

    def join(self, lane: LaneName, other: LaneName) -> None:
        """``lane`` waits for all that was issued to ``other`` so far."""
        if self.asynchronous and self._stream(lane) != self._stream(other):
            self._stream(lane).wait_stream(self._stream(other))

    def settle(self) -> None:
        """The host waits for every lane (offloaded gradients must be there when it reads them)."""
        if self.asynchronous:
            torch.cuda.synchronize(self.device)

    def _stream(self, lane: LaneName) -> Any:
        if lane != "compute":
            return self._streams[lane]
        current = torch.cuda.current_stream(self.device)
        # Inside ``on(...)`` the caller's own stream cannot be told: join before, not inside.
        assert current not in self._streams.values(), "name the compute lane outside other lanes"
        return current


def annotate(name: str) -> AbstractContextManager[Any]:
    """A profiler label and an NVTX range around a piece of work; nothing unless profiling."""
    profiling = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return _labelled(name) if profiling else _NOWHERE


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
