# SPDX-License-Identifier: Apache-2.0
"""Grouped products of fp8 codes on Hopper, whose tensor cores sum with about 14 bits.

::

    product    y[rows of e]  =  (x · W[e]ᵀ) · scale of the row · scale of the expert
    gradient   dW[e]       (+)= (A[:, rows of e] · B[:, rows of e]ᵀ) · scale of the expert
                                 A and B are turned codes: see ``grouped_codes.py``
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.ragged_tma import create_ragged_descriptor

from shardwise.kernels.grouped import GroupedTile
from shardwise.kernels.grouped_activation import rounded
from shardwise.kernels.grouped_codes import Folded
from shardwise.kernels.grouped_fc1 import decode, first_row, halves, schedule, store_ragged
from shardwise.kernels.launch import boxes, run
from shardwise.kernels.symmetric import multiprocessors

# Measured on an H200 (torch 2.11, Triton 3.6): products of these three shapes reach 1113 to 1480
# TFLOP/s, torch's scaled grouped product 823 to 1357.
PRODUCT_TILE = GroupedTile(rows=128, columns=256, step=128, warps=8, stages=4, band=16)
# Triton 3.9 has other names than 3.6 for copies of boxes, and for the barrier of a role's warps.
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_meet = getattr(gl, "barrier", None) or gl.thread_barrier


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


# dW: warps have different roles, because loading and storing the sums takes as long as the
# products. Two groups of warps alternate: one multiplies while the other adds.
#
#     operands   4 warps           turned codes of a tile of 128x128  -> 4 stages
#     products   4 warps, twice    stages -> acc;  acc + room -> room, part by part
#     sums       one warp          parts of 128x32 of dW  -> 5 rooms (buffers) -> dW
#
# On an H200, one group of 8 warps with tiles of 128x256 took 1.01 to 1.26 of the time with 1024
# rows for each expert, and 0.94 and 1.04 with 4096; 3 stages and more rooms took 0.95 to 1.23. All
# gave the same bits.


@gluon.jit
def _place(number, parts: gl.constexpr, tile_rows, tile_columns):
    """The expert, the row and the column of part ``number`` of this program's tiles."""
    tile = gl.program_id(0) + number // parts * gl.num_programs(0)
    expert = tile // (tile_rows * tile_columns)
    column = tile % tile_columns * 128 + number % parts * (128 // parts)
    return expert, tile // tile_columns % tile_rows * 128, column


@gluon.jit
def _load_operands(
    a_desc, b_desc, first_ptr, a_bufs, b_bufs, full, empty, tiles, tile_rows, tile_columns,
    stages: gl.constexpr,
):  # fmt: skip
    count = 0
    for number in range(tiles):
        expert, row, column = _place(number, 1, tile_rows, tile_columns)
        for k in range(gl.load(first_ptr + expert), gl.load(first_ptr + expert + 1)):
            stage = count % stages
            mbarrier.wait(empty.index(stage), (count // stages & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, 256 * 128)
            _load_box(a_desc, [row, k * 128], ready, a_bufs.index(stage))
            _load_box(b_desc, [column, k * 128], ready, b_bufs.index(stage))
            count += 1


@gluon.jit
def _bring(
    out_desc, rooms, full, number, total, tile_rows, tile_columns, parts: gl.constexpr,
    count: gl.constexpr, add: gl.constexpr,
):  # fmt: skip
    if number < total:
        ready = full.index(number % count)
        if add:
            expert, row, column = _place(number, parts, tile_rows, tile_columns)
            mbarrier.expect(ready, 128 * (128 // parts) * 4)
            _load_box(out_desc, [expert, row, column], ready, rooms.index(number % count))
        else:
            mbarrier.arrive(ready, count=1)


@gluon.jit
def _move_sums(
    out_desc, rooms, full, done, tiles, tile_rows, tile_columns, parts: gl.constexpr,
    count: gl.constexpr, add: gl.constexpr,
):  # fmt: skip
    total = tiles * parts
    for number in range(count):
        _bring(out_desc, rooms, full, number, total, tile_rows, tile_columns, parts, count, add)
    for number in range(total):
        expert, row, column = _place(number, parts, tile_rows, tile_columns)
        mbarrier.wait(done.index(number % count), number // count & 1)
        _store_box(out_desc, [expert, row, column], rooms.index(number % count))
        tma.store_wait(pendings=0)  # the store has read the room
        _bring(
            out_desc, rooms, full, number + count, total, tile_rows, tile_columns, parts, count, add
        )


@gluon.jit
def _put(
    value, rooms, full, done, number, parts: gl.constexpr, count: gl.constexpr, add: gl.constexpr
):  # fmt: skip
    """Write a tile to its rooms, part by part; returns the number of the next part."""
    if value.shape[1] > 128 // parts:
        halves = value.reshape([128, 2, value.shape[1] // 2]).permute(0, 2, 1)
        left, right = halves.split()
        number = _put(left, rooms, full, done, number, parts, count, add)
        number = _put(right, rooms, full, done, number, parts, count, add)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 // parts, 32])
        value = gl.convert_layout(value, layout)
        mbarrier.wait(full.index(number % count), number // count & 1)
        room = rooms.index(number % count).reshape([128, 128 // parts])
        if add:
            value += room.load(layout)
        room.store(value.to(room.dtype))
        fence_async_shared()
        mbarrier.arrive(done.index(number % count), count=1)
        number += 1
    return number


@gluon.jit
def _multiply(
    first_ptr, scales_ptr, a_bufs, b_bufs, full, empty, rooms, sums_full, sums_done, multiplied,
    added, tiles, tile_rows, tile_columns, group: gl.constexpr, stages: gl.constexpr,
    parts: gl.constexpr, num_rooms: gl.constexpr, add: gl.constexpr,
):  # fmt: skip
    """Multiply every second tile. A group waits for the end of the other group's turn before it
    waits for a stage or a room, because a barrier can distinguish only two consecutive phases."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    start = 0  # steps before the tile
    for number in range(tiles):
        expert, _row, _column = _place(number, 1, tile_rows, tile_columns)
        begin = gl.load(first_ptr + expert)
        end = gl.load(first_ptr + expert + 1)
        if number % 2 == group:
            acc = gl.zeros((128, 128), gl.float32, layout)
            turn = (number // 2 & 1) ^ (1 - group)
            mbarrier.wait(multiplied.index(group), turn)
            for k in range(begin, end):
                count = start + k - begin
                mbarrier.wait(full.index(count % stages), count // stages & 1)
                right = b_bufs.index(count % stages).permute((1, 0))
                acc = warpgroup_mma(a_bufs.index(count % stages), right, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                # The product before this one has read its stage.
                mbarrier.arrive(empty.index((count + stages - 1) % stages), pred=k > begin)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((start + end - begin - 1) % stages), pred=end > begin)
            _meet()
            mbarrier.arrive(multiplied.index(1 - group))
            acc *= gl.load(scales_ptr + expert)
            mbarrier.wait(added.index(group), turn)
            _put(acc, rooms, sums_full, sums_done, number * parts, parts, num_rooms, add)
            _meet()
            mbarrier.arrive(added.index(1 - group))
        start += end - begin


@gluon.jit
def _barriers(count: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(count):
        mbarrier.init(made.index(index), count=1)
    return made


@gluon.jit
def _weight_kernel(
    a_desc, b_desc, out_desc, first_ptr, scales_ptr, num_tiles, tile_rows, tile_columns,
    stages: gl.constexpr, parts: gl.constexpr, num_rooms: gl.constexpr, add: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [stages, 128, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [stages, 128, 128], b_desc.layout)
    room: gl.constexpr = [num_rooms, 1, 128, 128 // parts]
    rooms = gl.allocate_shared_memory(out_desc.dtype, room, out_desc.layout)
    full, empty, multiplied = _barriers(stages), _barriers(stages), _barriers(2)
    sums_full, sums_done, added = _barriers(num_rooms), _barriers(num_rooms), _barriers(2)
    fence_async_shared()
    tiles = gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))  # of this program
    gl.warp_specialize(
        [
            (_load_operands, (
                a_desc, b_desc, first_ptr, a_bufs, b_bufs, full, empty, tiles, tile_rows,
                tile_columns, stages,
            )),
            (_multiply, (
                first_ptr, scales_ptr, a_bufs, b_bufs, full, empty, rooms, sums_full, sums_done,
                multiplied, added, tiles, tile_rows, tile_columns, 0, stages, parts, num_rooms, add,
            )),
            (_multiply, (
                first_ptr, scales_ptr, a_bufs, b_bufs, full, empty, rooms, sums_full, sums_done,
                multiplied, added, tiles, tile_rows, tile_columns, 1, stages, parts, num_rooms, add,
            )),
            (_move_sums, (
                out_desc, rooms, sums_full, sums_done, tiles, tile_rows, tile_columns, parts,
                num_rooms, add,
            )),
        ],
        [4, 4, 1],
        [208, 208, 40],
    )  # fmt: skip


def weight_gradient(
    folded: Folded,
    out: Tensor,  # [experts, M, N]; experts at equal distances; fp32 if ``add``
    *,
    add: bool,
) -> None:
    """Write ``aᵀ·b`` of each expert's rows to ``out``, or add it."""
    experts, num_rows, num_columns = out.shape
    assert out.dtype == torch.float32 or not add, "sums are kept in fp32"
    tile_rows, tile_columns = -(-num_rows // 128), -(-num_columns // 128)
    tiles = experts * tile_rows * tile_columns
    run(
        _weight_kernel, (min(multiprocessors(out.device), tiles),),
        _box(folded.left.view(torch.float8_e4m3fn), [128, 128]),
        _box(folded.right.view(torch.float8_e4m3fn), [128, 128]),
        _box(out, [1, 128, 128 // out.element_size()]),
        folded.first, folded.scales, tiles, tile_rows, tile_columns,
        **weight_constants(out.element_size(), add), num_warps=4,
    )  # fmt: skip


def weight_constants(element_size: int, add: bool) -> dict[str, Any]:
    """The constants of the kernel. A part is 128 bytes wide, the width at which the copy engine
    spreads lines over the banks of shared memory."""
    return {"stages": 4, "parts": element_size, "num_rooms": 5, "add": add}


def _box(tensor: Tensor, shape: list[int]) -> GluonDescriptor:
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), rank=len(shape))
    return GluonDescriptor(tensor, list(tensor.shape), list(tensor.stride()), shape, layout)
