# SPDX-License-Identifier: Apache-2.0
"""Saving: what a rank puts into a checkpoint, and the one verb for a single one.

    snapshot   the tensors this rank writes, by arithmetic; values; random states   main thread
    agree      one small object per rank: the same step, the same tensors, problems  main thread
    write      one file of tensors per rank, hashed on the way                       anywhere
    publish    rank 0 joins the parts into ``.metadata`` and writes the manifest     anywhere

One object collective per save, whatever the number of tensors; none off the main thread.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import metadata, owner, random_state, state
from shardwise.checkpoint.attempt import GIVEN_UP, Attempt
from shardwise.checkpoint.errors import CheckpointError, MismatchError, SaveError
from shardwise.checkpoint.experts import one_by_one
from shardwise.checkpoint.files import File, HashedFile, write_file
from shardwise.checkpoint.manifest import METADATA, STATE, Manifest, now, rank_file, versions
from shardwise.checkpoint.plan import LayoutPlanner, Piece
from shardwise.checkpoint.staging import on_host
from shardwise.checkpoint.values import dtype_name, dtype_of, encode, to_bytes
from shardwise.checkpoint.world import World

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800.0


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Write one checkpoint to ``path``; on return it is whole and on the disk (collective).

    Tensors of the model and of the optimizer, the random states of every rank, ``extra`` (what JSON
    can hold: step, scheduler, data position; every rank's own) and ``config`` (for the manifest).
    Any number of ranks, or no process group. A checkpoint that is there already is not
    overwritten. ``Store`` saves in the background, keeps the last few and finds the newest.
    """
    final = Path(os.path.abspath(path))
    world = World.now()
    attempt, snapshot = begin(
        world, final, lambda: [final], timeout, lambda: take(world, model, optimizer, extra, config)
    )
    try:
        run(attempt, snapshot, sequence=lambda: 1, step=None)
    except SaveError:
        if world.size == 1:  # else others may still be writing; the next save here removes it
            shutil.rmtree(attempt.folder, ignore_errors=True)
        raise


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank writes, and what rank 0 says about it all."""

    pieces: list[Piece]
    keys: frozenset[str]  # of all tensors, those of other ranks too
    rank_values: bytes
    state_values: bytes
    placements: list[str]
    optimizer: dict[str, Any] | None
    config: dict[str, Any] | None

    @property
    def digest(self) -> str:
        """Equal on ranks that save the same tensors."""
        return hashlib.sha256("\n".join(sorted(self.keys)).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)


def take(
    world: World,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
) -> Snapshot:
    """Views of the live tensors, and copies of everything else; all problems at once."""
    found = state.of_model(model)
    groups = state.add_optimizer(found, optimizer) if optimizer is not None else None
    values = state.as_saved(found, groups)
    problems = found.problems
    if not found.tensors:
        problems.append(f"{type(model).__name__} has neither parameters nor buffers")
    for name, value in (("extra", extra), ("config", config)):
        try:
            encode(dict(value or {}), name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(_listed("this can't be saved", problems))
    spread = frozenset(key for key, stack in found.members.items() if stack.spread)
    planner = LayoutPlanner(world.rank, world.size, frozenset(found.buffers), spread)
    planner.set_up_planner(found.tensors)
    pieces = [
        part
        for piece in planner.pieces()
        for part in one_by_one(piece, found.members.get(piece.key))
    ]
    rank_values = {"random": random_state.capture(), "extra": dict(extra or {})}
    return Snapshot(
        pieces=pieces,
        keys=found.stored_keys,
        rank_values=to_bytes(rank_values, "extra"),
        state_values=to_bytes(values, "the state"),
        placements=state.placements_of(model),
        optimizer=state.described(optimizer) if optimizer is not None else None,
        config=None if config is None else dict(config),
    )


def begin(
    world: World,
    final: Path,
    finals: Callable[[], Iterable[Path]],
    timeout: float,
    snapshot: Callable[[], Snapshot],
    step: int | None = None,
) -> tuple[Attempt, Snapshot]:
    """Make the temporary directory and agree on it, or raise the same on every rank."""
    made: list[Snapshot] = []
    folder = owner.temporary(final)

    def work() -> None:
        made.append(snapshot())
        if world.rank == 0:
            if list(finals()) == [final] and final.exists() and any(final.iterdir()):
                raise CheckpointError(
                    f"{final} is there already, and a checkpoint is never overwritten: remove "
                    f"it, or choose another path (Store makes one for every step)"
                )
            for leftover in final.parent.glob(f"{glob.escape(final.name)}.tmp-*"):
                if owner.is_abandoned(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise SaveError(f"{folder} can't be made: {error.strerror}") from error

    def facts() -> tuple[str, str, int | None, str]:
        return str(folder), str(final), step, made[0].digest

    try:
        everyone = world.together(work, facts=facts)
        _check_agreement(everyone)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    attempt = Attempt(
        folder=Path(everyone[0][0]),
        finals=finals,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    return attempt, made[0]


def _check_agreement(everyone: list[tuple[str, str, int | None, str]]) -> None:
    _, final, step, digest = everyone[0]
    for rank, (_, other_final, other_step, other_digest) in enumerate(everyone):
        if (other_final, other_step) != (final, step):
            raise MismatchError(
                f"rank 0 saves {final} (step {step}), rank {rank} saves {other_final} (step "
                f"{other_step}): save on every rank, at the same step, to the same place"
            )
        if other_digest != digest:
            raise MismatchError(
                f"rank {rank} has other tensors to save than rank 0: the model, or which "
                f"parameters have optimizer state, differs between them"
            )


def run(
    attempt: Attempt, snapshot: Snapshot, *, sequence: Callable[[], int], step: int | None
) -> Path:
    """Write this rank's part and see the checkpoint published; any rank's failure is everyone's."""
    try:
        began = time.monotonic()
        attempt.begin()
        part = _write_part(attempt, snapshot)
        attempt.done(part)
        if attempt.rank != 0:
            return attempt.outcome()
        path = _publish(attempt, snapshot, sequence, step)
    except BaseException as error:
        attempt.fail(error)
        if isinstance(error, Exception) and not isinstance(error, SaveError):
            text = f"{type(error).__name__}: {error}"
            failed = f"has failed: rank {attempt.rank}: {text}"
            if attempt.rank == 0 and isinstance(error, FileNotFoundError):
                failed = GIVEN_UP if not attempt.folder.exists() else failed
            raise SaveError(f"the save {attempt.identity} {failed}") from error
        raise
    seconds = time.monotonic() - began
    log.info("saved %s in %.2f s, rank 0 wrote %d bytes", path, seconds, snapshot.num_bytes)
    return path


