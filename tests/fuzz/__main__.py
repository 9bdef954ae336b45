# SPDX-License-Identifier: Apache-2.0
"""``make fuzz``: random training programs, sharded, against hand-averaged plain torch.

    python -m tests.fuzz --seeds 0:100000 --seconds 480 --jobs 7 --out found
    python -m tests.fuzz --show found/differs-123.json      runs one program and tells all

Every program ends in one outcome (see ``outcome.py``): the table at the end counts them. What is
neither right nor an error by name on every rank is shrunk and written as JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.draw import make
from tests.fuzz.outcome import FINE, outcome
from tests.fuzz.program import Program, walk
from tests.products import keep_one_product
from tests.ranks import shut_down

SHRINK_SECONDS = 60.0
MARKS = ("frozen", "tied", "checkpoint", "returns", "residual", "by_rank", "own", "hook", "hooked")
MARKS += ("by_attribute",)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:1000000", help="first:end")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), help="default: mostly 2")
    parser.add_argument("--jobs", type=int, default=1, help="pools side by side")
    parser.add_argument("--out", type=Path, default=Path("found"))
    parser.add_argument("--show", type=Path, help="a program to run alone")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
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
    if asked.jobs > 1:
        counted = _side_by_side(asked, arguments)
    else:
        counted = search(asked)
    for (kind, words), (count, seed) in sorted(counted.items()):
        print(f"{count:6d}  {kind:9s} {words[:200]}  (seed {seed})")
    total = sum(count for count, _ in counted.values())
    found = sum(count for (kind, _), (count, _) in counted.items() if kind not in FINE)
    print(f"{total} programs, {found} findings, in {asked.out}")
    return found > 0


def _side_by_side(asked: Any, arguments: Sequence[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """The same command in several processes, each with every n-th seed."""
    begin, end = map(int, asked.seeds.split(":"))
    children = []
    for number in range(asked.jobs):
        own = ["--jobs", "1", "--seeds", f"{begin + number}:{end}", "--stride", str(asked.jobs)]
        command = [sys.executable, "-m", "tests.fuzz", *arguments, *own]
        children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    for child in children:
        child.wait()
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for number in range(asked.jobs):
        path = asked.out / f"summary-{begin + number}.json"
        for kind, words, count, seed in json.loads(path.read_text()) if path.exists() else ():
            before = counted.get((kind, words), (0, seed))
            counted[kind, words] = before[0] + count, min(before[1], seed)
    return counted


def search(asked: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Count the outcomes of the programs of all seeds; write what is found."""
    begin, end = map(int, asked.seeds.split(":"))
    counts: Counter[tuple[str, str]] = Counter()
    seeds: dict[tuple[str, str], int] = {}
    until = time.monotonic() + asked.seconds
    took: dict[str, float] = {}
    for seed in range(begin, end, asked.stride):
        if time.monotonic() > until:
            break
        program = make(seed, asked.ranks or (2, 2, 2, 3, 4)[seed // 7 % 5])
        began = time.monotonic()
        kind, words, full = outcome(program)
        took[kind] = took.get(kind, 0.0) + time.monotonic() - began
        if kind not in FINE and time.monotonic() < until:
            shut_down()  # again, on ranks that have run nothing else
            again, words, more = outcome(program)
            kind, full = (kind, more) if again == kind else (f"once-{kind}", full)
        key = (kind, words)
        counts[key] += 1
        if key not in seeds:
            seeds[key] = seed
            print(f"seed {seed}: {kind} {words}", flush=True)
            if kind not in FINE:
                if not asked.no_shrink:
                    program = shrink(program, key, min(until, time.monotonic() + SHRINK_SECONDS))
                made = {"kind": kind, "words": words, "program": program, "full": full}
                (asked.out / f"{kind}-{seed}.json").write_text(json.dumps(made, indent=1))
        summary = [[*key, count, seeds[key]] for key, count in counts.items()]
        (asked.out / f"summary-{begin}.json").write_text(json.dumps(summary))
    shut_down()
    print({kind: round(seconds, 1) for kind, seconds in took.items()})
    return {key: (count, seeds[key]) for key, count in counts.items()}


# ------------------------------------------------------------------------------ shrinking


def shrink(program: Program, key: tuple[str, str], until: float) -> Program:
    """A smaller program with the same outcome, as far as the time goes."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            if time.monotonic() > until:
                return program
            kind, words, _ = outcome(candidate, timeout=30)
            if kind == key[0] and (kind == "hangs" or words == key[1]):
                program, smaller = candidate, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs with something less, the largest cuts first."""
    ops = program["ops"]
    size = max(len(ops) // 2, 1)
    while ops:
        for start in range(0, len(ops), size):
            yield program | {"ops": ops[:start] + ops[start + size :]}
        if size == 1:
            break
        size //= 2
    wrap = program["wrap"]
    for number in range(len(wrap["units"])) if wrap["how"] == "fully_shard" else ():
        units = wrap["units"][:number] + wrap["units"][number + 1 :]
        yield program | {"wrap": wrap | {"units": units}}
    plain = {"precision": None, "offload": False, "memory": "caching", "unused": "none"}
    plain |= {"reshard": [None], "strategy": "zero3"}
    for name, value in plain.items():
        if wrap[name] != value and wrap["how"] == "fully_shard":
            yield program | {"wrap": wrap | {name: value}}
    less = {"optimizer": "sgd", "ranks": 2, "dtype": "float64", "tp": False, "spread": 0}
    less["compile"] = {"paths": [], "first": False}
    for name, value in less.items():
        if program[name] != value and not (
            name == "ranks" and (program["tp"] or program["spread"])
        ):
            yield program | {name: value}
    used = {path for unit in wrap["units"] for path in unit} | {op.get("path", "") for op in ops}
    for path, spec in walk(program["tree"]):
        last = len(spec.get("parts", ())) - 1
        below = f"{path}.parts.{last}".lstrip(".")
        if last >= 0 and not any(one == below or one.startswith(below + ".") for one in used):
            yield _edited(program, path, lambda node: node["parts"].pop())
        for name in MARKS:
            if spec.get(name):
                yield _edited(program, path, lambda node, name=name: node.pop(name))
        if spec["kind"] == "seq" and not spec["parts"]:
            yield _edited(program, path, lambda node: node.update(kind="empty"))
        if spec["kind"] in ("mlp", "moe", "lora", "embed", "norm", "buffer"):
            yield _edited(program, path, lambda node: node.update(kind="linear"))
        if len(spec.get("calls", ())) > 1:
            yield _edited(program, path, lambda node: node["calls"].pop())
        if len((spec.get("calls") or [[]])[0]) > 1:
            yield _edited(program, path, lambda node: node["calls"][0].pop())


def _edited(program: Program, path: str, change: Any) -> Program:
    made = copy.deepcopy(program)
    change(dict(walk(made["tree"]))[path])
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
