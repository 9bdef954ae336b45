# SPDX-License-Identifier: Apache-2.0
"""Gradients of expert weights and biases, summed in fp32 in the memory that accumulates them.

    dW[e] (+)= A[rows of e]ᵀ · B[rows of e]          one writer for each tile of dW, rows in order
    db[e]   =  sum over the rows of e of  p · A

An expert without rows gets zeros, or keeps its values if the gradient is added: its tiles are
computed like all others. Both operands are loaded as zeros past their segment, because zero times
the values there could be NaN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from shardwise.kernels.grouped import WEIGHT_TILE, WEIGHT_TILE_16, GroupedTile
from shardwise.kernels.grouped_fc1 import first_row, halves
from shardwise.kernels.launch import boxes, multiprocessors, run


@triton.jit
def _load_ragged(desc, start, size, row, column, rows: tl.constexpr, columns: tl.constexpr):
    place = [0x40000000, start + size, 0x40000000 - size + row, column]
    return tl.reshape(desc.load(place), (rows, columns))


@triton.jit
def put(
    desc, expert, row, column, value, rows: tl.constexpr, wide: tl.constexpr, add: tl.constexpr
):
    value = tl.reshape(value, (1, rows, wide))
    if add:  # a tile has one writer; additions by the copy engine took 7 to 25 % longer
        value += desc.load([expert, row, column])
    desc.store([expert, row, column], value.to(desc.dtype))


@triton.jit
def _weight_kernel(
    a_desc, b_desc, out_desc, ends_ptr, num_experts, tile_rows, tile_columns,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = columns // 2
    per_expert = tile_rows * tile_columns
    for tile in range(tl.program_id(0), per_expert * num_experts, tl.num_programs(0)):
        expert = tile // per_expert
        row = tile % per_expert // tile_columns * rows
        column = tile % tile_columns * columns
        start = first_row(ends_ptr, expert)
        size = tl.load(ends_ptr + expert) - start
        acc = tl.zeros((rows, columns), dtype=tl.float32)
        for k in range(tl.cdiv(size, step)):
            a = _load_ragged(a_desc, start, size, k * step, row, step, rows)
            b = _load_ragged(b_desc, start, size, k * step, column, step, columns)
            acc = tl.dot(a.T, b, acc, input_precision="ieee")
        left, right = halves(acc, rows, columns)
        put(out_desc, expert, row, column, left, rows, half, add)
        put(out_desc, expert, row, column + half, right, rows, half, add)


def weight_gradient(
    a: Tensor,  # [rows, M], the gradient of the product
    b: Tensor,  # [rows, N], its input
    ends: Tensor,  # [experts] int32
    out: Tensor,  # [experts, M, N]; experts at equal distances; fp32 if ``add``
    *,
    add: bool,
    tile: GroupedTile | None = None,
) -> None:
    """Write ``aᵀ·b`` of each expert's rows to ``out``, or add it."""
    experts, num_rows, num_columns = out.shape
    assert out.dtype == torch.float32 or not add, "sums are kept in fp32"
    tile = tile or (WEIGHT_TILE if out.element_size() == 4 else WEIGHT_TILE_16)
    if len(a) == 0:
        if not add:
            out.zero_()
        return
    tile_rows, tile_columns = -(-num_rows // tile.rows), -(-num_columns // tile.columns)
    programs = min(multiprocessors(a.device), experts * tile_rows * tile_columns)
    run(
        _weight_kernel, (programs,),
        create_ragged_descriptor(a, [tile.step, tile.rows]),
        create_ragged_descriptor(b, [tile.step, tile.columns]),
        boxes(out, [1, tile.rows, tile.columns // 2]),
        ends, experts, tile_rows, tile_columns,
        rows=tile.rows, columns=tile.columns, step=tile.step, add=add,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _bias_kernel(
    a_ptr, p_ptr, out_ptr, ends_ptr, width,
    rows: tl.constexpr, columns: tl.constexpr, has_p: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    begin = first_row(ends_ptr, expert)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros((columns,), dtype=tl.float32)
    for first in range(begin, end, rows):
        row = first + tl.arange(0, rows)
        inside = (row < end)[:, None] & (column < width)[None, :]
        at = a_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if has_p:
            a *= tl.load(p_ptr + row, mask=row < end, other=0.0)[:, None]
        total += tl.sum(a, 0)
    tl.store(out_ptr + expert * width + column, total, mask=column < width)


def bias_gradient(a: Tensor, ends: Tensor, p: Tensor | None = None) -> Tensor:
    """[experts, columns] fp32: the sum of each expert's rows, weighted by p [rows]."""
    width = a.shape[1]
    out = torch.empty(len(ends), width, dtype=torch.float32, device=a.device)
    run(
        _bias_kernel, (len(ends), triton.cdiv(width, 64)),
        a, a if p is None else p, out, ends, width,
        rows=64, columns=64, has_p=p is not None, num_warps=4,
    )  # fmt: skip
    return out
