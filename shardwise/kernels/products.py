# SPDX-License-Identifier: Apache-2.0
"""The two batched products of Newton-Schulz: one whose result is symmetric, and Q·X.

Symmetric: half of the tiles are computed, the rest mirrored.

::

    D = alpha · A·Bᵀ + beta · C + shift · I          (or Aᵀ·B for a tall A: D is over its columns)

    row block 0 | s                     ww  a wide tile, computed and stored
              1 | ww ww                 s   a square tile, computed and stored
              2 | ww ww s
              3 | ww ww ww ww           above the diagonal: stored by the tile below the diagonal,
              4 | ww ww ww ww s         transposed

A tile is ``rows`` by ``2 * rows``. wgmma is fastest with 256 columns, and a wide tile reads less
from L2 (85 FLOP per byte at 128x256, 64 at 128x128), but the diagonal needs squares. Row block r
has r + 1 blocks: an odd row has only wide tiles, an even row has one more square, at the diagonal.
The squares have a second loop after the loop of the wide tiles: with a branch in one loop, the
compiler could not load the next tile while it stores this tile.

Q·X for wide X, X·Qᵀ for tall: Q is a product of polynomials in the order in which they are applied,
and symmetric only up to rounding. The tall case is therefore the transpose of the wide case, in
which X damps the errors of Q. X·Q would not damp them.

cuBLAS chooses its kernel, and so its bits, by the size of the batch. Here one program sums an
element over k in ascending order, so the bits of a matrix do not depend on the rest of the batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import boxes, multiprocessors, run

# Tiles of Q·X are computed in bands of so many rows of tiles, so that programs that run at the same
# time share operands in L2.
BAND = 8


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """The static configuration of both kernels, whose programs compute many tiles each, one per
    multiprocessor, and load the next tile while they store this one."""

    rows: int
    step: int  # the length of the summed dimension in one load
    warps: int
    stages: int  # loads in flight

    @property
    def columns(self) -> int:
        return 2 * self.rows


# H200, 2026-11-15 (torch 2.11, Triton 3.6): the best of ten, or within a few percent of the best,
# for every side and product. Narrower tiles read more from L2. More stages leave no memory for the
# store.
WIDE = ProductTile(rows=128, step=64, warps=8, stages=3)


def symmetric_reference(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    shift: float = 0.0,
    c: Tensor | None = None,
    scales: Tensor | None = None,
    tall: bool = False,
) -> Tensor:
    """The product by definition, in fp32; ``scales`` [n, 2] multiplies alpha and beta."""
    a32, b32 = a.float(), b.float()
    product = a32.mT @ b32 if tall else a32 @ b32.mT  # [n, m, m]
    identity = torch.eye(product.shape[-1], device=a.device)
    scale = torch.ones(len(a), 2, device=a.device) if scales is None else scales
    scale = scale[:, :, None, None]
    total = alpha * scale[:, 0] * product + shift * identity
    return total if beta == 0 else total + beta * scale[:, 1] * (a if c is None else c).float()


@triton.jit
def _finish(
    acc, c_desc, d_desc, matrix, row, column, alpha, beta, shift,
    block: tl.constexpr, has_beta: tl.constexpr, has_shift: tl.constexpr,
):  # fmt: skip
    """Scale, add and store one square block; returns the sum of its squares, mirror included.

    There are no branches, which would keep the compiler from loading the next tile meanwhile.
    Blocks that must not be stored are stored out of bounds, where the copy engine drops them.
    """
    outside: tl.constexpr = 1 << 30
    value = acc * alpha
    if has_beta:
        old = c_desc.load([matrix, row * block, column * block]).reshape(block, block)
        value += beta * old.to(tl.float32)
    if has_shift:
        rows = row * block + tl.arange(0, block)
        columns = column * block + tl.arange(0, block)
        value += tl.where(rows[:, None] == columns[None, :], shift, 0.0)
    rounded = value.to(d_desc.dtype)
    place = tl.where(column <= row, row * block, outside)
    d_desc.store([matrix, place, column * block], rounded.reshape(1, block, block))
    place = tl.where(column < row, column * block, outside)
    d_desc.store([matrix, place, row * block], tl.trans(rounded).reshape(1, block, block))
    weight = tl.where(column < row, 2.0, tl.where(column == row, 1.0, 0.0))
    return weight * tl.sum(value * value)


@triton.jit
def _tile(
    a_desc, b_desc, c_desc, d_desc, scales_ptr,
    matrix, row, column, depth, alpha, beta, shift,
    block: tl.constexpr, ratio: tl.constexpr, step: tl.constexpr, tall: tl.constexpr,
    has_scales: tl.constexpr, has_beta: tl.constexpr, has_shift: tl.constexpr,
):  # fmt: skip
    """Sum and store blocks (row, column) .. (row, column + ratio - 1); returns their squares."""
    wide: tl.constexpr = block * ratio
    acc = tl.zeros((block, wide), dtype=tl.float32)
    for k in tl.range(0, depth, step):
        if tall:
            x = a_desc.load([matrix, k, row * block]).reshape(step, block)
            y = b_desc.load([matrix, k, column * block]).reshape(step, wide)
            acc = tl.dot(x.T, y, acc, input_precision="ieee")
        else:
            x = a_desc.load([matrix, row * block, k]).reshape(block, step)
            y = b_desc.load([matrix, column * block, k]).reshape(wide, step)
            acc = tl.dot(x, y.T, acc, input_precision="ieee")

    if has_scales:
        alpha *= tl.load(scales_ptr + 2 * matrix)
        beta *= tl.load(scales_ptr + 2 * matrix + 1)
    if ratio == 1:
        total = _finish(
            acc, c_desc, d_desc, matrix, row, column, alpha, beta, shift,
            block, has_beta, has_shift,
        )  # fmt: skip
    else:
        left, right = acc.reshape(block, 2, block).permute(0, 2, 1).split()
        total = _finish(
            left, c_desc, d_desc, matrix, row, column, alpha, beta, shift,
            block, has_beta, has_shift,
        )  # fmt: skip
        total += _finish(
            right, c_desc, d_desc, matrix, row, column + 1, alpha, beta, shift,
            block, has_beta, has_shift,
        )  # fmt: skip
    return total


@triton.jit
def _symmetric_kernel(
    a_desc, b_desc, square_desc, c_desc, d_desc, scales_ptr, squares_ptr,
    count, blocks, depth, tiles_per_matrix, leftovers_per_matrix, alpha, beta, shift,
    block: tl.constexpr, step: tl.constexpr,
    tall: tl.constexpr, has_scales: tl.constexpr, has_beta: tl.constexpr,
    has_shift: tl.constexpr, has_squares: tl.constexpr,
):  # fmt: skip
    tl.assume(depth > 0)  # otherwise every loop is compiled twice, once without the sum
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = count * tiles_per_matrix
    all_per_matrix = tiles_per_matrix + leftovers_per_matrix
    for tile in tl.range(program, tiles, programs, flatten=True):
        matrix = tile // tiles_per_matrix
        position = tile % tiles_per_matrix
        # Group g holds two block rows of g + 1 tiles each (the last group perhaps one row), so
        # g * (g + 1) tiles stand before it.
        whole = position // 2
        group = ((tl.sqrt(8.0 * whole + 1.0) - 1.0) * 0.5).to(tl.int32)
        group = tl.where(group * (group + 1) // 2 > whole, group - 1, group)
        group = tl.where((group + 1) * (group + 2) // 2 <= whole, group + 1, group)
        offset = position - 2 * (group * (group + 1) // 2)
        first = group * 2 + 1
        height = tl.minimum(2, blocks - first)
        total = _tile(
            a_desc, b_desc, c_desc, d_desc, scales_ptr,
            matrix, first + offset % height, offset // height * 2, depth, alpha, beta, shift,
            block, 2, step, tall, has_scales, has_beta, has_shift,
        )  # fmt: skip
        if has_squares:
            tl.store(squares_ptr + matrix * all_per_matrix + position, total)
    # The programs that have computed one tile less than the others take the first squares.
    first = (program + programs - tiles % programs) % programs
    for tile in tl.range(first, count * leftovers_per_matrix, programs, flatten=True):
        matrix = tile // leftovers_per_matrix
        position = tile % leftovers_per_matrix
        total = _tile(
            a_desc, square_desc, c_desc, d_desc, scales_ptr,
            matrix, 2 * position, 2 * position, depth, alpha, beta, shift,
            block, 1, step, tall, has_scales, has_beta, has_shift,
        )  # fmt: skip
        if has_squares:
            place = matrix * all_per_matrix + tiles_per_matrix + position
            tl.store(squares_ptr + place, total)


def symmetric_product(
    a: Tensor,  # [n, m, k], or [n, k, m] where tall
    b: Tensor,  # the shape of a, and such that the product is symmetric
    out: Tensor,  # [n, m, m], neither a nor b; it may be c, which is read block by block
    tile: ProductTile,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    shift: float = 0.0,
    c: Tensor | None = None,  # the shape of out, symmetric; None: a
    scales: Tensor | None = None,
    squares: Tensor | None = None,
    tall: bool = False,
) -> Tensor:
    """Write ``symmetric_reference(...)``, rounded once, to ``out``, and sums of squares to
    ``squares`` [n, tiles]."""
    count, size = out.shape[:2]
    wides, leftovers = tiles_of(size, tile)
    narrow = [1, tile.step, tile.rows] if tall else [1, tile.rows, tile.step]
    wide = [1, tile.step, tile.columns] if tall else [1, tile.columns, tile.step]
    square = [1, tile.rows, tile.rows]
    d_desc = boxes(out, square)
    run(
        _symmetric_kernel, (min(count * (wides + leftovers), multiprocessors(out.device)),),
        boxes(a, narrow), boxes(b, wide), boxes(b, narrow),
        boxes(a if c is None else c, square) if beta else d_desc,
        d_desc,
        scales if scales is not None else out,
        squares if squares is not None else out,
        count, -(-size // tile.rows), a.shape[1] if tall else a.shape[2], wides, leftovers,
        alpha, beta, shift,
        block=tile.rows, step=tile.step, tall=tall,
        has_scales=scales is not None, has_beta=beta != 0, has_shift=shift != 0,
        has_squares=squares is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def tiles_of(size: int, tile: ProductTile) -> tuple[int, int]:
    """The numbers of wide and of square tiles of one matrix."""
    blocks = -(-size // tile.rows)
    return blocks * blocks // 4, -(-blocks // 2)


# ------------------------------------------------------------------------------ Q·X


def product_reference(
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
    transposed: tl.constexpr, has_scales: tl.constexpr,
):  # fmt: skip
    per_matrix = tile_rows * tile_columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
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
        # In halves: the staging buffer of a whole tile would cost a stage of loads.
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
    """Write ``product_reference(...)``, rounded once, to ``out``."""
    count, rows, columns = out.shape
    tile_rows, tile_columns = -(-rows // tile.rows), -(-columns // tile.columns)
    tiles = count * tile_rows * tile_columns
    # Tall: the summed dimension is the last of both operands.
    b_box = [1, tile.columns, tile.step] if tall else [1, tile.step, tile.columns]
    run(
        _product_kernel, (min(tiles, multiprocessors(out.device)),),
        boxes(x if tall else q, [1, tile.rows, tile.step]),
        boxes(q if tall else x, b_box),
        boxes(out, [1, tile.rows, tile.rows]),
        scales if scales is not None else out,
        q.shape[1], tiles, tile_rows, tile_columns, alpha,
        rows=tile.rows, columns=tile.columns, step=tile.step, band=BAND, transposed=tall,
        has_scales=scales is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
