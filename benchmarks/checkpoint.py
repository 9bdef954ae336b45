# SPDX-License-Identifier: Apache-2.0
"""How fast a checkpoint is written and read, beside torch's own DCP in the same run.

    python -m benchmarks.checkpoint [--megabytes 200] [--rounds 5] [--folder /tmp] [--device cuda]
    python -m benchmarks.checkpoint --ranks 4096 16384

One process, weights and AdamW states. ``torch dcp`` is ``torch.distributed.checkpoint.save`` with
its fsync; it writes no hashes and checks none. ``blocked`` is how long training stands still.

With ``--ranks``: the manifest of large models with AdamW states over so many ranks. The model is
wrapped on torch's fake backend, without memory; this process is rank 0. ``divide`` is on the main
thread; the others are in the background: what rank 0 does when all ranks are done, and what each
rank does to read the manifest. Parts that other ranks describe (experts over ``ep``) are made from
those of rank 0.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import logging
import os
import shutil
import statistics
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
from shardwise.checkpoint import Manifest, Store, verify
from shardwise.checkpoint.manifest import OptimizerValues
from shardwise.checkpoint.saving import divide, join
from shardwise.checkpoint.state import model_state
from shardwise.moe import GroupedMLP, swiglu
from shardwise.report.origin import cpu_name, revision

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


def measure(megabytes: int, rounds: int, folder: Path, device: str) -> None:
    model, optimizer, nbytes = make(megabytes, device)
    count = len(tensors(model, optimizer))
    store = Store(folder / "store", keep=1)
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):  # the first one is a warm-up
        found = one_round(turn, model, optimizer, store, folder)
        for name, seconds in found.items():
            if turn:
                times.setdefault(name, []).append(seconds)
    print(f"- command: python -m benchmarks.checkpoint --megabytes {megabytes} --device {device}")
    print(f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, revision {revision()}")
    print(f"- {cpu_name()}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print(f"- {nbytes / 1e6:.0f} MB in {count} tensors, median of {rounds}, folder {folder}\n")
    print("| what | seconds | MB/s | best MB/s |\n|---|---|---|---|")
    for name in sorted(times):
        values = times[name]
        middle = statistics.median(values)
        rates = f"{nbytes / middle / 1e6:.0f} | {nbytes / min(values) / 1e6:.0f}"
        print(f"| {name} | {middle:.3f} | {rates} |")


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
    mine = table.to_json()
    found["describe"] = time.process_time() - started
    digest = hashlib.sha256().hexdigest()
    found_parts = [
        {"file": [10**12 + rank, digest], "table": shifted(mine, rank, ep) if rank < ep else None}
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
        experts={of.name: of.total for of in state.experts.values()},
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
    tensors = []
    for dtype, shape, tiles, keys in part["tensors"]:
        moved = []
        for (first, *offsets), (count, *sizes), number, runs in tiles if rank else ():
            moved.append(
                [[first + rank * (shape[0] // ep), *offsets], [count, *sizes], number, runs]
            )
        tensors.append([dtype, shape, moved or tiles, keys])
    return {
        "groups": [[one + rank for one in ranks] for ranks in part["groups"]],
        "tensors": tensors,
    }


def measure_manifests(counts: list[int]) -> None:
    print("- command: python -m benchmarks.checkpoint --ranks " + " ".join(map(str, counts)))
    print(f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, revision {revision()}")
    print(f"- {cpu_name()}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    models: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "405B": (lambda: dense(126, 16384, 53248, 1024, 128256), 1),
        "58 layers of 256 experts, ep 64": (lambda: experts(58, 7168, 2048, 256, 64), 64),
        "the same, one by one": (lambda: experts(58, 7168, 2048, 256, 64, "indexed"), 64),
    }
    names = ("tensors", "divide", "describe", "join", "write", "read", "MB")
    print("| model | ranks | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    for title, (make_model, ep) in models.items():
        for count in counts:
            found = manifest_of(count, make_model(), ep)
            print(
                f"| {title} | {count} | "
                + " | ".join(f"{found[name]:.3g}" for name in names)
                + " |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.ranks:
        measure_manifests(options.ranks)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(options.megabytes, options.rounds, Path(folder), options.device)


if __name__ == "__main__":
    main()
