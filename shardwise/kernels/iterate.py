# SPDX-License-Identifier: Apache-2.0
"""The Gram iteration with the two product kernels, in 16 bits with fp32 sums.

X itself is not scaled: (1 / norm)² scales the first Gram R of a matrix, inside the kernel that
stores it. The norm of R gives a tighter bound of X: R is multiplied by f from there on, and X by
√f / norm, again inside the kernels.

    f = 1 / (safety² · ||R||)          norm schatten4
    f = 1 / safety²                    norm frobenius

It overwrites the packed batch: X alternates between its memory and a second one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import ALIGNMENT, run
from shardwise.kernels.packed import Packed
from shardwise.kernels.polynomials import GRAM_SCALE, VALUE_SCALE, Polynomial, Step, stages
from shardwise.kernels.products import WIDE, ProductTile, product, symmetric_product, tiles_of


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Pairs [n, 2] for ``symmetric_product``: factors of the product and of the added term."""

    square: Tensor  # f², f: for R R and R
    inner: Tensor  # 1, f: for the square of a matrix that is rescaled already, and R
    both: Tensor  # f, f
    x: Tensor  # [n]: the factor of X


def factors_reference(
    inverse: Tensor, squares: Tensor | None, scale: float, safety: float
) -> Factors:
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
    """The factors of matrices, by one launch. ``inverse`` [n]: 1 / norm of X; ``squares``
    [n, tiles]: sums of squares of R · scale, or None for the norm frobenius."""
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


def evaluate(
    gram: Tensor,
    out: Tensor,
    step: Step,
    rescale: Factors | None,
    inner: Tensor | None,
    tile: ProductTile,
    *,
    constant: bool = True,
) -> Tensor:
    """out = a + b·R + c·R² (+ d·R³ + e·R⁴), where R = gram · f / GRAM_SCALE.

    ``inner`` is memory for the square inside; ``constant=False`` leaves ``a`` out.
    """
    *before, (shift, linear, square) = stages(step, constant=constant)
    if square == 0:
        factor: float | Tensor = linear / GRAM_SCALE
        if rescale is not None:
            factor = factor * rescale.both[:, :1, None]
        torch.mul(gram, factor, out=out)
        if shift:
            out.diagonal(dim1=1, dim2=2).add_(shift)
        return out
    squared, scale, scales = gram, GRAM_SCALE, None if rescale is None else rescale.square
    for first, second, third in before:
        assert inner is not None, "the square inside needs memory"
        symmetric_product(
            gram, gram, inner, tile, c=gram, alpha=third * VALUE_SCALE / GRAM_SCALE**2,
            beta=second * VALUE_SCALE / GRAM_SCALE, shift=first * VALUE_SCALE, scales=scales,
        )  # fmt: skip
        # The squared matrix is rescaled already.
        squared, scale, scales = inner, VALUE_SCALE, None if rescale is None else rescale.inner
    return symmetric_product(
        squared, squared, out, tile, c=gram, alpha=square / scale**2, beta=linear / GRAM_SCALE,
        shift=shift, scales=scales,
    )  # fmt: skip


def iterate(packed: Packed, polynomial: Polynomial, tile: ProductTile = WIDE) -> Tensor:
    """The result in the layout of ``packed.values``. X is multiplied by a Q at the restart, and by
    another Q at the end.

    Let z be the polynomial of R of an iteration, without ``a``. R becomes (z + a)·R·(z + a).
    Rounding would cost R·(z + a)² up to two bits more. Q is multiplied from the last iteration back
    to the first: Q·z + a·Q adds a tile of an operand that is loaded anyway, and keeps ``a``, the
    large part, out of every rounded operand. Storing z + a instead would lose two bits in tiles
    above the diagonal, which are mirror images.
    """
    x, spare = packed.values, torch.empty_like(packed.values)
    count, rows, columns = x.shape
    tall, size = rows > columns, min(rows, columns)

    def gram_of(x: Tensor, out: Tensor, alpha: float, **scales: Any) -> Tensor:
        return symmetric_product(x, x, out, tile, alpha=alpha, tall=tall, **scales)

    def empty() -> Tensor:
        return packed.values.new_empty(count, size, size)

    inverse, squares = packed.inverse_norms, None
    if polynomial.norm == "schatten4":
        squares = inverse.new_empty(count, sum(tiles_of(size, tile)))
    scales = inverse[:, None].expand(-1, 2).square().contiguous()
    r = gram_of(x, empty(), GRAM_SCALE, scales=scales, squares=squares)
    rescale: Factors | None = factors(inverse, squares, GRAM_SCALE, polynomial.safety)
    assert rescale is not None
    x_scales: Tensor | None = rescale.x
    alpha, first = 1.0, polynomial.first_steps
    # A run of k iterations stores k - 1 polynomials and needs one more buffer at its peak.
    free = [empty() for _ in range(max(first, polynomial.steps - first))]
    inner = empty() if polynomial.nested else None
    stored: list[tuple[Tensor, float]] = []  # the polynomials z of a run, with a
    for number, step in enumerate(polynomial.coefficients, start=1):
        a = step[0]
        if number not in (first, polynomial.steps):
            z = evaluate(r, free.pop(), step, rescale, inner, tile, constant=False)
            half = symmetric_product(z, r, free.pop(), tile, beta=a, c=r)
            both = None if rescale is None else rescale.both
            symmetric_product(half, z, r, tile, beta=a, scales=both)
            free.append(half)
            stored.append((z, a))
            rescale = None
            continue
        q = evaluate(r, free.pop(), step, rescale, inner, tile)
        free.append(r)
        while stored:
            z, shift = stored.pop()
            longer = symmetric_product(q, z, free.pop(), tile, beta=shift)
            free += [q, z]
            q = longer
        last = number == polynomial.steps
        alpha *= 1.0 if last else VALUE_SCALE
        product(q, x, spare, tile, alpha=alpha, scales=x_scales, tall=tall)
        free.append(q)
        x, spare = spare, x
        x_scales, alpha, rescale = None, 1 / VALUE_SCALE, None
        if not last:
            r = gram_of(x, free.pop(), GRAM_SCALE / VALUE_SCALE**2)
    return x
