# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked; and
``verify``.

manifest   rank 0 reads it and tells the others
compare    check the sha256 of every file, divided over the ranks, before any file is interpreted
read       check values, names, shapes and dtypes; read what fills this rank's pieces into host
           memory; give extra states to the modules that have any: their code may refuse
write      write tensors, optimizer and random states: reads no file, and can't be refused

Each step ends with a small exchange: all ranks continue, or all undo and raise the same error.

saved by 2 ranks         rank 0 | rows 0-3 |  rank 1 | rows 4-6 |
read by 3                rank 0 | 0-1 |  rank 1 | 2-4: from both |  rank 2 | 5-6 |
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.files import Header, check_bytes, form, opened, rank_file, read_header
from shardwise.checkpoint.manifest import Manifest, read_bytes, versions
from shardwise.checkpoint.pieces import Key, Part, key_text
from shardwise.checkpoint.saving import VALUES
from shardwise.checkpoint.state import (
    Held,
    OptimizerLoad,
    facts_of,
    model_state,
    placements_of,
    unwrapped,
)
from shardwise.checkpoint.values import (
    DAMAGE,
    check_random,
    decode,
    parse_json,
    reseed,
    restore_random,
)
from shardwise.core import comm
from shardwise.core.layout import Shape
from shardwise.core.tensor import ShardedTensor
from shardwise.shard.state_dict import clean

Copies = list[tuple[Tensor, Tensor]]  # values in host memory, and the target of the same shape


