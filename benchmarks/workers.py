# SPDX-License-Identifier: Apache-2.0
"""Fresh processes for each measurement: clean allocator, one thread, their own process group."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

FAKE_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a measurement needs to know; it is pickled to the processes."""

    device: str
    systems: tuple[str, ...]
    rounds: int
    tiny: bool
    profile: bool = False

    @property
    def mark(self) -> str:
        """A dry run says so in every title."""
        return ", TINY DRY RUN" if self.tiny else ""


Worker: TypeAlias = Callable[[int, Options, DeviceMesh], Any]


def process_main(
    rank: int, worker: Worker, world: int, backend: str, options: Options, folder: str
) -> None:
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    if backend == "fake":
        # Imported here: a testing module, and the one way to be rank 0 of 8 alone.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_RANKS)
    else:
        meeting = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world)
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    result = worker(rank, options, mesh)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def in_processes(worker: Worker, world: int, backend: str, options: Options) -> Any:
    """Run ``worker`` in ``world`` new processes and return what rank 0 returned, as JSON does.

    ``backend="fake"`` poses as rank 0 of 8 in one process: its collectives copy locally (a gather
    repeats this rank's shard), so copies, allocations and host work are real and no bytes travel.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (worker, world, backend, options, folder)
        spawn(process_main, args=arguments, nprocs=world)
        what = f"{worker.__module__}.{worker.__name__}, {backend}: {', '.join(options.systems)}"
        print(f"{what}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        return json.loads(Path(folder, "result.json").read_text())
