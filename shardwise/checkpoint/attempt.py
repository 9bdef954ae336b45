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
fails removes its tensors, which makes room on a full disk, and leaves a file ``failed-*`` with the
reason; rank 0 writes the end. If there is no room for that, it renames the directory, and the
others give up.

The name of a temporary directory contains the process that made it, so that another process can
see whether it still runs:

    step-000300.tmp-1a2b3c4d-4711-9f8e7d6c-55e1
                    machine  pid  process  this save
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from shardwise.checkpoint.files import rank_file, sync_directory

EXIT_SECONDS = 60.0  # how long a rank waits for the others after its main thread has ended
_LONGEST_PAUSE = 2.0
_LATE_NAME = 3.0  # seconds until every file system shows a new name
GIVEN_UP = "was given up by another rank"  # the error of that rank has the reason
END = "end"
MARK = "writing"  # of rank 0: stays until the new name of the checkpoint is on the disk


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

    def error(self, error: BaseException) -> SaveError:
        """The error that all ranks raise when this rank has raised ``error``."""
        if isinstance(error, SaveError):
            return error
        if isinstance(error, FileNotFoundError) and not self.folder.exists():
            return self.given_up()
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        return SaveError(f"the save {self.identity} has failed: {text}")

    def given_up(self) -> SaveError:
        return SaveError(f"the save {self.identity} {GIVEN_UP}")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed."""
        if not self._done.exists():  # make room; with it, rank 0 may publish
            with contextlib.suppress(OSError):
                (self.folder / rank_file(self.rank)).unlink()
        folder = self.final if self.rank == 0 and not self.folder.exists() else self.folder
        name = END if self.rank == 0 else f"failed-{self.rank:05d}"
        try:
            _write(folder / name, str(self.error(error)))
        except OSError:  # rename the directory away from the other ranks
            with contextlib.suppress(OSError):
                os.rename(folder, temporary(self.final, "trash"))

    def done(self, part: dict[str, Any]) -> None:
        """Tell rank 0 that the file of this rank is on the disk."""
        _write(self._done, json.dumps(part, separators=(",", ":")))

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
            if failed := sorted(name for name in names if re.fullmatch(r"failed-\d+", name)):
                raise SaveError("; ".join((self.folder / name).read_text() for name in failed))
            for name in names:
                missing.pop(name, None)
            if not missing:
                done = (self.folder / f"done-{rank:05d}" for rank in range(self.world_size))
                return [json.loads(file.read_text()) for file in done]
        raise self.given_up()

    def publish(self, write_manifest: Callable[[], None]) -> Path:
        """Make the directory a checkpoint (rank 0): manifest, fsync, rename, fsync, end."""
        (self.folder / MARK).touch()
        for rank in range(self.world_size):
            (self.folder / f"done-{rank:05d}").unlink()
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
        raise self.given_up()

    def _raise_end(self, folder: Path) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            raise SaveError((folder / END).read_text())

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

    @property
    def _done(self) -> Path:
        return self.folder / f"done-{self.rank:05d}"


def _write(path: Path, text: str) -> None:
    """Write a file that no other rank sees half."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def is_taken(path: Path) -> bool:
    """Whether anything but an empty directory has this name."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


# ------------------------------------------------------------------------------ temporary names

_NAME = re.compile(r".+\.(?P<kind>tmp|trash)-(?P<machine>\w+)-(?P<pid>\d+)-(?P<process>\w+)-\w+")
_PROCESS = secrets.token_hex(4)  # tells this process from an earlier one with the same pid
# A save on another machine that has not touched its files for this long has ended.
ABANDONED_SECONDS = 24 * 3600.0


def temporary(final: Path, kind: str = "tmp") -> Path:
    """A new name beside ``final`` that contains this process."""
    process = f"{_machine()}-{os.getpid()}-{_PROCESS}"
    return final.with_name(f"{final.name}.{kind}-{process}-{secrets.token_hex(2)}")


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
    if match is None or match["kind"] == "trash":
        return match is not None
    with contextlib.suppress(PermissionError, FileNotFoundError):
        if match["machine"] != _machine():
            newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
            return time.time() - newest > ABANDONED_SECONDS
        try:
            os.kill(int(match["pid"]), 0)  # a question
        except ProcessLookupError:
            return True
        return int(match["pid"]) == os.getpid() and match["process"] != _PROCESS
    return False  # it runs, as another user


@cache
def _machine() -> str:
    """A hash of host, boot and process namespace: a pid is unique in these only."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
