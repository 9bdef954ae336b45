# SPDX-License-Identifier: Apache-2.0
"""A parameter of a matrix optimizer, and the matrices that it falls into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from shardwise.layout import Grain
from shardwise.optim.presets import DEFAULT, polynomial_of, price
from shardwise.optim.routing import Route
from shardwise.optim.split import Matrix, Piece, Split, matrices_of, stored_matrices
from shardwise.optim.storage import block_shape, pieces_of, sharding_of
from shardwise.tensor import ShardedTensor

Known = dict[Any, tuple[Sequence[Piece], list[Matrix]]]


@dataclass(eq=False)
class MatrixParameter:
    """One parameter that Muon updates: a matrix, or several."""

    name: str
    parameter: Tensor
    route: Route
    group: dict[str, Any]  # its parameter group: learning rate and all

    @cached_property
    def split_here(self) -> tuple[Split | None, bool]:
        """The split of what shards cut (a block, under tensor parallelism), and whether matrices
        are whole in it."""
        sharding, split = sharding_of(self.parameter), self.route.split
        if split is None or not any(sharding.blocked):
            return split, not any(sharding.blocked)
        count = sharding.count(sharding.blocked)
        shape = tuple(self.parameter.shape)
        found = split.within(shape, sharding.block_dim, count, sharding.block)
        assert found is not None, "refused at construction"
        return found

    def matrices(
        self,
        position: int,
        *,
        measured: bool,
        order: int = 0,
        known: Known | None = None,
        divided: Sequence[Piece] | None = None,
    ) -> list[Matrix]:
        """Its matrices with pieces and prices; ``position`` is the parameter's in the group.
        ``known``: those of parameters that are cut and priced alike, which are made once.
        ``divided``: the pieces that ranks update, where those are not all that they store."""
        known = {} if known is None else known
        parameter, group = self.parameter, self.group
        shape = self.route.shape_of(block_shape(parameter))
        polynomial = polynomial_of(group.get("preset", DEFAULT))
        grain = None
        if isinstance(parameter, ShardedTensor):
            grain = parameter.cut.layout.items[parameter.cut.index].grain
        pinned = grain is not None and divided is None and keeps_whole(grain, shape)
        pieces = pieces_of(parameter) if divided is None else divided
        key = (id(pieces), shape, self.split_here[0], pinned)
        if key not in known:  # with the pieces, whose id is part of the key
            cost = partial(
                price, polynomial=polynomial, form=group.get("form", "auto"), measured=measured
            )
            matrices = matrices_of(shape, self.split_here[0])
            known[key] = pieces, stored_matrices(matrices, pieces, cost, pinned=pinned)
        return [
            replace(matrix, name=self.name + matrix.name, parameter=position, order=order)
            for matrix in known[key][1]
        ]


def keeps_whole(grain: Grain, shape: Sequence[int]) -> bool:
    """Whether a layout stores every matrix of a parameter on one rank on purpose; a stack
    [n, rows, cols] is cut between its matrices."""
    return grain.kind == "tensor" and (grain.count == 1 or len(shape) == 3)
