# SPDX-License-Identifier: Apache-2.0
"""Muon's step over the matrices of an optimizer, wherever they are stored.

    grad, momentum     element by element, on the pieces that are here      -> workspace
    exchange           whole matrices, one owner each                       -> workspace
    weight             decay and update, on the pieces that are here

Momentum stays with the weight's pieces, so it is saved and resharded like any other tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.optim import muon
from shardwise.optim.exchange import Exchange, Freight, freight_of
from shardwise.optim.newton_schulz import cost, newton_schulz, preset_of
from shardwise.optim.split import Split, parcels_of
from shardwise.optim.storage import Home, block_shape, home_of, like, local_of, pieces_of
from shardwise.optim.tensor_parallel import Blocks
from shardwise.tensor import ShardedTensor


@dataclass(eq=False)
class Matrix:
    """One parameter that Muon updates."""

    name: str
    parameter: Tensor
    split: Split | None
    group: dict[str, Any]  # its parameter group: learning rate and all


def new_state(parameter: Tensor) -> dict[str, Any]:
    return {"momentum_buffer": like(parameter)}


def freight(matrices: Sequence[Matrix]) -> list[Freight]:
    """The parcels of parameters of one home, in order."""
    found: list[Freight] = []
    for position, matrix in enumerate(matrices):
        parameter, group = matrix.parameter, matrix.group
        preset = preset_of(group["preset"])
        found += freight_of(
            matrix.name,
            position,
            parcels_of(block_shape(parameter), matrix.split),
            pieces_of(parameter),
            partial(cost, preset=preset, form=group["form"]),
            pinned=kept_whole(parameter),
        )
    return found


def kept_whole(parameter: Tensor) -> bool:
    """Whether the layout keeps every matrix on one rank on purpose; a stack is cut between them."""
    if not isinstance(parameter, ShardedTensor):
        return False
    grain = parameter.cut.layout.items[parameter.cut.index].grain
    return grain.kind == "tensor" and (grain.count == 1 or parameter.ndim == 3)


class Fleet:
    """Parameters of one home and of equal settings, and their exchange."""

    def __init__(self, home: Home, matrices: Sequence[Matrix]) -> None:
        self.matrices = list(matrices)
        first = matrices[0]
        self.preset = preset_of(first.group["preset"])
        self.form, self.scale = first.group["form"], first.group["scale"]
        self.exchange = Exchange(
            home,
            freight(matrices),
            local_of(first.parameter).device,
            wire=first.group["wire"],
            spread=first.group["replicas"] == "spread",
        )
        mode = first.group["tensor_parallel"]
        cut = home.blocks
        self.blocks = None if cut is None else Blocks(cut, home.tensor_dim, mode)
        between = (self.exchange.shards, self.exchange.replicas, self.blocks)
        self.communicates = any(one is not None for one in between)

    def step(self, state: dict[Tensor, dict[str, Any]]) -> list[Tensor]:
        """One step; the parameters that were written.

        A parameter without a gradient is left alone where nobody else takes part. Else it counts as
        zeros: whether other ranks have one can't be known here, and all must exchange alike.
        """
        taking = [
            matrix
            for matrix in self.matrices
            if self.communicates or matrix.parameter.grad is not None
        ]
        if not taking:
            return []
        workspaces = {
            id(matrix): torch.zeros_like(local_of(matrix.parameter))
            for matrix in self.matrices
            if not local_of(matrix.parameter).numel() or matrix not in taking
        }
        held = [matrix for matrix in taking if local_of(matrix.parameter).numel()]
        for members in _by_group(held):
            self._momentum(members, state, workspaces)
        flat = [workspaces[id(matrix)].view(-1) for matrix in self.matrices]
        self.exchange.run(flat, self._orthogonalize)
        for members in _by_group(held):
            group = members[0].group
            muon.apply_update(
                [local_of(matrix.parameter) for matrix in members],
                [workspaces[id(matrix)] for matrix in members],
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                decay=group["decay"],
            )
        return [matrix.parameter for matrix in taking]

    def _momentum(
        self,
        members: Sequence[Matrix],
        state: dict[Tensor, dict[str, Any]],
        workspaces: dict[int, Tensor],
    ) -> None:
        """Advance the momentum of one parameter group; its updates are the workspaces."""
        group = members[0].group
        buffers, grads = [], []
        for matrix in members:
            grad = matrix.parameter.grad
            if grad is None:
                grads.append(torch.zeros_like(local_of(matrix.parameter)))
            else:
                grads.append(local_of(grad))
            buffers.append(local_of(state[matrix.parameter]["momentum_buffer"]))
        updates = muon.update_momentum(
            buffers,
            grads,
            momentum=group["momentum"],
            form=group["momentum_form"],
            nesterov=group["nesterov"],
        )
        for matrix, update in zip(members, updates, strict=True):
            workspaces[id(matrix)] = update.contiguous()

    def _orthogonalize(self, batch: Tensor) -> Tensor:
        """[count, rows, cols], orthogonalised and scaled by the whole matrix's shape."""
        shape = batch.shape[-2], batch.shape[-1]
        if self.blocks is None:
            result = newton_schulz(batch, self.preset, form=self.form)
        else:
            result = self.blocks.orthogonalize(batch, self.preset, self.form)
            shape = self.blocks.whole_shape(*shape)
        return result.mul_(muon.scale_of(self.scale, *shape))


def _by_group(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    found: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(id(matrix.group), []).append(matrix)
    return list(found.values())


def fleets_of(matrices: Sequence[Matrix]) -> list[Fleet]:
    """One fleet per home and settings, in order of first appearance: alike on every rank."""
    found: dict[Any, tuple[Home, list[Matrix]]] = {}
    for matrix in matrices:
        home = home_of(matrix.parameter)
        group = matrix.group
        alike = (str(preset_of(group["preset"])), group["form"], group["scale"], group["wire"])
        places = (group["replicas"], group["tensor_parallel"])
        key = (home.key, alike, places, str(local_of(matrix.parameter).device))
        found.setdefault(key, (home, []))[1].append(matrix)
    return [Fleet(home, members) for home, members in found.values()]
