# SPDX-License-Identifier: Apache-2.0
"""The instruments: step clocks and the kernels of a device.

Each reads torch, not the system under test, so every system is measured by the same method.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks.report import Cell
from shardwise.report.trace import idle_share, kernels_of, merged

GIB = 2**30
TOP = 12  # kernels of a step, by their time


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


def milliseconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Median over events; between runs, 256 MB are written so that nothing is left in the cache. On
    a CPU one run, for a dry run."""
    run()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
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


def device_use(step: Callable[[], object], count: int = 3) -> dict[str, Any]:
    """Of ``count`` steps in a row with the profiler on: milliseconds of a step in which any kernel
    runs, the share without one in percent, launches, and the kernels that take most."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        for _ in range(1 + count):  # the first one follows an empty queue
            step()
        torch.cuda.synchronize()
    events = sorted(kernels_of(profiler))
    events = events[len(events) // (1 + count) :]
    totals: Counter[str] = Counter()
    for begin, end, name in events:
        totals[name] += end - begin
    busy = sum(end - begin for begin, end in merged([event[:2] for event in events]))
    return {
        "busy": busy * 1e-6 / count,
        "idle": 100 * (idle_share([event[:2] for event in events]) or 0.0),
        "launches": len(events) / count,
        "kernels": [
            {"kernel": name[:90], "ms": total * 1e-6 / count}
            for name, total in totals.most_common(TOP)
        ],
    }
