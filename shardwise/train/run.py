# SPDX-License-Identifier: Apache-2.0
"""Run: what a rank does from the words of the user to the exit code, and the folder of a run.

    resolve   the folder, the checkpoint and the configuration: of the recipe or saved, with flags
    join      the other ranks
    claim     make and lock the folder (rank 0)
    train     run the loop
    explain   print an error in one line; write the traceback to a file in the folder of the run

runs/default/
  .lock  config.json  events.jsonl  report.html  tokenizer/
  checkpoints/step-000100/  checkpoints/step-000200/  kept/...
runs/default-2/                    the next run of the same recipe: nothing is overwritten
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from shardwise.checkpoint import CheckpointError, Manifest, SaveError, valid_checkpoints
from shardwise.checkpoint.store import NAME, background
from shardwise.core import comm
from shardwise.core.rehearsal import SHARED
from shardwise.report.html import write_report
from shardwise.train.config import TrainConfig
from shardwise.train.hub import begin_from
from shardwise.train.launch import end_with_launcher, join, num_restarts
from shardwise.train.logs import Console, Sink
from shardwise.train.loop import CHECKPOINTS, CONFIG, EVENTS, Trainer
from shardwise.train.recipes import load_recipe

logger = logging.getLogger(__name__)

LATEST = "latest"
ROOT = "runs"
LOCK = ".lock"  # "pid 4711 on host node1"

MakeSinks = Callable[[Path, TrainConfig], Sequence[Sink]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks for; ``configure`` puts the flags into the configuration of the recipe or
    of the resumed run."""

    recipe: str = "default"
    out: str | None = None
    resume: str | None = None
    configure: Callable[[TrainConfig], TrainConfig] = lambda config: config


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The run that a request means on this machine."""

    config: TrainConfig
    folder: Path
    checkpoint: Path | None = None
    fitted: dict[str, Any] | None = None  # what the saved run decided for "auto"
    or_older: bool = False  # whether to load an older checkpoint if the checkpoint is damaged


def resolve(request: Request) -> Resolved:
    """Find the run that a request means. Raises errors before any rank is started."""
    out, resume = request.out, request.resume
    if num_restarts() and (begun := newest_folder(request.recipe, out=out)) is not None:
        out = str(begun)  # restarted ranks resume their own run
        resume = LATEST if has_saved(begun) else resume
    if resume is not None:
        folder, checkpoint, or_older = find_resume(request.recipe, out, resume)
        if checkpoint is not None:
            saved, fitted = saved_run(checkpoint)
            config = request.configure(saved)
            config.check_resume(saved)
            return Resolved(
                config=config,
                folder=folder,
                checkpoint=checkpoint,
                fitted=fitted,
                or_older=or_older,
            )
    else:
        folder = Path(out or next(free_names(request.recipe)))
        if has_saved(folder):
            raise ValueError(
                f"--out {out} holds a run already: continue it (--resume), or name another folder"
            )
    recipe = load_recipe(request.recipe)
    config = request.configure(recipe)
    if config.init_from is not None:
        config = begin_from(config, tokenizer_given=config.tokenizer != recipe.tokenizer)
    return Resolved(config=config, folder=folder)


def train(request: Request, make_sinks: MakeSinks = lambda folder, config: ()) -> int:
    """Train as one of the ranks; return the exit code."""
    end_with_launcher()
    background.setLevel(logging.CRITICAL)  # the trainer itself reports failed saves
    try:
        timeout = resolve(request).config.timeout
    except (ValueError, OSError):  # rank 0 reports it, when all ranks are there
        timeout = TrainConfig.timeout
    world = join(timeout)
    # Rank 0 decides: files may appear or vanish between the looks of several ranks.
    claimed = world.together(lambda: claim(request) if world.first else None)
    resolved: Resolved = comm.agree(claimed and claimed[0], world.axis)[0]
    config, folder = resolved.config, resolved.folder

    def make() -> Sequence[Sink]:
        return [Console(config.steps), *make_sinks(folder, config)] if world.first else ()

    trainer = Trainer(
        config,
        world,
        folder,
        resume=resolved.checkpoint,
        or_older=resolved.or_older,
        fitted=resolved.fitted,
        sinks=world.together(make),
    )
    if world.ranks_per_gpu > 1:
        trainer.events("note", text=SHARED % world.ranks_per_gpu)
    if resolved.checkpoint is None and config.unreached:
        trainer.events("warning", step=trainer.step, text=config.unreached)
    gc.freeze()  # modules and the model stay to the end: the collector can skip them
    gc.enable()
    try:
        trainer.run()
    except (Exception, KeyboardInterrupt) as error:
        return _explain(error, trainer)
    if world.first:
        _conclude(trainer)
    return 0


def _conclude(trainer: Trainer) -> None:
    """Write the report, and print where it is. A report that can't be written is no failure."""
    lines, folder = [], trainer.folder
    if trainer.step < trainer.config.steps:
        lines.append(f"stopped after step {trainer.step}; continue with --resume --out {folder}")
    try:
        lines.append(f"report   {write_report(folder)}")
    except (OSError, ValueError) as error:
        lines.append(f"warning  no report could be written: {error}")
    with contextlib.suppress(OSError):
        sys.stdout.write("\n".join(lines) + "\n")


