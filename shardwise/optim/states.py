# SPDX-License-Identifier: Apache-2.0
"""States that lie whole with the owners of matrices.

Each matrix has its own state tensors (``left``; ``left.0``, ``left.1`` where a parameter has
several matrices), and each parameter has a count of its steps. A state is a
:class:`ShardedTensor` that is whole on the owner and empty on all other ranks, so it is saved and
resharded like any other tensor. The states of a batch are views of one tensor, so a rule reads and
writes them without a copy:

    stack [3, rows, rows] of one batch     | left of A | left of B | left of C |
    the optimizer's state                    A: left     B: left.0   B: left.1
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.cut import Cut
from shardwise.core.division import ByMatrix
from shardwise.core.layout import ELEMENT, Item, Layout
from shardwise.core.mesh import Ranks
from shardwise.core.placements import joint_places, ranks_by
from shardwise.core.tensor import ShardedTensor
from shardwise.core.tile import replicated_tile
from shardwise.optim.blocks import Blocks
from shardwise.optim.exchange import Exchange, Key
from shardwise.optim.matrices import MatrixParameter
from shardwise.optim.rules import Rule, State, Template
from shardwise.optim.storage import Sharding, cut_into_pieces, local_of

AGE = "step"  # the state that counts the steps of a parameter


class WholeStates:
    """The whole states of one exchange."""

    def __init__(
        self,
        rule: Rule,
        sharding: Sharding,
        members: Sequence[MatrixParameter],
        exchange: Exchange,
        blocks: Blocks | None,
    ) -> None:
        self.rule, self.sharding, self.members, self.blocks = rule, sharding, members, blocks
        self.exchange = exchange
        self._refuse_other_matrices()
        self.mesh = self._data_mesh()
        # By parameter: the keys of its matrices, in order.
        self.keys_of: list[list[Key]] = [[] for _ in members]
        for index, matrix in enumerate(exchange.matrices):
            self.keys_of[matrix.parameter] += [(index, n) for n in range(len(matrix.shapes))]
        self.stacks: dict[Key, State] = {}  # by the first matrix of a batch
        mine: dict[Key, State] = {}
        device = local_of(members[0].parameter).device
        for round_ in exchange.rounds:
            for _, keys in round_.batches:
                self.stacks[keys[0]] = stack = {
                    name: torch.zeros((len(keys), *shape), dtype=dtype, device=device)
                    for name, (shape, dtype) in self.template(keys[0]).items()
                }
                for number, key in enumerate(keys):
                    mine[key] = {name: values[number] for name, values in stack.items()}
        places = self._owner_places()
        self._published = [
            {
                self._name(position, name, key): self._publish(
                    f"{member.name}.{name}", member.parameter, key, *entry, mine, name, places
                )
                for key in self.keys_of[position]
                for name, entry in self.template(key).items()
            }
            for position, member in enumerate(members)
        ]

    def template(self, key: Key) -> Template:
        """The states of a matrix."""
        matrix = self.exchange.matrices[key[0]]
        shape = matrix.shapes[key[1]]
        shape = shape if self.blocks is None else self.blocks.whole_shape(*shape)
        return self.rule.whole_states(*shape, self.members[matrix.parameter].group)

    def of(self, position: int, before: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, with the values that it had before (collective if these lie
        with other owners); zeros without."""
        states: dict[str, Any] = {AGE: torch.tensor(int(before.get(AGE, 0)))}
        for name, state in self._published[position].items():
            states[name], old = state, before.get(name)
            if old is None:
                local_of(state).zero_()
            elif old is not state:
                state.copy_(old.to(state.dtype))
        return states

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        """By owner (replica, rank): the bytes of states that lie there."""
        nbytes: Counter[tuple[int, int]] = Counter()
        for keys in self.keys_of:
            for key in keys:
                owner = self.exchange.ownership.owners[key[0]]
                for shape, dtype in self.template(key).values():
                    nbytes[owner] += math.prod(shape) * dtype.itemsize
        return nbytes

    def _name(self, position: int, name: str, key: Key) -> str:
        """The name of a state in the optimizer's state: numbered for a stack, and where a parameter
        has several matrices."""
        keys, member = self.keys_of[position], self.members[position]
        single = len(keys) == 1 and len(member.route.shape_of(tuple(member.parameter.shape))) == 2
        return name if single else f"{name}.{keys.index(key)}"

    def _publish(
        self,
        full_name: str,
        parameter: Tensor,
        key: Key,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        mine: dict[Key, State],
        name: str,
        places: dict[tuple[int, int], int],
    ) -> Tensor:
        """One state as a tensor of the optimizer's state."""
        if self.mesh is None:
            return mine[key][name]
        item = Item(full_name, shape, ELEMENT)
        others, full_mesh = None, self.sharding.mesh or self.mesh
        if isinstance(parameter, ShardedTensor):
            others, full_mesh = parameter.cut.ranks.others, parameter.cut.full_mesh
        layout, ranks = Layout((item,), 1, item.numel, (0,)), Ranks(self.mesh, others)
        tile = replicated_tile(shape, self.mesh, full_mesh)
        whole = Cut(layout, 0, ranks, (False,) * self.mesh.ndim, tile=tile)
        ranges = [(0, 0)] * self.mesh.size()
        ranges[places[self.exchange.ownership.owners[key[0]]]] = (0, item.numel)
        cut = whole.divided(ByMatrix(tuple(ranges)))
        if key in mine:
            return ShardedTensor(mine[key][name].view(cut.local_shape), cut)
        device = local_of(parameter).device
        return ShardedTensor(torch.zeros(cut.local_shape, dtype=dtype, device=device), cut)

    def _refuse_other_matrices(self) -> None:
        """Raise where ranks of tensor parallelism have different matrices of a parameter: a state
        must have the same name and meaning on all ranks."""
        for member in self.members:
            if self.blocks is None and not cut_into_pieces(member.parameter):
                raise ValueError(
                    f"tensor parallelism cuts '{member.name}' between its matrices, so each rank "
                    f"would have other states of {member.group['function']}: use sw.muon for it, "
                    f"or leave it whole over the tensor-parallel axis"
                )

    def _data_mesh(self) -> DeviceMesh | None:
        """The axes over which matrices have owners: all but those of tensor parallelism."""
        mesh, parameter = self.sharding.mesh, self.members[0].parameter
        if isinstance(parameter, ShardedTensor):
            return parameter.cut.mesh
        if mesh is None or not any(self.sharding.blocked):
            return mesh
        names = zip(mesh.mesh_dim_names or (), self.sharding.blocked, strict=True)
        return mesh[tuple(name for name, blocks in names if not blocks)]

    def _owner_places(self) -> dict[tuple[int, int], int]:
        """By owner (replica, rank on the shard axis): its place in the order of ``ByMatrix``."""
        sizes = Ranks(self.mesh).sizes if self.mesh is not None else ()
        cuts = zip(self.sharding.sharded, self.sharding.blocked, strict=True)
        sharded = [shards for shards, blocks in cuts if not blocks][: len(sizes)]
        ranks = ranks_by(sizes, sharded)
        return dict(zip(ranks, joint_places(list(sizes)), strict=True))


def selected(stack: State, numbers: Sequence[int]) -> State:
    """Some matrices of a stack: as views if they are neighbours, else as copies."""
    part = part_of(numbers)
    return {name: values[part] for name, values in stack.items()}


def store(stack: State, numbers: Sequence[int], given: State, left: State) -> None:
    """Write the states that a rule left to a stack, where it did not write in place those that it
    was ``given``."""
    part = part_of(numbers)
    for name, values in stack.items():
        if not isinstance(part, slice) or left[name] is not given.get(name):
            values[part] = left[name]


def part_of(numbers: Sequence[int]) -> Any:
    """An index for some rows of a tensor: a slice if they are neighbours."""
    first, end = numbers[0], numbers[-1] + 1
    return slice(first, end) if end - first == len(numbers) else list(numbers)
