# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.padding``: what whole-matrix buckets cost, for every number of ranks.

Arithmetic alone: the buckets that ``data_parallel`` would make of published shapes are planned for
each dp, and what they pad, cut and send is added up. No model is built and nothing is sent.

A last table has plans of a step: matrices cut to keep buckets small, whole where there are enough
(the default), and whole by promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from benchmarks import report
from shardwise.core.buckets import Bucket, plan_elements, plan_matrices
from shardwise.core.layout import ROW, TENSOR, Item, tensor_fraction
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.optim.ownership import assign_owners
from shardwise.optim.presets import DEFAULT, PRESETS, cost
from shardwise.optim.split import Matrix, matrices_of, stored_matrices

BUCKET_MB, WIDTH = 256, 2  # bf16 weights
SHOWN = (2, 3, 4, 7, 8, 13, 16, 32, 48, 64, 100, 127, 128, 256, 384, 512, 768, 1000, 1009, 1024)
EXPERT_RANKS = 64  # of an expert-parallel group, where there are that many


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


def qwen3_30b_a3b(stacked: bool = True) -> list[Weight]:
    found = [Weight("embedding", (151936, 2048), matrix=False)]
    for layer in range(48):
        for name, shape in {
            "q": (4096, 2048),
            "k": (512, 2048),
            "v": (512, 2048),
            "o": (2048, 4096),
            "router": (128, 2048),
        }.items():
            found.append(Weight(f"{layer}.{name}", shape))
        found += _experts(layer, 128, 768, 2048, stacked)
        norms = (("norm1", 2048), ("norm2", 2048), ("q_norm", 128), ("k_norm", 128))
        found += [Weight(f"{layer}.{name}", (size,), matrix=False) for name, size in norms]
    found += [Weight("norm", (2048,), matrix=False), Weight("head", (151936, 2048), matrix=False)]
    return found


def deepseek_v3(stacked: bool = True) -> list[Weight]:
    found = [Weight("embedding", (129280, 7168), matrix=False)]
    for layer in range(61):
        shapes = {
            "q_a": (1536, 7168),
            "q_b": (24576, 1536),
            "kv_a": (576, 7168),
            "kv_b": (32768, 512),
            "o": (7168, 16384),
        }
        if layer < 3:
            shapes |= {"gate": (18432, 7168), "up": (18432, 7168), "down": (7168, 18432)}
        else:
            shapes |= {"router": (256, 7168)}
            shapes |= {"s_gate": (2048, 7168), "s_up": (2048, 7168), "s_down": (7168, 2048)}
        found += [Weight(f"{layer}.{name}", shape) for name, shape in shapes.items()]
        if layer >= 3:
            found += _experts(layer, 256, 2048, 7168, stacked)
        norms = (("norm1", 7168), ("norm2", 7168), ("q_norm", 1536), ("kv_norm", 512))
        found += [Weight(f"{layer}.{name}", (size,), matrix=False) for name, size in norms]
    found += [Weight("norm", (7168,), matrix=False), Weight("head", (129280, 7168), matrix=False)]
    return found


def _experts(layer: int, count: int, inner: int, width: int, stacked: bool) -> list[Weight]:
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    if stacked:
        return [Weight(f"{layer}.{n}", (count, *s), expert=True) for n, s in shapes.items()]
    return [
        Weight(f"{layer}.{expert}.{name}", shape, expert=True)
        for expert in range(count)
        for name, shape in shapes.items()
    ]


MODELS: dict[str, Callable[[], list[Weight]]] = {
    "Llama-3-8B": llama_3_8b,
    "Qwen3-30B-A3B, stacked experts": qwen3_30b_a3b,
    "Qwen3-30B-A3B, experts apart": lambda: qwen3_30b_a3b(stacked=False),
    "DeepSeek-V3, stacked experts": deepseek_v3,
}


@lru_cache(maxsize=4096)
def price(shape: tuple[int, ...]) -> int:
    """Newton-Schulz on every matrix of a parameter, as ``sw.muon()`` computes it."""
    count = shape[0] if len(shape) == 3 else 1
    rows, cols = shape[-2:]
    return count * cost(rows, cols, PRESETS[DEFAULT])


