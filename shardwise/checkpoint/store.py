# SPDX-License-Identifier: Apache-2.0
"""Store: a folder of checkpoints that are each whole or not there.

    runs/demo/
      step-000100/                      valid: manifest, sizes
      step-000200/                      the newest: what latest() returns
      step-000300.tmp-1a2b...-9f8e/     a save under way; renamed when it is whole
      step-000000.trash-1a2b.../        an old one being removed: renamed first, so never half there

    main thread   step | save: copy to host | step | step | step | save: waits for the last, copies
    background         | write, hash, fsync, manifest, rename, remove old ones |

``latest`` reads manifests and asks for file sizes. It reads no tensors: ``load`` hashes every byte
before it uses one. ``resume`` does both, and goes on to the next older one where a hash is wrong.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import owner, saving
from shardwise.checkpoint.attempt import Attempt
from shardwise.checkpoint.errors import CheckpointError, DamagedError, SaveError
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reading import compare_bytes
from shardwise.checkpoint.staging import Staging
from shardwise.checkpoint.world import World

log = logging.getLogger(__name__)
background = logging.getLogger(f"{__name__}.background")  # what `wait` raises too

NAME = re.compile(r"step-\d{6,}(-r\d+)?")
_MAX_SAME_STEP = 100


class Store:
    """Checkpoints of one run under ``root``, the last ``keep`` of them (``None``: all).

    Every rank makes one and calls the same methods in the same order. ``config`` goes into every
    manifest. ``timeout`` is how long a rank that has written its part waits for the others.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        keep: int | None = 2,
        *,
        config: Mapping[str, Any] | None = None,
        asynchronous: bool = True,
        timeout: float = saving.TIMEOUT_SECONDS,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"Store(keep={keep!r}): keep at least 1 checkpoint, or None for all")
        if not timeout > 0:
            raise ValueError(f"Store(timeout={timeout!r}): give the other ranks some seconds")
        self.root = Path(os.path.abspath(root))
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"Store('{root}') is a file: name a directory for checkpoints")
        self.keep, self.config = keep, config
        self.asynchronous, self.timeout = asynchronous, timeout
        self._staging = Staging()
        self._flight: _Flight | None = None
        self._sequence: int | None = None
        self._last: Path | None = None
        self._failed: set[Path] = set()  # what saves of ours have left behind
        if World.now().rank == 0:
            self.remove_leftovers()

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save in the background; returns when the tensors are copied (collective).

        Waits for the save before, and raises ``SaveError`` here if that one has failed. Training
        may go on at once: nothing that it changes is read any more.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"save(step={step!r}): a step is a number from 0 on")
        self.wait()
        world = World.now()
        final = self.root / f"step-{step:06d}"
        revisions = [self.root / f"{final.name}-r{n}" for n in range(2, _MAX_SAME_STEP)]

        def take() -> saving.Snapshot:
            return saving.take(world, model, optimizer, extra, self.config)

        attempt, snapshot = saving.begin(
            world, final, lambda: [final, *revisions], self.timeout, take, step
        )
        if not self.asynchronous:
            self._last = self._write(attempt, snapshot, step)
            return
        try:
            staged = replace(snapshot, pieces=self._staging.copy(snapshot.pieces))
        except BaseException as error:  # out of memory: the others must not wait for this rank
            attempt.fail(error)
            raise
        self._flight = _Flight(self, attempt, staged, step)

    def wait(self) -> Path | None:
        """Until no save is under way. Returns the last checkpoint that this Store has saved.

        Raises ``SaveError`` if it has failed, on every rank. When this returns, the checkpoint is
        on the disk under its final name.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.thread.join()
            if flight.error is not None:
                raise SaveError(str(flight.error)) from flight.error
            self._last = flight.path
        return self._last

    @property
    def idle(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._flight is None or not self._flight.thread.is_alive()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except SaveError:
            if error is None:
                raise  # else what came first is the news, and the log has this

    def _write(self, attempt: Attempt, snapshot: saving.Snapshot, step: int) -> Path:
        try:
            path = saving.run(attempt, snapshot, sequence=self._next_sequence, step=step)
        except BaseException:
            self._failed.add(attempt.folder)
            raise
        if attempt.rank == 0:
            self._remove_old()
            self.remove_leftovers()
        return path

    def _next_sequence(self) -> int:
        if self._sequence is None:
            found = valid_checkpoints(self.root)
            self._sequence = found[-1][1].sequence if found else 0
        self._sequence += 1
        return self._sequence

    # ------------------------------------------------------------------ finding

    def checkpoints(self) -> list[Path]:
        """The valid checkpoints as this process sees them, oldest first."""
        return [path for path, _ in valid_checkpoints(self.root)]

    def latest(self, *, full: bool = False) -> Path | None:
        """The newest valid checkpoint, the same on every rank (collective), or None.

        Valid: a sound manifest, and every file there with its size. With ``full`` every byte is
        hashed as well, shared out over the ranks.
        """
        world = World.now()
        [candidates, *_] = world.agree(self.checkpoints() if world.rank == 0 else None)
        for path in reversed(candidates):
            if not full or self._is_sound(path, world):
                return Path(path)
        return None

    def resume(
        self, model: nn.Module, optimizer: Optimizer | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Load the newest checkpoint that is sound to the last byte (collective).

        One that is damaged is reported in the log and passed over; one of another model raises.
        """
        world = World.now()
        [candidates, *_] = world.agree(self.checkpoints() if world.rank == 0 else None)
        for path in reversed(candidates):
            try:
                return path, load(path, model, optimizer)
            except DamagedError as error:
                log.error("%s is damaged and passed over: %s", path, error)
        if candidates:
            names = ", ".join(path.name for path in candidates)
            raise DamagedError(f"no checkpoint in {self.root} is sound ({names}): see the log")
        return None

    def _is_sound(self, path: Path, world: World) -> bool:
        try:
            world.together(lambda: compare_bytes(path, Manifest.read(path), world))
        except DamagedError as error:
            log.error("%s is damaged and passed over: %s", path, error)
            return False
        return True

    # ------------------------------------------------------------------ removing (rank 0)

    def _remove_old(self) -> None:
        """All but the last ``keep`` valid ones. What has no valid manifest is not ours to judge."""
        if self.keep is None:
            return
        for path in self.checkpoints()[: -self.keep]:
            trash = owner.temporary(path, "trash")
            try:
                path.rename(trash)
            except OSError as error:
                log.warning("%s can't be removed, and stays: %s", path, error)
                continue
            _remove(trash)

    def remove_leftovers(self) -> None:
        """Remove temporary directories that nobody will finish: of dead processes, and those of
        saves of ours that failed. For rank 0, when no rank writes any more."""
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            if owner.is_abandoned(path) or path in self._failed:
                _remove(path)


