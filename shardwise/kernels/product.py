# SPDX-License-Identifier: Apache-2.0
"""Batched products with a symmetric matrix, scaled per matrix: Q·X for wide, X·Qᵀ for tall.

Q is a product of polynomials in the order in which they are applied, and symmetric only up to
rounding. The tall case is therefore the transpose of the wide case, X·Qᵀ, in which X damps the
errors of Q. X·Q would not damp them.

cuBLAS is as fast, but chooses its kernel, and so its bits, by the size of the batch. In this kernel
the program of a tile sums over k in ascending order, for every batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import boxes, run
from shardwise.kernels.symmetric import ProductTile, programs

# Tiles are computed in bands of so many rows of tiles, so that programs that run at the same time
# share operands in L2.
BAND = 8


def reference(
    q: Tensor, x: Tensor, *, alpha: float = 1.0, scales: Tensor | None = None, tall: bool = False
) -> Tensor:
    """The product by definition, in fp32; q is symmetric, ``scales`` [n] multiplies alpha."""
    product = x.float() @ q.float().mT if tall else q.float() @ x.float()
    return alpha * product if scales is None else alpha * scales[:, None, None] * product


@triton.jit
def _product_kernel(
    a_desc, b_desc, d_desc, scales_ptr,
    depth, tiles, tile_rows, tile_columns, alpha_0,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, band: tl.constexpr,
    transposed: tl.constexpr, has_scales: tl.constexpr, flatten: tl.constexpr,
):  # fmt: skip
    per_matrix = tile_rows * tile_columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=flatten):
        matrix = tile // per_matrix
        position = tile % per_matrix
        first = position // (band * tile_columns) * band
        height = tl.minimum(tile_rows - first, band)
        inside = position % (band * tile_columns)
        row = (first + inside % height) * rows
        column = inside // height * columns

        acc = tl.zeros((rows, columns), dtype=tl.float32)
        for k in tl.range(0, depth, step):
            x = a_desc.load([matrix, row, k]).reshape(rows, step)
            if transposed:
                y = b_desc.load([matrix, column, k]).reshape(columns, step)
                acc = tl.dot(x, y.T, acc, input_precision="ieee")
            else:
                y = b_desc.load([matrix, k, column]).reshape(step, columns)
                acc = tl.dot(x, y, acc, input_precision="ieee")

        alpha = alpha_0
        if has_scales:
            alpha *= tl.load(scales_ptr + matrix)
        if columns == rows:
            value = (acc * alpha).to(d_desc.dtype).reshape(1, rows, columns)
            d_desc.store([matrix, row, column], value)
        else:  # in halves: the staging buffer of a whole tile would cost a stage of loads
            left, right = acc.reshape(rows, 2, columns // 2).permute(0, 2, 1).split()
            value = (left * alpha).to(d_desc.dtype).reshape(1, rows, columns // 2)
            d_desc.store([matrix, row, column], value)
            value = (right * alpha).to(d_desc.dtype).reshape(1, rows, columns // 2)
            d_desc.store([matrix, row, column + columns // 2], value)


def product(
    q: Tensor,  # [n, m, m], symmetric
    x: Tensor,  # [n, m, k], or [n, k, m] where tall
    out: Tensor,  # the shape of x; other memory
    tile: ProductTile,
    *,
    alpha: float = 1.0,
    scales: Tensor | None = None,
    tall: bool = False,
) -> Tensor:
    """Write ``reference(...)``, rounded once, to ``out``."""
    count, rows, columns = out.shape
    tile_rows, tile_columns = -(-rows // tile.rows), -(-columns // tile.columns)
    tiles = count * tile_rows * tile_columns
    # Tall: the summed dimension is the last of both operands.
    b_box = [1, tile.columns, tile.step] if tall else [1, tile.step, tile.columns]
    run(
        _product_kernel, (programs(tiles, tile, out.device),),
        boxes(x if tall else q, [1, tile.rows, tile.step]),
        boxes(q if tall else x, b_box),
        boxes(out, [1, tile.rows, tile.rows]),
        scales if scales is not None else out,
        q.shape[1], tiles, tile_rows, tile_columns, alpha,
        rows=tile.rows, columns=tile.columns, step=tile.step, band=BAND, transposed=tall,
        has_scales=scales is not None, flatten=tile.flatten,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
