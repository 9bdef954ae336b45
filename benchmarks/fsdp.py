# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.fsdp``: torch DDP, torch FSDP2 and this library, one command, one report.

mode   where                        what
gloo   2 gloo ranks on CPU          whole step of an MLP, systems taking turns
gpu    1 NCCL rank                  whole step and peak of a 0.96B GPT, a process per system
fake   rank 0 of 8, no bytes moved  host time per wrapped module; on a GPU also the GPT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.overhead import run_fake
from benchmarks.steps import run_gloo, run_gpu
from benchmarks.systems import SYSTEMS
from benchmarks.workers import Options

MODES: dict[str, tuple[Callable[[Options], list[report.Table]], tuple[str, ...]]] = {
    "gloo": (run_gloo, ("none", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")),
    "gpu": (run_gpu, ("none", "ddp", "fsdp2", "zero3")),
    "fake": (run_fake, ("none", "fsdp2", "zero3")),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fsdp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("modes", nargs="*", metavar="mode", help="default: gpu fake with a GPU, else gloo fake")
    add("--systems", help=f"comma-separated, of {','.join(SYSTEMS)}; default: the mode's own")
    add("--device", choices=("cpu", "cuda"), help="for gpu and fake; default: cuda where it exists")
    add("--rounds", type=int, default=15, help="turns per system in gloo (fake: 5x); default 15")
    add(
        "--tiny",
        action="store_true",
        help="dry run of every path at toy size; no figure means much",
    )
    add("--name", help="of the result files; default: fsdp-<modes>-<cpu, or the GPU's name>")
    add("--results", type=Path, default=report.RESULTS, help="folder for <name>.json and <name>.md")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.modes = options.modes or (
        ["gpu", "fake"] if options.device == "cuda" else ["gloo", "fake"]
    )
    unknown = [mode for mode in options.modes if mode not in MODES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no mode; choose from {', '.join(MODES)}")
    options.systems = tuple(options.systems.split(",")) if options.systems else ()
    unknown = [system for system in options.systems if system not in SYSTEMS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no system; choose from {', '.join(SYSTEMS)}")
    if "gpu" in options.modes and options.device == "cpu" and not options.tiny:
        parser.error("gpu without a GPU: the GPT takes hours on a CPU; add --tiny for a dry run")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: a spread needs at least 2")
    return options


def default_name(options: argparse.Namespace) -> str:
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    # A dry run must never overwrite figures that mean something.
    parts = ["fsdp", *options.modes, *gpu.lower().split(), *(["tiny"] if options.tiny else [])]
    return "-".join(parts)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    facts = report.circumstances(arguments)
    tables: list[report.Table] = []
    for mode in options.modes:
        run, systems = MODES[mode]
        tables += run(
            Options(
                device=options.device,
                systems=options.systems or systems,
                rounds=options.rounds,
                tiny=options.tiny,
            )
        )
    name = options.name or default_name(options)
    paths = report.write(tables, facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


if __name__ == "__main__":
    main(sys.argv[1:])
