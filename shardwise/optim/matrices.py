# SPDX-License-Identifier: Apache-2.0
"""The parameters of matrix optimizers, and the matrices in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from shardwise.core.tensor import ShardedTensor
from shardwise.optim.routing import Route
from shardwise.optim.rules import Rule
from shardwise.optim.split import Matrix, Piece, Split, matrices_of, stored_matrices
from shardwise.optim.storage import block_shape, sharding_of

# Matrices of parameters that are cut and priced alike, which are made once. A value holds its
# pieces, whose id is part of the key.
Known = dict[Any, tuple[Sequence[Piece], list[Matrix]]]


@dataclass(eq=False)
class MatrixParameter:
    """One parameter of a matrix optimizer: a matrix, or several."""

    name: str
    parameter: Tensor
    route: Route
    group: dict[str, Any]  # the parameter group of the optimizer
    rule: Rule

    @cached_property
    def split_here(self) -> tuple[Split | None, bool]:
        """The split of this rank's block (without tensor parallelism, of the parameter), and
        whether the matrices in it are whole."""
        sharding, split = sharding_of(self.parameter), self.route.split
        if split is None or not any(sharding.blocked):
            return split, not any(sharding.blocked)
        count, shape = sharding.count(sharding.blocked), tuple(self.parameter.shape)
        within = split.within(shape, sharding.block_dim, count, sharding.block)
        assert within is not None, "refused at construction"
        return within

    @property
    def pinned(self) -> bool:
        """Whether the layout stores every matrix on one rank on purpose."""
        if not isinstance(self.parameter, ShardedTensor):
            return False
        grain = self.parameter.cut.layout.items[self.parameter.cut.index].grain
        # A stack [n, rows, cols] is cut between its matrices.
        stacked = len(self.route.shape_of(self.parameter.shape)) == 3
        return grain.kind == "tensor" and (grain.count == 1 or stacked)

    def matrices(self, position: int, pieces: Sequence[Piece], known: Known) -> list[Matrix]:
        """The matrices of the parameter, which is at ``position`` of its group. ``pieces``: the
        elements that each rank updates."""
        shape, split = self.route.shape_of(block_shape(self.parameter)), self.split_here[0]
        key = (id(pieces), shape, split, self.pinned, id(self.group))
        if key not in known:

            def cost(rows: int, cols: int) -> int:
                return self.rule.cost(rows, cols, self.group)

            matrices = matrices_of(shape, split)
            known[key] = pieces, stored_matrices(matrices, pieces, cost, pinned=self.pinned)
        return [
            replace(matrix, name=self.name + matrix.name, parameter=position)
            for matrix in known[key][1]
        ]
