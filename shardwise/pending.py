# SPDX-License-Identifier: Apache-2.0
"""A collective under way, and how to wait for it.

issued        NCCL: usable at once, by what follows on the stream that issued it
under way     gloo: messages; where somebody watches, a thread sees them land
wait()        usable by whatever the caller issues next
exit          what is under way then is waited for, for a while: peers may still read from it
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

# Long for messages that peers have sent or will read; short where a peer hangs, because whoever
# restarts a failed run waits for this process to end.
EXIT_SECONDS = 10.0


class Pending:
    """A collective under way. ``wait`` makes its result usable by what the caller issues next.

    On NCCL that is already so on the stream that issued it, and ``wait`` does nothing. On gloo it
    blocks the host until the messages are through, then runs what is left to do locally.
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
        """The same, with something left to do locally; at once where there are no messages."""
        if not self._what:
            finish()
        else:
            self._finish = finish
        return self

    def land(self, timeout: timedelta) -> None:
        """Wait for the messages alone, ``timeout`` at most for each; nothing is done with them."""
        works, self._works, self._finish = self._works, (), None
        for work in works:
            work.wait(timeout)

    def __del__(self) -> None:
        # Dropped, with a model perhaps: gloo would take its messages back. A thread that is started
        # while the interpreter shuts down never runs, and whoever starts it waits for that.
        if self._works and not sys.is_finalizing():
            Flight(self._works, lambda: None)


class Flight:
    """Messages that somebody watches: a thread of their own waits for them, because only waiting
    tells when they are through, and the caller waits later than that, or not yet, or never."""

    def __init__(self, works: Sequence[Any], landed: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(works, landed), daemon=True)
        self._thread.start()
        _under_way.add(self)  # alive until the thread ends: it holds this object

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
    """The interpreter shuts down: let messages land while threads and peers are still there."""
    deadline = time.monotonic() + EXIT_SECONDS
    for one in list(_under_way):
        left = max(deadline - time.monotonic(), 0.001)  # gloo takes 0 for "without end"
        with suppress(RuntimeError):  # a peer is gone, or late: this process ends all the same
            one.land(timedelta(seconds=left))
