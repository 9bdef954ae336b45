# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.muon``: what Muon costs, beside its peers, one command, one report.

mode            where      what
newton_schulz   one GPU    Newton-Schulz over 1.007B parameters, beside batched cuBLAS NS5 in bf16
step            one GPU    whole step of a 0.96B GPT, Muon and AdamW, beside torch's
exchange        CPU        bytes and collectives of the exchange, counted and planned
tiles           one GPU    the sweep behind the tables in shardwise/kernels/forms.py
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.muon_exchange import run_exchange
from benchmarks.muon_kernels import run_newton_schulz, run_tiles
from benchmarks.muon_steps import CASES, run_step

MODES: dict[str, Callable[[argparse.Namespace], list[report.Table]]] = {
    "newton_schulz": lambda options: run_newton_schulz(options.tiny),
    "step": lambda options: run_step(options.tiny, options.cases.split(",")),
    "exchange": lambda options: run_exchange(options.tiny),
    "tiles": lambda options: run_tiles(options.tiny),
}
ON_CPU = {"exchange"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.muon",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("modes", nargs="*", metavar="mode", help="default: newton_schulz step; on a CPU exchange")
    add("--cases", default=",".join(CASES), help="of step, comma-separated; default: all")
    add("--tiny", action="store_true", help="dry run at toy size; no figure means much")
    add("--name", help="of the result files; default: muon-<modes>-<the GPU's name>")
    add("--results", type=Path, default=report.RESULTS, help="folder for <name>.json and <name>.md")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available() or options.tiny
    options.modes = options.modes or (["newton_schulz", "step"] if on_gpu else ["exchange"])
    unknown = [mode for mode in options.modes if mode not in MODES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no mode; choose from {', '.join(MODES)}")
    unknown = [case for case in options.cases.split(",") if case not in CASES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no case; choose from {', '.join(CASES)}")
    needs_gpu = not ON_CPU.issuperset(options.modes)
    if needs_gpu and not torch.cuda.is_available() and not options.tiny:
        parser.error(
            f"{' '.join(options.modes)} without a GPU: add --tiny for a dry run on the CPU"
        )
    return options


def default_name(options: argparse.Namespace) -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    # A dry run must never overwrite figures that mean something.
    parts = ["muon", *options.modes, *gpu.lower().split(), *(["tiny"] if options.tiny else [])]
    return "-".join(parts)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = "python -m benchmarks.muon " + shlex.join(arguments)
    tables: list[report.Table] = []
    for mode in options.modes:
        tables += MODES[mode](options)
    name = options.name or default_name(options)
    paths = report.write(tables, facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


if __name__ == "__main__":
    main(sys.argv[1:])
