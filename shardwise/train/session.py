# SPDX-License-Identifier: Apache-2.0
"""Session: what a rank does from the request of the user to the exit code.

resolve   find the folder, the checkpoint and the configuration: of the recipe or saved, with flags
join      join the other ranks
claim     lock the folder of the run (rank 0)
train     run the loop
explain   print an error in one line; write the traceback to a file in the folder of the run
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import Manifest, SaveError
from shardwise.checkpoint.store import background
from shardwise.core import comm
from shardwise.core.rehearsal import SHARED
from shardwise.models.gpt_config import GPTConfig
from shardwise.report.html import write_report
from shardwise.train.config import TrainConfig, changed, refuse_idle
from shardwise.train.console import Console
from shardwise.train.events import Sink
from shardwise.train.folder import (
    CONFIG,
    LATEST,
    Claim,
    Run,
    begun_run,
    check_owner,
    ended_unsaved,
    find_resume,
    is_run,
    lies_in,
    new_folder,
    newest_folder,
    saved_run,
    write_config,
)
from shardwise.train.loop import Outcome, Trainer
from shardwise.train.pretrained import begin_from
from shardwise.train.recipes import load_recipe
from shardwise.train.sources import holds_tokens
from shardwise.train.tokens import write_whole
from shardwise.train.world import (
    AGAIN,
    World,
    changes_file,
    changes_left,
    end_with_launcher,
    join,
    launch_name,
    leave,
    num_restarts,
)
from shardwise.words import flattened

_SHAPE = (
    *("dim", "num_layers", "num_heads", "kv_heads", "head_width", "hidden_width", "qk_norm"),
    *("tied", "num_experts", "expert_width", "shared_hidden_dim", "num_dense_layers"),
)
MakeSinks = Callable[[Path, TrainConfig], Sequence[Sink]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of the user: the arguments of ``shardwise train``."""

    recipe: str = "default"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    out: str | None = None
    resume: str | None = None


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The run that a request means on this machine."""

    config: Run
    folder: Path
    checkpoint: Path | None
    note: str = ""  # how config.json differs from the checkpoint
    or_older: bool = False  # whether to load an older checkpoint if the checkpoint is damaged
    free_name: bool = False  # the folder is the next free name, and must not exist yet


def resolve(request: Request) -> Resolved:
    """Find the run that a request means. Raises errors before any rank is started."""
    again = num_restarts() > 0
    resume = request.resume
    if resume is None and again:  # restarted ranks resume the run that this launch has begun
        folder = newest_folder(request.recipe, request.out, launch=launch_name())
        if folder is not None and is_run(folder) and not ended_unsaved(folder):
            request, resume = dataclasses.replace(request, out=str(folder)), LATEST
        elif folder is not None:
            return _anew(request, folder)
    if resume is None:
        folder = new_folder(request.recipe, request.out)
        return dataclasses.replace(_anew(request, folder), free_name=request.out is None)
    folder, checkpoint = find_resume(request.recipe, request.out, resume, again=again)
    described = begun_run(folder)
    if checkpoint is None and described is None:
        return _anew(request, folder)
    saved = described if checkpoint is None else saved_run(checkpoint)
    assert saved is not None
    if request.recipe != Request.recipe:  # only the model of a named recipe matters
        wanted = load_recipe(request.recipe).model
        _check_model(f"recipe {request.recipe!r}", wanted, saved, checkpoint or folder)
    if checkpoint is None:
        config = Run.new(changed(saved, request.changes))
        refuse_idle(config, request.changes)
        return Resolved(config=config, folder=folder, checkpoint=None)
    # The user named this checkpoint, or a run, of which any sound checkpoint will do.
    or_older = checkpoint.resolve() != Path(resume).resolve()
    inside = lies_in(folder, checkpoint)
    note = ""
    if described is not None and (inside or described.origin == os.path.abspath(checkpoint)):
        run = described
        if inside:
            check_owner(folder, run, checkpoint, or_older=or_older)
        file = str(folder / CONFIG)
        _check_model(file, run.model, saved, checkpoint, (*_SHAPE, "vocab_size"))
        note = _edits(file, run, saved, checkpoint, request.changes)
    else:
        run = saved if inside else Run.new(saved, checkpoint)
    run = changed(run, request.changes)
    refuse_idle(run, request.changes)
    try:
        run.check_resume(saved, Manifest.read(checkpoint).step or 0)
        _check_model("these flags", run.model, saved, checkpoint)
    except ValueError as error:
        raise ValueError(f"{error}; {note}" if note else str(error)) from None
    return Resolved(config=run, folder=folder, checkpoint=checkpoint, or_older=or_older, note=note)


def _anew(request: Request, folder: Path) -> Resolved:
    config = changed(load_recipe(request.recipe), request.changes)
    if "tokenizer" not in request.changes and holds_tokens(config.data):
        # The tokenizer of the recipe is for text.
        config = dataclasses.replace(config, tokenizer=TrainConfig.tokenizer)
    if config.init_from is not None:
        config = begin_from(config, request.changes)
    refuse_idle(config, request.changes)
    return Resolved(config=Run.new(config), folder=folder, checkpoint=None)


def _check_model(
    source: str, wanted: GPTConfig, saved: TrainConfig, place: Path, names: Sequence[str] = _SHAPE
) -> None:
    """Raise if ``source`` asks for another model than that of the resumed run."""
    model = saved.model
    different = [
        f"{name} {getattr(model, name)} there, {getattr(wanted, name)} here"
        for name in names
        if getattr(model, name) != getattr(wanted, name)
    ]
    if different:
        raise ValueError(
            f"{place} holds another model than {source} ({', '.join(different)}): leave the "
            f"model as it was saved, or begin a new run without --resume"
        )


def _edits(
    file: str, config: TrainConfig, saved: TrainConfig, checkpoint: Path, given: dict[str, Any]
) -> str:
    """A line with the values of ``config.json`` that differ from those of the checkpoint and that
    no flag replaces; empty if there are none."""
    flags, before = flattened(given), flattened(saved.to_json())
    different = [
        f"{name}={value!r} (was {before.get(name)!r})"
        for name, value in flattened(config.to_json()).items()
        if value != before.get(name) and name not in flags
    ]
    if not different:
        return ""
    return f"{file} differs from {checkpoint.name}: {', '.join(different)}"


def claim(request: Request) -> tuple[Resolved, Claim]:
    """Make and lock the folder (rank 0), then resolve again, as no other process can change it any
    more."""
    while True:
        resolved = resolve(request)
        try:
            claimed = Claim(resolved.folder, new=resolved.free_name)
            break
        except FileExistsError:
            continue  # another run has just taken the name
    try:
        resolved = resolve(dataclasses.replace(request, out=str(resolved.folder)))
        if resolved.checkpoint is None or not lies_in(resolved.folder, resolved.checkpoint):
            write_config(resolved.folder, resolved.config.to_json())
    except BaseException:
        claimed.undo()
        raise
    return resolved, claimed


def check(resolved: Resolved, world_size: int) -> None:
    """Raise the errors that can be found before any rank is started."""
    resolved.config.expert_mesh_shape(world_size)
    resolved.config.share(world_size)


def train(request: Request, make_sinks: MakeSinks = lambda folder, config: ()) -> int:
    """Train as one of the ranks; return the exit code."""
    end_with_launcher()
    background.setLevel(logging.CRITICAL)  # the trainer itself reports failed saves
    world = join(_timeout(request))
    # Rank 0 decides: files may appear or vanish between the looks of several ranks.
    claimed = world.together(lambda: claim(request) if world.first else None)
    resolved: Resolved = comm.agree(claimed and claimed[0], world.axis)[0]
    changes, folder = changes_left(), resolved.folder
    config = changed(resolved.config, changes)

    def make() -> Sequence[Sink]:
        return [Console(config.steps), *make_sinks(folder, config)] if world.first else ()

    try:
        sinks = world.together(make)
        trainer = Trainer(
            config,
            world,
            folder,
            resume=resolved.checkpoint,
            or_older=resolved.or_older,
            sinks=sinks,
        )
        if world.ranks_per_gpu > 1:
            trainer.events("note", text=SHARED % world.ranks_per_gpu)
        if resolved.note:
            trainer.events(
                "warning", step=trainer.step, text=f"{resolved.note}; config.json takes effect"
            )
        if resolved.checkpoint is None and config.unreached:
            trainer.events("warning", step=trainer.step, text=config.unreached)
        if changes and world.first and _is_news(config.microbatches):
            text = f"out of memory: {config.microbatches} microbatches now"
            trainer.events("warning", step=trainer.step, text=text)
    except BaseException:
        if claimed is not None:
            claimed[1].undo()
        raise
    gc.freeze()  # modules and the model stay to the end: the collector can skip them
    gc.enable()
    try:
        outcome = trainer.run()
    except (Exception, KeyboardInterrupt) as error:
        code = _explain(error, trainer, world)
        leave(code)
        return code
    if world.first:
        _conclude(outcome, trainer, folder)
    leave(0)
    return 0


def _is_news(microbatches: int | str) -> bool:
    """Whether this change has not been printed yet. (Later restarts start with it, too.)"""
    printed = changes_file().with_name(f"printed-{microbatches}")  # type: ignore[union-attr]
    with contextlib.suppress(OSError):
        printed.touch(exist_ok=False)
        return True
    return False


def _timeout(request: Request) -> float:
    """The seconds to wait for the other ranks. An invalid request is reported later, by rank 0."""
    try:
        return resolve(request).config.timeout
    except (ValueError, OSError):
        return TrainConfig.timeout


def _conclude(outcome: Outcome, trainer: Trainer, folder: Path) -> None:
    """Print the result and write the report. A report that can't be written is no failure."""
    lines = []
    if outcome.held_out is not None:
        lines.append(f"held out {outcome.held_out:.3f} {trainer.parts.corpus.unit}")
    if not outcome.finished:
        lines.append(f"stopped after step {outcome.step}; continue with --resume --out {folder}")
    try:
        lines.append(f"report   {write_report(folder)}")
    except (OSError, ValueError) as error:
        lines.append(f"warning  no report could be written: {error}")
    with contextlib.suppress(OSError):
        sys.stdout.write("\n".join(lines) + "\n")


