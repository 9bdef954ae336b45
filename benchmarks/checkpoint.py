# SPDX-License-Identifier: Apache-2.0
"""How fast a checkpoint is written and read, beside torch's own DCP in the same run.

    python -m benchmarks.checkpoint [--megabytes 200] [--rounds 5] [--folder /tmp] [--device cuda]

One process, weights and AdamW states. ``torch dcp`` is ``torch.distributed.checkpoint.save`` with
its fsync; it writes no hashes and checks none. ``blocked`` is how long training stands still.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwise as sw
from shardwise.checkpoint import Store, verify
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(options.megabytes, options.rounds, Path(folder), options.device)


if __name__ == "__main__":
    main()
