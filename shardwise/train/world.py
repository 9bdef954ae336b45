# SPDX-License-Identifier: Apache-2.0
"""World: the ranks of a run as one rank sees them, and how a rank joins and leaves."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.core import comm
from shardwise.core.agreement import all_ranks, together
from shardwise.core.mesh import meeting
from shardwise.core.rehearsal import ranks_per_gpu, use_gpu

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

STOP_FILE = "SHARDWISE_STOP"  # the path of a file; ranks save and end when it exists
LAUNCHER = "SHARDWISE_LAUNCHER"  # "PID:FOLDER" of the `shardwise train` that started this rank
AGAIN = 75  # the exit status of ranks that the launcher must start again (EX_TEMPFAIL)
GPUS = "/dev/nvidia[0-9]*"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class World:
    """The result of :func:`join`; only ``rank``, ``local_rank`` and ``device`` differ by rank."""

    rank: int
    size: int
    local_rank: int
    num_nodes: int
    device: torch.device
    ranks_per_gpu: int = 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and logs for all."""
        return self.rank == 0

    @property
    def axis(self) -> comm.Axis:
        return all_ranks()

    def together(self, make: Callable[[], Made]) -> Made:
        """Call ``make`` on all ranks; return its value. An error of any rank is raised on all."""

        def work() -> Made:
            try:
                return make()
            except (ValueError, OSError, NotImplementedError, ImportError):
                raise
            except Exception as error:  # not a mistake of the user: show the traceback
                logger.exception("rank %d", self.rank)
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

        return together(work, self.axis)[0]


def is_rank() -> bool:
    """Whether this process was started as a rank, by ``torchrun`` or by ``shardwise train``."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def changes_file() -> Path | None:
    """The file for values of the configuration to start all ranks again with; None if another
    launcher, such as torchrun, started the ranks."""
    folder = launcher()[1]
    return None if folder is None else folder / "changes.json"


def stop_files() -> list[str]:
    """The files that ask the ranks to stop: the user's file, and that of the launcher."""
    folder = launcher()[1]
    return [os.environ.get(STOP_FILE, ""), "" if folder is None else str(folder / "stop")]


def launcher() -> tuple[int | None, Path | None]:
    """The pid of the ``shardwise train`` that started this rank, and its temporary folder; None if
    another launcher started the rank."""
    pid, _, folder = os.environ.get(LAUNCHER, "").partition(":")
    return (int(pid), Path(folder)) if folder else (None, None)


def changes_left() -> dict[str, Any]:
    """The values in :func:`changes_file`; empty if no rank of this launch has written it."""
    file = changes_file()
    return {} if file is None or not file.exists() else json.loads(file.read_text())


def num_restarts() -> int:
    """How often the ranks of this launch have been restarted."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + bool(changes_left())


def launch_name() -> str | None:
    """The name of this launch, the same after restarts of its ranks; None without torch's agent."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def check_gpus() -> None:
    """Raise if the machine has a GPU that torch cannot use: nobody wants CPU ranks there."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if hidden or torch.cuda.is_available() or not glob(GPUS):
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it finds none"
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
    raise ValueError(
        f"this machine has a GPU that torch {torch.__version__} cannot use ({reason}): repair "
        f"torch or the driver, or set CUDA_VISIBLE_DEVICES= (empty) to train on CPU"
    )


def join(timeout: float) -> World:
    """Join the other ranks, with NCCL for GPUs (if there are any) and gloo for CPUs."""
    check_gpus()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = use_gpu(), "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=timeout)
    # After a restart the store of torchrun may still contain the addresses of dead ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with meeting():
        store, rank, size = next(rendezvous("env://", timeout=limit))
        fresh = dist.PrefixStore(f"shardwise/attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=limit)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        num_nodes=max(1, size // (per_node or size)),
        device=device,
        ranks_per_gpu=ranks_per_gpu(device) if device.type == "cuda" else 1,
    )


def end_with_launcher() -> None:
    """Make the kernel send SIGTERM (save and end) to this rank when its launcher dies, for any
    reason. Linux only."""
    if launch_name() is None or sys.platform != "linux":
        return  # started by hand, perhaps from a shell that ends before the run
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if is_orphaned():  # the launcher died before the call above
        raise RuntimeError("the launcher of this rank has died")


def is_orphaned() -> bool:
    """Whether the launcher (:mod:`shardwise.train.launcher`) that started this rank has died."""
    return launcher()[0] not in (None, os.getppid())


def leave(code: int) -> None:
    """End this rank: orderly after success, at once after a failure (other ranks may be stuck)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed pipe, a full disk: the rest of the output is lost
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
    folder = launcher()[1]
    if folder is not None and is_orphaned():  # the launcher is dead and can't remove its folder
        shutil.rmtree(folder, ignore_errors=True)
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
        return
    os._exit(code)
