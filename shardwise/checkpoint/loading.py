# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked.

compare  sha256 of every file, shared out over the ranks, before any of them is interpreted
read     index, values, names, shapes, dtypes; the saved boxes that meet this rank's, to host memory
offer    extra states to the modules that have any: their own code, which may refuse
write    tensors, optimizer, random states: no file is read, nothing is left to refuse

After each step one small object per rank: all go on, or all raise the same, and undo what was done.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import metadata, random_state, state
from shardwise.checkpoint.errors import MismatchError
from shardwise.checkpoint.experts import Stack
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reading import Checkpoint, Copies, compare_bytes
from shardwise.checkpoint.state import Changes, State, state_key
from shardwise.checkpoint.world import World
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

    A load that is refused has changed nothing, on any rank. ``MismatchError`` lists all that does
    not fit, ``DamagedError`` names a file that is not as it was written, ``UnsafeError`` one that
    asks for more than numbers. What a rank loads is in host memory, whole, before it is written.
    """
    world = World.now()
    job = _Job(Path(os.path.abspath(path)), model, optimizer, world)
    identities = world.together(job.compare, facts=lambda: job.manifest.identity)
    if len(set(identities)) > 1:
        raise MismatchError(f"the ranks were asked to load different checkpoints: {identities}")
    try:
        world.together(job.read)
        world.together(job.offer)
    except BaseException:
        job.undo()
        raise
    world.together(lambda: job.write(restore_random))
    return job.extra


class _Job:
    """One rank's part of one load."""

    manifest: Manifest
    checkpoint: Checkpoint
    state: State
    copies: Copies
    changes: Changes | None = None
    random_states: random_state.States
    extra: dict[str, Any]

    def __init__(
        self, path: Path, model: nn.Module, optimizer: Optimizer | None, world: World
    ) -> None:
        self.path, self.model, self.optimizer, self.world = path, model, optimizer, world
        self.new_states: list[tuple[Tensor, dict[str, Any]]] = []  # given out when all is read
        self.offered: list[tuple[nn.Module, Any]] = []  # with the extra states they had
        states = {} if optimizer is None else optimizer.state
        self.had_state = {parameter: bool(states[parameter]) for parameter in states}

    def compare(self) -> None:
        self.manifest = Manifest.read(self.path)
        self.manifest.check_sizes(self.path)
        compare_bytes(self.path, self.manifest, self.world)

    # ------------------------------------------------------------------ before anything is changed

    def read(self) -> None:
        """Check all that doesn't fit, at once; then read everything that this rank loads."""
        self.checkpoint = Checkpoint.open(self.path, self.manifest)
        self.random_states, self.extra = self.checkpoint.rank_values(
            self.world.rank if self.same_world else 0
        )
        self.state = state.of_model(self.model)
        problems = list(self.state.problems)
        model_problems = self._model_problems()
        problems += model_problems
        if self.optimizer is not None and not model_problems:
            problems += self._optimizer_problems(self.optimizer)
        if problems:
            raise MismatchError(_explain(self.path, self.manifest, problems))
        self.copies = Copies(self.checkpoint, self.state)
        self.copies.stage()

    @property
    def same_world(self) -> bool:
        return self.manifest.world_size == self.world.size

    def _model_problems(self) -> list[str]:
        saved = {
            key.removeprefix("model."): entry
            for key, entry in self.checkpoint.index.items()
            if key.startswith("model.")
        }
        tied: dict[str, str] = self.checkpoint.values["tied"]
        here = self.state
        wanted: dict[str, tuple[Shape, torch.dtype]] = {}
        known = set(here.tied)
        for key, tensor in here.tensors.items():
            name = key.removeprefix("model.")
            stack = here.stacks.get(name)
            shape = tuple(tensor.shape) if stack is None else stack.stored_shape(tensor.shape)
            wanted |= dict.fromkeys(stack.here if stack else (name,), (shape, tensor.dtype))
            known |= {*here.stored_names(name)}
        names = set(saved) | set(tied)
        problems = []
        for name, (shape, dtype) in wanted.items():
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
                problems.append(f"missing from it: '{name}' {list(shape)}")
            else:
                problems += _differences(name, entry, shape, dtype)
        for name in sorted(names - known):
            shape = saved[tied.get(name, name)].shape
            problems.append(f"unexpected in it: '{name}' {list(shape)}")
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
                known |= {*self.state.stored_names(name)}
                problems += self._state_problems(optimizer, name, parameter, saved, kind)
        stored = set(saved["tensors"]) | set(saved["scalars"])
        for name in sorted(stored - known):
            problems.append(f"unexpected in it: optimizer state of '{name}'")
        if not problems:
            self.changes = Changes(optimizer, self.state, saved)
            problems += self.changes.problems
        return problems

    def _state_problems(
        self, optimizer: Optimizer, name: str, parameter: Tensor, saved: Any, kind: str
    ) -> list[str]:
        """Compare one parameter's state; prepare what this optimizer has not made yet."""
        stack = self.state.stacks.get(name)
        stored = self.state.stored_name(name)
        tensors = saved["tensors"].get(stored, [])
        scalars = saved["scalars"].get(stored, {})
        wanted = {*tensors, *scalars}
        here: dict[str, Any] = optimizer.state.get(parameter, {})
        members = stack.here if stack else (name,)
        for one in members:
            found_there = {*saved["tensors"].get(one, []), *saved["scalars"].get(one, {})}
            if saved["scalars"].get(one, {}) != scalars or found_there != wanted:
                return [
                    f"optimizer state of '{one}': {sorted(found_there) or 'none'} in the "
                    f"checkpoint, and {sorted(wanted) or 'none'} of '{stored}', or other numbers; "
                    f"'{name}' here has one state for all of its experts"
                ]
        entries = {
            key: [self.checkpoint.index.get(state_key(one, key)) for one in members]
            for key in tensors
        }
        if not here and wanted:
            # It makes its states later than now, or never for this parameter.
            here = {key: _new_state(parameter, key, e[0], stack) for key, e in entries.items()}
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
        orders, whole = self.checkpoint.values["extra_states"], tuple(parameter.shape)
        for key, found in entries.items():
            value = here[key]
            if not isinstance(value, Tensor):
                problems.append(f"'{state_key(name, key)}' is a tensor in the checkpoint and a "
                                f"number here")  # fmt: skip
                continue
            self.state.add(name, partial(state_key, key=key), value)
            shape = stack.stored_shape(value.shape) if stack else tuple(value.shape)
            if stack and stack.reorders(orders) and shape not in ((), stack.stored_shape(whole)):
                problems.append(
                    f"'{state_key(name, key)}' has shape {list(value.shape)}, not its parameter's: "
                    f"gate and up stand in another order in the checkpoint, and which of its rows "
                    f"are whose cannot be told; load into a module with that order"
                )
            for one, entry in zip(members, found, strict=True):
                assert entry is not None
                problems += _differences(state_key(one, key), entry, shape, value.dtype)
            if len(members) > 1 and not shape:
                counts = self._counts(found)
                if len(counts) > 1:
                    problems.append(
                        f"'{key}' of the experts of '{name}' in the checkpoint: {sorted(counts)}, "
                        f"and here they have one for all: load into a module with a parameter for "
                        f"each (layout 'indexed')"
                    )
        return problems

    def _counts(self, entries: Sequence[metadata.Entry | None]) -> set[float]:
        """The different values of some numbers that are stored as tensors."""
        chunks = [chunk for entry in entries if entry is not None for chunk in entry.chunks]
        return {float(value) for _, value in self.checkpoint.read(chunks)}

    def offer(self) -> None:
        """Give modules their extra states; the ones they had are kept, in case somebody refuses."""
        extra_states = self.checkpoint.values["extra_states"]
        for module, value in state.extra_state_modules(self.model, self.state, extra_states):
            self.offered.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    def undo(self) -> None:
        """Take back what reading and offering have changed."""
        for module, value in reversed(self.offered):
            module.set_extra_state(value)
        states = {} if self.optimizer is None else self.optimizer.state
        for parameter in [*states]:
            if parameter not in self.had_state:
                del states[parameter]
            elif not self.had_state[parameter]:
                states[parameter].clear()

    # ------------------------------------------------------------------ changing

    def write(self, restore_random: bool) -> None:
        for parameter, new in self.new_states:
            assert self.optimizer is not None
            self.optimizer.state[parameter] = new
        self.copies.write()
        if self.changes is not None:
            self.changes.make()
        if restore_random and self.same_world:
            self.random_states.restore()
        elif restore_random:
            self.random_states.reseed(self.world.rank, self.world.size)


def _new_state(
    parameter: Tensor, key: str, entry: metadata.Entry | None, stack: Stack | None
) -> Tensor:
    """Like the parameter, unless it is a count beside one; in the layout of the parameter then."""
    assert entry is not None
    shape = stack.live_shape(entry.shape) if stack else entry.shape
    if shape == tuple(parameter.shape) and (entry.shape or key != "step"):
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=entry.dtype)


def _differences(name: str, entry: metadata.Entry, shape: Shape, dtype: torch.dtype) -> list[str]:
    problems = []
    if entry.shape != tuple(shape):
        problems.append(
            f"'{name}' has shape {list(entry.shape)} in it, {list(shape)} in this model"
        )
    # Wider is exact: 16-bit weights of a model whose main weights are fp32 here.
    wider = entry.dtype.is_floating_point and torch.promote_types(entry.dtype, dtype) == dtype
    if entry.dtype != dtype and not wider:
        problems.append(
            f"'{name}' is {entry.dtype} in it, {dtype} here: load in the saved dtype and "
            f"convert afterwards"
        )
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
