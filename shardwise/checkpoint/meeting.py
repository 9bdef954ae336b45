# SPDX-License-Identifier: Apache-2.0
"""A save in progress, from the temporary directory to the rename, over any number of ranks.

    rank 0   tensors, fsync | done-00000 | lists until all are done | manifest | rename | end
    rank 1   tensors, fsync | done-00001 | ............. looks for the end .............. |

Ranks communicate through files in the directory. A collective from the background thread would mix
with the collectives of training on the main thread. A second communicator would keep them apart,
but it needs sockets or another NCCL, for an event every few minutes whose data are on a shared file
system anyway. Without collectives, no rank can hang another.

Rank 0 alone lists the directory. The others look for one name, ``end``, which is empty in a
checkpoint whose name is on the disk, and else holds the reason and the rank of a failure. A rank
that fails removes its tensors, which makes room on a full disk, and leaves a file ``failed-*`` with
the reason; rank 0 writes the end. If there is no room for that, it renames the directory, and the
others give up.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.errors import SaveError
from shardwise.checkpoint.files import rank_file, sync_directory

EXIT_SECONDS = 60.0  # how long a rank waits for the others after its main thread has ended
_LONGEST_PAUSE = 2.0
_LATE_NAME = 3.0  # seconds until every file system shows a new name
GIVEN_UP = "was given up by another rank"  # the error of that rank has the reason
END = "end"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A save in progress, as one rank sees it."""

    folder: Path  # the temporary directory
    final: Path  # the name of the checkpoint
    rank: int
    world_size: int
    timeout: float  # seconds that rank 0 waits for the others

    def error(self, error: BaseException) -> SaveError:
        """The error that all ranks raise when this rank has raised ``error``."""
        if isinstance(error, SaveError):
            return error
        if isinstance(error, FileNotFoundError) and not self.folder.exists():
            return SaveError(f"the save {self.folder.name} {GIVEN_UP}")
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        return SaveError(f"the save {self.folder.name} has failed: {text}")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank failed."""
        if not self._done.exists():  # make room; with it, rank 0 may publish
            with contextlib.suppress(OSError):
                (self.folder / rank_file(self.rank)).unlink()
        name = END if self.rank == 0 else f"failed-{self.rank:05d}"
        try:
            _write(self.folder / name, str(self.error(error)))
        except OSError:  # rename the directory away from the other ranks
            with contextlib.suppress(OSError):
                os.rename(self.folder, temporary(self.final))

    def done(self, part: dict[str, Any]) -> None:
        """Tell rank 0 that the file of this rank is on the disk."""
        _write(self._done, json.dumps(part, separators=(",", ":")))

    def parts(self) -> list[dict[str, Any]]:
        """Wait until all ranks are done; return their parts (rank 0)."""
        done = {f"done-{rank:05d}": rank for rank in range(self.world_size)}
        missing: list[int] = []
        for _ in self._again(lambda: f"ranks {missing[:20]} to write their part", self.timeout):
            names = {*os.listdir(self.folder)}
            if failed := sorted(name for name in names if name.startswith("failed-")):
                raise SaveError("; ".join((self.folder / name).read_text() for name in failed))
            if not (missing := [rank for name, rank in done.items() if name not in names]):
                break
        return [json.loads((self.folder / name).read_bytes()) for name in done]

    def publish(self, write_manifest: Callable[[], None]) -> Path:
        """Make the directory a checkpoint (rank 0): manifest, fsync, rename, fsync, end."""
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
            (self.final / END).touch()
        except OSError:  # the name may be lost in a power failure: nobody may count on it
            os.rename(self.final, self.folder)
            raise
        return self.final

    def outcome(self) -> Path:
        """Wait until rank 0 has published the checkpoint; return its path (the other ranks)."""
        gone = None
        late = 1.25 * self.timeout + 5  # rank 0 names the ranks that are missing
        for _ in self._again(lambda: "rank 0 to finish the checkpoint", late):
            for folder in (self.folder, self.final):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    if text := (folder / END).read_text():
                        raise SaveError(text)
                    return self.final
            if not self.folder.exists() and not self.final.exists():
                gone = gone or time.monotonic()
                if time.monotonic() - gone > _LATE_NAME:
                    break
        raise SaveError(f"the save {self.folder.name} {GIVEN_UP}")

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


def temporary(final: Path) -> Path:
    """A new name beside ``final``, for what no reader may see: unfinished, failed, or removed."""
    return final.with_name(f"{final.name}.tmp-{secrets.token_hex(8)}")