class _Flight:
    """A save that is being written in the background."""

    def __init__(
        self, store: Store, attempt: Attempt, snapshot: saving.Snapshot, step: int
    ) -> None:
        self.attempt = attempt
        self.path: Path | None = None
        self.error: BaseException | None = None

        def work() -> None:
            try:
                self.path = store._write(attempt, snapshot, step)
            except BaseException as error:
                # Raised by the next save() or wait(); logged now, in case neither ever comes.
                self.error = error
                background.exception("the checkpoint of step %d has failed", step)

        # Not a daemon: a process that ends waits for its last checkpoint.
        self.thread = threading.Thread(target=work, name=f"checkpoint-{step}", daemon=False)
        self.thread.start()


def valid_checkpoints(root: str | os.PathLike[str]) -> list[tuple[Path, Manifest]]:
    """Whole checkpoints in a folder, in the order they were saved; no process group, no hashing."""
    found = []
    root = Path(root)
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if NAME.fullmatch(path.name) is None:
            continue
        try:
            manifest = Manifest.read(path)
            manifest.check_sizes(path)
        except CheckpointError as error:
            log.warning("%s is no valid checkpoint: %s", path, error)
            continue
        found.append((path, manifest))
    return sorted(found, key=lambda entry: (entry[1].sequence, entry[0].name))


def _remove(path: Path) -> None:
    """A whole directory; whatever can't be removed stays until the next time."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # somebody else was at it
    except OSError as error:
        log.warning("%s can't be removed, and stays for now: %s", path, error)
