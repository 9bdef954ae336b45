# SPDX-License-Identifier: Apache-2.0
"""Sums of rows that are gathered from anywhere: the results of a token's experts.

    places [tokens, k]     which rows belong to a token; len(rows): none
    sums   [tokens, C]     rows[places[t, 0]] + ... + rows[places[t, k - 1]], added in this order

Every row is read once and every sum written once, in fp32 between. torch would place the rows by
token first and then sum them: three times the traffic.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import run

BLOCK = 1024  # columns a program sums at a time


def reference(rows: Tensor, places: Tensor) -> Tensor:
    """The sums by definition."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).float()
    return padded[places].sum(1).to(rows.dtype)


@triton.jit
def _sum_kernel(
    rows_ptr, places_ptr, sums_ptr, num_rows, columns, choices: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    total = tl.zeros((block,), dtype=tl.float32)
    for choice in tl.static_range(choices):
        place = tl.load(places_ptr + token * choices + choice)
        mask = column < tl.where(place < num_rows, columns, 0)
        total += tl.load(rows_ptr + place * columns + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(sums_ptr + token * columns + column, total.to(sums_ptr.dtype.element_ty), mask=inside)


def row_sums(rows: Tensor, places: Tensor) -> Tensor:
    """The sums [tokens, C] of ``rows`` [n, C] at ``places`` [tokens, k] int64."""
    rows, (tokens, choices), columns = rows.contiguous(), places.shape, rows.shape[1]
    sums = rows.new_empty(tokens, columns)
    if sums.numel():
        block = min(BLOCK, triton.next_power_of_2(columns))
        run(
            _sum_kernel,
            (tokens, -(-columns // block)),
            rows,
            places,
            sums,
            len(rows),
            columns,
            choices=choices,
            block=block,
            num_warps=4,
        )
    return sums
