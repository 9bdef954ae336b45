# SPDX-License-Identifier: Apache-2.0
"""Matrices that tensor parallelism cuts into blocks: how to gather them, and three ways to
orthogonalise them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.kernels.newton_schulz import bound_of, iterate_gram, scaled
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
        is not cut."""
        x = batch.float()
        # Transposed, blocks of rows are blocks of columns: [count, m, n / t].
        x = (x.mT if self.dim == 0 else x).contiguous()
        largest = x.abs().amax(dim=(-2, -1)).clone()
        comm.all_reduce(largest, self.axis, "max").wait()
        x = scaled(x, largest)
        gram = self._gram(x)
        bound = bound_of(gram, polynomial)
        x = iterate_gram(x / bound, gram / bound**2, polynomial, self._gram)
        return (x.mT if self.dim == 0 else x).contiguous()

    def _gram(self, x: Tensor) -> Tensor:
        gram = (x @ x.mT).contiguous()  # [count, m, m], this rank's term
        comm.all_reduce(gram.view(-1), self.axis).wait()
        return gram
