# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked.

compare  check the sha256 of every file, divided over the ranks, before any file is interpreted
read     check the index, values, names, shapes and dtypes; read the saved boxes that overlap this
         rank's boxes into host memory
offer    give extra states to the modules that have any: their code may refuse
write    write tensors, optimizer and random states: reads no file, and can't be refused

Each step ends with a small exchange: all ranks continue, or all undo and raise the same error.

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
loaded by 3              rank 0 | 0-1 |  rank 1 | 2-4: two boxes |  rank 2 | 5-6 |
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import comm
from shardwise.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.files import check_bytes, open_listed, read_listed
from shardwise.checkpoint.index import MAX_BYTES, Chunk, Index, parse
from shardwise.checkpoint.manifest import INDEX, NAME, STATE, Manifest, rank_file
from shardwise.checkpoint.optimizer_state import OptimizerLoad, differences
from shardwise.checkpoint.pieces import Piece, local_pieces
from shardwise.checkpoint.state import (
    State,
    check_json_state,
    model_key,
    model_state,
    state_key,
    unwrapped,
)
from shardwise.checkpoint.values import RandomStates
from shardwise.layout import Shape
from shardwise.optim.storage import axes_of
from shardwise.precision.fp8_tensor import NAMES
from shardwise.shard.state_dict import clean
from shardwise.tensor import ShardedTensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's manifest, index and values: everything but the tensors."""

    path: Path
    manifest: Manifest
    index: Index
    values: dict[str, Any]

    @staticmethod
    def open(path: Path, manifest: Manifest) -> Checkpoint:
        """Read and check all but tensors and values of a rank. Call ``compare_bytes`` before."""
        manifest.check_sizes(path)
        data = read_listed(path, manifest.file(INDEX), MAX_BYTES)
        index = parse(data, str(path / INDEX), manifest.files)
        if len(index) != manifest.num_tensors:
            raise DamagedError(
                f"{path / INDEX}: {len(index)} tensors, {manifest.num_tensors} were saved"
            )
        values = manifest.read_json(path, STATE)
        check_json_state(values, str(path / STATE), index.keys())
        return Checkpoint(path, manifest, index, values)

    def untie(self, keys: Container[str]) -> None:
        """Undo the ties of parameters whose keys are in ``keys``: give each name the tensor, the
        optimizer's states and the group that were saved under the first name. The model that loads
        may tie other parameters than the model that was saved."""
        optimizer = self.values["optimizer"] or {"tensors": {}, "scalars": {}, "groups": []}
        groups = {name: group for group in optimizer["groups"] for name in group["parameters"]}
        tied = self.values["tied"].items()
        for name, first in ((name, first) for name, first in tied if model_key(name) in keys):
            self.index[model_key(name)] = self.index[model_key(first)]
            for key in optimizer["tensors"].get(first, ()):
                self.index[state_key(name, key)] = self.index[state_key(first, key)]
            for states in (optimizer["tensors"], optimizer["scalars"]):
                states |= {name: states[first]} if first in states else {}
            if first in groups:
                groups[first]["parameters"].append(name)

    def rank_values(self, rank: int) -> tuple[RandomStates, dict[str, Any]]:
        """The random states, not yet set, and the ``extra`` of a rank."""
        where = str(self.path / rank_file(rank))
        values = self.manifest.read_json(self.path, rank_file(rank))
        if type(values) is not dict or type(values.get("extra")) is not dict:
            raise DamagedError(f"{where} is not what shardwise writes")
        return RandomStates(values.get("random"), where), values["extra"]

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Tensor]]:
        """Read chunks, file by file, front to back; a single tensor is in memory at a time."""
        ordered = sorted(chunks, key=lambda chunk: (chunk.rank, chunk.begin))
        for name, wanted in groupby(ordered, key=lambda chunk: chunk.file):
            with open_listed(self.path, self.manifest.file(name)) as stream:
                for chunk in wanted:
                    flat = torch.empty(chunk.num_bytes, dtype=torch.uint8, device="cpu")
                    stream.seek(chunk.begin)
                    count = stream.readinto(flat.numpy())  # type: ignore[arg-type]
                    if count != chunk.num_bytes:
                        raise DamagedError(f"{self.path / name} has become shorter")
                    yield chunk, flat.view(chunk.dtype).view(chunk.sizes)

    def read_whole(self, key: str) -> Tensor:
        """A whole tensor in host memory."""
        entry = self.index[key]
        whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        copies = Copies(self, State(tensors={key: whole}))
        copies.stage()
        copies.write()
        return whole


