# SPDX-License-Identifier: Apache-2.0
"""One save under way, from the temporary directory to the rename, over any number of ranks.

    rank 0   tensors, fsync | done-00000.json | ... sees every done-* | .metadata, manifest | rename
    rank 1   tensors, fsync | done-00001.json | ............... waits for the rename ............. |

The ranks meet in the directory itself. A collective would have to come from a background thread,
beside those of the training on the main thread; a communicator of its own would keep them apart,
but needs sockets or a second NCCL for something that happens once in minutes and whose data lie in
a shared file system anyway. So there is no collective, and no rank can hang another.

A rank that fails renames its ``writing-*`` to ``failed-*`` (which takes no space on a full disk),
or the whole directory where it could not even make that file, and all others stop. The launcher or
the timeout notices a rank that dies.

The name of a temporary directory says which process made it, so that no process removes the
directory of a living one:

    step-000300.tmp-1a2b3c4d-4711-8812736-9f8e7d6c
                    machine  pid  start   this save

``machine`` stands for host, boot and process namespace, in which a pid has a meaning. ``start``
tells a process from a later one with the same pid.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.checkpoint.errors import CheckpointError, SaveError
from shardwise.checkpoint.files import naming, sync_directory
from shardwise.checkpoint.manifest import Manifest

log = logging.getLogger(__name__)

EXIT_SECONDS = 60.0  # how long a process that wants to end still waits for the other ranks
_LONGEST_PAUSE = 0.1
_REASON_BYTES = 1024  # kept for the reason of a rank that fails, as the disk may be full then
GIVEN_UP = "was given up by another rank"  # whose own error says why


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A rank's view of a save that has begun."""

    folder: Path  # temporary
    finals: Callable[[], Iterable[Path]]  # the names that the checkpoint may get, in order
    rank: int
    world_size: int
    timeout: float

    @property
    def identity(self) -> str:
        return self.folder.name

    def begin(self) -> None:
        with naming(self._marker("writing")) as marker:
            marker.write_bytes(b" " * _REASON_BYTES)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks: the reason is written before the name that they look for, so a
        rank that sees the name can read it. ``begin`` has made room for it, on a full disk too."""
        writing = self._marker("writing")
        with contextlib.suppress(OSError), writing.open("r+b", buffering=0) as file:
            file.write(f"{type(error).__name__}: {error}".encode())
        try:
            writing.replace(self._marker("failed"))
        except OSError:  # no marker could be made: take the directory away from the others
            with contextlib.suppress(OSError):
                os.rename(self.folder, temporary(self.folder, "trash"))

    def done(self, part: dict[str, Any]) -> None:
        """Say that this rank's files are on the disk, and which."""
        final = self._done(self.rank)
        with naming(final.with_suffix(".partial")) as partial:
            partial.write_text(json.dumps(part))
        partial.replace(final)  # whole or not there

    def parts(self) -> list[dict[str, Any]]:
        """The parts of all ranks, once all are done (rank 0)."""
        waiting: set[int] = set(range(self.world_size))
        for names in self._watch(lambda: f"ranks {sorted(waiting)} to write their part"):
            done = {rank for rank in waiting if self._done(rank).name in names}
            waiting.difference_update(done)
            if not waiting:
                break
        if waiting:
            raise SaveError(f"the save {self.identity} {GIVEN_UP}")
        everyone = range(self.world_size)
        return [json.loads(self._done(rank).read_text()) for rank in everyone]

    def publish(self, write_manifest: Callable[[], None]) -> Path:
        """Make the directory a checkpoint (rank 0): manifest, fsync, rename, fsync."""
        for entry in self.folder.iterdir():
            if entry.name.startswith(("done-", "writing-")):
                entry.unlink()
        sync_directory(self.folder)  # the names of all ranks' files
        write_manifest()
        sync_directory(self.folder)
        for final in self.finals():
            if is_taken(final):
                continue
            try:
                os.rename(self.folder, final)
            except OSError:
                if is_taken(final):  # since a moment ago
                    continue
                raise
            sync_directory(final.parent)
            return final
        raise SaveError(f"{next(iter(self.finals()))} is there already and is not overwritten")

    def outcome(self) -> Path:
        """The checkpoint's final place, once rank 0 has renamed it (the other ranks)."""
        for _ in self._watch(lambda: "rank 0 to finish the checkpoint"):
            pass
        return self._published()

    # ------------------------------------------------------------------ watching the directory

    def _watch(self, what: Callable[[], str]) -> Iterator[set[str]]:
        """Yield the names in the directory again and again, until the directory is gone."""
        began, pause, leaving = time.monotonic(), 0.001, None
        while True:
            try:
                names = set(os.listdir(self.folder))
            except FileNotFoundError:
                return
            failed = sorted(name for name in names if name.startswith("failed-"))
            if failed:
                raise SaveError(f"the save {self.identity} has failed: {self._reasons(failed)}")
            yield names
            now = time.monotonic()
            if leaving is None and not threading.main_thread().is_alive():
                leaving = now
            if now - began > self.timeout or (leaving and now - leaving > EXIT_SECONDS):
                raise SaveError(f"waited {now - began:.0f} s in vain for {what()} ({self.folder})")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _published(self) -> Path:
        for final in self.finals():
            with contextlib.suppress(CheckpointError):
                if Manifest.read(final).identity == self.identity:
                    return final
        raise SaveError(
            f"the save {self.identity} was given up: its directory is gone and no checkpoint "
            f"was published; rank 0 says why"
        )

    def _reasons(self, failed: list[str]) -> str:
        reasons = []
        for name in failed:
            text = ""
            with contextlib.suppress(OSError):
                text = (self.folder / name).read_text(errors="replace").strip()
            number = int(name.removeprefix("failed-"))
            reasons.append(f"rank {number}: {text or 'no reason could be written'}")
        return "; ".join(reasons)

    def _marker(self, word: str) -> Path:
        return self.folder / f"{word}-{self.rank:05d}"

    def _done(self, rank: int) -> Path:
        return self.folder / f"done-{rank:05d}.json"


