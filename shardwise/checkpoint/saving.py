# SPDX-License-Identifier: Apache-2.0
"""Saving: the part of a checkpoint that a rank writes, and ``save`` for a single checkpoint.

    snapshot   the tensors that this rank writes; values; random states              main thread
    agree      a small object per rank: the same step, the same tensors, problems    main thread
    write      a file of tensors per rank, hashed while it is written                any thread
    publish    rank 0 joins the parts into the index and writes the manifest         any thread

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
from typing import IO, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.attempt import GIVEN_UP, Attempt, is_abandoned, temporary
from shardwise.checkpoint.errors import (
    CheckpointError,
    MismatchError,
    SaveError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.files import File, HashedFile, write_file
from shardwise.checkpoint.index import Chunk, Entry, Index, dump, for_torch, numbers_in, tensor_file
from shardwise.checkpoint.manifest import INDEX, METADATA, STATE, Manifest, now, rank_file, versions
from shardwise.checkpoint.optimizer_state import add_optimizer, described
from shardwise.checkpoint.pieces import Piece, on_host, pieces_to_write
from shardwise.checkpoint.state import json_state, model_state, placements_of
from shardwise.checkpoint.values import dtype_name, dtype_of, encode, random_states, to_bytes
from shardwise.core import comm

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
        ranks,
        final,
        lambda: [final],
        timeout,
        lambda: take_snapshot(ranks, model, optimizer, extra, config),
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

    pieces: list[Piece]
    keys: frozenset[str]  # of the tensors of all ranks
    rank_values: bytes
    state_values: bytes
    placements: list[str]
    optimizer: dict[str, Any] | None
    config: dict[str, Any] | None

    @property
    def digest(self) -> str:
        """A hash of the keys: equal on ranks that save the same tensors."""
        return hashlib.sha256("\n".join(sorted(self.keys)).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)


def take_snapshot(
    ranks: comm.Axis,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
) -> Snapshot:
    """Views of the live tensors, and copies of all other values. Raises all problems at once."""
    state = model_state(model)
    groups = add_optimizer(state, optimizer) if optimizer is not None else None
    values = json_state(state, groups)
    problems = state.problems
    if not state.tensors:
        problems.append(f"{type(model).__name__} has neither parameters nor buffers")
    for name, value in (("extra", extra), ("config", config)):
        try:
            encode(dict(value or {}), name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(listed("this can't be saved:", problems))
    pieces = pieces_to_write(
        state.tensors,
        ranks.rank,
        ranks.size,
        first_only=state.buffers,
        on_every_rank={key for key, stack in state.members.items() if stack.spread},
    )
    stored = []
    for piece in pieces:
        stack = state.members.get(piece.key)
        stored += [piece] if stack is None else stack.pieces(piece)
    return Snapshot(
        pieces=stored,
        keys=state.stored_keys,
        rank_values=to_bytes({"random": random_states(), "extra": dict(extra or {})}, "extra"),
        state_values=to_bytes(values, "the state"),
        placements=placements_of(model),
        optimizer=described(optimizer) if optimizer is not None else None,
        config=None if config is None else copy.deepcopy(dict(config)),
    )


def begin(
    ranks: comm.Axis,
    final: Path,
    finals: Callable[[], Iterable[Path]],
    timeout: float,
    snapshot: Callable[[], Snapshot],
    step: int | None = None,
) -> tuple[Attempt, Snapshot]:
    """Make the temporary directory and agree on it, or raise the same on every rank."""
    folder = temporary(final)

    def work() -> Snapshot:
        result = snapshot()
        if ranks.rank == 0:
            if list(finals()) == [final] and final.exists() and any(final.iterdir()):
                raise CheckpointError(
                    f"{final} exists already, and a checkpoint is never overwritten: remove it, or "
                    f"choose another path (shardwise.checkpoint.Store makes one for each step)"
                )
            for leftover in final.parent.glob(f"{glob.escape(final.name)}.tmp-*"):
                if is_abandoned(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise SaveError(f"{folder} can't be made: {error.strerror}") from error
        return result

    def facts(taken: Snapshot) -> Any:
        return str(folder), str(final), step, taken.digest

    try:
        taken, of_ranks = together(work, ranks, facts=facts)
        _check_agreement(of_ranks)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    agreed_folder = of_ranks[0][0]
    attempt = Attempt(
        folder=Path(agreed_folder),
        finals=finals,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timeout,
    )
    return attempt, taken


def _check_agreement(saves: list[tuple[str, str, int | None, str]]) -> None:
    """Raise unless all ranks save the same tensors, to the same place."""
    _, final, step, digest = saves[0]
    for rank, (_, other_final, other_step, other_digest) in enumerate(saves):
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
    attempt: Attempt, snapshot: Snapshot, *, sequence: Callable[[], int], step: int | None
) -> Path:
    """Write this rank's part, and return the path once rank 0 has published the checkpoint.

    A rank that fails makes every rank fail.
    """
    try:
        began = time.monotonic()
        attempt.begin()
        attempt.done(_write_part(attempt, snapshot))
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
    """Write the files of one rank; return their names and the offset of each piece in them."""
    folder, rank = attempt.folder, attempt.rank
    items = []
    with HashedFile(folder / tensor_file(rank)) as stream:
        for piece in snapshot.pieces:
            data, archive = on_host(piece.data), stream.tell()
            stream.head.clear()
            torch.save(data, cast(IO[bytes], stream))
            begin = archive + numbers_in(bytes(stream.head), data) if data.numel() else archive
            box = (list(piece.shape), list(piece.offsets), list(data.shape))
            length = stream.tell() - archive
            items.append([piece.key, dtype_name(data.dtype), *box, begin, (archive, length)])
    files = [stream.record, write_file(folder / rank_file(rank), snapshot.rank_values)]
    if rank == 0:
        files.append(write_file(folder / STATE, snapshot.state_values))
    return {"files": [[file.name, file.size, file.sha256] for file in files], "items": items}


def _publish(
    attempt: Attempt, snapshot: Snapshot, sequence: Callable[[], int], step: int | None
) -> Path:
    parts = attempt.parts()
    index = _join(attempt.folder, parts, snapshot.keys)
    files = [File(*entry) for part in parts for entry in part["files"]]
    metadata = write_file(attempt.folder / METADATA, for_torch(index))
    files += [metadata, write_file(attempt.folder / INDEX, dump(index, metadata))]

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


def _join(folder: Path, parts: list[dict[str, Any]], keys: Iterable[str]) -> Index:
    """Join the parts of all ranks into an index; raise unless the pieces make whole tensors."""
    index: Index = {}
    seen: dict[tuple[str, tuple[int, ...]], Chunk] = {}
    problems = []
    for rank, part in enumerate(parts):
        for key, dtype, shape, offsets, sizes, begin, archive in part["items"]:
            kind = dtype_of(dtype, key)
            chunk = Chunk(tuple(offsets), tuple(sizes), kind, rank, begin, tuple(archive))
            entry = index.get(key) or Entry(tuple(shape), kind, ())
            first = seen.setdefault((key, chunk.offsets), chunk)
            if first is not chunk:  # the same box from ranks on separate meshes
                if _bytes_of(folder, first) != _bytes_of(folder, chunk):
                    problems.append(
                        f"'{key}': rank {rank} holds other values than rank {first.rank}, and they "
                        f"share no mesh. A checkpoint holds one model: train each model in a "
                        f"separate process group, or save sw.full_state_dict(model)"
                    )
                continue
            index[key] = replace(entry, chunks=(*entry.chunks, chunk))
    problems += [f"'{key}': no rank has written any of it" for key in sorted({*keys} - {*index})]
    for key, entry in index.items():
        if (problem := entry.problem()) is not None:
            problems.append(f"'{key}': {problem}")
    if problems:
        raise SaveError(listed("the ranks' parts do not make whole tensors:", problems))
    return index


def _bytes_of(folder: Path, chunk: Chunk) -> bytes:
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.begin)
        return file.read(chunk.num_bytes)
