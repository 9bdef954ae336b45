# SPDX-License-Identifier: Apache-2.0
"""Muon's step over the matrices of an optimizer, wherever they are stored.

    grad, momentum     element by element, on the pieces whose turn it is   -> workspace
    exchange           whole matrices, one owner each                       -> workspace
    weight             decay and update, on the pieces that are here

Momentum stays with the gradient's pieces, which are the weight's (of one replica, where replicas
take turns), so it is saved and resharded like any other tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from shardwise import comm
from shardwise.optim import muon, resident
from shardwise.optim.exchange import Exchange, Freight, freight_of
from shardwise.optim.gradients import gradient_of
from shardwise.optim.newton_schulz import has_kernels, newton_schulz, preset_of, price
from shardwise.optim.owners import waves_of
from shardwise.optim.routing import Route
from shardwise.optim.split import Parcel, Split, parcels_of
from shardwise.optim.storage import (
    Home,
    Piece,
    block_shape,
    buffer_of,
    home_of,
    local_of,
    pieces_of,
)
from shardwise.optim.tensor_parallel import Blocks
from shardwise.optim.turns import conformed, like, take_turns
from shardwise.tensor import ShardedTensor


@dataclass(eq=False)
class Matrix:
    """One parameter that Muon updates."""

    name: str
    parameter: Tensor
    route: Route
    group: dict[str, Any]  # its parameter group: learning rate and all

    @property
    def shape(self) -> tuple[int, ...]:
        """What shards cut (a block, under tensor parallelism), as its matrices are seen."""
        return self.route.shape_of(block_shape(self.parameter))

    @cached_property
    def held(self) -> tuple[Split | None, bool]:
        """The split of what this rank's shard axis holds (a block, under tensor parallelism), and
        whether its matrices are whole there."""
        home, split = home_of(self.parameter), self.route.split
        if split is None or not any(home.tensor):
            return split, not any(home.tensor)
        shape = tuple(self.parameter.shape)
        found = split.within(shape, home.tensor_dim, home.num_blocks, home.block)
        assert found is not None, "refused at construction"
        return found


def state_of(parameter: Tensor, before: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter, in its place: new, or as it was."""
    if not before:
        return {"momentum_buffer": like(parameter)}
    return before | {"momentum_buffer": conformed(parameter, before["momentum_buffer"])}


def kernels_everywhere(device: torch.device, axes: Iterable[comm.Axis | None]) -> bool:
    """Whether kernels serve on every rank of the axes, so that all weigh by what was measured.

    Collective on GPUs, of which a cluster may have several kinds.
    """
    if device.type != "cuda":
        return False
    served = has_kernels(device)
    for axis in axes:
        if axis is not None:
            served = all(comm.agree(served, axis))
    return served


def waves(matrices: Sequence[Matrix]) -> list[int]:
    """The wave of each: all in one, where nobody waits for any of them."""
    buffers = [buffer_of(matrix.parameter) for matrix in matrices]
    if not any(buffer is not None and buffer.settled is not None for buffer in buffers):
        return [0] * len(matrices)
    sizes = [matrix.parameter.numel() for matrix in matrices]
    return waves_of([id(buffer) for buffer in buffers], sizes)


def freight(
    matrices: Sequence[Matrix], *, measured: bool, waves: Sequence[int] | None = None
) -> list[Freight]:
    """The parcels of parameters of one home, in order, with the price of each."""
    found: list[Freight] = []
    # By what parameters must have in common to be cut and weighed alike: their pieces, the parcels.
    alike: dict[Any, tuple[Sequence[Piece], list[Freight]]] = {}
    for position, matrix in enumerate(matrices):
        group, pieces, pinned = matrix.group, pieces_of(matrix.parameter), kept_whole(matrix)
        key = (
            id(pieces),
            matrix.shape,
            matrix.held[0],
            str(group["preset"]),
            group["form"],
            pinned,
        )
        if key not in alike:
            preset = preset_of(group["preset"])
            one = partial(price, preset=preset, form=group["form"], measured=measured)
            parcels = parcels_of(matrix.shape, matrix.held[0])
            alike[key] = pieces, freight_of("", 0, parcels, pieces, one, pinned=pinned)
        wave = waves[position] if waves is not None else 0
        found += [
            replace(parcel, name=matrix.name + parcel.name, position=position, wave=wave)
            for parcel in alike[key][1]
        ]
    return found


def kept_whole(matrix: Matrix) -> bool:
    """Whether the layout keeps every matrix on one rank on purpose; a stack is cut between them."""
    parameter = matrix.parameter
    if not isinstance(parameter, ShardedTensor):
        return False
    grain = parameter.cut.layout.items[parameter.cut.index].grain
    return grain.kind == "tensor" and (grain.count == 1 or len(matrix.shape) == 3)


