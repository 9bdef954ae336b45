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
from dataclasses import dataclass
from typing import Literal

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
SOURCES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class FP8Error(ValueError):
    """An error about a tensor that cannot be stored in fp8, or planes that do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One encoding of a matrix. Both tensors may be views of a buffer."""

    codes: Tensor  # [rows, columns], uint8
    scales: Tensor  # [rows / block[0], columns / block[1]]
    block: Block

    def __post_init__(self) -> None:
        scale_dtype = SCALES.get(self.block, torch.uint8)
        problems = [
            f"{name} are {tensor.dtype}: planes are {str(dtype).removeprefix('torch.')}"
            for name, tensor, dtype in (
                ("codes", self.codes, torch.uint8),
                ("scales", self.scales, scale_dtype),
            )
            if tensor.dtype != dtype
        ]
        problems += shape_problems(self.codes.shape, [self.block])
        problems += block_problems([self.block])
        if not problems:
            expected = scale_shape(self.codes.shape, self.block)
            if tuple(self.scales.shape) != expected:
                problems.append(
                    f"scales of shape {tuple(self.scales.shape)} for codes of shape "
                    f"{tuple(self.codes.shape)} in blocks {self.block}: expected {expected}"
                )
        if self.codes.device != self.scales.device:
            problems.append(
                f"codes on {self.codes.device}, scales on {self.scales.device}: move them to one "
                f"device"
            )
        problems += [
            f"{name} are not contiguous: planes are read and sent as flat memory; call contiguous()"
            for name, tensor in (("codes", self.codes), ("scales", self.scales))
            if not tensor.is_contiguous()
        ]
        if problems:
            raise FP8Error("; ".join(problems))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


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


def block_problems(blocks: Sequence[Block]) -> list[str]:
    """A problem for the first unknown block."""
    unknown = [block for block in blocks if block not in SCALES]
    return [f"block {block}: choose from {', '.join(map(str, SCALES))}" for block in unknown[:1]]


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


def empty_planes(
    shape: Sequence[int], blocks: Sequence[Block], device: torch.device | str
) -> tuple[Plane, ...]:
    """Planes of a matrix with undefined contents, one for each of ``blocks``."""
    problems = shape_problems(shape, blocks)
    if problems:
        raise FP8Error("; ".join(problems))
    return tuple(
        Plane(
            codes=torch.empty(tuple(shape), dtype=torch.uint8, device=device),
            scales=torch.empty(scale_shape(shape, block), dtype=SCALES[block], device=device),
            block=block,
        )
        for block in blocks
    )


def encode(
    x: Tensor,  # [rows, columns], floating point; rounded to bf16 first
    blocks: Sequence[Block] = (ROW, COLUMN),
    *,
    out: Sequence[Plane] | None = None,
) -> tuple[Plane, ...]:
    """Encode x into one plane for each of ``blocks``. On a GPU a row and a column plane take one
    pass. ``out``: planes to write into and return, in the order of ``blocks``."""
    problems = block_problems(blocks) or shape_problems(x.shape, blocks)
    if x.dtype not in SOURCES:
        problems.append(f"a tensor of {x.dtype}: encode floating-point values, not codes")
    if len(set(blocks)) != len(blocks):
        problems.append(f"blocks {tuple(blocks)}: pass each at most once")
    if problems:
        raise FP8Error("; ".join(problems))
    planes = empty_planes(x.shape, blocks, x.device) if out is None else tuple(out)
    for plane, block in zip(planes, blocks, strict=True):
        given = plane.codes.shape, plane.block, plane.codes.device
        assert given == (x.shape, block, x.device), f"a plane to write into is {given}"
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


def decode(
    plane: Plane, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """The values [rows, columns] in ``dtype``, written into ``out`` if it is given.

    With scales that are powers of two, decoding to bf16 and fp32 is exact, because a code has at
    most 4 significant bits.
    """
    shape = plane.codes.shape
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=plane.codes.device)
    assert (out.shape, out.device) == (shape, plane.codes.device) and out.is_contiguous()
    if not out.dtype.is_floating_point or out.dtype.itemsize < 2:
        raise FP8Error(f"decode to {out.dtype}: choose a floating-point dtype of 16 bits or more")
    if out.numel() == 0 or out.is_meta:
        return out
    by_kernel = SCALES[plane.block] is torch.uint8 and out.dtype in (torch.bfloat16, torch.float32)
    if by_kernel and uses_kernels(out.device):
        from shardwise.kernels import mxfp8 as kernels

        kernels.decode(plane.codes, plane.scales, plane.block, out)
        return out
    out.copy_(decode_reference(plane.codes, plane.scales, plane.block, out.dtype))
    return out


@functools.cache
def uses_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device. Cached, because the search for Triton is slow."""
    return device.type == "cuda" and has_triton()
