# SPDX-License-Identifier: Apache-2.0
"""``python docs/pictures.py``: make the pictures and tables in docs/*.md anew from the code.

A picture stands between ``<!-- picture: name -->`` and the next ``<!-- end -->``. A test compares
each with what the code says now (tests/unit/test_documents.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from shardwise.core.layout import TENSOR, Item, Layout, plan
from shardwise.core.placements import PARTIAL, REPLICATE, STRATEGIES
from shardwise.core.placements import steps as steps_between
from shardwise.planning.shard_map import strip
from shardwise.shard import unit

SHAPES = {"wq": (8, 16), "wk": (4, 16), "wv": (4, 16), "wo": (16, 8), "norm": (16,)}


def picture(layout: Layout) -> str:
    return "\n".join(f"shard {shard} {strip(layout, shard, 60)}" for shard in range(2))


def rows_cut() -> str:
    return picture(plan([Item(name, shape) for name, shape in SHAPES.items()], 2))


def whole_matrices() -> str:
    items = [Item(name, shape, TENSOR) for name, shape in SHAPES.items() if len(shape) == 2]
    return picture(plan(items, 2))


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
    table = text[text.index("    forward ") :].split("\n\n", 1)[0]
    return "\n".join(line[4:].rstrip() for line in table.splitlines())


def support() -> str:
    """For each value of each feature, the values of the others that it cannot go with."""
    from tests import pairs

    names = list(pairs.FEATURES)
    width = max(len(value) for values in pairs.FEATURES.values() for value in values)
    lines = []
    for name in names:
        others = [other for other in names if other != name]
        for value in pairs.FEATURES[name]:
            marks = []
            for other in others:
                for with_it in pairs.FEATURES[other]:
                    case = pairs.plain({name: value, other: with_it})
                    if pairs.refusal(case) is not None:
                        marks.append(f"no  {with_it}")
            text = "; ".join(marks) or "yes with everything"
            lines.append(f"{value:{width}}  {text}")
    return "\n".join(lines)


def refusals() -> str:
    from tests import pairs

    found: dict[str, list[str]] = {}
    for one, other in pairs.pairs():
        case = pairs.plain(dict((one, other)))
        if (reason := pairs.refusal(case)) is not None:
            words = f'"... {reason} ..."'
            found.setdefault(words, []).append(f"{one[1]} with {other[1]}")
    return "\n".join(f"{', '.join(both)}\n    {words}" for words, both in found.items())


PICTURES: dict[str, Callable[[], str]] = {
    "support": support,
    "refusals": refusals,
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
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests/pairs.py
    for page in sorted(Path(__file__).parent.glob("*.md")):
        page.write_text(drawn(page.read_text()))
