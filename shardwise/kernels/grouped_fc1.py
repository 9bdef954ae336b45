# SPDX-License-Identifier: Apache-2.0
"""The first grouped product with bias, activation and router weight in its epilogue.

    z = x·W1ᵀ + b1        kept for backward, in the order of W1's rows
    h = act(z)·p          read by the second product

A tile of 256 columns of z holds 128 columns of gate and the matching 128 columns of up: from two
places of a stacked weight, or from 256 neighbouring rows of an interleaved one.

    stacked       W1 rows | gate 0..I-1          | up 0..I-1           |   box [2, 128, step]
    interleaved   W1 rows | g g u u g g u u g g u u ...                |   box [256, step]

As on the unfused path, the accumulator is rounded before the bias, and z before the activation.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from shardwise.kernels.grouped import (
    FC1_TILE,
    ActivationNumbers,
    GroupedTile,
    interpreted,
    max_blocks,
)
from shardwise.kernels.grouped_activation import act_forward, rounded
from shardwise.kernels.launch import boxes, multiprocessors, run


@triton.jit
def store_ragged(desc, start, size, row, column, value, rows: tl.constexpr, columns: tl.constexpr):
    """Store a tile of one expert's rows; the copy engine drops rows past the segment."""
    place = [0x40000000, start + size, 0x40000000 - size + row, column]
    desc.store(place, tl.reshape(value, (1, 1, rows, columns)))


@triton.jit
def first_row(ends_ptr, expert):
    return tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)


