# SPDX-License-Identifier: Apache-2.0
"""Run folders: the files of a run, the run that a command means, and the lock on a folder.

runs/default/
  .lock  config.json  events.jsonl  loss.svg  report.html
  checkpoints/step-000100/  checkpoints/step-000200/
runs/default-2/                    the next run of the same recipe: nothing is overwritten
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import CheckpointError, Manifest, valid_checkpoints
from shardwise.checkpoint.files import read_small
from shardwise.checkpoint.store import NAME
from shardwise.checkpoint.values import MAX_JSON_BYTES, parse_json
from shardwise.report.html import read_events
from shardwise.train.codecs import Codec, write_codec
from shardwise.train.config import TrainConfig
from shardwise.train.tokens import write_whole
from shardwise.train.world import launch_name

logger = logging.getLogger(__name__)

CONFIG, EVENTS, CHECKPOINTS = "config.json", "events.jsonl", "checkpoints"
TOKENIZER = "tokenizer"  # a folder with the files of the run's tokenizer
LOCK = ".lock"  # {"host": "node1", "pid": 4711, "launch": "3f2a..."}
# The errors of file systems that have no locks (Lustre without -o flock, NFS without lockd).
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LATEST = "latest"


def new_folder(recipe: str, out: str | None, root: str = "runs") -> Path:
    """A folder without a run: ``out``, or the next free name.

    A run that ended before its first checkpoint does not count: it can't be resumed.
    """
    if out is not None:
        path = Path(out)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {out} is a file: name a directory for the run")
        if is_run(path) and not ended_unsaved(path):
            raise ValueError(
                f"--out {out} holds a run already: continue it (--resume), or name another folder"
            )
        return path
    name = _name(recipe)
    path, number = Path(root) / name, 1
    while path.exists():
        number += 1
        path = Path(root) / f"{name}-{number}"
    return path


def is_run(path: Path) -> bool:
    """Whether a run has begun, or was about to begin, in this folder."""
    return any((path / name).exists() for name in (LOCK, EVENTS, CHECKPOINTS))


def ended_unsaved(path: Path) -> bool:
    """Whether a run began here and was killed before its first checkpoint, so that it can only
    begin again. Its process may still be alive, which only the lock shows.

    A damaged checkpoint counts as a checkpoint; the temporary folder of a save does not. An empty
    folder belongs to a run that was killed before it locked the folder.
    """
    if path.is_dir() and not os.listdir(path):
        return True
    checkpoints = path / CHECKPOINTS
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    if not is_run(path) or any(NAME.fullmatch(name) for name in names):
        return False
    events = read_events(path / EVENTS) if (path / EVENTS).exists() else []
    return all(event["kind"] != "end" for event in events)


def newest_folder(
    recipe: str, out: str | None, root: str = "runs", launch: str | None = None
) -> Path | None:
    """The run to resume: ``out``, or the newest run of the recipe; with ``launch``, only runs that
    this launch has begun count."""
    if out is not None:
        return Path(out)
    pattern = re.compile(re.escape(_name(recipe)) + r"(-\d+)?")
    written = LOCK if launch is not None else EVENTS
    folders = [
        path
        for path in (Path(root).iterdir() if Path(root).is_dir() else ())
        if pattern.fullmatch(path.name) and (path / written).exists()
        if launch is None or last_holder(path).get("launch") == launch
    ]
    return max(folders, key=lambda path: (path / written).stat().st_mtime, default=None)


def find_resume(
    recipe: str, out: str | None, resume: str, *, again: bool = False
) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint that ``--resume`` names (``latest`` or a path). For a run
    that was killed before its first checkpoint, this is the checkpoint that it began from, or None.

    ``again``: these ranks were restarted. If they have saved a checkpoint in the folder, they
    resume from the newest.
    """
    if resume == LATEST:
        folder = newest_folder(recipe, out)
        if folder is None:
            raise ValueError(
                f"--resume: there is no run of recipe {recipe!r} under runs/: name the run with "
                f"--out FOLDER or --resume PATH"
            )
        if not folder.is_dir():
            raise ValueError(f"--resume: there is no run at {folder}: leave --resume out to begin")
        return folder, _begun_from(folder) if ended_unsaved(folder) else newest_checkpoint(folder)
    path = Path(resume)
    if not path.is_dir():
        raise ValueError(f"--resume {resume}: there is no such checkpoint or run")
    home = path if is_run(path) else None
    if home is not None and (out is None or Path(out) == path) and ended_unsaved(home):
        return home, _begun_from(home)
    path = path if home is None else newest_checkpoint(path)
    Manifest.read(path)
    if home is None and path.parent.name == CHECKPOINTS:
        home = path.parent.parent
    chosen = home if out is None else Path(out)
    if chosen is None:
        raise ValueError(
            f"--resume {resume} is not inside the folder of a run: name a folder for the run "
            f"with --out"
        )
    elsewhere = home is None or chosen.resolve() != home.resolve()
    if elsewhere and not again and is_run(chosen) and not ended_unsaved(chosen):
        raise ValueError(
            f"--out {out} holds another run: continue that run (--resume --out {out}), or name "
            f"another folder"
        )
    return chosen, newest_checkpoint(chosen) if again and _has_saved(chosen) else path


