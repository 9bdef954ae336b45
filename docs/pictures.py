# SPDX-License-Identifier: Apache-2.0
"""``python docs/pictures.py``: make the pictures and tables in docs/*.md anew from the code.

A picture stands between ``<!-- picture: name -->`` and the next ``<!-- end -->``. A test compares
each with what the code says now (tests/unit/test_documents.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from shardwise.layout import TENSOR, Item, plan
from shardwise.placements import PARTIAL, REPLICATE, STRATEGIES
from shardwise.placements import steps as steps_between
from shardwise.shard import unit

SHAPES = {"wq": (8, 16), "wk": (4, 16), "wv": (4, 16), "wo": (16, 8), "norm": (16,)}


def rows_cut() -> str:
    return plan([Item(name, shape) for name, shape in SHAPES.items()], 2).picture(60)


def whole_matrices() -> str:
    items = [Item(name, shape, TENSOR) for name, shape in SHAPES.items() if len(shape) == 2]
    return plan(items, 2).picture(60)


def stages() -> str:
    """Which collectives each strategy runs, from its placements alone."""
    words = {"R": "all-reduce", "S": "reduce-scatter"}
    lines = [f"{'':8}{'gather of weights':30}{'each microbatch':24}last microbatch"]
    for name, placements in STRATEGIES.items():
        axes = ["dp"] if len(placements.main) == 1 else ["dp_outer", "dp"]
        everywhere = (REPLICATE,) * len(axes)
        gathers = [axes[step.axis] for step in steps_between(placements.main, everywhere)]
        partial = (PARTIAL,) * len(axes)
        inner = [
            f"{words[str(step.there)]} {axes[step.axis]}"
            for step in steps_between(partial, placements.grad)
        ]
        outer = [
            f"{words[str(step.there)]} {axes[step.axis]}"
            for step in steps_between(placements.grad, placements.main)
        ]
        gather = f"all-gather {', '.join(gathers)}" if gathers else "-"
        columns = f"{gather:30}{', '.join(inner) or '-':24}{', '.join(outer) or '-'}"
        lines.append(f"{name:8}{columns}".rstrip())
    return "\n".join(lines)


def unit_events() -> str:
    """The table of events in the docstring of ``shard/unit.py``."""
    text = unit.__doc__ or ""
    table = text[text.index("    event ") :].split("\n\n", 1)[0]
    return "\n".join(line[4:].rstrip() for line in table.splitlines())


PICTURES: dict[str, Callable[[], str]] = {
    "rows cut": rows_cut,
    "whole matrices": whole_matrices,
    "stages": stages,
    "unit events": unit_events,
}
PLACE = re.compile(r"(<!-- picture: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def drawn(text: str) -> str:
    """``text`` with every picture as the code makes it now."""
    return PLACE.sub(lambda m: f"{m[1]}```text\n{PICTURES[m[2]]()}\n```\n{m[4]}", text)


if __name__ == "__main__":
    for page in sorted(Path(__file__).parent.glob("*.md")):
        page.write_text(drawn(page.read_text()))