def _write_part(attempt: Attempt, snapshot: Snapshot) -> dict[str, Any]:
    """The files of one rank, and where each piece lies in them."""
    folder, rank = attempt.folder, attempt.rank
    items = []
    with HashedFile(folder / f"__{rank}_0.distcp") as stream:
        for piece in snapshot.pieces:
            begin = stream.tell()
            torch.save(on_host(piece.data), cast(IO[bytes], stream))
            box = (list(piece.shape), list(piece.offsets), list(piece.data.shape))
            dtype = dtype_name(piece.data.dtype)
            items.append([piece.key, dtype, *box, begin, stream.tell() - begin])
    files = [stream.record, write_file(folder / rank_file(rank), snapshot.rank_values)]
    if rank == 0:
        files.append(write_file(folder / STATE, snapshot.state_values))
    listed = [[file.name, file.size, file.sha256] for file in files]
    return {"files": listed, "items": items}


def _publish(
    attempt: Attempt, snapshot: Snapshot, sequence: Callable[[], int], step: int | None
) -> Path:
    parts = attempt.parts()
    index = join(parts, snapshot.keys)
    files = [File(*entry) for part in parts for entry in part["files"]]
    files.append(write_file(attempt.folder / METADATA, metadata.dump(index)))

    def write_manifest() -> None:
        Manifest(
            identity=attempt.identity,
            step=step,
            sequence=sequence(),
            world_size=attempt.world_size,
            num_tensors=len(index),
            placements=snapshot.placements,
            optimizer=snapshot.optimizer,
            config=snapshot.config,
            versions=versions(),
            created=now(),
            files=tuple(files),
        ).write(attempt.folder)

    return attempt.publish(write_manifest)


def join(parts: list[dict[str, Any]], keys: Iterable[str]) -> metadata.Index:
    """The parts of all ranks as one index; every tensor must be whole."""
    index: metadata.Index = {}
    seen: dict[str, set[tuple[int, ...]]] = {}
    for part in parts:
        name = part["files"][0][0]
        for key, dtype, shape, offsets, sizes, begin, length in part["items"]:
            kind = dtype_of(dtype, key)
            chunk = metadata.Chunk(tuple(offsets), tuple(sizes), kind, name, begin, length)
            entry = index.get(key) or metadata.Entry(tuple(shape), kind, ())
            if chunk.offsets in seen.setdefault(key, set()):
                continue  # ranks outside each other's mesh hold the same: the first one counts
            seen[key].add(chunk.offsets)
            index[key] = replace(entry, chunks=(*entry.chunks, chunk))
    missing = sorted(set(keys) - set(index))
    problems = [f"'{key}': no rank has written any of it" for key in missing]
    for key, entry in index.items():
        if (problem := entry.problem()) is not None:
            problems.append(f"'{key}': {problem}")
    if problems:
        raise SaveError(_listed("the ranks' parts do not make whole tensors", problems))
    return index


def _listed(headline: str, problems: list[str]) -> str:
    shown = [f"  {problem}" for problem in problems[:20]]
    if len(problems) > 20:
        shown.append(f"  and {len(problems) - 20} more")
    return "\n".join([f"{headline}:", *shown])
