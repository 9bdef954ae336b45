# SPDX-License-Identifier: Apache-2.0
"""SVG without a drawing library, fonts or a network: a canvas, scales, ticks, colours; the title,
legend and axes of a chart.

A canvas has a light and a dark theme, and follows the reader's setting. Tips are ``<title>``
elements, which browsers show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH = 860
LEFT, RIGHT = 78, 24
# Okabe and Ito's colours: colour-blind people can distinguish them, on both themes.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, YELLOW, GREY = "#56B4E9", "#CC79A7", "#D9C400", "#8A8F98"
VIOLET, MINT = "#6A5ACD", "#8FD3B6"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
KIND_COLOURS = {
    "main": BLUE,
    "compute": SKY,
    "grad": ORANGE,
    "grad_accumulator": YELLOW,
    "grad_transient": RED,
    "receive": PINK,
    "step": MINT,  # beside the optimizer's green
    "activations": VIOLET,
    "pool_idle": GREY,
    "optimizer": GREEN,
    "other": GREY,
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# class: (property, light, dark)
THEME = {
    "paper": ("fill", "#ffffff", "#14171c"),
    "ink": ("fill", "#1c2128", "#e8eaed"),
    "faint": ("fill", "#5c636d", "#a3aab4"),
    "axis": ("stroke", "#5c636d", "#a3aab4"),
    "grid": ("stroke", "#e3e6ea", "#2b3038"),
    "edge": ("stroke", "#ffffff", "#14171c"),
    "pad": ("fill", "#eceef1", "#23272e"),
    "hatch": ("stroke", "#a7adb6", "#5a616b"),
}


def theme_css(scope: str, dark: bool) -> str:
    """CSS rules for the classes of THEME, within a selector."""
    return "".join(
        f"{scope} .{name}{{{prop}:{night if dark else day}}}"
        for name, (prop, day, night) in THEME.items()
    )


def text_width(text: str, size: float = 12) -> float:
    """An estimate of the width of text. It is a little too large for most fonts."""
    narrow = sum(letter in "iljtf.,:;|!'()[] " for letter in text)
    wide = sum(letter in "mwMW%@" or letter.isupper() for letter in text)
    return size * (0.6 * len(text) - 0.24 * narrow + 0.2 * wide)


@dataclass
class Canvas:
    """Shapes in the order of drawing. The height may be set after all shapes are drawn."""

    width: float
    height: float
    title: str
    shapes: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, *, tip: str = "", **style: Any
    ) -> None:
        box = {"x": x, "y": y, "width": max(width, 0), "height": max(height, 0)}
        self._add("rect", box | style, tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, **style: Any) -> None:
        self._add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2} | style)

    def path(self, points: Sequence[tuple[float, float]], *, tip: str = "", **style: Any) -> None:
        moves = " ".join(
            f"{'L' if position else 'M'}{_number(x)} {_number(y)}"
            for position, (x, y) in enumerate(points)
        )
        self._add("path", {"d": moves, "fill": "none"} | style, tip)

    def area(self, points: Sequence[tuple[float, float]], *, tip: str = "", **style: Any) -> None:
        places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polygon", {"points": places} | style, tip)

    def circle(self, x: float, y: float, r: float, *, tip: str = "", **style: Any) -> None:
        self._add("circle", {"cx": x, "cy": y, "r": r} | style, tip)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        **style: Any,
    ) -> None:
        style = {"class_": "ink"} | style
        attributes = {"x": x, "y": y, "font-size": size, "text-anchor": anchor} | style
        self.shapes.append(f"<text{_attributes(attributes)}>{escape(text)}</text>")

    def note(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Small faint text."""
        self.text(x, y, text, size=11, anchor=anchor, class_="faint")

    def text_on(self, x: float, y: float, text: str, size: float, box: str, **style: Any) -> None:
        """Text on a box of this colour. The pointer reaches the box through the text."""
        style |= {"class_": "", "fill": ink_on(box), "pointer_events": "none"}
        self.text(x, y, text, size=size, **style)

    def render(self, *, standalone: bool = True, dark: bool | None = None) -> str:
        """The SVG as a standalone file, or as a part of the page. ``dark=None``: a standalone file
        has both themes, and the reader's setting chooses."""
        style = f"<style>text{{font-family:{escape(FONT, quote=False)}}}"
        style += theme_css("svg", bool(dark))
        if dark is None:
            style += f"@media(prefers-color-scheme:dark){{{theme_css('svg', True)}}}"
        style += "</style>"
        body = "\n".join(self.shapes)
        size = f'viewBox="0 0 {_number(self.width)} {_number(self.height)}"'
        if standalone:
            size += f' width="{_number(self.width)}" height="{_number(self.height)}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            f'aria-label="{escape(self.title)}">'
            f"{f'<title>{escape(self.title)}</title>' if standalone else ''}"
            f"{style + HATCHES if standalone else ''}\n"
            f'<rect class="paper" width="100%" height="100%"/>\n{body}\n</svg>'
        )

    def _repr_svg_(self) -> str:
        """The picture in a notebook."""
        return self.render()

    def _add(self, name: str, attributes: dict[str, Any], tip: str = "") -> None:
        end = f"><title>{escape(tip)}</title></{name}>" if tip else "/>"
        self.shapes.append(f"<{name}{_attributes(attributes)}{end}")


