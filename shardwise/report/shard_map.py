# SPDX-License-Identifier: Apache-2.0
"""The shard map: which rank holds which rows, as plain values, and as strips for a terminal.

    rank 0 | wq rows 0-3   | wk rows 0-1 |
    rank 1 | wk rows 2-3   | wv rows 0-3 |
    rank 2 | wo rows 0-3   | ..pad..     |

Of thousands of ranks the first few and the last are drawn; of units that are alike, one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardwise.layout import Layout

if TYPE_CHECKING:
    from shardwise.report.plan import Plan
    from shardwise.report.units import PlannedUnit

MAX_ROWS = 8


def shard_map(plan: Plan, max_rows: int = MAX_ROWS) -> dict[str, Any]:
    """Rows and units as JSON can hold them; ``start`` counts elements from the buffer's begin."""
    shards = plan.mesh.num_shards(plan.options.placements.main)
    return {
        "num_ranks": plan.mesh.num_ranks,
        "num_shards": shards,
        "rows": [
            {"shard": shard, "ranks": holders_text(plan, shard)}
            for shard in chosen_shards(shards, max_rows)
        ],
        "units": [
            {
                "name": buffer_name(unit, number),
                "count": len(unit.names),
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
            for unit in plan.units
            for number, group in enumerate(unit.groups)
        ],
    }


def buffer_name(unit: PlannedUnit, number: int) -> str:
    """A unit's name, and which of its buffers where it has several."""
    several = f", buffer {number + 1} of {len(unit.groups)}" if len(unit.groups) > 1 else ""
    return unit.name + several


def chosen_shards(num_shards: int, max_rows: int) -> list[int]:
    """All, or the first ones and the last."""
    if num_shards <= max_rows:
        return list(range(num_shards))
    return [*range(max_rows - 1), num_shards - 1]


def holders_text(plan: Plan, shard: int) -> str:
    """The ranks that hold a shard of main: one, or one of each replica."""
    shards = plan.mesh.num_shards(plan.options.placements.main)
    replicas = plan.mesh.num_ranks // shards
    if shards == 1:
        return "rank 0" if replicas == 1 else f"all {replicas} ranks"
    found = []
    for rank in range(plan.mesh.num_ranks):
        if plan.shard_of(rank) == shard:
            found.append(rank)
            if len(found) == min(replicas, 4):
                break
    more = ", ..." if replicas > len(found) else ""
    return f"rank{'s' if replicas > 1 else ''} {', '.join(map(str, found))}{more}"


def map_text(plan: Plan, width: int = 72, max_rows: int = MAX_ROWS) -> str:
    """Strips to scale, for every kind of unit."""
    shards = plan.mesh.num_shards(plan.options.placements.main)
    rows = chosen_shards(shards, max_rows)
    labels = [holders_text(plan, shard) for shard in rows]
    margin = max(map(len, labels))
    lines = []
    for unit in plan.units:
        for number, group in enumerate(unit.groups):
            layout = group.layout
            share = 100 * layout.padding / layout.numel
            lines.append(
                f"{buffer_name(unit, number)}: {len(layout.items)} parameters, "
                f"{layout.num_shards} shards of {layout.shard_size:,} elements, "
                f"{share:.2f} % padding"
            )
            for position, (shard, label) in enumerate(zip(rows, labels, strict=True)):
                if position and shard != rows[position - 1] + 1:
                    lines.append(f"{'...':>{margin}}")
                lines.append(f"{label:>{margin}} {strip(layout, shard, width)}")
            lines.append("")
    return "\n".join(lines).rstrip()


def strip(layout: Layout, shard: int, width: int) -> str:
    """One shard to scale: names, rows, and dots where padding lies."""
    cells = ["."] * width + ["|"]
    for index, item in enumerate(layout.items):
        if shard not in layout.holders(index):
            continue
        low, high = layout.piece(index, shard)
        base = layout.starts[index] - shard * layout.shard_size
        left = (base + low) * width // layout.shard_size
        length = (base + high) * width // layout.shard_size - left
        words = f"| {item.name}{rows_text(item.shape, low, high)}"
        cells[left : left + length] = words[:length].ljust(length)
    return "".join(cells)


def rows_text(shape: tuple[int, ...], low: int, high: int) -> str:
    """Which rows (or elements) of a parameter [low, high) are; nothing where it is all of it."""
    if high - low == math.prod(shape):
        return ""
    row = math.prod(shape[1:])
    unit, word = (1, "elements") if low % row or high % row else (row, "rows")
    return f" {word} {low // unit}-{high // unit - 1}"
