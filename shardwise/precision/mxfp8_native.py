# SPDX-License-Identifier: Apache-2.0
"""MXFP8 by MXFP8 products on hardware that has them (compute capability 10.0 and later).

The other operand must be MXFP8 too, so activations are rounded: the numbers are those of
``Emulated(activations=through_mxfp8)``, not of ``Emulated()``. Nothing chooses this by itself:
``Precision(weights="mxfp8", products="native")`` does, and is refused where there is no hardware.

Written against ``torch.nn.functional.scaled_mm`` and **never run on such hardware**: the H200 has
none. What CPU tests hold is which operands, scales and layouts reach ``scaled_mm``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.precision.mxfp8 import COLUMN, ROW, SIDE, SQUARE, MXFP8Error, Plane, encode


def native_problem(device: torch.device) -> str | None:
    """Why ``Native`` can't be used on this device; None where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} multiplies no MXFP8: use products='emulated'"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm: use products='emulated'"
    capability = torch.cuda.get_device_capability(device)
    if capability < (10, 0):
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}; MXFP8 products came "
            f"with 10.0: use products='emulated'"
        )
    return None


def swizzle(scales: Tensor) -> Tensor:
    """[rows, blocks] in the order that the matrix units read: tiles of 128 rows by 4 blocks.

    ::

        a tile    row 0..31 | 32..63 | 64..95 | 96..127      each 4 blocks wide
        memory    row 0, 32, 64, 96, then 1, 33, 65, 97, ...  4 bytes each
    """
    rows, blocks = scales.shape
    padded = F.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


class Native:
    """The products of ``Matmul`` by ``scaled_mm``."""

    def __init__(self, device: torch.device) -> None:
        problem = native_problem(device)
        if problem is not None:
            raise MXFP8Error(problem)

    def forward(self, x: Tensor, plane: Plane, bias: Tensor | None) -> Tensor:
        if plane.block not in (ROW, SQUARE):
            raise MXFP8Error(f"forward reads blocks {ROW} or {SQUARE}, got {plane.block}")
        scales = plane.scales
        if plane.block == SQUARE:
            scales = scales.repeat_interleave(SIDE, 0)
        return _product(x, plane.codes, scales, bias)

    def backward(self, grad: Tensor, plane: Plane) -> Tensor:
        if plane.block not in (COLUMN, SQUARE):
            raise MXFP8Error(f"backward reads blocks {COLUMN} or {SQUARE}, got {plane.block}")
        scales = plane.scales.t()
        if plane.block == SQUARE:
            scales = scales.repeat_interleave(SIDE, 0)
        return _product(grad, plane.codes.t().contiguous(), scales.contiguous(), None)


def _product(activations: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """[tokens, k] times the transpose of [n, k], whose scales are [n, k / 32]."""
    tokens = len(activations)
    (left,) = encode(F.pad(activations, (0, 0, 0, -tokens % SIDE)), (ROW,))
    scaling, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4  # type: ignore[attr-defined]
    result: Tensor = F.scaled_mm(  # type: ignore[attr-defined]
        left.codes.view(torch.float8_e4m3fn),
        codes.view(torch.float8_e4m3fn).t(),
        swizzle(left.scales).view(torch.float8_e8m0fnu),
        scaling,
        swizzle(scales).view(torch.float8_e8m0fnu),
        scaling,
        swizzle_a=order,
        swizzle_b=order,
        bias=bias,
        output_dtype=activations.dtype,
    )
    return result[:tokens]
