# SPDX-License-Identifier: Apache-2.0
"""Grouped products in fp8: rows that are sorted by expert, times the weights of all experts.

::

    rows [n, in]  --one scale a row-->  codes      y  = x · W[e]ᵀ    of experts' codes as they are
    W [experts, out, in]  codes, one scale         dx = dy · W[e]    of their turned codes
                          for each expert

Hopper multiplies them by torch's scaled grouped product, which takes one scale for each row of both
sides: a weight with one scale serves both directions with the same codes. Sums are those of its
tensor cores, about 14 bits (fast accumulation). Elsewhere the operands are decoded and multiplied
in fp32: the same numbers but for that sum. The gradients of experts' weights are in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.moe.weights import ExpertCodes
from shardwise.precision.fp8 import (
    Plane,
    Rounding,
    decode_reference,
    encode_reference,
    uses_kernels,
)
from shardwise.precision.fp8_block import scaled_problem
from shardwise.precision.fp8_tensor import Reads


@dataclass(frozen=True, kw_only=True)
class BlockExperts(ExpertCodes):
    """All experts' weights as the right side of grouped products."""

    shape: torch.Size
    codes: Tensor  # uint8 [experts, n, k]; k is summed over
    scales: Tensor  # fp32 [experts]
    rounding: Rounding

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        """``x · codesᵀ`` [rows, n] of x [rows, k], in its dtype."""
        experts, width, _ = self.codes.shape
        if x.is_meta or not len(x):
            return x.new_empty(len(x), width)
        codes, scales = quantise_rows(x, self.rounding)
        if scaled_problem(x.device) is None and x.dtype == torch.bfloat16:
            return torch._scaled_grouped_mm(
                codes.view(torch.float8_e4m3fn),
                self.codes.view(torch.float8_e4m3fn).transpose(-2, -1),
                scales,
                self.scales[:, None].expand(experts, width).contiguous(),
                offs=ends,
                out_dtype=x.dtype,
                use_fast_accum=True,
            )
        left = decode_reference(codes, scales[:, None], (1, x.shape[1]), torch.float32)
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = [rows @ self._values(expert).t() for expert, rows in enumerate(left.split(sizes))]
        return torch.cat(parts).to(x.dtype)

    def _values(self, expert: int) -> Tensor:
        codes, scale = self.codes[expert], self.scales[expert].view(1, 1)
        return decode_reference(codes, scale, tuple(codes.shape), torch.float32)  # type: ignore[arg-type]


def expert_codes(plane: Plane, shape: torch.Size, phase: Reads, rounding: Rounding) -> BlockExperts:
    """The weights of a plane of a stack [experts, out, in], as the product of ``phase`` reads
    them."""
    experts, rows, columns = shape
    codes = plane.codes.view(shape)
    scales = plane.scales.view(experts, rows // plane.block[0], columns // plane.block[1])
    if phase == "backward" and uses_kernels(codes.device):
        from shardwise.kernels import fp8_block

        codes, _ = fp8_block.turn(codes, scales)
    elif phase == "backward":
        codes = codes.transpose(-2, -1).contiguous()
    return BlockExperts(
        shape=shape, codes=codes, scales=scales[:, 0, 0].contiguous(), rounding=rounding
    )


def quantise_rows(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and one scale for each row."""
    if uses_kernels(x.device):
        from shardwise.kernels import fp8_block

        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        fp8_block.quantise_rows(x.to(torch.bfloat16).contiguous(), codes, scales, rounding=rounding)
        return codes, scales
    codes, scales = encode_reference(x, (1, x.shape[1]), rounding)
    return codes, scales.view(-1)
