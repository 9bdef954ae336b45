# SPDX-License-Identifier: Apache-2.0
"""Run folders: where a run lies, and which one is meant.

runs/default/
  .lock  config.json  events.jsonl  loss.svg  report.html  trace.json
  checkpoints/step-000100/  checkpoints/step-000200/
runs/default-2/                    the next run of the same recipe: nothing is overwritten
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from shardwise.checkpoint import CheckpointError, Manifest, valid_checkpoints
from shardwise.checkpoint.store import NAME
from shardwise.report.html import read_events
from shardwise.train.config import TrainConfig
from shardwise.train.lock import LOCK, RunLock, last_owner

CONFIG, EVENTS, CHECKPOINTS = "config.json", "events.jsonl", "checkpoints"
LATEST = "latest"


def new_folder(recipe: str, out: str | None, root: str = "runs") -> Path:
    """A folder in which no run lies yet: the one that was named, or the next free name.

    A run that ended before its first checkpoint gives way: nobody could go on with it.
    """
    if out is not None:
        path = Path(out)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {out} is a file: name a directory for the run")
        if is_run(path) and not ended_unsaved(path):
            raise ValueError(
                f"--out {out} holds a run already: go on with it (--resume), or name another folder"
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
    """Whether a run began here and was killed before its first checkpoint, so that it can only be
    begun anew. Its owner may still be alive: the lock tells.

    A checkpoint counts even if it is damaged; the temporary folder of a save does not.
    """
    checkpoints = path / CHECKPOINTS
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    if not is_run(path) or any(NAME.fullmatch(name) for name in names):
        return False
    events = read_events(path / EVENTS) if (path / EVENTS).exists() else []
    return all(event["kind"] != "end" for event in events)


def newest_folder(
    recipe: str, out: str | None, root: str = "runs", launch: str | None = None
) -> Path | None:
    """The run to go on with: the one that was named, or the newest of the recipe; with ``launch``,
    of those that this launch has begun."""
    if out is not None:
        return Path(out)
    pattern = re.compile(re.escape(_name(recipe)) + r"(-\d+)?")
    written = LOCK if launch is not None else EVENTS
    found = [
        path
        for path in (Path(root).iterdir() if Path(root).is_dir() else ())
        if pattern.fullmatch(path.name) and (path / written).exists()
        if launch is None or last_owner(path).get("launch") == launch
    ]
    return max(found, key=lambda path: (path / written).stat().st_mtime, default=None)


def find_resume(
    recipe: str, out: str | None, resume: str, *, again: bool = False
) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint that ``--resume`` names (``latest`` or a path); no
    checkpoint where the run was killed before its first one.

    ``again``: these ranks were started anew, so that the folder may hold what they did before;
    they go on from the newest that they have saved themselves, if any.
    """
    if resume == LATEST:
        folder = newest_folder(recipe, out)
        if folder is None:
            raise ValueError(
                f"--resume: there is no run of recipe {recipe!r} under runs/: name it with --out "
                f"FOLDER or --resume PATH"
            )
        return folder, None if ended_unsaved(folder) else newest_checkpoint(folder)
    path = Path(resume)
    if not path.is_dir():
        raise ValueError(f"--resume {resume}: there is no such checkpoint or run")
    home = path if is_run(path) else None
    if home is not None and (out is None or Path(out) == path) and ended_unsaved(home):
        return home, None
    path = path if home is None else newest_checkpoint(path)
    Manifest.read(path)
    if home is None and path.parent.name == CHECKPOINTS:
        home = path.parent.parent
    chosen = home if out is None else Path(out)
    if chosen is None:
        raise ValueError(
            f"--resume {resume} lies outside a run's folder: say with --out where to go on"
        )
    elsewhere = home is None or chosen.resolve() != home.resolve()
    if elsewhere and not again and is_run(chosen) and not ended_unsaved(chosen):
        raise ValueError(
            f"--out {out} holds another run: go on with that one (--resume --out {out}), or "
            f"name another folder"
        )
    return chosen, newest_checkpoint(chosen) if again and _has_saved(chosen) else path


def _has_saved(folder: Path) -> bool:
    """Whether the launch that is going on has saved anything there."""
    events = read_events(folder / EVENTS) if (folder / EVENTS).exists() else []
    begun = max((n for n, event in enumerate(events) if event.get("restarts") == 0), default=None)
    return begun is not None and any(event["kind"] == "save" for event in events[begun:])


def newest_checkpoint(path: Path) -> Path:
    """Of a run's folder; a path that is no run's folder stands for itself."""
    if not is_run(path):
        return path
    found = valid_checkpoints(path / CHECKPOINTS)
    if not found:
        raise CheckpointError(f"{path / CHECKPOINTS} holds no valid checkpoint")
    return found[-1][0]


def saved_config(checkpoint: Path) -> TrainConfig:
    """The configuration of the run that wrote a checkpoint."""
    values = Manifest.read(checkpoint).config
    if values is None:
        raise ValueError(f"{checkpoint} was not written by `shardwise train`: it has no config")
    try:
        return TrainConfig.from_json(values)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{checkpoint} has a config that no run can have: {error}") from error


def begun_config(folder: Path) -> TrainConfig | None:
    """The configuration of a run that has not saved yet; None where none was written."""
    path = folder / CONFIG
    if not path.exists():
        return None
    try:
        return TrainConfig.from_json(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): begin anew without --resume, with the recipe"
        ) from error


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """For people, and for a run that is begun anew; what counts is in each checkpoint's
    manifest."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{CONFIG}.partial"  # the folder has one writer
        partial.write_text(json.dumps(config, indent=2) + "\n")
        partial.replace(folder / CONFIG)
    except OSError as error:
        raise _not_writable(folder, error) from error


class Claim:
    """A run's folder, made and locked by this process."""

    def __init__(self, folder: Path, *, new: bool) -> None:
        """``new``: a folder that is there already is another run's (``FileExistsError``)."""
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
        """Remove what was made for a run that has not begun."""
        for path in () if (self.folder / EVENTS).exists() else self._made:
            with contextlib.suppress(OSError):  # it is used by somebody, or holds cached tokens
                path.rmdir() if path.is_dir() else path.unlink()
        self.release()

    def release(self) -> None:
        """Let another run have the folder; the end of this process does so too."""
        self._lock.release()


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"--out {folder} cannot be written to ({error.strerror}): name another folder"
    )


def _name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "-", recipe.rpartition(":")[2] or recipe)
