# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked.

check   names, shapes, dtypes against the manifest's index; sha256, files shared out over ranks
agree   one small object per rank: all go on, or all raise the same
read    the saved boxes that meet this rank's, each copied into place
agree   that everybody has read

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
read by 3                rank 0 | 0-1 |  rank 1 | 2-4: two boxes |  rank 2 | 5-6 |
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint import metadata, random_state, state
from shardwise.checkpoint.errors import CheckpointError, DamagedError, MismatchError, UnsafeError
from shardwise.checkpoint.files import Window, check_bytes, open_listed, read_listed
from shardwise.checkpoint.manifest import METADATA, STATE, Manifest, rank_file
from shardwise.checkpoint.state import State, model_key, state_key
from shardwise.checkpoint.world import World, share
from shardwise.layout import Shape
from shardwise.precision.mxfp8_tensor import NAMES


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    restore_random: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint in place and return its ``extra`` (collective).

    The number of ranks, the strategy, the layout and the grouping of the optimizer may differ from
    those of the save; values are equal bit for bit. With as many ranks as then, each gets its own
    random states and ``extra`` back; with another number, ``extra`` is rank 0's and the generators
    are seeded from it (``random_state``). ``optimizer=None`` leaves saved optimizer states alone.

    ``MismatchError`` lists all that does not fit; nothing has been loaded then, nor where a byte is
    not as it was written (``DamagedError``) or a file is not what it should be (``UnsafeError``).
    """
    world = World.now()
    job = _Job(Path(os.path.abspath(path)), model, optimizer, world)
    identities = world.together(job.check, facts=lambda: job.checkpoint.manifest.identity)
    if len(set(identities)) > 1:
        raise MismatchError(f"the ranks were asked to load different checkpoints: {identities}")
    world.together(lambda: job.read(restore_random))
    return job.extra


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's manifest, index and values: everything but the tensors."""

    path: Path
    manifest: Manifest
    index: metadata.Index
    values: dict[str, Any]

    @staticmethod
    def open(path: Path) -> Checkpoint:
        manifest = Manifest.read(path)
        manifest.check_sizes(path)
        data = read_listed(path, manifest.file(METADATA))
        index = metadata.parse(data, str(path / METADATA), manifest.files)
        values = manifest.read_json(path, STATE)
        if not isinstance(values, dict) or not {"tied", "extra_states", "optimizer"} <= set(values):
            raise DamagedError(f"{path / STATE} is not what shardwise writes")
        return Checkpoint(path, manifest, index, values)

    def read(self, chunks: Iterable[metadata.Chunk]) -> Iterator[tuple[metadata.Chunk, Tensor]]:
        """The tensors of some chunks, file by file, front to back. One is in memory at a time."""
        by_file: dict[str, list[metadata.Chunk]] = {}
        for chunk in chunks:
            by_file.setdefault(chunk.file, []).append(chunk)
        for name, wanted in sorted(by_file.items()):
            file = self.manifest.file(name)
            with open_listed(self.path, file) as stream:
                for chunk in sorted(wanted, key=lambda chunk: chunk.begin):
                    yield chunk, _read_tensor(stream, self.path / name, chunk)

    def inspect(self, chunks: Iterable[metadata.Chunk]) -> None:
        """That each of them is a tensor of the right shape; its numbers are not read."""
        with torch.serialization.skip_data():
            for _ in self.read(chunks):
                pass


