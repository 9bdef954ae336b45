# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.grouped_mlp``: the grouped MLP of experts beside torch's grouped GEMM.

The peer is ``F.grouped_mm`` twice with a ``torch.compile``d activation between, in the same process
and taking turns with ours, iteration by iteration, in an order that is drawn anew each time: what
ran before decides how warm the chip is. Both give gradients for rows, router weights and both
weights. Forward and backward are timed by events inside one iteration: medians.

    table 1   gradients left to autograd, in bf16
    table 2   gradients added to fp32 main gradients: the peer adds its bf16 ones
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from benchmarks.measure import GIB, StepClock
from shardwise.moe.activation import convert_gate_up, swiglu
from shardwise.moe.grouped_mlp import GroupedMLP

SHAPES = [(8, 4096, 2048, 32768), (128, 2048, 768, 131072), (64, 4096, 2048, 65536)]
TINY = [(4, 64, 32, 96)]
PEER = "F.grouped_mm + compiled activation"
COLUMNS = {
    "shape": ("experts, hidden, width, rows", ""),
    "spread": ("rows per expert", ""),
    "name": ("system", ""),
    "forward": ("forward ms", ".3f"),
    "forward_rate": ("TFLOP/s", ".0f"),
    "forward_speed": ("speed", ".2f"),
    "backward": ("backward ms", ".3f"),
    "backward_rate": ("TFLOP/s", ".0f"),
    "backward_speed": ("speed", ".2f"),
    "kept": ("kept for backward GiB", ".2f"),
    "peak": ("peak GiB", ".2f"),
}


def counts_of(spread: str, experts: int, rows: int) -> list[int]:
    if spread == "balanced":
        return [rows // experts] * experts
    shares = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    shares = shares[torch.randperm(experts, generator=torch.Generator().manual_seed(0))]
    counts = (shares / shares.sum() * rows).long()
    counts[counts.argmax()] += rows - counts.sum()
    return counts.tolist()


def activation(z: Tensor, p: Tensor, width: int) -> Tensor:
    gate, up = z[:, :width].float(), z[:, width:].float()
    return (F.silu(gate) * up * p[:, None]).to(z.dtype)


compiled_activation = torch.compile(activation, dynamic=False)


class Peer:
    """What one writes with torch alone."""

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        self.w1, self.w2 = w1, w2
        self.parameters = [w1, w2]
        self.main_grads: list[Tensor] | None = None

    def __call__(self, x: Tensor, ends: Tensor, p: Tensor) -> Tensor:
        z = F.grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)
        h = compiled_activation(z, p, self.w2.shape[-1])
        return F.grouped_mm(h, self.w2.transpose(-2, -1), offs=ends)

    def add_main_grads(self, gradients: Sequence[Tensor | None]) -> None:
        if self.main_grads is not None:
            for main, gradient in zip(self.main_grads, gradients, strict=True):
                assert gradient is not None
                main.add_(gradient)


class Ours:
    def __init__(self, w1: Tensor, w2: Tensor, block: int) -> None:
        experts, hidden, width = w2.shape
        self.mlp = GroupedMLP(
            experts, hidden, width, activation=swiglu(), gate_up_block=block,
            device="meta", dtype=w1.dtype,
        )  # fmt: skip
        self.mlp.fc1.weight = torch.nn.Parameter(convert_gate_up(w1.detach(), 0, block, -2))
        self.mlp.fc2.weight = torch.nn.Parameter(w2.detach())
        self.parameters: list[Any] = [self.mlp.fc1.weight, self.mlp.fc2.weight]

    def __call__(self, x: Tensor, ends: Tensor, p: Tensor) -> Tensor:
        return self.mlp(x, ends, p)

    def add_main_grads(self, gradients: Sequence[Tensor | None]) -> None:
        """They are there already."""


