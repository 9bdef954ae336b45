# SPDX-License-Identifier: Apache-2.0
"""The frame of a chart: title, legend, axes with units, a grid. What is inside is charts.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.report.svg import Canvas, Scale, text_width

WIDTH = 860
LEFT, RIGHT = 78, 24


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a name, and how what it names is drawn."""

    name: str
    colour: str
    hatched: bool = False
    dashed: bool = False


@dataclass
class Frame:
    """Room for a chart on a canvas, below its title and legend."""

    canvas: Canvas
    x: Scale
    y: Scale
    top: float
    bottom: float


def title_height(subtitle: str, keys: Sequence[Key], width: float) -> float:
    rows = len(_legend_rows(keys, width)) if keys else 0
    return 30 + (18 if subtitle else 0) + 20 * rows + 10


def draw_title(canvas: Canvas, title: str, subtitle: str, keys: Sequence[Key] = ()) -> float:
    """Title, subtitle, legend; returns where the chart may begin."""
    canvas.text(16, 26, title, size=16, font_weight=600)
    at = 26.0
    if subtitle:
        at += 18
        canvas.text(16, at, subtitle, size=12, class_="faint")
    for row in _legend_rows(keys, canvas.width):
        at += 20
        x = 16.0
        for key in row:
            if key.dashed:
                canvas.line(
                    x,
                    at - 4,
                    x + 14,
                    at - 4,
                    stroke=key.colour,
                    stroke_width=2,
                    stroke_dasharray="4 3",
                )
            else:
                fill = "url(#waiting)" if key.hatched else key.colour
                fill = "url(#padding)" if key.name == "padding" else fill
                canvas.rect(x, at - 10, 12, 12, fill=fill, rx=2)
            canvas.text(x + 18, at, key.name, size=12)
            x += _key_width(key)
    return at + 14


def _key_width(key: Key) -> float:
    return 18 + text_width(key.name) + 18


def _legend_rows(keys: Sequence[Key], width: float) -> list[list[Key]]:
    """Broken where a row would leave the canvas."""
    rows: list[list[Key]] = []
    used = width
    for key in keys:
        if used + _key_width(key) > width - 16:
            rows.append([])
            used = 16
        rows[-1].append(key)
        used += _key_width(key)
    return rows


def draw_axes(
    canvas: Canvas,
    *,
    top: float,
    height: float,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    y_base: int = 10,
    x_log: bool = False,
    y_log: bool = False,
    right: float = RIGHT,
) -> Frame:
    """Grid lines, ticks and labels with their units around a chart."""
    bottom = top + height
    x = Scale(*x_range, LEFT, canvas.width - right, x_log)
    y = Scale(*y_range, bottom, top, y_log)
    for value in y.ticks(5, base=y_base):
        canvas.line(LEFT, y(value), canvas.width - right, y(value), class_="grid")
        canvas.text(LEFT - 8, y(value) + 4, y_text(value), size=11, anchor="end", class_="faint")
    draw_x_axis(canvas, x, top, bottom, x_label, x_text)
    middle = (top + bottom) / 2
    canvas.text(
        16,
        middle,
        y_label,
        size=12,
        anchor="middle",
        class_="faint",
        transform=f"rotate(-90 16 {middle:.0f})",
    )
    return Frame(canvas, x, y, top, bottom)


def draw_x_axis(
    canvas: Canvas,
    x: Scale,
    top: float,
    bottom: float,
    label: str,
    text: Callable[[float], str],
    base: int = 10,
) -> None:
    """Without a label there is nothing to measure along it, and no ticks."""
    for value in x.ticks(7, base=base) if label else ():
        canvas.line(x(value), top, x(value), bottom, class_="grid")
        canvas.line(x(value), bottom, x(value), bottom + 5, class_="axis")
        canvas.text(x(value), bottom + 18, text(value), size=11, anchor="middle", class_="faint")
    canvas.line(x.begin, bottom, x.end, bottom, class_="axis")
    if label:
        canvas.text((x.begin + x.end) / 2, bottom + 38, label, anchor="middle", class_="faint")