def _read_tensor(stream: Any, where: Path, chunk: metadata.Chunk) -> Tensor:
    window = Window(stream, chunk.begin, chunk.length)
    try:
        value = torch.load(cast(IO[bytes], window), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise UnsafeError(
            f"{where} holds something else than a tensor at byte {chunk.begin}, which loading "
            f"could run: {reason}"
        ) from error
    except Exception as error:  # torch's reader of broken bytes may raise anything
        raise DamagedError(f"{where}: no tensor at byte {chunk.begin}: {error!r:.200}") from error
    found = type(value).__name__
    if type(value) is Tensor:
        if value.dtype == chunk.dtype and tuple(value.shape) == chunk.sizes:
            return value
        found = f"{value.dtype} {list(value.shape)}"
    raise DamagedError(
        f"{where}: {found} at byte {chunk.begin}, where the index promises {chunk.dtype} "
        f"{list(chunk.sizes)}"
    )


class _Job:
    """One rank's part of one load."""

    checkpoint: Checkpoint
    state: State
    copies: Copies
    extra: dict[str, Any]

    def __init__(
        self, path: Path, model: nn.Module, optimizer: Optimizer | None, world: World
    ) -> None:
        self.path, self.model, self.optimizer, self.world = path, model, optimizer, world
        self.new_states: list[tuple[Tensor, dict[str, Any]]] = []  # given out when all is read

    # ------------------------------------------------------------------ before anything is changed

    def check(self) -> None:
        """All that doesn't fit, at once; then the bytes; then what they say they are."""
        self.checkpoint = Checkpoint.open(self.path)
        self.state = state.of_model(self.model)
        problems = list(self.state.problems)
        model_problems = self._model_problems()
        problems += model_problems
        if self.optimizer is not None and not model_problems:
            problems += self._optimizer_problems(self.optimizer)
        if problems:
            raise MismatchError(_explain(self.path, self.checkpoint.manifest, problems))
        files = self.checkpoint.manifest.files
        sizes = [file.size for file in files]
        for file in share(files, sizes, self.world.rank, self.world.size):
            check_bytes(self.path, file)
        self.copies = Copies(self.checkpoint, self.state.tensors, self.checkpoint.values["tied"])
        self.checkpoint.inspect(self.copies.chunks)

    def _model_problems(self) -> list[str]:
        saved = {
            key.removeprefix("model."): entry
            for key, entry in self.checkpoint.index.items()
            if key.startswith("model.")
        }
        tied: dict[str, str] = self.checkpoint.values["tied"]
        here = self.state
        wanted = {key.removeprefix("model."): t for key, t in here.tensors.items()}
        names = set(saved) | set(tied)
        problems = []
        for name, tensor in wanted.items():
            entry = saved.get(tied.get(name, name))
            if coded := _coded_parts(name, saved):
                names -= coded
                problems.append(
                    f"'{name}' is there as MXFP8 codes ({', '.join(sorted(coded))}): main weights "
                    f"are never made from codes unasked. Save the model that trains (its "
                    f"checkpoints hold main weights, whatever the format), or decode them yourself "
                    f"(shardwise.precision.MXFP8Tensor)"
                )
            elif entry is None:
                problems.append(f"missing from it: '{name}' {list(tensor.shape)}")
            else:
                problems += _differences(name, entry, tensor)
        for name in sorted(names - set(wanted) - set(here.tied)):
            shape = list(saved[tied.get(name, name)].shape)
            problems.append(f"unexpected in it: '{name}' {shape}")
        for name, first in here.tied.items():
            if name in saved and first in saved:
                problems.append(
                    f"'{name}' and '{first}' are one tensor in this model and two in the checkpoint"
                )
        extra = set(self.checkpoint.values["extra_states"])
        problems += [f"missing from it: '{n}'" for n in sorted(set(here.extra_states) - extra)]
        problems += [f"unexpected in it: '{n}'" for n in sorted(extra - set(here.extra_states))]
        return problems

    def _optimizer_problems(self, optimizer: Optimizer) -> list[str]:
        saved = self.checkpoint.values["optimizer"]
        if saved is None:
            return ["it holds no optimizer state: load with optimizer=None, or save with one"]
        kind = type(optimizer).__name__
        state.create_state(optimizer)
        problems: list[str] = []
        known: set[str] = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.state.names.get(id(parameter))
                if name is None:
                    problems.append(
                        f"the optimizer holds a parameter of shape {list(parameter.shape)} that "
                        f"the model does not: make it after wrapping, with model.parameters()"
                    )
                    continue
                known.add(name)
                problems += self._state_problems(optimizer, name, parameter, saved, kind)
        stored = set(saved["tensors"]) | set(saved["scalars"])
        for name in sorted(stored - known):
            problems.append(f"unexpected in it: optimizer state of '{name}'")
        return problems

    def _state_problems(
        self, optimizer: Optimizer, name: str, parameter: Tensor, saved: Any, kind: str
    ) -> list[str]:
        """Compare one parameter's state; prepare what this optimizer has not made yet."""
        tensors = saved["tensors"].get(name, [])
        scalars = saved["scalars"].get(name, {})
        wanted = {*tensors, *scalars}
        here: dict[str, Any] = optimizer.state.get(parameter, {})
        entries = {key: self.checkpoint.index.get(state_key(name, key)) for key in tensors}
        if any(entry is None for entry in entries.values()):
            raise DamagedError(f"{self.path}: optimizer states of '{name}' are not in the index")
        if not here and wanted:
            # It makes its states later than now, or never for this parameter.
            here = {key: _new_state(parameter, key, e) for key, e in entries.items() if e}
            here |= scalars
            self.new_states.append((parameter, here))
        elif here and not wanted and saved["class"] == kind:
            self.new_states.append((parameter, {}))  # as new as it was when it was saved
            return []
        if set(here) != wanted:
            return [
                f"optimizer state of '{name}': {sorted(wanted) or 'none'} from {saved['class']} "
                f"in the checkpoint, {sorted(here) or 'none'} in this {kind}"
            ]
        problems = []
        for key, entry in entries.items():
            value, full = here[key], state_key(name, key)
            if isinstance(value, Tensor) and entry is not None:
                problems += _differences(full, entry, value)
                self.state.tensors[full] = value
            else:
                problems.append(f"'{full}' is a tensor in the checkpoint and a number here")
        return problems

    # ------------------------------------------------------------------ reading

    def read(self, restore_random: bool) -> None:
        self.copies.run()
        for parameter, new in self.new_states:
            assert self.optimizer is not None
            self.optimizer.state[parameter] = new
        values = self.checkpoint.values
        state.set_extra_states(self.model, values["extra_states"])
        if self.optimizer is not None:
            state.set_options(self.optimizer, self.state, values["optimizer"])
            state.set_scalars(self.optimizer, self.state, values["optimizer"])
        manifest = self.checkpoint.manifest
        same = manifest.world_size == self.world.size
        mine = self._rank_values(self.world.rank if same else 0)
        self.extra = mine["extra"]
        if restore_random and same:
            random_state.restore(mine["random"], str(self.path / rank_file(self.world.rank)))
        elif restore_random:
            random_state.reseed(mine["random"], self.world.rank, self.world.size)

    def _rank_values(self, rank: int) -> dict[str, Any]:
        values = self.checkpoint.manifest.read_json(self.path, rank_file(rank))
        if not isinstance(values, dict) or not {"random", "extra"} <= set(values):
            raise DamagedError(f"{self.path / rank_file(rank)} is not what shardwise writes")
        return values


def _new_state(parameter: Tensor, key: str, entry: metadata.Entry) -> Tensor:
    """Like the parameter, unless it is a count beside one; in the layout of the parameter then."""
    if entry.shape == tuple(parameter.shape) and (entry.shape or key != "step"):
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=entry.dtype)


