# SPDX-License-Identifier: Apache-2.0
"""Events: what happened, one JSON object a line in ``events.jsonl``, and who else hears of it.

{"kind": "run",    "config": {...}, "corpus": {...}, "world_size": 2, "versions": {...}, ...}
{"kind": "step",   "step": 12, "loss": 2.9, "bits_per_byte": 4.2, "grad_norm": 0.7, ...}
{"kind": "eval",   "step": 50, "loss": 2.3, "bits_per_byte": 3.3}
{"kind": "save",   "step": 100, "path": "checkpoints/step-000100"}       reported, hence safe
{"kind": "skip",   "step": 117, "grad_norm": "nan", "where": [...]}
{"kind": "resume", "step": 100, "path": ...}
{"kind": "profile", ...}  {"kind": "sample", "text": ...}  {"kind": "end", "reason": ...}
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

Event = dict[str, Any]


class Sink(Protocol):
    """Hears every event of a run, on the first rank."""

    def log(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventFile:
    """Appends events to a file; each line is on its way to the disk when ``log`` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that was killed may have left half a line: never go on behind it.
        torn = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def log(self, event: Event) -> None:
        self._file.write(json.dumps(_plain(event), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Events:
    """Sends events to every sink, with the time."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)

    def __call__(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "time": round(time.time(), 3), **values}
        for sink in self.sinks:
            sink.log(event)

    def close(self) -> None:
        """Close every sink, once."""
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            sink.close()


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a step or an evaluation, as ``train/loss``, ``held_out/loss``, ..."""
    prefix = {"step": "train", "eval": "held_out"}.get(event["kind"])
    if prefix is None:
        return {}
    return {
        f"{prefix}/{name}": float(value)
        for name, value in event.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
