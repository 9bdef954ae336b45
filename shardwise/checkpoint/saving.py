# SPDX-License-Identifier: Apache-2.0
"""Saving: describe, divide, write, meet, rename; and ``save`` for a single checkpoint.

    snapshot   the tensors that this rank writes; values; random states              main thread
    agree      a small object per rank: the same step, the same tensors, problems    main thread
    write      a file of tensors per rank, hashed while it is written                any thread
    publish    rank 0 joins the parts into the table and writes the manifest         any thread

The layout says which ranks hold the same piece, so all ranks choose the same writer, without a
message, and one rank describes where all elements of a tile are:

    hsdp, 2 x 2 ranks        rank 0   rank 1   rank 2   rank 3
    holds                    A' B'    A" B"    A' B'    A" B"     ' and ": the halves of A and B
    writes                   A'       A"       B'       B"        the largest tensor first, to the
                                                                  replica with the fewest bytes
    describes                A, B
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint.errors import (
    CheckpointError,
    MismatchError,
    SaveError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.files import File, rank_file, write_tensors
from shardwise.checkpoint.manifest import Manifest, versions
from shardwise.checkpoint.meeting import Meeting, is_taken, remove_temporary, temporary
from shardwise.checkpoint.pieces import (
    Entry,
    Key,
    Run,
    Table,
    Tile,
    key_text,
    piece_name,
    runs_of,
)
from shardwise.checkpoint.state import (
    State,
    facts_of,
    model_state,
    optimizer_values,
    placements_of,
)
from shardwise.checkpoint.values import encode, random_states, to_json, typed
from shardwise.core import comm
from shardwise.core.cut import Cut
from shardwise.core.layout import Shape
from shardwise.core.streams import Lanes
from shardwise.core.tensor import ShardedTensor
from shardwise.debugging import compare_replicas

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800.0
VALUES = "values"  # metadata of a rank's file: its random states, its extra, as JSON
_ALIGNMENT = 64


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
    final, ranks = Path(os.path.abspath(path)), ranks_with_data()
    one = Save(
        [final],
        TIMEOUT_SECONDS,
        lambda: Snapshot(ranks, model, optimizer, extra, config),
        clean=lambda: remove_temporary(final.parent, final.name),
    )
    one.write(sequence=lambda: 1)
    comm.agree(None, ranks)  # the caller may move the checkpoint once every rank has seen it


class Snapshot:
    """The data that one rank writes, and the values that rank 0 writes for all ranks: views of the
    live tensors, and copies of all other values. Raises all problems at once."""

    def __init__(
        self,
        ranks: comm.Axis,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any] | None,
        config: Mapping[str, Any] | None,
    ) -> None:
        state = model_state(model)
        of_optimizer = None if optimizer is None else optimizer_values(optimizer, state)
        problems = state.problems
        if not state.held:
            problems.append(f"{type(model).__name__} has neither parameters nor buffers")
        given: dict[str, Any] = {"extra": dict(extra or {}), "config": dict(config or {})}
        given |= {f"the extra state '{name}'": value for name, value in state.extra_states.items()}
        given["the optimizer's scalars"] = of_optimizer and of_optimizer.scalars
        for name, value in given.items():
            try:
                encode(value, name)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(listed("this can't be saved:", problems))
        self.tensors, self.table = divide(state, ranks.rank, ranks.size)
        self.live = {key_text(held.key): held.tensor for held in state.held}  # until compared
        self.keys = sorted({held.key for held in state.held})  # the same on all ranks
        of_rank = {"random": random_states(), "extra": given["extra"], "pieces": state.digest}
        self.rank_values = to_json(of_rank, "extra")
        # The fields of the manifest.
        self.values: dict[str, Any] = copy.deepcopy(
            {
                "experts": sorted({of.name for of in state.experts.values()} - state.tied.keys()),
                "tied": state.tied,
                "extra_states": state.extra_states,
                "dtypes": state.dtypes,
                "optimizer": of_optimizer,
                "config": None if config is None else dict(config),
                "placements": placements_of(model),
                "facts": facts_of(model, ranks.size),
            }
        )


# ------------------------------------------------------------------------------ dividing


def divide(state: State, rank: int, world_size: int) -> tuple[dict[str, Tensor], Table]:
    """The tensors that this rank writes, by name in its file, and those that it describes. Every
    piece has one writer."""
    written: dict[str, Tensor] = {}
    groups: dict[tuple[int, ...], int] = {}
    entries: dict[Key, Entry] = {}
    known: dict[Any, _Holders] = {}
    everyone = _Holders(numpy.arange(world_size).reshape(1, -1), rank)
    first, alone = (_Holders(numpy.full((1, 1), one), rank) for one in (0, rank))
    # Ranks with the same replicas have the same tensors of the same sizes: all choose the same.
    for held in sorted(state.held, key=lambda held: (-held.tensor.nbytes, held.key)):
        tensor, of = held.tensor, held.experts
        data, begin, runs = tensor.detach(), 0, None
        offsets, sizes = (0,) * tensor.dim(), tuple(tensor.shape)
        holders = alone if of is not None and of.total > of.count else everyone
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                continue  # this rank is not on the mesh of the tensor
            data = tensor.to_local().detach()
            same: Any = tensor.device_mesh, tuple(tensor.placements)
            if isinstance(tensor, ShardedTensor):
                cut = tensor.cut
                runs, begin = _runs(cut), cut.piece[0]
                same = cut.full_mesh, cut.sharded, None if cut.tile is None else cut.tile.dims
                if cut.tile is not None:
                    offsets, sizes = cut.tile.box
            else:  # of torch's DTensors each piece is a tile
                [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if same not in known:
                known[same] = _Holders(_ranks_of(tensor), rank)
            holders = known[same]
        holders = first if held.key in state.buffers else holders
        offsets, sizes = held.stored(offsets, sizes)
        runs = runs or runs_of([(0, math.prod(sizes))])
        column = holders.choose(runs)
        tile = Tile(offsets, sizes, 0, runs)
        if rank == holders.ranks[0][0]:
            tiles = entries[held.key].tiles if held.key in entries else ()
            if math.prod(sizes) and (sizes or not tiles):  # experts share a number, such as a count
                group = groups.setdefault(holders.ranks[column], len(groups))
                tiles = (*tiles, tile._replace(group=group))
            entries[held.key] = Entry(tensor.dtype, held.shape, tiles)
        if data.numel() and column == holders.mine:
            end = begin + data.numel()
            name = piece_name(held.key, held.shape, tile, begin, end)
            written[name] = data.view(held.shape) if end - begin == math.prod(held.shape) else data
    return written, Table.of(groups, entries.items())


class _Holders:
    """The ranks that hold some tensors: for each replica, the holder of each piece."""

    def __init__(self, ranks: Any, rank: int) -> None:
        self.ranks = [tuple(column) for column in ranks.T.tolist()]
        self.mine = next((n for n, column in enumerate(self.ranks) if rank in column), None)
        self._loads = numpy.zeros(ranks.shape, numpy.int64)  # elements, by first holder

    def choose(self, runs: tuple[Run, ...]) -> int:
        """The replica that writes these pieces: the one that has written least for the first."""
        loads = self._loads[runs[0].holder if runs else 0]
        column = int(loads.argmin())
        loads[column] += sum(run.length for run in runs)
        return column


def _ranks_of(tensor: DTensor) -> Any:
    """The ranks that hold a DTensor: a row for each piece, a column for each replica; of torch's
    own, whose other pieces are not known here, the ranks that hold this rank's piece."""
    place: Any = tensor.device_mesh.get_coordinate()
    grid = tensor.device_mesh.mesh.cpu().numpy()
    if not isinstance(tensor, ShardedTensor):
        # Every placement that does not replicate cuts: torch's strided shards are no ``Shard``.
        cuts = [not placement.is_replicate() for placement in tensor.placements]
        where = tuple(at if cut else slice(None) for at, cut in zip(place, cuts, strict=True))
        return numpy.sort(grid[where].reshape(1, -1))
    cut, data_axes = tensor.cut, len(tensor.cut.sharded)
    dims = () if cut.tile is None else cut.tile.dims
    tile = [slice(None) if dim is None else place[data_axes + n] for n, dim in enumerate(dims)]
    grid = grid[(*(slice(None) for _ in range(data_axes)), *tile)]
    # The inner axis is the major one, as in ``shard_range``.
    sharded = [axis for axis in reversed(range(data_axes)) if cut.sharded[axis]]
    rest = [axis for axis in range(grid.ndim) if axis not in sharded]
    return grid.transpose(*sharded, *rest).reshape(cut.num_holders, -1)