def _differences(name: str, entry: metadata.Entry, tensor: Tensor) -> list[str]:
    problems = []
    if entry.shape != tuple(tensor.shape):
        problems.append(
            f"'{name}' has shape {list(entry.shape)} in it, {list(tensor.shape)} in this model"
        )
    if entry.dtype != tensor.dtype:
        problems.append(
            f"'{name}' is {entry.dtype} in it, {tensor.dtype} here: load in the saved dtype and "
            f"convert afterwards"
        )
    if (tiling := entry.problem()) is not None:
        raise DamagedError(f"'{name}': {tiling}")
    return problems


def _coded_parts(name: str, saved: Iterable[str]) -> set[str]:
    """What a checkpoint holds of MXFP8 planes of one parameter."""
    parts = {f"{name}.{plane}.{part}" for plane in NAMES.values() for part in ("codes", "scales")}
    return parts & set(saved)


def _explain(path: Path, manifest: Manifest, problems: list[str]) -> str:
    of = f"step {manifest.step}, " if manifest.step is not None else ""
    headline = f"{path} ({of}{manifest.num_tensors} tensors) does not fit; nothing was loaded:"
    shown = [f"  {problem}" for problem in problems[:40]]
    if len(problems) > 40:
        shown.append(f"  and {len(problems) - 40} more")
    return "\n".join([headline, *shown])


# ------------------------------------------------------------------------------ tensors


class Copies:
    """What fills this rank's pieces of tensors: for every saved piece, where its parts go."""

    def __init__(
        self, checkpoint: Checkpoint, targets: dict[str, Tensor], tied: dict[str, str]
    ) -> None:
        self._checkpoint = checkpoint
        self.chunks: dict[metadata.Chunk, list[tuple[Tensor, Any]]] = {}
        for key, tensor in targets.items():
            name = key.removeprefix("model.")
            source = model_key(tied[name]) if key.startswith("model.") and name in tied else key
            entry = checkpoint.index[source]
            by_offset = {chunk.offsets: chunk for chunk in entry.chunks}
            for item in _overlaps(entry, _boxes(tensor)):
                chunk = by_offset[tuple(item.storage_index.offset)]
                self.chunks.setdefault(chunk, []).append((tensor, item))

    @torch.no_grad()
    def run(self) -> None:
        for chunk, value in self._checkpoint.read(self.chunks):
            for tensor, item in self.chunks[chunk]:
                target = _box_of(tensor, item.dest_index)
                _narrow(target, item.dest_offsets, item.lengths).copy_(
                    _narrow(value, item.storage_offsets, item.lengths)
                )


def read_whole(checkpoint: Checkpoint, key: str) -> Tensor:
    """One tensor, whole, in host memory."""
    entry = checkpoint.index[key]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    Copies(checkpoint, {key: whole}, {}).run()
    return whole


def _boxes(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """This rank's boxes. Asking a sharded parameter also marks it as written, on every rank."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        chunks: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()
        return [chunk for chunk in chunks if chunk.sizes.numel()]
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]


def _overlaps(entry: metadata.Entry, boxes: list[ChunkStorageMetadata]) -> list[Any]:
    """What to copy from where: DCP's resharding arithmetic."""
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in entry.chunks
    ]
    saved = TensorStorageMetadata(
        TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks
    )
    items = create_read_items_for_chunk_list("", saved, boxes)
    read, needed = (
        sum(item.lengths.numel() for item in items),
        sum(box.sizes.numel() for box in boxes),
    )
    if read != needed:
        raise CheckpointError(f"{read} of {needed} elements would be read: this is a bug")
    return items


def _box_of(tensor: Tensor, index: MetadataIndex) -> Tensor:
    if isinstance(tensor, DTensor):
        box: Tensor = tensor.__get_tensor_shard__(index)
        return box.detach()
    return tensor.detach()


def _narrow(tensor: Tensor, offsets: Shape, lengths: Shape) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
