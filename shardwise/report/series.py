# SPDX-License-Identifier: Apache-2.0
"""Charts over a run, or over several runs on the same axes: loss (with the entropies of simple
references), learning rate, gradient norm, speed, experts.

A run may have a million steps, and a picture has a thousand columns. The steps of one column become
a band from the lowest to the highest value and a line through their mean, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardwise.report import svg
from shardwise.words import count_text, tick_text

Event = dict[str, Any]
Point = tuple[float, float, float]  # (x, y, step)
MAX_POINTS = 1500
FIRST = 200  # points at the begin of a run that are all kept, for logarithmic axes
TIPS = 200  # points of a line that have a tip
FEW = 60  # largest number of points that are drawn as dots
LOW, HIGH = 260, 430  # heights of charts


def number(value: Any) -> float | None:
    """A finite number, or None. Events spell NaN and infinity as words."""
    try:
        parsed = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def events_of(events: Sequence[Event], kind: str) -> list[Event]:
    """Events in order of steps. Of a step that was repeated after a resume, the last counts."""
    by_step: dict[Any, Event] = {}
    for event in events:
        if event.get("kind") == "resume":
            step = number(event.get("step"))
            if step is not None:
                by_step = {s: e for s, e in by_step.items() if (number(s) or 0) <= step}
        elif event.get("kind") == kind and number(event.get("step")) is not None:
            by_step[event["step"]] = event
    return [by_step[step] for step in sorted(by_step, key=float)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """The lowest and the highest point of each column, and the last point: readers look for
    spikes."""
    stride = -(-2 * len(points) // MAX_POINTS)
    if stride <= 2:
        return list(points)
    kept = list(points[:FIRST])
    for begin in range(FIRST, len(points), stride):
        column = points[begin : begin + stride]
        low, high = min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over neighbours on both sides; over fewer neighbours at the begin, so that a steep fall
    is not drawn late."""
    reach = len(points) // 60
    totals = [0.0, *accumulate(y for _, y, _ in points)]
    means: list[Point] = []
    strided = range(0, len(points), -(-len(points) // MAX_POINTS))
    for position in {*range(min(FIRST, len(points))), *strided, len(points) - 1}:
        x, _, step = points[position]
        before = min(reach, position // 4)
        after = min(before, len(points) - 1 - position)
        mean = (totals[position + after + 1] - totals[position - before]) / (before + after + 1)
        means.append((x, mean, step))
    return sorted(means)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart. ``mean``: draw the lowest and highest value of each column faintly, and
    the mean; else draw only the values, as dots if there are few."""

    name: str
    points: list[Point]
    colour: str
    mean: bool = True

    @property
    def last(self) -> float:
        return (smoothed(self.points) if self.mean else self.points)[-1][1]


def chart(
    title: str,
    about: str,
    lines: Sequence[Line],
    *,
    y_label: str,
    x_label: str = "steps",
    text: Callable[[float], str] = lambda value: f"{value:.3g}",
    height: float = LOW,
    x_log: bool = False,
    y_log: bool = False,
    levels: Sequence[tuple[str, float, str]] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> svg.Canvas | None:
    """Lines over steps or tokens; None if no line has a point. An axis with values of 0 or less is
    never logarithmic.

    Args:
        levels: (name, value, colour) of horizontal dashed lines.
        marks: (place, label) of vertical dashed lines.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    xs = [x for line in lines for x, _, _ in line.points]
    ys = [y for line in lines for _, y, _ in line.points] + [value for _, value, _ in levels]
    first = min((x for x in xs if x > 0), default=0.0)
    x_log, y_log = x_log and first > 0, y_log and min(ys) > 0
    margin = 0.06 * (max(ys) - min(ys) or abs(max(ys)) or 1)
    factor = max(1.02, (max(ys) / min(ys)) ** 0.04) if y_log else 0.0
    straight = (max(0.0, min(ys) - margin), max(ys) + margin)
    named = [(line.name, line.last, line.colour) for line in lines] + list(levels)
    words = [
        f"{name if len(name) <= 16 else name[:15] + '…'} {text(value)}".strip()
        for name, value, _ in named
    ]
    canvas = svg.Canvas(svg.WIDTH, height, title)
    top = svg.draw_title(canvas, title, about)
    frame = svg.draw_axes(
        canvas,
        top=top,
        height=height - top - 50,
        x_range=(first if x_log else 0, max(xs) or 1),
        y_range=(min(ys) / factor, max(ys) * factor) if y_log else straight,
        x_label=x_label,
        y_label=y_label,
        x_text=lambda value: tick_text(count_text(value)),
        y_text=lambda value: tick_text(text(value)) if height == LOW else f"{value:g}",
        x_log=x_log,
        y_log=y_log,
        right=40 + max(map(svg.text_width, words)),
    )
    x, y = frame.x, frame.y
    for _, value, colour in levels:
        style = {"stroke": colour, "stroke_width": 1.5, "stroke_dasharray": "6 4"}
        canvas.line(x.begin, y(value), x.end, y(value), **style)
    for at, label in marks:
        canvas.line(x(at), frame.top, x(at), frame.bottom, stroke=svg.RED, stroke_dasharray="2 3")
        canvas.note(x(at) + 4, frame.top + 11, label)
    for line in lines:
        _draw_line(frame, line, title, text)
    _draw_labels(
        frame, [(label, y(v), colour) for label, (_, v, colour) in zip(words, named, strict=True)]
    )
    return canvas


def _draw_line(frame: svg.Frame, line: Line, title: str, text: Callable[[float], str]) -> None:
    shown: list[tuple[list[Point], dict[str, Any]]] = [(line.points, {"stroke_width": 2.2})]
    if line.mean:
        faint = {"stroke_width": 1, "opacity": 0.4}
        shown = [(thinned(line.points), faint), (smoothed(line.points), {"stroke_width": 2.2})]
    for points, style in shown:
        frame.canvas.path(
            [(frame.x(a), frame.y(b)) for a, b, _ in points], stroke=line.colour, **style
        )
    points = thinned(line.points)
    ends = {choose(points, key=lambda p: p[1]) for choose in (min, max)}
    for a, b, step in sorted({*points[:: max(1, len(points) // TIPS)], *ends}):
        tip = f"step {step:,.0f}: {line.name or title} {text(b)}"
        dots = not line.mean and len(points) <= FEW
        size, fill = (3.5, line.colour) if dots else (5, "transparent")
        frame.canvas.circle(frame.x(a), frame.y(b), size, tip=tip, fill=fill)


def _draw_labels(frame: svg.Frame, labels: Sequence[tuple[str, float, str]]) -> None:
    """Draw (words, height, colour) right of a chart, without overlaps."""
    canvas, edge = frame.canvas, frame.x.end
    placed = svg.spread([at for _, at, _ in labels], 17, frame.top + 4, frame.bottom - 4)
    for (words, at, colour), place in zip(labels, placed, strict=True):
        canvas.path([(edge + 2, at), (edge + 10, place), (edge + 14, place)], stroke=colour)
        canvas.circle(edge + 18, place, 3.5, fill=colour)
        canvas.text(edge + 26, place + 4, words, size=12)


def points_of(
    events: Sequence[Event],
    read: Callable[[Event], Any],
    kind: str = "step",
    tokens: Mapping[Any, float | None] | None = None,
) -> list[Point]:
    """(step, value, step) of every event with the value; with ``tokens``: (tokens, value, step)."""
    points = []
    for event in events_of(events, kind):
        step, value = number(event.get("step")), number(read(event))
        at = step if tokens is None else number(event.get("tokens")) or tokens.get(event["step"])
        if step is not None and value is not None and at is not None:
            points.append((at, value, step))
    return sorted(points)


def tokens_of(events: Sequence[Event]) -> dict[Any, float | None]:
    """The number of tokens that were trained on until the end of each step."""
    return {event["step"]: number(event.get("tokens")) for event in events_of(events, "step")}


def loss_of(event: Event) -> float | None:
    """Bits per byte if the event has them, else nats per token."""
    bits = number(event.get("bits_per_byte"))
    return number(event.get("loss")) if bits is None else bits


def series(runs: Mapping[str, Sequence[Event]]) -> Iterator[svg.Canvas]:
    """The charts of one run, or of several runs on the same axes."""
    alone = len(runs) == 1
    hidden = f"; {len(runs) - len(svg.PALETTE)} more runs are not drawn" * (
        len(runs) > len(svg.PALETTE)
    )

    def each(read: Callable[[Event], Any], mean: bool = True) -> list[Line]:
        return [
            Line(name=name, points=points_of(events, read), colour=colour, mean=mean)
            for (name, events), colour in zip(runs.items(), svg.PALETTE, strict=False)
        ]

    def rate(position: int) -> Callable[[Event], Any]:
        def read(event: Event) -> Any:
            rates = event.get("lr")
            return rates[position] if isinstance(rates, list) and position < len(rates) else None

        return read

    rates = each(rate(0), mean=False)
    if alone and any(line.points for line in each(rate(1))):
        both = zip(("matrices", "the rest"), (0, 1), svg.PALETTE, strict=False)
        events = next(iter(runs.values()))
        rates = [
            Line(name=name, points=points_of(events, rate(at)), colour=colour, mean=False)
            for name, at, colour in both
        ]
    skipped = [
        (number(event["step"]) or 0.0, "")
        for events in runs.values()
        for event in (events_of(events, "skip") if alone else ())
    ]
    dropped = f", steps dropped: {len(skipped)}" if skipped else ""
    band = f"faint: lowest and highest of a column, strong: mean{hidden}"
    lines = {
        name: each(lambda event, name=name: event.get(name))  # type: ignore[misc]
        for name in ("grad_norm", "tokens_per_second", "expert_load_max", "expert_idle_share")
    }
    for canvas in (
        chart(
            f"Gradient norm{dropped}", f"logarithmic; {band}", lines["grad_norm"],
            y_label="norm", y_log=True, marks=skipped,
        ),
        chart("Learning rate", f"by steps{hidden}", rates, y_label="learning rate"),
        chart(
            "Speed", band, lines["tokens_per_second"], y_label="tokens per second", text=count_text
        ),
        chart(
            "Load of the busiest expert", band, lines["expert_load_max"],
            y_label="over the even share",
        ),
        chart(
            "Experts without work", band, lines["expert_idle_share"], y_label="share of experts"
        ),
    ):  # fmt: skip
        if canvas is not None:
            yield canvas


# Bits per byte of two models that only count, and of a general-purpose compressor.
REFERENCES = {
    "unigram": ("unigram entropy", svg.GREY),
    "bigram": ("bigram entropy", svg.GREEN),
    "zlib": ("zlib", svg.PINK),
}


def loss_canvas(events: Sequence[Event], *, log: bool = False) -> svg.Canvas | None:
    """The chart of the loss; None if no step has a loss yet. ``log``: logarithmic axes, which show
    the end of a long run."""
    steps = events_of(events, "step")
    in_bits = any(number(event.get("bits_per_byte")) is not None for event in steps)
    field = "bits_per_byte" if in_bits else "loss"
    tokens = tokens_of(events)
    by_tokens = None if None in tokens.values() else tokens

    def points(kind: str) -> list[Point]:
        return points_of(events, lambda event: event.get(field), kind, by_tokens)

    train, held_out = points("step"), points("eval")
    if not train:
        return None
    corpus = next((e.get("corpus") for e in reversed(events) if e.get("kind") == "run"), None) or {}
    levels = [
        (words, value, colour)
        for name, (words, colour) in REFERENCES.items()
        if in_bits and (value := number(corpus.get(name))) is not None
    ]
    last = held_out[-1] if held_out else train[-1]
    word = "bits per byte" if in_bits else "nats per token"
    name = corpus.get("name")
    about = f"{'held out' if held_out else 'train'} {last[1]:.3f} {word}"
    about += f" at step {last[2]:,.0f}" + (f", corpus {name}" if name else "")
    canvas = chart(
        "Loss",
        about,
        [
            Line(name="train", points=train, colour=svg.BLUE),
            Line(name="held out", points=held_out, colour=svg.ORANGE, mean=False),
        ],
        y_label=word,
        x_label="steps" if by_tokens is None else "tokens",
        text=lambda value: f"{value:.3f}",
        height=HIGH,
        x_log=log,
        y_log=log,
        levels=levels,
        marks=_resumes(events, by_tokens),
    )
    assert canvas is not None, "there is a point"
    canvas.title = f"loss: {about}"
    return canvas


def _resumes(
    events: Sequence[Event], tokens: Mapping[Any, float | None] | None
) -> list[tuple[float, str]]:
    """The places where the run was resumed, each with a label."""
    marks = []
    for event in events:
        step = number(event.get("step")) if event.get("kind") == "resume" else None
        if step is None:
            continue
        before = [held for at, held in (tokens or {}).items() if (number(at) or 0) <= step]
        at = step if tokens is None else before[-1] if before else 0.0
        if at is not None:
            marks.append((at, f"resumed at step {step:,.0f}"))
    return marks


def losses_canvas(
    runs: Mapping[str, Sequence[Event]], *, evaluated: bool, log: bool
) -> svg.Canvas | None:
    """The losses of several runs over tokens, held-out (``evaluated``) or of training."""
    kind = "eval" if evaluated else "step"
    lines = [
        Line(name=name, points=points_of(events, loss_of, kind, tokens_of(events)), colour=colour)
        for (name, events), colour in zip(runs.items(), svg.PALETTE, strict=False)
    ]
    return chart(
        "Loss of each run",
        f"{'held out' if evaluated else 'of training'}, by tokens",
        lines,
        y_label="bits per byte, or nats",
        x_label="tokens",
        text=lambda value: f"{value:.3f}",
        height=HIGH,
        x_log=log,
        y_log=log,
    )
