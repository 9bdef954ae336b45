# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench fp8-learns``: the same runs in bf16 and with weights in fp8, by optimizer.

Each is a `shardwise train` of its own; what counts is held-out bits per byte at the end, seed by
seed. The bar: the mean of fp8 ends within 0.5 % of bf16's. Out of time (``--minutes``), the runs of
a seed are compared at the last evaluation that all of them have.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks import report
from benchmarks.machine_text import tokens_of_machine
from benchmarks.runs import Curve, Job, run_jobs
from shardwise.report.html import read_events

BASE = "bf16"
BAR = 0.5  # percent
TEXT = 192 << 20  # bytes of this machine's text, for --data machine


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
    formats = ("mxfp8", "fp8_block")
    add("--formats", nargs="+", choices=formats, default=["mxfp8", "fp8_block"])
    add("--optimizers", nargs="+", default=["muon", "adamw"])
    add("--final-bf16", type=float, help="each format once more, its last part of steps in bf16")
    add("--matrix-lr", type=float, help="of runs whose optimizer has one; default: the recipe's")
    add("--strategy", default="zero3")
    add("--nproc", type=int, help="ranks; default: two, or one per GPU")
    add("--data", help="default: the recipe's; machine: this machine's text, 192 MiB of it")
    add("--train", type=shlex.split, default=[], help='more words, as --train="--batch 64"')
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--minutes", type=float, default=math.inf, help="the runs end by then, done or not")
    add("--name", help="of the result files; default: fp8-learns-<recipe>")
    add("--results", type=Path, default=report.RESULTS, help="folder for .md and .json")
    return parser.parse_args(arguments)


def optimizer_words(optimizer: str, matrix_lr: float | None) -> list[str]:
    """A run refuses a rate of matrices that its optimizer does not read."""
    rate = ["--matrix-lr", str(matrix_lr)] if matrix_lr and optimizer != "adamw" else []
    return ["--optimizer", optimizer, *rate]


def words_of_precisions(formats: Sequence[str], final_bf16: float | None) -> dict[str, list[str]]:
    """What each run is told of its precision, by the name it has in the table."""
    words = {one: ["--precision", one] for one in (BASE, *formats)}
    if final_bf16:
        for one in formats:
            words[f"{one}, bf16 at last"] = [*words[one], "--final-bf16", str(final_bf16)]
    return words


def paired(curves: Mapping[str, Curve], folders: Mapping[str, Path]) -> dict[str, Run]:
    """The runs of one seed by precision, each at the last tokens that all of them have."""
    reached = min(curve.tokens[-1] for curve in curves.values())
    return {
        precision: Run(
            bits=(cut := curve.until(reached)).bits[-1],
            bigram=cut.bigram,
            tokens=cut.tokens[-1],
            lost=_lost(folders[precision]),
        )
        for precision, curve in curves.items()
    }


def _lost(folder: Path) -> float | None:
    events = read_events(folder / "events.jsonl")
    counts = [event for event in events if event["kind"] == "fp8"]
    return 100 * counts[-1]["underflows"] / counts[-1]["values"] if counts else None


def table(runs: Runs, optimizer: str, words: str) -> report.Table:
    """A row for each seed and their mean; how far each format is from bf16, in percent of it."""
    rows = [
        {"seed": str(seed), **_row({p: [runs[p][seed]] for p in runs})}  # type: ignore[arg-type]
        for seed in runs[BASE]
    ]
    each = list(rows)
    rows.append({"seed": "mean", **_row({p: list(runs[p].values()) for p in runs})})
    columns = {"seed": ("seed", "s"), BASE: (f"{BASE} bits/byte", ".4f")}
    verdicts = []
    for precision in list(runs)[1:]:
        columns[precision] = (f"{precision} bits/byte", ".4f")
        columns[f"{precision} off"] = ("worse by %", "+.2f")
        if f"{precision} lost" in rows[-1]:
            columns[f"{precision} lost"] = ("underflow %", ".3f")
        off = float(rows[-1][f"{precision} off"])  # type: ignore[arg-type]
        apart = [float(row[f"{precision} off"]) for row in each]  # type: ignore[arg-type]
        spread = f" (seeds {min(apart):+.2f} to {max(apart):+.2f} %"
        if len(apart) > 1:
            spread += f", standard error of the mean {stdev(apart) / len(apart) ** 0.5:.2f}"
        spread += ")"
        verdicts.append(f"{precision} {'within' if off <= BAR else 'NOT within'} it{spread}")
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
    until = time.monotonic() + 60 * options.minutes
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench fp8-learns " + shlex.join(arguments)
    name = options.name or f"fp8-learns-{options.recipe}"
    precisions = words_of_precisions(options.formats, options.final_bf16)
    shared = [options.recipe, "--strategy", options.strategy, *options.train]
    shared += ["--sample", "0", "--profile-step", "0"]
    for flag in ("steps", "nproc"):
        if getattr(options, flag):
            shared += [f"--{flag}", str(getattr(options, flag))]
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data
        if data == "machine":
            data = str(tokens_of_machine(Path(scratch) / "text", most=TEXT))
        words = [*shared, *(["--data", data] if data else [])]
        jobs = {
            (optimizer, seed, precision): Job(
                name=f"{optimizer} {precision} {seed}",
                words=[
                    *(*words, *optimizer_words(optimizer, options.matrix_lr)),
                    *(*told, "--seed", str(seed)),
                ],
                folder=Path(scratch) / f"{optimizer}-{number}-{seed}",
            )
            for seed in options.seeds
            for optimizer in options.optimizers
            for number, (precision, told) in enumerate(precisions.items())
        }
        found = run_jobs(list(jobs.values()), at_once=options.jobs, until=until)
        tables = []
        for optimizer in options.optimizers:
            runs: dict[str, dict[int, Run]] = {precision: {} for precision in precisions}
            for seed in options.seeds:
                own = {precision: jobs[optimizer, seed, precision] for precision in precisions}
                curves = {p: found[job.name] for p, job in own.items() if job.name in found}
                if len(curves) < len(precisions):
                    continue
                for precision, run in paired(curves, {p: j.folder for p, j in own.items()}).items():
                    runs[precision][seed] = run
            if runs[BASE]:
                own_words = optimizer_words(optimizer, options.matrix_lr)
                line = shlex.join(["shardwise", "train", *shared, *own_words])
                tables.append(table(runs, optimizer, line))
    if not tables:
        raise RuntimeError("no seed has a run in every precision: see above")
    paths = report.write(tables, facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


if __name__ == "__main__":
    main(sys.argv[1:])
