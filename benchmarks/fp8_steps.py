# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.fp8_steps`` on a machine with a Hopper GPU: whole training steps with bf16
and with fp8 products, compiled blocks, AdamW and Muon; and the rates of the products.

Each model and precision runs in a process of its own, one after another, with one optimizer after
another; one that fails leaves a line. No process begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import report
from benchmarks.measure import GIB, StepClock, device_use, milliseconds, step_row
from benchmarks.models import GPTConfig, gpt_and_tokens, token_loss
from benchmarks.report import Row, Table
from benchmarks.workers import Options, in_processes
from shardwise.precision.fp8 import SQUARE_128, encode

WARMUPS, STEPS = 5, 24  # at its limit of power a GPU changes its clock: 8 steps differed by 2 %
MODELS = {
    "0.96B": (GPTConfig(), "16 x 2048, SwiGLU 5632, 8 x 2048 tokens"),
    "1.73B": (
        GPTConfig(num_layers=6, width=4096, num_heads=32, hidden=14336, batch=4, length=4096),
        "6 x 4096, SwiGLU 14336, 4 x 4096 tokens",
    ),
    "0.22B": (
        GPTConfig(num_layers=12, width=1024, num_heads=16, hidden=2816, batch=16, length=2048),
        "12 x 1024, SwiGLU 2816, 16 x 2048 tokens",
    ),
}
WIDTHS = ("0.22B",)  # a narrower model: where fp8 still wins
TINY = GPTConfig(num_layers=2, width=128, num_heads=2, hidden=256, vocab=256, batch=2, length=64)
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"weights": "bf16"},
    "fp8_block": {"weights": "fp8_block"},
    "fp8_block, head too": {"weights": "fp8_block", "include": ("*", "head.weight")},
    "mxfp8": {"weights": "mxfp8"},
}
# Model, precision, optimizers.
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    (name, precision, ("adamw", "sw.adamw", "muon"))  # torch's, and the two of sw.optimizer
    for name in MODELS
    if name not in WIDTHS
    for precision in ("bf16", "fp8_block")
]
CASES += [(name, "fp8_block, head too", ("adamw",)) for name in MODELS if name not in WIDTHS]
CASES += [(name, each, ("adamw", "muon")) for name in WIDTHS for each in ("bf16", "fp8_block")]


def worker(rank: int, options: Options, mesh: DeviceMesh) -> list[dict[str, Any]]:
    name, precision, eager, *kinds = options.systems
    config = TINY if options.tiny else MODELS[name][0]
    found = []
    for kind in kinds:
        found.append(measure(config, precision, kind, eager == "eager", options.device, mesh))
        gc.collect()  # the model, before the next one is built
    return found


def measure(
    config: GPTConfig, precision: str, kind: str, eager: bool, where: str, mesh: DeviceMesh
) -> dict[str, Any]:
    """One model in one precision with one optimizer. The clock never makes the host wait for the
    device; how long the host takes, and what the device does, is seen in further steps."""
    device = torch.device(where)
    model, inputs, targets, loss_of = wrapped(config, precision, device, mesh, eager)
    optimizer = optimizer_of(model, kind)
    clock = StepClock(device)

    def step() -> Any:
        clock.start()
        loss = loss_of(model(inputs), targets)
        clock.mark()
        loss.backward()
        clock.mark()
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
        return loss

    for index in range(WARMUPS + STEPS):
        if index == WARMUPS and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = step()
    found: dict[str, Any] = {"parts": clock.intervals()[WARMUPS:], "loss": loss.item()}
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated() / GIB
        try:
            found |= device_use(step)
        except Exception as error:  # the row stands without it
            print(f"profile FAILED: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def wrapped(
    config: GPTConfig, precision: str, device: torch.device, mesh: DeviceMesh, eager: bool
) -> tuple[Any, Tensor, Tensor, Callable[..., Any]]:
    """The sharded model with compiled blocks, its inputs and targets, and its loss."""
    import shardwise as sw

    model, inputs, targets = gpt_and_tokens(config, device)
    chosen = sw.Precision(reduce="fp32", **PRECISIONS[precision])
    for module in (*model.blocks, model):
        sw.fully_shard(module, mesh=mesh, placements=sw.zero(3), precision=chosen)
    if eager:
        return model, inputs, targets, token_loss
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, fullgraph=True)
    return model, inputs, targets, torch.compile(token_loss)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    import shardwise as sw

    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    matrices = sw.muon(lr=1e-3) if kind == "muon" else None
    return sw.optimizer(model, matrix=matrices, elementwise=sw.adamw(lr=1e-4))


