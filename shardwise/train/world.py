# SPDX-License-Identifier: Apache-2.0
"""World: the ranks of a run, as one of them sees it."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise import comm

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

STOP_FILE = "SHARDWISE_STOP"  # names a file: ranks that find it save and end
LAUNCHER = "SHARDWISE_LAUNCHER"  # the process that has started this rank, by number
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class World:
    """Made by :func:`join`; the same values on every rank but for ``rank`` and ``device``."""

    rank: int
    size: int
    local_rank: int
    num_nodes: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that talks to people."""
        return self.rank == 0

    @property
    def axis(self) -> comm.Axis:
        return comm.as_axis(dist.group.WORLD, "world")  # type: ignore[arg-type]

    def together(self, make: Callable[[], Made]) -> Made:
        """What ``make`` gives; what it finds wrong on any rank is raised on all of them.

        A rank that left alone would make the others wait for it until the timeout.
        """
        problem: str | None = None
        try:
            made = make()
        except Exception as error:
            problem = str(error) or type(error).__name__
            if not isinstance(error, ValueError | OSError | NotImplementedError | ImportError):
                logger.exception("rank %d", self.rank)  # not a user's mistake
                problem = f"{type(error).__name__}: {error}"
        found = comm.agree(problem, self.axis)
        problems = {text: rank for rank, text in reversed(list(enumerate(found))) if text}
        if not problems:
            return made
        if len(problems) == 1 and all(found):
            raise ValueError(next(iter(problems)))  # the same everywhere: no need to say where
        raise ValueError("; ".join(f"rank {rank}: {text}" for text, rank in problems.items()))


def is_rank() -> bool:
    """Whether this process was started as a rank, by ``torchrun`` or by ourselves."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_restarts() -> int:
    """How often the ranks of this launch have been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch_name() -> str | None:
    """What all ranks of this launch, started again or not, have in common; None for a rank that
    no agent has started."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def speaks() -> bool:
    """Whether this process may talk to the terminal for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def join(timeout: float) -> World:
    """Join the other ranks: NCCL between GPUs where there are some, gloo between hosts."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    size = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"{per_node} ranks on a machine with {torch.cuda.device_count()} GPUs: start at "
                f"most one rank per GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on CPU"
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    # torchrun may keep its store over a restart, with the addresses of dead ranks in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    fresh = dist.PrefixStore(f"shardwise/attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=limit)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        num_nodes=max(1, size // per_node),
        device=device,
    )


def end_with_launcher() -> None:
    """Have the kernel ask this rank to stop (SIGTERM: save and end) when its launcher dies, however
    that happened; nobody would tell this rank otherwise. Linux only."""
    if launch_name() is None or sys.platform != "linux":
        return  # started by hand, perhaps by a shell that may end
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if is_orphaned():  # it died before that call
        raise RuntimeError("the launcher of this rank has died")


def is_orphaned() -> bool:
    """Whether the launcher (:mod:`shardwise.train.launch`) that started this rank has died."""
    launcher = os.environ.get(LAUNCHER)
    return launcher is not None and os.getppid() != int(launcher)


def leave(code: int) -> None:
    """End this rank: in order after success, at once after a failure (others may be stuck)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed pipe, a full disk: nothing that was to be said can be
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
    if is_orphaned():  # the launcher would have removed this
        shutil.rmtree(Path(os.environ[STOP_FILE]).parent, ignore_errors=True)
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
        return
    os._exit(code)
