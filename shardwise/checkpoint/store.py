# SPDX-License-Identifier: Apache-2.0
"""Store: a folder of checkpoints. No reader ever sees half of a checkpoint.

    runs/demo/
      step-000100/                      valid: manifest, sizes
      step-000200/                      the newest: resume() loads it
      step-000300.tmp-1a2b3c/           a save in progress; renamed when it is complete
      step-000000.tmp-4d5e6f/           an old checkpoint, renamed before it is removed

    main thread   step | save: copy to host | step | step | step | save: waits for the last, copies
    background         | write, hash, fsync, manifest, rename, remove old checkpoints |

``checkpoints`` reads manifests and file sizes, but no tensors. ``resume`` hashes every byte before
it uses any, and loads the next older checkpoint if a hash is wrong.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import saving
from shardwise.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    SaveError,
    ranks_with_data,
)
from shardwise.checkpoint.files import opened, rank_file
from shardwise.checkpoint.loading import LoadReport, load
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.meeting import remove_temporary, temporary
from shardwise.core import comm

log = logging.getLogger(__name__)
background = logging.getLogger(f"{__name__}.background")  # errors that `wait` raises too

NAME = re.compile(r"step-\d{6,}(-r\d+)?")
_MAX_SAME_STEP = 100


class Store:
    """The checkpoints of a run in the folder ``root``; the last ``keep`` stay (``None``: all).

    Every rank makes a Store and calls the same methods in the same order. One run at a time saves
    in a folder: its first save, and each that succeeds, removes what earlier ones left unfinished.
    ``config`` goes into every manifest. Rank 0 waits ``timeout`` seconds for the other ranks.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        keep: int | None = 2,
        *,
        config: Mapping[str, Any] | None = None,
        timeout: float = saving.TIMEOUT_SECONDS,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"Store(keep={keep!r}): keep at least 1 checkpoint, or None for all")
        if not timeout > 0:
            raise ValueError(f"Store(timeout={timeout!r}): give a number of seconds above 0")
        self.root = Path(os.path.abspath(root))
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"Store('{root}') is a file: name a directory for checkpoints")
        self.keep, self.config, self.timeout = keep, config, timeout
        self._staging = saving.Staging()
        self._in_progress: Future[Path] | None = None
        self._begun = False  # whether there was a save; until then, no rank writes
        self._last: Path | None = None
        self._damaged: set[Path] = set()  # checkpoints that a resume found damaged

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save in the background; returns when the tensors are copied (collective).

        Waits for the previous save first, and raises ``SaveError`` if that has failed. Training can
        continue at once, because the save reads copies.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"save(step={step!r}): a step is an integer of 0 or more")
        self.wait()
        ranks, name = ranks_with_data(), f"step-{step:06d}"
        revisions = (f"{name}-r{number}" for number in range(2, _MAX_SAME_STEP))
        save = saving.Save(
            [self.root / one for one in (name, *revisions)],
            self.timeout,
            lambda: saving.Snapshot(ranks, model, optimizer, extra, self.config),
            step=step,
            clean=(lambda: None) if self._begun else self.remove_leftovers,
        )
        self._begun = True
        save.stage(self._staging)
        self._in_progress = Future()
        # Not a daemon: a process that ends waits for its last checkpoint.
        threading.Thread(target=self._write, args=(save, self._in_progress)).start()

    def wait(self) -> Path | None:
        """Wait until no save is in progress; return the last checkpoint that this Store has saved.

        Raises ``SaveError`` if the save has failed, on every rank. On return the checkpoint is on
        the disk under its final name.
        """
        save, self._in_progress = self._in_progress, None
        if save is not None:
            if (error := save.exception()) is not None:
                raise SaveError(str(error)) from error
            self._last = save.result()
        return self._last

    @property
    def idle(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._in_progress is None or self._in_progress.done()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self.wait()
        except SaveError:
            if kind is None:
                raise  # with an earlier error, that is raised, and the log has this one

    def _write(self, save: saving.Save, result: Future[Path]) -> None:
        try:
            path = save.write(self._next_sequence)
            if save.meeting.rank == 0:
                self._remove_old()
                self.remove_leftovers()
            result.set_result(path)
        except BaseException as error:
            # The next save() or wait() raises the error. Log it, in case neither is called.
            background.exception("the checkpoint of step %d has failed", save.step)
            result.set_exception(error)

    def _next_sequence(self) -> int:
        return max((saved.sequence for _, saved in valid_checkpoints(self.root)), default=0) + 1

    # ------------------------------------------------------------------ finding

    def checkpoints(self) -> list[Path]:
        """The valid checkpoints as this process sees them, oldest first."""
        return [path for path, _ in valid_checkpoints(self.root)]

    def resume(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        path: Path | None = None,
        or_older: bool = True,
        report: LoadReport | None = None,
    ) -> tuple[Path, dict[str, Any]] | None:
        """Load the newest checkpoint that is sound to the last byte; return its path and extra.

        Waits for a save in progress. Returns None for an empty folder (collective). If a checkpoint
        is damaged or does not fit, logs this and loads the next older checkpoint. If none fits,
        raises the first error, of one that does not fit if there is any.

        Args:
            path: the checkpoint to try first instead of the newest; it may be in another folder.
            or_older: False: raise if the first checkpoint is damaged.
            report: see ``load``.
        """
        ranks = ranks_with_data()
        if self._in_progress is not None:
            self._in_progress.exception()  # waits; the next save() or wait() raises the error
        [candidates, *_] = comm.agree(self.checkpoints() if ranks.rank == 0 else None, ranks)
        candidates.reverse()
        if path is not None:
            path = path.absolute()
            candidates = [path, *(other for other in candidates if other != path)]
        errors: list[CheckpointError] = []
        for candidate in candidates if or_older else candidates[:1]:
            try:
                return candidate, load(candidate, model, optimizer, report=report)
            except (DamagedError, MismatchError) as error:
                log.error("%s is passed over: %s", candidate, error)
                errors.append(error)
                if isinstance(error, DamagedError):
                    self._damaged.add(candidate)
        for one in sorted(errors, key=lambda error: isinstance(error, DamagedError)):
            raise one
        return None

    # ------------------------------------------------------------------ removing (rank 0)

    def _remove_old(self) -> None:
        """Rename the checkpoints that are older than the last ``keep`` valid ones. A checkpoint
        that a resume found damaged does not count as valid. Other directories stay."""
        if self.keep is None:
            return
        checkpoints = self.checkpoints()
        kept = [path for path in checkpoints if path not in self._damaged][-self.keep :]
        for path in checkpoints[: checkpoints.index(kept[0])] if kept else ():
            try:
                path.rename(temporary(path))
            except OSError as error:
                log.warning("%s can't be removed, and stays: %s", path, error)

    def remove_leftovers(self) -> None:
        """Remove old checkpoints and unfinished saves. Rank 0 calls this, when no rank writes."""
        remove_temporary(self.root)


def valid_checkpoints(root: str | os.PathLike[str]) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints in a folder in the order of their saves; nothing is hashed."""
    found = []
    root = Path(root)
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if NAME.fullmatch(path.name):
            try:
                manifest = Manifest.read(path)
                for rank, file in enumerate(manifest.files):
                    with opened(path / rank_file(rank), file.size):
                        pass
                found.append((path, manifest))
            except CheckpointError as error:
                log.warning("%s is no valid checkpoint: %s", path, error)
    return sorted(found, key=lambda entry: (entry[1].sequence, entry[0].name))
