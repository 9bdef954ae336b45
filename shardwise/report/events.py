# SPDX-License-Identifier: Apache-2.0
"""Reads ``events.jsonl``: sound events, their order over resumes, series of their numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
EVENTS = "events.jsonl"

# Fields that must be objects, by the kind of event.
_OBJECTS = {
    "run": ("config", "defaults", "corpus", "model", "weights", "versions", "mesh"),
    "plan": ("plan",),
}


def read_events(path: Path) -> list[Event]:
    """Every sound event of an events file."""
    return read(path)[0]


def read(path: Path) -> tuple[list[Event], list[str]]:
    """The sound events, and a note about damaged lines."""
    events, damaged = [], []
    if not path.exists():
        raise ValueError(
            f"{path.parent} holds no {path.name}: name the directory of a run, which is printed "
            f"when the run begins"
        )
    if not path.is_file():  # reading a pipe would block
        raise ValueError(f"{path} is no regular file: move it away")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for at, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            sound = _is_sound(event)
        except (ValueError, RecursionError):
            sound = False
        if sound:
            events.append(event)
        elif line.strip():
            damaged.append(at)
    # The last line may be incomplete because the run was killed while it wrote.
    if not damaged or damaged == [len(lines)]:
        return events, []
    shown = ", ".join(map(str, damaged[:10])) + (", ..." if damaged[10:] else "")
    return events, [f"damaged events are left out (lines {shown})"]


def _is_sound(event: Any) -> bool:
    """Whether the fields of an event have the types that every reader expects."""
    kind = event.get("kind") if isinstance(event, dict) else None
    if not isinstance(kind, str):
        return False
    if kind in ("step", "eval", "save", "resume", "skip", "experts") and "step" in event:
        step = event["step"]
        return type(step) in (int, float) and number(step) is not None
    objects = (event.get(name) for name in _OBJECTS.get(kind, ()))
    return all(value is None or isinstance(value, dict) for value in objects)


def number(value: Any) -> float | None:
    """A finite number, or None. Events spell NaN and infinity as words."""
    try:
        parsed = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def last(events: Sequence[Event], kind: str) -> Event:
    """The last event of a kind; empty if there is none."""
    return next((event for event in reversed(events) if event.get("kind") == kind), {})


def events_of(events: Sequence[Event], kind: str) -> list[Event]:
    """Events in order of steps. Of a step that was repeated after a resume, the last counts."""
    by_step: dict[Any, Event] = {}
    for event in events:
        if event.get("kind") == "resume":
            step = number(event.get("step"))
            if step is not None:
                by_step = {s: e for s, e in by_step.items() if s <= step}
        elif event.get("kind") == kind and number(event.get("step")) is not None:
            by_step[event["step"]] = event
    return [by_step[step] for step in sorted(by_step)]


def points_of(
    events: Sequence[Event], read: Callable[[Event], Any] | str, kind: str = "step"
) -> list[tuple[float, float, float]]:
    """(step, tokens, value) of every event with the value; the tokens of an evaluation are those of
    its step, NaN if unknown."""
    trained = events_of(events, "step") if kind == "eval" else []
    tokens = {event["step"]: event.get("tokens") for event in trained}
    points = []
    for event in events_of(events, kind):
        value = number(event.get(read) if isinstance(read, str) else read(event))
        seen = number(event.get("tokens", tokens.get(event["step"])))
        if value is not None:
            points.append((float(event["step"]), math.nan if seen is None else seen, value))
    return points
