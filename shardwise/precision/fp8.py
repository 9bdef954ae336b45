# SPDX-License-Identifier: Apache-2.0
"""MXFP8: one byte for each element (e4m3) and one power of two (e8m0) for each block of 32.

::

    block      codes               scales             read by
    ROW        [rows, columns]     [rows, columns/32]      x · Wᵀ, which sums over columns
    COLUMN     [rows, columns]     [rows/32, columns]      dy · W, which sums over rows
    SQUARE     [rows, columns]     [rows/32, columns/32]   both

    value = e4m3(code) · 2^(scale - 127)

Values are rounded to bf16 before they are encoded, whatever their dtype: a shard that is encoded
from fp32 then equals the same rows encoded after they were sent as bf16. A row plane and a column
plane are two roundings of one value; neither can be made from the other.

The rules, where the standard leaves a choice:

- **scale**: the smallest power of two that brings the block's largest magnitude to 448 or less
  (``"rceil"``; an integer comparison, exact), or the largest magnitude's exponent less 8
  (``"floor"``: the standard's minimum, which saturates a quarter of the largest magnitudes).
- **zeros**: a block of zeros has scale 0 and codes of zeros, which keep their signs.
- **NaN**: a block with a NaN or an infinity has scale 255 and codes 0x7F: all 32 values are NaN.
- **clamp**: values are clamped to ±448 before each cast, because torch up to 2.12 casts larger
  values to NaN.
- **largest**: magnitudes from 1.9375·2^127 (3.3e38) round to 2^128, which no float of 16 or 32 bits
  holds: they are decoded as infinity.

Every product here is by a power of two and exact, so a CPU, a GPU and any torch give the same bits.
Codes and scales are uint8, at rest and on the wire: gloo carries no float8, and float8 lacks
``equal`` and ``max``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwise.kernels import has_triton

Rounding = Literal["rceil", "floor"]
Block = tuple[int, int]  # rows and columns that share a scale

SIDE = 32
ROW: Block = (1, SIDE)
COLUMN: Block = (SIDE, 1)
SQUARE: Block = (SIDE, SIDE)

LARGEST = 448.0  # the largest e4m3 value
NAN_SCALE, NAN_CODE = 255, 0x7F
SOURCES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class FP8Error(ValueError):
    """A tensor that can't be stored in MXFP8, or planes that don't fit together."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One encoding of a matrix; both tensors are contiguous uint8, possibly views of a buffer."""

    codes: Tensor  # [rows, columns]
    scales: Tensor  # [rows / block[0], columns / block[1]]
    block: Block

    def __post_init__(self) -> None:
        problems = [
            f"{name} are {tensor.dtype}: planes are uint8"
            for name, tensor in (("codes", self.codes), ("scales", self.scales))
            if tensor.dtype != torch.uint8
        ]
        problems += shape_problems(self.codes.shape)
        if self.block not in (ROW, COLUMN, SQUARE):
            problems.append(f"block {self.block}: choose from {ROW}, {COLUMN}, {SQUARE}")
        elif not problems:
            expected = scale_shape(self.codes.shape, self.block)
            if tuple(self.scales.shape) != expected:
                problems.append(
                    f"scales of shape {tuple(self.scales.shape)} for codes of shape "
                    f"{tuple(self.codes.shape)} in blocks {self.block}: expected {expected}"
                )
        if self.codes.device != self.scales.device:
            problems.append(f"codes on {self.codes.device}, scales on {self.scales.device}")
        problems += [
            f"{name} are not contiguous: planes are read and sent as flat memory"
            for name, tensor in (("codes", self.codes), ("scales", self.scales))
            if not tensor.is_contiguous()
        ]
        if problems:
            raise FP8Error("; ".join(problems))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


# ------------------------------------------------------------------------------------- arithmetic


def shape_problems(shape: Sequence[int]) -> list[str]:
    """Reasons why a tensor of this shape can't be stored in blocks of 32. Zero rows can."""
    if len(shape) != 2:
        return [f"shape {tuple(shape)}: MXFP8 stores 2-D weights; reshape to [rows, columns]"]
    return [
        f"shape {tuple(shape)}: {size} {side} do not divide into blocks of {SIDE}"
        for side, size in zip(("rows", "columns"), shape, strict=True)
        if size % SIDE
    ]


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, int]:
    rows, columns = shape
    return rows // block[0], columns // block[1]


def scales_of(magnitudes: Tensor, rounding: Rounding) -> Tensor:
    """The scale bytes (int32) of blocks whose largest bf16 magnitude has these bits (int32).

    amax = 1.m · 2^(E-127) and 448 = 1.75 · 2^8, so amax / 448 <= 2^(scale-127) first holds for
    scale = E - 8 where 1.m <= 1.75, and for scale = E - 7 where 1.m is larger.
    """
    exponent = magnitudes >> 7
    scale = exponent - 8
    if rounding == "rceil":
        scale = scale + ((magnitudes & 0x7F) > 0x60)
    return scale.clamp(min=0).masked_fill(exponent == 255, NAN_SCALE)


def powers(scales: Tensor) -> Tensor:
    """2^(scale-127) in fp32 (NaN for 255), by bits: 2^-127 is subnormal and comes out exact."""
    bits = (scales.int() << 23).masked_fill(scales == 0, 0x0040_0000)
    return bits.masked_fill(scales == NAN_SCALE, 0x7FC0_0000).view(torch.float32)