def steps(
    options: Options, cases: Sequence[tuple[str, str, tuple[str, ...]]], ends: float, eager: bool
) -> Iterator[Table]:
    """A row for each case; those that failed stand in the note."""
    rows: list[Row] = []
    kernels: list[Row] = []
    failed: list[str] = []
    base: dict[tuple[str, str], Row] = {}
    backend = "nccl" if options.device == "cuda" else "gloo"
    for name, precision, kinds in cases:
        what = f"{name}, {precision}, {' and '.join(kinds)}"
        if time.perf_counter() > ends:
            failed.append(f"{what}: not begun, the time was over")
            continue
        systems = (name, precision, "eager" if eager else "compiled", *kinds)
        try:
            results = in_processes(worker, 1, backend, replace(options, systems=systems))
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            failed.append(f"{what}: FAILED, {lines[-1][:300]}")
            print(str(error)[-3000:], file=sys.stderr)
            continue
        for kind, found in zip(kinds, results, strict=True):
            row: Row = {"model": name, "precision": precision, **step_row(found.pop("parts"))}
            row |= {"update": row["optimizer"], "optimizer": kind}
            kernels += [{**row, **one} for one in found.pop("kernels", ())]
            row |= found
            if precision == "bf16":
                base[name, kind] = row
            theirs = base.get((name, kind), {})  # without bf16 in the same command: no ratio
            for key in ("step", "peak", "busy"):
                if isinstance(row.get(key), float) and isinstance(theirs.get(key), float):
                    row[f"{key}_ratio"] = row[key] / theirs[key]  # type: ignore[operator]
            rows.append(row)
    shapes = "; ".join(f"{name}: {words}" for name, (_, words) in MODELS.items())
    columns = {key: (key, "s") for key in ("model", "precision", "optimizer")}
    yield Table(
        title="Training step, fp8 products" + options.mark,
        note=f"{shapes}; vocab 32768 untied.\nzero(3), 1 rank, fp32 main weights and grads, reduce "
        f"fp32, blocks and loss compiled. A fresh\nprocess for each model and precision, "
        f"{WARMUPS} + {STEPS} steps. busy: any kernel runs; idle: none does,\nof 3 steps in a row "
        "with the profiler on.\n" + "\n".join(failed),
        columns=columns
        | {
            "step": ("step ms", ".1f"),
            "step_ratio": ("x bf16", ".3f"),
            "step_spread": ("spread %", ".1f"),
            **{key: (key, ".1f") for key in ("forward", "backward", "update")},
            "busy": ("busy ms", ".1f"),
            "busy_ratio": ("x bf16", ".3f"),
            "idle": ("idle %", ".1f"),
            "launches": ("launches", ".0f"),
            "peak": ("peak GiB", ".2f"),
            "peak_ratio": ("x bf16", ".3f"),
            "loss": ("last loss", ".4f"),
        },
        rows=rows,
    )
    if kernels:
        yield Table(
            title="Kernels of a step" + options.mark,
            note="Those that take most of each step, with the profiler on.",
            columns=columns | {"kernel": ("kernel", "s"), "ms": ("ms", ".2f")},
            rows=kernels,
        )


def matching(case: tuple[str, str, tuple[str, ...]], words: str) -> tuple[str, ...]:
    """The optimizers of a case whose rows hold these words."""
    name, precision, kinds = case
    return tuple(kind for kind in kinds if words in f"{name}, {precision}, {kind}")


# --------------------------------------------------------------------------------------- products


def product_row(columns: int, out: int) -> Row:
    """The three products of one layer, in TFLOP/s, beside bf16's."""
    from shardwise.precision import fp8_block

    bf16 = torch.bfloat16
    x = torch.randn(16384, columns, device="cuda", dtype=bf16)
    grad = torch.randn(16384, out, device="cuda", dtype=bf16)
    w = torch.randn(out, columns, device="cuda", dtype=bf16)
    (plane,) = encode(w, (SQUARE_128,))
    weight = plane.codes, plane.scales
    xs = fp8_block.quantise(x, True, 128)
    gs = fp8_block.quantise(grad, True, 1)
    runs: dict[str, Callable[[], object]] = {
        "y": lambda: fp8_block.multiply(*xs[:2], *weight, "forward", bf16),
        "y16": lambda: x @ w.t(),
        "dx": lambda: fp8_block.multiply(*gs[:2], *weight, "backward", bf16),
        "dx16": lambda: grad @ w,
        "dw": lambda: fp8_block.weight_gradient(gs[2], gs[3], xs[2], xs[3], bf16),
        "dw16": lambda: grad.t() @ x,
    }
    flops = 2e-9 * 16384 * columns * out
    return {key: flops / milliseconds(run) for key, run in runs.items()}


def product_table() -> Iterator[Table]:
    rows: list[Row] = []
    for shape in ((2048, 2048), (2048, 5632), (5632, 2048), (4096, 14336), (14336, 4096)):
        row: Row = {"shape": f"16384 x {shape[0]} x {shape[1]}"}
        rows.append(row)
        try:
            row |= product_row(*shape)
        except Exception as error:
            row["shape"] = f"{row['shape']} FAILED {type(error).__name__}: {str(error)[:100]}"
    columns = {"shape": ("tokens x in x out", "s")}
    for key in ("y", "dx", "dw"):
        columns |= {key: (key, ".0f"), f"{key}16": (f"{key} bf16", ".0f")}
    yield Table(
        title="Products",
        note="TFLOP/s of operands that are quantised already; dx turns the weight's codes.",
        columns=columns,
        rows=rows,
    )


def main(arguments: Sequence[str]) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_steps", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=("products", "steps"), default=["products", "steps"])
    add("--seconds", type=float, default=280, help="no process begins later")
    add("--match", nargs="+", default=[""], help="rows of steps that hold these")
    add("--eager", action="store_true", help="blocks and loss are not compiled")
    add("--tiny", action="store_true", help="a dry run of the steps")
    add("--results", type=Path, default=report.RESULTS, help="folder to write to")
    asked = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    if not gpu and not asked.tiny:
        parser.error("no GPU; --tiny runs what a CPU can")
    facts = report.circumstances(arguments, "fp8_steps")
    tables = list(product_table()) if gpu and "products" in asked.only else []
    if gpu:
        torch.cuda.empty_cache()  # the processes of the steps need the memory
    if "steps" in asked.only:
        run = Options(device="cuda" if gpu else "cpu", systems=(), rounds=1, tiny=asked.tiny)
        cases = [
            (*case[:2], kinds)
            for words in asked.match
            for case in CASES
            if (kinds := matching(case, words))
        ]
        tables += steps(run, cases, began + asked.seconds, asked.eager)
    report.publish(tables, facts, "-".join(["fp8", *asked.only]), asked.results, tiny=asked.tiny)


if __name__ == "__main__":
    main(sys.argv[1:])
