# SPDX-License-Identifier: Apache-2.0
"""Whole training steps with bf16 and with fp8 products, compiled blocks, AdamW and Muon, and the
rates of the quantising kernels: ``python -m benchmarks.fp8_steps`` on a machine with a Hopper GPU.

Each model and precision runs in a process of its own, one after another; one that fails leaves a
line. No case begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import report
from benchmarks.measure import GIB, StepClock, step_row
from benchmarks.models import GPTConfig, gpt_and_tokens, token_loss
from benchmarks.report import Row, Table
from benchmarks.workers import Options, in_processes

WARMUPS, STEPS = 6, 8
MODELS = {
    "0.96B": (GPTConfig(), "16 x 2048, SwiGLU 5632, 8 x 2048 tokens"),
    "1.73B": (
        GPTConfig(num_layers=6, width=4096, num_heads=32, hidden=14336, batch=4, length=4096),
        "6 x 4096, SwiGLU 14336, 4 x 4096 tokens",
    ),
}
TINY = GPTConfig(num_layers=2, width=128, num_heads=2, hidden=256, vocab=256, batch=2, length=64)
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"weights": "bf16"},
    "fp8_block": {"weights": "fp8_block"},
    "fp8_block, head too": {"weights": "fp8_block", "include": ("*", "head.weight")},
    "fp8_block, dW in bf16": {"weights": "fp8_block", "weight_gradient": "bf16"},
    "mxfp8_2d": {"weights": "mxfp8_2d"},
}
CASES = [
    ("0.96B", "bf16"),
    ("0.96B", "fp8_block"),
    ("1.73B", "bf16"),
    ("1.73B", "fp8_block"),
    ("0.96B", "fp8_block, head too"),
    ("1.73B", "fp8_block, head too"),
    ("0.96B", "fp8_block, dW in bf16"),
]


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """One model in one precision, with AdamW, then with Muon. The clock never makes the host wait
    for the device."""
    import shardwise as sw

    name, precision, eager = options.systems
    device = torch.device(options.device)
    config = TINY if options.tiny else MODELS[name][0]
    model, inputs, targets = gpt_and_tokens(config, device)
    chosen = sw.Precision(reduce="fp32", **PRECISIONS[precision])
    for module in (*model.blocks, model):
        sw.fully_shard(module, mesh=mesh, placements=sw.zero(3), precision=chosen)
    loss_of: Callable[..., Any] = token_loss
    if eager != "eager":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, fullgraph=True)
        loss_of = torch.compile(token_loss)
    result: dict[str, Any] = {}
    for kind in ("adamw", "muon"):
        try:
            result[kind] = steps(model, inputs, targets, loss_of, optimizer_of(model, kind), device)
        except Exception as error:
            if kind == "adamw":
                raise
            result[kind] = f"{type(error).__name__}: {error}"
    return result


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    import shardwise as sw

    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return sw.optimizer(model, matrix=sw.muon(lr=1e-3), elementwise=sw.adamw(lr=1e-4))


def steps(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss_of: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> dict[str, Any]:
    clock = StepClock(device)
    for index in range(WARMUPS + STEPS):
        if index == WARMUPS and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        clock.start()
        loss = loss_of(model(inputs), targets)
        clock.mark()
        loss.backward()
        clock.mark()
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    return {"parts": clock.intervals()[WARMUPS:], "peak": peak, "loss": loss.item()}


def measured(options: Options, ends: float, eager: bool) -> Iterator[tuple[list[Row], list[str]]]:
    """The rows so far after each case, and the lines of those that failed."""
    rows: list[Row] = []
    failed: list[str] = []
    base: dict[tuple[str, str], Row] = {}
    backend = "nccl" if options.device == "cuda" else "gloo"
    for name, precision in CASES:
        if time.perf_counter() > ends:
            failed.append(f"{name}, {precision}: not begun, the time was over")
            continue
        systems = (name, precision, "eager" if eager else "compiled")
        try:
            done = in_processes(worker, 1, backend, replace(options, systems=systems))
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            failed.append(f"{name}, {precision}: FAILED, {lines[-1][:300]}")
            print(str(error)[-3000:], file=sys.stderr)
            continue
        for kind, found in done.items():
            if isinstance(found, str):
                failed.append(f"{name}, {precision}, {kind}: FAILED, {found[:300]}")
                continue
            row: Row = {"model": name, "precision": precision, "optimizer": kind}
            row |= {"peak": found["peak"], "loss": found["loss"]} | step_row(found["parts"])
            row["update"] = row["optimizer"] if isinstance(row["optimizer"], float) else None
            row["optimizer"] = kind
            theirs = base.setdefault((name, kind), row)
            for key in ("step", "peak"):
                if isinstance(row[key], float) and isinstance(theirs[key], float):
                    row[f"{key}_ratio"] = row[key] / theirs[key]  # type: ignore[operator]
            rows.append(row)
        yield rows, failed
    yield rows, failed


def step_table(rows: list[Row], failed: list[str], mark: str) -> Table:
    shapes = "; ".join(f"{name}: {words}" for name, (_, words) in MODELS.items())
    return Table(
        title="Training step, fp8 products" + mark,
        note=f"{shapes}; vocab 32768 untied.\nzero(3), 1 rank, fp32 main weights and grads, reduce "
        f"fp32, blocks and loss compiled. A fresh\nprocess per model and precision, {WARMUPS} + "
        f"{STEPS} steps each.\n" + "\n".join(failed),
        columns={
            "model": ("model", "s"),
            "precision": ("precision", "s"),
            "optimizer": ("optimizer", "s"),
            "step": ("step ms", ".1f"),
            "step_ratio": ("x bf16", ".3f"),
            "step_spread": ("spread %", ".1f"),
            "forward": ("forward", ".1f"),
            "backward": ("backward", ".1f"),
            "update": ("update", ".1f"),
            "peak": ("peak GiB", ".2f"),
            "peak_ratio": ("x bf16", ".3f"),
            "loss": ("last loss", ".4f"),
        },
        rows=rows,
    )


# ---------------------------------------------------------------------------------------- kernels


def milliseconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Median over events; between runs, 256 MB are written so that nothing is left in the cache."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    run()
    found = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        found.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in found)


SHAPES = ((16384, 2048), (16384, 5632), (16384, 14336), (16384, 28672))


def kernel_tables() -> Iterator[Table]:
    from shardwise.kernels import fp8_block as kernels
    from shardwise.precision import fp8_block
    from shardwise.precision.fp8 import SQUARE_128, empty_planes, encode

    copied = torch.randn(16384, 14336, device="cuda", dtype=torch.bfloat16)
    into = torch.empty_like(copied)
    copy = 2 * copied.nbytes / milliseconds(lambda: into.copy_(copied)) * 1e-9
    rows: list[Row] = []

    def add(
        what: str, shape: tuple[int, int], tile: str, nbytes: int, run: Callable[[], object]
    ) -> None:
        row: Row = {"kernel": what, "shape": "x".join(map(str, shape)), "tile": tile}
        try:
            time = milliseconds(run)
            row |= {"us": 1e3 * time, "rate": nbytes / time * 1e-9}
            row["share"] = 100 * nbytes / time * 1e-9 / copy
        except Exception as error:
            row["tile"] = f"{tile} FAILED {type(error).__name__}: {str(error)[:80]}"
        rows.append(row)

    for shape in SHAPES:
        x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        found = fp8_block.empty(x, True, True)
        for tile in kernels.TILES if shape == SHAPES[2] else kernels.TILES[:1]:
            run = lambda x=x, f=found, t=tile: kernels.quantise(x, f[:2], f[2:], tile=t)  # noqa: E731
            add("quantise, both planes", shape, str(tile), 2 * x.nbytes, run)
        run = lambda x=x, f=found: kernels.quantise(x, f[:2], None)  # noqa: E731
        add("quantise, rows", shape, "", x.nbytes * 3 // 2, run)
        add("turn codes", shape, "", x.numel() * 2, lambda c=found[0]: kernels.turn(c))
        main = torch.randn(shape[0] // 4, shape[1], device="cuda")
        planes = empty_planes(main.shape, (SQUARE_128,), "cuda")
        run = lambda m=main, p=planes: encode(m, (SQUARE_128,), out=p)  # noqa: E731
        add("encode fp32 weights", tuple(main.shape), "", main.numel() * 5, run)
        yield Table(
            title="Quantising kernels",
            note=f"Bytes read and written over the median time, cache flushed; a copy: {copy:.2f}\n"
            "TB/s.",
            columns={
                "kernel": ("kernel", "s"),
                "shape": ("shape", "s"),
                "tile": ("tile", "s"),
                "us": ("us", ".1f"),
                "rate": ("TB/s", ".2f"),
                "share": ("% of a copy", ".1f"),
            },
            rows=rows,
        )


def product_row(columns: int, out: int) -> Row:
    """The three products of one layer, in TFLOP/s, beside bf16's."""
    from shardwise.precision import fp8_block
    from shardwise.precision.fp8 import SQUARE_128, encode

    bf16 = torch.bfloat16
    x = torch.randn(16384, columns, device="cuda", dtype=bf16)
    grad = torch.randn(16384, out, device="cuda", dtype=bf16)
    w = torch.randn(out, columns, device="cuda", dtype=bf16)
    (plane,) = encode(w, (SQUARE_128,))
    xs, gs = (fp8_block.quantise(each, True, True, "exact") for each in (x, grad))
    runs: dict[str, Callable[[], object]] = {
        "y": lambda: fp8_block.multiply(xs[0], xs[1], plane, "forward", bf16),
        "y16": lambda: x @ w.t(),
        "dx": lambda: fp8_block.multiply(gs[0], gs[1], plane, "backward", bf16),
        "dx16": lambda: grad @ w,
        "dw": lambda: fp8_block.weight_gradient(gs[2], gs[3], xs[2], xs[3], bf16),
        "dw16": lambda: grad.t() @ x,
    }
    flops = 2e-9 * 16384 * columns * out
    return {key: flops / milliseconds(run) for key, run in runs.items()}