def _runs(cut: Cut) -> tuple[Run, ...]:
    """The pieces of a tile, by number of the holder."""
    if cut.division is not None:  # replicas divide in any order
        pieces = sorted((low, high, holder) for holder, (low, high) in cut.held())
        return runs_of((holder, high - low) for low, high, holder in pieces)
    part = cut.layout.numel // cut.num_holders  # elements of the buffer that each holder has
    start, numel = cut.layout.starts[cut.index], cut.layout.items[cut.index].numel
    first, last = start // part, (start + numel - 1) // part
    if first >= last:
        return runs_of([(first, numel)])
    head = Run(first, (first + 1) * part - start, 1)
    middle = Run(first + 1, part, last - first - 1)
    return tuple(run for run in (head, middle, Run(last, start + numel - last * part, 1)) if run[2])


class Staging:
    """Host memory from which a background save writes while training changes the tensors.

    device   | weight | exp_avg | ...           copied once, then training continues
    host     |weight|exp_avg|..... one block, kept from save to save .....|
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # grows to the largest save

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors to host memory. The copies are complete on return."""
        rooms = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        if self._block.numel() < (needed := sum(rooms)):
            del self._block  # free the old one first
            self._block = torch.empty(
                needed, dtype=torch.uint8, device="cpu", pin_memory=bool(devices)
            )
        staged = {}
        parts = self._block[:needed].split(rooms)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True):
            host = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            staged[name] = host.copy_(tensor, non_blocking=True)
        for device in devices:
            Lanes(device).synchronize()
        return staged


