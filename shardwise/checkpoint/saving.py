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
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.attempt import Attempt, is_abandoned, is_taken, temporary
from shardwise.checkpoint.dividing import divide
from shardwise.checkpoint.errors import (
    CheckpointError,
    MismatchError,
    SaveError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.files import File, rank_file, write_tensors
from shardwise.checkpoint.manifest import Manifest, now, versions
from shardwise.checkpoint.optimizer_state import add_optimizer
from shardwise.checkpoint.pieces import (
    Entry,
    Key,
    Tile,
    key_text,
    table_from_json,
    table_to_json,
)
from shardwise.checkpoint.reading import VALUES
from shardwise.checkpoint.state import facts_of, model_state, pieces_digest, placements_of
from shardwise.checkpoint.values import encode, random_states, to_bytes
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
        ranks,
        [final],
        TIMEOUT_SECONDS,
        lambda: take_snapshot(ranks, model, optimizer, extra, config),
    )
    try:
        write_and_publish(attempt, snapshot, snapshot.tensors, sequence=lambda: 1, step=None)
    except SaveError:
        if ranks.size == 1:  # else other ranks may still write; the next save to path removes it
            shutil.rmtree(attempt.folder, ignore_errors=True)
        raise
    comm.agree(None, ranks)  # the caller may move the checkpoint once every rank has seen it


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The data that one rank writes, and the values that rank 0 writes for all ranks."""

    tensors: dict[str, Tensor]  # views of the live tensors, by name in the file
    described: dict[Key, Entry]  # the tiles that this rank describes
    keys: list[Key]  # of the tensors of all ranks
    rank_values: bytes
    values: dict[str, Any]  # fields of the manifest
    live: dict[str, Tensor]  # all tensors of this rank, until replicas were compared


def take_snapshot(
    ranks: comm.Axis,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
) -> Snapshot:
    """Views of the live tensors, and copies of all other values. Raises all problems at once."""
    state = model_state(model)
    groups = None if optimizer is None else add_optimizer(state, optimizer)
    problems = state.problems
    if not state.held:
        problems.append(f"{type(model).__name__} has neither parameters nor buffers")
    given = {"extra": dict(extra or {}), "config": dict(config or {})}
    given |= {f"the extra state '{name}'": value for name, value in state.extra_states.items()}
    for name, value in given.items():
        try:
            encode(value, name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(listed("this can't be saved:", problems))
    division = divide(state, ranks.rank, ranks.size)
    grouped = {of.name: of.total for of in state.experts.values()}
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
    of_rank = {
        "random": random_states(), "extra": dict(extra or {}), "pieces": pieces_digest(state),
    }  # fmt: skip
    return Snapshot(
        tensors=division.written,
        described=division.described,
        keys=state.keys,
        rank_values=to_bytes(of_rank, "extra"),
        values=copy.deepcopy(values),
        live={key_text(held.key): held.tensor for held in state.held},
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
        digest = hashlib.sha256(repr(taken[0].keys).encode()).hexdigest()
        return str(folder), taken[1], (str(finals[0]), step), digest

    try:
        (taken, _), of_ranks = together(work, ranks, facts=facts)
        for rank, (_, _, place, digest) in enumerate(of_ranks):
            if place != of_ranks[0][2]:
                raise MismatchError(
                    f"rank 0 saves {of_ranks[0][2]}, rank {rank} saves {place}: save on every "
                    f"rank, at the same step, to the same place"
                )
            if digest != of_ranks[0][3]:
                raise MismatchError(
                    f"rank {rank} has other tensors to save than rank 0: the model differs between "
                    f"them, or the set of parameters that have optimizer state"
                )
        compare_replicas(taken.live)
        taken.live.clear()
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
    return attempt, taken


def write_and_publish(
    attempt: Attempt,
    snapshot: Snapshot,
    tensors: dict[str, Tensor],
    *,
    sequence: Callable[[], int],
    step: int | None,
) -> Path:
    """Write this rank's part, and return the path once rank 0 has published the checkpoint.
    A rank that fails makes every rank fail."""
    try:
        began = time.monotonic()
        place = attempt.folder / rank_file(attempt.rank)
        try:
            file = write_tensors(place, tensors, {VALUES: snapshot.rank_values.decode()})
        except OSError as error:  # Python names no file where an open one can't grow
            error.filename = error.filename or str(place)
            raise
        attempt.done({"file": [file.size, file.sha256], **table_to_json(snapshot.described)})
        if attempt.rank != 0:
            return attempt.outcome()
        parts = attempt.parts()
        manifest = join(
            parts, snapshot.keys,
            identity=attempt.identity, step=step, sequence=sequence(), **snapshot.values,
        )  # fmt: skip
        path = attempt.publish(lambda: manifest.write(attempt.folder))
    except BaseException as error:
        attempt.fail(error)
        if isinstance(error, Exception):
            raise attempt.error(error) from error
        raise
    log.info("saved %s in %.2f s", path, time.monotonic() - began)
    return path


def join(parts: list[dict[str, Any]], keys: Iterable[Key], **values: Any) -> Manifest:
    """The manifest of what all ranks have written; raises unless the tiles make whole tensors."""
    files = [File(rank_file(rank), *part["file"]) for rank, part in enumerate(parts)]
    tensors: dict[Key, Entry] = {}
    tiles: dict[Key, dict[Shape, Tile]] = {}
    lists: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal lists of holders are one
    for part in parts:
        alike: dict[int, list[Tile]] = {}
        for key, entry in table_from_json(part).items():
            tensors.setdefault(key, entry)
            if id(entry) not in alike:
                holders = (lists.setdefault(tile.ranks, tile.ranks) for tile in entry.tiles)
                pairs = zip(entry.tiles, holders, strict=True)
                alike[id(entry)] = [replace(tile, ranks=ranks) for tile, ranks in pairs]
            for tile in alike[id(entry)]:  # ranks without a common mesh may hold the same
                tiles.setdefault(key, {}).setdefault(tile.offsets, tile)
    if lost := [key_text(key) for key in keys if key not in tensors]:
        raise SaveError(listed("the ranks' parts do not make whole tensors:", lost))
    unlike: dict[Any, Entry] = {}  # tensors that are alike share an entry
    for key, entry in tensors.items():
        of_key = tuple(tile for _, tile in sorted(tiles.get(key, {}).items()))
        same = entry.dtype, entry.shape, tuple(map(id, of_key))
        tensors[key] = unlike.setdefault(same, replace(entry, tiles=of_key))
    try:
        return Manifest(files=files, tensors=tensors, versions=versions(), created=now(), **values)
    except ValueError as error:
        raise SaveError(f"the ranks' parts do not make whole tensors: {error}") from error