# Padding and waits are hatched, so that they differ without colours. Once in each file or page.
HATCHES = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="pad" width="6" height="6"/>'
    '<line class="hatch" x1="0" y1="0" x2="0" y2="6" stroke-width="2"/></pattern>'
    '<pattern id="waiting" width="5" height="5" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(-45)"><rect width="5" height="5" fill="{RED}"/>'
    '<line x1="0" y1="0" x2="0" y2="5" stroke="#ffffff" stroke-opacity="0.55" stroke-width="2"/>'
    "</pattern></defs>"
)


def _attributes(values: dict[str, Any]) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in values.items()
    )


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else "#ffffff"


@dataclass(frozen=True)
class Scale:
    """Maps values to positions, linearly or by logarithm."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self, count: int, *, base: int = 10) -> list[float]:
        """Round numbers along the scale."""
        if not self.log:
            return ticks(self.low, self.high, count, base=base)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        chosen: list[float] = []
        for factors in ((1,), (1, 3), (1, 2, 5)):  # the finest that has not too many
            values = [factor * 10.0**power for power in powers for factor in factors]
            finer = [value for value in values if self.low <= value <= self.high]
            if chosen and len(finer) > count + 2:
                break
            chosen = finer
        return chosen if len(chosen) > 1 else ticks(self.low, self.high, count)


def ticks(low: float, high: float, count: int = 5, *, base: int = 10) -> list[float]:
    """Round numbers from low to high: 1, 2 or 5 times a power; powers of two for bytes.

    >>> ticks(0, 10), ticks(0, 100 * 1024, base=2)[-1] / 1024
    ([0, 2, 4, 6, 8, 10], 96.0)
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    if base == 2:
        step = 2.0 ** math.ceil(math.log2(rough))
    else:
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    found = [number * step for number in range(first, last + 1)]
    return [int(value) if float(value).is_integer() else value for value in found]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted positions, with a gap, so that labels do not overlap."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    at = low
    for index in order:
        at = max(wanted[index], at)
        placed[index] = at
        at += gap
    limit = high
    for index in reversed(order):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed


# ------------------------------------------------------------------------------ around a chart


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a name, a colour, and whether it is hatched."""

    name: str
    colour: str
    hatched: bool = False


@dataclass
class Frame:
    """Room for a chart on a canvas, below its title and legend."""

    canvas: Canvas
    x: Scale
    y: Scale
    top: float
    bottom: float


def draw_title(canvas: Canvas, title: str, subtitle: str, keys: Sequence[Key] = ()) -> float:
    """Draw title, subtitle and legend. Returns the top of the chart."""
    canvas.text(16, 26, title, size=16, font_weight=600)
    at = 26.0
    if subtitle:
        at += 18
        canvas.text(16, at, subtitle, size=12, class_="faint")
    for row in _legend_rows(keys, canvas.width):
        at += 20
        x = 16.0
        for key in row:
            fill = "url(#waiting)" if key.hatched else key.colour
            fill = "url(#padding)" if key.name == "padding" else fill
            canvas.rect(x, at - 10, 12, 12, fill=fill, rx=2)
            canvas.text(x + 18, at, key.name, size=12)
            x += _key_width(key)
    return at + 14


def _key_width(key: Key) -> float:
    return 18 + text_width(key.name) + 18


def _legend_rows(keys: Sequence[Key], width: float) -> list[list[Key]]:
    """Rows of entries that fit the width of the canvas."""
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
        canvas.note(LEFT - 8, y(value) + 4, y_text(value), "end")
    draw_x_axis(canvas, x, top, bottom, x_label, x_text)
    middle = (top + bottom) / 2
    turned = f"rotate(-90 16 {middle:.0f})"
    canvas.text(16, middle, y_label, anchor="middle", class_="faint", transform=turned)
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
    """Draw the axis; ticks only if it has a label."""
    for value in x.ticks(7, base=base) if label else ():
        canvas.line(x(value), top, x(value), bottom, class_="grid")
        canvas.line(x(value), bottom, x(value), bottom + 5, class_="axis")
        canvas.note(x(value), bottom + 18, text(value), "middle")
    canvas.line(x.begin, bottom, x.end, bottom, class_="axis")
    if label:
        canvas.text((x.begin + x.end) / 2, bottom + 38, label, anchor="middle", class_="faint")