# ------------------------------------------------------------------------------ writing


class Save:
    """A save of one rank among others. Making it takes the snapshot, and makes and agrees on the
    temporary directory; the first of ``finals`` that is free is the name of the checkpoint. All
    problems are raised on every rank. ``clean`` comes first, on rank 0."""

    def __init__(
        self,
        finals: list[Path],
        timeout: float,
        snapshot: Callable[[], Snapshot],
        *,
        step: int | None = None,
        clean: Callable[[], object] = lambda: None,
    ) -> None:
        ranks, folder, self.step = ranks_with_data(), temporary(finals[0]), step

        def take() -> tuple[Snapshot, Path]:
            if ranks.rank != 0:
                return snapshot(), finals[0]
            clean()
            taken, free = snapshot(), next((one for one in finals if not is_taken(one)), None)
            if free is None:
                raise CheckpointError(
                    f"{finals[0]} exists already, and a checkpoint is never overwritten: remove it "
                    f"or choose another path (a Store makes one for each step)"
                )
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise SaveError(f"{folder} can't be made: {error.strerror}") from error
            return taken, free

        def facts(taken: tuple[Snapshot, Path]) -> Any:
            digest = hashlib.sha256(repr(taken[0].keys).encode()).hexdigest()
            return folder, taken[1], (str(finals[0]), step, digest)

        try:
            (self.snapshot, _), of_ranks = together(take, ranks, facts=facts)
            for rank, (_, _, theirs) in enumerate(of_ranks):
                if theirs != of_ranks[0][2]:
                    raise MismatchError(
                        f"rank 0 saves {of_ranks[0][2]}, rank {rank} saves {theirs} (place, step, "
                        f"digest of the names): all ranks save the same model and optimizer "
                        f"states, at the same step, to the same place"
                    )
            compare_replicas(self.snapshot.live)
            self.snapshot.live.clear()
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        folder, final, _ = of_ranks[0]
        self.meeting = Meeting(
            folder=folder, final=final, rank=ranks.rank, world_size=ranks.size, timeout=timeout
        )

    def stage(self, staging: Staging) -> None:
        """Copy the tensors, so that training can change them."""
        try:
            self.snapshot.tensors = staging.copy(self.snapshot.tensors)
        except BaseException as error:  # out of memory: the others must not wait for this rank
            self.meeting.fail(error)
            raise

    def write(self, sequence: Callable[[], int]) -> Path:
        """Write this rank's part, and return the path once rank 0 has published the checkpoint.
        A rank that fails makes every rank fail."""
        meeting, snapshot, began = self.meeting, self.snapshot, time.monotonic()
        try:
            place = meeting.folder / rank_file(meeting.rank)
            try:
                file = write_tensors(place, snapshot.tensors, {VALUES: snapshot.rank_values})
            except OSError as error:  # Python names no file where an open one can't grow
                error.filename = error.filename or str(place)
                raise
            meeting.done({"file": file, "table": snapshot.table.as_json()})
            if meeting.rank != 0:
                return meeting.outcome()
            facts = {"step": self.step, "sequence": sequence(), **snapshot.values}
            manifest = join(meeting.parts(), snapshot.keys, **facts)
            path = meeting.publish(lambda: manifest.write(meeting.folder))
        except BaseException as error:
            said = meeting.fail(error)
            if isinstance(error, Exception):
                raise said from error
            raise
        log.info("saved %s in %.2f s", path, time.monotonic() - began)
        return path


def join(parts: list[dict[str, Any]], keys: Iterable[Key], **values: Any) -> Manifest:
    """The manifest of what all ranks have written; raises unless the tiles make whole tensors."""
    groups: dict[tuple[int, ...], int] = {}  # equal lists of holders are one
    entries: dict[Key, tuple[Entry, dict[Shape, Tile]]] = {}
    for part in (typed(Table)(part["table"]) for part in parts if part["table"]["alike"]):
        numbers = [groups.setdefault(group, len(groups)) for group in part.groups]
        for entry, alike in part.alike:
            found = {t.offsets: t._replace(group=numbers[t.group]) for t in entry.tiles}
            for key in alike:  # ranks without a common mesh may hold the same
                known = entries.setdefault(key, (entry, {}))[1]
                known |= {place: tile for place, tile in found.items() if place not in known}
    table = Table.of(
        groups,
        (
            (key, entry._replace(tiles=tuple(tile for _, tile in sorted(found.items()))))
            for key, (entry, found) in entries.items()
        ),
    )
    try:
        if lost := [key_text(key) for key in keys if key not in entries]:
            raise ValueError(f"no rank has described {lost[:20]}")
        files = [File(*part["file"]) for part in parts]
        return Manifest(files=files, table=table, versions=versions(), **values)
    except ValueError as error:
        raise SaveError(f"the ranks' parts do not make whole tensors: {error}") from error
