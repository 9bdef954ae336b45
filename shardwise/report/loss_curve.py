# SPDX-License-Identifier: Apache-2.0
"""The loss picture: bits per byte against tokens, beside what counting and zip would reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.report.axes import WIDTH, draw_axes, draw_title
from shardwise.report.series import (
    Event,
    Point,
    draw_line,
    events_of,
    labels_beside,
    number,
    smoothed,
    thinned,
)
from shardwise.report.sizes import count_text, tick_text
from shardwise.report.svg import BLUE, GREEN, GREY, ORANGE, PINK, RED, Canvas

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
