# SPDX-License-Identifier: Apache-2.0
"""Matrices that tensor parallelism cut: each rank of an axis holds a block of rows or columns.

    duplicated    blocks --all-gather--> the whole matrix on every rank, orthogonalised t times;
                  each keeps its block. Exact.
    distributed   X' X (rows cut) or X X' (columns cut) is a sum over blocks: one all-reduce per
                  step of the iteration, and blocks never move. Exact up to rounding.
    blockwise     every block is orthogonalised as if it were the matrix. Another optimizer, with
                  another scale, for those who ask for it.

Bytes per rank and matrix of m x n, t ranks: duplicated (t-1)/t m n; distributed 2 (t-1)/t m^2 per
step, with m the side that is not cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise import comm
from shardwise.optim.newton_schulz import Form, Preset, newton_schulz, polynomial_of


@dataclass(frozen=True, eq=False)
class Blocks:
    """How matrices are cut: along rows (0) or columns (1), over an axis, and what to do."""

    axis: comm.Axis
    dim: int
    mode: str

    def whole_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Of the matrix as orthogonalised, for its scale: of the block where blocks stand alone."""
        if self.mode == "blockwise":
            return rows, cols
        size = self.axis.size
        return (rows * size, cols) if self.dim == 0 else (rows, cols * size)

    def orthogonalize(self, batch: Tensor, preset: Preset, form: Form) -> Tensor:
        """This rank's blocks [count, rows, cols] of the orthogonalised matrices."""
        if self.mode == "blockwise" or self.axis.size == 1:
            return newton_schulz(batch, preset, form=form)
        if self.mode == "duplicated":
            return self._duplicated(batch, preset, form)
        return self._distributed(batch, preset)

    def _duplicated(self, batch: Tensor, preset: Preset, form: Form) -> Tensor:
        gathered = torch.empty(
            (self.axis.size, *batch.shape), dtype=batch.dtype, device=batch.device
        )
        comm.all_gather(gathered.view(-1), batch.contiguous().view(-1), self.axis).wait()
        whole = torch.cat(gathered.unbind(), dim=1 + self.dim)  # [count, m, n]
        result = newton_schulz(whole, preset, form=form)
        return result.chunk(self.axis.size, dim=1 + self.dim)[self.axis.rank].contiguous()

    def _distributed(self, batch: Tensor, preset: Preset) -> Tensor:
        """The direct form, with Gram matrices over the side that is not cut."""
        x = batch.float()
        if self.dim == 0:  # blocks of columns, seen transposed
            x = x.mT
        x = x.contiguous()  # [count, m, n / t]
        largest = x.abs().amax(dim=(-2, -1)).clone()
        comm.all_reduce(largest, self.axis, "max").wait()
        exponent = torch.frexp(largest).exponent.clamp(-100, 126)
        x = torch.ldexp(x, -exponent[:, None, None])
        gram = self._gram(x)
        if preset.norm == "schatten4":
            bound = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).sqrt()
        else:  # the trace of X X' is the sum of all squares
            bound = gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()[:, None, None]
        bound = torch.where(bound == 0, 1.0, bound * preset.safety)
        x, gram = x / bound, gram / bound**2
        for index, step in enumerate(preset.coefficients):
            if index:
                gram = self._gram(x)
            x = step[0] * x + polynomial_of(gram, step, constant=False) @ x
        return (x.mT if self.dim == 0 else x).contiguous()

    def _gram(self, x: Tensor) -> Tensor:
        gram = (x @ x.mT).contiguous()  # [count, m, m], this rank's term
        comm.all_reduce(gram.view(-1), self.axis).wait()
        return gram
