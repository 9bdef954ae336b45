# SPDX-License-Identifier: Apache-2.0
"""A save in progress, from the temporary directory to the rename, over any number of ranks.

    rank 0   tensors, fsync | done-00000.json | ... sees every done-* | .metadata, manifest | rename
    rank 1   tensors, fsync | done-00001.json | ............... waits for the rename ............. |

Ranks communicate through files in the directory. A collective from the background thread would mix
with the collectives of training on the main thread. A second communicator would keep them apart,
but it needs sockets or another NCCL, for an event every few minutes whose data are on a shared file
system anyway. Without collectives, no rank can hang another.

A rank that fails renames its ``writing-*`` to ``failed-*`` (which takes no space on a full disk).
If it could not even make that file, it renames the whole directory. The other ranks see this and
stop. The launcher or the timeout notices a rank that dies.

The name of a temporary directory contains the process that made it. No process removes the
directory of a process that still runs:

    step-000300.tmp-1a2b3c4d-4711-8812736-9f8e7d6c
                    machine  pid  start   this save

``machine`` is a hash of host, boot and process namespace: a pid is unique in these only. ``start``
distinguishes a process from a later one with the same pid.
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

EXIT_SECONDS = 60.0  # how long a rank waits for the others after its main thread has ended
_LONGEST_PAUSE = 0.1
_REASON_BYTES = 1024  # reserved for the reason of a failure: the disk may be full by then
GIVEN_UP = "was given up by another rank"  # the error of that rank has the reason


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A save in progress, as one rank sees it."""

    folder: Path  # the temporary directory
    finals: Callable[[], Iterable[Path]]  # names for the checkpoint: the first free one is taken
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
        """Tell the other ranks that this rank failed. The reason is written before the file gets
        the name that they look for, so they can always read the reason. ``begin`` has reserved the
        space for it, in case the disk is full."""
        writing = self._marker("writing")
        with contextlib.suppress(OSError), writing.open("r+b", buffering=0) as file:
            file.write(f"{type(error).__name__}: {error}".encode())
        try:
            writing.replace(self._marker("failed"))
        except OSError:  # there is no marker: rename the directory away from the other ranks
            with contextlib.suppress(OSError):
                os.rename(self.folder, temporary(self.folder, "trash"))

    def done(self, part: dict[str, Any]) -> None:
        """Tell rank 0 that the files of this rank are on the disk. ``part`` lists them."""
        final = self._done(self.rank)
        with naming(final.with_suffix(".partial")) as partial:
            partial.write_text(json.dumps(part))
        partial.replace(final)  # so that rank 0 never reads half of the file

    def parts(self) -> list[dict[str, Any]]:
        """Wait until all ranks are done; return their parts (rank 0)."""
        ranks = range(self.world_size)
        waiting = set(ranks)
        for names in self._watch(lambda: f"ranks {sorted(waiting)} to write their part"):
            waiting.difference_update([r for r in waiting if self._done(r).name in names])
            if not waiting:
                return [json.loads(self._done(rank).read_text()) for rank in ranks]
        raise SaveError(f"the save {self.identity} {GIVEN_UP}")

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
                if is_taken(final):  # another process was quicker
                    continue
                raise
            sync_directory(final.parent)
            return final
        raise SaveError(
            f"{next(iter(self.finals()))} exists already and is not overwritten: remove it, or "
            f"save to another place"
        )

    def outcome(self) -> Path:
        """Wait until rank 0 has renamed the directory; return its new path (the other ranks)."""
        for _ in self._watch(lambda: "rank 0 to finish the checkpoint"):
            pass
        for final in self.finals():
            with contextlib.suppress(CheckpointError):
                if Manifest.read(final).identity == self.identity:
                    return final
        raise SaveError(
            f"the save {self.identity} was given up: its directory is gone and no checkpoint "
            f"was published; the error of rank 0 has the reason"
        )

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
                raise SaveError(
                    f"waited {now - began:.0f} s in vain for {what()} ({self.folder}): see whether "
                    f"that rank is alive, and whether all ranks see this folder"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

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
# A save on another machine that has not touched its files for this long has ended.
ABANDONED_SECONDS = 24 * 3600.0


def temporary(final: Path, kind: str = "tmp") -> Path:
    """A new name beside ``final`` that contains this process."""
    process = f"{_machine()}-{os.getpid()}-{_start(os.getpid())}"
    return final.with_name(f"{final.name}.{kind}-{process}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A temporary folder to fill. It is renamed to ``final`` at the end, or removed on an error."""
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

    Without /proc this is 1 for every running process, also for another one with the same pid.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
        # The name in parentheses may contain anything: count fields from the last parenthesis.
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
