# SPDX-License-Identifier: Apache-2.0
"""Grouped products of fp8 codes on Hopper, summed by its tensor cores (about 14 bits).

::

    product    y[rows of e]  =  (x · W[e]ᵀ) · scale of the row · scale of the expert
    gradient   dW[e]       (+)= (A[:, rows of e] · B[:, rows of e]ᵀ) · scale of the expert
                                 of turned codes: see ``grouped_codes.py``
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from shardwise.kernels.grouped import GroupedTile
from shardwise.kernels.grouped_activation import rounded
from shardwise.kernels.grouped_codes import Folded
from shardwise.kernels.grouped_fc1 import decode, first_row, halves, schedule, store_ragged
from shardwise.kernels.grouped_weight import put
from shardwise.kernels.launch import boxes, run
from shardwise.kernels.symmetric import multiprocessors

# Measured on an H200 (torch 2.11, Triton 3.6): products of these three shapes reach 1113 to 1480
# TFLOP/s, torch's scaled grouped product 823 to 1357; of 12 forms of dW this one took least.
PRODUCT_TILE = GroupedTile(rows=128, columns=256, step=128, warps=8, stages=4, band=16)
WEIGHT_TILE = GroupedTile(rows=128, columns=256, step=128, warps=8, stages=3, flatten=False)


@triton.jit
def _product_kernel(
    x_desc, w_desc, y_desc, scales_ptr, w_scales_ptr, ends_ptr, schedule_ptr, blocks_ptr,
    depth, width, tile_columns, band,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, flatten: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.load(blocks_ptr)
    stride = tl.num_programs(0)
    done = tl.program_id(0) - stride  # as in ``grouped_fc1.py``: the loop is flattened
    for tile in tl.range(tl.program_id(0), num_blocks * tile_columns, stride, flatten=flatten):
        expert, row_block, column = decode(schedule_ptr, tile, num_blocks, tile_columns, band)
        start = first_row(ends_ptr, expert)
        acc = tl.zeros((rows, columns), dtype=tl.float32)
        for k in range(tl.cdiv(depth, step)):
            x = x_desc.load([start + row_block * rows, k * step])
            w = w_desc.load([expert * width + column * columns, k * step])
            acc = tl.dot(x, w.T, acc)

        done += stride
        expert, row_block, column = decode(schedule_ptr, done, num_blocks, tile_columns, band)
        start = first_row(ends_ptr, expert)
        size = tl.load(ends_ptr + expert) - start
        in_tile = row_block * rows + tl.arange(0, rows)
        scale = tl.load(scales_ptr + start + in_tile, mask=in_tile < size, other=0.0)
        scale *= tl.load(w_scales_ptr + expert)
        left, right = halves(rounded(acc * scale[:, None], tl.bfloat16, True), rows, columns)
        half: tl.constexpr = columns // 2
        store_ragged(y_desc, start, size, row_block * rows, column * columns, left, rows, half)
        second = column * columns + half
        store_ragged(y_desc, start, size, row_block * rows, second, right, rows, half)


def product(
    codes: Tensor,  # uint8 [rows, depth], sorted by expert
    scales: Tensor,  # fp32 [rows]
    weight: Tensor,  # uint8 [experts, width, depth]; width a multiple of 128
    weight_scales: Tensor,  # fp32 [experts]
    ends: Tensor,  # [experts] int32
    *,
    tile: GroupedTile = PRODUCT_TILE,
) -> Tensor:
    """``x·Wᵀ`` [rows, width] in bf16."""
    experts, width, depth = weight.shape
    num_rows = len(codes)
    y = torch.empty(num_rows, width, dtype=torch.bfloat16, device=codes.device)
    if not num_rows:
        return y
    blocks, num_blocks = schedule(ends, num_rows, tile.rows)
    flat = weight.view(torch.float8_e4m3fn).view(experts * width, depth)
    run(
        _product_kernel, (multiprocessors(codes.device),),
        boxes(codes.view(torch.float8_e4m3fn), [tile.rows, tile.step]),
        boxes(flat, [tile.columns, tile.step]),
        create_ragged_descriptor(y, [tile.rows, tile.columns // 2]),
        scales, weight_scales, ends, blocks, num_blocks,
        depth, width, -(-width // tile.columns), tile.band,
        rows=tile.rows, columns=tile.columns, step=tile.step, flatten=tile.flatten,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@triton.jit
def _weight_kernel(
    a_desc, b_desc, out_desc, first_ptr, scales_ptr, num_experts, tile_rows, tile_columns,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = columns // 2
    per_expert = tile_rows * tile_columns
    for tile in range(tl.program_id(0), per_expert * num_experts, tl.num_programs(0)):
        expert = tile // per_expert
        row = tile % per_expert // tile_columns * rows
        column = tile % tile_columns * columns
        begin = tl.load(first_ptr + expert)
        end = tl.load(first_ptr + expert + 1)
        acc = tl.zeros((rows, columns), dtype=tl.float32)
        for k in range(begin * (128 // step), end * (128 // step)):
            a = a_desc.load([row, k * step])
            b = b_desc.load([column, k * step])
            acc = tl.dot(a, b.T, acc)
        acc *= tl.load(scales_ptr + expert)
        left, right = halves(acc, rows, columns)
        put(out_desc, expert, row, column, left, rows, half, add)
        put(out_desc, expert, row, column + half, right, rows, half, add)


def weight_gradient(
    folded: Folded,
    out: Tensor,  # [experts, M, N]; experts at any even distance; fp32 where it is added to
    *,
    add: bool,
    tile: GroupedTile = WEIGHT_TILE,
) -> None:
    """Write ``aᵀ·b`` of each expert's rows to ``out``, or add it."""
    experts, num_rows, num_columns = out.shape
    assert out.dtype == torch.float32 or not add, "sums are kept in fp32"
    tile_rows, tile_columns = -(-num_rows // tile.rows), -(-num_columns // tile.columns)
    programs = min(multiprocessors(out.device), experts * tile_rows * tile_columns)
    left, right = (each.view(torch.float8_e4m3fn) for each in (folded.left, folded.right))
    run(
        _weight_kernel, (programs,),
        boxes(left, [tile.rows, tile.step]),
        boxes(right, [tile.columns, tile.step]),
        boxes(out, [1, tile.rows, tile.columns // 2]),
        folded.first, folded.scales, experts, tile_rows, tile_columns,
        rows=tile.rows, columns=tile.columns, step=tile.step, add=add,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
