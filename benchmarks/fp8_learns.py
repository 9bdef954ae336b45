# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench fp8-learns``: the same runs in bf16 and with weights in fp8, Muon in all.

Each is a `shardwise train` of its own, one after another; what counts is held-out bits per byte at
the end, averaged over seeds. The bar: fp8 ends within 0.5 % of bf16.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks import report
from benchmarks.muon_vs_adamw import Curve, train

BASE = "bf16"
BAR = 0.5  # percent

Runs = Mapping[str, Mapping[int, Curve]]  # by precision and seed


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shardwise bench fp8-learns", description=__doc__)
    add = parser.add_argument
    add("recipe", nargs="?", default="default")
    add("--steps", type=int, help="default: the recipe's")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    formats = ("mxfp8", "mxfp8_2d", "fp8_block")
    add("--formats", nargs="+", choices=formats, default=["mxfp8_2d", "fp8_block"])
    add("--optimizer", default="muon")
    add("--strategy", default="zero3")
    add("--nproc", type=int, help="ranks; default: two, or one per GPU")
    add("--name", help="of the result files; default: fp8-learns-<recipe>")
    add("--results", type=Path, default=report.RESULTS, help="folder for .md and .json")
    return parser.parse_args(arguments)


def table(runs: Runs, words: str) -> report.Table:
    """A row for each seed and their mean; how far each format is from bf16, in percent of it."""
    bits = {
        precision: {seed: curve.bits[-1] for seed, curve in by_seed.items()}
        for precision, by_seed in runs.items()
    }
    rows: list[report.Row] = [
        {"seed": str(seed), **_row({p: bits[p][seed] for p in bits})} for seed in bits[BASE]
    ]
    rows.append({"seed": "mean", **_row({p: mean(bits[p].values()) for p in bits})})
    columns = {"seed": ("seed", "s"), BASE: (f"{BASE} bits/byte", ".4f")}
    for precision in list(bits)[1:]:
        columns[precision] = (f"{precision} bits/byte", ".4f")
        columns[f"{precision} off"] = (f"{precision} worse by %", "+.2f")
    curve = next(iter(runs[BASE].values()))
    off = {p: float(rows[-1][f"{p} off"]) for p in list(bits)[1:]}  # type: ignore[arg-type]
    verdict = ", ".join(f"{p} {'within' if v <= BAR else 'NOT within'} it" for p, v in off.items())
    note = (
        f"`{words}`, {curve.tokens[-1] / 1e6:.2f}M tokens each. Bigram model\n"
        f"of the same text: {curve.bigram:.3f} bits/byte. Bar: {BAR} % worse at most, over the "
        f"mean; {verdict}."
    )
    return report.Table(title="fp8 learns", note=note, columns=columns, rows=rows)


def _row(bits: Mapping[str, float]) -> report.Row:
    row: report.Row = dict(bits)
    for precision, value in bits.items():
        if precision != BASE:
            row[f"{precision} off"] = 100 * (value / bits[BASE] - 1)
    return row


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench fp8-learns " + shlex.join(arguments)
    words = [options.recipe, "--optimizer", options.optimizer, "--strategy", options.strategy]
    if options.recipe == "default":  # 352 would be no multiple of 128: fp8_block stored no MLP
        words += ["--model.hidden-dim", "384"]
    for flag in ("steps", "nproc"):
        if getattr(options, flag):
            words += [f"--{flag}", str(getattr(options, flag))]
    runs: dict[str, dict[int, Curve]] = {p: {} for p in (BASE, *options.formats)}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in options.seeds:
            for precision, done in runs.items():
                more = [*words, "--precision", precision, "--seed", str(seed)]
                done[seed] = train(precision, more, Path(scratch) / f"{precision}-{seed}")
                print(f"  {done[seed].bits[-1]:.4f} bits/byte", flush=True)
    name = options.name or f"fp8-learns-{options.recipe}"
    made = table(runs, shlex.join(["shardwise", "train", *words]))
    paths = report.write([made], facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


if __name__ == "__main__":
    main(sys.argv[1:])
