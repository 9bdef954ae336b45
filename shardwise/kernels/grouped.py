# SPDX-License-Identifier: Apache-2.0
"""Grouped products of experts: tiles, their order, and the conditions of the kernels.

Rows are sorted by expert, and the rows of expert ``e`` end at ``ends[e]``. A segment starts at any
row, so a tile of one expert may reach into the rows of the next expert:

    rows      | expert 0 ......... | expert 2 .. | expert 3 .................. |   (1 has none)
    tiles     |  0   |  1   |  2 ~~|  3   ~~~~~~~|  4   |  5   |  6   |  7 ~~~|
                            '- loads continue into the next expert, stores end with the segment

The device computes the tiles of each expert. The number of rows alone bounds the number of tiles,
so the host never waits for the counts.

This file is plain torch; the ``grouped_*`` files contain the kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from shardwise.kernels import has_triton


@dataclass(frozen=True, kw_only=True)
class GroupedTile:
    """The static configuration of one kernel."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    flatten: bool = True
    band: int = 8  # blocks of rows that are computed together, to share weights in L2

    @property
    def narrow(self) -> GroupedTile:
        """A tile of twice the rows and half the columns."""
        return replace(self, rows=2 * self.rows, columns=self.columns // 2, band=self.band // 2)


# Measured on an H200 (torch 2.11, Triton 3.6). Shared memory holds the stages and the half tile
# that is being stored: 4 stages leave enough for a 16-bit half, 3 stages for an fp32 half. With
# FC1_TILE the fused first product was faster than torch's product and a separate activation in all
# of 20 cases (2048 to 7168 columns, 64 to 4096 rows per expert, even or not): whole forwards were
# 1.01 to 1.24 times as fast. For 64 experts of 1024 to 448 and 196608 rows, its narrow tile takes
# 0.87 of their time: 648 us.
FC1_TILE = GroupedTile(rows=128, columns=256, step=64, warps=8, stages=4, band=16)
WEIGHT_TILE = GroupedTile(rows=128, columns=256, step=64, warps=8, stages=3, flatten=False)
WEIGHT_TILE_16 = GroupedTile(rows=128, columns=256, step=64, warps=8, stages=4, flatten=False)
# For the interpreter, where every tile takes the same time: small problems have several tiles.
SMALL_FC1_TILE = GroupedTile(rows=16, columns=32, step=16, warps=4, stages=2)
SMALL_WEIGHT_TILE = GroupedTile(rows=16, columns=32, step=16, warps=4, stages=2, flatten=False)


class ActivationNumbers(TypedDict):
    """The arguments of the kernels that compute an activation: see ``moe/activation.py``."""

    gated: bool
    alpha: float
    limit: float | None
    offset: float
    block: int  # rows after which gate and up alternate; 0: first all of gate, then all of up


def max_blocks(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """The largest possible number of blocks of rows, for any spread of rows over experts."""
    return -(-num_rows // tile_rows) + num_experts


@functools.cache
def interpreted() -> bool:
    """Whether Triton runs its interpreter, which takes CPU tensors."""
    if not has_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device: in bf16 on Hopper or newer, or, for tests, in other
    dtypes in Triton's interpreter."""
    if interpreted():
        return dtype != torch.bfloat16
    if device.type != "cuda" or dtype != torch.bfloat16 or not has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def fc1_tile(width: int, block: int, gated: bool, tile: GroupedTile) -> GroupedTile | None:
    """The tile of the fused first product for this width and order of gate and up, or None."""
    for candidate in (tile, tile.narrow):
        half = candidate.columns // 2
        order = block == 0 or (block >= 8 and half % block == 0 and block & (block - 1) == 0)
        if width % half == 0 and (order or not gated):
            return candidate
    return None