def _explain(error: BaseException, trainer: Trainer) -> int:
    """Print one line, write the traceback to a file; return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    world, step = trainer.world, trainer.step + 1
    text = " ".join(str(error).split()) or type(error).__name__
    trainer.events("error", step=step, text=text)
    trainer.events.close()
    if isinstance(error, SaveError) and not world.first:
        return 1  # the same on every rank: rank 0 prints it
    where = trainer.folder / f"error-rank{world.rank}.txt"
    try:
        where.write_text("".join(traceback.format_exception(error)), "utf-8", "backslashreplace")
        more = f" (traceback: {where})"
    except OSError:
        more = ""
    if "over axis" in text:  # the error of a collective
        text += f" -- another rank is stopped, slow (timeout: {trainer.config.timeout:g} s) or dead"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: rank {world.rank}, step {step}: {text}{more}\n")
    return 1


# ------------------------------------------------------------------------------ folders


def free_names(recipe: str) -> Iterator[Path]:
    """The folders ``runs/RECIPE``, ``runs/RECIPE-2``, ... in which no run has begun."""
    name = _name(recipe)
    folders = (Path(ROOT) / (name if n == 1 else f"{name}-{n}") for n in count(1))
    return (folder for folder in folders if not is_run(folder))


def _name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "-", recipe.rpartition(":")[2] or recipe)


def is_run(folder: Path) -> bool:
    """Whether a run has begun in this folder. (One that failed before it left only its lock.)"""
    return any((folder / name).exists() for name in (EVENTS, CHECKPOINTS))


def has_saved(folder: Path) -> bool:
    """Whether the folder holds a checkpoint, also a damaged one."""
    return any(NAME.fullmatch(path.name) for path in folder.glob(f"{CHECKPOINTS}/*"))


def newest_folder(recipe: str | None = None, out: str | None = None) -> Path | None:
    """The run under ``runs/`` (or at ``out``) that wrote last; with ``recipe``, of this recipe."""
    pattern = ".*" if recipe is None else re.escape(_name(recipe)) + r"(-\d+)?"
    found = [path for path in Path(ROOT).glob("*") if re.fullmatch(pattern, path.name)]
    events = [path / EVENTS for path in ([Path(out)] if out else found)]
    newest = max(filter(Path.exists, events), key=lambda file: file.stat().st_mtime, default=None)
    return newest and newest.parent


def find_resume(recipe: str, out: str | None, resume: str) -> tuple[Path, Path | None, bool]:
    """The folder of the run and the checkpoint that ``--resume`` names (``latest`` or a path), and
    whether an older one will do. The checkpoint of a run that never saved is None."""
    path: Path | None = Path(resume)
    if resume == LATEST:
        path = Path(out) if out is not None else newest_folder(recipe)
    if path is None or not path.is_dir():
        raise ValueError(
            f"--resume {resume}: there is no such checkpoint or run ({out or f'of {recipe!r}'}): "
            f"name one with --resume PATH or --out FOLDER, or leave --resume out to begin"
        )
    run = resume == LATEST or is_run(path)
    home = path if run else path.parent.parent if path.parent.name == CHECKPOINTS else None
    place = home if out is None else Path(out)
    if place is None:
        raise ValueError(
            f"--resume {resume} is not inside the folder of a run: name one with --out"
        )
    if (home is None or place.resolve() != home.resolve()) and has_saved(place):
        raise ValueError(
            f"--out {out} holds another run: continue that run (--resume --out {out}), or name "
            f"another folder"
        )
    return place, newest_checkpoint(path) if not run or has_saved(path) else None, run


def newest_checkpoint(path: Path) -> Path:
    """The newest valid checkpoint in the folder of a run; ``path`` itself if it is no run."""
    if not is_run(path):
        return path
    valid = valid_checkpoints(path / CHECKPOINTS)
    if not valid:
        raise CheckpointError(f"{path / CHECKPOINTS} holds no valid checkpoint")
    return valid[-1][0]


def all_checkpoints(path: Path) -> list[Path]:
    """All checkpoints in the folder of a run by name, also damaged ones; ``path`` itself if it is
    no run."""
    if not is_run(path):
        return [path]
    checkpoints = sorted(p for p in path.glob(f"{CHECKPOINTS}/*") if NAME.fullmatch(p.name))
    if not checkpoints:
        raise CheckpointError(f"{path / CHECKPOINTS} holds no checkpoint")
    return checkpoints


def saved_run(checkpoint: Path) -> tuple[TrainConfig, dict[str, Any] | None]:
    """The configuration of the run that wrote a checkpoint, and what it decided for "auto"."""
    values = dict(Manifest.read(checkpoint).config or {})
    fitted, _ = values.pop("fitted", None), values.pop("corpus", None)
    try:
        if "steps" not in values:
            raise ValueError("`shardwise train` did not write it")
        return TrainConfig.from_json(values), fitted
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{checkpoint} has a config that no run can have: {error}") from error


# ------------------------------------------------------------------------------ the lock


class BusyError(ValueError):
    """Another run that has not ended writes to the folder."""


def claim(request: Request) -> tuple[Resolved, int]:
    """Make and lock the folder of a run (rank 0); two runs never share one. Returns the lock, too,
    a file descriptor."""
    named = request.out is not None or request.resume is not None or num_restarts()
    first = resolve(request).folder
    for folder in [first] if named else free_names(request.recipe):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = lock(folder)
        except BusyError:
            if named:
                raise
            continue  # another run begins there at this moment
        except OSError as error:
            raise ValueError(
                f"--out {folder} cannot be written to ({error.strerror}): name another folder"
            ) from error
        if named or not is_run(folder):
            break
        os.close(held)  # another run has begun and ended there between the two looks
    # From here on no other process can change the folder.
    resolved = resolve(request if named else replace(request, out=str(folder)))
    (folder / CONFIG).write_text(json.dumps(resolved.config.to_json(), indent=2) + "\n")
    return resolved, held


def lock(folder: Path) -> int:
    """Lock (``flock``) the folder of a run: one run writes there at a time.

    Rank 0 holds the lock until its process ends. Then the kernel releases the lock, whatever ended
    the process. If another process holds the lock, the ``BusyError`` names that process.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 1000, 0).decode(errors="replace")
        os.close(file)
        raise BusyError(
            f"{folder} belongs to a run that has not ended ({holder}): wait for it, end it, or "
            f"name another folder with --out"
        ) from None
    except OSError as error:  # Lustre without -o flock, NFS without lockd
        text = "%s: this file system cannot lock files (%s): start only one run there"
        logger.warning(text, folder, error.strerror)
    with contextlib.suppress(OSError):  # with a full disk the lock has no name, but it holds
        os.ftruncate(file, 0)
        os.pwrite(file, f"pid {os.getpid()} on host {socket.gethostname()}".encode(), 0)
    return file
