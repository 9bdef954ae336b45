# SPDX-License-Identifier: Apache-2.0
"""The shard map: the rows that each rank holds, as text.

    rank 0 | wq rows 0-3   | wk rows 0-1 |
    rank 1 | wk rows 2-3   | wv rows 0-3 |
    rank 2 | wo rows 0-3   | ..pad..     |

With many ranks, only the first ranks and the last rank are drawn; of equal units, only one. For
experts that are spread over ranks, one share is drawn: the ranks of one row hold the same place in
different shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwise.core.layout import Layout, Shape
from shardwise.planning.planned import Options, PlannedUnit

MAX_ROWS = 8


def buffer_name(unit: PlannedUnit, number: int) -> str:
    """The name of a unit, and the number of the buffer if the unit has several."""
    count = len(unit.layouts)
    several = f", buffer {number + 1} of {count}" if count > 1 else ""
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
        for number, layout in enumerate(unit.layouts):
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
                lines.append(f"{label:>{margin}} {strip(layout, shard, width)}")
            lines.append("")
    return "\n".join(lines).rstrip()


def strip(layout: Layout, shard: int, width: int) -> str:
    """A picture of one shard, to scale: names, rows, and dots for padding."""
    cells = ["."] * width + ["|"]
    for index, item in enumerate(layout.items):
        if shard not in layout.holders(index):
            continue
        lo, hi = layout.piece(index, shard)
        base = layout.starts[index] - shard * layout.shard_size
        left = (base + lo) * width // layout.shard_size
        length = (base + hi) * width // layout.shard_size - left
        words = f"| {item.name}{_rows_text(item.shape, lo, hi)}"
        cells[left : left + length] = words[:length].ljust(length)
    return "".join(cells)


def _rows_text(shape: Shape, lo: int, hi: int) -> str:
    """The rows (or elements) of a parameter that [lo, hi) is; nothing for the whole parameter."""
    if hi - lo == prod(shape):
        return ""
    row = prod(shape[1:])
    unit, word = (1, "elements") if lo % row or hi % row else (row, "rows")
    return f" {word} {lo // unit}-{hi // unit - 1}"