def _has_saved(folder: Path) -> bool:
    """Whether the current launch has saved a checkpoint there."""
    events = read_events(folder / EVENTS) if (folder / EVENTS).exists() else []
    begun = max((n for n, event in enumerate(events) if event.get("restarts") == 0), default=None)
    return begun is not None and any(event["kind"] == "save" for event in events[begun:])


def newest_checkpoint(path: Path) -> Path:
    """The newest valid checkpoint in the folder of a run; ``path`` itself if it is no run."""
    if not is_run(path):
        return path
    valid = valid_checkpoints(path / CHECKPOINTS)
    if not valid:
        raise CheckpointError(f"{path / CHECKPOINTS} holds no valid checkpoint")
    if len(valid) < len(all_checkpoints(path)):
        logger.warning("%s is used, the newest of the valid checkpoints", valid[-1][0])
    return valid[-1][0]


def all_checkpoints(path: Path) -> list[Path]:
    """All checkpoints in the folder of a run by name, also damaged ones; ``path`` itself if it is
    no run."""
    if not is_run(path):
        return [path]
    folder = path / CHECKPOINTS
    entries = folder.iterdir() if folder.is_dir() else ()
    checkpoints = sorted(entry for entry in entries if NAME.fullmatch(entry.name))
    if not checkpoints:
        raise CheckpointError(f"{folder} holds no checkpoint")
    return checkpoints


@dataclass(frozen=True, kw_only=True)
class Run(TrainConfig):
    """The description of a run in ``config.json`` and in the manifests of its checkpoints."""

    run: str | None = None  # a name, made at its begin; None: a Trainer without a session
    origin: str | None = None  # the checkpoint of another run that this run began from

    @staticmethod
    def new(config: TrainConfig, origin: Path | None = None) -> Run:
        begun = {"run": uuid.uuid4().hex, "origin": origin and os.path.abspath(origin)}
        return Run(**vars(config) | begun)


def saved_run(checkpoint: Path) -> Run:
    """The run that wrote a checkpoint."""
    values = Manifest.read(checkpoint).config
    if values is None:
        raise ValueError(f"{checkpoint} was not written by `shardwise train`: it has no config")
    try:
        return Run.from_json(values)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{checkpoint} has a config that no run can have: {error}") from error


def begun_run(folder: Path) -> Run | None:
    """The run that ``config.json`` describes; None if there is no such file."""
    path = folder / CONFIG
    try:
        return Run.from_json(parse_json(read_small(path, MAX_JSON_BYTES), CONFIG))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): repair it, or remove it to resume with the "
            f"configuration in the checkpoint, or begin a new run without --resume"
        ) from error


def _begun_from(folder: Path) -> Path | None:
    run = begun_run(folder)
    return None if run is None or run.origin is None else Path(run.origin)


