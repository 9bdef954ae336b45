# SPDX-License-Identifier: Apache-2.0
"""fp8: one byte for each element (e4m3), and one scale for each block of elements.

::

    block       codes               scales                       read by
    ROW         [rows, columns]     [rows, columns/32]           x · Wᵀ, which sums over columns
    COLUMN      [rows, columns]     [rows/32, columns]           dy · W, which sums over rows
    ROW_128     [rows, columns]     [rows, columns/128] fp32     activations, gradients
    SQUARE_128  [rows, columns]     [rows/128, columns/128] fp32 both

    blocks of 32 (MXFP8)    value = e4m3(code) · 2^(scale - 127)     a scale is a byte (e8m0)
    blocks of 128           value = e4m3(code) · scale               a scale is an fp32 number

Values of any dtype are rounded to bf16 before they are encoded. So a shard that is encoded from
fp32 equals the same rows that were sent as bf16 and encoded afterwards. A row plane and a column
plane are two different roundings of the same values; neither can be made from the other.

The rules for what the standard leaves open:

- **scale**: in blocks of 128 the largest magnitude of the block / 448; magnitudes below 2^-100
  count as 2^-100. In MXFP8 the smallest power of two that brings the largest magnitude to 448 or
  less; this is an integer comparison, and exact.
- **zeros**: a block of zeros has codes of zeros, which keep their signs, and in MXFP8 scale 0.
- **NaN**: a block with a NaN or an infinity has scale NaN (255 in MXFP8) and codes 0x7F: all its
  values are NaN.
- **clamp**: values are clamped to ±448 before each cast, because torch up to 2.12 casts larger
  values to NaN.
- **largest**: magnitudes from 1.9375·2^127 (3.3e38) round to 2^128, which floats of 16 or 32 bits
  cannot hold: they are decoded as infinity.

Every operation is exact or rounded once by IEEE's rules, so a CPU, a GPU and any torch give the
same bits. Codes and e8m0 scales are stored and sent as uint8, because gloo sends no float8, and
float8 lacks ``equal`` and ``max``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.kernels import has_triton

Format = Literal["mxfp8", "fp8_block"]  # of weights
Reads = Literal["forward", "backward"]
Block = tuple[int, int]  # rows and columns that share a scale

SIDE = 32  # the side of blocks of MXFP8
ROW: Block = (1, SIDE)
COLUMN: Block = (SIDE, 1)
WIDE = 128  # the side of blocks with fp32 scales
ROW_128: Block = (1, WIDE)
SQUARE_128: Block = (WIDE, WIDE)
# The dtype of each block's scales: uint8 for the exponent of a power of two, or fp32.
SCALES: dict[Block, torch.dtype] = dict.fromkeys((ROW, COLUMN), torch.uint8)
SCALES |= dict.fromkeys((ROW_128, SQUARE_128), torch.float32)
BLOCKS: dict[Format, Block] = {"mxfp8": ROW, "fp8_block": SQUARE_128}  # of weights

LARGEST = 448.0  # the largest e4m3 value
INVERSE_LARGEST = 0.002232142956927419  # 1 / 448 in fp32
SMALLEST = 2.0**-100  # smaller magnitudes count as this for an exact scale
NAN_SCALE, NAN_CODE = 255, 0x7F


class FP8Error(ValueError):
    """An error about a tensor that cannot be stored in fp8."""


class Plane(NamedTuple):
    """One encoding of a matrix. Both tensors may be views of a buffer; both are contiguous."""

    codes: Tensor  # [rows, columns], uint8
    scales: Tensor  # [rows / block[0], columns / block[1]]
    block: Block


def plane_over(codes: Tensor, scales: Tensor) -> Plane:
    """Codes and scales of a weight as a plane: the dtype and the shape of the scales tell its
    blocks."""
    if scales.dtype == torch.float32:
        return Plane(codes=codes, scales=scales, block=SQUARE_128)
    return Plane(codes=codes, scales=scales, block=ROW if len(scales) == len(codes) else COLUMN)


# ------------------------------------------------------------------------------------- arithmetic


def side_of(blocks: Sequence[Block]) -> int:
    """The longer side of the largest block, of which both sides of a matrix are multiples."""
    return max(map(max, blocks))


def shape_problems(shape: Sequence[int], blocks: Sequence[Block] = (ROW,)) -> list[str]:
    """Reasons why a tensor of this shape cannot be stored in these blocks. It may have no rows."""
    if len(shape) != 2:
        return [f"shape {tuple(shape)}: fp8 stores 2-D weights; reshape to [rows, columns]"]
    side = side_of(blocks)
    return [
        f"shape {tuple(shape)}: {size} {name} are no multiple of {side}"
        for name, size in zip(("rows", "columns"), shape, strict=True)
        if size % side
    ]


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, int]:
    """The number of blocks in each direction."""
    return shape[0] // block[0], shape[1] // block[1]


def in_blocks(x: Tensor, block: Block) -> Tensor:
    """x [rows, columns] as [blocks, rows, blocks, columns]."""
    return x.view(len(x) // block[0], block[0], x.shape[1] // block[1], block[1])


def scales_of(magnitudes: Tensor) -> Tensor:
    """The scale bytes (as int32) of blocks whose largest magnitudes have these bf16 bits (int32).

    amax = 1.m · 2^(E-127) and 448 = 1.75 · 2^8, so amax / 448 <= 2^(scale-127) first holds for
    scale = E - 8 where 1.m <= 1.75, and for scale = E - 7 where 1.m is larger.
    """
    exponent = magnitudes >> 7
    scale = exponent - 8 + ((magnitudes & 0x7F) > 0x60)
    return scale.clamp(min=0).masked_fill(exponent == 255, NAN_SCALE)


def powers(scales: Tensor) -> Tensor:
    """2^(scale-127) in fp32, and NaN for 255. Made from bits, so that the subnormal 2^-127 is
    exact."""
    bits = (scales.int() << 23).masked_fill(scales == 0, 0x0040_0000)
    return bits.masked_fill(scales == NAN_SCALE, 0x7FC0_0000).view(torch.float32)


def encode_reference(x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Codes and scales by definition, on any device; kernels give the same bits."""
    values = in_blocks(x.to(torch.bfloat16).contiguous(), block)
    magnitudes = (values.view(torch.int16) & 0x7FFF).amax((1, 3), keepdim=True).int()
    undefined = magnitudes >= 0x7F80
    if SCALES[block] is torch.float32:
        largest = (magnitudes << 16).view(torch.float32).clamp(min=SMALLEST)
        scales = (largest * INVERSE_LARGEST).masked_fill(undefined, float("nan"))
        inverse = scales.reciprocal()
    else:
        scales = scales_of(magnitudes)
        inverse = ((254 - scales.masked_fill(undefined, 0)) << 23).view(torch.float32)  # 2^(127-s)
    scaled = (values.float() * inverse).clamp(-LARGEST, LARGEST)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(undefined, NAN_CODE)
    return codes.view(x.shape), scales.view(scale_shape(x.shape, block)).to(SCALES[block])


