# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench fp8-learns``: the same runs in bf16 and with weights in fp8, by optimizer.

Each is a `shardwise train` of its own, one after another; what counts is held-out bits per byte at
the end, averaged over seeds. The bar: fp8 ends within 0.5 % of bf16.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks import report
from benchmarks.muon_vs_adamw import train
from shardwise.report.html import read_events

BASE = "bf16"
BAR = 0.5  # percent


@dataclass(frozen=True, kw_only=True)
class Run:
    """The end of one run."""

    bits: float  # held out, per byte
    bigram: float
    tokens: float
    lost: float | None  # percent of what was quantised that became zero; None: nothing was


Runs = Mapping[str, Mapping[int, Run]]  # by precision and seed


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shardwise bench fp8-learns", description=__doc__)
    add = parser.add_argument
    add("recipe", nargs="?", default="default")
    add("--steps", type=int, help="default: the recipe's")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    formats = ("mxfp8", "mxfp8_2d", "fp8_block")
    add("--formats", nargs="+", choices=formats, default=["mxfp8_2d", "fp8_block"])
    add("--optimizers", nargs="+", default=["muon", "adamw"])
    add("--strategy", default="zero3")
    add("--nproc", type=int, help="ranks; default: two, or one per GPU")
    add("--name", help="of the result files; default: fp8-learns-<recipe>")
    add("--results", type=Path, default=report.RESULTS, help="folder for .md and .json")
    return parser.parse_args(arguments)


def trained(precision: str, words: Sequence[str], folder: Path) -> Run:
    curve = train(precision, words, folder)
    events = read_events(folder / "events.jsonl")
    counts = [event for event in events if event["kind"] == "fp8"]
    lost = 100 * counts[-1]["underflows"] / counts[-1]["values"] if counts else None
    bits, tokens = curve.bits[-1], curve.tokens[-1]
    print(f"  {bits:.4f} bits/byte", flush=True)
    return Run(bits=bits, bigram=curve.bigram, tokens=tokens, lost=lost)


def table(runs: Runs, optimizer: str, words: str) -> report.Table:
    """A row for each seed and their mean; how far each format is from bf16, in percent of it."""
    rows = [
        {"seed": str(seed), **_row({p: [runs[p][seed]] for p in runs})}  # type: ignore[arg-type]
        for seed in runs[BASE]
    ]
    rows.append({"seed": "mean", **_row({p: list(runs[p].values()) for p in runs})})
    columns = {"seed": ("seed", "s"), BASE: (f"{BASE} bits/byte", ".4f")}
    verdicts = []
    for precision in list(runs)[1:]:
        columns[precision] = (f"{precision} bits/byte", ".4f")
        columns[f"{precision} off"] = ("worse by %", "+.2f")
        if f"{precision} lost" in rows[-1]:
            columns[f"{precision} lost"] = ("underflow %", ".3f")
        off = float(rows[-1][f"{precision} off"])  # type: ignore[arg-type]
        verdicts.append(f"{precision} {'within' if off <= BAR else 'NOT within'} it")
    one = next(iter(runs[BASE].values()))
    note = (
        f"`{words}`, {one.tokens / 1e6:.2f}M tokens each. Bigram model\n"
        f"of the same text: {one.bigram:.3f} bits/byte. Bar: {BAR} % worse at most, over the "
        f"mean; {', '.join(verdicts)}.\nunderflow: values of activations and gradients in fp8 that "
        f"became zero in the last step; none saturates, because\na scale is made for its block's "
        f"largest value."
    )
    return report.Table(title=f"fp8 learns, {optimizer}", note=note, columns=columns, rows=rows)


def _row(runs: Mapping[str, Sequence[Run]]) -> report.Row:
    bits = {precision: mean(run.bits for run in each) for precision, each in runs.items()}
    row: report.Row = dict(bits)
    for precision, each in runs.items():
        if precision != BASE:
            row[f"{precision} off"] = 100 * (bits[precision] / bits[BASE] - 1)
        lost = [run.lost for run in each if run.lost is not None]
        if lost:
            row[f"{precision} lost"] = mean(lost)
    return row


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench fp8-learns " + shlex.join(arguments)
    name = options.name or f"fp8-learns-{options.recipe}"
    tables: list[report.Table] = []
    for optimizer in options.optimizers:
        words = [options.recipe, "--optimizer", optimizer, "--strategy", options.strategy]
        if options.recipe == "default":  # 352 would be no multiple of 128: fp8_block stored no MLP
            words += ["--model.hidden-dim", "384"]
        words += ["--sample", "0", "--profile-step", "0"]
        for flag in ("steps", "nproc"):
            if getattr(options, flag):
                words += [f"--{flag}", str(getattr(options, flag))]
        runs: dict[str, dict[int, Run]] = {p: {} for p in (BASE, *options.formats)}
        with tempfile.TemporaryDirectory() as scratch:
            for seed in options.seeds:
                for precision, done in runs.items():
                    more = [*words, "--precision", precision, "--seed", str(seed)]
                    done[seed] = trained(precision, more, Path(scratch) / f"{precision}-{seed}")
        tables.append(table(runs, optimizer, shlex.join(["shardwise", "train", *words])))
        paths = report.write(tables, facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


if __name__ == "__main__":
    main(sys.argv[1:])
