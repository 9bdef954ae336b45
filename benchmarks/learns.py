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
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks import report
from shardwise.report.events import last, read_events


def scored(folder: Path) -> float:
    """Held-out bits per byte at the end of a run."""
    events = read_events(folder / "events.jsonl")
    if not any(event.get("reason") == "finished" for event in events):
        raise RuntimeError(f"{folder.name} ended before its last step: see {folder}.log")
    return float(last(events, "eval")["bits_per_byte"])


def train(recipe: str, words: Sequence[str], folder: Path, case: tuple[str, int]) -> float:
    variant, seed = case
    optimizer, *more = shlex.split(variant)
    out = folder / f"{variant.replace('/', '-')}-{seed}"
    command = [sys.executable, "-m", "shardwise.cli", "train", recipe, "--optimizer", optimizer]
    command += [*more, *words, "--seed", str(seed), "--out", str(out)]
    with out.with_name(f"{out.name}.log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False)
    bits = scored(out)
    print(f"{variant}, seed {seed}: {bits:.4f} bits/byte", flush=True)
    return bits


def table(found: dict[str, list[float]], title: str) -> report.Table:
    """A row for each variant, over its seeds."""
    first = next(iter(found.values()))
    rows: list[report.Row] = []
    for variant, bits in found.items():
        apart = [100 * (a / b - 1) for a, b in zip(bits, first, strict=True)]
        rows.append(
            {
                "variant": variant,
                "bits": mean(bits),
                "off": 100 * (mean(bits) / mean(first) - 1),
                "seeds": f"{min(apart):+.2f} to {max(apart):+.2f}",
            }
        )
    columns = {
        "variant": ("variant", "s"),
        "bits": ("held-out bits/byte", ".4f"),
        "off": ("worse by %", "+.2f"),
        "seeds": ("seed by seed %", "s"),
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
        bits = list(pool.map(partial(train, asked.recipe, words, Path(scratch)), cases))
    count = len(asked.seeds)
    found = {v: bits[at * count : (at + 1) * count] for at, v in enumerate(asked.variants)}
    made = table(found, f"{asked.recipe}, held-out loss")
    report.publish([made], facts, f"learns-{asked.recipe}", asked.results)


if __name__ == "__main__":
    main(sys.argv[1:])