def encode_reference(
    x: Tensor, block: Block, rounding: Rounding = "rceil"
) -> tuple[Tensor, Tensor]:
    """Codes and scales by definition, on any device; kernels give the same bits."""
    rows, columns = x.shape
    high, wide = block
    values = x.to(torch.bfloat16).contiguous().view(rows // high, high, columns // wide, wide)
    magnitudes = values.view(torch.int16) & 0x7FFF
    scales = scales_of(magnitudes.amax((1, 3), keepdim=True).int(), rounding)
    undefined = scales == NAN_SCALE
    inverse = ((254 - scales.masked_fill(undefined, 0)) << 23).view(torch.float32)  # 2^(127-scale)
    scaled = (values.float() * inverse).clamp(-LARGEST, LARGEST)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(undefined, NAN_CODE)
    return codes.view(rows, columns), scales.view(scale_shape(x.shape, block)).to(torch.uint8)


def decode_reference(codes: Tensor, scales: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """The values by definition, rounded to ``dtype`` (exact in bf16); kernels give the same."""
    rows, columns = codes.shape
    high, wide = block
    # A table lookup is four times as fast as torch's cast on a CPU.
    every = torch.arange(256, dtype=torch.uint8, device=codes.device)
    table = every.view(torch.float8_e4m3fn).float()
    values = torch.index_select(table, 0, codes.reshape(-1).int())
    blocks = values.view(rows // high, high, columns // wide, wide)
    return (blocks * powers(scales)[:, None, :, None]).to(dtype).view(rows, columns)


# ----------------------------------------------------------------------------------- the two verbs


def empty_planes(
    shape: Sequence[int], blocks: Sequence[Block], device: torch.device | str
) -> tuple[Plane, ...]:
    """Planes of a matrix with undefined contents, one for each of ``blocks``."""
    problems = shape_problems(shape)
    if problems:
        raise FP8Error("; ".join(problems))
    return tuple(
        Plane(
            codes=torch.empty(tuple(shape), dtype=torch.uint8, device=device),
            scales=torch.empty(scale_shape(shape, block), dtype=torch.uint8, device=device),
            block=block,
        )
        for block in blocks
    )


def encode(
    x: Tensor,  # [rows, columns], floating point; rounded to bf16 first
    blocks: Sequence[Block] = (ROW, COLUMN),
    *,
    rounding: Rounding = "rceil",
    out: Sequence[Plane] | None = None,
) -> tuple[Plane, ...]:
    """One plane for each of ``blocks``; on a GPU a row and a column plane take one pass.

    ``out``: planes to write into and return, in the order of ``blocks``.
    """
    problems = shape_problems(x.shape)
    if x.dtype not in SOURCES:
        problems.append(f"a tensor of {x.dtype}: encode floating-point values, not codes")
    if rounding not in get_args(Rounding):
        problems.append(f"rounding {rounding!r}: choose from {', '.join(get_args(Rounding))}")
    if unknown := [block for block in blocks if block not in (ROW, COLUMN, SQUARE)]:
        problems.append(f"block {unknown[0]}: choose from {ROW}, {COLUMN}, {SQUARE}")
    if len(set(blocks)) != len(blocks):
        problems.append(f"blocks {tuple(blocks)}: each at most once")
    if out is not None:
        problems += [
            f"out[{index}] has shape {tuple(plane.codes.shape)} in blocks {plane.block} on "
            f"{plane.codes.device}; expected {tuple(x.shape)} in {block} on {x.device}"
            for index, (plane, block) in enumerate(zip(out, blocks, strict=False))
            if (plane.codes.shape, plane.block, plane.codes.device) != (x.shape, block, x.device)
        ]
        if len(out) != len(blocks):
            problems.append(f"{len(out)} planes in out for {len(blocks)} blocks")
    if problems:
        raise FP8Error("; ".join(problems))
    planes = empty_planes(x.shape, blocks, x.device) if out is None else tuple(out)
    if x.numel() == 0:
        return planes
    if uses_kernels(x.device):
        from shardwise.kernels import mxfp8 as kernels

        source = x if x.dtype in (torch.bfloat16, torch.float32) else x.to(torch.bfloat16)
        by_block = {plane.block: (plane.codes, plane.scales) for plane in planes}
        kernels.encode(source.detach().contiguous(), by_block, rceil=rounding == "rceil")
        return planes
    for plane in planes:
        codes, scales = encode_reference(x.detach(), plane.block, rounding)
        plane.codes.copy_(codes)
        plane.scales.copy_(scales)
    return planes


def decode(
    plane: Plane, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """The values [rows, columns] in ``dtype``, written into ``out`` where that is given.

    Decoding to bf16 and fp32 is exact: a code has at most 4 significant bits.
    """
    shape = plane.codes.shape
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=plane.codes.device)
    elif (out.shape, out.device) != (shape, plane.codes.device) or not out.is_contiguous():
        raise FP8Error(
            f"out of shape {tuple(out.shape)} on {out.device}: decoding {tuple(shape)} on "
            f"{plane.codes.device} needs contiguous memory of that shape there"
        )
    if not out.dtype.is_floating_point or out.dtype.itemsize < 2:
        raise FP8Error(f"decode to {out.dtype}: choose a floating-point dtype of 16 bits or more")
    if out.numel() == 0:
        return out
    if uses_kernels(out.device) and out.dtype in (torch.bfloat16, torch.float32):
        from shardwise.kernels import mxfp8 as kernels

        kernels.decode(plane.codes, plane.scales, plane.block, out)
        return out
    out.copy_(decode_reference(plane.codes, plane.scales, plane.block, out.dtype))
    return out


@functools.cache
def uses_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device; cached, as the search for Triton is slow."""
    return device.type == "cuda" and has_triton()