def compare_bytes(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check the sha256 of this rank's share of the files; all ranks together check every file."""
    files = sorted(enumerate(manifest.files), key=lambda numbered: -numbered[1].size)
    for number, file in files[rank::world_size]:
        check_bytes(path / rank_file(number), file)


class Wanted(NamedTuple):
    """A part of a saved tensor, and a box to fill from it. Without a target, only look for it."""

    part: Part
    dtype: torch.dtype
    place: Shape  # of the target in the tensor
    target: Tensor | None


class Reader:
    """Fills boxes of tensors from the files of a checkpoint. Call ``compare_bytes`` before."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._wanted: list[Wanted] = []

    def add(self, key: Key, offsets: Shape, sizes: Shape, target: Tensor | None) -> None:
        """Plan to fill ``target`` with a box of a saved tensor. None: only look for the pieces."""
        dtype = self.manifest.tensors[key].dtype
        parts = self.manifest.table.parts(key, offsets, sizes)
        self._wanted += [Wanted(part, dtype, offsets, target) for part in parts]

    def read(self) -> Copies:
        """Read all that was planned, file by file, front to back. No target is written."""
        found: Copies = []
        ordered = sorted(self._wanted, key=lambda wanted: wanted.part[:4])
        self._wanted = []
        for rank, several in groupby(ordered, key=lambda wanted: wanted.part.rank):
            with self._opened(rank) as (stream, header, _):
                for wanted in several:
                    found += self._read(stream, header, wanted)
        return found

    def _read(self, stream: io.BufferedReader, header: Header, wanted: Wanted) -> Copies:
        part, dtype, place, target = wanted
        label, begin, end = header.get(part.name, (None, 0, 0))
        if label != form(dtype)[0] or end - begin != part.numel * dtype.itemsize:
            where = self.path / rank_file(part.rank)
            raise DamagedError(f"{where} does not hold '{part.name}': {part.numel} of {dtype}")
        if target is None:
            return []
        low = tuple(map(max, place, part.offsets))
        high = tuple(map(min, _ends(place, target.shape), _ends(part.offsets, part.sizes)))
        sizes = tuple(map(int.__sub__, high, low))
        if min(sizes, default=1) <= 0:
            return []
        # Read from the first element that is needed to the last one.
        strides = [math.prod(part.sizes[dim + 1 :]) for dim in range(len(sizes))]
        steps = list(zip(strides, low, part.offsets, sizes, strict=True))
        first = part.first + sum(stride * (at - offset) for stride, at, offset, _ in steps)
        count = 1 + sum(stride * (size - 1) for stride, _, _, size in steps)
        data = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device="cpu")
        stream.seek(begin + first * dtype.itemsize)
        if stream.readinto(data.numpy()) != data.numel():  # type: ignore[arg-type]
            raise DamagedError(f"{self.path / rank_file(part.rank)} has become shorter")
        values = data.view(dtype).as_strided(sizes, strides)
        inside = zip(low, high, place, strict=True)
        box = target[tuple(slice(begin - at, end - at) for begin, end, at in inside)]
        # A clone frees the rest of the bytes.
        return [(values if len(data) == values.nbytes else values.clone(), box)]

    @contextlib.contextmanager
    def _opened(self, rank: int) -> Iterator[tuple[io.BufferedReader, Header, Any]]:
        """The file of a rank, its tensors and its metadata."""
        place, size = self.path / rank_file(rank), self.manifest.files[rank].size
        with opened(place, size) as stream:
            yield stream, *read_header(stream, size, place)

    def rank_values(self, rank: int) -> dict[str, Any]:
        """The checked ``random`` states, the ``extra`` and the digest of ``pieces`` of a rank."""
        with self._opened(rank) as (_, _, metadata):
            try:
                values: dict[str, Any] = decode(parse_json(metadata[VALUES]))
                check_random(values["random"])
                if (type(values["extra"]), type(values["pieces"])) != (dict, str):
                    raise TypeError("no extra, or no digest of the pieces")
            except DAMAGE as error:
                raise DamagedError(f"{self.path / rank_file(rank)}: {error}") from error
        return values


def _ends(offsets: Shape, sizes: Shape) -> tuple[int, ...]:
    return tuple(map(sum, zip(offsets, sizes, strict=True)))


@torch.no_grad()
def write(copies: Copies) -> None:
    """Write values to their targets, and free them. This reads no file, so it can't fail on one."""
    while copies:
        values, target = copies.pop()
        target.copy_(values)


# ------------------------------------------------------------------------------ load


@dataclass
class LoadReport:
    """What a load did. Pass a new one to ``sw.load`` and read it afterwards; it is the same on all
    ranks.

    Values are always equal bit for bit. The steps that follow are those of the run that saved, bit
    for bit, if ``differences`` is empty. ``config`` is compared too: it may say what a checkpoint
    can't know, such as batch size, recomputation, compilation and the digest of the data.
    """

    config: Mapping[str, Any] | None = None
    path: Path | None = None
    step: int | None = None
    num_tensors: int = 0  # saved tensors that were loaded
    left_out: list[str] = field(default_factory=list)  # saved tensors that were not loaded
    kept: list[str] = field(default_factory=list)  # tensors of the model that keep their values
    differences: list[str] = field(default_factory=list)  # from the run that saved

    @property
    def continues(self) -> bool:
        """Whether the run continues as if it had never stopped, bit for bit."""
        return not self.differences

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        lost = f", {len(self.left_out)} left out" if self.left_out else ""
        lost += f", {len(self.kept)} of the model kept" if self.kept else ""
        more = f" and {len(self.differences) - 1} more" if len(self.differences) > 1 else ""
        end = f"values only: {self.differences[0]}{more}" if self.differences else "bit for bit"
        return f"{self.path}{step}: {self.num_tensors} tensors{lost}; continues {end}"


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    names: Mapping[str, str] | None = None,
    report: LoadReport | None = None,
) -> dict[str, Any]:
    """Load a checkpoint in place and return its ``extra`` (collective).

    The number of ranks, the strategy, the layout and the grouping of the optimizer may differ from
    those of the save; values are equal bit for bit. With the same number of ranks, each rank gets
    its random states and ``extra`` back. With another number, every rank gets the ``extra`` of rank
    0, and seeds its generators from the random states of rank 0. ``optimizer=None`` ignores saved
    optimizer states.

    A load that raises an error of a checkpoint has changed nothing, on any rank. ``MismatchError``
    lists everything that does not fit, ``DamagedError`` names a file that is not as it was written.
    A rank reads everything into host memory before it writes.

    Args:
        strict: False: load those weights that fit, and no random states, as fine-tuning begins.
            Weights with other names or shapes are left out; ``report`` names them.
        names: with ``strict=False``, the names of the model's weights, or of prefixes that end in a
            dot, to those in the checkpoint: ``{"encoder.": "backbone.", "head.weight": "out"}``.
        report: is filled in.
    """
    if strict and names:
        raise ValueError("names= is for a part of a model: pass strict=False, too")
    if not strict and optimizer is not None:
        raise ValueError("strict=False loads weights alone: pass optimizer=None")
    ranks, folder = ranks_with_data(), Path(os.path.abspath(path))

    def find() -> bytes:
        return read_bytes(folder) if ranks.rank == 0 else b""

    data, asked = together(find, ranks, facts=lambda data: (str(folder), len(data)))
    if len({where for where, _ in asked}) > 1:
        raise MismatchError(f"the ranks were asked to load different checkpoints: {asked}")
    data = comm.tell(data, asked[0][1], ranks)

    def compare() -> Manifest:
        manifest = Manifest.parse(data, folder)
        compare_bytes(folder, manifest, ranks.rank, ranks.size)
        return manifest

    manifest, _ = together(compare, ranks)
    job = _Load(Reader(folder, manifest), model, ranks, strict, names or {})
    try:
        differences = together(lambda: job.read(optimizer), ranks, facts=lambda found: found)[1]
    except BaseException:
        job.undo()
        raise
    together(job.write, ranks)
    if report is not None:
        job.fill(report, [one for theirs in differences for one in theirs])
    extra: dict[str, Any] = job.values["extra"]
    return extra


