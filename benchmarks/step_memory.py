# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.step_memory``: the memory that an optimizer's step takes, on CPU ranks.

Every allocation of torch's CPU allocator during one step is added up (``CpuMeter``), on the rank
that needs most: states, which stay, and the highest of what comes and goes. Beside them the
library's own count of the latter (the ledger, which plans read too).

A second table has gpt_1b on GPUs by plan, for more ranks than there are here.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import report
from benchmarks.measure import CpuMeter, local_bytes
from benchmarks.workers import Options, in_processes

LAYERS, WIDTH, HIDDEN = 12, 384, 1056
SHAPES = [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)]
MIB = 2**20


class Block(nn.Module):
    """The weights of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.norm = nn.Parameter(torch.ones(WIDTH))


def plain(model: nn.Module, mesh: DeviceMesh) -> None:
    pass


def sharded(name: str) -> Callable[[nn.Module, DeviceMesh], None]:
    def wrap(model: nn.Module, mesh: DeviceMesh) -> None:
        import shardwise as sw

        if name.startswith("zero"):
            placements = sw.zero(int(name[-1]))
        else:
            placements = {"hsdp": sw.hsdp, "hfsdp": sw.hfsdp}[name]()
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp"))
        for module in (*model.children(), model):
            sw.fully_shard(module, mesh=mesh, placements=placements)

    return wrap


def in_buckets(model: nn.Module, mesh: DeviceMesh) -> None:
    import shardwise as sw

    sw.data_parallel(model, mesh=mesh, placements=sw.zero(1))


# By name: how the model is wrapped, and the number of ranks.
CASES: dict[str, tuple[Callable[[nn.Module, DeviceMesh], None], int]] = {
    "unsharded": (plain, 1),
    "zero(0)": (sharded("zero0"), 2),
    "zero(1)": (sharded("zero1"), 2),
    "zero(3)": (sharded("zero3"), 2),
    "data_parallel": (in_buckets, 2),
    "hsdp": (sharded("hsdp"), 4),
    "hfsdp": (sharded("hfsdp"), 4),
}
OPTIMIZERS = ("AdamW", "Muon")


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, dict[str, int]]:
    case, *optimizers = options.systems
    return {one: figures_of(case, one, mesh, options.tiny) for one in optimizers}


def figures_of(case: str, optimizer: str, mesh: DeviceMesh, tiny: bool) -> dict[str, int]:
    """Bytes of the second step, on the rank that needs most."""
    import shardwise as sw
    from shardwise.core.memory import ledger

    torch.manual_seed(0)
    settings = sw.muon()
    with CpuMeter() as meter:
        model = nn.Sequential(*(Block() for _ in range(2 if tiny else LAYERS)))
        size = sum(p.nbytes for p in model.parameters())
        CASES[case][0](model, mesh)
        matrix = settings if optimizer != "AdamW" else None
        made = sw.optimizer(model, matrix=matrix, elementwise=sw.adamw())
        for number in range(2):
            for parameter in model.parameters():
                local = local_bytes(parameter)
                parameter.grad = torch.randn_like(parameter) if local else parameter.clone()
            ledger.reset_peak()
            before = ledger.current["step"]
            with meter.phase(f"step {number}"):
                made.step()
            counted = ledger.peak["step"] - before
            made.zero_grad()
        states = [v for p in model.parameters() for v in made.state[p].values()]
        state = sum(local_bytes(one) for one in states)
    phase = meter.phases["step 1"]
    step = phase.peak - phase.start
    rounds = sum(len(group.exchange.rounds) for group in made._matrix_groups or ())
    figures = torch.tensor([state + step, state, step, counted, size, rounds])
    every = [torch.empty_like(figures) for _ in range(dist.get_world_size())]
    dist.all_gather(every, figures)
    names = ("together", "state", "step", "counted", "size", "rounds")
    most = max(every, key=lambda one: int(one[0]))
    return dict(zip(names, most.tolist(), strict=True))


COLUMNS = {
    "case": ("strategy", "s"),
    "ranks": ("ranks", "d"),
    "optimizer": ("optimizer", "s"),
    "state": ("state / P", ".2f"),
    "step": ("step / P", ".2f"),
    "together": ("together / P", ".2f"),
    "ratio": ("x AdamW", ".2f"),
    "counted": ("ledger / P", ".2f"),
    "rounds": ("rounds", "d"),
}


def run(cases: Sequence[str], optimizers: Sequence[str], tiny: bool) -> report.Table:
    rows: list[report.Row] = []
    options = Options(device="cpu", systems=(), rounds=1, tiny=tiny)
    for case in cases:
        base = 0.0
        chosen = replace(options, systems=(case, *optimizers))
        every: dict[str, Any] = in_processes(worker, CASES[case][1], "gloo", chosen)
        for optimizer, found in every.items():
            size, rounds = found.pop("size"), found.pop("rounds")
            row: report.Row = {name: value / size for name, value in found.items()}
            base = base or float(row["together"])  # type: ignore[arg-type]
            row["ratio"] = float(row["together"]) / base  # type: ignore[arg-type]
            row |= {"case": case, "ranks": CASES[case][1], "optimizer": optimizer}
            rows.append(row | {"rounds": rounds})
    note = (
        f"P: the bytes of all parameters, {LAYERS} blocks of {len(SHAPES)} matrices, width {WIDTH} "
        f"and {HIDDEN}.\nThe second step of the rank that needs most. Step: the highest of what "
        f"comes and goes while the optimizer steps; ledger: of that, what the library counts."
    )
    title = "Memory of a step" + options.mark
    return report.Table(title=title, note=note, columns=COLUMNS, rows=rows)


# Strategy, mesh, and options of the plan.
PLANS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("zero0", {"dp": 8}, {}),
    ("zero0", {"dp": 64}, {}),
    ("zero1", {"dp": 8}, {}),
    *(("zero3", {"dp": ranks}, {}) for ranks in (1, 2, 8, 16, 64, 512)),
    ("hsdp", {"dp_outer": 8, "dp": 8}, {}),
    ("hfsdp", {"dp_outer": 8, "dp": 8}, {}),
    ("zero0", {"dp": 8}, {"bucket_mb": 256}),
    ("zero1", {"dp": 8}, {"bucket_mb": 256}),
    ("zero1", {"dp": 64}, {"bucket_mb": 256}),
]
PLANNED = {
    "case": ("strategy", "s"),
    "mesh": ("mesh", "s"),
    "adamw": ("AdamW's states MiB", ".0f"),
    "state": ("Muon's states MiB", ".0f"),
    "step": ("its step MiB", ".0f"),
    "ratio": ("together, x AdamW", ".2f"),
    "adamw_peak": ("peak of the run, AdamW MiB", ".0f"),
    "peak": ("Muon MiB", ".0f"),
    "peak_ratio": ("x AdamW", ".2f"),
}


def planned() -> report.Table:
    from shardwise.models.gpt import GPT
    from shardwise.report.plan import plan
    from shardwise.train.recipes import gpt_1b

    rows: list[report.Row] = []
    for strategy, mesh, options in PLANS:
        with torch.device("meta"):
            model = GPT(gpt_1b().model)
        adamw, muon = (
            plan(model, mesh, strategy, optimizer=one, **options) for one in ("adamw", "muon")
        )
        step = muon.peak.get("step", 0)
        rows.append(
            {
                "case": f"data_parallel, {strategy}" if options else strategy,
                "mesh": " x ".join(map(str, mesh.values())),
                "adamw": adamw.optimizer_bytes / MIB,
                "state": muon.optimizer_bytes / MIB,
                "step": step / MIB,
                "ratio": (muon.optimizer_bytes + step) / adamw.optimizer_bytes,
                "adamw_peak": adamw.total / MIB,
                "peak": muon.total / MIB,
                "peak_ratio": muon.total / adamw.total,
            }
        )
    note = (
        "gpt_1b, without activations, the rank that needs most. Where a rank owns few matrices, "
        "those that it computes, the next and\nthe last ones are more than its share of a second "
        "state; the peak of the run lies in backward, before the step."
    )
    return report.Table(title="By plan", note=note, columns=PLANNED, rows=rows)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    add("--tiny", action="store_true", help="dry run at toy size; no figure means much")
    add("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = "python -m benchmarks.step_memory " + shlex.join(arguments)
    tables = [planned()]
    if options.cases:
        tables.insert(0, run(options.cases, OPTIMIZERS, options.tiny))
    name = "step-memory" + ("-tiny" if options.tiny else "")
    paths = report.write(tables, facts, name, options.results)
    print(paths[0].read_text())
    print("written:", *paths)


if __name__ == "__main__":
    main(sys.argv[1:])
