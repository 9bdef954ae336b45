# SPDX-License-Identifier: Apache-2.0
"""A collective under way, and how to wait for it.

issued        NCCL: usable at once, by what follows on the stream that issued it
under way     gloo: messages; where somebody watches, a thread sees them land
wait()        usable by whatever the caller issues next
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shardwise import streams


class Pending:
    """A collective under way. ``wait`` makes its result usable by what the caller issues next.

    On NCCL that is already so on the stream that issued it, and ``wait`` does nothing. On gloo it
    blocks the host until the messages are through, then runs what is left to do locally.
    """

    __slots__ = ("_finish", "_what", "_works")

    def __init__(
        self,
        what: str = "",
        works: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._what, self._works, self._finish = what, works, finish

    def wait(self) -> None:
        works, finish = self._works, self._finish
        if not works and finish is None:
            return
        self._works, self._finish = (), None
        with streams.stalling(self._what):
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{self._what} failed: {error}") from error
            if finish is not None:
                finish()

    def then(self, finish: Callable[[], None]) -> Pending:
        """The same, with something left to do locally; at once where nothing is under way."""
        if not self._works:
            finish()
        else:
            self._finish = finish
        return self

    def __del__(self) -> None:
        if self._works:  # dropped, with a model perhaps: gloo would take its messages back
            with suppress(RuntimeError):  # the interpreter is going down, and they with it
                Flight(self._works, lambda: None)


class Flight:
    """Messages that somebody watches: a thread of their own waits for them, because only waiting
    tells when they are through, and the caller waits later than that, or not yet, or never."""

    def __init__(self, works: Sequence[Any], landed: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(works, landed), daemon=True)
        self._thread.start()

    def _run(self, works: Sequence[Any], landed: Callable[[], None]) -> None:
        try:
            for work in works:
                work.wait()
            landed()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
