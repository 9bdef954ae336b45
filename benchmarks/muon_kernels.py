# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on one GPU: whole batches beside cuBLAS, and the sweep that chose the tiles."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

from benchmarks.report import Row, Table
from shardwise.kernels.forms import Form, Polynomial, ProductTile, Triple, choose, flop
from shardwise.kernels.newton_schulz import orthogonalise
from shardwise.optim.presets import DEFAULT, PRESETS

# Coefficients do not change the cost: five quintic steps, those of the Polar Express.
QUINTIC: tuple[Triple, ...] = (
    (7.892582874424408, -20.38301415435285, 13.555306149406924),
    (3.9114848681354313, -2.5464739591298257, 0.42689954058143335),
    (3.760657955697423, -2.512830895346026, 0.43236535460157),
    (3.160399673686287, -2.149649016147391, 0.3996367039126013),
    (2.1910971618617303, -1.4416619672826074, 0.3281467022519697),
)
# (matrices, rows, columns); the first two are the 1.007B parameters.
BATCHES = (
    (60, 2048, 2048),
    (45, 8192, 2048),
    (45, 2048, 8192),
    (16, 4096, 4096),
    (8, 4096, 14336),
    (4, 8192, 8192),
    (64, 1024, 1024),
    (256, 512, 2048),
    (1024, 128, 7168),
    (1, 2048, 2048),
    (8, 2048, 2048),
)
MODEL = 2  # how many of them make the model


def cublas(batch: Tensor, coefficients: Iterable[Triple]) -> Tensor:
    """The peer: batched cuBLAS in bf16, the loop that torch, torchtitan and Moonlight run."""
    x = batch.mT if batch.shape[1] > batch.shape[2] else batch
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if batch.shape[1] > batch.shape[2] else x