def local_experts(weights: Iterable[Weight], ranks: int) -> list[Weight]:
    """What one rank of ``ranks`` expert-parallel ones has: its part of every stack."""
    return [
        Weight(w.name, (w.shape[0] // ranks, *w.shape[1:]), w.matrix, w.expert)
        if w.expert and len(w.shape) == 3
        else w
        for w in weights
    ]


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


def matrices_in(bucket: Bucket, count: int | None = None) -> list[Matrix]:
    """The matrices of a bucket as the optimizer finds them, with their pieces. ``count``: of all
    matrices; members from there on are others, which fill the bucket."""
    found = []
    layout = bucket.layout
    for index, item in enumerate(layout.items):
        if len(item.shape) < 2 or (count is not None and bucket.members[index] >= count):
            continue
        matrices = matrices_of(item.shape, None)
        whole = item.grain.kind == "tensor" and item.grain_size >= matrices[0].numel
        pieces = [(shard, *layout.piece(index, shard)) for shard in layout.holders(index)]
        found += stored_matrices(
            matrices, pieces, lambda *shape: price(shape), name=item.name, pinned=whole
        )
    return found


Parts = Sequence[tuple[Sequence[Weight], int]]  # weights with the ranks of their mesh


def row_of(
    dp: int, parts: Parts, bucket_mb: float, *, owners: bool = True, grain: Any = None
) -> report.Row:
    """One line: all buckets of a model, and with ``owners`` what its optimizer does with them."""
    begin = time.perf_counter()
    planned = [
        (*buckets_of(weights, ranks, bucket_mb, grain=grain), ranks, sum(w.matrix for w in weights))
        for weights, ranks in parts
    ]
    seconds = time.perf_counter() - begin
    matrices = [bucket for group, *_ in planned for bucket in group]
    rest = [bucket for _, group, *_ in planned for bucket in group]
    everything = matrices + rest
    row: report.Row = {
        "dp": dp,
        "padding": _padding(matrices),
        "padding_all": _padding(everything),
        "buckets": len(matrices),
        "rest": len(rest),
        "largest": max(bucket.layout.numel for bucket in everything) * WIDTH / 2**20,
        "plan_ms": 1000 * seconds,
    }
    return row | _owned(planned) if owners else row


def _padding(buckets: Sequence[Bucket]) -> float:
    payload = sum(bucket.layout.payload for bucket in buckets)
    return 100 * sum(bucket.layout.padding for bucket in buckets) / payload


def _owned(planned: Sequence[tuple[list[Bucket], list[Bucket], int, int]]) -> report.Row:
    """How much is cut and sent for it, and how long the busiest rank computes."""
    cut = total = 0
    moved = sent = 0.0
    slowest = 1.0
    for matrices, rest, ranks, count in planned:
        every = [one for bucket in matrices for one in matrices_in(bucket, count)]
        found = assign_owners(every, ranks)
        total += sum(one.numel for one in every)
        cut += sum(one.numel for one in every if len(one.pieces) > 1)
        # Bytes that a rank sends on average: pieces there and back in fp32; and, for all that it
        # holds, gradients of 4 bytes and weights of 2.
        away = sum(hi - lo for i in range(len(every)) for _, lo, hi in found.remote_pieces(i))
        moved += 2 * 4 * away / ranks
        sent += 6 * sum(b.layout.numel for b in matrices + rest) * (ranks - 1) / ranks
        loads = found.loads.values()
        floor = max(sum(loads) / ranks, *(one.cost for one in every))  # no matrix has two owners
        slowest = max(slowest, max(loads) / floor)
    return {
        "cut": 100 * cut / total,
        "exchange": 100 * moved / sent if sent else 0.0,
        "balance": slowest,
    }


COLUMNS = {
    "dp": ("dp", "d"),
    "padding": ("padding of matrices %", ".2f"),
    "padding_all": ("of everything %", ".2f"),
    "buckets": ("buckets of matrices", "d"),
    "rest": ("of the rest", "d"),
    "largest": ("largest MiB", ".0f"),
    "cut": ("matrices cut %", ".1f"),
    "exchange": ("exchange / (RS + AG) %", ".2f"),
    "balance": ("busiest rank / floor", ".2f"),
    "plan_ms": ("planned in ms", ".1f"),
}


def over_experts(weights: Sequence[Weight], dp: int) -> Parts:
    """Dense weights over all ranks, a rank's experts over those that have the same ones."""
    ranks = min(dp, EXPERT_RANKS)
    dense = [weight for weight in weights if not weight.expert]
    experts = [weight for weight in local_experts(weights, ranks) if weight.expert]
    return [(dense, dp), (experts, dp // ranks)]


def run(every: Sequence[int], shown: Sequence[int], bucket_mb: float) -> list[report.Table]:
    tables = []
    for title, make in MODELS.items():
        weights = make()
        numel = sum(Item(w.name, w.shape).numel for w in weights)
        apart = "apart" in title  # many thousands of matrices: the shown ones only
        rows = {
            dp: row_of(dp, [(weights, dp)], bucket_mb, owners=dp in shown)
            for dp in (shown if apart else every)
        }
        worst = max(rows.values(), key=lambda row: row["padding"])  # type: ignore[arg-type,return-value]
        fewest = min(rows.values(), key=lambda row: row["buckets"])  # type: ignore[arg-type,return-value]
        note = (
            f"{len(weights)} parameters, {numel / 1e9:.2f}B elements, buckets of {bucket_mb:g} MiB "
            f"in bf16. Over {len(rows)} values of dp from {min(rows)} to {max(rows)}: padding of "
            f"matrices at most {worst['padding']:.2f} % (dp {worst['dp']}), at least "
            f"{fewest['buckets']} buckets of matrices (dp {fewest['dp']}). The floor of the "
            f"busiest rank is the mean, or the dearest matrix where that is more."
        )
        wanted = [rows[dp] for dp in shown if dp in rows]
        tables.append(report.Table(title=title, note=note, columns=COLUMNS, rows=wanted))
        if any(weight.expert for weight in weights) and not apart:
            powers = [dp for dp in shown if dp & (dp - 1) == 0]
            split = [row_of(dp, over_experts(weights, dp), bucket_mb) for dp in powers]
            note = (
                f"Experts over {EXPERT_RANKS} expert-parallel ranks (all, where there are fewer), "
                f"their buckets over the rest of dp."
            )
            name = f"{title}, expert parallel"
            tables.append(report.Table(title=name, note=note, columns=COLUMNS, rows=split))
    return tables


FIRST = ("blocks.0.", "embedding")  # whose gradients come last
GRAINS = {"ROW": ROW, "default": None, "tensor": "tensor"}
PLANNED = {
    "dp": ("dp", "d"),
    "grain": ("grain", "s"),
    "whole": ("matrices whole of 224", "d"),
    "padding": ("padding %", ".2f"),
    "buckets": ("buckets", "d"),
    "late": ("reduced after backward %", ".0f"),
    "sent": ("sent GiB", ".2f"),
    "balance": ("busiest rank / mean", ".2f"),
    "one": ("peak GiB, 1 microbatch", ".2f"),
    "several": ("peak GiB, 4 microbatches", ".2f"),
}


def planned(ranks: Sequence[int] = (16, 32, 36, 64, 128)) -> report.Table:
    """Llama-3-8B under ``data_parallel`` and Muon, by plan."""
    shape = GPTConfig(
        vocab_size=128256,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14336,
        context=8192,
        qk_norm=False,
    )
    with torch.device("meta"):
        model = GPT(shape)
    precision = sw.Precision(weights="bf16", reduce="fp32")
    rows: list[report.Row] = []
    for dp in ranks:
        for name, grain in GRAINS.items():
            one, several = (
                sw.plan(
                    model,
                    {"dp": dp},
                    "zero1",
                    optimizer="muon",
                    precision=precision,
                    bucket_mb=BUCKET_MB,
                    microbatches=microbatches,
                    grain=grain,
                )
                for microbatches in (1, 4)
            )
            layouts = [group.layout for unit in one.units for group in unit.groups]
            last = [
                layout
                for layout in layouts
                if any(item.name.startswith(FIRST) for item in layout.items)
            ]
            total = sum(layout.payload for layout in layouts)
            assert one.matrices is not None
            rows.append(
                {
                    "dp": dp,
                    "grain": name,
                    "whole": one.matrices.num_whole,
                    "padding": 100 * one.padding / one.num_elements,
                    "buckets": len(layouts),
                    "late": 100 * sum(layout.payload for layout in last) / total,
                    "sent": sum(call.wire_bytes for call in one.collectives) / 2**30,
                    "balance": 1 / one.matrices.balance,
                    "one": one.total / 2**30,
                    "several": several.total / 2**30,
                }
            )
    note = (
        f"data_parallel, zero(1), Muon, bf16 weights, fp32 reductions, buckets of {BUCKET_MB} MiB, "
        f"without activations.\nReduced after backward: buckets that wait for the first block's "
        f"gradients. With one microbatch the gradients of a bucket are in memory until the last of "
        f"them has come; with several all are."
    )
    title = "Llama-3-8B: cut, whole, and whole by promise"
    return report.Table(title=title, note=note, columns=PLANNED, rows=rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.padding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--largest", type=int, default=1024, help="dp goes from 2 to this")
    parser.add_argument("--bucket-mb", type=float, default=BUCKET_MB)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = " ".join(["python -m benchmarks.padding", *arguments])
    every = range(2, options.largest + 1)
    shown = [dp for dp in SHOWN if dp <= options.largest]
    tables = [*run(every, shown, options.bucket_mb), planned()]
    for path in report.write(tables, facts, "padding", options.results):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