def decode_reference(codes: Tensor, scales: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """The values by definition, rounded to ``dtype``; kernels give the same bits. With scales that
    are powers of two, bf16 is exact."""
    # On a CPU a table lookup is four times as fast as torch's cast.
    all_codes = torch.arange(256, dtype=torch.uint8, device=codes.device)
    table = all_codes.view(torch.float8_e4m3fn).float()
    values = torch.index_select(table, 0, codes.reshape(-1).int()).view(codes.shape)
    factors = powers(scales) if scales.dtype == torch.uint8 else scales
    values = (in_blocks(values, block) * factors[:, None, :, None]).to(dtype)
    return values.view(codes.shape)


# ----------------------------------------------------------------------------------- the two verbs


def encode(
    x: Tensor,  # [rows, columns], floating point; rounded to bf16 first
    blocks: Sequence[Block] = (ROW, COLUMN),
    *,
    out: Sequence[Plane] | None = None,
) -> tuple[Plane, ...]:
    """Encode x into one plane for each of ``blocks``. On a GPU a row and a column plane take one
    pass. ``out``: planes to write into and return, in the order of ``blocks``."""
    if problems := shape_problems(x.shape, blocks):
        raise FP8Error("; ".join(problems))
    planes = tuple(out or (_empty(x, block) for block in blocks))
    assert [(plane.codes.shape, plane.block) for plane in planes] == [(x.shape, b) for b in blocks]
    if x.numel() == 0 or x.is_meta:  # plans would spend milliseconds on shapes
        return planes
    if uses_kernels(x.device) and ROW_128 not in blocks:
        from shardwise.kernels import fp8_codes, mxfp8

        source = x if x.dtype in (torch.bfloat16, torch.float32) else x.to(torch.bfloat16)
        source = source.detach().contiguous()
        by_block = {plane.block: (plane.codes, plane.scales) for plane in planes}
        if SQUARE_128 in by_block:
            fp8_codes.encode(source, *by_block.pop(SQUARE_128))
        mxfp8.encode(source, by_block)
        return planes
    for plane in planes:
        codes, scales = encode_reference(x.detach(), plane.block)
        plane.codes.copy_(codes)
        plane.scales.copy_(scales)
    return planes


def _empty(x: Tensor, block: Block) -> Plane:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return Plane(codes, codes.new_empty(scale_shape(x.shape, block), dtype=SCALES[block]), block)


def decode(plane: Plane, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values [rows, columns] in ``dtype``.

    With scales that are powers of two, decoding to bf16 and fp32 is exact, because a code has at
    most 4 significant bits.
    """
    codes, scales, block = plane
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if out.numel() == 0 or out.is_meta:
        return out
    exact = SCALES[block] is torch.uint8 and dtype in (torch.bfloat16, torch.float32)
    if exact and uses_kernels(out.device):
        from shardwise.kernels import mxfp8 as kernels

        kernels.decode(codes, scales, block, out)
        return out
    return decode_reference(codes, scales, block, dtype)


@functools.cache
def uses_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device. Cached, because the search for Triton is slow."""
    return device.type == "cuda" and has_triton()
