# SPDX-License-Identifier: Apache-2.0
"""``FP8``: the codec of weights that are stored and sent as fp8 codes and scales.

    If blocks of rows (32 in MXFP8, or 128) stay together, each rank encodes its own shard:

    shard 0  main |w rows 0-63  |   --encode-->  codes |w 0-63  |  scales |w|   --all-gather-->
    shard 1  main |w rows 64-127|   --encode-->  codes |w 64-127|  scales |w|       1.03 bytes

    If shards cut blocks, or two planes are needed at once (2.06 bytes, and bf16 takes 2):

    shard 0  main |w rows 0-40  |   --cast-->  bf16 |w 0-40  |   --all-gather-->  encode everywhere
    shard 1  main |w rows 41-127|   --cast-->  bf16 |w 41-127|

Either way the codes are those of main rounded to bf16, on every rank.

Codes lie where main has their elements. A rank sends the scales of the codes that it sends: the
scale of a block is number address / elements of a block.

Only shapes and layouts decide; no tensor is read. So all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

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
    uses_kernels,
)
from shardwise.precision.fp8_weight import Coded, Products

_APART = 16  # scales of a parameter begin at a multiple of this


class FP8:
    """Codes and scales of one plane, or for ``products="native"`` of a row and a column plane."""

    dtype = torch.bfloat16  # as modules see it

    def __init__(self, format: Format, products: Products) -> None:
        self.format, self.products = format, products
        native = products == "native"
        self.blocks: tuple[Block, ...] = (ROW, COLUMN) if native else (BLOCKS[format],)
        self._tiles: dict[tuple[int, torch.device], Tensor] = {}  # as the kernel takes them

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

    def _places(self, layout: Layout) -> list[tuple[tuple[int, ...], int]]:
        """By plane: the place of the first scale of each parameter, and the scales of a shard."""
        direct = not self.staged_because(layout)
        return [_places(layout, block, direct) for block in self.blocks]

    # ------------------------------------------------------------------ encode and view

    def encode(self, main: Tensor, outs: Sequence[Tensor], layout: Layout, first: int) -> None:
        """Encode the shards from ``first`` on, of main or of bf16, into the same shards of each
        buffer. Where a kernel can, it encodes all weights in one launch."""
        kernel = self.blocks == (SQUARE_128,) and main.device == outs[0].device
        if kernel and uses_kernels(main.device) and main.dtype in (torch.bfloat16, torch.float32):
            self._encode_together(main, outs, layout, first)
            return
        for index, low, high, offset in _pieces(main, layout, first):
            columns = layout.items[index].shape[-1]
            values = main[offset : offset + high - low].view(-1, columns)
            if values.device != outs[0].device:  # offloaded: cast first, to copy half the bytes
                values = values.to(torch.bfloat16).to(outs[0].device)
            planes = []
            for number, (block, (starts, length)) in enumerate(
                zip(self.blocks, self._places(layout), strict=True)
            ):
                codes = outs[2 * number][offset : offset + high - low].view(-1, columns)
                start = starts[index] + low // prod(block) - first * length
                scales = outs[2 * number + 1][start : start + codes.numel() // prod(block)]
                scales = scales.view(scale_shape(codes.shape, block))
                planes.append(Plane(codes=codes, scales=scales, block=block))
            encode(values, self.blocks, out=planes)

    def _encode_together(
        self, main: Tensor, outs: Sequence[Tensor], layout: Layout, first: int
    ) -> None:
        from shardwise.kernels import fp8_codes as kernels

        tiles = self._tiles.get((first, main.device))
        if tiles is None:
            (starts, length), area = self._places(layout)[0], prod(SQUARE_128)
            matrices = [
                kernels.Matrix(
                    (high - low) // layout.items[index].shape[-1],
                    layout.items[index].shape[-1],
                    offset,
                    starts[index] + low // area - first * length,
                )
                for index, low, high, offset in _pieces(main, layout, first)
            ]
            if not matrices:
                return
            tiles = self._tiles[first, main.device] = kernels.list_tiles(matrices, main.device)
        kernels.encode(main, outs[0], outs[1], tiles=tiles)

    def view(self, buffers: Sequence[Tensor], layout: Layout, index: int) -> Coded:
        item, start = layout.items[index], layout.starts[index]
        shape = item.numel // item.shape[-1], item.shape[-1]
        planes = []
        for number, (block, (starts, _)) in enumerate(
            zip(self.blocks, self._places(layout), strict=True)
        ):
            codes, scales = buffers[2 * number : 2 * number + 2]
            bands, strips = scale_shape(shape, block)
            # ``data`` has a version counter of its own, which a gather does not move.
            planes.append(
                (
                    codes.as_strided(shape, (shape[1], 1), start).data,
                    scales.as_strided((bands, strips), (strips, 1), starts[index]).data,
                )
            )
        return Coded.of(item.shape, planes[0], planes[1] if planes[1:] else None, self.products)


def _pieces(main: Tensor, layout: Layout, first: int) -> list[tuple[int, int, int, int]]:
    """The parameters in the shards of ``main``, from ``first`` on: (index, the first and last
    element, the place in ``main``)."""
    pieces = enumerate(layout.pieces(first, main.numel() // layout.shard_size))
    return [(index, low, high, offset) for index, (low, high, offset, *_) in pieces if high > low]


# ------------------------------------------------------------------------------ places of scales


@lru_cache(maxsize=256)
def _staged_because(layout: Layout, blocks: tuple[Block, ...]) -> str:
    if layout.num_shards == 1:
        return ""
    if len(blocks) > 1:
        return "two planes have more bytes"
    square = max(blocks[0]) ** 2  # parameters and shards begin at whole squares
    begins = [shard * layout.shard_size for shard in range(layout.num_shards)]
    cuts = any(place % square for place in (*begins, *layout.starts)) or any(
        layout.piece(index, shard)[0] % (max(blocks[0]) * item.shape[-1])
        for index, item in enumerate(layout.items)
        for shard in layout.holders(index)
    )
    return "a rank's shard cuts a block" if cuts else ""


@lru_cache(maxsize=256)
def _places(layout: Layout, block: Block, direct: bool) -> tuple[tuple[int, ...], int]:
    """(the place of the first scale of each parameter, the number of scales for each shard).
    ``direct``: scales are sent, so each lies in the shard of its codes."""
    area = prod(block)
    if direct and layout.num_shards > 1:
        return tuple(start // area for start in layout.starts), layout.shard_size // area
    places, end = [], 0
    for item in layout.items:  # one after another
        places.append(end)
        end += -(-item.numel // area // _APART) * _APART
    return tuple(places), -(-end // layout.num_shards)
