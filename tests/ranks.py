# SPDX-License-Identifier: Apache-2.0
"""Run a function on every rank of a process group, from an ordinary test.

    def sum_of_ranks(rank: int, world_size: int, scale: float) -> float:
        value = torch.tensor(rank * scale)
        dist.all_reduce(value)
        return value.item()

    def test_sum_of_ranks() -> None:
        assert run_ranks(sum_of_ranks, 4, 2.0) == [12.0] * 4

A test that needs no result of its ranks is itself the function that every rank runs:

    @pytest.mark.parametrize("scale", [1.0, 2.0])
    @on_ranks(4)
    def test_sum_of_ranks(rank: int, world_size: int, scale: float) -> None:
        value = torch.tensor(rank * scale)
        dist.all_reduce(value)
        assert value.item() == 6 * scale

The first call for a world size spawns its ranks and joins them in a process group (seconds, for
`import torch`); later calls send the next function to the same processes (milliseconds):

    test process                              pool of 2
      TCPStore server  <---- rendezvous ----  rank 0   gloo, or NCCL, over loopback
      pipe 0           ----- (fn, args) --->  rank 0
      pipe 1           ----- (fn, args) --->  rank 1
                       <---- result or traceback, one from each

With ``pytest --device cuda`` the ranks are NCCL ranks that share GPU 0, and what a test makes lies
on it (``tests/one_card.py``). ``device_type()`` is the device of the process that asks.

Functions travel by name, so they must stand at the top level of a module. Values travel by pickle;
tensors come back as plain CPU copies. A call starts from seed 0 and float32 defaults, but the
process group, and any subgroup that a test made, lives on: build shared meshes in cached functions.

When anything goes wrong (an exception, a dead process, a time-out), the pool is killed: half a
collective left in flight would poison the next test. The next call builds a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist

from shardwise import notices
from tests.one_card import (
    device_type,
    join_one_card,
    on_device,
    ranks_device,
    serve_side_by_side,
)
from tests.products import keep_one_product
from tests.rank_process import (
    collect_garbage,
    exit_with_fork_server,
    exit_with_parent,
    put_back,
    share_gloo_thread,
)

T = TypeVar("T")

# How long the other ranks may go on once one has failed. Most are then stuck in a collective that
# will never complete; the ones about to raise the same error get their traceback in.
GRACE_SECONDS = 3.0
# How long ranks may take, to start and for a call: what hangs, hangs for ever, and a machine that
# others use too may be slow.
PATIENCE_SECONDS = 240.0
# How long ranks that are still running may take to write their stacks.
STACK_SECONDS = 20.0
# Subgroups hold sockets until their process ends. A pool that holds this many is replaced.
MAX_OPEN_FILES = 400
# Where it works, one process imports what ranks need and every rank is a fork of it.
START = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = ["tests.frozen"]


class RanksFailed(Exception):  # noqa: N818  (it names what happened, as pytest's own do)
    """At least one rank did not return; the message holds what happened on every rank."""

    def __init__(self, headline: str, reports: dict[int, str]) -> None:
        self.reports = reports
        sections = [f"--- rank {rank}: {reports[rank].rstrip()}" for rank in sorted(reports)]
        super().__init__("\n".join([headline, *sections]))


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = PATIENCE_SECONDS,
    backend: str | None = None,
    fresh: bool = False,
) -> list[T]:
    """Call `fn(rank, world_size, *args)` on every rank and return the results in rank order.

    `backend`: gloo ranks are on the CPU, NCCL ranks on the GPU; None: as the session says.
    `fresh=True` spawns processes for this call alone, for tests that leave a mark on their process.
    Raises `RanksFailed` with the traceback or stack of every rank.
    """
    __tracebackhide__ = True
    call = _pack_call(fn, args)
    backend = backend or ("nccl" if ranks_device() == "cuda" else "gloo")
    key = (world_size, backend)
    counts[backend] += 1
    # Popped while in use: whatever interrupts the call (Ctrl-C and pytest-timeout included), a pool
    # goes back only after a clean round.
    pool = None if fresh else _idle_pools.pop(key, None)
    if pool is None:
        pool = _Pool(world_size, backend)
    for other in _idle_pools.values():
        other.pause()
    results: list[Any] | None = None
    try:
        pool.start()
        results = pool.call(call, fn.__qualname__, timeout)
    finally:
        if results is not None and not fresh and pool.open_files <= MAX_OPEN_FILES:
            _idle_pools[key] = pool
        else:
            pool.kill()
        if results is None and backend == "nccl":
            shut_down()  # all ranks of this process share one service
            serve_side_by_side()
    return results


def on_ranks(
    ranks: int | Callable[[Any], int] | None = None, *, of: str = "strategy", **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function `fn(rank, world_size, ...)` that `run_ranks` runs on every rank.

    `ranks` is their number, or a function of the test's parameter `of`; None: the test has a
    parameter `world_size`. `options` go to `run_ranks`.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        _, size, *names = signature = inspect.signature(fn).parameters

        @functools.wraps(fn)
        def test(**case: Any) -> None:
            __tracebackhide__ = True
            count = ranks(case[of]) if callable(ranks) else ranks or case[size]
            run_ranks(_RankTest(fn), count, *(case[name] for name in names), **options)

        kept = names if ranks is not None else [size, *names]
        test.__signature__ = inspect.Signature([signature[name] for name in kept])  # type: ignore[attr-defined]
        return test

    return decorate


class _RankTest:
    """The function under `on_ranks`: its module knows its name as that of the test."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn, self.__qualname__ = fn, fn.__qualname__

    def __reduce__(self) -> Any:
        return _find_rank_test, (self.fn.__module__, self.__qualname__)


