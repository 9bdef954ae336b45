# SPDX-License-Identifier: Apache-2.0
"""Products of MXFP8 by MXFP8 in hardware (compute capability 10.0 and later).

::

    forward    y  = x · Wᵀ     reads the row plane of the weight
    backward   dx = dy · W     reads the column plane, turned

Activations must be MXFP8 too, so they are rounded: the results are those of decoded weights with
rounded activations. This is used only for ``Precision(weights="mxfp8", products="native")``, and is
refused if the hardware cannot do it. It is written for ``torch.nn.functional.scaled_mm`` and has
**never run on such hardware**: the H200 cannot do it. CPU tests check which operands, scales and
layouts reach ``scaled_mm``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.precision.fp8 import ROW, SIDE, Plane, Reads, encode


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


def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, phase: Reads) -> Tensor:
    """x · Wᵀ + bias of a row plane, or (backward) dy · W of a column plane."""
    if phase == "backward":
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
    return _scaled_mm(x, codes, scales, bias)


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
