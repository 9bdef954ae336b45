# SPDX-License-Identifier: Apache-2.0
"""Two pictures of a plan: where every row lies, and what each strategy costs a rank.

Both read the plain values of ``Plan.as_dict()``, so a page can be made from an events file alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.layout import rows_text
from shardwise.report.axes import WIDTH, Key, draw_axes, draw_title, title_height
from shardwise.report.planned import Figures
from shardwise.report.sizes import count_text, size_text, tick_text
from shardwise.report.svg import (
    GREEN,
    KIND_COLOURS,
    PALETTE,
    RED,
    Canvas,
    Scale,
    ink_on,
    text_width,
)

ROW, ROW_GAP = 20, 3
MAX_UNITS = 24


def map_canvas(shard_map: Mapping[str, Any]) -> Canvas:
    """Rows are ranks, across are the bytes of each unit's buffer, coloured by parameter."""
    # Runs of before experts could be spread have one list of rows, for all units.
    units = [(unit, unit.get("rows") or shard_map["rows"]) for unit in shard_map["units"]]
    shown = units[:MAX_UNITS]
    margin = 24 + max(text_width(row["ranks"], 12) for _, rows in units for row in rows)
    heights = [unit_height(rows) for _, rows in shown]
    about = f"main weights over {shard_map['num_ranks']:,} ranks in {shard_map['num_shards']:,} "
    about += "shards; one colour a parameter, to scale"
    keys = [Key("padding", "")]
    hidden = len(units) - len(shown)
    height = title_height(about, keys, WIDTH) + sum(heights) + (20 if hidden else 0) + 8
    canvas = Canvas(WIDTH, height, "shard map")
    at = draw_title(canvas, "Shard map", about, keys) + 6
    for (unit, rows), block in zip(shown, heights, strict=True):
        draw_unit(canvas, unit, rows, at, margin)
        at += block
    if hidden:
        canvas.text(16, at + 8, f"and {hidden} more kinds of units", class_="faint")
    return canvas


def unit_height(rows: Sequence[Mapping[str, Any]]) -> float:
    gaps = sum(_skips(rows, position) for position in range(len(rows)))
    return 22 + len(rows) * (ROW + ROW_GAP) + gaps * 14 + 26


def _skips(rows: Sequence[Mapping[str, Any]], position: int) -> bool:
    return position > 0 and rows[position]["shard"] != rows[position - 1]["shard"] + 1


def draw_unit(
    canvas: Canvas,
    unit: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    top: float,
    margin: float,
) -> None:
    size, width = unit["shard_size"], unit["itemsize"]
    share = 100 * unit["padding"] / unit["numel"]
    canvas.text(16, top + 10, unit["name"], size=13, font_weight=600)
    canvas.text(
        canvas.width - 24,
        top + 10,
        f"{size_text(size * width)} of {unit['dtype']} per shard, {share:.2f} % padding",
        size=11,
        anchor="end",
        class_="faint",
    )
    x = Scale(0, size, margin, canvas.width - 24)
    y = top + 22
    for position, row in enumerate(rows):
        if _skips(rows, position):
            canvas.text(margin - 8, y + 8, "...", anchor="end", class_="faint")
            y += 14
        canvas.text(margin - 8, y + 14, row["ranks"], size=12, anchor="end")
        canvas.rect(
            x.begin, y, x.end - x.begin, ROW, fill="url(#padding)", tip=f"{row['ranks']}: padding"
        )
        _draw_row(canvas, unit, row, x, y)
        y += ROW + ROW_GAP


def _draw_row(
    canvas: Canvas, unit: Mapping[str, Any], row: Mapping[str, Any], x: Scale, y: float
) -> None:
    size, width, begin = unit["shard_size"], unit["itemsize"], row["shard"] * unit["shard_size"]
    for index, item in enumerate(unit["items"]):
        shape = tuple(item["shape"])
        numel = math.prod(shape)
        low = min(max(begin - item["start"], 0), numel)
        high = min(max(begin + size - item["start"], 0), numel)
        if low >= high:
            continue
        left = x(item["start"] + low - begin)
        right = x(item["start"] + high - begin)
        rows = rows_text(shape, low, high)
        first = (item["start"] + low - begin) * width
        tip = f"{row['ranks']}: {item['name']} {list(shape)}{rows or ', all of it'}; "
        tip += f"{size_text((high - low) * width)}, bytes {first:,} to "
        tip += f"{first + (high - low) * width:,} of the shard"
        colour = PALETTE[index % len(PALETTE)]
        canvas.rect(left, y, right - left, ROW, fill=colour, class_="edge", stroke_width=1, tip=tip)
        short = item["name"].removesuffix(".weight")
        for label in (item["name"] + rows, item["name"], short, short.rsplit(".", 1)[-1]):
            if text_width(label, 11) + 8 < right - left:
                canvas.text(
                    left + 5,
                    y + 14,
                    label,
                    size=11,
                    class_="",
                    fill=ink_on(colour),
                    pointer_events="none",
                )
                break