def _find_rank_test(module: str, name: str) -> Callable[..., None]:
    return inspect.unwrap(getattr(importlib.import_module(module), name))


def rank_context() -> Any:
    """The multiprocessing context of ranks: they are forks of a process that has imported torch."""
    context = get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    return context


def shut_down() -> None:
    """Kill every pool. Safe to call twice; also runs when the interpreter exits."""
    while _idle_pools:
        _idle_pools.popitem()[1].kill()


counts: Counter[str] = Counter()  # calls of ranks, by backend
_idle_pools: dict[tuple[int, str], _Pool] = {}
atexit.register(shut_down)


# ------------------------------------------------------------------------------ the test's side


class _Pool:
    """The processes of one process group, and a pipe to each."""

    def __init__(self, world_size: int, backend: str) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: a pool needs at least 1 rank")
        self.world_size = world_size
        self.backend = backend
        self.open_files = 0
        self.paused = False
        self.processes: list[BaseProcess] = []
        self.pipes: list[connection.Connection] = []
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def start(self) -> None:
        if self.processes:
            self.pause(False)
            return
        # The server lives here, on a port that the kernel picked, so no two pools can collide.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = rank_context()
        for rank in range(self.world_size):
            here, there = context.Pipe()
            # Not daemonic: a daemonic process could not have children (data loader workers).
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, self.backend, self.store.port, there),
                kwargs={"stack_path": self._stack_path(rank)},
                name=f"rank-{rank}-of-{self.world_size}",
            )
            with _one_thread_environment():
                process.start()
            there.close()  # so that the pipe ends when the process does
            self.processes.append(process)
            self.pipes.append(here)
        self._collect("starting the ranks", PATIENCE_SECONDS)

    def pause(self, paused: bool = True) -> None:
        """Stop the ranks while other pools work, or let them go on: gloo's thread wakes 100 times a
        second, and the idle ranks of a session took a fiftieth of the machine."""
        if self.paused != paused and sys.platform == "linux":
            self.paused = paused
            for process in self.processes:
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def call(self, call: bytes, name: str, timeout: float) -> list[Any]:
        for pipe in self.pipes:
            # A rank that died since the last call is reported by `_collect`.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(call)
        return self._collect(name, timeout)

    def kill(self) -> None:
        self.pause(False)
        for pipe in self.pipes:
            pipe.close()  # ranks that wait for a call end
        for process in self.processes if self.backend == "nccl" else ():
            process.join(2)  # a process that is killed may leave kernels behind
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()

    def _collect(self, name: str, timeout: float) -> list[Any]:
        """Wait for one answer from each rank; on the first failure, let the others have GRACE."""
        __tracebackhide__ = True
        started = time.monotonic()
        deadline = started + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self.pipes))
        while waiting:
            ready = connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answer = pickle.loads(waiting.pop(rank).recv_bytes())
                except (EOFError, ConnectionResetError):
                    failures[rank] = self._describe_death(rank)
                else:
                    if "traceback" in answer:
                        failures[rank] = "raised\n" + answer["traceback"]
                    else:
                        results[rank] = answer["result"]
                        self.open_files = max(self.open_files, answer["open_files"])
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not waiting and not failures:
            return [results[rank] for rank in range(self.world_size)]
        seconds = time.monotonic() - started
        cause = "failed" if failures else f"timed out ({timeout:g} s)"
        stuck = f", ranks still running: {sorted(waiting)}" if waiting else ""
        raise RanksFailed(
            f"{name} {cause} on {self.world_size} ranks{stuck}",
            dict.fromkeys(results, "returned")
            | failures
            | self._describe_running(list(waiting), seconds),
        )

    def _describe_death(self, rank: int) -> str:
        self.processes[rank].join(5)
        code = self.processes[rank].exitcode
        meaning = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"died, exit code {code}{meaning}\n{self._read_stacks(rank)}"

    def _describe_running(self, ranks: list[int], seconds: float) -> dict[int, str]:
        """Have each rank write its stacks; faulthandler does so even inside a blocked C call."""
        for rank in ranks:
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        while time.monotonic() < until and not all(self._has_answered(rank) for rank in ranks):
            time.sleep(0.02)
        return {
            rank: f"still running after {seconds:.1f} s\n"
            + (self._read_stacks(rank) or "(it did not answer with its stacks)")
            for rank in ranks
        }

    def _has_answered(self, rank: int) -> bool:
        """Whether the stacks of a rank are whole. The file begins before the last line is written;
        the thread that writes has the signal blocked until then."""
        process = self.processes[rank]
        if not process.is_alive():
            return True
        if not self._read_stacks(rank):
            return False
        blocked = 0
        for path in Path(f"/proc/{process.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # a thread that has ended
                blocked |= int(re.findall(r"SigBlk:\s+(\w+)", path.read_text())[0], 16)
        return not blocked >> signal.SIGUSR1 - 1 & 1

    def _stack_path(self, rank: int) -> str:
        return str(Path(self.folder.name) / f"stacks-{rank}.txt")

    def _read_stacks(self, rank: int) -> str:
        path = Path(self._stack_path(rank))
        return path.read_text(errors="replace") if path.exists() else ""


def _pack_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    if "<" in fn.__qualname__:
        raise ValueError(
            f"{fn.__qualname__} can't be sent to another process: "
            "make it a function at the top level of its module and pass what it needs as arguments"
        )
    # Plain pickle, not multiprocessing's: that one would share tensors between processes.
    return pickle.dumps((fn, args))


@contextlib.contextmanager
def _one_thread_environment() -> Iterator[None]:
    """Set the variables that a child must find before it imports torch, while it starts."""
    ours = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if sys.platform == "linux":
        # Otherwise gloo resolves the host's name, which can be slow or fail in a container.
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ------------------------------------------------------------------------------ the rank's side


def _serve(
    rank: int,
    world_size: int,
    backend: str,
    port: int,
    pipe: connection.Connection,
    *,
    stack_path: str,
) -> None:
    """A rank's life: join the group, then answer calls until killed or until the test ends."""
    # Ctrl-C reaches the whole terminal; the test process decides and kills us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent()
    exit_with_fork_server()
    with open(stack_path, "w") as stacks:
        faulthandler.enable(stacks)  # a segmentation fault leaves its stack
        faulthandler.register(signal.SIGUSR1, stacks)
        torch.set_num_threads(1)
        keep_one_product()
        if sys.platform == "linux":
            share_gloo_thread()
        if backend == "nccl" and ranks_device() == "cuda":
            join_one_card(rank)

        def join() -> None:
            # A connection to the server that the test process holds: no rank is the master.
            dist.init_process_group(
                backend,
                store=dist.TCPStore("127.0.0.1", port, is_master=False),
                rank=rank,
                world_size=world_size,
                # Longer than any test: a hang is reported by the pool, with stacks.
                timeout=datetime.timedelta(minutes=20),
            )
            collect_garbage()

        _answer(pipe, join)
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                break
            _answer(pipe, lambda message=message: _run(message, rank, world_size))
            collect_garbage()


def _run(message: bytes, rank: int, world_size: int) -> object:
    fn, args = pickle.loads(message)  # inside `_answer`: a failing import is reported too
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    notices._warned.clear()
    with put_back(), on_device(device_type()):
        return _as_plain_values(fn(rank, world_size, *args))


def _answer(pipe: connection.Connection, work: Callable[[], object]) -> None:
    try:
        packed = pickle.dumps({"result": work(), "open_files": _count_open_files()})
    except BaseException as error:  # SystemExit and pytest's outcomes too: the test must hear of it
        packed = pickle.dumps({"traceback": _format(error)})
    pipe.send_bytes(packed)


def _as_plain_values(value: Any) -> Any:
    """Tensors become compact CPU copies, so that a view does not drag its whole storage along."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"a rank can't return a {type(value).__name__}, which means something only there: "
                "return its to_local() or full_tensor()"
            )
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _as_plain_values(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_plain_values(item) for item in value)
    return value


def _format(error: BaseException) -> str:
    """The traceback; for a bare `assert`, also the small values around it.

    Tensors are described, never read: their storage may have been released.
    """
    text = "".join(traceback.format_exception(error))
    frame = error.__traceback__
    if not isinstance(error, AssertionError) or error.args or frame is None:
        return text
    while frame.tb_next is not None:
        frame = frame.tb_next
    lines = []
    for name, value in frame.tb_frame.f_locals.items():
        if isinstance(value, torch.Tensor):
            lines.append(f"    {name} = {type(value).__name__} {tuple(value.shape)} {value.dtype}")
        elif isinstance(value, (int, float, str, torch.dtype, torch.Size)):
            lines.append(f"    {name} = {value!r:.200}")
    return text + "where\n" + "\n".join(lines) + "\n" if lines else text


def _count_open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
