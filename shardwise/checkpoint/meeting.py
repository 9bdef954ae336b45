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
that fails removes its tensors, which makes room on a full disk, and is done, with the reason. If
there is no room for that either, it renames the directory, and the others give up.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardwise.checkpoint.errors import SaveError
from shardwise.checkpoint.files import rank_file, sync_directory
from shardwise.checkpoint.values import dtype_name

T = TypeVar("T")
log = logging.getLogger(__name__)
_LONGEST_PAUSE = 2.0
_EXIT_SECONDS = 60.0  # how long a process that has ended waits for the other ranks
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

    def fail(self, error: BaseException) -> SaveError:
        """Tell the other ranks that this rank failed; return the error that all raise."""
        said = self.error(error)
        try:
            if not self._done(self.rank).exists():  # make room; with it, rank 0 may publish
                (self.folder / rank_file(self.rank)).unlink(missing_ok=True)
            if self.rank == 0:
                _write(self.folder / END, str(said))
            else:
                self.done({"error": str(said)})
        except OSError:  # rename the directory away from the other ranks
            with contextlib.suppress(OSError):
                os.rename(self.folder, temporary(self.final))
        return said

    def done(self, part: dict[str, Any]) -> None:
        """Tell rank 0 that the file of this rank is on the disk."""
        text = json.dumps(part, separators=(",", ":"), default=dtype_name)
        _write(self._done(self.rank), text)

    def parts(self) -> list[dict[str, Any]]:
        """Wait until all ranks are done; return their parts (rank 0)."""
        missing = list(range(self.world_size))

        def look() -> bool | None:
            names = {*os.listdir(self.folder)}
            missing[:] = [rank for rank in missing if self._done(rank).name not in names]
            return not missing or None

        self._until(look, lambda: f"ranks {missing[:20]} to write their part", self.timeout)
        parts = [json.loads(self._done(rank).read_bytes()) for rank in range(self.world_size)]
        if failed := [part["error"] for part in parts if "error" in part]:
            raise SaveError("; ".join(failed))
        return parts

    def publish(self, write_manifest: Callable[[], None]) -> Path:
        """Make the directory a checkpoint (rank 0): manifest, fsync, rename, fsync, end."""
        for rank in range(self.world_size):
            self._done(rank).unlink()
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
        gone: list[float] = []

        def look() -> Path | None:
            for folder in (self.folder, self.final):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    if text := (folder / END).read_text():
                        raise SaveError(text)
                    return self.final
            if not self.folder.exists() and not self.final.exists():
                gone.append(time.monotonic())
                if gone[-1] - gone[0] > _LATE_NAME:
                    raise SaveError(f"the save {self.folder.name} {GIVEN_UP}")
            return None

        late = 1.25 * self.timeout + 5  # rank 0 names the ranks that are missing
        return self._until(look, lambda: "rank 0 to finish the checkpoint", late)

    def _until(self, look: Callable[[], T | None], what: Callable[[], str], timeout: float) -> T:
        """Look again and again, after longer and longer pauses, until the deadline."""
        end, pause = time.monotonic() + timeout, 0.001
        while (found := look()) is None:
            if not threading.main_thread().is_alive():
                end = min(end, time.monotonic() + _EXIT_SECONDS)
            if time.monotonic() > end:
                raise SaveError(
                    f"waited in vain for {what()} ({self.folder}): see whether that rank is alive, "
                    f"and whether all ranks see this folder"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return found

    def _done(self, rank: int) -> Path:
        return self.folder / f"done-{rank:05d}"


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


def remove_temporary(parent: Path, name: str = "") -> None:
    """Remove what has a ``temporary`` name, of one checkpoint or of all. Nobody may write there."""
    for path in parent.glob(f"{glob.escape(name) or '*'}.tmp-*"):
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("%s can't be removed, and stays for now: %s", path, error)
