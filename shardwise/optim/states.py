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
from shardwise.core.layout import ALIGNMENT, ELEMENT, Item, Layout
from shardwise.core.mesh import Ranks
from shardwise.core.placements import joint_places, ranks_by
from shardwise.core.tensor import ShardedTensor
from shardwise.core.tile import replicated_tile
from shardwise.optim.blocks import Blocks
from shardwise.optim.exchange import Exchange, Key
from shardwise.optim.rules import MatrixParameter, Rule, State, Template
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
        self.rule, self.members, self.exchange, self.blocks = rule, members, exchange, blocks
        for member in members:
            if blocks is None and not cut_into_pieces(member.parameter):
                raise ValueError(
                    f"tensor parallelism cuts '{member.name}' between its matrices, so each rank "
                    f"would have other states of {member.group['function']}: use sw.muon for it, "
                    f"or leave it whole over the tensor-parallel axis"
                )
        device = local_of(members[0].parameter).device
        self.stacks: dict[Key, State] = {}  # by the first matrix of a batch
        mine: dict[Key, State] = {}
        for round_ in exchange.rounds:
            for _, keys in round_.batches:
                self.stacks[keys[0]] = stack = {
                    name: torch.zeros((len(keys), *shape), dtype=dtype, device=device)
                    for name, (shape, dtype) in self.template(keys[0]).items()
                }
                for number, key in enumerate(keys):
                    mine[key] = {name: values[number] for name, values in stack.items()}
        mesh = _data_mesh(sharding, members[0].parameter)
        places = _places(sharding, mesh) if mesh is not None else {}
        self._published: list[dict[str, Tensor]] = [{} for _ in members]  # by parameter, by name
        for position, keys in enumerate(self._keys_of()):
            member, published = members[position], self._published[position]
            single = len(keys) == 1 and len(member.route.shape_of(member.parameter.shape)) == 2
            for number, key in enumerate(keys):
                for name, (shape, dtype) in self.template(key).items():
                    nothing = torch.zeros(0, dtype=dtype, device=device)
                    state = mine[key][name] if key in mine else nothing
                    full_name = name if single else f"{name}.{number}"
                    if mesh is not None:
                        place = places[exchange.ownership.owners[key[0]]]
                        item = Item(f"{member.name}.{full_name}", shape, ELEMENT)
                        cut = _cut(item, member.parameter, mesh, sharding.mesh or mesh, place)
                        state = ShardedTensor(state.view(cut.local_shape), cut)
                    published[full_name] = state

    def _keys_of(self) -> list[list[Key]]:
        """By parameter: the keys of its matrices, in order."""
        keys_of: list[list[Key]] = [[] for _ in self.members]
        for index, matrix in enumerate(self.exchange.matrices):
            keys_of[matrix.parameter] += [(index, n) for n in range(len(matrix.shapes))]
        return keys_of

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
        for key in (key for keys in self._keys_of() for key in keys):
            entries = self.template(key).values()
            owner = self.exchange.ownership.owners[key[0]]
            nbytes[owner] += sum(math.prod(shape) * dtype.itemsize for shape, dtype in entries)
        return nbytes


def _data_mesh(sharding: Sharding, parameter: Tensor) -> DeviceMesh | None:
    """The axes over which matrices have owners: all but those of tensor parallelism."""
    mesh = sharding.mesh
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.mesh
    if mesh is None or not any(sharding.blocked):
        return mesh
    names = zip(mesh.mesh_dim_names or (), sharding.blocked, strict=True)
    return mesh[tuple(name for name, blocks in names if not blocks)]


def _places(sharding: Sharding, mesh: DeviceMesh) -> dict[tuple[int, int], int]:
    """By owner (replica, rank on the shard axis): its place in the order of ``ByMatrix``."""
    sizes, cuts = Ranks(mesh).sizes, zip(sharding.sharded, sharding.blocked, strict=True)
    sharded = [shards for shards, blocks in cuts if not blocks][: len(sizes)]
    return dict(zip(ranks_by(sizes, sharded), joint_places(list(sizes)), strict=True))


def _cut(item: Item, parameter: Tensor, mesh: DeviceMesh, full_mesh: DeviceMesh, place: int) -> Cut:
    """The cut of a state that is whole on the owner at ``place``, and empty elsewhere: a layout
    with as much room on every rank."""
    others = None
    if isinstance(parameter, ShardedTensor):
        others, full_mesh = parameter.cut.ranks.others, parameter.cut.full_mesh
    room = -(-item.numel // ALIGNMENT) * ALIGNMENT
    layout = Layout((item,), mesh.size(), room, (place * room,))
    tile = replicated_tile(item.shape, mesh, full_mesh)
    return Cut(layout, 0, Ranks(mesh, others), (True,) * mesh.ndim, tile=tile)


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