def is_taken(path: Path) -> bool:
    """Whether anything but an empty directory has this name."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


# ------------------------------------------------------------------------------ temporary names

_NAME = re.compile(
    r"(?P<final>.+)\.(?P<kind>tmp|trash)-(?P<process>[0-9a-f]{8}-\d+-\d+)-[0-9a-f]{8}"
)
# A save on another machine that has not touched its files for so long has ended.
ABANDONED_SECONDS = 24 * 3600.0


def temporary(final: Path, kind: str = "tmp") -> Path:
    """A new name beside ``final`` that says which process made it."""
    process = f"{_machine()}-{os.getpid()}-{_start(os.getpid())}"
    return final.with_name(f"{final.name}.{kind}-{process}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is whole, and is removed if anything fails."""
    folder = temporary(final)
    folder.mkdir(parents=True)
    try:
        yield folder
        sync_directory(folder)
        os.rename(folder, final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_directory(final.parent)


def is_abandoned(path: Path) -> bool:
    """Whether a temporary directory can be removed: no process will ever finish it."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    if match["kind"] == "trash":
        return True
    machine, process, start = match["process"].split("-")
    if machine == _machine():
        return _start(int(process)) != int(start)
    return time.time() - _last_touched(path) > ABANDONED_SECONDS


def _last_touched(path: Path) -> float:
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = path.stat().st_mtime
        for entry in os.scandir(path):
            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest


@cache
def _machine() -> str:
    parts = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            link = os.path.islink(source)
            parts.append(os.readlink(source) if link else Path(source).read_text().strip())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _start(process: int) -> int:
    """The start time of a process in ticks of the kernel, or 0 if it does not run.

    Without /proc, 1 for a process that lives: a pid used again then counts as the first process.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
        # The name in parentheses may hold anything; fields count from the last parenthesis.
        fields = text[text.rindex(")") + 2 :].split()
        return 0 if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return 0
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 0
    except OSError:
        return 1
    return 1
