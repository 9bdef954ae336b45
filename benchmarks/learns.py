# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.learns``: held-out loss of the same recipe in variants, seed by seed.

    python -m benchmarks.learns default "muon" "adamw --lr 3e-3" "adamw --lr 6e-3"
    python -m benchmarks.learns gpt_124m muon "muon --precision fp8_block" --seeds 0 1 2

A variant is an optimizer and more words of ``shardwise train``. Each run is a `shardwise train` of
its own; what counts is held-out bits per byte at the end, beside the first variant's.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

from benchmarks import report
from shardwise.report.events import events_of, read_events


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Held-out bits per byte of one run, by seconds of training steps: evaluation, saving and
    compilation left out."""

    seconds: list[float]
    bits: list[float]
    tokens: float


def curve_of(folder: Path) -> Curve:
    """The curve of a run that came to its end."""
    events = read_events(folder / "events.jsonl")
    steps, scored = events_of(events, "step"), events_of(events, "eval")
    if not scored or not any(event.get("reason") == "finished" for event in events):
        raise RuntimeError(f"{folder.name} ended before its last step: see {folder}.log")
    usual = median(event["seconds"] for event in steps)
    spent, at = 0.0, {}
    for event in steps:
        spent += usual if event is steps[0] else event["seconds"]  # the first step compiles
        at[event["step"]] = spent
    return Curve(
        seconds=[at[event["step"]] for event in scored],
        bits=[event["bits_per_byte"] for event in scored],
        tokens=steps[-1]["tokens"],
    )


def reached(curve: Curve, bits: float) -> float | None:
    """The seconds until the curve came down to ``bits``, on a line between evaluations."""
    before: tuple[float, float] | None = None
    for at, value in zip(curve.seconds, curve.bits, strict=True):
        if value <= bits:
            if before is None:
                return at
            share = (before[1] - bits) / (before[1] - value)
            return before[0] + share * (at - before[0])
        before = (at, value)
    return None


def train(recipe: str, words: Sequence[str], folder: Path, case: tuple[str, int]) -> Curve:
    variant, seed = case
    optimizer, *more = shlex.split(variant)
    out = folder / f"{variant.replace('/', '-')}-{seed}"
    command = [sys.executable, "-m", "shardwise.cli", "train", recipe, "--optimizer", optimizer]
    command += [*more, *words, "--seed", str(seed), "--out", str(out)]
    with out.with_name(f"{out.name}.log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False)
    curve = curve_of(out)
    print(f"{variant}, seed {seed}: {curve.bits[-1]:.4f} bits/byte", flush=True)
    return curve


def table(curves: dict[str, list[Curve]], title: str) -> report.Table:
    """A row for each variant, over its seeds."""
    first = next(iter(curves.values()))
    base = mean(curve.bits[-1] for curve in first)
    rows: list[report.Row] = []
    for variant, runs in curves.items():
        apart = [100 * (a.bits[-1] / b.bits[-1] - 1) for a, b in zip(runs, first, strict=True)]
        bits = mean(curve.bits[-1] for curve in runs)
        there = [at for curve in runs if (at := reached(curve, base)) is not None]
        rows.append(
            {
                "variant": variant,
                "bits": bits,
                "off": 100 * (bits / base - 1),
                "seeds": f"{min(apart):+.2f} to {max(apart):+.2f}",
                "tokens": runs[0].tokens / 1e6,
                "seconds": mean(curve.seconds[-1] for curve in runs),
                "there": mean(there) if len(there) == len(runs) else None,
            }
        )
    columns = {
        "variant": ("variant", "s"),
        "bits": ("held-out bits/byte", ".4f"),
        "off": ("worse by %", "+.2f"),
        "seeds": ("seed by seed %", "s"),
        "tokens": ("M tokens", ".2f"),
        "seconds": ("training s", ".1f"),
        "there": ("s to the first variant's end", ".1f"),
    }
    note = f"Means over {len(first)} seeds. Percent: of the first variant's bits, of the same seed."
    return report.Table(title=title, note=note, columns=columns, rows=rows)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe")
    add("variants", nargs="+", help='as "adamw --lr 3e-3"')
    add("--seeds", type=int, nargs="+", default=[0])
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--train", type=shlex.split, default=[], help='words for all runs, as --train="--steps 50"')
    add("--results", type=Path, default=report.RESULTS, help="folder for .md and .json")
    asked = parser.parse_args(arguments)
    facts = report.circumstances(arguments, "learns")
    cases = [(variant, seed) for variant in asked.variants for seed in asked.seeds]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        words = [*asked.train, "--sample", "0", "--profile-step", "0"]
        found = list(pool.map(partial(train, asked.recipe, words, Path(scratch)), cases))
    count = len(asked.seeds)
    curves = {v: found[at * count : (at + 1) * count] for at, v in enumerate(asked.variants)}
    made = [table(curves, f"{asked.recipe}, held-out loss")]
    report.publish(made, facts, f"learns-{asked.recipe}", asked.results)


if __name__ == "__main__":
    main(sys.argv[1:])
