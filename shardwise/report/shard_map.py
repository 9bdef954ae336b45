# SPDX-License-Identifier: Apache-2.0
"""The shard map: the rows that each rank holds, as plain values, as text, and as a picture.

    rank 0 | wq rows 0-3   | wk rows 0-1 |
    rank 1 | wk rows 2-3   | wv rows 0-3 |
    rank 2 | wo rows 0-3   | ..pad..     |

With many ranks, only the first ranks and the last rank are drawn; of equal units, only one. For
experts that are spread over ranks, one share is drawn: the ranks of one row hold the same place in
different shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.core.layout import rows_text
from shardwise.report.planned import Options, PlannedUnit
from shardwise.report.svg import PALETTE, WIDTH, Canvas, Key, Scale, draw_title, text_width
from shardwise.words import size_text

MAX_ROWS = 8
MAX_UNITS = 24
ROW, ROW_GAP = 20, 3


def shard_map(units: Sequence[PlannedUnit], options: Options) -> dict[str, Any]:
    """Rows and units as values for JSON; ``start`` is an element's offset in the buffer."""
    rows = {ep: rows_of(options, ep) for ep in {1, options.ep}}
    return {
        "num_ranks": options.mesh.num_ranks,
        "num_shards": options.mesh.num_shards(options.placements.main),
        "units": [
            {
                "name": buffer_name(unit, number),
                "count": len(unit.names),
                "rows": [{"shard": shard, "ranks": ranks} for shard, ranks in rows[unit.ep]],
                "shard_size": group.layout.shard_size,
                "itemsize": group.dtype.itemsize,
                "dtype": str(group.dtype).removeprefix("torch."),
                "padding": group.layout.padding,
                "numel": group.layout.numel,
                "items": [
                    {"name": item.name, "shape": list(item.shape), "start": start}
                    for start, item in sorted(
                        zip(group.layout.starts, group.layout.items, strict=True),
                        key=lambda pair: pair[0],
                    )
                ],
            }
            for unit in units
            for number, group in enumerate(unit.groups)
        ],
    }


def buffer_name(unit: PlannedUnit, number: int) -> str:
    """The name of a unit, and the number of the buffer if the unit has several."""
    several = f", buffer {number + 1} of {len(unit.groups)}" if len(unit.groups) > 1 else ""
    return unit.name + several


def chosen_shards(num_shards: int) -> list[int]:
    """All shards, or the first shards and the last shard."""
    if num_shards <= MAX_ROWS:
        return list(range(num_shards))
    return [*range(MAX_ROWS - 1), num_shards - 1]


def rows_of(options: Options, ep: int) -> list[tuple[int, str]]:
    """(shard, the ranks that hold it): one rank of each replica and of each share of experts."""
    main, mesh = options.placements.main, options.mesh.without(ep)
    shards, ranks = mesh.num_shards(main), options.mesh.num_ranks
    each = ranks // shards
    if shards == 1:
        return [(0, "rank 0" if each == 1 else f"all {each} ranks")]
    found: dict[int, list[int]] = {shard: [] for shard in chosen_shards(shards)}
    held = mesh.shards(main)
    for rank in range(ranks):
        holders = found.get(held[rank // ep])
        if holders is not None and len(holders) < 4:
            holders.append(rank)
    plural, more = "s" if each > 1 else "", ", ..." if each > 4 else ""
    return [
        (shard, f"rank{plural} {', '.join(map(str, holders))}{more}")
        for shard, holders in found.items()
    ]


def map_text(units: Sequence[PlannedUnit], options: Options, width: int = 72) -> str:
    """Strips to scale, for every kind of unit."""
    rows = {ep: rows_of(options, ep) for ep in {1, options.ep}}
    margin = max(len(label) for labelled in rows.values() for _, label in labelled)
    lines = []
    for unit in units:
        for number, group in enumerate(unit.groups):
            layout = group.layout
            share = 100 * layout.padding / layout.numel
            lines.append(
                f"{buffer_name(unit, number)}: {len(layout.items)} parameters, "
                f"{layout.num_shards} shards of {layout.shard_size:,} elements, "
                f"{share:.2f} % padding"
            )
            before = -1
            for shard, label in rows[unit.ep]:
                if shard != before + 1:
                    lines.append(f"{'...':>{margin}}")
                before = shard
                lines.append(f"{label:>{margin}} {layout.strip(shard, width)}")
            lines.append("")
    return "\n".join(lines).rstrip()


# ------------------------------------------------------------------------------ the picture


def map_canvas(shard_map: Mapping[str, Any]) -> Canvas:
    """A row for each rank; from left to right the bytes of each unit's buffer, coloured by
    parameter. Drawn from plain values, so that an events file is enough for a page."""
    units = shard_map["units"]
    shown = units[:MAX_UNITS]
    margin = 24 + max(text_width(row["ranks"], 12) for unit in units for row in unit["rows"])
    about = f"main weights over {shard_map['num_ranks']:,} ranks in {shard_map['num_shards']:,} "
    about += "shards; one colour for each parameter, to scale"
    hidden = len(units) - len(shown)
    canvas = Canvas(WIDTH, 0, "shard map")
    at = draw_title(canvas, "Shard map", about, [Key("padding", "")]) + 6
    for unit in shown:
        at = draw_unit(canvas, unit, at, margin)
    if hidden:
        canvas.text(16, at + 8, f"and {hidden} more kinds of units", class_="faint")
    canvas.height = at + (20 if hidden else 0) + 2
    return canvas


def draw_unit(canvas: Canvas, unit: Mapping[str, Any], top: float, margin: float) -> float:
    """Draw one unit. Returns the top of the next unit."""
    rows, size, width = unit["rows"], unit["shard_size"], unit["itemsize"]
    share = 100 * unit["padding"] / unit["numel"]
    canvas.text(16, top + 10, unit["name"], size=13, font_weight=600)
    about = f"{size_text(size * width)} of {unit['dtype']} per shard, {share:.2f} % padding"
    canvas.note(canvas.width - 24, top + 10, about, "end")
    x = Scale(0, size, margin, canvas.width - 24)
    y = top + 22
    for position, row in enumerate(rows):
        if position and row["shard"] != rows[position - 1]["shard"] + 1:
            canvas.text(margin - 8, y + 8, "...", anchor="end", class_="faint")
            y += 14
        canvas.text(margin - 8, y + 14, row["ranks"], size=12, anchor="end")
        canvas.rect(
            x.begin, y, x.end - x.begin, ROW, fill="url(#padding)", tip=f"{row['ranks']}: padding"
        )
        _draw_row(canvas, unit, row, x, y)
        y += ROW + ROW_GAP
    return y + 26


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
                canvas.text_on(left + 5, y + 14, label, 11, colour)
                break
