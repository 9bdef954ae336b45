# SPDX-License-Identifier: Apache-2.0
"""Tables with ratios, printed and kept: each number stays beside its command, date and machine."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.systems import BASELINE, TITLES
from shardwise.report.origin import cores, cpu_name, revision

Cell = float | int | str | None
Row = dict[str, Cell]
HERE = Path(__file__).parent
RESULTS = HERE / "results"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One measurement: ``columns`` maps a row's key to its heading and format, in print order."""

    title: str
    note: str
    columns: Mapping[str, tuple[str, str]]
    rows: Sequence[Row]

    def markdown(self) -> str:
        heads = [heading for heading, _ in self.columns.values()]
        lines = [
            [
                TITLES[str(row["system"])] if key == "system" else show(row.get(key), style)
                for key, (_, style) in self.columns.items()
            ]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        body = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in (heads, *lines)]
        body.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join([f"## {self.title}", "", self.note, "", *body, ""])


def show(cell: Cell, style: str) -> str:
    return "" if cell is None else format(cell, style)


def add_ratios(rows: Sequence[Row], *keys: str) -> None:
    """Give each row ``<key>_ratio``, its value over the baseline's, where the baseline was run."""
    base = next((row for row in rows if row["system"] == BASELINE), None)
    for row in rows:
        for key in keys:
            mine, theirs = row.get(key), base and base.get(key)
            if isinstance(mine, float) and isinstance(theirs, float) and theirs:
                row[f"{key}_ratio"] = mine / theirs


def circumstances(arguments: Sequence[str], benchmark: str = "fsdp") -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "command": f"python -m benchmarks.{benchmark} {shlex.join(arguments)}".rstrip(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": revision(),
        "cpu": f"{cpu_name()}, {cores()} cores",
        "load": f"{os.getloadavg()[0]:.1f} before it began",
        "gpu": gpu,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def write(tables: Sequence[Table], facts: dict[str, str], name: str, folder: Path) -> list[Path]:
    """Write ``<name>.md`` (what is printed) and ``<name>.json`` (the same, unrounded)."""
    folder.mkdir(parents=True, exist_ok=True)
    head = [f"# {name}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    texts = {
        "md": "\n".join([*head, *(table.markdown() for table in tables)]),
        "json": json.dumps({**facts, "tables": [asdict(table) for table in tables]}, indent=1),
    }
    paths = []
    for suffix, text in texts.items():
        path = folder / f"{name}.{suffix}"
        path.write_text(text.rstrip() + "\n")
        paths.append(path)
    return paths


def publish(
    tables: Sequence[Table], facts: dict[str, str], name: str, folder: Path, *, tiny: bool = False
) -> None:
    """Write the tables to files named after the GPU, and print them. A dry run never overwrites
    figures that mean something."""
    where = "cpu" if facts["gpu"] == "none" else facts["gpu"].lower().replace(" ", "-")
    paths = write(tables, facts, "-".join([name, where, *(["tiny"] * tiny)]), folder)
    print(paths[0].read_text())
    print("written:", *paths)
