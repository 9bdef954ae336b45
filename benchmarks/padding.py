# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.padding``: what whole-matrix buckets of Llama-3-8B cost, by ranks.

Arithmetic alone: the buckets that ``data_parallel`` would make are planned for each dp. No model is
built and nothing is sent.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import report
from shardwise.core.buckets import Bucket, plan_elements, plan_matrices
from shardwise.core.layout import TENSOR, Item, tensor_fraction
from shardwise.kernels.polynomials import DEFAULT, PRESETS, cost

BUCKET_MB, WIDTH = 256, 2  # bf16 weights
SHOWN = (2, 3, 4, 7, 8, 13, 16, 32, 48, 64, 100, 127, 128, 256, 384, 512, 768, 1000, 1009, 1024)


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, in registration order."""

    name: str
    shape: tuple[int, ...]
    matrix: bool = True
    expert: bool = False


def llama_3_8b() -> list[Weight]:
    found = [Weight("embedding", (128256, 4096), matrix=False)]
    for layer in range(32):
        for name, shape in {
            "q": (4096, 4096),
            "k": (1024, 4096),
            "v": (1024, 4096),
            "o": (4096, 4096),
            "gate": (14336, 4096),
            "up": (14336, 4096),
            "down": (4096, 14336),
        }.items():
            found.append(Weight(f"{layer}.{name}", shape))
        found += [Weight(f"{layer}.norm{number}", (4096,), matrix=False) for number in (1, 2)]
    found += [Weight("norm", (4096,), matrix=False), Weight("head", (128256, 4096), matrix=False)]
    return found


@lru_cache(maxsize=4096)
def price(shape: tuple[int, ...]) -> int:
    """Newton-Schulz on every matrix of a parameter, as ``sw.muon()`` computes it."""
    count = shape[0] if len(shape) == 3 else 1
    rows, cols = shape[-2:]
    return count * cost(rows, cols, PRESETS[DEFAULT])


def buckets_of(
    weights: Sequence[Weight], dp: int, bucket_mb: float = BUCKET_MB, *, grain: Any = None
) -> tuple[list[Bucket], list[Bucket]]:
    """The buckets of matrices and those of the rest, as data_parallel makes them."""
    size = int(bucket_mb * 2**20) // WIDTH
    backwards = list(reversed(weights))
    matrices = [
        Item(w.name, w.shape, TENSOR if len(w.shape) < 3 else tensor_fraction(w.shape[0]))
        for w in backwards
        if w.matrix
    ]
    rest = [Item(w.name, w.shape) for w in backwards if not w.matrix]
    costs = [price(item.shape) for item in matrices]
    found = plan_matrices(matrices, costs, dp, size, fill=rest, grain=grain)
    used = {member - len(matrices) for bucket in found for member in bucket.members}
    left = [item for number, item in enumerate(rest) if number not in used]
    return found, plan_elements(left, dp, size)


COLUMNS = {
    "dp": ("dp", "d"),
    "padding": ("padding of matrices %", ".2f"),
    "padding_all": ("of everything %", ".2f"),
    "buckets": ("buckets of matrices", "d"),
    "rest": ("of the rest", "d"),
    "largest": ("largest MiB", ".0f"),
    "plan_ms": ("planned in ms", ".1f"),
}


def run(every: Sequence[int], shown: Sequence[int]) -> report.Table:
    """Llama-3-8B over every number of ranks."""
    weights, rows = llama_3_8b(), {}
    for dp in every:
        begin = time.perf_counter()
        matrices, rest = buckets_of(weights, dp)
        rows[dp] = {
            "dp": dp,
            "padding": _padding(matrices),
            "padding_all": _padding(matrices + rest),
            "buckets": len(matrices),
            "rest": len(rest),
            "largest": max(one.layout.numel for one in matrices + rest) * WIDTH / 2**20,
            "plan_ms": 1000 * (time.perf_counter() - begin),
        }
    worst = max(rows.values(), key=lambda row: row["padding"])
    note = (
        f"Buckets of {BUCKET_MB} MiB in bf16. Over {len(rows)} values of dp from {min(rows)} to "
        f"{max(rows)}: padding of matrices at most {worst['padding']:.2f} % (dp {worst['dp']})."
    )
    kept = [rows[dp] for dp in shown]
    return report.Table(title="Llama-3-8B", note=note, columns=COLUMNS, rows=kept)


def _padding(buckets: Sequence[Bucket]) -> float:
    payload = sum(bucket.layout.payload for bucket in buckets)
    return 100 * sum(bucket.layout.padding for bucket in buckets) / payload


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.padding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--largest", type=int, default=1024, help="dp goes from 2 to this")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    facts = report.circumstances(arguments, "padding")
    shown = [dp for dp in SHOWN if dp <= options.largest]
    tables = [run(range(2, options.largest + 1), shown)]
    for path in report.write(tables, facts, "padding", options.results):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
