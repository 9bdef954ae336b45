# SPDX-License-Identifier: Apache-2.0
"""Packed: a batch of matrices of one shape, scaled for 16-bit arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tensor descriptors want strides of 16 bytes: rows and columns are filled up to 8 with zeros, which
# Newton-Schulz leaves zeros.
GRANULE = 8


@dataclass(frozen=True, kw_only=True)
class Packed:
    """``values`` times a power of two per matrix: rms in [1, 2), so no element overflows fp16.

    ::

        values  [n, rows up to 8, columns up to 8]     fp16, zeros beyond rows and columns
        inverse_norms [n]                              fp32, 1 / Frobenius norm of ``values``;
                                                       0 for a matrix of zeros
    """

    values: Tensor
    inverse_norms: Tensor
    rows: int
    columns: int

    def unpadded(self, values: Tensor) -> Tensor:
        """``values`` (or a result like them) without the zeros around."""
        return values[:, : self.rows, : self.columns]


def empty_values(
    count: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float16
) -> Tensor:
    """Storage for ``Packed.values``; the rim, which no kernel writes, is zero."""
    shape = (count, padded(rows), padded(columns))
    if shape[1:] == (rows, columns):
        return torch.empty(shape, device=device, dtype=dtype)
    return torch.zeros(shape, device=device, dtype=dtype)


def padded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def scale_reference(sum_of_squares: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(power of two that brings the rms into [1, 2), 1 / norm after it), from sums in fp64."""
    total = sum_of_squares.double()  # [n]
    _, exponent = torch.frexp(total / numel)  # mean square = mantissa in [1/2, 1) times 2^exponent
    halved = ((exponent - 1) // 2).clamp(-126, 126)
    scale = torch.ldexp(torch.ones_like(total), -halved)
    inverse = torch.where(total == 0, 0.0, 1 / (total.sqrt() * scale))
    return torch.where(total == 0, 1.0, scale).float(), inverse.float()
