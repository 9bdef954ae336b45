# SPDX-License-Identifier: Apache-2.0
"""A save in progress, from the temporary directory to the rename, over any number of ranks.

    rank 0   tensors, fsync | done-00000 | lists until all are done | manifest | rename | end
    rank 1   tensors, fsync | done-00001 | ............. looks for the end .............. |

Ranks communicate through files in the directory. A collective from the background thread would mix
with the collectives of training on the main thread. A second communicator would keep them apart,
but it needs sockets or another NCCL, for an event every few minutes whose data are on a shared file
system anyway. Without collectives, no rank can hang another.

Rank 0 alone lists the directory. The others look for one name, the end: the published checkpoint
without the mark of rank 0, or a file ``end`` with the reason and the rank of a failure. A rank that
fails renames its mark ``writing-*`` to ``failed-*``, which takes no space on a full disk, and rank
0 writes the end. If a rank could not even make its mark, it renames the whole directory.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.checkpoint.errors import SaveError
from shardwise.checkpoint.files import naming, rank_file, sync_directory

log = logging.getLogger(__name__)

EXIT_SECONDS = 60.0  # how long a rank waits for the others after its main thread has ended
_LONGEST_PAUSE = 2.0
_LATE_NAME = 3.0  # seconds until every file system shows a new name
_REASON_BYTES = 1024  # reserved for the reason of a failure: the disk may be full by then
GIVEN_UP = "was given up by another rank"  # the error of that rank has the reason
END = "end"
MARK = "writing-00000"  # of rank 0: stays until the new name of the checkpoint is on the disk


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A save in progress, as one rank sees it."""

    folder: Path  # the temporary directory
    final: Path  # the name of the checkpoint
    rank: int
    world_size: int
    timeout: float  # seconds that rank 0 waits for the others

    @property
    def identity(self) -> str:
        return self.folder.name

    def failed(self, reason: str) -> str:
        return f"the save {self.identity} has failed: {reason}"

    def begin(self) -> None:
        try:
            with naming(self._mark) as mark:
                mark.write_bytes(b" " * _REASON_BYTES)
        except OSError:
            if self.folder.exists():
                raise
            raise SaveError(f"the save {self.identity} {GIVEN_UP}") from None  # by another rank

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed. The reason is written before the file gets
        the name that they look for, so they can always read the reason. ``begin`` has reserved the
        space for it, in case the disk is full."""
        text = f"{type(error).__name__}: {error}"
        if not self._done.exists():  # make room for the next save; with it, rank 0 may publish
            with contextlib.suppress(OSError):
                (self.folder / rank_file(self.rank)).unlink()
        if self.rank == 0:
            text = str(error) if isinstance(error, SaveError) else self.failed(f"rank 0: {text}")
        folder = self.final if self.rank == 0 and not self.folder.exists() else self.folder
        mark = folder / self._mark.name
        with contextlib.suppress(OSError), mark.open("r+b", buffering=0) as file:
            file.write(text.encode()[:_REASON_BYTES])
        try:
            mark.replace(folder / (END if self.rank == 0 else f"failed-{self.rank:05d}"))
        except OSError:  # there is no mark: rename the directory away from the other ranks
            if self.world_size > 1:
                with contextlib.suppress(OSError):
                    os.rename(self.folder, temporary(self.folder, "trash"))

    def done(self, part: dict[str, Any]) -> None:
        """Tell rank 0 that the file of this rank is on the disk."""
        with naming(self._done.with_suffix(".partial")) as partial:
            partial.write_text(json.dumps(part, separators=(",", ":")))
        partial.replace(self._done)  # so that rank 0 never reads half of the file

    def parts(self) -> list[dict[str, Any]]:
        """Wait until all ranks are done; return their parts (rank 0)."""
        missing = {f"done-{rank:05d}": rank for rank in range(self.world_size)}

        def waiting() -> str:
            ranks = list(missing.values())
            return f"ranks {ranks if len(ranks) < 20 else f'{ranks[:20]}...'} to write their part"

        for _ in self._again(waiting, self.timeout):
            try:
                names = os.listdir(self.folder)
            except FileNotFoundError:
                break
            if failed := sorted(name for name in names if name.startswith("failed-")):
                raise SaveError(self.failed(self._reasons(failed)))
            for name in names:
                missing.pop(name, None)
            if not missing:
                done = (self.folder / f"done-{rank:05d}" for rank in range(self.world_size))
                return [json.loads(file.read_text()) for file in done]
        raise SaveError(f"the save {self.identity} {GIVEN_UP}")

    def publish(self, write_manifest: Callable[[], None]) -> Path:
        """Make the directory a checkpoint (rank 0): manifest, fsync, rename, fsync, end."""
        for entry in self.folder.iterdir():
            if entry.name.startswith(("done-", "writing-")) and entry.name != MARK:
                entry.unlink()
        sync_directory(self.folder)  # the names of all ranks' files
        write_manifest()
        sync_directory(self.folder)
        if is_taken(self.final):
            raise SaveError(f"{self.final} exists already and is not overwritten: save elsewhere")
        os.rename(self.folder, self.final)
        try:
            sync_directory(self.final.parent)
            (self.final / MARK).unlink()
        except OSError as error:  # the name may be lost in a power failure: nobody may count on it
            self.fail(error)
            os.rename(self.final, temporary(self.final, "trash"))
            raise
        return self.final

    def outcome(self) -> Path:
        """Wait until rank 0 has published the checkpoint; return its path (the other ranks)."""
        late = 1.25 * self.timeout + 5  # rank 0 names the ranks that are missing
        gone = None
        for _ in self._again(lambda: "rank 0 to finish the checkpoint", late):
            self._raise_end(self.folder)
            if self.folder.exists():
                continue
            self._raise_end(self.final)
            if (self.final / MARK).exists():
                continue
            if self.final.is_dir():
                return self.final
            gone = gone or time.monotonic()
            if time.monotonic() - gone > _LATE_NAME:
                break
        raise SaveError(f"the save {self.identity} {GIVEN_UP}: its directory is gone")

    def _raise_end(self, folder: Path) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            raise SaveError((folder / END).read_text(errors="replace").strip())

    # ------------------------------------------------------------------ waiting

    def _again(self, what: Callable[[], str], timeout: float) -> Iterator[None]:
        """Yield again and again, after longer and longer pauses, until the deadline."""
        began, pause, leaving = time.monotonic(), 0.001, None
        while True:
            yield
            now = time.monotonic()
            if leaving is None and not threading.main_thread().is_alive():
                leaving = now
            if now - began > timeout or (leaving and now - leaving > EXIT_SECONDS):
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

    @property
    def _done(self) -> Path:
        return self.folder / f"done-{self.rank:05d}"

    @property
    def _mark(self) -> Path:
        return self.folder / f"writing-{self.rank:05d}"


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
