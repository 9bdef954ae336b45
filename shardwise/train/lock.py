# SPDX-License-Identifier: Apache-2.0
"""A lock on a run's folder: one run writes there at a time.

    runs/default/.lock     {"host": "node1", "pid": 4711, "launch": "3f2a..."}

The first rank holds it (``flock``) from before it writes anything until its process ends; then the
kernel releases it, however the process ended. The file itself stays: only the lock counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from shardwise.train.world import launch_name

logger = logging.getLogger(__name__)

LOCK = ".lock"
# What file systems answer that have no locks (Lustre without -o flock, NFS without lockd).
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """Held from construction on; a ``ValueError`` names the process that holds it already."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if self._take() and not self._is_current():
                os.close(self._file)  # removed between open and flock: lock its successor
                continue
            break
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "launch": launch_name()}
        with contextlib.suppress(OSError):  # a full disk: the lock holds, its owner has no name
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(owner).encode(), 0)
            os.fsync(self._file)

    def _take(self) -> bool:
        """Whether the lock is held now; not where the file system has none."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(
                    "%s: this file system cannot lock files (%s), so nothing keeps a second run "
                    "out of the folder: start only one there",
                    self.path.parent,
                    error.strerror,
                )
                return False
            os.close(self._file)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise ValueError(
                f"{self.path.parent} belongs to a run that is still going on "
                f"({describe(self.path.parent)}): wait for it, end it, or name another folder "
                f"with --out"
            ) from None
        return True

    def _is_current(self) -> bool:
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._file))

    def release(self) -> None:
        os.close(self._file)


def last_owner(folder: Path) -> dict[str, Any]:
    """Who locked a run's folder last; nothing where nobody did, or nobody can tell."""
    try:
        found = json.loads((folder / LOCK).read_bytes()[:4096])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe(folder: Path) -> str:
    owner = last_owner(folder)
    return f"pid {owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}"
