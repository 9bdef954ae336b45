# SPDX-License-Identifier: Apache-2.0
"""Several runs side by side: their losses on the same axes, how they ended, what differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.report.axes import WIDTH, draw_axes, draw_title
from shardwise.report.series import (
    Event,
    Line,
    Point,
    draw_line,
    events_of,
    labels_beside,
    number,
)
from shardwise.report.sizes import count_text, size_text, tick_text
from shardwise.report.svg import PALETTE, Canvas

HEIGHT = 430


def comparison_parts(
    runs: Mapping[str, Sequence[Event]],
) -> tuple[list[Canvas], dict[str, list[str]], dict[str, list[str]]]:
    """Pictures of the loss, straight and by logarithms; final figures; different settings."""
    # All runs by the same loss: the held-out one where each has a curve of it.
    evaluated = all(len(events_of(events, "eval")) > 1 for events in runs.values())
    lines = [(name, _losses(events, evaluated)) for name, events in runs.items()]
    about = f"{'held out' if evaluated else 'of training'}, by tokens"
    pictures = [canvas for log in (False, True) if (canvas := _losses_canvas(lines, about, log))]
    return pictures, _ends(runs), _differences(runs)


def _losses(events: Sequence[Event], evaluated: bool) -> list[Point]:
    """The loss by tokens: held out, or of training."""
    steps = events_of(events, "step")
    tokens = {event["step"]: number(event.get("tokens")) for event in steps}
    found = []
    for event in events_of(events, "eval") if evaluated else steps:
        value, step = number(event.get("bits_per_byte")), number(event.get("step"))
        value = number(event.get("loss")) if value is None else value
        at = tokens.get(event["step"])
        if value is not None and step is not None and at is not None:
            found.append((at, value, step))
    return sorted(found)


def _losses_canvas(lines: Sequence[Line], about: str, log: bool) -> Canvas | None:
    shown = [(name, points) for name, points in lines if points][: len(PALETTE)]
    if not shown:
        return None
    xs = [x for _, points in shown for x, _, _ in points if x > 0]
    ys = [y for _, points in shown for _, y, _ in points]
    log = log and bool(xs) and min(ys) > 0
    margin = 0.06 * (max(ys) - min(ys) or 1)
    straight = (max(0.0, min(ys) - margin), max(ys) + margin)
    canvas = Canvas(WIDTH, HEIGHT, "Loss of each run")
    top = draw_title(canvas, "Loss of each run", about)
    frame = draw_axes(
        canvas,
        top=top,
        height=HEIGHT - top - 56,
        x_range=(min(xs) if log else 0, max(xs, default=1)),
        y_range=(min(ys) / 1.02, max(ys) * 1.02) if log else straight,
        x_label="tokens",
        y_label="bits per byte, or nats",
        x_text=lambda value: tick_text(count_text(value)),
        y_text=lambda value: f"{value:g}",
        x_log=log,
        y_log=log,
        right=200,
    )
    labels = []
    for (name, points), colour in zip(shown, PALETTE, strict=False):
        draw_line(frame, points, colour)
        for x, y, step in points[:: max(1, len(points) // 200)]:
            tip = f"{name}, step {step:,.0f}: {y:.3f}"
            canvas.circle(frame.x(x), frame.y(y), 3, fill=colour, tip=tip)
        last = points[-1][1]
        words = name if len(name) <= 16 else f"{name[:15]}…"
        labels.append((f"{words} {last:.3f}", frame.y(last), colour, 600))
    labels_beside(frame, labels)
    return canvas


def _ends(runs: Mapping[str, Sequence[Event]]) -> dict[str, list[str]]:
    def last(kind: str, field: str) -> Callable[[Sequence[Event]], float | None]:
        def find(events: Sequence[Event]) -> float | None:
            found = events_of(events, kind)
            return number(found[-1].get(field)) if found else None

        return find

    def most(field: str, share: float) -> Callable[[Sequence[Event]], float | None]:
        def find(events: Sequence[Event]) -> float | None:
            values = [
                v for e in events_of(events, "step") if (v := number(e.get(field))) is not None
            ]
            return sorted(values)[int(share * (len(values) - 1))] if values else None

        return find

    wanted: dict[str, tuple[Callable[[Sequence[Event]], float | None], Callable[[float], str]]] = {
        "held-out bits per byte": (last("eval", "bits_per_byte"), lambda v: f"{v:.3f}"),
        "loss of the last step": (last("step", "loss"), lambda v: f"{v:.3f}"),
        "steps": (last("step", "step"), lambda v: f"{v:,.0f}"),
        "tokens": (last("step", "tokens"), count_text),
        "tokens per second, median": (most("tokens_per_second", 0.5), count_text),
        "highest gradient norm": (most("grad_norm", 1.0), lambda v: f"{v:.3g}"),
        "memory of a rank, most": (most("memory", 1.0), size_text),
    }
    rows = {}
    for words, (find, text) in wanted.items():
        values = [find(events) for events in runs.values()]
        if any(value is not None for value in values):
            rows[words] = ["" if value is None else text(value) for value in values]
    return rows


def _differences(runs: Mapping[str, Sequence[Event]]) -> dict[str, list[str]]:
    """The fields of the configurations that are not the same in all runs."""
    flat = [_flat(_started(events)) for events in runs.values()]
    names = list(dict.fromkeys(name for one in flat for name in one))
    rows = {name: [one.get(name, "") for one in flat] for name in names}
    return {name: cells for name, cells in rows.items() if len(set(cells)) > 1}


def _started(events: Sequence[Event]) -> Mapping[str, Any]:
    run = next((event for event in reversed(events) if event.get("kind") == "run"), {})
    kept = {"world_size": run.get("world_size"), "versions": run.get("versions")}
    return {"config": run.get("config") or {}, **kept}


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _flat(item, f"{name}.{key}" if name else str(key))
        return found
    return {name.removeprefix("config."): value if isinstance(value, str) else json.dumps(value)}