def measure(
    systems: dict[str, Any], case: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int, main: bool
) -> dict[str, dict[str, float]]:
    x, ends, p, dy = case
    clocks = {name: StepClock(x.device) for name in systems}
    results: dict[str, dict[str, float]] = {name: {} for name in systems}
    outcomes = {}

    def once(name: str, mark: Callable[[], None]) -> None:
        system = systems[name]
        y = system(x, ends, p)
        mark()
        # Ours adds those of the weights to their main gradients, and returns none.
        gradients = torch.autograd.grad(y, [x, p, *system.parameters], dy, allow_unused=main)
        if main:
            system.add_main_grads(gradients[2:])
        mark()
        outcomes[name] = (y, gradients)

    for name in systems:
        for _ in range(3):
            once(name, lambda: None)
        outcomes.clear()
        if x.is_cuda:
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = systems[name](x, ends, p)
            results[name]["kept"] = (torch.cuda.memory_allocated() - before - y.nbytes) / GIB
            del y
            once(name, lambda: None)
            results[name]["peak"] = (torch.cuda.max_memory_allocated() - before) / GIB
            outcomes.clear()
    turns, names = random.Random(0), list(systems)
    for _ in range(rounds):
        turns.shuffle(names)
        for name in names:
            clocks[name].start()
            once(name, clocks[name].mark)
            outcomes.clear()
    for name, clock in clocks.items():
        forward, backward = zip(*clock.intervals(), strict=True)
        results[name]["forward"] = statistics.median(forward)
        results[name]["backward"] = statistics.median(backward)
    if not main:
        same_results(systems, case)
    return results


def same_results(systems: dict[str, Any], case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """A speed counts only if both computed the same."""
    x, ends, p, dy = case
    expected = None
    for name, system in systems.items():
        y = system(x, ends, p)
        got = [y, *torch.autograd.grad(y, [x, p, system.parameters[1]], dy)]
        if expected is None:
            expected = got
        for mine, theirs in zip(got, expected, strict=True):
            error = ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
            assert error < 1e-2, f"{name} differs from {PEER} by {error:.1e}"


def run(
    shapes: Sequence[tuple[int, int, int, int]], rounds: int, device: str
) -> list[report.Table]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows_of: dict[bool, list[report.Row]] = {False: [], True: []}
    for experts, hidden, width, num_rows in shapes:
        torch.manual_seed(0)
        w1 = (torch.randn(experts, 2 * width, hidden, device=device) / hidden**0.5).to(dtype)
        w2 = (torch.randn(experts, hidden, width, device=device) / width**0.5).to(dtype)
        x = torch.randn(num_rows, hidden, device=device).to(dtype).requires_grad_()
        p = torch.rand(num_rows, device=device).requires_grad_()
        dy = torch.randn(num_rows, hidden, device=device).to(dtype)
        flops = 6 * num_rows * hidden * width / 1e9
        for main in (False, True):
            systems: dict[str, Any] = {PEER: Peer(w1.requires_grad_(), w2.requires_grad_())}
            systems["shardwise, stacked"] = Ours(w1, w2, 0)
            if not main:
                systems["shardwise, interleaved by 32"] = Ours(w1, w2, 32)
            else:
                systems[PEER].main_grads = [torch.zeros_like(w, dtype=torch.float32)
                                            for w in (w1, w2)]  # fmt: skip
                for parameter in systems["shardwise, stacked"].parameters:
                    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            for spread in ("balanced", "zipf"):
                counts = counts_of(spread, experts, num_rows)
                ends = torch.tensor(counts, device=device).cumsum(0).int()
                found = measure(systems, (x, ends, p, dy), rounds, main)
                peer = found[PEER]
                for name, figures in found.items():
                    rows_of[main].append({
                        "shape": f"{experts}, {hidden}, {width}, {num_rows}",
                        "spread": spread, "name": name, **figures,
                        "forward_rate": flops / figures["forward"],
                        "backward_rate": 2 * flops / figures["backward"],
                        "forward_speed": peer["forward"] / figures["forward"],
                        "backward_speed": peer["backward"] / figures["backward"],
                    })  # fmt: skip
                    sys.stderr.write(f"{rows_of[main][-1]}\n")
            del systems
        del w1, w2, x, p, dy
        gc.collect()
    notes = {
        False: "bf16 gradients for autograd. Speed: the peer's time over this one's.",
        True: "Weight gradients added to fp32 main gradients. Speed: the peer's time over ours.",
    }
    titles = {False: "Grouped MLP", True: "Grouped MLP with fp32 main gradients"}
    return [
        report.Table(title=titles[main], note=notes[main], columns=COLUMNS, rows=rows_of[main])
        for main in (False, True)
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grouped_mlp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="dry run; no figure means anything")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("no GPU here: add --tiny for a dry run")
    facts = report.circumstances(arguments, "grouped_mlp")
    tables = run(TINY if options.tiny else SHAPES, options.rounds, device)
    report.publish(tables, facts, "grouped_mlp", options.results, tiny=options.tiny)


if __name__ == "__main__":
    main(sys.argv[1:])
