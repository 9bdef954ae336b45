# SPDX-License-Identifier: Apache-2.0
"""Session: one rank's way from what the user asked for to an exit code.

settle    recipe + flags, or the saved configuration + flags; which folder, which checkpoint
join      the other ranks
claim     the folder, for this run alone (the first rank)
train     the loop
explain   what went wrong, in one line; the traceback lies in the run's folder
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import comm
from shardwise.checkpoint import SaveError
from shardwise.checkpoint.store import background
from shardwise.models.config import GPTConfig
from shardwise.report.html import write_report
from shardwise.train.config import TrainConfig
from shardwise.train.console import Console
from shardwise.train.events import Sink
from shardwise.train.folder import (
    LATEST,
    Claim,
    begun_config,
    ended_unsaved,
    find_resume,
    is_run,
    new_folder,
    newest_folder,
    saved_config,
    write_config,
)
from shardwise.train.loop import Outcome, Trainer
from shardwise.train.recipes import load_recipe
from shardwise.train.world import (
    World,
    end_with_launcher,
    join,
    launch_name,
    leave,
    num_restarts,
)

_SHAPE = (
    *("dim", "num_layers", "num_heads", "kv_heads", "head_width", "hidden_width", "qk_norm"),
    *("tied", "num_experts", "expert_width", "shared_hidden_dim", "num_dense_layers"),
)
MakeSinks = Callable[[Path, TrainConfig], Sequence[Sink]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for."""

    recipe: str = "default"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    out: str | None = None
    resume: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What that means on this machine."""

    config: TrainConfig
    folder: Path
    checkpoint: Path | None
    or_older: bool = False  # whether an older one will do if it is damaged
    free_name: bool = False  # the folder is the next free one, which nobody else may have taken


def settle(request: Request) -> Settled:
    """Read the recipe or the checkpoint; raise what is wrong before anything is started."""
    again = num_restarts() > 0
    resume = request.resume
    if resume is None and again:  # go on by itself, from what this launch has begun
        folder = newest_folder(request.recipe, request.out, launch=launch_name())
        if folder is not None and is_run(folder) and not ended_unsaved(folder):
            request, resume = dataclasses.replace(request, out=str(folder)), LATEST
        elif folder is not None:
            return _anew(request, folder)
    if resume is None:
        folder = new_folder(request.recipe, request.out)
        return dataclasses.replace(_anew(request, folder), free_name=request.out is None)
    folder, checkpoint = find_resume(request.recipe, request.out, resume, again=again)
    saved = begun_config(folder) if checkpoint is None else saved_config(checkpoint)
    if saved is None:
        return _anew(request, folder)
    if request.recipe != Request.recipe:  # that one stands there when nobody named any
        _check_model(request.recipe, saved.model, checkpoint or folder)
    config = dataclasses.replace(saved, **request.changes)
    if checkpoint is not None:
        config.check_resume(saved)
    # A checkpoint that was named itself is the one that is meant; of a run, any that is sound.
    newest = checkpoint is not None and checkpoint.resolve() != Path(resume).resolve()
    return Settled(config=config, folder=folder, checkpoint=checkpoint, or_older=newest)


def _anew(request: Request, folder: Path) -> Settled:
    config = dataclasses.replace(load_recipe(request.recipe), **request.changes)
    return Settled(config=config, folder=folder, checkpoint=None)


def _check_model(recipe: str, saved: GPTConfig, checkpoint: Path) -> None:
    """That a recipe which was named is of the model that goes on; its other values give way."""
    wanted = load_recipe(recipe).model
    different = [
        f"{name} {getattr(saved, name)} there, {getattr(wanted, name)} here"
        for name in _SHAPE
        if getattr(saved, name) != getattr(wanted, name)
    ]
    if different:
        raise ValueError(
            f"{checkpoint} holds another model than recipe {recipe!r} ({', '.join(different)}): "
            f"leave the recipe out to go on with that one, or begin anew without --resume"
        )


def claim(request: Request) -> tuple[Settled, Claim]:
    """Make and lock the folder (the first rank), then settle once more, now that nobody else
    writes there."""
    while True:
        settled = settle(request)
        try:
            claimed = Claim(settled.folder, new=settled.free_name)
            break
        except FileExistsError:
            continue  # another run has taken the name meanwhile
    try:
        settled = settle(dataclasses.replace(request, out=str(settled.folder)))
        if settled.checkpoint is None:
            write_config(settled.folder, settled.config.to_json())
    except BaseException:
        claimed.undo()
        raise
    return settled, claimed


def check(settled: Settled, world_size: int) -> None:
    """What can be said against it before any rank is started."""
    settled.config.expert_mesh_shape(world_size)
    settled.config.share(world_size)


def train(request: Request, make_sinks: MakeSinks = lambda folder, config: ()) -> int:
    """Train as one of the ranks; returns the exit code."""
    end_with_launcher()
    background.setLevel(logging.CRITICAL)  # the trainer tells of failed saves, once
    world = join(_timeout(request))
    # Rank 0 decides: files may have come or gone while the others looked.
    mine = world.together(lambda: claim(request) if world.first else None)
    settled: Settled = comm.agree(mine and mine[0], world.axis)[0]
    config, folder = settled.config, settled.folder

    def make() -> Sequence[Sink]:
        return [Console(config.steps), *make_sinks(folder, config)] if world.first else ()

    try:
        sinks = world.together(make)
        trainer = Trainer(
            config,
            world,
            folder,
            resume=settled.checkpoint,
            or_older=settled.or_older,
            sinks=sinks,
        )
    except BaseException:
        if mine is not None:
            mine[1].undo()
        raise
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


def _timeout(request: Request) -> float:
    """How long to wait for the other ranks; what is wrong with a request is said by rank 0, once
    all are there."""
    try:
        return settle(request).config.timeout
    except (ValueError, OSError):
        return TrainConfig.timeout


def _conclude(outcome: Outcome, trainer: Trainer, folder: Path) -> None:
    """The last words, and the pictures. The run has ended well, whether they can be written or
    not."""
    lines = []
    if outcome.held_out is not None:
        lines.append(f"held out {outcome.held_out:.3f} {trainer.parts.corpus.unit}")
    if not outcome.finished:
        lines.append(f"stopped after step {outcome.step}; go on with --resume --out {folder}")
    try:
        lines.append(f"report   {write_report(folder)}")
    except (OSError, ValueError) as error:
        lines.append(f"warning  no report could be written: {error}")
    with contextlib.suppress(OSError):
        sys.stdout.write("\n".join(lines) + "\n")


def _explain(error: BaseException, trainer: Trainer, world: World) -> int:
    """One line for people, the traceback for engineers."""
    interrupted = isinstance(error, KeyboardInterrupt)
    unsaved = isinstance(error, SaveError)  # the same on every rank: told once
    step = trainer.step if unsaved else trainer.step + 1
    text = " ".join(str(error).split()) or type(error).__name__
    if not interrupted:
        trainer.events("error", step=step, text=text)
    trainer.close()
    if interrupted or (unsaved and not world.first):
        return 130 if interrupted else 1
    where = trainer.folder / f"error-rank{world.rank}.txt"
    try:
        where.write_text("".join(traceback.format_exception(error)))
        more = f" (traceback: {where})"
    except OSError:
        more = ""
    if "over axis" in text:  # a collective
        text += f" -- another rank is stopped, slow (timeout: {trainer.config.timeout:g} s) or gone"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: rank {world.rank}, step {step}: {text}{more}\n")
    return 1
