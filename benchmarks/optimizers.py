# SPDX-License-Identifier: Apache-2.0
"""``shardwise bench optimizers``: the same run with every matrix optimizer, over several seeds.

Each run is a `shardwise train` of its own, one after another; the loss is held-out bits per byte,
the time that of training steps alone. Learning rates of matrices are those of ``RATES``, chosen
once by hand: this compares implementations and their cost, not what tuning could get out of each.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.muon_vs_adamw import Curve, parser_of, picture, train
from shardwise.models.gpt import GPT
from shardwise.report.plan import plan
from shardwise.train.recipes import find_recipe

RATES = {
    "adamw": 0.0,  # the recipe's lr, of all parameters
    "muon": 0.02,
    "normuon": 0.02,
    "adamuon": 0.02,
    "soap": 0.005,
    "shampoo": 0.005,
    "dion": 0.02,
    "scion": 0.02,
    "spectral_lion": 0.02,
}
COLOURS = ("#444444", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8b6d00")
COLOURS += ("#7f3fbf",)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("optimizers", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--optimizers", nargs="+", default=list(RATES), choices=list(RATES))
    return parser.parse_args(arguments)


def mean_curve(name: str, runs: Sequence[Curve]) -> Curve:
    def mean(values: Callable[[Curve], list[float]]) -> list[float]:
        return [statistics.fmean(one) for one in zip(*map(values, runs), strict=True)]

    return Curve(
        name=name,
        tokens=mean(lambda run: run.tokens),
        seconds=mean(lambda run: run.seconds),
        bits=mean(lambda run: run.bits),
        bigram=runs[0].bigram,
    )


def state_bytes(recipe: str, name: str) -> int:
    with torch.device("meta"):
        model = GPT(find_recipe(recipe)().model)
    return plan(model, {"dp": 1}, "zero3", optimizer=name, device="cpu").optimizer_bytes


COLUMNS = {
    "case": ("optimizer", "s"),
    "rate": ("lr of matrices", ".3g"),
    "bits": ("held-out bits/byte", ".3f"),
    "spread": ("+-", ".3f"),
    "seconds": ("training s", ".1f"),
    "state": ("state MiB", ".2f"),
}


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = "shardwise bench optimizers " + shlex.join(arguments)
    words = [options.recipe, *(["--steps", str(options.steps)] if options.steps else [])]
    curves: list[Curve] = []
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.optimizers:
            rate = ["--matrix-lr", str(RATES[name])] if RATES[name] else []
            flags = [*words, "--optimizer", name, *rate]
            runs = [
                train(name, [*flags, "--seed", str(seed)], Path(scratch) / f"{name}-{seed}")
                for seed in options.seeds
            ]
            curves.append(mean_curve(name, runs))
            last = [run.bits[-1] for run in runs]
            rows.append(
                {
                    "case": name,
                    "rate": RATES[name] or None,
                    "bits": curves[-1].bits[-1],
                    "spread": statistics.stdev(last) if len(last) > 1 else None,
                    "seconds": curves[-1].seconds[-1],
                    "state": state_bytes(options.recipe, name) / 2**20,
                }
            )
    note = (
        f"Recipe {options.recipe}, {options.steps or 'its'} steps, seeds "
        f"{', '.join(map(str, options.seeds))}; bigram model of the text: {curves[0].bigram:.3f}."
    )
    table = report.Table(title="Matrix optimizers", note=note, columns=COLUMNS, rows=rows)
    paths = report.write([table], facts, f"optimizers-{options.recipe}", options.results)
    drawing = options.results / f"optimizers-{options.recipe}.svg"
    best = min(curves, key=lambda curve: curve.bits[-1])
    about = f"held-out bits per byte, mean over seeds; lowest: {best.name} {best.bits[-1]:.3f}"
    coloured = dict(zip(COLOURS, curves, strict=False))
    drawing.write_text(picture("Matrix optimizers", about, coloured))
    print(paths[0].read_text())
    print("written:", *paths, drawing)


if __name__ == "__main__":
    main(sys.argv[1:])
