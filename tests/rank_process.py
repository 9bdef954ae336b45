# SPDX-License-Identifier: Apache-2.0
"""The process of a rank: how it ends with the tests, gloo's thread, what calls leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection, forkserver, parent_process
from typing import Any

import torch.distributed as dist


def exit_with_parent() -> None:
    """End this process with the test process, even if it was killed while we hang in C."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def exit_with_fork_server() -> None:
    """End this process with the one that it is a fork of, which ends with the test process: a rank
    that is stopped cannot notice, and the kernel ends it (PR_SET_PDEATHSIG). The fork server ends
    when nobody holds the pipe that says who may still ask it for a process; every fork has it."""
    if sys.platform == "linux":
        server = forkserver._forkserver
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = None
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def share_gloo_thread() -> None:
    """One thread of gloo for all groups of this process. Each group has its own otherwise, which
    wakes 100 times a second for as long as the process lives: hundreds of them took half of the
    machine while their ranks waited for the next test.

    The thread polls while another one of this process holds the lock of a connection. Where that
    one waits for a core, polling took a fifth of the CPU time of all ranks: the scheduler lets
    threads of a higher "nice" value wait instead."""
    gloo, before = dist.ProcessGroupGloo, os.listdir("/proc/self/task")
    device, real = gloo.create_device(interface="lo"), gloo.__init__
    for thread in {*os.listdir("/proc/self/task")}.difference(before):
        os.setpriority(os.PRIO_PROCESS, int(thread), 10)

    def shared(
        self: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta, **_: Any
    ) -> None:  # torch 2.15 passes more
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        real(self, store, rank, size, options)

    gloo.__init__ = shared


_seen: set[str] = set()  # modules of the package
_callables: list[tuple[dict[str, Any], list[str], list[Any]]] = []  # by module: all, names, values


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Put back what a call replaced in the modules of the package: the next test has these ranks
    too."""
    if len(sys.modules) != len(_seen):
        for module in [name for name in sys.modules.keys() - _seen if name.startswith("shardwise")]:
            names = vars(sys.modules[module])
            found = {name: value for name, value in names.items() if callable(value)}
            _callables.append((names, list(found), list(found.values())))
        _seen.update(sys.modules)
    try:
        yield
    finally:
        for names, keys, values in _callables:
            if list(map(names.get, keys)) != values:
                names.update(zip(keys, values, strict=True))


def collect_garbage() -> None:
    """Collect, then let later collections skip what is left: torch's own half million objects,
    and modules that tests import one after the other."""
    gc.collect()
    gc.freeze()
