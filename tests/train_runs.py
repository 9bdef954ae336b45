# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainer for tests, from cheap to true:

make_trainer        inside the rank pool: the loop alone
inside              a command that starts no ranks, in this process
fork_ranks          the ranks of a run, forked from a process that has imported torch already
fork_launcher       the command with its launcher and ranks, forked likewise
start               the command that people type: a launcher and ranks, three imports of torch
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardwise.cli import main, run
from shardwise.core.tensor import ShardedTensor
from shardwise.models.gpt_config import GPTConfig
from shardwise.report.html import read_events
from shardwise.train.config import TrainConfig
from shardwise.train.fit import plan_inputs, precision_of
from shardwise.train.launch import World
from shardwise.train.loop import Trainer
from tests.one_card import device_type
from tests.rank_process import exit_with_parent
from tests.ranks import rank_context

TINY = TrainConfig(
    model=GPTConfig(dim=16, num_layers=2, num_heads=2, context=16),
    steps=8,
    batch=12,  # over 1, 2, 3 and 4 ranks
    warmup=2,
    eval_every=4,
    eval_windows=5,
    save_every=4,
    keep=3,
    sample=0,
    profile_step=0,
    compile="off",
    timeout=240.0,
)


def write_text(folder: Path) -> str:
    """A small corpus; its path."""
    path = folder / "text.txt"
    path.write_text("".join(f"the {n} of {n * n}, and so on to {n + 7};\n" for n in range(900)))
    return str(path)


RECIPE = """
import dataclasses
from tests.train_runs import TINY

def tiny():
    return dataclasses.replace(TINY, data={data!r}, {changes})
"""


def write_recipe(folder: Path, changes: str) -> str:
    """A recipe of a tiny run with the given changes; what to type for it."""
    file = folder / "recipe.py"
    file.write_text(RECIPE.format(data=write_text(folder), changes=changes))
    return f"{file}:tiny"


def make_world(rank: int, world_size: int) -> World:
    return World(
        rank=rank, size=world_size, local_rank=rank, num_nodes=1, device=torch.device(device_type())
    )


def make_trainer(
    rank: int,
    world_size: int,
    folder: str,
    resume: str | None = None,
    *,
    or_older: bool = False,
    **changes: Any,
) -> Trainer:
    config = dataclasses.replace(TINY, **changes)
    path = Path(folder)
    with mock.patch.object(Trainer, "_plan", _plan_once):
        return Trainer(
            config,
            make_world(rank, world_size),
            path,
            resume=None if resume is None else Path(resume),
            or_older=or_older,
        )


_PLANS: dict[str, dict[str, Any]] = {}
_REAL_PLAN = Trainer._plan


def _plan_once(trainer: Trainer) -> dict[str, Any]:
    """The plan of a run. It takes longer than eight steps, and many runs of a process have the
    same: that of one model, over one mesh, with the same options."""
    config, world = trainer.config, trainer.world
    _, mesh, options = plan_inputs(config, precision_of(config, world), world)
    model = (config.model, config.module, config.ep)
    key = repr((model, mesh, config.placements, sorted(options.items())))
    if key not in _PLANS:
        _PLANS[key] = _REAL_PLAN(trainer)
    return _PLANS[key]