@dataclass
class _Load:
    """One rank's part of one load, after the bytes were checked."""

    reader: Reader
    model: nn.Module
    ranks: comm.Axis
    strict: bool
    names: Mapping[str, str]
    of_optimizer: OptimizerLoad | None = None
    kept: list[str] = field(default_factory=list)  # names of the model's tensors not loaded
    before: list[tuple[nn.Module, Any]] = field(default_factory=list)  # extra states, replaced

    def __post_init__(self) -> None:
        self.path, self.manifest = self.reader.path, self.reader.manifest
        self.same_size = self.manifest.world_size == self.ranks.size

    def read(self, optimizer: Optimizer | None) -> list[str]:
        """Raise everything that does not fit, at once; then read all that this rank loads. Returns
        the differences from the run that saved."""
        self.values = self.reader.rank_values(self.ranks.rank if self.same_size else 0)
        self.state = state = model_state(self.model)
        if self.strict:
            state.problems += self._name_problems()
        if optimizer is not None and not state.problems:
            self.of_optimizer = OptimizerLoad(optimizer, state, self.manifest)
        found = {held: self._problem(held) for held in state.held}
        unfit = {held: problem for held, problem in found.items() if problem is not None}
        if not self.strict and len(unfit) < len(state.held):
            self.kept = sorted({held.key[0] for held in unfit})
            state.held = [held for held in state.held if held not in unfit]
            unfit = {}
        if problems := [*state.problems, *unfit.values()]:
            raise MismatchError(listed(f"{self.path} does not fit; nothing was loaded:", problems))
        for held in state.held:
            for offsets, view in held.boxes():
                self.reader.add(self._key(held), offsets, tuple(view.shape), view)
        self.copies = self.reader.read()
        self._offer()
        return self._differences()

    # ------------------------------------------------------------------ what fits

    def _saved_name(self, name: str) -> str:
        """The name of a parameter or buffer in the checkpoint."""
        prefixes = [p for p in self.names if p.endswith(".") and name.startswith(p)]
        longest = name if name in self.names else max(prefixes, key=len, default="")
        return self.names.get(longest, "") + name[len(longest) :]

    def _key(self, held: Held) -> Key:
        name, state = held.key
        return self.manifest.saved_name(self._saved_name(name)), state

    def _name_problems(self) -> list[str]:
        """The names that only the checkpoint has, or that only the model has."""
        state, manifest = self.state, self.manifest
        here = {held.key[0] for held in state.held} | state.tied.keys()
        here |= {manifest.saved_name(name) for name in here} | state.extra_states.keys()
        saved = {name for name, of_state in manifest.tensors if not of_state} | manifest.tied.keys()
        there = saved | manifest.extra_states.keys()
        lost = sorted(state.extra_states.keys() - there)
        return [
            *(f"missing from it: '{name}'" for name in lost),
            *(f"unexpected in it: '{name}'" for name in sorted(there - here)),
            *(
                f"'{name}' and '{first}' are one tensor in this model and two in the checkpoint"
                for name, first in state.tied.items()
                if (name, "") in manifest.tensors and manifest.saved_name(first) != name
            ),
        ]

    def _problem(self, held: Held) -> str | None:
        """The reason why a tensor can't be loaded from what was saved, or None."""
        name, dtype = key_text(held.key).removeprefix("model."), held.tensor.dtype
        if (saved := self.manifest.tensors.get(self._key(held))) is None:
            return f"missing from it: '{name}' {list(held.shape)}"
        if saved.shape != held.shape:
            return f"'{name}' has shape {list(saved.shape)} in it, {list(held.shape)} in this model"
        # A wider dtype is exact: 16-bit weights can be loaded into fp32 main weights.
        floating = saved.dtype.is_floating_point and saved.dtype.itemsize > 1
        wider = floating and torch.promote_types(saved.dtype, dtype) == dtype
        if saved.dtype != dtype and not wider:
            return (
                f"'{name}' is {saved.dtype} in it, {dtype} here: load in the saved dtype and "
                f"convert afterwards"
            )
        return None

    def _offer(self) -> None:
        """Set the modules' extra states; keep their old ones in case a module refuses."""
        named = unwrapped(self.model).named_modules(remove_duplicate=False)
        modules = {clean(name): module for name, module in named}
        for name in self.state.extra_states:
            saved = self._saved_name(name)
            if saved in self.manifest.extra_states:
                module = modules[name.rpartition(".")[0]]
                self.before.append((module, copy.deepcopy(module.get_extra_state())))
                try:
                    module.set_extra_state(self.manifest.extra_states[saved])
                except Exception as error:
                    raise MismatchError(
                        f"{self.path}: '{name}' is refused by its module, a "
                        f"{type(module).__name__}: {type(error).__name__}: {error}"
                    ) from error

    def _differences(self) -> list[str]:
        """What keeps the run that was loaded from being continued bit for bit."""
        found = [] if self.strict else ["random states were not loaded"]
        if self.of_optimizer is not None:
            found += self.of_optimizer.differences
            if self.same_size and self.values["pieces"] != self.state.digest:
                found.append("pieces of tensors lay on other ranks")
        elif self.manifest.optimizer is not None:
            found.append("the optimizer was not loaded")
        saved, here = self.manifest.facts, facts_of(self.model, self.ranks.size)
        then, now = self.manifest.placements, placements_of(self.model)
        if then != now:  # and formats
            saved = saved | {"placements": [text for text in then if text not in now]}
            here = here | {"placements": [text for text in now if text not in then]}
        saved = saved | {f"version of {name}": v for name, v in self.manifest.versions.items()}
        return found + _unlike(saved, here | {f"version of {k}": v for k, v in versions().items()})

    # ------------------------------------------------------------------ the end

    def undo(self) -> None:
        for module, before in reversed(self.before):
            module.set_extra_state(before)

    def write(self) -> None:
        for held in self.state.held:
            if isinstance(held.tensor, ShardedTensor) and held.tensor.buffer is not None:
                held.tensor.buffer.wrote()  # on every rank, also if it stores nothing of the tensor
        write(self.copies)
        if self.of_optimizer is not None:
            self.of_optimizer.write()
        if self.strict and self.same_size:
            restore_random(self.values["random"])
        elif self.strict:
            reseed(self.values["random"], self.ranks.rank, self.ranks.size)

    def fill(self, report: LoadReport, differences: list[str]) -> None:
        report.path, report.step = self.path, self.manifest.step
        report.num_tensors = len({held.key for held in self.state.held})
        loaded = {self._key(held)[0] for held in self.state.held}
        saved = {name for name, of_state in self.manifest.tensors if not of_state}
        report.left_out, report.kept = sorted(saved - loaded), self.kept
        then = self.manifest.config or {}
        mine = report.config or {}
        differences += _unlike({key: then.get(key) for key in mine}, mine)
        report.differences = list(dict.fromkeys(differences))