def _explain(error: BaseException, trainer: Trainer, world: World) -> int:
    """Print one line, write the traceback to a file; return the exit code."""
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted and _starts_again(error, trainer):
        trainer.close()
        return AGAIN
    unsaved = isinstance(error, SaveError)  # the same on every rank: rank 0 prints it
    step = trainer.step if unsaved else trainer.step + 1
    text = " ".join(str(error).split()) or type(error).__name__
    if not interrupted:
        trainer.events("error", step=step, text=text)
    trainer.close()
    if interrupted or (unsaved and not world.first):
        return 130 if interrupted else 1
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


def _starts_again(error: BaseException, trainer: Trainer) -> bool:
    """Whether the launcher starts all ranks again with more microbatches, because this rank or
    another rank has run out of memory in the first steps."""
    file, config, recompute = changes_file(), trainer.config, trainer.config.model.recompute
    if file is None:
        return False
    count = trainer.smaller() if isinstance(error, torch.OutOfMemoryError) else None
    if count is not None:
        decided = {"keep_weights": config.keep_weights, "model": {"recompute": recompute}}
        with contextlib.suppress(OSError):
            write_whole(file, json.dumps(decided | {"microbatches": count}).encode())
    asked: int = changes_left().get("microbatches", 0)
    return asked > config.num_microbatches
