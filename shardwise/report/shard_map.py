# SPDX-License-Identifier: Apache-2.0
"""The shard map: which rank holds which rows, as plain values, and as strips for a terminal.

    rank 0 | wq rows 0-3   | wk rows 0-1 |
    rank 1 | wk rows 2-3   | wv rows 0-3 |
    rank 2 | wo rows 0-3   | ..pad..     |

Of thousands of ranks the first few and the last are drawn; of units that are alike, one. Experts
that are spread over ranks are drawn as one share of them: ranks of one row hold the same place in
different shares.
"""

from __future__ import annotations

from typing import Any

from shardwise.report.planned import Figures, PlannedUnit

MAX_ROWS = 8


def shard_map(plan: Figures) -> dict[str, Any]:
    """Rows and units as JSON can hold them; ``start`` counts elements from the buffer's begin."""
    rows = {ep: rows_of(plan, ep) for ep in {1, plan.options.ep}}
    return {
        "num_ranks": plan.mesh.num_ranks,
        "num_shards": plan.mesh.num_shards(plan.options.placements.main),
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
            for unit in plan.units
            for number, group in enumerate(unit.groups)
        ],
    }


def buffer_name(unit: PlannedUnit, number: int) -> str:
    """A unit's name, and which of its buffers where it has several."""
    several = f", buffer {number + 1} of {len(unit.groups)}" if len(unit.groups) > 1 else ""
    return unit.name + several


def chosen_shards(num_shards: int) -> list[int]:
    """All, or the first ones and the last."""
    if num_shards <= MAX_ROWS:
        return list(range(num_shards))
    return [*range(MAX_ROWS - 1), num_shards - 1]


def rows_of(plan: Figures, ep: int) -> list[tuple[int, str]]:
    """(shard, the ranks that hold it): one, or one of each replica and of each share of experts."""
    main, mesh = plan.options.placements.main, plan.mesh.without(ep)
    shards, ranks = mesh.num_shards(main), plan.mesh.num_ranks
    each = ranks // shards
    if shards == 1:
        return [(0, "rank 0" if each == 1 else f"all {each} ranks")]
    found: dict[int, list[int]] = {shard: [] for shard in chosen_shards(shards)}
    for rank in range(ranks):
        holders = found.get(mesh.shard(main, rank // ep))
        if holders is not None and len(holders) < 4:
            holders.append(rank)
    plural, more = "s" if each > 1 else "", ", ..." if each > 4 else ""
    return [
        (shard, f"rank{plural} {', '.join(map(str, holders))}{more}")
        for shard, holders in found.items()
    ]


def map_text(plan: Figures, width: int = 72) -> str:
    """Strips to scale, for every kind of unit."""
    rows = {ep: rows_of(plan, ep) for ep in {1, plan.options.ep}}
    margin = max(len(label) for every in rows.values() for _, label in every)
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
            before = -1
            for shard, label in rows[unit.ep]:
                if shard != before + 1:
                    lines.append(f"{'...':>{margin}}")
                before = shard
                lines.append(f"{label:>{margin}} {layout.strip(shard, width)}")
            lines.append("")
    return "\n".join(lines).rstrip()