def compare_bytes(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check the sha256 of this rank's share of the files; all ranks together check every file."""
    load = [(0, other) for other in range(world_size)]  # a heap: the least loaded rank first
    for file in sorted(manifest.files, key=lambda file: -file.size):
        size, reader = load[0]
        heapq.heapreplace(load, (size + file.size + 1, reader))
        if reader == rank:
            check_bytes(path, file)


# ------------------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class _Copy:
    """A part of a saved chunk and the memory that it fills; by rows if their order differs."""

    target: Tensor
    part: tuple[slice, ...]  # of the saved chunk
    rows: tuple[Tensor, Tensor] | None = None  # indices in the part, and in the target

    @property
    def num_elements(self) -> int:
        if self.rows is None:
            return self.target.numel()
        return len(self.rows[1]) * (self.target.numel() // len(self.target))

    def stage(self, value: Tensor) -> Callable[[], object]:
        """Take the part out of the saved chunk; return the function that writes it."""
        part = value[self.part]
        if self.rows is None:
            if part.numel() != value.numel():
                part = part.clone()  # the rest of the chunk can be freed
            return lambda: self.target.copy_(part)
        source, destination = self.rows
        device, rows = self.target.device, part.index_select(0, source)
        return lambda: self.target.index_copy_(0, destination.to(device), rows.to(self.target))


class Copies:
    """All copies that fill this rank's pieces of tensors, by saved chunk."""

    def __init__(self, checkpoint: Checkpoint, wanted: State) -> None:
        self._checkpoint, self._wanted = checkpoint, list(wanted.tensors.values())
        self._staged: list[Callable[[], object]] = []
        self.chunks: dict[Chunk, list[_Copy]] = {}
        orders = checkpoint.values["extra_states"]
        for key, tensor in wanted.tensors.items():
            stack = wanted.members.get(key)
            for piece in local_pieces(key, tensor):
                if stack is None:
                    self._fill(piece, None)
                    continue
                parts = stack.pieces(piece)
                if not piece.data.dim():
                    parts = parts[:1]  # the step count is the same for all experts
                for part in parts:
                    shape = checkpoint.index[part.key].shape
                    self._fill(part, stack.stored_rows(shape[0], orders) if shape else None)

    def _fill(self, piece: Piece, rows: Tensor | None) -> None:
        """Add the copies that fill a piece. ``rows``: see ``_overlap``."""
        num_elements = 0
        for chunk in self._checkpoint.index[piece.key].chunks:
            copy = _overlap(chunk, piece, rows)
            if copy is not None:
                self.chunks.setdefault(chunk, []).append(copy)
                num_elements += copy.num_elements
        assert num_elements == piece.data.numel(), piece.key

    def stage(self) -> None:
        """Read all chunks into host memory; write nothing."""
        self._staged = [
            copy.stage(value)
            for chunk, value in self._checkpoint.read(self.chunks)
            for copy in self.chunks[chunk]
        ]

    @torch.no_grad()
    def write(self) -> None:
        """Write the staged values into the tensors. This reads no file, so it can't fail on one."""
        for tensor in self._wanted:
            if isinstance(tensor, ShardedTensor) and tensor.version is not None:
                tensor.version.write()  # on every rank, also if it stores nothing of the tensor
        while self._staged:
            self._staged.pop()()


def _overlap(chunk: Chunk, piece: Piece, rows: Tensor | None) -> _Copy | None:
    """The copy from a chunk to the piece, or None if they have no element in common.

    With ``rows``, row i of the tensor is saved as row ``rows[i]``.
    """
    sizes = piece.data.shape
    low = [max(pair) for pair in zip(piece.offsets, chunk.offsets, strict=True)]
    ends = zip(piece.offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
    high = [min(a + size_a, b + size_b) for a, size_a, b, size_b in ends]
    source = _slices(low, high, chunk.offsets)
    target = _slices(low, high, piece.offsets)
    indices = None
    if rows is not None:
        chunk_rows = rows[piece.offsets[0] : piece.offsets[0] + sizes[0]] - chunk.offsets[0]
        inside = (chunk_rows >= 0) & (chunk_rows < chunk.sizes[0])
        piece_rows = inside.nonzero().flatten()
        indices = chunk_rows[piece_rows], piece_rows
        low[0], high[0] = 0, len(piece_rows)
        source = (slice(None), *source[1:])
        target = (slice(None), *target[1:])
    if any(begin >= end for begin, end in zip(low, high, strict=True)):
        return None
    return _Copy(piece.data[target], source, indices)


def _slices(low: list[int], high: list[int], offsets: Iterable[int]) -> tuple[slice, ...]:
    bounds = zip(low, high, offsets, strict=True)
    return tuple(slice(begin - offset, end - offset) for begin, end, offset in bounds)


# ------------------------------------------------------------------------------ load


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    restore_random: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint in place and return its ``extra`` (collective).

    The number of ranks, the strategy, the layout and the grouping of the optimizer may differ from
    those of the save; values are equal bit for bit. With the same number of ranks, each rank gets
    its random states and ``extra`` back. With another number, every rank gets the ``extra`` of rank
    0, and seeds its generators from the random states of rank 0 (``RandomStates``).
    ``optimizer=None`` ignores saved optimizer states.

    A load that raises an error of a checkpoint has changed nothing, on any rank. ``MismatchError``
    lists everything that does not fit, ``DamagedError`` names a file that is not as it was written,
    ``UnsafeError`` a file that contains more than numbers. A rank reads everything into host memory
    before it writes.
    """
    ranks = ranks_with_data()
    job = _Job(Path(os.path.abspath(path)), model, optimizer, ranks)
    _, identities = together(job.compare, ranks, facts=lambda _: job.manifest.identity)
    if len(set(identities)) > 1:
        raise MismatchError(f"the ranks were asked to load different checkpoints: {identities}")
    try:
        together(job.read, ranks)
        together(job.offer, ranks)
    except BaseException:
        job.undo()
        raise
    together(lambda: job.write(restore_random), ranks)
    for axis in axes_of(model.parameters()):
        axis.journal.forget_writes()
    return job.extra


class _Job:
    """One rank's part of one load."""

    manifest: Manifest
    checkpoint: Checkpoint
    state: State
    copies: Copies
    optimizer_load: OptimizerLoad | None = None
    random_states: RandomStates
    extra: dict[str, Any]

    def __init__(
        self, path: Path, model: nn.Module, optimizer: Optimizer | None, ranks: comm.Axis
    ) -> None:
        self.path, self.model, self.optimizer, self.ranks = path, model, optimizer, ranks
        self.offered: list[tuple[nn.Module, Any]] = []  # modules and their extra states before

    def compare(self) -> None:
        self.manifest = Manifest.read(self.path)
        self.manifest.check_sizes(self.path)
        compare_bytes(self.path, self.manifest, self.ranks.rank, self.ranks.size)

    def read(self) -> None:
        """Raise everything that does not fit, at once; then read all that this rank loads."""
        self.checkpoint = Checkpoint.open(self.path, self.manifest)
        self.random_states, self.extra = self.checkpoint.rank_values(
            self.ranks.rank if self.same_size else 0
        )
        self.state = model_state(self.model)
        self.checkpoint.untie(self.state.stored_keys)
        model_problems = self._model_problems()
        problems = self.state.problems + model_problems
        if self.optimizer is not None and not model_problems:
            self.optimizer_load = OptimizerLoad(self.optimizer, self.state, self.checkpoint)
            self.optimizer_load.compare()
            problems += self.optimizer_load.problems
        if problems:
            step = f"step {self.manifest.step}, " if self.manifest.step is not None else ""
            size = f"{step}{self.manifest.num_tensors} tensors"
            headline = f"{self.path} ({size}) does not fit; nothing was loaded:"
            raise MismatchError(listed(headline, problems, 40))
        self.copies = Copies(self.checkpoint, self.state)
        self.copies.stage()

    @property
    def same_size(self) -> bool:
        """Whether the checkpoint was saved by this number of ranks."""
        return self.manifest.world_size == self.ranks.size

    def _model_problems(self) -> list[str]:
        saved = {
            key.removeprefix("model."): entry
            for key, entry in self.checkpoint.index.items()
            if key.startswith("model.")
        }
        tied: dict[str, str] = self.checkpoint.values["tied"]
        state = self.state
        wanted: dict[str, tuple[Shape, torch.dtype]] = {}
        expected = set(state.tied)
        for key, tensor in state.tensors.items():
            name = key.removeprefix("model.")
            stack = state.stacks.get(name)
            shape = tuple(tensor.shape) if stack is None else stack.stored_shape(tensor.shape)
            wanted |= dict.fromkeys(stack.here if stack else (name,), (shape, tensor.dtype))
            expected |= {*state.stored_names(name)}
        names = set(saved) | set(tied)
        problems = []
        for name, (shape, dtype) in wanted.items():
            entry = saved.get(name)
            if planes := _mxfp8_parts(name, saved):
                names -= planes
                problems.append(
                    f"'{name}' is stored as fp8 codes ({', '.join(sorted(planes))}), and main "
                    f"weights are not made from codes. Save the model that trains (its checkpoints "
                    f"hold main weights, whatever the format), or decode them yourself "
                    f"(shardwise.precision.FP8Tensor)"
                )
            elif entry is None:
                problems.append(f"missing from it: '{name}' {list(shape)}")
            else:
                problems += differences(name, entry, shape, dtype)
        for name in sorted(names - expected):
            shape = saved[tied.get(name, name)].shape
            problems.append(f"unexpected in it: '{name}' {list(shape)}")
        for name, first in state.tied.items():
            if name in saved and first in saved and saved[name] is not saved[first]:
                problems.append(
                    f"'{name}' and '{first}' are one tensor in this model and two in the checkpoint"
                )
        extra, here = set(self.checkpoint.values["extra_states"]), set(state.extra_states)
        problems += [f"missing from it: '{name}'" for name in sorted(here - extra)]
        problems += [f"unexpected in it: '{name}'" for name in sorted(extra - here)]
        return problems

    def offer(self) -> None:
        """Set the modules' extra states; keep their old ones in case a module refuses."""
        named = unwrapped(self.model).named_modules(remove_duplicate=False)
        modules = {clean(name): module for name, module in named}
        # Experts keep the order of gate and up of this model: the load permutes rows instead.
        orders = {stack.order for stack in self.state.stacks.values()}
        for name, value in self.checkpoint.values["extra_states"].items():
            if name not in orders:
                module = modules[name.rpartition(".")[0]]
                self.offered.append((module, copy.deepcopy(module.get_extra_state())))
                module.set_extra_state(value)

    def undo(self) -> None:
        """Undo the changes of ``read`` and ``offer``."""
        for module, value in reversed(self.offered):
            module.set_extra_state(value)
        if self.optimizer_load is not None:
            self.optimizer_load.undo()

    def write(self, restore_random: bool) -> None:
        self.copies.write()
        if self.optimizer_load is not None:
            self.optimizer_load.write()
        if restore_random and self.same_size:
            self.random_states.restore()
        elif restore_random:
            self.random_states.reseed(self.ranks.rank, self.ranks.size)


def _mxfp8_parts(name: str, saved: Iterable[str]) -> set[str]:
    """The names of MXFP8 codes and scales that a checkpoint holds for one parameter."""
    parts = {f"{name}.{plane}.{part}" for plane in NAMES.values() for part in ("codes", "scales")}
    return parts & set(saved)


# ------------------------------------------------------------------------------ verify


@dataclass
class Verification:
    """The result of ``verify``; ``problems`` is empty for a sound checkpoint."""

    path: Path
    manifest: Manifest | None = None
    num_tensors: int = 0
    num_elements: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Turn an error into one of the problems."""
        try:
            yield
        except CheckpointError as error:
            self.problems.append(str(error))

    def __str__(self) -> str:
        lines = [f"{self.path}: {'sound' if self.ok else 'NOT SOUND'}"]
        if self.manifest is not None:
            saved = self.manifest
            step = "" if saved.step is None else f"step {saved.step}, "
            torch_version = saved.versions["torch"]
            lines += [
                f"  {step}{saved.created}, {saved.world_size} ranks, torch {torch_version}",
                f"  {self.num_tensors} tensors, {self.num_elements} elements, "
                f"{len(saved.files)} files, {saved.num_bytes} bytes",
                *(f"  {text}" for text in saved.placements),
            ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def verify(path: str | os.PathLike[str]) -> Verification:
    """Check a checkpoint as ``load`` does, for all ranks, without a model or a process group.

    A load refuses everything that this reports. Checks sizes and every sha256. If all bytes are as
    written, checks the index, the optimizer's groups, and random states and extra of each rank.
    """
    report = Verification(Path(os.path.abspath(path)))
    with report.collecting():
        report.manifest = Manifest.read(report.path)
    if report.manifest is None:
        return report
    for file in report.manifest.files:
        with report.collecting():
            check_bytes(report.path, file)
    as_written = report.ok
    listed = {file.name for file in report.manifest.files} | {NAME}
    for entry in sorted(report.path.iterdir()):
        if entry.name not in listed:
            report.problems.append(f"{entry} is not in the manifest")
    if not as_written:
        return report
    with report.collecting():
        checkpoint = Checkpoint.open(report.path, report.manifest)
        entries = checkpoint.index.values()
        report.num_tensors = len(entries)
        report.num_elements = sum(math.prod(entry.shape) for entry in entries)
        for rank in range(report.manifest.world_size):
            with report.collecting():
                checkpoint.rank_values(rank)
    return report
