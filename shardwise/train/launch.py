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
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from glob import glob
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.core import comm
from shardwise.core.agreement import all_ranks, together
from shardwise.core.rehearsal import ranks_per_gpu, use_gpu

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

STOP_FILE = "SHARDWISE_STOP"  # the path of a file; ranks save and end when it exists
LAUNCHER = "SHARDWISE_LAUNCHER"  # "PID:FOLDER" of the `shardwise train` that started this rank
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


def launch_name() -> str | None:
    """The name of this launch, the same after restarts of its ranks; None without torch's agent."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


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


def launcher() -> tuple[int | None, Path | None]:
    """The pid of the ``shardwise train`` that started this rank, and its temporary folder; None if
    another launcher started the rank."""
    pid, _, folder = os.environ.get(LAUNCHER, "").partition(":")
    return (int(pid), Path(folder)) if folder else (None, None)


def end_with_launcher() -> None:
    """Make the kernel send SIGTERM (save and end) to this rank when its launcher dies, for any
    reason. Linux only."""
    if launch_name() is None or sys.platform != "linux":
        return  # started by hand, perhaps from a shell that ends before the run
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher()[0] not in (None, os.getppid()):  # it died before the call above
        raise RuntimeError("the launcher of this rank has died")


def leave(code: int) -> None:
    """End this rank: orderly after success, at once after a failure (other ranks may be stuck)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed pipe, a full disk: the rest of the output is lost
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
    pid, folder = launcher()
    if folder is not None and pid != os.getppid():  # the launcher is dead and left its folder
        shutil.rmtree(folder, ignore_errors=True)
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
        return
    os._exit(code)


# ------------------------------------------------------------------------------ requests to stop


@contextlib.contextmanager
def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``handler`` for the signals by which a user, a closed terminal or a batch system stops
    a run, except those that this process ignores (``nohup`` ignores SIGHUP)."""
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def asking_to_stop(stop: Path) -> Iterator[None]:
    """While the context is open, a signal creates the file ``stop``, which makes the ranks stop."""

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.exists():
            raise KeyboardInterrupt
        stop.touch()

    with on_stop_signals(ask):
        yield


class Guard:
    """Records requests to stop, in the main thread, while the context is open."""

    def __init__(self, hours: float | None = None) -> None:
        self.heard: str | None = None
        folder = launcher()[1]
        own = "" if folder is None else str(folder / "stop")
        self._files = [os.environ.get(STOP_FILE, ""), own]
        self._hours, self._end = hours, time.monotonic() + 3600 * (hours or 0.0)
        self._signals = on_stop_signals(self._hear)

    def __enter__(self) -> Guard:
        faulthandler.enable()
        self._signals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._signals.__exit__(*error)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.heard == "SIGINT":
            raise KeyboardInterrupt  # the second Ctrl-C: end at once, without a checkpoint
        self.heard = signal.Signals(number).name

    @property
    def asked(self) -> str | None:
        """The request to stop that this rank has received, or None."""
        if self.heard is None and any(map(os.path.exists, self._files)):
            self.heard = "a stop request"
        if self.heard is None and self._hours is not None and time.monotonic() >= self._end:
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
        os.environ[LAUNCHER] = f"{os.getpid()}:{scratch}"
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
            with asking_to_stop(Path(scratch) / "stop"):
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
    first = min((failure.timestamp for failure in failures.values()), default=0)

    def order(item: tuple[int, ProcessFailure]) -> tuple[Any, ...]:
        failure = item[1]
        ended = failure.exitcode == -signal.SIGTERM  # by torchrun, before it could answer
        return failure.timestamp > first + 1, ended, failure.exitcode >= 0, failure.timestamp

    for rank, failure in sorted(failures.items(), key=order):
        if failure.exitcode >= 0:
            return failure.exitcode or 1
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        sys.stderr.write(
            f"error: rank {rank} (pid {failure.pid}) was killed by {name}{hint}. "
            f"Continue from the newest checkpoint with --resume\n"
        )
        return 128 - failure.exitcode
    return 1