def milliseconds(function: Callable[[], object], seconds: float = 0.25) -> float:
    """Median of single runs, timed by events, after two that compile and warm up."""
    for _ in range(2):
        function()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def random_batch(count: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(count, rows, columns, device=device).to(dtype)


def run_newton_schulz(tiny: bool) -> list[Table]:
    batches = [(2, 48, 48), (2, 96, 32)] if tiny else list(BATCHES)
    polynomial = Polynomial(coefficients=QUINTIC)
    default = PRESETS[DEFAULT]
    rows: list[Row] = []
    totals = dict.fromkeys(("peer", "ours", "default"), 0.0)
    for index, (count, height, width) in enumerate(batches):
        batch = random_batch(count, height, width, torch.float32)
        row: Row = {"batch": f"{count} x ({height}, {width})"}
        row["peer"] = milliseconds(lambda b=batch: cublas(b, QUINTIC))  # type: ignore[misc]
        chosen = choose(height, width, polynomial)
        forms: tuple[Form, ...] = ("block",) if chosen == "block" else ("direct", "gram")
        for form in forms:
            row[form] = milliseconds(lambda b=batch, f=form: orthogonalise(b, polynomial, f))  # type: ignore[misc]
        row["form"] = chosen
        row["default"] = milliseconds(lambda b=batch: orthogonalise(b, default))  # type: ignore[misc]
        ours, peer = row[chosen], row["peer"]
        assert isinstance(ours, float) and isinstance(peer, float)
        row["ratio"] = peer / ours
        short, long = sorted((height, width))
        row["rate"] = count * sum(flop(short, long, polynomial, chosen)) / ours / 1e9
        rows.append(row)
        if index < MODEL:
            totals["peer"] += peer
            totals["ours"] += ours
            totals["default"] += row["default"]  # type: ignore[operator]
        del batch
    rows.insert(
        MODEL,
        {
            "batch": "both: 1.007B parameters",
            **totals,
            "form": "",
            "ratio": totals["peer"] / totals["ours"],
        },
    )
    note = (
        "Milliseconds from an fp32 batch to the orthogonalised one, norm and cast included, five "
        "quintic steps. cuBLAS: bf16, direct form, batched. Ours: fp16, the form the library "
        "chooses and the other. TFLOP/s: of the chosen form's own count. Nonic: the library's "
        "default, of degrees 5, 9, 5 and 9, in the form it chooses."
    )
    columns = {
        "batch": ("batch", ""),
        "peer": ("cuBLAS", ".2f"),
        "direct": ("direct", ".2f"),
        "gram": ("gram", ".2f"),
        "block": ("block", ".2f"),
        "ours": ("chosen", ".2f"),
        "form": ("choice", ""),
        "ratio": ("cuBLAS / chosen", ".2f"),
        "rate": ("TFLOP/s", ".0f"),
        "default": ("nonic", ".2f"),
    }
    for row in rows:
        row.setdefault("ours", row.get(str(row["form"])))
    return [Table(title="Newton-Schulz", note=note, columns=columns, rows=rows)]


# -------------------------------------------------------------------------------------- the sweep


def candidates() -> list[ProductTile]:
    make = functools.partial(ProductTile, step=64)
    wide = [
        make(rows=128, columns=256, warps=8, stages=stages, persistent=persistent, flatten=flatten)
        for stages, (persistent, flatten) in itertools.product(
            (3, 4), ((False, False), (True, False), (True, True))
        )
    ]
    square = [
        make(rows=128, columns=128, warps=8, stages=4, persistent=True),
        make(rows=128, columns=128, warps=4, stages=2, persistent=False),
        make(rows=64, columns=128, warps=4, stages=3, persistent=False),
        make(rows=64, columns=64, warps=4, stages=4, persistent=False),
    ]
    return wide + square


SIDES = ((512, 256), (256, 512), (128, 1024), (48, 2048), (12, 4096), (3, 8192))


def operations(tile: ProductTile, count: int, side: int) -> dict[str, Callable[[], object]]:
    from shardwise.kernels.product import product
    from shardwise.kernels.symmetric import symmetric_product

    a = random_batch(count, side, side, torch.float16) / 64
    x = random_batch(count, side, 2 * side, torch.float16)
    tall = x.view(count, 2 * side, side)
    d, y, y_tall = torch.empty_like(a), torch.empty_like(x), torch.empty_like(tall)
    return {
        "gram": lambda: symmetric_product(x, x, d, tile, alpha=1e-3),
        "gram_tall": lambda: symmetric_product(tall, tall, d, tile, alpha=1e-3, tall=True),
        "shifted": lambda: symmetric_product(a, a, d, tile, beta=0.5),
        "product": lambda: product(a, x, y, tile),
        "product_tall": lambda: product(a, tall, y_tall, tile, tall=True),
    }


UNITS = {"gram": 2, "gram_tall": 2, "shifted": 1, "product": 4, "product_tall": 4}


def compile_tile(tile: ProductTile) -> list[str]:
    """In a process of its own: the compiler is serial and the machine has many cores."""
    problems = []
    for name, run in operations(tile, 1, 512).items():
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__} {str(error)[:80]}")
    return problems


def run_tiles(tiny: bool) -> list[Table]:
    tiles = candidates()[:1] if tiny else candidates()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(tiles), mp_context=context) as pool:
        problems = dict(zip(tiles, pool.map(compile_tile, tiles), strict=True))
    tables = []
    for name in UNITS:
        rows: list[Row] = []
        for tile in tiles:
            way = "flattened" if tile.flatten else "persistent" if tile.persistent else "plain"
            shape = f"{tile.rows}x{tile.columns}x{tile.step}"
            row: Row = {"tile": f"{shape} {tile.warps} warps {tile.stages} stages {way}"}
            for count, side in [(1, 256)] if tiny else SIDES:
                if any(problem.startswith(f"{name}:") for problem in problems[tile]):
                    continue
                run = operations(tile, count, side)[name]
                row[str(side)] = UNITS[name] * count * side**3 / milliseconds(run, 0.03) / 1e9
            rows.append(row)
        columns = {"tile": ("tile", "")}
        columns |= {str(side): (f"{side}", ".0f") for _, side in SIDES}
        note = "Useful TFLOP/s by short side, full batches; a symmetric result counts half."
        tables.append(Table(title=f"{name}", note=note, columns=columns, rows=rows))
    for tile, found in problems.items():
        for problem in found:
            print("left out:", tile, problem)
    return tables
