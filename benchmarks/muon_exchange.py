# SPDX-License-Identifier: Apache-2.0
"""What Muon's exchange sends: counted on real ranks, planned for many, beside the formulas.

    a rank, one step     2 (N - 1) / N^2 P b     there and back; P elements, b bytes each

The formula is that of evenly cut matrices. A layer's rows are packed one after another, so a rank
may hold all of a small matrix: what its owner holds already does not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.padding import llama_3_8b, matrices_in
from benchmarks.report import Row, Table
from benchmarks.workers import Options, in_processes
from shardwise.core.buckets import Bucket
from shardwise.core.layout import Item, plan
from shardwise.optim.ownership import assign_owners

REAL = (2, 3, 4)
PLANNED = (8, 16, 32, 64, 128, 256, 512, 1024)
SIDE, DEPTH = 96, 24


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """One Muon step of square matrices under zero(3): its collectives, as comm counted them."""
    import shardwise as sw
    from shardwise.core import comm

    torch.manual_seed(0)
    layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH)]
    model = nn.Sequential(*layers)
    for layer in layers:
        sw.fully_shard(layer, mesh=mesh, placements=sw.zero(3))
    sw.fully_shard(model, mesh=mesh, placements=sw.zero(3))
    matrix = sw.muon()
    optimizer = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())
    model(torch.randn(4, SIDE)).square().sum().backward()
    with comm.record() as calls:
        optimizer.step()
    (group,) = optimizer._matrix_groups or ()
    legs = [leg for one in group.exchange.rounds for leg in (one.to_owners, one.back) if leg]
    return {
        "calls": len(calls),
        "counted": sum(call.nbytes for call in calls),
        "planned": sum(sum(leg.send_sizes) for leg in legs) * 4,
    }


def counted(ranks: Sequence[int]) -> Table:
    rows: list[Row] = []
    for size in ranks:
        options = Options(device="cpu", systems=(), rounds=1, tiny=False)
        found = in_processes(worker, size, "gloo", options)
        formula = 2 * (size - 1) / size**2 * DEPTH * SIDE * SIDE * 4
        rows.append({"ranks": size, "formula": formula} | found)
        rows[-1]["ratio"] = found["counted"] / formula
    note = f"{DEPTH} matrices {SIDE} x {SIDE} under zero(3), gloo, rank 0, one step."
    columns = {
        "ranks": ("ranks", "d"),
        "calls": ("all-to-alls", "d"),
        "counted": ("bytes counted", ",d"),
        "planned": ("planned", ",d"),
        "formula": ("formula", ",.0f"),
        "ratio": ("counted / formula", ".3f"),
    }
    return Table(title="Exchange on real ranks", note=note, columns=columns, rows=rows)


def planned(ranks: Sequence[int]) -> Table:
    """Llama-3-8B, a unit per layer, rows packed and cut over the ranks."""
    layers: dict[str, list[Item]] = {}
    for weight in llama_3_8b():
        if weight.matrix:
            layers.setdefault(weight.name.split(".")[0], []).append(Item(weight.name, weight.shape))
    rows: list[Row] = []
    for size in ranks:
        matrices = []
        for items in layers.values():
            matrices += matrices_in(Bucket(tuple(range(len(items))), plan(items, size)))
        found = assign_owners(matrices, size)
        numel = sum(matrix.numel for matrix in matrices)
        there, back = [0] * size, [0] * size
        for index, (_, owner) in enumerate(found.owners):
            for holder, lo, hi in found.remote_pieces(index):
                there[holder] += hi - lo
                back[owner] += hi - lo
        sent = [4 * (one + other) for one, other in zip(there, back, strict=True)]
        loads = list(found.loads.values())
        formula = 4 * 2 * (size - 1) / size**2 * numel
        row: Row = {"ranks": size, "calls": 2 * len(found.rounds), "formula": formula / 1e6}
        row |= {"mean": sum(sent) / size / 1e6, "busiest": max(sent) / 1e6}
        row["ratio"] = sum(sent) / size / formula
        row["balance"] = max(loads) * size / sum(loads)
        row["floor"] = max(1.0, max(matrix.cost for matrix in matrices) * size / sum(loads))
        rows.append(row)
    note = (
        "Llama-3-8B's matrices, one unit per layer, fp32 on the wire, by arithmetic alone.\n"
        "Balance: the busiest owner's Newton-Schulz FLOPs over the mean; floor: one matrix, whole."
    )
    columns = {
        "ranks": ("ranks", "d"),
        "calls": ("all-to-alls", "d"),
        "mean": ("MB a rank, mean", ",.1f"),
        "busiest": ("busiest", ",.1f"),
        "formula": ("formula", ",.1f"),
        "ratio": ("mean / formula", ".3f"),
        "balance": ("balance", ".2f"),
        "floor": ("floor", ".2f"),
    }
    return Table(title="Exchange, planned", note=note, columns=columns, rows=rows)


def run_exchange(tiny: bool) -> list[Table]:
    return [counted(REAL[:1] if tiny else REAL), planned(PLANNED[:2] if tiny else PLANNED)]
