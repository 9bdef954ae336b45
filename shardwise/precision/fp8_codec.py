# SPDX-License-Identifier: Apache-2.0
"""``FP8``: the codec of weights that are stored and sent as fp8 codes and scales.

    If blocks of rows (32 in MXFP8, or 128) stay together, each rank encodes its own shard:

    shard 0  main |w rows 0-63  |   --encode-->  codes |w 0-63  |  scales |w|   --all-gather-->
    shard 1  main |w rows 64-127|   --encode-->  codes |w 64-127|  scales |w|       1.03 bytes

    If shards cut blocks, or two planes are needed at once (2.06 bytes, and bf16 takes 2):

    shard 0  main |w rows 0-40  |   --cast-->  bf16 |w 0-40  |   --all-gather-->  encode everywhere
    shard 1  main |w rows 41-127|   --cast-->  bf16 |w 41-127|

Either way the codes are those of main rounded to bf16, on every rank.

Codes lie where main has their elements. A rank sends the scales of the codes that it sends: then
the scale of a code is number address / share. ``share`` is the number of elements of a block, or
less if blocks are partial: a row of blocks then has more places for scales than it needs.

Only shapes and layouts decide; no tensor is read. So all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.layout import Layout
from shardwise.precision.fp8 import (
    BLOCKS,
    COLUMN,
    ROW,
    SCALES,
    SQUARE_128,
    Block,
    Format,
    Plane,
    encode,
    scale_shape,
    side_of,
    uses_kernels,
)
from shardwise.precision.fp8_weight import Coded, Products

_LEAST_SHARE = 256  # addresses for each scale: with fewer, scales take more than 1/64 of the bytes
_APART = 16  # scales of a parameter begin at a multiple of this


class Place(NamedTuple):
    """The places of the scales of a parameter."""

    start: int
    step: int  # from a row of scales to the next


class FP8:
    """Codes and scales of one plane, or for ``products="native"`` of a row and a column plane."""

    dtype = torch.bfloat16  # as modules see it

    def __init__(self, format: Format, products: Products) -> None:
        self.format, self.products = format, products
        native = products == "native"
        self.blocks: tuple[Block, ...] = (ROW, COLUMN) if native else (BLOCKS[format],)
        self._tiles: dict[tuple[int, torch.device], object] = {}  # as the kernel takes them

    def is_plain(self, dtype: torch.dtype) -> bool:
        return False

    def staged_because(self, layout: Layout) -> str:
        """The reason why bf16 is gathered and encoded by every rank; "" if codes are gathered."""
        return _staged_because(layout, self.blocks)

    def room(self, layout: Layout) -> list[tuple[torch.dtype, int]]:
        """A buffer of codes and a buffer of scales for each plane."""
        room = []
        for block, (_, length) in zip(self.blocks, self._places(layout), strict=True):
            room += [(torch.uint8, layout.shard_size), (SCALES[block], length)]
        return room

    def _places(self, layout: Layout) -> list[tuple[tuple[Place, ...], int]]:
        """By plane: the places of all scales, and their number for each shard."""
        direct = not self.staged_because(layout)
        return [_places(layout, block, direct) for block in self.blocks]

    # ------------------------------------------------------------------ encode and view

    def encode(self, main: Tensor, outs: Sequence[Tensor], layout: Layout, first: int) -> None:
        """Encode the shards from ``first`` on, of main or of bf16, into the same shards of each
        buffer. Where a kernel can, it encodes all weights in one launch."""
        count = main.numel() // layout.shard_size
        pieces = [
            (index, low, high, offset)
            for index, (low, high, offset, *_) in enumerate(layout.pieces(first, count))
            if high > low
        ]
        kernel = self.blocks == (SQUARE_128,) and main.device == outs[0].device
        if kernel and uses_kernels(main.device) and main.dtype in (torch.bfloat16, torch.float32):
            self._encode_together(main, outs, layout, first, pieces)
            return
        places = self._places(layout)
        for index, low, high, offset in pieces:
            item = layout.items[index]
            columns = item.shape[-1]
            values = main[offset : offset + high - low].view(-1, columns)
            if values.device != outs[0].device:  # offloaded: cast first, to copy half the bytes
                values = values.to(torch.bfloat16).to(outs[0].device)
            planes = []
            for number, block in enumerate(self.blocks):
                of_items, length = places[number]
                start, step = of_items[index]
                start += low // columns // block[0] * step - first * length
                codes = outs[2 * number][offset : offset + high - low].view(-1, columns)
                scales = outs[2 * number + 1].as_strided(
                    scale_shape(codes.shape, block), (step, 1), _at(outs[2 * number + 1], start)
                )
                planes.append(Plane(codes=codes, scales=scales, block=block))
            encode(values, self.blocks, out=planes)

    def _encode_together(
        self,
        main: Tensor,
        outs: Sequence[Tensor],
        layout: Layout,
        first: int,
        pieces: Sequence[tuple[int, int, int, int]],
    ) -> None:
        from shardwise.kernels import fp8_codes as kernels

        tiles = self._tiles.get((first, main.device))
        if tiles is None:
            (places, length), matrices = self._places(layout)[0], []
            for index, low, high, offset in pieces:
                item, (start, step) = layout.items[index], places[index]
                columns = item.shape[-1]
                start += low // columns // SQUARE_128[0] * step - first * length
                count = (high - low) // columns
                matrices.append(kernels.Matrix(count, columns, offset, offset, start, step))
            if not matrices:
                return
            tiles = self._tiles[first, main.device] = kernels.list_tiles(matrices, main.device)
        kernels.encode(main, outs[0], outs[1], tiles=tiles)  # type: ignore[arg-type]

    def view(self, buffers: Sequence[Tensor], layout: Layout, index: int) -> Coded:
        item, start = layout.items[index], layout.starts[index]
        shape = item.numel // item.shape[-1], item.shape[-1]
        planes = []
        for number, block in enumerate(self.blocks):
            codes, scales = buffers[2 * number : 2 * number + 2]
            place = self._places(layout)[number][0][index]
            # ``data`` has a version counter of its own, which a gather does not move.
            planes.append(
                (
                    codes.as_strided(shape, (shape[1], 1), start).data,
                    scales.as_strided(scale_shape(shape, block), (place.step, 1), place.start).data,
                )
            )
        return Coded.of(item.shape, planes[0], planes[1] if planes[1:] else None, self.products)


def _at(buffer: Tensor, start: int) -> int:
    """The offset in the storage of a place in a part of a buffer."""
    return int(buffer.storage_offset()) + start


# ------------------------------------------------------------------------------ places of scales


@lru_cache(maxsize=256)
def _staged_because(layout: Layout, blocks: tuple[Block, ...]) -> str:
    if layout.num_shards == 1:
        return ""
    if len(blocks) > 1:
        return "two planes have more bytes"
    cut = "a rank's shard cuts a block"
    if not share_of(layout, blocks[0]):
        return cut
    for index, item in enumerate(layout.items):
        together = side_of(blocks) * item.shape[-1]
        if any(layout.piece(index, shard)[0] % together for shard in layout.holders(index)):
            return cut
    return ""


@lru_cache(maxsize=256)
def _places(layout: Layout, block: Block, direct: bool) -> tuple[tuple[Place, ...], int]:
    """(the place of the scales of each parameter, the number of scales for each shard). ``direct``:
    scales are sent, so each lies in the shard of its codes."""
    shapes = [(item.numel // item.shape[-1], item.shape[-1]) for item in layout.items]
    share = share_of(layout, block) if direct else 0
    if share:
        places = [
            Place(start // share, block[0] * shape[1] // share)
            for start, shape in zip(layout.starts, shapes, strict=True)
        ]
        return tuple(places), -(-layout.shard_size // share)
    places, end = [], 0
    for shape in shapes:  # one after another
        bands, strips = scale_shape(shape, block)
        places.append(Place(end, strips))
        end += -(-bands * strips // _APART) * _APART
    return tuple(places), -(-end // layout.num_shards)


@lru_cache(maxsize=256)
def share_of(layout: Layout, block: Block) -> int:
    """The number of addresses for each scale: the largest for which the scales of each row of
    blocks have separate places, in the shard of their codes. 0: there is no such number."""
    share = math.prod(block)
    partial = any(size % side_of([block]) for item in layout.items for size in item.shape[-2:])
    least = _LEAST_SHARE if partial else share
    while share >= least:
        if _has_places(layout, block, share):
            return share
        share //= 2
    return 0


def _has_places(layout: Layout, block: Block, share: int) -> bool:
    """Whether scales have separate places, in the shard of their codes, with this share."""
    step = share * max(block) // min(block)  # parameters and shards begin at whole squares
    if layout.num_shards > 1 and layout.shard_size % step:
        return False
    next_scale = -(-layout.numel // share)  # the first scale of the parameter behind
    for start, item in sorted(zip(layout.starts, layout.items, strict=True), reverse=True):
        columns = item.shape[-1]
        bands, strips = scale_shape((item.numel // columns, columns), block)
        last_band = start + (bands - 1) * block[0] * columns  # address of the last row of blocks
        shard_end = (last_band // layout.shard_size + 1) * layout.shard_size
        end = min(next_scale, -(-shard_end // share))
        if start % step or block[0] * columns % share or last_band // share + strips > end:
            return False
        next_scale = start // share
    return True
