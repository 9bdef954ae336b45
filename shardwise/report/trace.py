# SPDX-License-Identifier: Apache-2.0
"""A recording of one training step: lanes, waits and bytes, as plain values.

    compute    | fwd 0 | fwd 1 | fwd 2 | loss | bwd 2 |wait| bwd 1 | bwd 0 |
    gather   |0 |1 |    |2 |                |1 |       |0 |
    reduce                                          |2 |      |1 |     |0 |
    optimizer                                                                | step |

    with record_step() as profile:
        loss.backward(); optimizer.step()
    events.write({"kind": "profile", **profile})

Exposed communication is the time in which the compute lane only waits for a collective, relative to
the time of the step. On the host this is the time inside ``wait``: for messages, and for adding
received values. On a device it is the time between two events on the compute stream, one before and
one after the wait for another stream. A collective over gloo ends when its last message has arrived
(a separate thread waits for it), not when the program waits for it. The library's own work (casts,
packs, issues) is recorded separately.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.core import streams
from shardwise.core.memory import ledger

LANES = ("compute", "gather", "reduce", "outer", "exchange", "optimizer")
_LANE_OF = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}
Interval = tuple[float, float]
Profile = dict[str, Any]


class _Recording:
    """What ``streams.watch`` calls: it records everything."""

    def __init__(self, device: torch.device) -> None:
        self.clock = streams.Clock(device)
        self.host_begin = time.perf_counter()
        self.phases: list[tuple[str, Any, Any]] = []
        self.lanes: list[tuple[str, str, Any, Any]] = []
        self.stalls: list[tuple[str, Any, Any]] = []
        self.flights: list[tuple[str, str, int, float, float]] = []
        self.steps: list[tuple[Any, Any]] = []
        self.memory_start = ledger.snapshot()
        self.memory: list[tuple[float, str, int]] = []
        self._open_steps: list[Any] = []
        self._open_phases: list[str] = []
        self._lock = threading.Lock()

    def mark(self) -> Any:
        return self.clock.mark()

    def begins(self, name: str) -> None:
        self._open_phases.append(name)

    def phase(self, name: str, begin: Any, end: Any) -> None:
        self._open_phases.pop()
        self.phases.append((name, begin, end))

    def lane(self, lane: str, begin: Any, end: Any) -> None:
        issuer = self._open_phases[-1] if self._open_phases else "the caller"
        self.lanes.append((lane, f"issued in '{issuer}'", begin, end))

    def stall(self, reason: str, begin: Any, end: Any) -> None:
        self.stalls.append((reason, begin, end))

    def flight(self, operation: str, axis: str, nbytes: int) -> Callable[[], None]:
        begin = self._host()

        def landed() -> None:
            with self._lock:  # collectives end in other threads
                self.flights.append((operation, axis, nbytes, begin, self._host()))

        return landed

    def bytes_changed(self, kind: str, nbytes: int) -> None:
        if nbytes:
            self.memory.append((self._host(), kind, nbytes))

    def step_begins(self, *_: Any) -> None:
        self._open_steps.append(self.mark())

    def step_ends(self, *_: Any) -> None:
        if self._open_steps:
            self.steps.append((self._open_steps.pop(), self.mark()))

    def _host(self) -> float:
        return time.perf_counter() - self.host_begin


@contextmanager
def record_step(device: torch.device | str = "cpu") -> Iterator[Profile]:
    """Record the body of the context; the dictionary is filled when the context ends.

    Use it around one training step, from the first forward to the end of ``optimizer.step()``.
    Recording costs a thread per collective over gloo and a few events per unit: record one step,
    not all steps.

    Args:
        device: the device of the model. On a CUDA device, times are measured on the device.
    """
    device, profile = torch.device(device), Profile()
    with _kernels(device) as kernels:
        recording = _Recording(device)
        hooks = [
            register_optimizer_step_pre_hook(recording.step_begins),
            register_optimizer_step_post_hook(recording.step_ends),
        ]
        ledger.watchers.append(recording.bytes_changed)
        try:
            with streams.watch(recording):
                yield profile
                end = recording.mark()
            recording.clock.synchronize()
        finally:
            ledger.watchers.remove(recording.bytes_changed)
            for hook in hooks:
                hook.remove()
        profile.update(_summary(recording, end))
    profile["idle"] = idle_share(kernels)


@contextmanager
def _kernels(device: torch.device) -> Iterator[list[Interval]]:
    """The times of kernels on the device, by torch's profiler; filled when the context ends. Empty
    on a CPU."""
    times: list[Interval] = []
    if device.type != "cuda":
        yield times
        return
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    # Without acc_events torch warns that a later cycle drops events; there is one cycle.
    with torch.profiler.profile(activities=cuda, acc_events=True) as profiler:
        yield times
        streams.Clock(device).synchronize()
    times += [(begin, end) for begin, end, _ in kernels_of(profiler)]


def kernels_of(profiler: Any) -> list[tuple[int, int, str]]:
    """(begin, end, name) of each recorded kernel and copy, in nanoseconds."""
    results = profiler.profiler.kineto_results if profiler.profiler else None
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in (results.events() if results else ())
        if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]


def idle_share(kernels: Sequence[Interval]) -> float | None:
    """The share of time without a kernel, from the first kernel to the end of the last kernel.

    >>> idle_share([(0, 2), (1, 3), (5, 6), (7, 8)])
    0.375
    """
    if not kernels:
        return None
    busy = merged(kernels)
    return 1 - sum(end - begin for begin, end in busy) / max(1, busy[-1][1] - busy[0][0])


def _summary(recording: _Recording, end: Any) -> Profile:
    seconds = recording.clock.seconds
    total = seconds(end)
    phases = sorted((seconds(b), seconds(e), name) for name, b, e in recording.phases)
    steps = [(seconds(b), seconds(e)) for b, e in recording.steps]
    stalls = [(seconds(b), seconds(e), reason) for reason, b, e in recording.stalls]
    waiting = merged([(b, e) for b, e, _ in stalls])
    spans = _compute_spans(phases, steps)
    spans += [_span("optimizer", "step", b, e) for b, e in steps]
    spans += [
        _span(lane, name, seconds(b), seconds(e))
        for lane, name, b, e in recording.lanes
        if seconds(e) - seconds(b) > 1e-6  # a lane that only frees memory does no work
    ]
    spans += [
        _span(
            _LANE_OF.get(operation, "exchange"), f"{operation} over {axis}", begin, finish, nbytes
        )
        for operation, axis, nbytes, begin, finish in sorted(recording.flights, key=lambda f: f[3])
    ]
    exposed = sum(e - b for b, e in waiting)
    return {
        "seconds": total,
        "clock": "device" if recording.clock.on_device else "host",
        "spans": spans,
        "stalls": [[round(b, 7), round(e, 7), reason] for b, e, reason in stalls],
        "exposed_seconds": exposed,
        "exposed": exposed / total if total else 0.0,
        "memory": {
            "start": recording.memory_start,
            "changes": [[round(t, 7), kind, nbytes] for t, kind, nbytes in recording.memory],
        },
    }


def _span(lane: str, name: str, begin: float, end: float, nbytes: int | None = None) -> Profile:
    span: Profile = {"lane": lane, "name": name, "begin": round(begin, 7), "end": round(end, 7)}
    return span if nbytes is None else span | {"nbytes": nbytes}


def _compute_spans(
    phases: Sequence[tuple[float, float, str]], steps: Sequence[Interval]
) -> list[Profile]:
    """The model's work: the gaps between the library's own phases, named by their place.

    | gather 0 |  forward 0  | release 0 | gather 1 |  forward 1  | ...
    """
    spans: list[Profile] = []
    stack: list[str] = []
    root, backward, label, at = "", False, "", 0.0
    busy = [(b, e, name) for b, e, name in phases] + [(b, e, "") for b, e in steps]
    for begin, end, name in sorted(busy):
        if begin > at and label:
            spans.append(_span("compute", label, at, begin))
        if name:
            spans.append(_span("compute", name, begin, end) | {"library": True})
        unit, _, what = name.partition(": ")
        if what == "gather for forward":
            root = root or unit
            if unit == root:
                stack, backward = [], False
            label = f"recompute {unit}" if backward else f"forward {unit}"
            stack += [] if backward else [unit]
        elif what == "release after forward":
            stack = [other for other in stack if other != unit]
            label = f"forward {stack[-1]}" if stack else "loss"
        elif what == "gather for backward":
            backward, label = True, f"backward {unit}"
        elif what == "reduce gradients":
            label = "backward"
        elif not name:
            label = ""
        at = max(at, end)
    return spans


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of intervals. Waits may nest: a gather can wait for the gather before it.

    >>> merged([(1, 2), (0, 1.5), (3, 4)])
    [(0, 2), (3, 4)]
    """
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union