@triton.jit
def _schedule_kernel(
    ends_ptr, schedule_ptr, blocks_ptr, num_experts, tile_rows,
    experts: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Program e lists the blocks of expert e, after the blocks of earlier experts."""
    mine = tl.program_id(0)
    index = tl.arange(0, experts)
    ends = tl.load(ends_ptr + index, mask=index < num_experts, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index < num_experts), other=0)
    blocks = tl.where(index < num_experts, (ends - starts + tile_rows - 1) // tile_rows, 0)
    before = tl.sum(tl.where(index < mine, blocks, 0))
    count = tl.sum(tl.where(index == mine, blocks, 0))
    for first in range(0, count, chunk):
        block = first + tl.arange(0, chunk)
        tl.store(schedule_ptr + before + block, mine | (block << 16), mask=block < count)
    if mine == num_experts - 1:
        tl.store(blocks_ptr, before + count)


def schedule(ends: Tensor, num_rows: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """``expert | block << 16`` for every block of rows, and the number of blocks. The device
    computes both."""
    bound = max_blocks(num_rows, len(ends), tile_rows)
    blocks = torch.empty(bound, dtype=torch.int32, device=ends.device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=ends.device)
    run(
        _schedule_kernel, (len(ends),),
        ends, blocks, num_blocks, len(ends), tile_rows,
        experts=triton.next_power_of_2(len(ends)), chunk=128, num_warps=1,
    )  # fmt: skip
    return blocks, num_blocks


@triton.jit
def decode(schedule_ptr, tile, num_blocks, tile_columns, band):
    """The expert of a tile, its block of the expert's rows, and its block of columns."""
    per_band = band * tile_columns
    first = tile // per_band * band
    height = tl.minimum(num_blocks - first, band)
    inside = tile % per_band
    entry = tl.load(schedule_ptr + first + inside % height)
    return entry & 0xFFFF, entry >> 16, inside // height


@triton.jit
def halves(value, rows: tl.constexpr, columns: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(value, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def _gate_up(value, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr):
    """The gate and the up in a tile, whose columns have the order of the weight's rows."""
    if block == 0:
        gate, up = halves(value, rows, columns)
    else:
        pairs = tl.reshape(value, (rows, columns // (2 * block), 2, block))
        gate, up = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        gate = tl.reshape(gate, (rows, columns // 2))
        up = tl.reshape(up, (rows, columns // 2))
    return gate, up


@triton.jit
def _fc1_kernel(
    x_desc, w_desc, z_desc, h_desc, bias_ptr, p_ptr, ends_ptr, schedule_ptr, blocks_ptr,
    depth, width, tile_columns, band,
    gated: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    block: tl.constexpr, has_bias: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, flatten: tl.constexpr,
    assembly: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = columns // 2
    num_blocks = tl.load(blocks_ptr)
    tiles = num_blocks * tile_columns
    stride = tl.num_programs(0)
    z_width = width * 2 if gated else width
    # The epilogue computes the indices of its tile again: the loop is flattened, so the variables
    # of the loads already belong to the next tile.
    done = tl.program_id(0) - stride
    for tile in tl.range(tl.program_id(0), tiles, stride, flatten=flatten):
        expert, row_block, column = decode(schedule_ptr, tile, num_blocks, tile_columns, band)
        start = first_row(ends_ptr, expert)
        acc = tl.zeros((rows, columns), dtype=tl.float32)
        for k in range(tl.cdiv(depth, step)):
            x = x_desc.load([start + row_block * rows, k * step])
            if gated and block == 0:
                w = tl.reshape(w_desc.load([expert * 2, column * half, k * step]), (columns, step))
            else:
                w = w_desc.load([expert * z_width + column * columns, k * step])
            acc = tl.dot(x, w.T, acc, input_precision="ieee")

        done += stride
        expert, row_block, column = decode(schedule_ptr, done, num_blocks, tile_columns, band)
        start = first_row(ends_ptr, expert)
        size = tl.load(ends_ptr + expert) - start
        if gated and block == 0:
            first = column * half
            second = width + column * half
        else:
            first = column * columns
            second = column * columns + half
        z = rounded(acc, z_desc.dtype, assembly)
        if has_bias:
            at = tl.arange(0, columns)
            at = tl.where(at < half, first + at, second + at - half)
            bias = tl.load(bias_ptr + expert * z_width + at, mask=at < z_width, other=0.0)
            z = z.to(tl.float32) + bias.to(tl.float32)[None, :]
            z = rounded(z, z_desc.dtype, assembly)
        in_tile = row_block * rows + tl.arange(0, rows)
        p = tl.load(p_ptr + start + in_tile, mask=in_tile < size, other=0.0)
        left, right = halves(z, rows, columns)
        store_ragged(z_desc, start, size, row_block * rows, first, left, rows, half)
        store_ragged(z_desc, start, size, row_block * rows, second, right, rows, half)
        if gated:
            gate, up = _gate_up(z.to(tl.float32), rows, columns, block)
            h = act_forward(gate, up, gated, alpha, limit, offset, assembly) * p[:, None]
            h = h.to(h_desc.dtype)
            store_ragged(h_desc, start, size, row_block * rows, column * half, h, rows, half)
        else:
            h = left.to(tl.float32)
            h = act_forward(h, h, gated, alpha, limit, offset, assembly) * p[:, None]
            h = h.to(h_desc.dtype)
            store_ragged(h_desc, start, size, row_block * rows, first, h, rows, half)
            h = right.to(tl.float32)
            h = act_forward(h, h, gated, alpha, limit, offset, assembly) * p[:, None]
            h = h.to(h_desc.dtype)
            store_ragged(h_desc, start, size, row_block * rows, second, h, rows, half)


def fc1(
    x: Tensor,  # [rows, depth], sorted by expert
    weight: Tensor,  # [experts, width or 2·width, depth], contiguous
    bias: Tensor | None,  # [experts, width or 2·width]
    p: Tensor,  # [rows] fp32
    ends: Tensor,  # [experts] int32
    *,
    tile: GroupedTile = FC1_TILE,
    **act: Unpack[ActivationNumbers],
) -> tuple[Tensor, Tensor]:
    """z [rows, columns of the weight] and h [rows, width]."""
    experts, z_width, depth = weight.shape
    gated, block, num_rows = act["gated"], act["block"], len(x)
    width = z_width // 2 if gated else z_width
    z = torch.empty(num_rows, z_width, dtype=x.dtype, device=x.device)
    h = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return z, h
    half = tile.columns // 2
    if gated and block == 0:
        w_desc = boxes(weight.view(2 * experts, width, depth), [2, half, tile.step])
    else:
        w_desc = boxes(weight.view(experts * z_width, depth), [tile.columns, tile.step])
    blocks, num_blocks = schedule(ends, num_rows, tile.rows)
    tile_columns = -(-z_width // tile.columns)
    programs = multiprocessors(x.device)
    run(
        _fc1_kernel, (programs,),
        boxes(x, [tile.rows, tile.step]),
        w_desc,
        create_ragged_descriptor(z, [tile.rows, half]),
        create_ragged_descriptor(h, [tile.rows, half]),
        z if bias is None else bias,
        p, ends, blocks, num_blocks, depth, width, tile_columns, tile.band,
        **act, has_bias=bias is not None, rows=tile.rows, columns=tile.columns, step=tile.step,
        flatten=tile.flatten, assembly=not interpreted(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return z, h
