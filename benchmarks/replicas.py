# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.replicas``: what Muon sends and holds beside AdamW, by number of replicas.

Plans alone: one rank of a pretended mesh walks through a step of gpt_1b, the rank that sends most
where ranks differ. The tests compare such plans with the counters of real ranks, to the byte.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from shardwise.models.gpt import GPT
from shardwise.planning.figures import Plan
from shardwise.planning.plan import plan
from shardwise.train.recipes import gpt_1b

REPLICAS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARDS = 8  # of each replica under hsdp
BAR = 1.05  # Muon's figures over AdamW's
GIB = 2**30

# By name: the placements, the mesh of so many replicas, and options of the plan.
CASES: dict[str, tuple[str, Any, Mapping[str, Any]]] = {
    "zero(0)": ("zero0", lambda count: {"dp": count}, {}),
    f"hsdp, {SHARDS} shards": ("hsdp", lambda count: {"dp_outer": count, "dp": SHARDS}, {}),
    "data_parallel, zero(0)": ("zero0", lambda count: {"dp": count}, {"bucket_mb": 256}),
    "data_parallel, zero(1)": ("zero1", lambda count: {"dp": count}, {"bucket_mb": 256}),
}

COLUMNS = {
    "replicas": ("replicas", "d"),
    "adamw_sent": ("AdamW sends GiB", ".3f"),
    "sent": ("Muon sends GiB", ".3f"),
    "received": ("receives GiB", ".3f"),
    "between": ("between replicas", ".3f"),
    "sent_ratio": ("sent / AdamW", ".3f"),
    "received_ratio": ("received / AdamW", ".3f"),
    "adamw_peak": ("AdamW peak GiB", ".2f"),
    "peak": ("Muon peak GiB", ".2f"),
    "peak_ratio": ("peak / AdamW", ".3f"),
    "rule": ("replicas divide", "s"),
}


def planned(name: str, count: int, optimizer: str) -> Plan:
    strategy, mesh, options = CASES[name]
    with torch.device("meta"):
        model = GPT(gpt_1b().model)
    return plan(model, mesh(count), strategy, optimizer=optimizer, **options)


def row_of(name: str, count: int) -> report.Row:
    adamw, muon = (planned(name, count, optimizer) for optimizer in ("adamw", "muon"))
    row: report.Row = {"replicas": count}
    for made, prefix in ((adamw, "adamw_"), (muon, "")):
        row |= {
            f"{prefix}sent": sum(one.wire_bytes for one in made.collectives) / GIB,
            f"{prefix}received": sum(one.received_bytes for one in made.collectives) / GIB,
            f"{prefix}peak": made.total / GIB,
        }
    for key in ("sent", "received", "peak"):
        row[f"{key}_ratio"] = row[key] / row[f"adamw_{key}"]  # type: ignore[operator]
    inner = "dp" if "dp_outer" in muon.mesh.names else ""
    outside = [one.wire_bytes for one in muon.collectives if one.axis != inner]
    kinds = {type(one).__name__ for one in muon.divisions.values()}
    names = {"ByMatrix": "by matrix", "Evenly": "evenly"}
    row |= {"between": sum(outside) / GIB, "rule": ", ".join(names[one] for one in sorted(kinds))}
    return row


def run(every: Sequence[int]) -> list[report.Table]:
    tables = []
    for name in CASES:
        rows = [row_of(name, count) for count in every]
        worst = max(
            float(row[f"{key}_ratio"] or 0) for row in rows for key in ("sent", "received", "peak")
        )
        note = (
            f"gpt_1b, fp32 gradients, one step of the busiest rank. Highest ratio to AdamW: "
            f"{worst:.3f} (bar {BAR})."
        )
        tables.append(report.Table(title=name, note=note, columns=COLUMNS, rows=rows))
    return tables


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--largest", type=int, default=REPLICAS[-1], help="replicas go up to this")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    facts = report.circumstances(arguments, "replicas")
    tables = run([count for count in REPLICAS if count <= options.largest])
    for path in report.write(tables, facts, "replicas", options.results):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
