# SPDX-License-Identifier: Apache-2.0
"""How fast a checkpoint is written and read, and how long training waits for it.

    python -m benchmarks.checkpoint speed [--megabytes 200] [--rounds 5] [--device cuda]
    python -m benchmarks.checkpoint ranks [--ranks 4096 16384]
    python -m benchmarks.checkpoint wait default [--steps 40]      a recipe of ``shardwise train``

speed   beside torch's own DCP in one process: weights and AdamW states. ``torch dcp`` is
        ``torch.distributed.checkpoint.save`` with its fsync; it writes no hashes and checks none.
ranks   the manifest of large models with AdamW states over so many ranks. The model is wrapped on
        torch's fake backend, without memory; this process is rank 0. ``divide`` is on the main
        thread; the others are in the background: what rank 0 does when all ranks are done, and what
        each rank does to read the manifest. Parts that other ranks describe (experts over ``ep``)
        are made from those of rank 0.
wait    the seconds for which training stands still at each save in the background of a real run.

Each writes benchmarks/results/checkpoint-<which>-<machine>.md and .json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from benchmarks.report import RESULTS, Row, Table, circumstances, publish
from shardwise.checkpoint import Manifest, Store, verify
from shardwise.checkpoint.manifest import OptimizerValues
from shardwise.checkpoint.saving import divide, join
from shardwise.checkpoint.state import model_state
from shardwise.checkpoint.values import dtype_name
from shardwise.moe import GroupedMLP, swiglu
from shardwise.report.html import read_events

WIDTH = 1024  # 4 MiB per matrix of float32; weights and two states make three of each


def make(megabytes: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    layers = max(1, megabytes * 10**6 // (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    return model, optimizer, nbytes


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer.state.{name}.{key}"] = value
    return found


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def one_round(
    turn: int, model: nn.Module, optimizer: torch.optim.Optimizer, store: Store, folder: Path
) -> dict[str, float]:
    state = tensors(model, optimizer)
    ours, theirs = folder / f"ours-{turn}", folder / f"theirs-{turn}"
    writes = {
        "write: torch dcp": lambda: dcp.save(state, checkpoint_id=theirs),  # type: ignore[attr-defined]
        "write: sw.save": lambda: sw.save(ours, model, optimizer),
    }
    # In turns: who writes second meets a disk that is busy with the first one's pages.
    order = sorted(writes, reverse=turn % 2 == 0)
    found = {name: timed(writes[name]) for name in order} | {
        "blocked: Store.save": timed(lambda: store.save(turn, model, optimizer)),
        "the rest in the background": timed(store.wait),
        "read: torch dcp": timed(
            lambda: dcp.load(state, checkpoint_id=theirs)  # type: ignore[attr-defined]
        ),
        "read: sw.load (hashes all)": timed(lambda: sw.load(ours, model, optimizer)),
        "check: verify": timed(lambda: verify(ours)),
    }
    for path in (ours, theirs):
        shutil.rmtree(path)
    return found


def measure(megabytes: int, rounds: int, folder: Path, device: str) -> Table:
    model, optimizer, nbytes = make(megabytes, device)
    count = len(tensors(model, optimizer))
    store = Store(folder / "store", keep=1)
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):  # the first one is a warm-up
        found = one_round(turn, model, optimizer, store, folder)
        for name, seconds in found.items():
            if turn:
                times.setdefault(name, []).append(seconds)
    rows: list[Row] = []
    for name, values in sorted(times.items()):
        middle = statistics.median(values)
        rows.append({"what": name, "seconds": middle, "rate": nbytes / middle / 1e6})
        rows[-1]["best"] = nbytes / min(values) / 1e6
    return Table(
        title="A checkpoint of one process",
        note=f"{nbytes / 1e6:.0f} MB in {count} tensors on {device}, median of {rounds}.",
        columns={
            "what": ("what", ""),
            "seconds": ("seconds", ".3f"),
            "rate": ("MB/s", ".0f"),
            "best": ("best MB/s", ".0f"),
        },
        rows=rows,
    )


# ------------------------------------------------------------------------------ a real run


def measure_wait(recipe: str, steps: int, folder: Path) -> Table:
    """Train, with ten saves."""
    flags = ["--steps", steps, "--save-every", max(1, steps // 10), "--eval-every", 0]
    flags += ["--sample", 0, "--profile-step", 0, "--out", folder / "run"]
    command = ["shardwise.cli", "train", recipe, *map(str, flags)]
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    events = read_events(folder / "run" / "events.jsonl")
    waits = [event["stalled"] for event in events if event["kind"] == "save"]
    times = [event["seconds"] for event in events if event["kind"] == "step"]
    [newest, *_] = sorted((folder / "run" / "checkpoints").iterdir(), reverse=True)
    row: Row = {"recipe": recipe, "ranks": Manifest.read(newest).world_size, "saves": len(waits)}
    row |= {"MB": Manifest.read(newest).num_bytes / 1e6, "step": statistics.median(times)}
    row |= {"first": waits[0], "median": statistics.median(waits), "most": max(waits[1:])}
    return Table(
        title="How long training waits for a save",
        note=f"{steps} steps. The first save also makes the host memory that later ones copy to.",
        columns={
            name: (name, "" if name in ("recipe", "ranks", "saves") else ".3f") for name in row
        },
        rows=[row],
    )


# ------------------------------------------------------------------------------ many ranks


def dense(layers: int, dim: int, hidden: int, kv: int, vocabulary: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.ParameterList(
            torch.empty(*shape, device="meta")
            for shape in (
                *((dim, dim), (kv, dim), (kv, dim), (dim, dim)),
                *((hidden, dim), (hidden, dim), (dim, hidden), (dim,), (dim,)),
            )
        )

    ends = nn.ParameterList(torch.empty(vocabulary, dim, device="meta") for _ in range(2))
    return nn.Sequential(*(block() for _ in range(layers)), ends)


def experts(
    layers: int, dim: int, hidden: int, count: int, ranks: int, layout: Any = "grouped"
) -> nn.Module:
    """``ranks``: the size of ``ep``; this rank holds its share, as after ``spread``."""
    made = []
    for _ in range(layers):
        with torch.device("meta"):
            mlp = GroupedMLP(count, dim, hidden, activation=swiglu(), weight_layout=layout)
        mlp.spread(0, count // ranks)
        made.append(mlp)
    return nn.Sequential(*made)


def manifest_of(num_ranks: int, model: nn.Module, ep: int) -> dict[str, float]:
    """Seconds, and the size of the manifest."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    mesh = DeviceMesh("cpu", torch.arange(0, num_ranks, ep), mesh_dim_names=("dp",))
    for layer in model.children():
        sw.fully_shard([layer], mesh=mesh)
    state = model_state(model)
    parameters: dict[str, int] = {}
    for held in list(state.held):
        name, _ = held.key
        live = state.names[id(held.tensor)]
        parameters[name] = 0
        for kind in ("exp_avg", "exp_avg_sq"):
            state.add(live, held.tensor, kind)
        state.add(live, torch.empty((), device="meta"), "step")
    state.problems.clear()  # meta tensors have no values, and none is read here
    found: dict[str, float] = {"tensors": len(state.held)}
    started = time.process_time()
    _, table = divide(state, 0, num_ranks)
    found["divide"] = time.process_time() - started
    started = time.process_time()
    mine = json.loads(json.dumps(table.as_json(), default=dtype_name))
    found["describe"] = time.process_time() - started
    digest = hashlib.sha256().hexdigest()
    found_parts = [
        {
            "file": [10**12 + rank, digest],
            "table": shifted(mine, rank, ep) if rank < ep else NOTHING,
        }
        for rank in range(num_ranks)
    ]
    texts = [json.dumps(part) for part in found_parts]
    optimizer = OptimizerValues(
        kind="AdamW", options=[{"lr": 1e-4}], parameters=parameters, scalars={}
    )
    started = time.process_time()
    manifest = join(
        [json.loads(text) for text in texts],
        sorted({held.key for held in state.held}),
        step=1,
        sequence=1,
        experts=sorted({of.name for of in state.experts.values()}),
        tied={},
        extra_states=state.extra_states,
        dtypes={},
        optimizer=optimizer,
        config={},
        placements=[],
        facts={},
    )
    found["join"] = time.process_time() - started
    started = time.process_time()
    data = manifest.to_bytes()
    found["write"] = time.process_time() - started
    started = time.process_time()
    again = Manifest.parse(data, Path("simulated"))
    found["read"] = time.process_time() - started
    assert again == manifest
    found["MB"] = len(data) / 1e6
    dist.destroy_process_group()
    return found


