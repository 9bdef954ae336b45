# SPDX-License-Identifier: Apache-2.0
"""Run folders: where a run lies, and which one is meant.

runs/default/
  config.json  events.jsonl  loss.svg  report.html  trace.json
  checkpoints/step-000100/  checkpoints/step-000200/
runs/default-2/                    the next run of the same recipe: nothing is overwritten
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from shardwise.checkpoint import CheckpointError, Manifest, valid_checkpoints
from shardwise.report.html import read_events
from shardwise.train.config import TrainConfig

CONFIG, EVENTS, CHECKPOINTS = "config.json", "events.jsonl", "checkpoints"
LATEST = "latest"


def new_folder(recipe: str, out: str | None, root: str = "runs") -> Path:
    """A folder in which no run lies yet: the one that was named, or the next free one."""
    if out is not None:
        path = Path(out)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {out} is a file: name a directory for the run")
        if (path / EVENTS).exists():
            raise ValueError(
                f"--out {out} holds a run already: go on with it (--resume), or name another folder"
            )
        return path
    name = _name(recipe)
    path, number = Path(root) / name, 1
    while (path / EVENTS).exists():
        number += 1
        path = Path(root) / f"{name}-{number}"
    return path


def newest_folder(recipe: str, out: str | None, root: str = "runs") -> Path | None:
    """The run to go on with: the one that was named, or the newest of the recipe."""
    if out is not None:
        return Path(out)
    pattern = re.compile(re.escape(_name(recipe)) + r"(-\d+)?")
    found = [
        path
        for path in (Path(root).iterdir() if Path(root).is_dir() else ())
        if pattern.fullmatch(path.name) and (path / EVENTS).exists()
    ]
    return max(found, key=lambda path: (path / EVENTS).stat().st_mtime, default=None)


def find_resume(
    recipe: str, out: str | None, resume: str, *, again: bool = False
) -> tuple[Path, Path]:
    """The run's folder and the checkpoint that ``--resume`` names (``latest`` or a path).

    ``again``: these ranks were started anew, so that the folder may hold what they did before;
    they go on from the newest that they have saved themselves, if any.
    """
    if resume != LATEST:
        path = Path(resume)
        if not path.is_dir():
            raise ValueError(f"--resume {resume}: there is no such checkpoint or run")
        home = path if (path / CHECKPOINTS).is_dir() else None  # a run's folder
        path = path if home is None else newest_checkpoint(path)
        Manifest.read(path)
        if home is None and path.parent.name == CHECKPOINTS:
            home = path.parent.parent
        folder = home if out is None else Path(out)
        if folder is None:
            raise ValueError(
                f"--resume {resume} lies outside a run's folder: say with --out where to go on"
            )
        elsewhere = home is None or folder.resolve() != home.resolve()
        if elsewhere and not again and (folder / EVENTS).exists():
            raise ValueError(
                f"--out {out} holds another run: go on with that one (--resume --out {out}), or "
                f"name another folder"
            )
        return folder, newest_checkpoint(folder) if again and _has_saved(folder) else path
    folder = newest_folder(recipe, out)
    if folder is None:
        raise ValueError(
            f"--resume: there is no run of recipe {recipe!r} under runs/: name it with --out "
            f"FOLDER or --resume PATH"
        )
    return folder, newest_checkpoint(folder)


def _has_saved(folder: Path) -> bool:
    """Whether the launch that is going on has saved anything there."""
    events = read_events(folder / EVENTS) if (folder / EVENTS).exists() else []
    begun = max((n for n, event in enumerate(events) if event.get("restarts") == 0), default=None)
    return begun is not None and any(event["kind"] == "save" for event in events[begun:])


def newest_checkpoint(path: Path) -> Path:
    """Of a run's folder; a path that is no run's folder stands for itself."""
    if not (path / EVENTS).exists() and not (path / CHECKPOINTS).is_dir():
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


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """For people; what counts is in each checkpoint's manifest."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{CONFIG}.{os.getpid()}"
        partial.write_text(json.dumps(config, indent=2) + "\n")
        partial.replace(folder / CONFIG)
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written to ({error.strerror}): name another folder"
        ) from error


def _name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "-", recipe.rpartition(":")[2] or recipe)
