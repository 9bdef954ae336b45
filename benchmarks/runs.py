# SPDX-License-Identifier: Apache-2.0
"""Runs of ``shardwise train`` for a comparison: started as a user starts them, several at a time if
asked, and read from their events."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise.report.events import events_of, read_events

CLI = (sys.executable, "-m", "shardwise.cli")
GRACE = 12.0  # seconds in which a run that is out of time saves and ends


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to start: the words after ``shardwise train``, and its folder."""

    name: str
    words: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return [*CLI, "train", *self.words, "--out", str(self.folder)]

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Held-out bits per byte of one run."""

    name: str
    tokens: list[float]
    seconds: list[float]  # of training steps: evaluation, saving and compilation left out
    bits: list[float]
    bigram: float
    step: float  # median seconds of a step
    low: list[float] = field(default_factory=list)  # of several runs: the lowest and highest bits
    high: list[float] = field(default_factory=list)
    finished: bool = True  # whether the run came to its last step

    def until(self, tokens: float) -> Curve:
        """The curve up to this number of tokens."""
        count = sum(at <= tokens for at in self.tokens)
        parts = {key: getattr(self, key)[:count] for key in ("tokens", "seconds", "bits")}
        return Curve(name=self.name, bigram=self.bigram, step=self.step, **parts)


def curve_of(name: str, folder: Path) -> Curve | None:
    """The curve of a run, finished or not; None before its first evaluation."""
    path = folder / "events.jsonl"
    events = read_events(path) if path.is_file() else []
    steps, scored = events_of(events, "step"), events_of(events, "eval")
    if not steps or not scored:
        return None
    median = statistics.median(event["seconds"] for event in steps)
    first = _first_steps(events)
    # The first step of a process compiles: it counts as any other.
    spent = accumulate(median if one["step"] in first else one["seconds"] for one in steps)
    seconds = dict(zip((event["step"] for event in steps), spent, strict=True))
    tokens = {event["step"]: event["tokens"] for event in steps}
    scored = [event for event in scored if event["step"] in tokens]
    run = next(event for event in events if event["kind"] == "run")
    return Curve(
        name=name,
        tokens=[tokens[event["step"]] for event in scored],
        seconds=[seconds[event["step"]] for event in scored],
        bits=[event["bits_per_byte"] for event in scored],
        bigram=run["corpus"].get("bigram") or math.nan,
        step=median,
        finished=any(event.get("reason") == "finished" for event in events_of(events, "end")),
    )


def mean_of(name: str, curves: Sequence[Curve]) -> Curve:
    """The mean of several runs, as far as all of them came."""
    shortest = min(curve.tokens[-1] for curve in curves)
    cut = [curve.until(shortest) for curve in curves]

    def along(key: str, join: Callable[[Sequence[float]], float]) -> list[float]:
        return [join(each) for each in zip(*(getattr(one, key) for one in cut), strict=True)]

    return Curve(
        name=name,
        tokens=cut[0].tokens,
        seconds=along("seconds", statistics.fmean),
        bits=along("bits", statistics.fmean),
        bigram=cut[0].bigram,
        step=statistics.median(curve.step for curve in curves),
        low=along("bits", min),
        high=along("bits", max),
    )


def _first_steps(events: Sequence[dict[str, Any]]) -> set[int]:
    """The steps with which a process began."""
    found: set[int] = set()
    begins = False
    for event in events:
        if event["kind"] == "step":
            (found.add if begins else found.discard)(event["step"])
        begins = event["kind"] == "run" or (begins and event["kind"] != "step")
    return found


def run_jobs(
    jobs: Sequence[Job], *, at_once: int = 1, pinned: bool = False, until: float = math.inf
) -> dict[str, Curve]:
    """Run all jobs; returns the curves of those that were evaluated, by name.

    Args:
        at_once: how many run at a time.
        pinned: each on a CPU core of its own, GPUs hidden.
        until: when to end those that are not done (``time.monotonic``).
    """
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:at_once] if pinned else ():
        cores.put(core)

    def run(job: Job) -> Curve | None:
        core = cores.get() if pinned else None
        try:
            return train(job, core=core, until=until)
        finally:
            if core is not None:
                cores.put(core)

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(run, jobs))
    return {job.name: curve for job, curve in zip(jobs, found, strict=True) if curve is not None}


def finished(jobs: Sequence[Job], curves: Mapping[str, Curve]) -> list[Curve]:
    """The curves in the order of the jobs; raises where a run has none, or was ended early."""
    missing = [job.name for job in jobs if job.name not in curves or not curves[job.name].finished]
    if missing:
        raise RuntimeError(f"without a result: {', '.join(missing)} (their last lines are above)")
    return [curves[job.name] for job in jobs]


def train(job: Job, *, core: int | None = None, until: float = math.inf) -> Curve | None:
    """Run one job to its end, or until its time is over."""
    if until - time.monotonic() < GRACE:
        print(f"no time for {job.name}", flush=True)
        return None
    process = start(job, core=core)
    code: int | str
    try:
        left = until - time.monotonic()
        code = process.wait(None if math.isinf(left) else max(1.0, left))
    except subprocess.TimeoutExpired:
        code = "out of time"
    finally:
        stop(process)
    curve = curve_of(job.name, job.folder)
    if code != 0:
        lines = job.log.read_text(errors="replace").splitlines()[-12:]
        print(f"{job.name}: ended with {code}", *lines, sep="\n  ", flush=True)
    if curve is not None:
        early = "" if curve.finished else " when it was ended"
        print(f"{job.name}: {curve.bits[-1]:.4f} bits/byte{early}", flush=True)
    return curve


def start(job: Job, *, core: int | None = None) -> subprocess.Popen[bytes]:
    """The process of a run, whose output goes to the job's log."""
    command, environment = job.command, {**os.environ, **job.environment}
    if core is not None:
        command += ["--nproc", "1"]
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    print("running", shlex.join(command[2:]), flush=True)
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})  # before it has threads and children
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run that may still be running: it is asked to save, then killed."""
    for end in (process.terminate, process.kill):
        if process.poll() is None:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