def shifted(part: dict[str, Any], rank: int, ep: int) -> dict[str, Any]:
    """What rank ``rank`` of the axis ``ep`` describes: its experts, on its ranks."""
    alike = []
    for (dtype, shape, tiles), keys in part["alike"]:
        moved = []
        for (first, *offsets), (count, *sizes), number, runs in tiles if rank and shape else ():
            moved.append(
                [[first + rank * (shape[0] // ep), *offsets], [count, *sizes], number, runs]
            )
        alike.append([[dtype, shape, moved or tiles], keys])
    return {
        "groups": [[one + rank for one in ranks] for ranks in part["groups"]],
        "alike": alike,
    }


NOTHING: dict[str, Any] = {"groups": [], "alike": []}
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "405B": (lambda: dense(126, 16384, 53248, 1024, 128256), 1),
    "58 layers of 256 experts, ep 64": (lambda: experts(58, 7168, 2048, 256, 64), 64),
    "the same, one by one": (lambda: experts(58, 7168, 2048, 256, 64, "indexed"), 64),
}


def measure_manifests(counts: list[int]) -> Table:
    rows: list[Row] = []
    for title, (make_model, ep) in MODELS.items():
        for count in counts:
            rows.append({"model": title, "ranks": count, **manifest_of(count, make_model(), ep)})
    styles = {"model": "", "ranks": "", "tensors": ".0f", "MB": ".2f"}
    return Table(
        title="Manifests of many ranks",
        note="Seconds of one CPU core, and the size of the manifest.",
        columns={name: (name, styles.get(name, ".3f")) for name in rows[0]},
        rows=rows,
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("speed", "ranks", "wait"))
    parser.add_argument("recipe", nargs="?", default="default")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to record figures")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    facts, name = circumstances(arguments, "checkpoint"), f"checkpoint-{options.which}"
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        if options.which == "wait":
            table, name = (
                measure_wait(options.recipe, options.steps, folder),
                f"{name}-{options.recipe}",
            )
        else:
            torch.set_num_threads(1)
            table = (
                measure_manifests(options.ranks)
                if options.which == "ranks"
                else measure(options.megabytes, options.rounds, folder, options.device)
            )
    publish([table], facts, name, options.results)


if __name__ == "__main__":
    main(sys.argv[1:])