def values_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter and every optimizer state, whole."""
    found: dict[str, torch.Tensor] = {}
    # Not the model's parameters: some of its modules hold whole weights since a forward.
    names = [name for name, p in trainer.parts.model.named_parameters() if p.requires_grad]
    for parameter, state in trainer.parts.optimizer.state.items():
        name = trainer.parts.optimizer._name(parameter)
        for key, value in {"": parameter, **state}.items():
            if isinstance(value, torch.Tensor):
                value = value.full_tensor() if isinstance(value, ShardedTensor) else value
                found[f"{name}.{key}"] = value.detach().clone()
    assert len(found) > 2 * len(names)
    return found


def events_of(folder: str | Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(Path(folder) / "events.jsonl") if event["kind"] == kind]


# ------------------------------------------------------------------------------ the command

_STARTED: list[subprocess.Popen[str]] = []


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "shardwise.cli", *words]


def environment(**more: str) -> dict[str, str]:
    values = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return values | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def inside(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no ranks in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        try:
            code = run(list(words))
        except SystemExit as ended:  # the parser's
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def default_signals() -> None:
    """In a child: whoever ran the tests may ignore some (nohup, a shell's background), and a
    command that finds a signal ignored respects that. A rank that is a fork of its launcher would
    ask all ranks to stop, as the launcher does, when it is told to end itself."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def start(*words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Run the command in the background, in a session of its own."""
    process = subprocess.Popen(
        command(*words),
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,
    )
    _STARTED.append(process)
    return process


class Forked:
    """Processes that are forks of one that has imported torch, each in a session of its own."""

    def __init__(
        self, words: tuple[str, ...], cwd: Path, environments: list[dict[str, str]]
    ) -> None:
        context = rank_context()
        self._folder = Path(tempfile.mkdtemp(prefix="forked-"))
        self.processes = []
        for number, variables in enumerate(environments):
            out = str(self._folder / str(number))
            process = context.Process(target=_forked, args=(words, str(cwd), variables, out))
            process.start()
            self.processes.append(process)
        _FORKED.append(self)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    @property
    def pid(self) -> int:
        (pid,) = self.pids
        return pid

    def poll(self) -> int | None:
        """None while any process runs; then the first exit code that is not 0."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def finish(self, timeout: float = 300) -> tuple[int, str, str]:
        """The first exit code that is not 0, and what all processes wrote."""
        for process in self.processes:
            process.join(timeout)
        code = self.poll()
        texts = [self._read(kind) for kind in ("out", "err")]
        assert code is not None, f"still running after {timeout} s: {texts}"
        return code, texts[0], texts[1]

    def kill(self) -> None:
        for process in self.processes:
            for pid in ranks_of(process.pid or 0):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.join(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, kind: str) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob(f"*.{kind}")))


_FORKED: list[Forked] = []
_PORTS: list[socket.socket] = []


def fork_ranks(*words: str, cwd: Path, nproc: int = 2) -> Forked:
    """Start the ranks of a command, as a launcher would."""
    variables = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)]
    return Forked(words, cwd, [variables | rank for rank in ranks])


def fork_launcher(*words: str, cwd: Path, count: int = 1, **variables: str) -> Forked:
    """Start a command, or torch's own launcher ("torchrun"), whose ranks are forks of it."""
    return Forked(words, cwd, [variables] * count)


def forked(*words: str, cwd: Path, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the ranks of a command to their end."""
    return subprocess.CompletedProcess(words, *fork_ranks(*words, cwd=cwd, nproc=nproc).finish())


def free_port() -> int:
    """A port for a server that says SO_REUSEADDR, as torch's does. It stays bound here, unlistened,
    so that the kernel gives it to nobody else before that server comes."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _PORTS.append(held)
    return int(held.getsockname()[1])


def _forked(words: tuple[str, ...], cwd: str, variables: dict[str, str], out: str) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    os.setsid()
    exit_with_parent()
    default_signals()
    for kind, number in (("out", 1), ("err", 2)):
        with open(f"{out}.{kind}", "w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(variables | {"GLOO_SOCKET_IFNAME": "lo"})
    tempfile.tempdir = None  # of the environment that was
    os.chdir(cwd)
    torch.set_num_threads(1)
    SubprocessHandler._popen = _fork_rank  # type: ignore[method-assign]
    if words[0] == "torchrun":
        torchrun.main(words[1:])
    else:
        main(list(words))


def _fork_rank(handler: Any, words: tuple[str, ...], env: dict[str, str]) -> Any:
    """In a launcher: start a rank as its fork, instead of a process that imports torch."""

    def rank() -> None:
        os.setsid()
        Path("/proc/self/comm").write_text(f"RANK={env['RANK']}")  # for `ranks_of`
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the launcher's folders
        default_signals()
        os.environ.clear()
        os.environ.update(env)
        try:
            main(list(words[words.index("shardwise.cli") + 1 :]))
        finally:
            atexit._run_exitfuncs()

    process = get_context("fork").Process(target=rank)
    process.start()
    return process._popen  # type: ignore[attr-defined]


def wait_for_end(pids: list[int], seconds: float = 300) -> None:
    """Until processes that nobody waits for have ended."""
    limit = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < limit, f"some of {pids} are still running"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def stop_all() -> None:
    """End what was started and still runs."""
    while _PORTS:
        _PORTS.pop().close()
    while _FORKED:
        _FORKED.pop().kill()
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            for pid in [*ranks_of(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def finish(process: subprocess.Popen[str], timeout: float = 300) -> tuple[int, str, str]:
    """Its exit code and what it said; nothing of it is left behind, whatever happens."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in ranks_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def ranks_of(launcher: int) -> list[int]:
    """The process ids of its ranks, by rank."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            names = [(entry / "comm").read_bytes(), *(entry / "environ").read_bytes().split(b"\0")]
        except (OSError, ValueError, IndexError):
            continue
        rank = [int(v[5:]) for v in names if v.startswith(b"RANK=")]
        if parent == launcher and rank:
            found.append((rank[0], int(entry.name)))
    return [pid for _, pid in sorted(found)]


def wait_until(
    ready: Callable[[], Any],
    process: subprocess.Popen[str] | Forked,
    seconds: float = 300,
) -> Any:
    """Return the first true result of ``ready``, called 50 times a second."""
    limit = time.monotonic() + seconds
    while not (found := ready()):
        assert process.poll() is None, (
            process.finish() if isinstance(process, Forked) else finish(process)
        )
        assert time.monotonic() < limit, "it never came to that"
        time.sleep(0.02)
    return found


def steps_done(folder: Path) -> int:
    if not (folder / "events.jsonl").exists():
        return 0
    return max((event["step"] for event in events_of(folder, "step")), default=0)
