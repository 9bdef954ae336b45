# SPDX-License-Identifier: Apache-2.0
"""Saving: the part of a checkpoint that a rank writes, and ``save`` for a single checkpoint.

    snapshot   the tensors that this rank writes; values; random states              main thread
    agree      a small object per rank: the same step, the same tensors, problems    main thread
    write      a file of tensors per rank, hashed while it is written                any thread
    publish    rank 0 joins the parts into the table and writes the manifest         any thread

A save issues a single object collective, for any number of tensors, on the main thread. ``save``
issues another at its end.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import table
from shardwise.checkpoint.attempt import GIVEN_UP, Attempt, is_abandoned, is_taken, temporary
from shardwise.checkpoint.errors import (
    CheckpointError,
    MismatchError,
    SaveError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.files import File, rank_file, write_tensors
from shardwise.checkpoint.manifest import Manifest, OptimizerValues, now, versions
from shardwise.checkpoint.optimizer_state import add_optimizer
from shardwise.checkpoint.pieces import Part, divide
from shardwise.checkpoint.reading import VALUES
from shardwise.checkpoint.state import facts_of, model_state, placements_of
from shardwise.checkpoint.table import Entry, Run, Tile
from shardwise.checkpoint.values import dtype_name, dtype_of, encode, random_states, to_bytes
from shardwise.core import comm
from shardwise.core.layout import Shape
from shardwise.debugging import compare_replicas

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
    """Write a checkpoint to ``path``; on return it is complete and on the disk (collective).

    The checkpoint has the tensors of the model and of the optimizer, the random states and the
    ``extra`` of every rank (anything that JSON can hold: step, scheduler, data position), and
    ``config`` in its manifest. It works with any number of ranks, or without a process group. An
    existing checkpoint is not overwritten. ``Store`` saves in the background, keeps the last few
    checkpoints and finds the newest.
    """
    final = Path(os.path.abspath(path))
    ranks = ranks_with_data()
    attempt, snapshot = begin(
        ranks, [final], timeout, lambda: take_snapshot(ranks, model, optimizer, extra, config)
    )
    try:
        write_and_publish(attempt, snapshot, sequence=lambda: 1, step=None)
    except SaveError:
        if ranks.size == 1:  # else other ranks may still write; the next save to path removes it
            shutil.rmtree(attempt.folder, ignore_errors=True)
        raise
    comm.agree(None, ranks)  # the caller may move the checkpoint once every rank has seen it


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The data that one rank writes, and the values that rank 0 writes for all ranks."""

    tensors: dict[str, Tensor]  # views of the live tensors, by name in the file
    parts: list[Callable[[], Part]]  # tiles that this rank describes
    starts: dict[str, str]  # key -> name of a piece that begins a tile
    keys: list[str]  # of the tensors of all ranks
    rank_values: bytes
    values: dict[str, Any]  # fields of the manifest
    held: dict[str, Tensor]  # all live tensors of this rank, until replicas were compared

    @property
    def digest(self) -> str:
        """A hash of the keys: equal on ranks that save the same tensors."""
        return hashlib.sha256("\n".join(self.keys).encode()).hexdigest()


