# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.plan_memory``: the peak that a plan predicts, and the one of the device.

Each case is three steps of ``shardwise train`` on this machine; the figures are those of its
receipt, so they are of what the trainer does: compiled blocks where it compiles them. On a CPU only
the library's own buffers are measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.measure import GIB
from benchmarks.train import noise
from shardwise.report.events import last, read_events

FEW = [
    "--steps",
    "3",
    "--eval-every",
    "0",
    "--sample",
    "0",
    "--profile-step",
    "0",
    "--nproc",
    "1",
    "--tokenizer",
    "bytes",
]
EAGER = "--compile off"
CASES = {
    "gpt_124m": ("--batch 32 --microbatches 1", f"--batch 128 --microbatches 1 {EAGER}"),
    "gpt_1b": (
        "--batch 8 --microbatches 1",
        f"--batch 8 --microbatches 1 {EAGER}",
        "--batch 32 --microbatches 2 --recompute block",
        "--batch 8 --microbatches 1 --precision fp8_block",
        f"--batch 16 --microbatches 1 --optimizer adamw {EAGER}",
    ),
    "moe_1b": ("--batch 16 --microbatches 1", f"--batch 16 --microbatches 1 {EAGER}"),
}
TINY = {"smoke": ("--batch 4 --microbatches 2",)}


def run(recipe: str, words: str) -> report.Row:
    """The receipt of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardwise.cli", "train", recipe, *words.split(), *FEW]
        command += ["--recompute", "none"] if "--recompute" not in words else []
        out = Path(folder, "run")
        done = subprocess.run([*command, "--data", noise(8192), "--out", str(out)], check=False)
        row: report.Row = {"recipe": recipe, "words": words}
        rows = {} if done.returncode else last(read_events(out / "events.jsonl"), "receipt")["rows"]
    for what, (planned, found) in rows.items():
        if what.startswith("bytes of"):  # the device's come last
            both = {"predicted": planned / GIB, "measured": found / GIB, "ratio": planned / found}
            row |= {"what": what, **both}
    return row


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_memory", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--only", default="", help="cases whose recipe begins so")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    asked = parser.parse_args(words)
    rows = []
    for recipe, variants in (TINY if asked.tiny else CASES).items():
        for variant in variants if recipe.startswith(asked.only) else ():
            rows.append(run(recipe, variant))
            print(json.dumps(rows[-1]), flush=True)
    columns = {
        "recipe": ("recipe", ""),
        "words": ("flags", ""),
        "what": ("what", ""),
        "predicted": ("predicted GiB", ".3f"),
        "measured": ("measured GiB", ".3f"),
        "ratio": ("predicted / measured", ".4f"),
    }
    note = "Three steps of `shardwise train`; the second is measured, after its optimizer."
    table = report.Table(title="Peak of a training step", note=note, columns=columns, rows=rows)
    facts = report.circumstances(list(sys.argv[1:] if words is None else words), "plan_memory")
    report.publish([table], facts, "plan-memory", asked.out, tiny=asked.tiny)


if __name__ == "__main__":
    main()
