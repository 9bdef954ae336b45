# SPDX-License-Identifier: Apache-2.0
"""Loading: any checkpoint into any layout of the same tensors, after every byte was checked.

check   names, shapes, dtypes against the manifest's index; sha256, files shared out over ranks
agree   one small object per rank: all go on, or all raise the same
read    the saved boxes that meet this rank's, each copied into place (``reading``)
agree   that everybody has read
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import metadata, random_state, state
from shardwise.checkpoint.errors import DamagedError, MismatchError
from shardwise.checkpoint.experts import Stack
from shardwise.checkpoint.files import check_bytes
from shardwise.checkpoint.manifest import Manifest, rank_file
from shardwise.checkpoint.reading import Checkpoint, Copies
from shardwise.checkpoint.state import State, state_key
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
        self.copies = Copies(self.checkpoint, self.state)
        self.checkpoint.inspect(self.copies.chunks)

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
        if any(entry is None for found in entries.values() for entry in found):
            raise DamagedError(f"{self.path}: optimizer states of '{name}' are not in the index")
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

    # ------------------------------------------------------------------ reading

    def read(self, restore_random: bool) -> None:
        self.copies.run()
        for parameter, new in self.new_states:
            assert self.optimizer is not None
            self.optimizer.state[parameter] = new
        values = self.checkpoint.values
        state.set_extra_states(self.model, self.state, values["extra_states"])
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
