# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked.

manifest   rank 0 reads it and tells the others
compare    check the sha256 of every file, divided over the ranks, before any file is interpreted
read       check values, names, shapes and dtypes; read what fills this rank's pieces into host
           memory
offer      give extra states to the modules that have any: their code may refuse
write      write tensors, optimizer and random states: reads no file, and can't be refused

Each step ends with a small exchange: all ranks continue, or all undo and raise the same error.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint.errors import (
    DamagedError,
    MismatchError,
    listed,
    ranks_with_data,
    together,
)
from shardwise.checkpoint.manifest import Manifest, read_bytes, versions
from shardwise.checkpoint.optimizer_state import OptimizerLoad, differences
from shardwise.checkpoint.pieces import Piece
from shardwise.checkpoint.reading import Checkpoint, Copies, compare_bytes
from shardwise.checkpoint.state import State, facts_of, model_state, unwrapped
from shardwise.checkpoint.values import RandomStates
from shardwise.core import comm
from shardwise.core.tensor import ShardedTensor
from shardwise.shard.state_dict import clean

log = logging.getLogger(__name__)


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
    restore_random: bool = True,
    strict: bool = True,
    names: Mapping[str, str] | None = None,
    report: LoadReport | None = None,
) -> dict[str, Any]:
    """Load a checkpoint in place and return its ``extra`` (collective).

    The number of ranks, the strategy, the layout and the grouping of the optimizer may differ from
    those of the save; values are equal bit for bit. With the same number of ranks, each rank gets
    its random states and ``extra`` back. With another number, every rank gets the ``extra`` of rank
    0, and seeds its generators from the random states of rank 0 (``RandomStates``).
    ``optimizer=None`` ignores saved optimizer states.

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
    ranks = ranks_with_data()
    job = _Job(Path(os.path.abspath(path)), model, optimizer, ranks)
    job.strict, job.names = strict, names or {}
    data, lengths = together(job.find, ranks, facts=lambda data: (str(job.path), len(data)))
    if len({where for where, _ in lengths}) > 1:
        raise MismatchError(f"the ranks were asked to load different checkpoints: {lengths}")
    data = comm.tell(data, lengths[0][1], ranks)
    together(lambda: job.compare(data), ranks)
    try:
        if not restore_random or not strict:
            job.differences.append("random states were not loaded")
        _, differences = together(job.read, ranks, facts=lambda _: job.differences)
        together(job.offer, ranks)
    except BaseException:
        job.undo()
        raise
    together(lambda: job.write(restore_random and strict), ranks)
    if report is not None:
        job.fill(report, list(dict.fromkeys(one for theirs in differences for one in theirs)))
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
    strict: bool
    names: Mapping[str, str]

    def __init__(
        self, path: Path, model: nn.Module, optimizer: Optimizer | None, ranks: comm.Axis
    ) -> None:
        self.path, self.model, self.optimizer, self.ranks = path, model, optimizer, ranks
        self.offered: list[tuple[nn.Module, Any]] = []  # modules and their extra states before
        self.kept: list[str] = []  # names of the model's tensors that are not loaded
        self.used: set[str] = set()  # saved names
        self.differences: list[str] = []  # from the run that saved
        self.moved = False  # whether pieces lay on other ranks

    def find(self) -> bytes:
        return read_bytes(self.path) if self.ranks.rank == 0 else b""

    def compare(self, data: bytes) -> None:
        self.manifest = Manifest.parse(data, self.path)
        compare_bytes(self.path, self.manifest, self.ranks.rank, self.ranks.size)

    def read(self) -> None:
        """Raise everything that does not fit, at once; then read all that this rank loads."""
        self.checkpoint = Checkpoint(self.path, self.manifest)
        self.random_states, self.extra = self.checkpoint.rank_values(
            self.ranks.rank if self.same_size else 0
        )
        self.state = model_state(self.model)
        model_problems = self._model_problems()
        if not self.strict:
            self._leave_out()
            model_problems = [] if self.used else [f"no weight fits: {model_problems[:3]}"]
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
        self._compare_facts()
        self.copies = Copies(self.checkpoint)
        for key in self.state.tensors:
            self._copy(key)
        self.copies.stage()

    @property
    def same_size(self) -> bool:
        """Whether the checkpoint was saved by this number of ranks."""
        return self.manifest.world_size == self.ranks.size

    def saved_name(self, name: str) -> str:
        """The name of a parameter or buffer in the checkpoint."""
        if name in self.names:
            return self.names[name]
        prefixes = [p for p in self.names if p.endswith(".") and name.startswith(p)]
        longest = max(prefixes, key=len, default=None)
        return name if longest is None else self.names[longest] + name[len(longest) :]

    def _wanted(self, key: str) -> list[tuple[str, str]]:
        """(name, name in the checkpoint) of a parameter or buffer, or of each of its experts."""
        name, _ = self.state.where[key]
        stack = self.state.stacks.get(name)
        here = stack.here if stack is not None else (name,)
        return [(one, self.saved_name(one)) for one in here]

    def _problems_of(self, key: str) -> list[str]:
        tensor, stack = self.state.tensors[key], self.state.members.get(key)
        shape = tuple(tensor.shape) if stack is None else stack.expert_shape(tuple(tensor.shape))
        problems = []
        for name, saved in self._wanted(key):
            problems += differences(name, self.checkpoint.sizes(saved), shape, tensor.dtype)
        return problems

    def _model_problems(self) -> list[str]:
        state, manifest = self.state, self.manifest
        problems = []
        for key in state.tensors:
            if not (found := self._problems_of(key)):
                self.used |= {n for _, saved in self._wanted(key) for n in manifest.names(saved)}
            problems += found
        expected = set(state.tied)
        for key in state.tensors:
            stack = state.stacks.get(state.where[key][0])
            for name in (stack.name, *stack.everywhere) if stack else (state.where[key][0],):
                expected |= {name, *manifest.names(name)}
        saved = {key.removeprefix("model.") for key in manifest.tensors if key.startswith("model.")}
        for name in sorted((saved | manifest.tied.keys()) - expected):
            sizes = self.checkpoint.sizes(name)
            problems.append(f"unexpected in it: '{name}' {list(sizes.shape) if sizes else ''}")
        for stack in state.stacks.values():
            count = manifest.experts.get(manifest.tied.get(stack.name, stack.name))
            if count is not None and stack.grouped and count != len(stack.everywhere):
                problems.append(f"'{stack.name}' has {count} experts, {len(stack.everywhere)} here")
        for name, first in state.tied.items():
            one, other = manifest.entry(name), manifest.entry(first)
            if one is not None and other is not None and one[0] != other[0]:
                problems.append(
                    f"'{name}' and '{first}' are one tensor in this model and two in the checkpoint"
                )
        extra, here = set(manifest.extra_states), set(state.extra_states)
        problems += [f"missing from it: '{name}'" for name in sorted(here - extra)]
        problems += [f"unexpected in it: '{name}'" for name in sorted(extra - here)]
        return problems

    def _leave_out(self) -> None:
        """Forget the tensors that do not fit (``strict=False``)."""
        for key in [key for key in self.state.tensors if self._problems_of(key)]:
            self.kept.append(self.state.where[key][0])
            del self.state.tensors[key]

    def _copy(self, key: str) -> None:
        """Plan the copies that fill a tensor, and compare where its pieces lie."""
        tensor, stack = self.state.tensors[key], self.state.members.get(key)
        rank = self.ranks.rank
        for piece in self.state.pieces(key):
            name = piece.name if piece.state is not None else self.saved_name(piece.name)
            piece = Piece(name, piece.state, piece.shape, piece.offsets, piece.data)
            rows = None
            if stack is not None and stack.order is not None and piece.shape:
                order = self.manifest.extra_states.get(self.saved_name(stack.order))
                rows = stack.stored_rows(piece.shape[0], {stack.order: order})
            sources = self.copies.add(piece, rows)
            if isinstance(tensor, DTensor) and not self.moved:
                replicated = any(placement.is_replicate() for placement in tensor.placements)
                held = tensor.to_local().numel()
                if len(sources) != 1 or not (
                    (sources[0].rank == rank or replicated)
                    and sources[0].high - sources[0].low == held
                ):
                    self.moved = True  # the first is named
                    self.differences.append(f"'{key}' lay on other ranks")

    def _compare_facts(self) -> None:
        saved, here = self.manifest.facts, facts_of(self.model, self.ranks.size)
        here |= {f"version of {name}": text for name, text in versions().items()}
        saved = saved | {f"version of {n}": text for n, text in self.manifest.versions.items()}
        if self.optimizer_load is not None:
            self.differences += self.optimizer_load.differences
        elif self.manifest.optimizer is not None:
            self.differences.append("the optimizer was not loaded")
        self.differences += _unlike(saved, here)

    def offer(self) -> None:
        """Set the modules' extra states; keep their old ones in case a module refuses."""
        if not self.strict:
            return
        named = unwrapped(self.model).named_modules(remove_duplicate=False)
        modules = {clean(name): module for name, module in named}
        # Experts keep the order of gate and up of this model: the load permutes rows instead.
        orders = {stack.order for stack in self.state.stacks.values()}
        for name, value in self.manifest.extra_states.items():
            if name not in orders:
                module = modules[name.rpartition(".")[0]]
                self.offered.append((module, copy.deepcopy(module.get_extra_state())))
                try:
                    module.set_extra_state(value)
                except Exception as error:
                    raise DamagedError(
                        f"{self.path}: '{name}' is refused by its module, a "
                        f"{type(module).__name__}: {type(error).__name__}: {error}"
                    ) from error

    def undo(self) -> None:
        """Undo the changes of ``read`` and ``offer``."""
        for module, value in reversed(self.offered):
            module.set_extra_state(value)
        if self.optimizer_load is not None:
            self.optimizer_load.undo()

    def write(self, restore_random: bool) -> None:
        for tensor in self.state.tensors.values():
            if isinstance(tensor, ShardedTensor) and tensor.buffer is not None:
                tensor.buffer.wrote()  # on every rank, also if it stores nothing of the tensor
        self.copies.write()
        if self.optimizer_load is not None:
            self.optimizer_load.write()
        if restore_random and self.same_size:
            self.random_states.restore()
        elif restore_random:
            self.random_states.reseed(self.ranks.rank, self.ranks.size)

    def fill(self, report: LoadReport, differences: list[str]) -> None:
        report.path, report.step = self.path, self.manifest.step
        keys = {key: self.manifest.entry(*self.state.where[key]) for key in self.state.tensors}
        report.num_tensors = len(keys)
        saved = {key.removeprefix("model.") for key in self.manifest.tensors}
        saved = {name for name in saved if not name.startswith("optimizer.state.")}
        report.left_out, report.kept = sorted(saved - self.used), self.kept
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
