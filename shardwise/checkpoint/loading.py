# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked.

manifest   rank 0 reads it and tells the others
compare    check the sha256 of every file, divided over the ranks, before any file is interpreted
read       check values, names, shapes and dtypes; read what fills this rank's pieces into host
           memory; give extra states to the modules that have any: their code may refuse
write      write tensors, optimizer and random states: reads no file, and can't be refused

Each step ends with a small exchange: all ranks continue, or all undo and raise the same error.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.errors import (
    DamagedError,
    MismatchError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.manifest import Manifest, read_bytes, versions
from shardwise.checkpoint.optimizer_state import OptimizerLoad
from shardwise.checkpoint.pieces import Key, key_text
from shardwise.checkpoint.reading import Reader, compare_bytes, write
from shardwise.checkpoint.state import Held, facts_of, model_state, pieces_digest, unwrapped
from shardwise.checkpoint.values import reseed, restore_random
from shardwise.core import comm
from shardwise.core.layout import Shape
from shardwise.core.tensor import ShardedTensor
from shardwise.moe.activation import convert_gate_up
from shardwise.shard.state_dict import clean


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
    job = _Job(folder, manifest, model, optimizer, ranks, strict, names or {})
    try:
        _, differences = together(job.read, ranks, facts=lambda _: job.differences)
    except BaseException:
        job.undo()
        raise
    together(job.write, ranks)
    if report is not None:
        job.fill(report, list(dict.fromkeys(one for theirs in differences for one in theirs)))
    extra: dict[str, Any] = job.values["extra"]
    return extra


@dataclass
class _Job:
    """One rank's part of one load, after the bytes were checked."""

    path: Path
    manifest: Manifest
    model: nn.Module
    optimizer: Optimizer | None
    ranks: comm.Axis
    strict: bool
    names: Mapping[str, str]
    undos: list[Callable[[], object]] = field(default_factory=list)
    optimizer_load: OptimizerLoad | None = None
    kept: list[str] = field(default_factory=list)  # names of the model's tensors not loaded
    differences: list[str] = field(default_factory=list)  # from the run that saved

    @property
    def same_size(self) -> bool:
        return self.manifest.world_size == self.ranks.size

    def read(self) -> None:
        """Raise everything that does not fit, at once; then read all that this rank loads."""
        self.reader = Reader(self.path, self.manifest)
        self.values = self.reader.rank_values(self.ranks.rank if self.same_size else 0)
        self.state = state = model_state(self.model)
        if self.strict:
            state.problems += self._name_problems()
        if self.optimizer is not None and not state.problems:
            self.optimizer_load = OptimizerLoad(self.optimizer, state, self.manifest)
            self.undos.append(self.optimizer_load.undo)
            self.optimizer_load.compare()
        found = {held: self._problem(held) for held in state.held}
        unfit = {held: problem for held, problem in found.items() if problem is not None}
        if not self.strict and len(unfit) < len(state.held):
            self.kept = sorted({held.key[0] for held in unfit})
            state.held = [held for held in state.held if held not in unfit]
            unfit = {}
        if problems := [*state.problems, *unfit.values()]:
            self._refuse(problems)
        self._compare_facts()
        self.copies = self._read_counts()
        for held in state.held:
            for offsets, view in self._boxes(held) if not held.shared else ():
                self.reader.add(self._key(held), offsets, view)
        self.copies += self.reader.read()
        self._offer()

    def _refuse(self, problems: list[str]) -> None:
        step = f"step {self.manifest.step}, " if self.manifest.step is not None else ""
        size = f"{step}{self.manifest.num_tensors} tensors"
        headline = f"{self.path} ({size}) does not fit; nothing was loaded:"
        raise MismatchError(listed(headline, list(dict.fromkeys(problems))))

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
        """The names that the checkpoint has and the model has not, and the reverse."""
        state, manifest = self.state, self.manifest
        here = {held.key[0] for held in state.held} | state.tied.keys()
        here |= {manifest.saved_name(name) for name in here}
        saved = {name for name, of_state in manifest.tensors if not of_state} | manifest.tied.keys()
        problems = [f"unexpected in it: '{name}'" for name in sorted(saved - here)]
        for name, first in state.tied.items():
            if (name, "") in manifest.tensors and manifest.saved_name(first) != name:
                problems.append(
                    f"'{name}' and '{first}' are one tensor in this model and two in the checkpoint"
                )
        there, here = {*manifest.extra_states}, {*state.extra_states}
        problems += [f"missing from it: '{name}'" for name in sorted(here - there)]
        return problems + [f"unexpected in it: '{name}'" for name in sorted(there - here)]

    def _problem(self, held: Held) -> str | None:
        """The reason why a tensor can't be loaded from what was saved, or None."""
        name, key = key_text(held.key).removeprefix("model."), self._key(held)
        dtype = held.tensor.dtype
        if (saved := self.manifest.tensors.get(key)) is None:
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
        weight = self.manifest.tensors[key[0], ""].shape
        if self._stored_block(held) is not None and saved.shape not in (weight, weight[:1]):
            return (
                f"'{name}' has not the shape of its parameter, and gate and up have another order "
                f"in the checkpoint, so it is unknown which of its rows belong to gate"
            )
        return None

    def _stored_block(self, held: Held) -> int | None:
        """The order of gate and up in the checkpoint, if it is not that of the model."""
        of = held.experts
        if of is None or of.order is None:
            return None
        saved = self.manifest.extra_states.get(self._saved_name(of.order))
        block = saved.get("gate_up_block") if isinstance(saved, dict) else None
        return block if block != of.block else None

    def _compare_facts(self) -> None:
        saved, here = self.manifest.facts, facts_of(self.model, self.ranks.size)
        here |= {f"version of {name}": text for name, text in versions().items()}
        saved = saved | {f"version of {n}": text for n, text in self.manifest.versions.items()}
        if self.optimizer_load is None and self.manifest.optimizer is not None:
            self.differences.append("the optimizer was not loaded")
        elif self.same_size and self.values.get("pieces") != pieces_digest(self.state):
            self.differences.append("pieces of tensors lay on other ranks")
        self.differences += self.optimizer_load.differences if self.optimizer_load else []
        self.differences += [] if self.strict else ["random states were not loaded"]
        self.differences += _unlike(saved, here)

    # ------------------------------------------------------------------ what is read

    def _boxes(self, held: Held) -> Iterator[tuple[Shape, Tensor]]:
        """(offsets in the checkpoint, view) of this rank's boxes; rows of gate and up one run at a
        time, if they have another order in the checkpoint."""
        stored = self._stored_block(held)
        for offsets, view in held.boxes():
            if stored is None or view.dim() < 2:
                yield offsets, view
                continue
            assert held.experts is not None
            rows = torch.arange(held.shape[1], device="cpu")
            try:
                rows = convert_gate_up(rows, stored, held.experts.block, 0)
            except (ValueError, RuntimeError) as error:
                raise DamagedError(f"{self.path}: '{held.experts.order}': {error}") from error
            mine = rows[offsets[1] : offsets[1] + view.shape[1]]
            at = 0
            for run in mine.tensor_split((mine.diff() != 1).nonzero().flatten() + 1):
                place = (offsets[0], int(run[0]), *offsets[2:])
                yield place, view[:, at : at + len(run)]
                at += len(run)

    def _read_counts(self) -> list[tuple[Tensor, Tensor]]:
        """The counts of steps that several experts share here, and have one by one in the file."""
        found, problems = [], []
        for held in self.state.held:
            for offsets, view in held.boxes() if held.shared else ():
                counts = torch.empty(view.shape, dtype=view.dtype, device="cpu")
                self.reader.add(self._key(held), offsets, counts)
                found.append((held, counts))
        write(self.reader.read())
        for held, counts in found:
            if (counts != counts[0]).any():
                problems.append(
                    f"'{key_text(held.key)}' of the experts in the checkpoint: {counts.tolist()}, "
                    f"and here they have one for all: load into a module with a parameter for each "
                    f"(layout 'indexed')"
                )
        if problems:
            self._refuse(problems)
        return [(counts[0], held.tensor) for held, counts in found]

    def _offer(self) -> None:
        """Set the modules' extra states; keep their old ones in case a module refuses."""
        if not self.strict:
            return
        named = unwrapped(self.model).named_modules(remove_duplicate=False)
        modules = {clean(name): module for name, module in named}
        # Experts keep the order of gate and up of this model: the load permutes rows instead.
        orders = {experts.order for experts in self.state.experts.values()}
        for name, value in self.manifest.extra_states.items():
            if name in orders:
                continue
            module = modules[name.rpartition(".")[0]]
            before = copy.deepcopy(module.get_extra_state())
            self.undos.append(partial(module.set_extra_state, before))
            try:
                module.set_extra_state(value)
            except Exception as error:
                raise DamagedError(
                    f"{self.path}: '{name}' is refused by its module, a {type(module).__name__}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    # ------------------------------------------------------------------ the end

    def undo(self) -> None:
        for undo in reversed(self.undos):
            undo()

    def write(self) -> None:
        for held in self.state.held:
            if isinstance(held.tensor, ShardedTensor) and held.tensor.buffer is not None:
                held.tensor.buffer.wrote()  # on every rank, also if it stores nothing of the tensor
        write(self.copies)
        if self.optimizer_load is not None:
            self.optimizer_load.write()
        if self.strict and self.same_size:
            restore_random(self.values["random"], str(self.path))
        elif self.strict:
            reseed(self.values["random"], self.ranks.rank, self.ranks.size)

    def fill(self, report: LoadReport, differences: list[str]) -> None:
        report.path, report.step = self.path, self.manifest.step
        report.num_tensors = len({held.key for held in self.state.held})
        loaded = {self._key(held)[0] for held in self.state.held}
        saved = {name for name, of_state in self.manifest.tensors if not of_state}
        report.left_out, report.kept = sorted(saved - loaded), self.kept
        report.differences = differences
        if report.config is not None:
            saved_config = self.manifest.config or {}
            saved_config = {key: saved_config.get(key) for key in report.config}
            report.differences += _unlike(saved_config, report.config)


def _unlike(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line for each value that is not the same."""
    return [
        f"{key}: {saved.get(key)!r:.100} then, {here.get(key)!r:.100} now"
        for key in {**saved, **here}
        if saved.get(key) != here.get(key)
    ]