class Fleet:
    """Parameters of one home and of equal settings, and their exchange."""

    def __init__(
        self, home: Home, matrices: Sequence[Matrix], measured: bool | None = None
    ) -> None:
        self.home, self.matrices = home, list(matrices)
        first = matrices[0]
        self.preset = preset_of(first.group["preset"])
        self.form, self.scale = first.group["form"], first.group["scale"]
        device = local_of(first.parameter).device
        if measured is None:
            measured = kernels_everywhere(device, (home.shards, home.replicas))
        wave_of = waves(matrices)
        # By wave, in order: what is updated, and can be gathered, together.
        self.waves = [
            [one for one, at in zip(matrices, wave_of, strict=True) if at == wave]
            for wave in sorted(set(wave_of))
        ]
        self.exchange = Exchange(
            home,
            freight(matrices, measured=measured, waves=wave_of),
            device,
            wire=first.group["wire"],
            spread=first.group["replicas"] == "spread",
        )
        rounds = [self.exchange.freight[index].wave for index, *_ in self.exchange.plan.rounds]
        self._num_rounds = [rounds.count(wave) for wave in sorted(set(wave_of))]
        for position, matrix in enumerate(matrices):
            take_turns(matrix.parameter, self.exchange.turns(position))
        mode = first.group["tensor_parallel"]
        cut = home.blocks
        whole = cut is None or first.held[1]
        self.blocks = None if whole else Blocks(cut, home.tensor_dim, mode)  # type: ignore[arg-type]
        # With kernels: the parcels of parameters that never travel, by position.
        self.resident: dict[int, list[Parcel]] = {}
        pieces = [local_of(matrix.parameter) for matrix in matrices]
        narrow = any(piece.dtype != torch.float32 for piece in pieces)
        planned = measured and not narrow  # as kernels would, on the device that is planned for
        self.fused = planned if device.type == "meta" else resident.kernels_serve(pieces)
        if self.fused and self.blocks is None:
            self._settle()

    def _settle(self) -> None:
        """Find the parameters of which everything here stays here."""
        here: dict[int, list[int]] = {}
        exchange = self.exchange
        for index, one in enumerate(exchange.freight):
            if any(rank == exchange.rank for rank, _, _ in one.pieces):
                here.setdefault(one.position, []).append(index)
        skipped: list[int] = []
        for position, indices in here.items():
            parcels = [exchange.freight[index].parcel for index in indices]
            plain = not any(parcel.sizes for parcel in parcels)
            if plain and all(exchange.stays(index) for index in indices):
                self.resident[position] = parcels
                skipped += indices
        exchange.skipped = frozenset(skipped)

    def step(self, state: dict[Tensor, dict[str, Any]]) -> Iterator[list[Tensor]]:
        """One step, wave by wave; the parameters that each has written.

        A parameter without a gradient, which no other rank has then either, is left alone. What is
        exchanged stays as planned, with zeros in its place, unless no parameter has a gradient.
        """
        taking = {id(one) for one in self.matrices if one.parameter.grad is not None}
        ids = {id(self.matrices[position]) for position in self.resident}
        held = [one for one in self.matrices if local_of(one.parameter).numel()]
        moving = {id(one) for one in held if id(one) in taking and id(one) not in ids}
        workspaces: dict[int, Tensor] = {}
        for members in _by_group([one for one in held if id(one) in moving]):
            self._momentum(members, state, workspaces)
        nothing = local_of(self.matrices[0].parameter).new_empty(0)
        flat = [self._flat(matrix, workspaces, ids, nothing) for matrix in self.matrices]
        rounds = self.exchange.rounds(flat, self._orthogonalize)
        for members, count in zip(self.waves, self._num_rounds, strict=True):
            present = [one for one in members if id(one) in taking]
            here = [one for one in present if local_of(one.parameter).numel()]
            self._step_resident([one for one in here if id(one) in ids], state)
            for _ in range(count if taking else 0):
                next(rounds)
            for alike in _by_group([one for one in here if id(one) in moving]):
                self._apply(alike, workspaces)
            yield [one.parameter for one in present]

    def _apply(self, members: Sequence[Matrix], workspaces: dict[int, Tensor]) -> None:
        group = members[0].group
        apply = resident.apply_update if self.fused else muon.apply_update
        apply(
            [local_of(matrix.parameter) for matrix in members],
            [workspaces.pop(id(matrix)) for matrix in members],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            decay=group["decay"],
        )

    def _flat(
        self, matrix: Matrix, workspaces: dict[int, Tensor], ids: set[int], nothing: Tensor
    ) -> Tensor:
        """The workspace of a parameter, flat; zeros where it has none and somebody computes it."""
        if id(matrix) in workspaces:
            return workspaces[id(matrix)].view(-1)
        local = local_of(matrix.parameter)
        if id(matrix) in ids or not local.numel():
            return nothing
        return torch.zeros_like(local).view(-1)

    def _step_resident(
        self, members: Sequence[Matrix], state: dict[Tensor, dict[str, Any]]
    ) -> None:
        """Whole matrices that never travel, shape by shape, without a workspace."""
        position_of = {id(matrix): position for position, matrix in enumerate(self.matrices)}
        batches: dict[Any, tuple[Matrix, list[resident.Piece]]] = {}
        for matrix in members:
            weight = local_of(matrix.parameter).view(-1)
            grad = gradient_of(matrix.parameter)
            assert grad is not None
            given = grad.reshape(-1)
            momentum = local_of(state[matrix.parameter]["momentum_buffer"]).view(-1)
            position = position_of[id(matrix)]
            begin = self.exchange.begins[position]
            for parcel in self.resident[position]:
                low = parcel.start - begin
                views = [
                    flat[low : low + parcel.numel].view(parcel.rows, parcel.cols)
                    for flat in (given, momentum, weight)
                ]
                key = (id(matrix.group), given.dtype, parcel.rows, parcel.cols)
                batches.setdefault(key, (matrix, []))[1].append(resident.Piece(*views))
        for (_, _, rows, cols), (matrix, pieces) in batches.items():
            scale = muon.scale_of(self.scale, rows, cols)
            resident.step(pieces, matrix.group, self.preset, scale)

    def _momentum(
        self,
        members: Sequence[Matrix],
        state: dict[Tensor, dict[str, Any]],
        workspaces: dict[int, Tensor],
    ) -> None:
        """Advance the momentum of one parameter group; its updates are the workspaces.

        What other replicas take turns at is left open there: they send it.
        """
        group = members[0].group
        buffers, grads, advanced = [], [], []
        for matrix in members:
            local = local_of(matrix.parameter)
            buffer = local_of(state[matrix.parameter]["momentum_buffer"])
            if buffer.numel() < local.numel():
                workspaces[id(matrix)] = torch.empty_like(local)
            if buffer.numel():
                grad = gradient_of(matrix.parameter)
                assert grad is not None
                grads.append(grad)
                buffers.append(buffer)
                advanced.append(matrix)
        if not buffers:
            return
        advance = resident.accumulate if self.fused else muon.update_momentum
        updates = advance(
            buffers,
            grads,
            momentum=group["momentum"],
            form=group["momentum_form"],
            nesterov=group["nesterov"],
        )
        for matrix, update in zip(advanced, updates, strict=True):
            if id(matrix) in workspaces:
                _turn_in(workspaces[id(matrix)], matrix.parameter, state).copy_(update.view(-1))
            else:
                workspaces[id(matrix)] = update.contiguous()

    def _orthogonalize(self, batch: Tensor) -> Tensor:
        """[count, rows, cols], orthogonalised and scaled by the whole matrix's shape."""
        shape = batch.shape[-2], batch.shape[-1]
        if batch.is_meta:  # a plan, which has no values
            if self.fused:
                resident.hold_workspace(len(batch), *shape, self.preset)
            return batch
        if self.blocks is None:
            result = newton_schulz(batch, self.preset, form=self.form)
        else:
            result = self.blocks.orthogonalize(batch, self.preset, self.form)
            shape = self.blocks.whole_shape(*shape)
        return result.mul_(muon.scale_of(self.scale, *shape))