def _unlike(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line for each value that is not the same."""
    return [
        f"{key}: {saved.get(key)!r:.150} then, {here.get(key)!r:.150} now"
        for key in {**saved, **here}
        if saved.get(key) != here.get(key)
    ]


# ------------------------------------------------------------------------------ verify


@dataclass
class Verification:
    """The result of ``verify``; ``problems`` is empty for a sound checkpoint."""

    path: Path
    manifest: Manifest | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def num_tensors(self) -> int:
        return 0 if self.manifest is None else len(self.manifest.tensors)

    def __str__(self) -> str:
        lines = [f"{self.path}: {'sound' if self.ok else 'NOT SOUND'}"]
        if (saved := self.manifest) is not None:
            lines += [
                f"  step {saved.step}, {saved.created}, {saved.world_size} ranks, "
                f"{self.num_tensors} tensors, {saved.num_bytes} bytes, torch "
                f"{saved.versions.get('torch')}",
                *(f"  {text}" for text in saved.placements),
            ]
        return "\n".join([*lines, *(f"  problem: {problem}" for problem in self.problems)])


def verify(path: str | os.PathLike[str]) -> Verification:
    """Check a checkpoint as ``load`` does, for all ranks, without a model or a process group.

    Checks the manifest, sizes and every sha256. If all bytes are as written, checks that every
    piece of every tensor is where the manifest says, and random states and extra of each rank.
    """
    report = Verification(Path(os.path.abspath(path)))

    def collect(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except CheckpointError as error:
            report.problems.append(str(error))

    report.manifest = manifest = collect(Manifest.read, report.path)
    if manifest is None:
        return report
    for rank, file in enumerate(manifest.files):
        collect(check_bytes, report.path / rank_file(rank), file)
    if report.ok:
        reader = Reader(report.path, manifest)
        for rank in range(manifest.world_size):
            collect(reader.rank_values, rank)
        for key, entry in manifest.tensors.items():
            reader.add(key, (0,) * len(entry.shape), entry.shape, None)
        collect(reader.read)
    return report