def product_table() -> Table:
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
    return Table(
        title="Products",
        note="TFLOP/s of operands that are quantised already; dx turns the weight's codes.",
        columns=columns,
        rows=rows,
    )


def main(arguments: Sequence[str]) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_steps", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder to write to")
    parser.add_argument("--seconds", type=float, default=120, help="no case begins later")
    parser.add_argument("--only", choices=("kernels", "steps"), help="one part")
    parser.add_argument("--eager", action="store_true", help="blocks and loss are not compiled")
    parser.add_argument("--tiny", action="store_true", help="a dry run of the steps")
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    if not gpu and not options.tiny:
        parser.error("no GPU; --tiny runs what a CPU can")
    facts = report.circumstances(arguments)
    facts["command"] = "python -m benchmarks.fp8_steps " + shlex.join(arguments)
    where = torch.cuda.get_device_name().lower().split() if gpu else ["cpu"]
    name = "-".join(["fp8", *([options.only] if options.only else []), *where])
    tables: dict[str, Table] = {}

    def keep(table: Table) -> None:
        tables[table.title] = table  # written at once: what comes later may fail
        report.write(list(tables.values()), facts, name, options.results)

    if gpu and options.only != "steps":
        try:
            for table in kernel_tables():
                keep(table)
            keep(product_table())
        except Exception as error:
            print(f"kernels FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()  # the processes of the steps need the memory
    if options.only != "kernels":
        run = Options(device="cuda" if gpu else "cpu", systems=(), rounds=1, tiny=options.tiny)
        for rows, failed in measured(run, began + options.seconds, options.eager):
            keep(step_table(rows, failed, run.mark))
    for table in tables.values():
        print(table.markdown())
    print(f"written: {options.results / name}.md; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
