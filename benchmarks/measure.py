# SPDX-License-Identifier: Apache-2.0
"""The instruments: step clocks, an operator counter, and a memory meter for CPU and CUDA.

Each reads torch, not the system under test, so every system is measured by the same method.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import Cell

GIB = 2**30


def summary(name: str, values: Sequence[float]) -> dict[str, Cell]:
    """Median and the spread around it: the middle half, in percent of the median."""
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4)
    spread = 100 * (high - low) / middle
    return {name: middle, f"{name}_spread": spread, f"{name}_count": len(values)}


def step_row(parts: Sequence[Sequence[float]]) -> dict[str, Cell]:
    """The whole step, and the medians of its phases, of (forward, backward, optimizer) each."""
    row = summary("step", [sum(part) for part in parts])
    columns = zip(*parts, strict=True)
    for name, column in zip(("forward", "backward", "optimizer"), columns, strict=True):
        row[name] = statistics.median(column)
    return row


class StepClock:
    """Marks inside one step, read after the last step, so that the host never waits for the device.

    On CUDA a mark is an event in the stream of the computation; on CPU it is the wall clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: list[list[Any]] = []

    def start(self) -> None:
        self._steps.append([])
        self.mark()

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1].append(event)
        else:
            self._steps[-1].append(time.perf_counter())

    def intervals(self) -> list[list[float]]:
        """Milliseconds between neighbouring marks, one list per step."""
        if self._cuda:
            torch.cuda.synchronize()
        return [[self._between(*pair) for pair in pairwise(marks)] for marks in self._steps]

    def _between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second) if self._cuda else 1e3 * (second - first))


class OperatorCounter(TorchDispatchMode):
    """Counts operators by namespace (``aten``, ``c10d``, ...) as they reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[func.namespace] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Allocated bytes when a phase began, at its highest, and when it ended."""

    start: int
    peak: int
    end: int


class CudaMeter:
    """Reads the caching allocator: every tensor, whoever made it."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.phases[name] = Phase(
            start=start, peak=torch.cuda.max_memory_allocated(), end=torch.cuda.memory_allocated()
        )


class CpuMeter:
    """Adds up the allocations and frees that torch's CPU allocator reports to its profiler.

    The allocator knows a block's size at its free only if it saw the allocation, so enter the
    meter *before* the model is built. Storage resizes, collectives and autograd's own buffers all
    pass through this allocator, which a count of tensors in Python would miss.
    """

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self._names: list[str] = []
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)

    def __enter__(self) -> Self:
        self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        if error is None:
            self._read()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._names.append(name)
        with torch.autograd.profiler.record_function(f"phase {name}"):
            yield

    def _read(self) -> None:
        results = self._profiler.kineto_results
        assert results is not None, "the profiler has stopped, so it has results"
        events: list[Any] = list(results.events())
        changes = sorted(
            ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
            key=lambda change: change[0],
        )
        spans = {event.name(): (event.start_ns(), event.duration_ns()) for event in events}
        for name in self._names:
            begin, duration = spans[f"phase {name}"]
            finish = begin + duration
            level, start, peak = 0, 0, 0
            for moment, size in changes:
                if moment > finish:
                    break
                if moment >= begin:
                    peak = max(peak, level + size)
                level += size
                if moment < begin:
                    start = peak = level
            self.phases[name] = Phase(start=start, peak=peak, end=level)


def memory_meter(device: torch.device) -> CudaMeter | CpuMeter:
    return CudaMeter() if device.type == "cuda" else CpuMeter()


def local_bytes(tensor: Tensor | None) -> int:
    """Bytes this rank holds: of a DTensor its shard, of a plain tensor all of it."""
    if tensor is None:
        return 0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def unit_bytes(blocks: Sequence[nn.Module] | nn.ModuleList) -> int:
    """B: the unsharded bytes of the largest unit, read before anything is wrapped."""
    return max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)


def milliseconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Median over events; between runs, 256 MB are written so that nothing is left in the cache."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    run()
    found = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        found.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in found)