def take_snapshot(
    ranks: comm.Axis,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
) -> Snapshot:
    """Views of the live tensors, and copies of all other values. Raises all problems at once."""
    state = model_state(model)
    groups: OptimizerValues | None = None
    if optimizer is not None:
        groups = add_optimizer(state, optimizer)
    problems = state.problems
    if not state.tensors:
        problems.append(f"{type(model).__name__} has neither parameters nor buffers")
    given = [("extra", dict(extra or {})), ("config", dict(config or {}))]
    given += [(f"the extra state '{name}'", value) for name, value in state.extra_states.items()]
    for name, value in given:
        try:
            encode(value, name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(listed("this can't be saved:", problems))
    division = divide(
        state.tensors, ranks.rank, ranks.size, first_only=state.buffers, members=state.members
    )
    grouped = {
        stack.name: len(stack.everywhere) for stack in state.stacks.values() if stack.grouped
    }
    values = {
        "experts": {name: count for name, count in grouped.items() if name not in state.tied},
        "tied": state.tied,
        "extra_states": state.extra_states,
        "dtypes": state.dtypes,
        "optimizer": groups,
        "config": None if config is None else dict(config),
        "placements": placements_of(model),
        "facts": facts_of(model, ranks.size),
    }
    return Snapshot(
        tensors=division.written,
        parts=division.parts,
        starts=division.starts,
        keys=state.all_keys,
        rank_values=to_bytes({"random": random_states(), "extra": dict(extra or {})}, "extra"),
        values=copy.deepcopy(values),
        held=state.tensors,
    )


def begin(
    ranks: comm.Axis,
    finals: list[Path],
    timeout: float,
    snapshot: Callable[[], Snapshot],
    step: int | None = None,
) -> tuple[Attempt, Snapshot]:
    """Make the temporary directory and agree on it, or raise the same on every rank. The first of
    ``finals`` that is free is the name of the checkpoint."""
    folder = temporary(finals[0])

    def work() -> tuple[Snapshot, str]:
        result, final = snapshot(), ""
        if ranks.rank == 0:
            final = next((str(path) for path in finals if not is_taken(path)), "")
            if not final:
                raise CheckpointError(
                    f"{finals[0]} exists already, and a checkpoint is never overwritten: remove "
                    f"it, or choose another path (shardwise.checkpoint.Store makes one for each "
                    f"step)"
                )
            for leftover in folder.parent.glob(f"{glob.escape(finals[0].name)}.tmp-*"):
                if is_abandoned(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise SaveError(f"{folder} can't be made: {error.strerror}") from error
        return result, final

    def facts(taken: tuple[Snapshot, str]) -> Any:
        return str(folder), taken[1], str(finals[0]), step, taken[0].digest

    try:
        (taken, _), of_ranks = together(work, ranks, facts=facts)
        _check_agreement([told[2:] for told in of_ranks])
        compare_replicas(taken.held)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    attempt = Attempt(
        folder=Path(of_ranks[0][0]),
        final=Path(of_ranks[0][1]),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timeout,
    )
    try:
        attempt.begin()
    except OSError as error:
        attempt.fail(error)
        if ranks.size == 1:
            shutil.rmtree(attempt.folder, ignore_errors=True)
        text = f"rank {ranks.rank}: {type(error).__name__}: {error}"
        raise SaveError(attempt.failed(text)) from error
    return attempt, replace(taken, held={})


def _check_agreement(saves: list[tuple[str, int | None, str]]) -> None:
    """Raise unless all ranks save the same tensors, to the same place."""
    final, step, digest = saves[0]
    for rank, (other_final, other_step, other_digest) in enumerate(saves):
        if (other_final, other_step) != (final, step):
            raise MismatchError(
                f"rank 0 saves {final} (step {step}), rank {rank} saves {other_final} (step "
                f"{other_step}): save on every rank, at the same step, to the same place"
            )
        if other_digest != digest:
            raise MismatchError(
                f"rank {rank} has other tensors to save than rank 0: the model differs between "
                f"them, or the set of parameters that have optimizer state"
            )


def write_and_publish(
    attempt: Attempt,
    snapshot: Snapshot,
    *,
    sequence: Callable[[], int],
    step: int | None,
) -> Path:
    """Write this rank's part, and return the path once rank 0 has published the checkpoint.
    A rank that fails makes every rank fail.
    """
    try:
        began = time.monotonic()
        attempt.done(_write_part(attempt, snapshot))
        if attempt.rank != 0:
            return attempt.outcome()
        path = _publish(attempt, snapshot, sequence, step)
    except BaseException as error:
        attempt.fail(error)
        if isinstance(error, Exception) and not isinstance(error, SaveError):
            if isinstance(error, FileNotFoundError) and not attempt.folder.exists():
                raise SaveError(f"the save {attempt.identity} {GIVEN_UP}") from error
            text = f"rank {attempt.rank}: {type(error).__name__}: {error}"
            raise SaveError(attempt.failed(text)) from error
        raise
    log.info("saved %s in %.2f s", path, time.monotonic() - began)
    return path


def _write_part(attempt: Attempt, snapshot: Snapshot) -> dict[str, Any]:
    """Write the file of one rank; return its record, and the tiles that this rank describes."""
    values = {VALUES: snapshot.rank_values.decode()}
    file = write_tensors(attempt.folder / rank_file(attempt.rank), snapshot.tensors, values)
    parts = parts_json(describe() for describe in snapshot.parts)
    starts = {key: _checksum(snapshot.tensors[name]) for key, name in snapshot.starts.items()}
    return {"file": [file.size, file.sha256], "parts": parts, "starts": starts}


def _checksum(piece: Tensor) -> int:
    """Of the first numbers of a piece: enough to tell two models apart."""
    numbers = piece.detach().reshape(-1)[:1024].cpu().contiguous()
    return zlib.crc32(numbers.view(torch.uint8).numpy().tobytes())


def parts_json(parts: Iterable[Part]) -> list[Any]:
    """The tiles that a rank describes. Tensors whose tiles are alike, as those of a weight and its
    states, are described together."""
    keys: dict[str, list[str]] = {}
    for part in parts:
        entry = Entry(part.shape, part.dtype, (part.tile,))
        text = json.dumps([*table.to_json(entry, dtype_name(part.dtype)), part.sharded])
        keys.setdefault(text, []).append(part.key)
    return [[of_text, *json.loads(text)] for text, of_text in keys.items()]


def _publish(
    attempt: Attempt, snapshot: Snapshot, sequence: Callable[[], int], step: int | None
) -> Path:
    found = attempt.parts()
    manifest = join(
        found,
        snapshot.keys,
        identity=attempt.identity,
        step=step,
        sequence=sequence(),
        **snapshot.values,
    )
    return attempt.publish(lambda: manifest.write(attempt.folder))


def join(found: list[dict[str, Any]], keys: Iterable[str], **values: Any) -> Manifest:
    """The manifest of what all ranks have written; raises unless the tiles make whole tensors."""
    files = [File(rank_file(rank), *part["file"]) for rank, part in enumerate(found)]
    shapes: dict[str, tuple[Shape, torch.dtype]] = {}
    tiles: dict[str, dict[Shape, tuple[int, Tile]]] = {}
    problems = []
    for rank, part in enumerate(found):
        for alike, dtype, shape, [[offsets, sizes, runs]], sharded in part["parts"]:
            shapes |= dict.fromkeys(alike, (tuple(shape), dtype_of(dtype, alike[0])))
            tile = Tile(tuple(offsets), tuple(sizes), tuple(Run(*run) for run in runs))
            if not tile.numel and math.prod(shape):
                continue  # torch leaves nothing of a short tensor to some ranks
            for key in alike:
                before = tiles.setdefault(key, {}).setdefault(tile.offsets, (rank, tile))
                if before[0] == rank or not sharded or not tile.numel:
                    continue  # else the ranks are on meshes without a common rank
                first, other = (found[one.runs[0].rank]["starts"][key] for one in (before[1], tile))
                if first != other:
                    problems.append(
                        f"'{key}': rank {tile.runs[0].rank} holds other values than rank "
                        f"{before[1].runs[0].rank}, and they share no mesh. A checkpoint holds one "
                        f"model: train each model in a separate process group, or save "
                        f"sw.full_state_dict(model)"
                    )
    problems += [f"'{key}': no rank has written any of it" for key in keys if key not in shapes]
    if problems:
        raise SaveError(listed("the ranks' parts do not make whole tensors:", problems))
    tensors = {}
    for key, (shape, kind) in shapes.items():
        of_key = [tile for _, tile in tiles.get(key, {}).values()]
        tensors[key] = Entry(shape, kind, table.joined(shape, of_key))
    try:
        return Manifest(files=files, tensors=tensors, versions=versions(), created=now(), **values)
    except ValueError as error:
        raise SaveError(f"the ranks' parts do not make whole tensors: {error}") from error