def lies_in(folder: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint is one of this run folder."""
    return checkpoint.resolve().parent == (folder / CHECKPOINTS).resolve()


def check_owner(folder: Path, run: Run, checkpoint: Path, *, or_older: bool) -> None:
    """Raise if another run than that of ``config.json`` wrote the checkpoint or, with ``or_older``,
    a checkpoint that may be loaded in its place."""
    others = [path for path, _ in valid_checkpoints(folder / CHECKPOINTS)] if or_older else []
    for path in (checkpoint, *others):
        saved = saved_run(path)
        if saved.run != run.run:
            raise ValueError(
                f"{path} was saved by another run ({saved.run or 'without a name'}) than the run "
                f"that {folder / CONFIG} describes ({run.run or 'without a name'}): move that "
                f"checkpoint away, or begin another run with --resume {path} --out FOLDER"
            )


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``config.json``, for people and for a resume: changes to the file take effect then."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise _not_writable(folder, error) from error


class Home:
    """The folder that a run writes to. Only rank 0 (``first``) writes; other ranks do nothing."""

    def __init__(self, folder: Path, codec: Codec | None, *, first: bool) -> None:
        self.folder, self._codec, self._first = folder, codec, first
        self._holder = last_holder(folder)

    def write(self, config: Mapping[str, Any]) -> None:
        """Write the configuration and the tokenizer, for a resume, an export and ``generate``."""
        if self._first:
            write_config(self.folder, config)
        if self._first and self._codec is not None:
            write_codec(self.folder / TOKENIZER, self._codec)

    def make_anew(self, config: Mapping[str, Any]) -> str | None:
        """If the folder was removed or renamed, make and lock it again, and return a warning. Raise
        if another run has taken its name."""
        if not self._first:
            return None
        if (self.folder / EVENTS).exists():
            if last_holder(self.folder) == self._holder:
                return None
            raise ValueError(
                f"{self.folder} was removed or renamed, and belongs to another run now "
                f"({describe(self.folder)}): this run saves nothing there. End one of the runs"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        RunLock(self.folder)  # until this process ends
        self._holder = last_holder(self.folder)
        self.write(config)
        return (
            f"{self.folder} was removed or renamed during the run: it was made again, and holds no "
            f"earlier checkpoint or event"
        )


class Claim:
    """The folder of a run, made and locked by this process."""

    def __init__(self, folder: Path, *, new: bool) -> None:
        """``new``: raise ``FileExistsError`` if the folder exists, as it belongs to another run."""
        self.folder = folder
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        self._made = [] if is_run(folder) else [folder / CONFIG, folder / LOCK, *missing]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=not new)
            self._lock = RunLock(folder)
        except OSError as error:
            if isinstance(error, FileExistsError) and new and folder.exists():
                raise
            raise _not_writable(folder, error) from error

    def undo(self) -> None:
        """Remove the files and folders that were made, unless the run has begun."""
        for path in () if (self.folder / EVENTS).exists() else self._made:
            with contextlib.suppress(OSError):  # it is in use, or contains cached tokens
                path.rmdir() if path.is_dir() else path.unlink()
        self.release()

    def release(self) -> None:
        """Release the lock; the end of this process does so too."""
        self._lock.release()


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"--out {folder} cannot be written to ({error.strerror}): name another folder"
    )


def _name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "-", recipe.rpartition(":")[2] or recipe)


# ------------------------------------------------------------------------------ the lock


class RunLock:
    """A lock (``flock``) on the folder of a run: one run writes there at a time.

    Rank 0 takes the lock before it writes anything and holds it until its process ends. Then the
    kernel releases the lock, whatever ended the process. The file stays and has no meaning without
    the lock. If another process holds the lock, the ``ValueError`` names that process.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                os.close(self._file)
                raise ValueError(f"{self.path} is no regular file: move it away")
            if not self._take() or self._is_current():
                break
            os.close(self._file)  # the file was removed between open and flock: lock the new file
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "launch": launch_name()}
        with contextlib.suppress(OSError):  # with a full disk the lock has no name, but it holds
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
            os.fsync(self._file)

    def _take(self) -> bool:
        """Take the lock; return False if the file system has no locks."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(
                    "%s: this file system cannot lock files (%s), so nothing prevents a second run "
                    "from writing to the folder: start only one run there",
                    self.path.parent,
                    error.strerror,
                )
                return False
            os.close(self._file)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise ValueError(
                f"{self.path.parent} belongs to a run that has not ended "
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


def last_holder(folder: Path) -> dict[str, Any]:
    """The last process that locked the folder; empty if there is none or the file is unreadable."""
    try:
        holder = parse_json(read_small(folder / LOCK, 4096), LOCK)
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def describe(folder: Path) -> str:
    holder = last_holder(folder)
    return f"pid {holder.get('pid', 'unknown')} on host {holder.get('host', 'unknown')}"
