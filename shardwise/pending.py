# SPDX-License-Identifier: Apache-2.0
"""A collective under way, and how to wait for it.

issued        NCCL: the result is usable at once, by later work on the stream that issued it
under way     gloo: messages travel; while a step is recorded, a thread notes when they arrive
wait()        the result is usable by work that the caller issues next
exit          messages under way are waited for, for a while: peers may still need them
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from shardwise import lockstep, streams

# Long enough for messages to and from peers that run. Short enough if a peer hangs: a launcher that
# restarts a failed run waits until this process has ended.
EXIT_SECONDS = 10.0


class Pending:
    """A collective under way. ``wait`` makes its result usable by work that the caller issues next.

    With NCCL the result is usable at once on the stream that issued it, and ``wait`` does nothing.
    With gloo ``wait`` blocks the host until the messages have arrived, then runs the local rest.
    """

    __slots__ = ("__weakref__", "_finish", "_ticket", "_what", "_works")

    def __init__(
        self,
        what: str = "",
        works: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
        ticket: lockstep.Ticket | None = None,
    ) -> None:
        self._what, self._works, self._finish, self._ticket = what, works, finish, ticket
        if works:
            _under_way.add(self)

    def wait(self) -> None:
        works, finish = self._works, self._finish
        if not works and finish is None:
            return
        self._works, self._finish = (), None
        with streams.stalling(self._what):
            try:
                with lockstep.watched(self._ticket, works):
                    for work in works:
                        work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{self._what} failed: {error}") from error
            if finish is not None:
                finish()

    def then(self, finish: Callable[[], None]) -> Pending:
        """This collective with ``finish`` as its local rest; without messages it runs at once."""
        if not self._what:
            finish()
        else:
            self._finish = finish
        return self

    def land(self, timeout: timedelta) -> None:
        """Wait for the messages only, ``timeout`` at most for each; the local rest is dropped."""
        works, self._works, self._finish = self._works, (), None
        for work in works:
            work.wait(timeout)

    def __del__(self) -> None:
        # Dropped, perhaps with its model: without a waiter gloo would cancel the messages. While
        # the interpreter shuts down a new thread never runs, and starting one would block.
        if self._works and not sys.is_finalizing():
            Flight(self._works, lambda: None)


class Flight:
    """Messages with a thread that waits for them and calls ``landed``: only a wait finds out when
    they have arrived, and the caller may wait later, or never."""

    def __init__(self, works: Sequence[Any], landed: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(works, landed), daemon=True)
        self._thread.start()
        _under_way.add(self)  # alive until the thread ends, because the thread holds this object

    def _run(self, works: Sequence[Any], landed: Callable[[], None]) -> None:
        try:
            for work in works:
                work.wait()
            landed()
        except Exception as error:
            self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._error is not None:
            raise self._error

    land = wait


_under_way: WeakSet[Pending | Flight] = WeakSet()


@atexit.register
def _land_all() -> None:
    """Before the interpreter shuts down, let messages arrive while threads and peers exist."""
    deadline = time.monotonic() + EXIT_SECONDS
    for pending in list(_under_way):
        left = max(deadline - time.monotonic(), 0.001)  # 0 would mean "no limit" to gloo
        with suppress(RuntimeError):  # a peer is gone or late: this process ends all the same
            pending.land(timedelta(seconds=left))
