# SPDX-License-Identifier: Apache-2.0
"""Launch: starts the ranks of this machine from one command, with ``torch.distributed.run``.

shardwise train ----------> agent (this process) --> rank 0: shardwise train ...
  no RANK in the environment                     --> rank 1: shardwise train ...

shardwise train, one rank       this process becomes the rank, which saves a second import of torch

torchrun ... -m shardwise.cli train     joins the existing ranks; nothing is launched
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from shardwise.train.guard import stop_signals
from shardwise.train.world import AGAIN, LAUNCHER, check_gpus

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MODULE = "shardwise.cli"


def default_ranks() -> int:
    """One rank per GPU, or two on a machine without GPUs."""
    return torch.cuda.device_count() or 2


def be_only_rank() -> None:
    """Make this process the only rank of a run, without an agent. (Several ranks, or a rank that is
    restarted, need the agent.)"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})


def launch(arguments: Sequence[str], *, nproc: int, max_restarts: int = 0) -> int:
    """Run ``shardwise`` with these arguments on ``nproc`` local ranks; return the exit code.

    SIGTERM, SIGHUP, SIGUSR1 and SIGINT ask the ranks to save and stop; a second SIGINT ends them at
    once. If the launcher is killed, the ranks save and stop too. If ranks run out of memory in
    their first steps, all ranks are started again with more microbatches.
    """
    check_gpus()
    # Divide the cores: ranks that each use all cores slow each other down.
    threads = max(1, (os.cpu_count() or 1) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch:
        stop = Path(scratch) / "stop"
        os.environ[LAUNCHER] = f"{os.getpid()}:{scratch}"
        options = ["--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
        options += ["--rdzv-id", uuid.uuid4().hex]
        options += ["--log-dir", scratch]  # else torch leaves an empty folder in /tmp
        with asking_to_stop(stop):
            while (code := _run_agent(arguments, options)) == AGAIN:
                pass
            return code


def _run_agent(arguments: Sequence[str], options: list[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # Ranks report their failures themselves; torch would repeat them as a table and a traceback.
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # As with --standalone: a rendezvous of this machine alone, on any free port.
    options = [*options, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    # `asking_to_stop` handles the other signals: torch would end the ranks before they can save.
    options += ["--signals-to-handle", "SIGQUIT"]
    # When a rank has failed, do not wait long for another that is stopped or stuck.
    if "--shutdown-timeout" in run.get_args_parser().format_help():  # not in torch 2.11
        options += ["--shutdown-timeout", "5"]
    # torch must not parse our arguments: it takes --nproc for an abbreviation of its own flag.
    config, command, rest = run.config_from_args(run.parse_args([*options, "-m", MODULE]))
    signalled = _signalled_processes()
    try:
        elastic_launch(config, command)(*rest, *arguments)
    except ChildFailedError as error:
        return explain(error.failures, signalled)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _signalled_processes() -> set[int]:
    """A set that receives the pids to which this process sends a signal. The agent of torch ends
    the other ranks when a rank fails, and their signal is not the cause of the failure."""
    pids: set[int] = set()

    def record(event: str, values: tuple[Any, ...]) -> None:
        if event in ("os.kill", "os.killpg"):
            pids.add(values[0])

    sys.addaudithook(record)
    return pids


def explain(failures: Mapping[int, ProcessFailure], signalled: Container[int]) -> int:
    """Print one line for a rank that was killed; return the exit code of the first to fail.

    A killed rank counts as the first: the failures that follow may have the same timestamp.
    """
    if any(failure.exitcode == AGAIN for failure in failures.values()):
        return AGAIN
    if not failures:
        return 1
    causes = {rank: failure for rank, failure in failures.items() if failure.pid not in signalled}
    for rank, failure in failures.items():
        if rank not in causes and failure.exitcode == -signal.SIGKILL:
            sys.stderr.write(
                f"error: rank {rank} (pid {failure.pid}) did not end after another rank had failed "
                f"(it is stopped, or stuck), and the launcher killed it\n"
            )
    rank, failure = min(
        (causes or failures).items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp)
    )
    if failure.exitcode >= 0:
        return failure.exitcode or 1
    name = signal.Signals(-failure.exitcode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    sys.stderr.write(
        f"error: rank {rank} (pid {failure.pid}) was killed by {name}{hint}. "
        f"Continue from the newest checkpoint with --resume\n"
    )
    return 128 - failure.exitcode


@contextlib.contextmanager
def asking_to_stop(stop: Path) -> Iterator[None]:
    """While the context is open, a signal creates the file ``stop``, which makes the ranks stop."""

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.exists():
            raise KeyboardInterrupt
        stop.touch()

    before = {number: signal.signal(number, ask) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
