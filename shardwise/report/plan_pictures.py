# SPDX-License-Identifier: Apache-2.0
"""The shard map as a picture: where every row lies.

It is drawn from the plain values of ``Plan.as_dict()``, so a page can be made from an events file
alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.layout import rows_text
from shardwise.report.axes import WIDTH, Key, draw_title, title_height
from shardwise.report.sizes import count_text, size_text
from shardwise.report.svg import (
    PALETTE,
    Canvas,
    Scale,
    ink_on,
    text_width,
)

ROW, ROW_GAP = 20, 3
MAX_UNITS = 24


def map_canvas(shard_map: Mapping[str, Any]) -> Canvas:
    """Rows are ranks, across are the bytes of each unit's buffer, coloured by parameter."""
    units = [(unit, unit["rows"]) for unit in shard_map["units"]]
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


def plan_text_line(plan: Mapping[str, Any]) -> str:
    """One sentence about a plan's dictionary."""
    mesh = " x ".join(f"{name}={size}" for name, size in plan["mesh"].items())
    spread = f", experts over ep={plan['ep']}" if plan.get("ep", 1) > 1 else ""
    return (
        f"{plan['model']}: {count_text(plan['num_parameters'])} parameters, {plan['strategy']} "
        f"over {mesh}{spread}, {plan['optimizer']}: {size_text(plan['total'])} per rank at the peak"
    )
