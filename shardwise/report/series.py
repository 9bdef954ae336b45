# SPDX-License-Identifier: Apache-2.0
"""Quantities over a run: the loss beside what counting and zip would reach; and, one line for each
run, learning rate, gradient norm, speed, experts.

A run may have a million steps, a picture has a thousand columns. Steps of one column become a band
from the lowest to the highest value, with their mean as a line, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from shardwise.report.axes import WIDTH, Frame, draw_axes, draw_title
from shardwise.report.sizes import count_text, tick_text
from shardwise.report.svg import BLUE, GREEN, GREY, ORANGE, PALETTE, PINK, RED, Canvas, spread

Event = dict[str, Any]
Point = tuple[float, float, float]  # (x, y, step)
Line = tuple[str, list[Point]]
MAX_POINTS = 1500
FIRST = 200  # points of a run's begin that are kept, for axes by logarithms
HEIGHT = 260


def number(value: Any) -> float | None:
    """A finite number, or None: events spell NaN and infinity as words."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def events_of(events: Sequence[Event], kind: str) -> list[Event]:
    """Events in order of steps; what was done again after a resume counts once, the last time."""
    found: dict[Any, Event] = {}
    for event in events:
        if event.get("kind") == "resume":
            step = number(event.get("step"))
            if step is not None:
                found = {s: e for s, e in found.items() if (number(s) or 0) <= step}
        elif event.get("kind") == kind and number(event.get("step")) is not None:
            found[event["step"]] = event
    return [found[step] for step in sorted(found, key=float)]


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """The lowest and the highest point of each column and the last of all: a run has a million
    steps, and its spikes are what people look for."""
    stride = -(-2 * len(points) // most)
    if stride <= 2:
        return list(points)
    kept = list(points[:FIRST])
    for begin in range(FIRST, len(points), stride):
        column = points[begin : begin + stride]
        low, high = min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def smoothed(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """The mean of neighbours on both sides, fewer at the begin, so that a steep fall is not drawn
    late."""
    reach = len(points) // 60
    totals = [0.0, *accumulate(y for _, y, _ in points)]
    found: list[Point] = []
    strided = range(0, len(points), -(-len(points) // most))
    for position in {*range(min(FIRST, len(points))), *strided, len(points) - 1}:
        x, _, step = points[position]
        before = min(reach, position // 4)
        after = min(before, len(points) - 1 - position)
        mean = (totals[position + after + 1] - totals[position - before]) / (before + after + 1)
        found.append((x, mean, step))
    return sorted(found)


def draw_line(frame: Frame, points: Sequence[Point], colour: str, *, mean: bool = True) -> None:
    """Every column's lowest and highest value, faint, and their mean; or the values alone."""
    faint: dict[str, Any] = {"stroke_width": 1, "opacity": 0.4} if mean else {"stroke_width": 2.2}
    shown = [(thinned(points), faint)]
    if mean:
        shown.append((smoothed(points), {"stroke_width": 2.2}))
    for some, style in shown:
        line = [(frame.x(x), frame.y(y)) for x, y, _ in some]
        frame.canvas.path(line, stroke=colour, **style)


def labels_beside(frame: Frame, labels: Sequence[tuple[str, float, str, int]]) -> None:
    """(words, height, colour, weight) right of a chart, none upon another."""
    canvas, edge = frame.canvas, frame.x.end
    placed = spread([at for _, at, _, _ in labels], 17, frame.top + 4, frame.bottom - 4)
    for (words, at, colour, weight), place in zip(labels, placed, strict=True):
        canvas.path([(edge + 2, at), (edge + 10, place), (edge + 14, place)], stroke=colour)
        canvas.circle(edge + 18, place, 3.5, fill=colour)
        canvas.text(edge + 26, place + 4, words, size=12, font_weight=weight)


def series_canvas(
    title: str,
    lines: Sequence[Line],
    *,
    y_label: str,
    text: Callable[[float], str] = lambda value: f"{value:.3g}",
    log: bool = False,
    mean: bool = True,
    marks: Sequence[float] = (),
) -> Canvas | None:
    """Lines over steps; ``marks`` are steps that were dropped. None where there is no value."""
    shown = [(name, points) for name, points in lines if points][: len(PALETTE)]
    if not shown:
        return None
    values = [y for _, points in shown for _, y, _ in points]
    log = log and min(values) > 0
    low, high = min(values), max(values)
    margin = 0.06 * (high - low or abs(high) or 1)
    y_range = (low / 1.1, high * 1.1) if log else (max(0.0, low - margin), high + margin)
    canvas = Canvas(WIDTH, HEIGHT, title)
    names = [name for name, _ in lines if name]
    hidden = len([1 for _, points in lines if points]) - len(shown)
    about = "by logarithm; " if log else ""
    about += "faint: lowest and highest of a column, strong: mean" if mean else "by steps"
    about += f"; {hidden} more runs are not drawn" if hidden else ""
    top = draw_title(canvas, title, about)
    frame = draw_axes(
        canvas,
        top=top,
        height=HEIGHT - top - 48,
        x_range=(0, max(x for _, points in shown for x, _, _ in points) or 1),
        y_range=y_range,
        x_label="steps",
        y_label=y_label,
        x_text=lambda value: tick_text(count_text(value)),
        y_text=lambda value: tick_text(text(value)),
        y_log=log,
        right=178 if names else 100,
    )
    labels = []
    for (name, points), colour in zip(shown, PALETTE, strict=False):
        draw_line(frame, points, colour, mean=mean)
        last = (smoothed(points) if mean else points)[-1][1]
        words = name if len(name) <= 16 else f"{name[:15]}…"
        labels.append((f"{words} {text(last)}".strip(), frame.y(last), colour, 400))
        low_point, high_point = (choose(points, key=lambda p: p[1]) for choose in (min, max))
        for x, y, step in {low_point, high_point}:
            tip = f"{name or title}: {text(y)} at step {step:,.0f}"
            canvas.circle(frame.x(x), frame.y(y), 4, fill=colour, tip=tip)
    for step in marks:
        x = frame.x(step)
        canvas.line(x, frame.top, x, frame.bottom, stroke=RED, stroke_dasharray="2 3")
    labels_beside(frame, labels)
    return canvas


def points_of(events: Sequence[Event], read: Callable[[Event], Any]) -> list[Point]:
    """(step, value, step) of every step that has the value."""
    found = []
    for event in events_of(events, "step"):
        step, value = number(event.get("step")), number(read(event))
        if step is not None and value is not None:
            found.append((step, value, step))
    return found


def series(runs: Mapping[str, Sequence[Event]]) -> Iterator[Canvas]:
    """The charts of one run, or of several on the same axes."""
    alone = len(runs) == 1

    def each(read: Callable[[Event], Any]) -> list[Line]:
        return [("" if alone else name, points_of(events, read)) for name, events in runs.items()]

    def field(name: str) -> list[Line]:
        return each(lambda event: event.get(name))

    def rate(position: int) -> Callable[[Event], Any]:
        def read(event: Event) -> Any:
            rates = event.get("lr")
            return rates[position] if isinstance(rates, list) and position < len(rates) else None

        return read

    rates = each(rate(0))
    if alone and any(points_of(events, rate(1)) for events in runs.values()):
        rates = [("matrices", rates[0][1]), ("the rest", each(rate(1))[0][1])]
    skipped = [
        step
        for events in runs.values()
        for event in events
        if alone and event.get("kind") == "skip" and (step := number(event.get("step"))) is not None
    ]
    dropped = f"Gradient norm, steps dropped: {len(skipped)}" if skipped else "Gradient norm"
    for canvas in (
        series_canvas(dropped, field("grad_norm"), y_label="norm", log=True, marks=skipped),
        series_canvas("Learning rate", rates, y_label="learning rate", mean=False),
        series_canvas(
            "Speed", field("tokens_per_second"), y_label="tokens per second", text=count_text
        ),
        series_canvas(
            "Load of the busiest expert", field("expert_load_max"), y_label="over the even share"
        ),
        series_canvas(
            "Experts without work", field("expert_idle_share"), y_label="share of experts"
        ),
    ):
        if canvas is not None:
            yield canvas


# What a model of the corpus reaches that only counts, and the general-purpose compressor.
REFERENCES = {
    "unigram": ("unigram entropy", GREY),
    "bigram": ("bigram entropy", GREEN),
    "zlib": ("zlib", PINK),
}


def loss_canvas(events: Sequence[Event], *, log: bool = False) -> Canvas | None:
    """None where no step has a loss yet. ``log``: both axes by their logarithms, which shows the
    end of a long run."""
    steps = events_of(events, "step")
    evals = events_of(events, "eval")
    in_bits = any(number(event.get("bits_per_byte")) is not None for event in steps)
    field = "bits_per_byte" if in_bits else "loss"
    by_tokens = all(number(event.get("tokens")) is not None for event in steps)
    tokens = {event.get("step"): number(event.get("tokens")) for event in steps}

    def points(chosen: Sequence[Event]) -> list[Point]:
        found = []
        for event in chosen:
            step, value = number(event.get("step")), number(event.get(field))
            at = number(event.get("tokens")) or tokens.get(event.get("step"))
            at = at if by_tokens else step
            if step is not None and value is not None and at is not None:
                found.append((at, value, step))
        return sorted(found)

    train, held_out = points(steps), points(evals)
    if not train:
        return None
    corpus = next((e.get("corpus") for e in reversed(events) if e.get("kind") == "run"), None) or {}
    lines = {
        name: value
        for name in REFERENCES
        if in_bits and (value := number(corpus.get(name))) is not None
    }
    values = [y for _, y, _ in train + held_out] + list(lines.values())
    low, high = min(values), max(values)
    first = min((x for x, _, _ in train + held_out if x > 0), default=0.0)
    log = log and low > 0 and first > 0
    margin = 0.06 * (high - low or 1)
    y_range = (low / 1.02, high * 1.02) if log else (max(0.0, low - margin), high + margin)
    last = held_out[-1] if held_out else train[-1]
    word = "bits per byte" if in_bits else "nats per token"
    canvas = Canvas(WIDTH, 430, f"loss: {last[1]:.3f} {word}")
    name = corpus.get("name")
    about = f"{'held out' if held_out else 'train'} {last[1]:.3f} {word}"
    about += f" at step {last[2]:,.0f}" + (f", corpus {name}" if name else "")
    top = draw_title(canvas, "Loss", about)
    frame = draw_axes(
        canvas,
        top=top,
        height=430 - top - 56,
        x_range=(first if log else 0, max(x for x, _, _ in train + held_out) or 1),
        y_range=y_range,
        x_label="tokens" if by_tokens else "steps",
        y_label=word,
        x_text=lambda value: tick_text(count_text(value)),
        y_text=lambda value: f"{value:g}",
        x_log=log,
        y_log=log,
        right=178,
    )
    x, y = frame.x, frame.y
    for name, value in lines.items():
        canvas.line(
            x.begin,
            y(value),
            x.end,
            y(value),
            stroke=REFERENCES[name][1],
            stroke_width=1.5,
            stroke_dasharray="6 4",
        )
    _draw_resumes(canvas, events, steps, by_tokens, frame)
    thin, smooth = thinned(train), smoothed(train)
    draw_line(frame, train, BLUE)
    if held_out:
        canvas.path([(x(a), y(b)) for a, b, _ in held_out], stroke=ORANGE, stroke_width=2)
    for a, b, step in thin:
        tip = f"step {step:,.0f}: train {b:.3f} {word}"
        canvas.circle(x(a), y(b), 5, tip=tip, fill="transparent")
    for a, b, step in held_out:
        tip = f"step {step:,.0f}: held out {b:.3f} {word}"
        canvas.circle(x(a), y(b), 3.5, tip=tip, fill=ORANGE)
    labels = [(f"train {smooth[-1][1]:.3f}", y(smooth[-1][1]), BLUE, 600)]
    if held_out:
        labels.append((f"held out {held_out[-1][1]:.3f}", y(held_out[-1][1]), ORANGE, 600))
    for name, value in lines.items():
        words, colour = REFERENCES[name]
        labels.append((f"{words} {value:.3f}", y(value), colour, 400))
    labels_beside(frame, labels)
    return canvas


def _draw_resumes(
    canvas: Canvas, events: Sequence[Event], steps: Sequence[Event], by_tokens: bool, frame: Any
) -> None:
    for event in events:
        step = number(event.get("step")) if event.get("kind") == "resume" else None
        if step is None:
            continue
        at: float | None = step
        if by_tokens:
            before = [e for e in steps if (number(e.get("step")) or 0) <= step]
            at = number(before[-1].get("tokens")) if before else 0.0
        if at is None:
            continue
        x = frame.x(at)
        canvas.line(x, frame.top, x, frame.bottom, stroke=RED, stroke_dasharray="2 3")
        canvas.text(x + 4, frame.top + 11, f"resumed at step {step:,.0f}", size=11, class_="faint")