def _turn_in(workspace: Tensor, parameter: Tensor, state: dict[Tensor, dict[str, Any]]) -> Tensor:
    """The part of a workspace whose momentum is here, flat."""
    momentum = state[parameter]["momentum_buffer"]
    assert isinstance(parameter, ShardedTensor) and isinstance(momentum, ShardedTensor)
    return momentum.cut.within(parameter.cut, workspace).view(-1)


def _by_group(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    found: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(id(matrix.group), []).append(matrix)
    return list(found.values())


def fleets_of(matrices: Sequence[Matrix], measured: bool | None = None) -> list[Fleet]:
    """One fleet per home and settings, in order of first appearance: alike on every rank.
    ``measured``: whether costs are those measured on GPUs; None: where kernels serve."""
    found: dict[Any, tuple[Home, list[Matrix]]] = {}
    for matrix in matrices:
        home = home_of(matrix.parameter)
        group = matrix.group
        alike = (str(preset_of(group["preset"])), group["form"], group["scale"], group["wire"])
        places = (group["replicas"], group["tensor_parallel"], matrix.held[1])
        key = (home.key, alike, places, str(local_of(matrix.parameter).device))
        found.setdefault(key, (home, []))[1].append(matrix)
    return [Fleet(home, members, measured) for home, members in found.values()]
