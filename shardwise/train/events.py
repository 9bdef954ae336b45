# SPDX-License-Identifier: Apache-2.0
"""Events of a run: a JSON object per line in ``events.jsonl``, and other sinks.

{"kind": "run",    "config": {...}, "corpus": {...}, "world_size": 2, "versions": {...}, ...}
{"kind": "step",   "step": 12, "loss": 2.9, "bits_per_byte": 4.2, "grad_norm": 0.7, ...}
{"kind": "eval",   "step": 50, "loss": 2.3, "bits_per_byte": 3.3}
{"kind": "fp8",    "step": 50, "values": 9437184, "underflows": 120, "undefined": 0}
{"kind": "save",   "step": 100, "path": "checkpoints/step-000100", "stalled": 0.2}
                   the checkpoint is on the disk; training waited for ``stalled`` seconds
{"kind": "skip",   "step": 117, "grad_norm": "nan", "where": [...]}
{"kind": "resume", "step": 100, "path": ...}         path null: begun again, nothing was saved
{"kind": "warning", "step": 200, "text": "step 200 was not saved: ..."}      {"kind": "error", ...}
{"kind": "profile", ...}  {"kind": "sample", "text": ...}  {"kind": "end", "reason": ...}
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

Event = dict[str, Any]


class Sink(Protocol):
    """A receiver of all events of a run, on the first rank."""

    def log(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventFile:
    """Appends events to a file. When ``log`` returns, the kernel has the line.

    An event that cannot be written is lost, but the file stays valid: the next event begins on a
    new line, also after a run that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._torn = False

    def log(self, event: Event) -> None:
        line = json.dumps(_plain(event), allow_nan=False).encode() + b"\n"
        if self._file is not None and not self.path.exists():
            if not self.path.parent.is_dir():
                raise OSError(f"{self.path.parent} was removed or renamed")
            self.close()  # the folder was removed and made again
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = not _ends_a_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        line = b"\n" * self._torn + line
        self._torn = True
        while line:  # a full disk takes a part, and raises at the next write
            line = line[self._file.write(line) :]
        self._torn = False

    def close(self) -> None:
        if self._file is not None:
            with self._file as file:
                os.fsync(file.fileno())
            self._file = None

    def __str__(self) -> str:
        return str(self.path)


class Events:
    """Sends events to every sink, with the time.

    Logging never ends a run: the first error of a sink gives a warning, and the run continues.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)
        self._failed: set[int] = set()
        self._step = 0

    def __call__(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "time": round(time.time(), 3), **values}
        self._step = values.get("step", self._step)
        for sink in self.sinks:
            self._try(sink, partial(sink.log, event))

    def close(self) -> None:
        """Close every sink, once."""
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            self._try(sink, sink.close)

    def _try(self, sink: Sink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a sink may call any library
            if id(sink) not in self._failed:
                self._failed.add(id(sink))
                logger.warning(
                    "rank 0, step %d: %s cannot be written (%s): the run continues, and events "
                    "that cannot be written there are lost",
                    self._step,
                    sink,
                    error,
                )


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
    if path.exists() and not path.is_file():  # opening a pipe would wait for its reader
        raise OSError(f"{path} is no regular file")
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
