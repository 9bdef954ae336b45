# SPDX-License-Identifier: Apache-2.0
"""The scale factors of each matrix that the first step of an iteration needs, by one launch.

The first Gram R is formed from X / ||X||. Its norm gives a tighter bound of X: R is multiplied by f
from there on, and X by √f / ||X||.

    f = 1 / (safety² · ||R||)          norm schatten4
    f = 1 / safety²                    norm frobenius
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import ALIGNMENT, run


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Pairs [n, 2] for ``symmetric_product``: factors of the product and of the added term."""

    square: Tensor  # f², f: for R R and R
    inner: Tensor  # 1, f: for the square of a matrix that is rescaled already, and R
    both: Tensor  # f, f
    x: Tensor  # [n]: the factor of X

    @property
    def linear(self) -> Tensor:
        """f [n]."""
        return self.both[:, 0]


def reference(inverse: Tensor, squares: Tensor | None, scale: float, safety: float) -> Factors:
    """:func:`factors` by definition."""
    factor = torch.full_like(inverse, safety**-2)
    if squares is not None:
        norm = squares.sum(1).sqrt() / scale
        factor = torch.where(norm > 0, factor / norm, 0.0)
    return Factors(
        square=torch.stack([factor.square(), factor], dim=1),
        inner=torch.stack([torch.ones_like(factor), factor], dim=1),
        both=torch.stack([factor, factor], dim=1),
        x=inverse * factor.sqrt(),
    )


@triton.jit
def _factors_kernel(
    inverse_ptr, squares_ptr, out_ptr, row, tiles, scale, bound,
    has_squares: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    factor = bound
    if has_squares:  # a fixed tree for each matrix: its sum does not depend on the others
        place = tl.arange(0, width)
        squares = tl.load(squares_ptr + matrix * tiles + place, mask=place < tiles, other=0.0)
        norm = tl.sqrt(tl.sum(squares, axis=0)) / scale
        factor = tl.where(norm > 0.0, bound / norm, 0.0)
    pair = out_ptr + 2 * matrix
    tl.store(pair, factor * factor)
    tl.store(pair + 1, factor)
    tl.store(pair + row, 1.0)
    tl.store(pair + row + 1, factor)
    tl.store(pair + 2 * row, factor)
    tl.store(pair + 2 * row + 1, factor)
    tl.store(out_ptr + 3 * row + matrix, tl.load(inverse_ptr + matrix) * tl.sqrt(factor))


def factors(inverse: Tensor, squares: Tensor | None, scale: float, safety: float) -> Factors:
    """The factors of matrices. ``inverse`` [n]: 1 / norm of X; ``squares`` [n, tiles]: sums of
    squares of R · scale, or None for the norm frobenius."""
    count = len(inverse)
    row = -(-2 * count // ALIGNMENT) * ALIGNMENT  # or the products would be compiled twice
    out = torch.empty(4, row, dtype=torch.float32, device=inverse.device)
    tiles = 1 if squares is None else squares.shape[1]
    run(
        _factors_kernel, (count,),
        inverse, inverse if squares is None else squares, out, row, tiles, scale, safety**-2,
        has_squares=squares is not None, width=triton.next_power_of_2(tiles), num_warps=4,
    )  # fmt: skip
    square, inner, both = (out[number, : 2 * count].view(count, 2) for number in range(3))
    return Factors(square=square, inner=inner, both=both, x=out[3, :count])
