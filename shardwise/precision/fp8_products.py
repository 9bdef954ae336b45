# SPDX-License-Identifier: Apache-2.0
"""The two products that read a weight in MXFP8: emulated on any device, native on new hardware.

::

    forward    y  = x · Wᵀ     reads the row plane
    backward   dx = dy · W     reads the column plane

``Emulated`` decodes one matrix at a time into a workspace that the next product uses again.
Decoding to bf16 is exact. So the results are those of a bf16 GEMM with fp32 accumulation, over
exactly the values of the codes.

``Native`` multiplies MXFP8 by MXFP8 (compute capability 10.0 and later). The activations must be
MXFP8 too, so they are rounded: the results are those of ``Emulated`` with rounded activations.
``Native`` is used only for ``Precision(weights="mxfp8", products="native")``, and is refused if the
hardware cannot do it. It is written for ``torch.nn.functional.scaled_mm`` and has **never run on
such hardware**: the H200 cannot do it. CPU tests check which operands, scales and layouts reach
``scaled_mm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.memory import counted
from shardwise.precision.fp8 import COLUMN, ROW, SIDE, SQUARE, FP8Error, Plane, decode, encode


class Matmul(Protocol):
    """The two products that read a weight's planes; activations are [tokens, features]."""

    def forward(self, x: Tensor, plane: Plane, bias: Tensor | None) -> Tensor:
        """x · Wᵀ + bias: [tokens, columns] to [tokens, rows]."""

    def backward(self, grad: Tensor, plane: Plane) -> Tensor:
        """dy · W: [tokens, rows] to [tokens, columns]."""


# --------------------------------------------------------------------------------------- emulated


class Workspace:
    """Memory for one decoded matrix, kept between calls, and grown to the size of the largest.

    All products that read the workspace are queued on one stream, so the next decoding runs after
    them. One workspace serves one stream and one thread at a time: each model needs its own.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def matrix(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[rows, columns] with undefined contents, valid until the next call."""
        key = (dtype, device)
        held = self._memory.get(key)
        if held is None or held.numel() < shape.numel():
            self._memory.pop(key, None)
            del held  # free the smaller memory before the larger one is allocated
            # No inference tensor, even if an evaluation comes first: training decodes into this
            # memory later, and cannot write to an inference tensor.
            with torch.inference_mode(False):
                fresh = torch.empty(shape.numel(), dtype=dtype, device=device)
            self._memory[key] = held = counted(fresh, "workspace")
        return held[: shape.numel()].view(shape)


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Decode, then multiply in the dtype of the activations, with sums in fp32.

    ``workspace``: memory to decode into. None: each product allocates memory.
    """

    workspace: Workspace | None = None

    def forward(self, x: Tensor, plane: Plane, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight(plane, x.dtype), bias)

    def backward(self, grad: Tensor, plane: Plane) -> Tensor:
        return torch.mm(grad, self._weight(plane, grad.dtype))

    def _weight(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        codes = plane.codes
        if self.workspace is None:
            return decode(plane, dtype=dtype)
        return decode(plane, out=self.workspace.matrix(codes.shape, dtype, codes.device))


# ----------------------------------------------------------------------------------------- native


def native_problem(device: torch.device) -> str | None:
    """The reason why ``Native`` cannot be used on this device; None if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} multiplies no MXFP8: use products='emulated'"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm: use products='emulated'"
    capability = torch.cuda.get_device_capability(device)
    if capability < (10, 0):
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}, and MXFP8 products "
            f"need 10.0: use products='emulated'"
        )
    return None


class Native:
    """The products of ``Matmul`` by ``scaled_mm``."""

    def __init__(self, device: torch.device) -> None:
        problem = native_problem(device)
        if problem is not None:
            raise FP8Error(problem)

    def forward(self, x: Tensor, plane: Plane, bias: Tensor | None) -> Tensor:
        if plane.block not in (ROW, SQUARE):
            raise FP8Error(f"forward reads blocks {ROW} or {SQUARE}, got {plane.block}")
        return _scaled_mm(x, plane.codes, _row_scales(plane.scales, plane), bias)

    def backward(self, grad: Tensor, plane: Plane) -> Tensor:
        if plane.block not in (COLUMN, SQUARE):
            raise FP8Error(f"backward reads blocks {COLUMN} or {SQUARE}, got {plane.block}")
        scales = _row_scales(plane.scales.t(), plane).contiguous()
        return _scaled_mm(grad, plane.codes.t().contiguous(), scales, None)


def _row_scales(scales: Tensor, plane: Plane) -> Tensor:
    """[n, k / 32]: a row of scales for each row of codes. A scale of a square is repeated for its
    32 rows."""
    return scales.repeat_interleave(SIDE, 0) if plane.block == SQUARE else scales


def _scaled_mm(activations: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """[tokens, k] times the transpose of [n, k], whose scales are [n, k / 32]."""
    left = _encode_rows(activations)
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
    return result[: len(activations)]


def _encode_rows(activations: Tensor) -> Plane:
    """[tokens, features] in blocks of 32 features, with tokens padded to a multiple of 32."""
    (plane,) = encode(F.pad(activations, (0, 0, 0, -len(activations) % SIDE)), (ROW,))
    return plane


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
