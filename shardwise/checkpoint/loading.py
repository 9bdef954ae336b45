# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked.

compare  check the sha256 of every file, divided over the ranks, before any file is interpreted
read     check the index, values, names, shapes and dtypes; read the saved boxes that overlap this
         rank's boxes into host memory
offer    give extra states to the modules that have any: their code may refuse
write    write tensors, optimizer and random states: reads no file, and can't be refused

Each step ends with a small exchange: all ranks continue, or all undo and raise the same error.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.errors import MismatchError, listed, ranks_with_data, together
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.optimizer_state import OptimizerLoad, differences
from shardwise.checkpoint.reading import Checkpoint, Copies, compare_bytes
from shardwise.checkpoint.state import State, model_state, unwrapped
from shardwise.checkpoint.values import RandomStates
from shardwise.core import comm
from shardwise.core.layout import Shape
from shardwise.shard.state_dict import clean


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
            if entry is None:
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


# ------------------------------------------------------------------------------ verify
