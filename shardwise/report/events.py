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


def read_events(path: Path) -> list[Event]:
    """The events of a file, without lines that are damaged, as the last line of a killed run."""
    if not path.is_file():
        raise ValueError(
            f"{path.parent} holds no {path.name}: name the directory of a run, which is printed "
            f"when the run begins"
        )
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            events.append(event)
    return events


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