BARS = {
    "main": "main weights",
    "compute": "compute weights kept",
    "grad": "gradients",
    "optimizer": "optimizer state",
    "transient": "at the peak beyond that",
}
_BAR_COLOURS = KIND_COLOURS | {"transient": RED, "optimizer": GREEN}


def bars_of(plan: Figures) -> dict[str, int]:
    """The memory of one rank as a bar: at rest, with gradients, and what the peak adds."""
    held = {
        "main": plan.rest.get("main", 0),
        "compute": plan.rest.get("compute", 0),
        "grad": plan.loaded.get("grad", 0),
        "optimizer": plan.optimizer_bytes,
    }
    return held | {"transient": plan.peak_total + plan.optimizer_bytes - sum(held.values())}


def bars_canvas(
    bars: Mapping[str, Mapping[str, int]], chosen: str = "", memory: int | None = None
) -> Canvas:
    """Stacked bars, one a strategy; the one in use is marked."""
    keys = [Key(words, _BAR_COLOURS[kind]) for kind, words in BARS.items()]
    about = "peak of one step by the plan, activations not counted"
    height = title_height(about, keys, WIDTH) + 320
    canvas = Canvas(WIDTH, height, "bytes per rank by strategy")
    top = draw_title(canvas, "Bytes per rank by strategy", about, keys)
    highest = max([sum(bar.values()) for bar in bars.values()] + [memory or 0])
    frame = draw_axes(
        canvas,
        top=top + 14,
        height=height - top - 14 - 44,
        x_range=(0, 1),
        y_range=(0, highest * 1.08 or 1),
        x_label="",
        y_label="bytes per rank",
        x_text=lambda value: "",
        y_text=lambda value: tick_text(size_text(value)),
        y_base=2,
    )
    step = (frame.x.end - frame.x.begin) / len(bars)
    width = min(84.0, step * 0.62)
    for position, (name, bar) in enumerate(bars.items()):
        middle = frame.x.begin + step * (position + 0.5)
        base = 0
        for kind, words in BARS.items():
            nbytes = bar.get(kind, 0)
            if nbytes:
                y = frame.y(base + nbytes)
                canvas.rect(
                    middle - width / 2,
                    y,
                    width,
                    frame.y(base) - y,
                    class_="edge",
                    stroke_width=1,
                    fill=_BAR_COLOURS[kind],
                    tip=f"{name}: {words} {size_text(nbytes)}",
                )
            base += nbytes
        weight = 700 if name == chosen else 400
        canvas.text(
            middle, frame.y(base) - 6, size_text(base), size=12, anchor="middle", font_weight=weight
        )
        label = f"{name} (this run)" if name == chosen else name
        canvas.text(middle, frame.bottom + 20, label, size=12, anchor="middle", font_weight=weight)
    if memory:
        canvas.line(
            frame.x.begin,
            frame.y(memory),
            frame.x.end,
            frame.y(memory),
            stroke=RED,
            stroke_width=1.5,
            stroke_dasharray="6 4",
        )
        canvas.text(
            frame.x.end,
            frame.y(memory) - 5,
            f"a rank has {size_text(memory)}",
            size=11,
            anchor="end",
        )
    return canvas


def plan_text_line(plan: Mapping[str, Any]) -> str:
    """One sentence about a plan's dictionary."""
    mesh = " x ".join(f"{name}={size}" for name, size in plan["mesh"].items())
    spread = f", experts over ep={plan['ep']}" if plan.get("ep", 1) > 1 else ""
    return (
        f"{plan['model']}: {count_text(plan['num_parameters'])} parameters, {plan['strategy']} "
        f"over {mesh}{spread}, {plan['optimizer']}: {size_text(plan['total'])} per rank at the peak"
    )
