# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench fp8-bytes``: what a rank of 8 gathers of the 0.96B GPT's weights in a step, by
``sw.plan``: every format, every strategy, with and without activation checkpointing. No GPU, no
process."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.models import GPT, GPTConfig
from benchmarks.report import Row, Table

MESHES: dict[str, dict[str, int]] = {
    "zero1": {"dp": 8},
    "zero2": {"dp": 8},
    "zero3": {"dp": 8},
    "hsdp": {"dp_outer": 2, "dp": 4},
    "hfsdp": {"dp_outer": 2, "dp": 4},
}
WORDS = ("*", "head.weight")
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"weights": "bf16"},
    "mxfp8": {"weights": "mxfp8"},
    "fp8_block": {"weights": "fp8_block"},
    "fp8_block, head too": {"weights": "fp8_block", "include": WORDS},
}


def gathered(precision: dict[str, Any], strategy: str, recompute: bool, tiny: bool) -> int:
    import shardwise as sw

    with torch.device("meta"):
        model = GPT(GPTConfig.tiny() if tiny else GPTConfig())
    if recompute:
        model.recomputed = list(model.blocks)  # type: ignore[assignment]
    made = sw.plan(
        model, MESHES[strategy], strategy, precision=sw.Precision(reduce="fp32", **precision)
    )
    return sum(nbytes for _, nbytes, _ in made.gathered.values())


def table(tiny: bool) -> Table:
    cases = [(strategy, False) for strategy in MESHES] + [("zero3", True)]
    names = [f"{s}, recomputing" if again else s for s, again in cases]
    base: list[int] = []
    rows: list[Row] = []
    for title, precision in PRECISIONS.items():
        row: Row = {"weights": title}
        found = [gathered(precision, *case, tiny) for case in cases]
        base = base or found
        for name, mine, theirs in zip(names, found, base, strict=True):
            row |= {name: mine / theirs, f"{name} bytes": mine}
        rows.append(row)
    return Table(
        title="Bytes gathered by a rank of 8" + (", TINY DRY RUN" if tiny else ""),
        note="The 0.96B GPT (16 x 2048, SwiGLU 5632, vocab 32768 untied), weights of one step, as\n"
        "a share of bf16's. hsdp, hfsdp: 2 x 4 ranks. recomputing: each block's forward runs\n"
        "again in backward.",
        columns={"weights": ("weights", "s"), **{name: (name, ".3f") for name in names}},
        rows=rows,
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="shardwise bench fp8-bytes", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder to write to")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    options = parser.parse_args(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench fp8-bytes " + shlex.join(arguments)
    paths = report.write([table(options.tiny)], facts, "fp8-bytes", options.results)
    print(paths[0].read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
