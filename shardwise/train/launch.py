# SPDX-License-Identifier: Apache-2.0
"""Launch: how the ranks of a run start, meet, are asked to stop, and end.

shardwise train ----------> torchrun (this process) --> rank 0: shardwise train ...
  no RANK in the environment                        --> rank 1: shardwise train ...

shardwise train, one rank               this process becomes the rank: no second import of torch
torchrun ... -m shardwise.cli train     joins the ranks that torchrun has started

    SIGTERM, SIGHUP, SIGINT, SIGUSR1    \\
    a file that $SHARDWISE_STOP names    > finish the step, write a checkpoint, exit with code 0
    ...on any one rank, or the launcher /

torchrun itself dies of SIGUSR1, and kills its ranks 30 s after SIGTERM. So the launcher answers
these signals with a stop file, which the ranks see after each step.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from glob import glob
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.core import comm
from shardwise.core.agreement import all_ranks, together
from shardwise.core.rehearsal import ranks_per_gpu, use_gpu

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

Made = TypeVar("Made")

# Paths of files: ranks save and end when one of them exists. The second is the launcher's.
STOP_FILES = ("SHARDWISE_STOP", "SHARDWISE_LAUNCHER_STOP")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
GPUS = "/dev/nvidia[0-9]*"
MODULE = "shardwise.cli"
_PR_SET_PDEATHSIG = 1


# ------------------------------------------------------------------------------ the ranks


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run as one rank sees them; ``rank``, ``local_rank``, ``device`` differ."""

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
        return together(make, self.axis)[0]


def num_restarts() -> int:
    """How often the ranks of this launch have been restarted."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def check_gpus() -> None:
    """Raise if the machine has a GPU that torch cannot use: nobody wants CPU ranks there."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if not hidden and glob(GPUS) and not torch.cuda.is_available():
        raise ValueError(
            f"this machine has a GPU that torch {torch.__version__} cannot use: repair torch or "
            f"the driver, or set CUDA_VISIBLE_DEVICES= (empty) to train on CPU"
        )


def join(timeout: float) -> World:
    """Join the other ranks, with NCCL for GPUs (if there are any) and gloo for CPUs."""
    check_gpus()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = use_gpu(), "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    # After a restart the store of torchrun may still contain the addresses of dead ranks.
    attempt = f"shardwise/attempt-{num_restarts()}"
    fresh = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=limit)
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        num_nodes=max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", size))),
        device=device,
        ranks_per_gpu=ranks_per_gpu(device) if device.type == "cuda" else 1,
    )


def end_with_launcher() -> None:
    """Make the kernel send SIGTERM (save and end) to this rank when its launcher dies, for any
    reason. Linux only; not for ranks started by hand, perhaps from a shell that ends before."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process: orderly after success, at once after a failure (other ranks may be stuck).
    Python's own end takes long with torch."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed pipe, a full disk: the output is lost
            stream.flush()
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(code)


class Guard:
    """Records requests to stop, in the main thread, while the context is open: the signals by which
    a user, a closed terminal or a batch system stops a run, except those that this process ignores
    (``nohup`` ignores SIGHUP), stop files, and the end of ``hours``.

    Args:
        tell: a file to create at a signal.
    """

    def __init__(self, *, hours: float | None = None, tell: Path | None = None) -> None:
        self.heard: str | None = None
        self._files = [os.environ.get(name, "") for name in STOP_FILES]
        self._tell, self._hours = tell, math.inf if hours is None else hours
        self._began = time.monotonic()

    def __enter__(self) -> Guard:
        faulthandler.enable()
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.heard == "SIGINT":
            raise KeyboardInterrupt  # the second Ctrl-C: end at once, without a checkpoint
        self.heard = signal.Signals(number).name
        if self._tell is not None:
            self._tell.touch()

    @property
    def asked(self) -> str | None:
        """The request to stop that this rank has received, or None."""
        if self.heard is None and any(map(os.path.exists, self._files)):
            self.heard = "a stop request"
        if self.heard is None and time.monotonic() - self._began >= 3600 * self._hours:
            self.heard = f"hours={self._hours:g} are over"
        return self.heard


# ------------------------------------------------------------------------------ the launcher


def be_only_rank() -> None:
    """Make this process the only rank of a run, without torchrun. (Several ranks, or a rank that is
    restarted, need it.)"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})


def launch(arguments: Sequence[str], *, nproc: int, max_restarts: int = 0) -> int:
    """Run ``shardwise`` with these arguments on ``nproc`` local ranks; return the exit code.

    A second SIGINT ends the ranks at once. If the launcher is killed, they save and stop.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    check_gpus()
    # Divide the cores: ranks that each use all cores slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # Ranks report their failures themselves; torch would repeat them as a table and a traceback.
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch:
        stop = Path(scratch) / "stop"
        os.environ[STOP_FILES[1]] = str(stop)
        options = ["--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
        # As with --standalone: a rendezvous of this machine alone, on any free port.
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        options += ["--rdzv-id", uuid.uuid4().hex]
        options += ["--log-dir", scratch]  # else torch leaves an empty folder in /tmp
        options += ["--signals-to-handle", "SIGQUIT"]  # the others are answered below
        # When a rank has failed, do not wait long for another that is stopped or stuck.
        if "--shutdown-timeout" in run.get_args_parser().format_help():  # not in torch 2.11
            options += ["--shutdown-timeout", "5"]
        # torch must not parse our arguments: it takes --nproc for an abbreviation of its own flag.
        config, command, rest = run.config_from_args(run.parse_args([*options, "-m", MODULE]))
        try:
            with Guard(tell=stop):
                elastic_launch(config, command)(*rest, *arguments)
        except ChildFailedError as error:
            return explain(error.failures)
        except SignalException as error:
            return 128 + error.sigval
    return 0


def explain(failures: Mapping[int, ProcessFailure]) -> int:
    """Print one line for a rank that was killed; return the exit code of the first failure.

    When a rank fails, torchrun ends the others: it sends SIGTERM, and SIGKILL some seconds later.
    So a rank that died of another signal within a second of the first failure has caused it.
    """
    first = min(failure.timestamp for failure in failures.values())
    killed = [
        (rank, failure)
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        if failure.timestamp <= first + 1
    ]
    if not killed:
        return max(1, *(failure.exitcode for failure in failures.values()))
    rank, failure = min(killed, key=lambda item: item[1].timestamp)
    name = signal.Signals(-failure.exitcode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    sys.stderr.write(
        f"error: rank {rank} (pid {failure.pid}) was killed by {name}{hint}. "
        f"Continue from the newest checkpoint with --resume\n"
    )
    return 128 - failure.exitcode
