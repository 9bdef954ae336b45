# SPDX-License-Identifier: Apache-2.0
"""The Gram iteration with the two product kernels, in 16 bits with fp32 sums.

X itself is not scaled: (1 / norm)² scales the first Gram of a matrix, and 1 / norm scales the first
product with X, each inside the kernel that stores the result.

It overwrites the packed batch: X alternates between its memory and a second one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels.factors import Factors, factors
from shardwise.kernels.packed import Packed
from shardwise.kernels.polynomials import (
    GRAM_SCALE,
    VALUE_SCALE,
    Polynomial,
    Step,
    Triple,
    stages,
)
from shardwise.kernels.product import product
from shardwise.kernels.symmetric import WIDE, ProductTile, symmetric_product, tiles_per_matrix


class Products:
    """The kernels with this batch's shape, orientation and tiles filled in."""

    def __init__(self, values: Tensor, tile: ProductTile) -> None:
        count, rows, columns = values.shape
        self.tall = rows > columns
        self.size = min(rows, columns)
        self.count = count
        self.values = values
        self.tile = tile

    def empty_gram(self) -> Tensor:
        return self.values.new_empty(self.count, self.size, self.size)

    def gram(
        self,
        x: Tensor,
        out: Tensor,
        alpha: float,
        scales: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Tensor:
        """out = alpha · scale · x·xᵀ (xᵀ·x where tall)."""
        return symmetric_product(
            x, x, out, self.tile, alpha=alpha, scales=scales, squares=squares, tall=self.tall
        )

    def polynomial(
        self,
        gram: Tensor,
        out: Tensor,
        step: Step,
        rescale: Factors | None,
        inner: Tensor | None,
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
                factor = factor * rescale.linear[:, None, None]
            torch.mul(gram, factor, out=out)
            if shift:
                out.diagonal(dim1=1, dim2=2).add_(shift)
            return out
        scales = None if rescale is None else rescale.square
        if not before:
            return self._stage(gram, gram, out, (shift, linear, square), GRAM_SCALE, scales)
        assert inner is not None, "the square inside needs memory"
        ((first, second, third),) = before
        wide = (first * VALUE_SCALE, second * VALUE_SCALE, third * VALUE_SCALE)
        self._stage(gram, gram, inner, wide, GRAM_SCALE, scales)
        if rescale is not None:  # the squared matrix is rescaled already
            scales = rescale.inner
        return self._stage(inner, gram, out, (shift, linear, square), VALUE_SCALE, scales)

    def _stage(
        self,
        squared: Tensor,
        gram: Tensor,
        out: Tensor,
        stage: Triple,
        scale: float,
        scales: Tensor | None,
    ) -> Tensor:
        """out = shift + linear·R + square·P², where P = squared / scale."""
        shift, linear, square = stage
        alpha, beta = square / scale**2, linear / GRAM_SCALE
        return symmetric_product(
            squared, squared, out, self.tile, c=gram, alpha=alpha, beta=beta, shift=shift,
            scales=scales,
        )  # fmt: skip

    def shifted(
        self, a: Tensor, b: Tensor, shift: float, out: Tensor, rescale: Factors | None = None
    ) -> Tensor:
        """out = f · a·(b + shift), where a and b are polynomials of one Gram."""
        scales = None if rescale is None else rescale.both
        return symmetric_product(a, b, out, self.tile, beta=shift, scales=scales)

    def moved(
        self, r: Tensor, z: Tensor, shift: float, half: Tensor, rescale: Factors | None
    ) -> Tensor:
        """r = f · (z + shift)·r·(z + shift), with ``half`` as workspace.

        Rounding would cost r·(z + shift)² up to two bits more.
        """
        symmetric_product(z, r, half, self.tile, beta=shift, c=r)
        return self.shifted(half, z, shift, r, rescale)

    def apply(
        self, q: Tensor, x: Tensor, out: Tensor, alpha: float, scales: Tensor | None = None
    ) -> Tensor:
        """out = alpha · scale · q·x (x·q where tall)."""
        return product(q, x, out, self.tile, alpha=alpha, scales=scales, tall=self.tall)


def first_gram(
    products: Products, packed: Packed, polynomial: Polynomial
) -> tuple[Tensor, Factors]:
    """R·GRAM_SCALE, and the factors by which R and X must still be multiplied."""
    inverse = packed.inverse_norms  # [n]
    scales = inverse[:, None].expand(-1, 2).square().contiguous()
    squares = None
    if polynomial.norm == "schatten4":
        tiles = tiles_per_matrix(products.size, products.tile)
        squares = inverse.new_empty(products.count, tiles)
    gram = products.gram(packed.values, products.empty_gram(), GRAM_SCALE, scales, squares)
    return gram, factors(inverse, squares, GRAM_SCALE, polynomial.safety)


def iterate(packed: Packed, polynomial: Polynomial, tile: ProductTile = WIDE) -> Tensor:
    """The result in the layout of ``packed.values``. X is multiplied by a Q at the restart, and by
    another Q at the end.

    Let z be the polynomial of R of an iteration, without ``a``. R becomes (z + a)·R·(z + a). Q is
    multiplied from the last iteration back to the first: Q·z + a·Q adds a tile of an operand that
    is loaded anyway, and keeps ``a``, the large part, out of every rounded operand. Storing z + a
    instead would lose two bits in tiles above the diagonal, which are mirror images.
    """
    products = Products(packed.values, tile)
    r, factors_left = first_gram(products, packed, polynomial)
    rescale: Factors | None = factors_left
    x, spare, alpha = packed.values, torch.empty_like(packed.values), 1.0
    scales: Tensor | None = factors_left.x
    first = polynomial.first_steps
    # A run of k iterations stores k - 1 polynomials and needs one more buffer at its peak.
    free = [products.empty_gram() for _ in range(max(first, polynomial.steps - first))]
    inner = products.empty_gram() if polynomial.nested else None
    stored: list[tuple[Tensor, float]] = []  # the polynomials z of a run, with a
    for index, step in enumerate(polynomial.coefficients):
        a = step[0]
        if index + 1 not in (first, polynomial.steps):
            z = products.polynomial(r, free.pop(), step, rescale, inner, constant=False)
            half = free.pop()
            products.moved(r, z, a, half, rescale)
            free.append(half)
            stored.append((z, a))
            rescale = None
            continue
        q = products.polynomial(r, free.pop(), step, rescale, inner)
        free.append(r)
        while stored:
            z, shift = stored.pop()
            longer = products.shifted(q, z, shift, free.pop())
            free += [q, z]
            q = longer
        last = index + 1 == polynomial.steps
        products.apply(q, x, spare, alpha * (1.0 if last else VALUE_SCALE), scales)
        free.append(q)
        x, spare = spare, x
        scales, alpha, rescale = None, 1 / VALUE_SCALE, None
        if not last:
            r = products.gram(x, free.pop(), GRAM_SCALE / VALUE_SCALE**2)
    return x
