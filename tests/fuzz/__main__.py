# SPDX-License-Identifier: Apache-2.0
"""``make fuzz``: random training programs, sharded, against hand-averaged plain torch.

    python -m tests.fuzz --seeds 0:100000 --seconds 480 --jobs 7 --out found
    python -m tests.fuzz --show found/differs-123.json      runs one program and tells all

Every program ends in one outcome (see ``outcome.py``): the table at the end counts them. What the
ranks do and plain torch does not is shrunk and written as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.draw import make
from tests.fuzz.outcome import FINE, outcome
from tests.fuzz.program import Program
from tests.products import keep_one_product
from tests.ranks import shut_down

SHRINK_SECONDS = 60.0
# What is plain wherever it stands in a program.
PLAIN: dict[str, Any] = {
    "precision": None, "offload": False, "memory": "caching", "ranks": 2,
    "strategy": "zero3", "data_parallel": False, "optimizer": "sgd", "dtype": "float64",
    "kind": "linear", "frozen": None, "tied": False, "checkpoint": None, "returns": None,
    "hook": None, "residual": False, "own": None,
}  # fmt: skip
KEPT = ("odd", "call")  # lists from which nothing is dropped


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:1000000", help="first:end, or first:end:step")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1, help="pools side by side")
    parser.add_argument("--out", type=Path, default=Path("found"))
    parser.add_argument("--show", type=Path, help="a program to run alone")
    asked = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the ranks, too: programs are of the CPU
    torch.set_num_threads(1)
    keep_one_product()
    if asked.show:
        program = json.loads(asked.show.read_text())
        kind, words, full = outcome(program.get("program", program))
        print(full, f"{kind}: {words}", sep="\n")
        return kind not in FINE
    asked.out.mkdir(parents=True, exist_ok=True)
    seeds = range(*map(int, asked.seeds.split(":")))
    if asked.jobs == 1:
        return search(seeds, asked.seconds, asked.out)
    children = []
    for number in range(asked.jobs):
        own = seeds[number :: asked.jobs]
        now = ["--jobs", "1", "--seeds", f"{own.start}:{own.stop}:{own.step}"]
        children.append(subprocess.Popen([sys.executable, "-m", "tests.fuzz", *arguments, *now]))
    return max([child.wait() for child in children])


def search(seeds: range, seconds: float, out: Path) -> int:
    """Count the outcomes of the programs of all seeds, write what is found; 1 if there is any."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], int] = {}
    until = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until:
            break
        program = make(seed, (2, 2, 2, 3, 4)[seed // 7 % 5])
        kind, words, full = outcome(program)
        counts[kind, words] += 1
        if first.setdefault((kind, words), seed) == seed and kind not in FINE:
            print(f"seed {seed}: {kind} {words}", flush=True)
            end = min(until, time.monotonic() + SHRINK_SECONDS)
            program = shrink(program, lambda one: outcome(one)[:2] == (kind, words), end)  # noqa: B023
            made = {"kind": kind, "words": words, "program": program, "full": full}
            (out / f"{kind}-{seed}.json").write_text(json.dumps(made, indent=1))
    shut_down()
    for (kind, words), count in sorted(counts.items()):
        print(f"{count:6d}  {kind:9s} {words[:200]}  (seed {first[kind, words]})")
    found = sum(count for (kind, _), count in counts.items() if kind not in FINE)
    print(f"{counts.total()} programs, {found} findings, in {out}", flush=True)
    return int(found > 0)


# ------------------------------------------------------------------------------ shrinking


def shrink(program: Program, is_found: Callable[[Program], bool], until: float) -> Program:
    """A smaller program with the same outcome, as far as the time goes."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            if time.monotonic() > until:
                return program
            if is_found(candidate):
                program, smaller = candidate, True
                break
    return program


def candidates(node: Any) -> Iterator[Any]:
    """Copies of a program with something less, the largest cuts first."""
    if isinstance(node, list):
        size = len(node)
        while size:
            for start in range(0, len(node), size):
                yield node[:start] + node[start + size :]
            size //= 2
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        less = [PLAIN[key]] if key in PLAIN and value != PLAIN[key] else []
        if isinstance(value, list | dict) and key not in KEPT:
            less += candidates(value)
        for one in less:
            made = node.copy()
            made[key] = one
            yield made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
