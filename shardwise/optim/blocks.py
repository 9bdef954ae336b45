# SPDX-License-Identifier: Apache-2.0
"""Matrices that tensor parallelism cuts into blocks: how to gather them, and three ways to
orthogonalise them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.kernels.newton_schulz import iterate
from shardwise.kernels.polynomials import Polynomial


@dataclass(frozen=True, eq=False)
class Blocks:
    """Matrices that tensor parallelism cut into blocks of rows (dim 0) or columns (1) over an axis.

        duplicated    blocks go to the ranks of the axis, which orthogonalise an equal number of
                      whole matrices each; the blocks come back. Exact.
        distributed   X' X (rows cut) or X X' (columns cut) is a sum over blocks: one all-reduce
                      before the first step of the iteration and one at the restart, and blocks
                      never move. Exact up to rounding.
        blockwise     every block is orthogonalised as if it were a matrix. This is another
                      optimizer, with another scale; the blocks are not cut.

    Elements that a rank sends for one m x n matrix, with t ranks: duplicated 2 (t-1)/t^2 m n;
    distributed 4 (t-1)/t m^2, where m is the side that is not cut.
    """

    axis: comm.Axis
    dim: int
    mode: str

    def whole_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """The shape of the whole matrix, of which [rows, cols] is a block."""
        size = self.axis.size
        return (rows * size, cols) if self.dim == 0 else (rows, cols * size)

    def gather(self, batch: Tensor) -> Tensor:
        """The whole matrices [count, m, n] of every rank's blocks (collective)."""
        gathered = batch.new_empty((self.axis.size, *batch.shape))
        comm.all_gather(gathered.view(-1), batch.contiguous().view(-1), self.axis).wait()
        return torch.cat(gathered.unbind(), dim=1 + self.dim)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's blocks of whole matrices."""
        return whole.chunk(self.axis.size, dim=1 + self.dim)[self.axis.rank].contiguous()

    def divided(self, batch: Tensor, compute: Callable[[Tensor], Tensor], turn: int = 0) -> Tensor:
        """This rank's blocks of the computed matrices, of which each rank computes a part. The rank
        ``turn`` begins, so that single matrices go to one rank after another."""
        count, size, numel = len(batch), self.axis.size, batch[0].numel()
        counts = [len(range((rank - turn) % size, count, size)) for rank in range(size)]
        mine = counts[self.axis.rank]
        here, there = [mine * numel] * size, [number * numel for number in counts]
        blocks = batch.new_empty((size, mine, *batch.shape[1:]))
        sent = batch.contiguous().view(-1)
        comm.all_to_all(blocks.view(-1), sent, here, there, self.axis).wait()
        computed = compute(torch.cat(blocks.unbind(), dim=1 + self.dim))
        sent = torch.stack(computed.chunk(size, dim=1 + self.dim)).view(-1)
        found = computed.new_empty(batch.shape)
        comm.all_to_all(found.view(-1), sent, there, here, self.axis).wait()
        return found

    def orthogonalise(self, batch: Tensor, polynomial: Polynomial) -> Tensor:
        """This rank's blocks of the orthogonalised matrices, with Gram matrices over the side that
        is not cut. Transposed, blocks of rows are blocks of columns: [count, m, n / t]."""

        def reduced(tensor: Tensor, operation: Any) -> Tensor:
            tensor = tensor.contiguous()
            comm.all_reduce(tensor.view(-1), self.axis, operation).wait()
            return tensor

        return iterate(batch.float(), polynomial, tall=self.dim == 0, reduced=reduced)
