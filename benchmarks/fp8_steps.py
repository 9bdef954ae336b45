# SPDX-License-Identifier: Apache-2.0
"""Whole training steps with bf16 and with fp8 products, compiled blocks, AdamW and Muon, and the
rates of the quantising kernels: ``python -m benchmarks.fp8_steps`` on a machine with a Hopper GPU.

Each model and precision runs in a process of its own, one after another, with one optimizer after
another; one that fails leaves a line. No process begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import report
from benchmarks.measure import GIB, StepClock, milliseconds, step_row
from benchmarks.models import GPTConfig, gpt_and_tokens, token_loss
from benchmarks.report import Row, Table
from benchmarks.workers import Options, in_processes
from shardwise.precision.fp8 import SQUARE_128, empty_planes, encode
from shardwise.report.trace import idle_share, kernels_of, merged

WARMUPS, STEPS = 5, 24  # at its limit of power a GPU changes its clock: 8 steps differed by 2 %
MODELS = {
    "0.96B": (GPTConfig(), "16 x 2048, SwiGLU 5632, 8 x 2048 tokens"),
    "1.73B": (
        GPTConfig(num_layers=6, width=4096, num_heads=32, hidden=14336, batch=4, length=4096),
        "6 x 4096, SwiGLU 14336, 4 x 4096 tokens",
    ),
    "0.48B": (
        GPTConfig(num_layers=12, width=1600, num_heads=25, hidden=4352, batch=16, length=2048),
        "12 x 1600 (25 heads), SwiGLU 4352, 16 x 2048 tokens",
    ),
    "0.22B": (
        GPTConfig(num_layers=12, width=1024, num_heads=16, hidden=2816, batch=16, length=2048),
        "12 x 1024, SwiGLU 2816, 16 x 2048 tokens",
    ),
}
WIDTHS = ("0.48B", "0.22B")  # narrower models: where fp8 still wins
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
TOP = 12  # kernels of a step, by their time


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


def device_use(step: Callable[[], object], count: int = 3) -> dict[str, Any]:
    """Milliseconds of a step in which the host issues it (from an idle device; where the queue of
    launches is full, the host waits), in which any kernel runs, and the kernels that take most.

    Kernels are those of ``count`` steps that follow another one: a running device, no empty queue.
    """
    hosts = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        hosts.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        for _ in range(1 + count):
            step()
        torch.cuda.synchronize()
    events = sorted(kernels_of(profiler))
    events = events[len(events) // (1 + count) :]
    totals: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for begin, end, name in events:
        totals[name] += end - begin
        calls[name] += 1
    busy = sum(end - begin for begin, end in merged([event[:2] for event in events]))
    top = [
        {"kernel": name[:90], "ms": total * 1e-6 / count, "calls": calls[name] / count}
        for name, total in totals.most_common(TOP)
    ]
    return {
        "host": statistics.median(hosts),
        "busy": busy * 1e-6 / count,
        "idle": 100 * (idle_share([event[:2] for event in events]) or 0.0),
        "launches": len(events) / count,
        "kernels": top,
    }


def measured(
    options: Options, cases: Sequence[tuple[str, str, tuple[str, ...]]], ends: float, eager: bool
) -> Iterator[tuple[list[Row], list[Row], list[str]]]:
    """The rows of steps and of kernels so far after each case, and the lines of those that
    failed."""
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
        yield rows, kernels, failed
    yield rows, kernels, failed


def matching(case: tuple[str, str, tuple[str, ...]], words: str) -> tuple[str, ...]:
    """The optimizers of a case whose rows hold these words."""
    name, precision, kinds = case
    return tuple(kind for kind in kinds if words in f"{name}, {precision}, {kind}")


def peers() -> str:
    """What is known of the peers, of which this command makes no rows."""
    found = [name for name in ("torchao", "transformer_engine") if find_spec(name)]
    return f"torchao (float8, rowwise) and Transformer Engine: installed {found or 'neither'}."


def step_tables(
    rows: list[Row], kernels: list[Row], failed: list[str], mark: str
) -> Iterator[Table]:
    shapes = "; ".join(f"{name}: {words}" for name, (_, words) in MODELS.items())
    columns = {key: (key, "s") for key in ("model", "precision", "optimizer")}
    yield Table(
        title="Training step, fp8 products" + mark,
        note=f"{shapes}; vocab 32768 untied.\nzero(3), 1 rank, fp32 main weights and grads, reduce "
        f"fp32, blocks and loss compiled. A fresh\nprocess for each model and precision, "
        f"{WARMUPS} + {STEPS} steps. host: to issue a step to an idle\ndevice; busy: any kernel "
        f"runs; idle: of 3 steps in a row with the profiler on.\n" + "\n".join([*failed, peers()]),
        columns=columns
        | {
            "step": ("step ms", ".1f"),
            "step_ratio": ("x bf16", ".3f"),
            "step_spread": ("spread %", ".1f"),
            **{key: (key, ".1f") for key in ("forward", "backward", "update")},
            "host": ("host ms", ".1f"),
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
            title="Kernels of a step" + mark,
            note=f"The {TOP} that take most of each step, with the profiler on.",
            columns=columns
            | {"kernel": ("kernel", "s"), "ms": ("ms", ".2f"), "calls": ("calls", ".0f")},
            rows=kernels,
        )


# ---------------------------------------------------------------------------------------- kernels


SHAPES = ((16384, 2048), (16384, 5632), (16384, 14336), (16384, 28672))


def kernel_tables() -> Iterator[Table]:
    from shardwise.kernels import fp8_codes as kernels
    from shardwise.precision import fp8_block

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
        for turned in (1, 128):
            found = fp8_block.empty(x, True, turned)
            run = partial(kernels.quantise, x, found[:2], found[2:], square=turned == 128)
            add(f"quantise, both planes, turned {turned}x128", shape, "", 2 * x.nbytes, run)
        run = lambda x=x, f=found: kernels.quantise(x, f[:2], None)  # noqa: E731
        add("quantise, rows", shape, "", x.nbytes * 3 // 2, run)
        main = torch.randn(shape[0] // 4, shape[1], device="cuda")
        planes = empty_planes(main.shape, (SQUARE_128,), "cuda")
        run = lambda m=main, p=planes: encode(m, (SQUARE_128,), out=p)  # noqa: E731
        add("encode fp32 weights", tuple(main.shape), "", main.numel() * 5, run)
        run = lambda p=planes[0]: kernels.turn(p.codes, p.scales)  # noqa: E731
        add("turn codes", tuple(main.shape), "", main.numel() * 2, run)
        if shape == SHAPES[0]:
            add("encode a 0.96B block", (51380224, 1), "1 launch", 51380224 * 5, block_encoder())
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


def block_encoder() -> Callable[[], object]:
    """Encodes the weights of one block of the 0.96B GPT in one launch."""
    from shardwise.kernels import fp8_codes as kernels

    matrices, start = [], 0
    for rows, columns in [(2048, 2048)] * 4 + [(5632, 2048)] * 2 + [(2048, 5632)]:
        matrices.append(kernels.Matrix(rows, columns, start, start))
        start += rows * columns
    main, codes = torch.randn(start, device="cuda"), torch.empty(start, device="cuda").byte()
    scales, tiles = (
        torch.empty(start // 16384, device="cuda"),
        kernels.list_tiles(matrices, main.device),
    )
    return lambda: kernels.encode(main, codes, scales, tiles=tiles)


def product_row(columns: int, out: int) -> Row:
    """The three products of one layer, in TFLOP/s, beside bf16's."""
    from shardwise.precision import fp8_block

    bf16 = torch.bfloat16
    x = torch.randn(16384, columns, device="cuda", dtype=bf16)
    grad = torch.randn(16384, out, device="cuda", dtype=bf16)
    w = torch.randn(out, columns, device="cuda", dtype=bf16)
    (plane,) = encode(w, (SQUARE_128,))
    weight = plane.codes, plane.scales
    xs, narrow = (fp8_block.quantise(x, True, turned) for turned in (128, 1))
    gs = fp8_block.quantise(grad, True, 1)
    left, right = (each[2].view(torch.float8_e4m3fn) for each in (gs, narrow))
    runs: dict[str, Callable[[], object]] = {
        "y": lambda: fp8_block.multiply(*xs[:2], *weight, "forward", bf16),
        "y16": lambda: x @ w.t(),
        "dx": lambda: fp8_block.multiply(*gs[:2], *weight, "backward", bf16),
        "dx16": lambda: grad @ w,
        "dw": lambda: fp8_block.weight_gradient(gs[2], gs[3], xs[2], xs[3], bf16),
        "dw16": lambda: grad.t() @ x,
        "dw_narrow": lambda: torch._scaled_mm(
            left, right.t(), scale_a=gs[3].t(), scale_b=narrow[3], out_dtype=bf16
        ),
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
    columns["dw_narrow"] = ("dw, x in 1x128", ".0f")
    yield Table(
        title="Products",
        note="TFLOP/s of operands that are quantised already; dx turns the weight's codes.\n"
        "The last column is no product of the library: what x in 1x128 blocks would give.",
        columns=columns,
        rows=rows,
    )


def swiglu_table() -> Iterator[Table]:
    """SwiGLU and its gradient that write codes, beside compiled ones and the quantiser after."""
    from shardwise.precision import fp8_block

    rows: list[Row] = []
    silu, of_silu = nn.functional.silu, torch.ops.aten.silu_backward.default
    plain = torch.compile(lambda gate, up: silu(gate) * up, dynamic=False)
    back = torch.compile(
        lambda dh, gate, up: (of_silu(dh * up, gate), dh * silu(gate)), dynamic=False
    )
    for tokens, hidden in ((16384, 5632), (16384, 14336)):
        gate, up, dh = torch.randn(tokens, 3 * hidden, device="cuda").bfloat16().chunk(3, 1)
        of_h = (dh.contiguous(), gate, up)
        runs: dict[str, tuple[int, Callable[[], object]]] = {
            "compiled, then quantised": (
                6,
                lambda g=gate, u=up: fp8_block.quantise(plain(g, u), True, 128),  # type: ignore[misc]
            ),
            "written as codes": (6, partial(fp8_block.quantise_swiglu, gate, up)),
            "gradient compiled, then quantised": (
                10,
                lambda of_h=of_h: fp8_block.quantise(torch.cat(back(*of_h), 1), True, 1),  # type: ignore[misc]
            ),
            "gradient written as codes": (
                10,
                partial(fp8_block.quantise_swiglu_backward, *of_h, True),
            ),
        }
        for name, (moved, run) in runs.items():
            time = milliseconds(run)
            row: Row = {"shape": f"{tokens}x{hidden}", "kernel": name, "us": 1e3 * time}
            rows.append(row | {"rate": moved * tokens * hidden / time * 1e-9})
    columns = {"shape": ("shape", "s"), "kernel": ("kernel", "s")}
    yield Table(
        title="SwiGLU",
        note="Codes in both orientations. TB/s: of gate, up, the gradient of h, and codes.",
        columns=columns | {"us": ("us", ".1f"), "rate": ("TB/s", ".2f")},
        rows=rows,
    )


PARTS = ["kernels", "swiglu", "steps"]


def main(arguments: Sequence[str]) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_steps", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder to write to")
    parser.add_argument("--seconds", type=float, default=280, help="no process begins later")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts")
    parser.add_argument("--match", nargs="+", default=[""], help="rows of steps that hold these")
    parser.add_argument("--eager", action="store_true", help="blocks and loss are not compiled")
    parser.add_argument("--tiny", action="store_true", help="a dry run of the steps")
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    if not gpu and not options.tiny:
        parser.error("no GPU; --tiny runs what a CPU can")
    facts = report.circumstances(arguments)
    facts["command"] = "python -m benchmarks.fp8_steps " + shlex.join(arguments)
    where = torch.cuda.get_device_name().lower().split() if gpu else ["cpu"]
    parts = options.only
    name = "-".join(["fp8", *(() if parts == PARTS else parts), *where])
    tables: dict[str, Table] = {}

    def keep(table: Table) -> None:
        tables[table.title] = table  # written at once: what comes later may fail
        report.write(list(tables.values()), facts, name, options.results)

    if gpu:
        made = {
            "kernels": (kernel_tables, product_table),
            "swiglu": (swiglu_table,),
        }
        try:
            for part in (part for part in parts if part in made):
                for make in made[part]:
                    for table in make():
                        keep(table)
        except Exception as error:
            print(f"kernels FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()  # the processes of the steps need the memory
    if "steps" in parts:
        run = Options(device="cuda" if gpu else "cpu", systems=(), rounds=1, tiny=options.tiny)
        cases = [
            (*case[:2], kinds)
            for words in options.match
            for case in CASES
            if (kinds := matching(case, words))
        ]
        for found in measured(run, cases, began + options.seconds, options.eager):
            for table in step_tables(*found, run.mark):
                keep(table)
    for table in tables.values():
        print(table.markdown())
    print(f"written: {options.results / name}.md; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
