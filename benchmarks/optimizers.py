# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench optimizers``: the same run with every matrix optimizer, over several seeds.

Each run is a `shardwise train` of its own, one after another, or ``--jobs`` of them at a time, each
on one CPU core; the loss is held-out bits per byte, the time that of training steps alone. Learning
rates of matrices are those of ``RATES``, chosen once by hand: this compares implementations and
their cost, not what tuning could get out of each.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.muon_vs_adamw import parser_of, picture
from benchmarks.runs import Curve, Job, mean_of, run_jobs
from shardwise.models.gpt import GPT
from shardwise.report.plan import plan
from shardwise.train.recipes import find_recipe

RATES = {
    "adamw": 0.0,  # the recipe's lr, of all parameters
    "muon": 0.02,
    "normuon": 0.02,
    "soap": 0.005,
}
SLOW = ["soap", *(name for name in RATES if name != "soap")]  # first
COLOURS = ("#444444", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8b6d00")
COLOURS += ("#7f3fbf",)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("optimizers", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--optimizers", nargs="+", default=list(RATES), choices=list(RATES))
    add("--jobs", type=int, default=1, help="runs at a time; more than one: a core each, no GPU")
    add("--add", action="store_true", help="keep other optimizers' rows of the results there are")
    add("--minutes", type=float, default=math.inf, help="what is not done by then is left out")
    return parser.parse_args(arguments)


def state_bytes(recipe: str, name: str) -> int:
    with torch.device("meta"):
        model = GPT(find_recipe(recipe)().model)
    return plan(model, {"dp": 1}, "zero3", optimizer=name, device="cpu").optimizer_bytes


def rate_words(name: str) -> list[str]:
    return ["--matrix-lr", str(RATES[name])] if RATES[name] else []


def row_of(name: str, curve: Curve, runs: int, recipe: str) -> report.Row:
    return {
        "case": name,
        "rate": RATES[name] or None,
        "runs": runs,
        "bits": curve.bits[-1],
        "spread": (curve.high[-1] - curve.low[-1]) / 2 if runs > 1 else None,
        "tokens": curve.tokens[-1] / 1e6,
        "seconds": curve.seconds[-1],
        "step": 1e3 * curve.step,
        "state": state_bytes(recipe, name) / 2**20,
    }


COLUMNS = {
    "case": ("optimizer", "s"),
    "rate": ("lr of matrices", ".3g"),
    "runs": ("seeds", "d"),
    "bits": ("held-out bits/byte", ".3f"),
    "spread": ("+-", ".3f"),
    "tokens": ("M tokens", ".2f"),
    "seconds": ("training s", ".1f"),
    "step": ("step ms", ".1f"),
    "state": ("state MiB", ".2f"),
}


def known(path: Path) -> tuple[dict[str, report.Row], dict[str, Curve]]:
    """The rows and curves of earlier results, by optimizer."""
    found = json.loads(path.read_text())
    rows = {row["case"]: row for row in found["tables"][0]["rows"]}
    return rows, {one["name"]: Curve(**one) for one in found["curves"]}


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    name = f"optimizers-{options.recipe}"
    before: tuple[dict[str, report.Row], dict[str, Curve]] = ({}, {})
    if options.add:
        before = known(options.results / f"{name}.json")
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench optimizers " + shlex.join(arguments)
    words = [options.recipe, *(["--steps", str(options.steps)] if options.steps else [])]
    words += ["--sample", "0", "--profile-step", "0"]
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        jobs = {
            (one, seed): Job(
                name=f"{one}, seed {seed}",
                words=[*words, "--optimizer", one, *rate_words(one), "--seed", str(seed)],
                folder=Path(scratch) / f"{one}-{seed}",
            )
            for one in sorted(options.optimizers, key=SLOW.index)
            for seed in options.seeds
        }
        several = options.jobs > 1
        found = run_jobs(list(jobs.values()), at_once=options.jobs, pinned=several, until=until)
    found = {name: curve for name, curve in found.items() if curve.finished}
    if not found:
        raise RuntimeError("no run came to its end: see above")
    rows_by, curves_by = before
    for one in options.optimizers:
        runs = [found[job.name] for (of, _), job in jobs.items() if of == one and job.name in found]
        if runs:
            curves_by[one] = mean_of(one, runs)
            rows_by[one] = row_of(one, curves_by[one], len(runs), options.recipe)
    curves = [curves_by[one] for one in RATES if one in curves_by]
    rows = [rows_by[one] for one in RATES if one in rows_by]
    texts = sorted({round(curve.bigram, 3) for curve in curves})
    if len(texts) > 1:
        raise RuntimeError(f"the runs read different texts, whose bigram models have {texts}")
    core = f", {options.jobs} at a time, a core each" if several else ""
    core += " (the last of several commands)" if options.add else ""
    note = (
        f"Recipe {options.recipe}, {options.steps or 'its'} steps, seeds "
        f"{', '.join(map(str, options.seeds))}{core}; bigram model of the text: "
        f"{curves[0].bigram:.3f} bits/byte. *+-*: half of\nwhat lies between the lowest and the "
        f"highest seed. *step ms*: the median. State of one rank with all parameters."
    )
    table = report.Table(title="Matrix optimizers", note=note, columns=COLUMNS, rows=rows)
    paths = report.write([table], facts, name, options.results)
    stored = json.loads(paths[1].read_text()) | {"curves": [vars(curve) for curve in curves]}
    paths[1].write_text(json.dumps(stored, indent=1) + "\n")
    drawing = options.results / f"{name}.svg"
    best = min(curves, key=lambda curve: curve.bits[-1])
    about = f"held-out bits per byte, mean over seeds; lowest: {best.name} {best.bits[-1]:.3f}"
    coloured = dict(zip(COLOURS, curves, strict=False))
    drawing.write_text(picture("Matrix optimizers", about, coloured).render())
    print(paths[0].read_text())
    print("written:", *paths, drawing)


if __name__ == "__main__":
    main(sys.argv[1:])
