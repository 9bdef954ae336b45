# SPDX-License-Identifier: Apache-2.0
"""The three products of a linear layer in fp8 with block scales: by hardware, or by decoding.

::

    x [tokens, in]   --quantise-->  codes  [tokens, in]   scales [in/128, tokens]       y  = x · Wᵀ
                                    turned [in, tokens]   scales [in/128, tokens/128]   dW = dyᵀ · x
    dy [tokens, out] --quantise-->  codes  [tokens, out]  scales [out/128, tokens]      dx = dy · W
                                    turned [out, tokens]  scales [tokens/128, out]      dW = dyᵀ · x

The left operand of a product is in blocks of 1x128, along the dimension that is summed over. The
right operand is in blocks of 128x128: weights, and x in the product with dy, because Hopper is
faster with these than with 1x128 on both sides. Hopper multiplies them (``torch._scaled_mm``,
cuBLAS 12.9 and later), and sums each block of 128 with about 14 bits of precision. On other devices
the operands are decoded and multiplied in fp32: the same numbers except for that sum. In and out
are multiples of 128. Tokens are padded with zeros to whole blocks. "Turned" means transposed:
features by tokens.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.precision.fp8 import (
    ROW_128,
    SQUARE_128,
    WIDE,
    Reads,
    decode_reference,
    encode_reference,
    uses_kernels,
)

Quantised = tuple[Tensor, Tensor, Tensor, Tensor]  # codes, scales, turned, turned scales


def padded(tokens: int) -> int:
    """The number of tokens after padding to whole blocks."""
    return (tokens + WIDE - 1) // WIDE * WIDE


def empty(x: Tensor, rows: bool, turned: int) -> Quantised:
    """Memory for the wanted planes of x [tokens, features]; the other planes have no elements. See
    :func:`quantise`."""
    tokens, features = padded(x.shape[0]), x.shape[1]
    strips, bands = features // WIDE, tokens // WIDE
    codes = scales = turned_codes = turned_scales = (0, 0)
    if rows:
        codes, scales = (tokens, features), (strips, tokens)
    if turned:
        turned_codes = (features, tokens)
        turned_scales = (strips, bands) if turned == WIDE else (bands, features)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(scales, dtype=torch.float32),
        x.new_empty(turned_codes, dtype=torch.uint8),
        x.new_empty(turned_scales, dtype=torch.float32),
    )


def quantise(x: Tensor, rows: bool, turned: int) -> Quantised:
    """Quantise x [tokens, features] in blocks along features (``rows``), and turned in blocks along
    tokens.

    ``turned``: the number of features that share a scale with 128 tokens: 1, or 128 (only with
    ``rows``). 0: no turned plane is wanted.
    """
    codes, scales, turned_codes, turned_scales = empty(x, rows, turned)
    if uses_kernels(x.device):
        from shardwise.kernels import fp8_codes

        fp8_codes.quantise(
            x.to(torch.bfloat16).contiguous(),
            (codes, scales) if rows else None,
            (turned_codes, turned_scales) if turned else None,
            square=turned == WIDE,
        )
    else:
        whole = F.pad(x, (0, 0, 0, padded(x.shape[0]) - x.shape[0]))
        if rows:
            codes, scales = encode_reference(whole, ROW_128)
            scales = scales.t().contiguous()
        if turned:
            block = SQUARE_128 if turned == WIDE else ROW_128
            turned_codes, turned_scales = encode_reference(whole.t().contiguous(), block)
            if block == ROW_128:
                turned_scales = turned_scales.t().contiguous()
    return codes, scales, turned_codes, turned_scales


def quantise_swiglu(gate: Tensor, up: Tensor) -> Quantised:
    """:func:`quantise` of silu(gate) · up, turned in 128x128, computed in fp32 and rounded once."""
    if gate.is_meta or (uses_kernels(gate.device) and gate.dtype == torch.bfloat16):
        result = empty(gate, True, WIDE)
        if not gate.is_meta:
            from shardwise.kernels import fp8_fused

            fp8_fused.swiglu(gate, up, result)
        return result
    return quantise((F.silu(gate.float()) * up.float()).to(gate.dtype), True, WIDE)


def quantise_swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Quantised, Quantised]:
    """:func:`quantise` of the gradients of gate and of up, turned in 1x128."""
    # The kernel needs the shared memory of Hopper.
    if dh.is_meta or (scaled_problem(dh.device) is None and dh.dtype == torch.bfloat16):
        halves = empty(dh, True, 1), empty(dh, True, 1)
        if not dh.is_meta:
            from shardwise.kernels import fp8_fused

            fp8_fused.swiglu_backward(dh.contiguous(), gate, up, *halves)
        return halves
    dtype = dh.dtype
    dh, gate, sigma = dh.float(), gate.float(), torch.sigmoid(gate.float())
    of_gate, of_up = dh * up.float() * sigma * (1 + gate * (1 - sigma)), dh * gate * sigma
    return quantise(of_gate.to(dtype), True, 1), quantise(of_up.to(dtype), True, 1)


def multiply(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    of_weight: Tensor,
    phase: Reads,
    dtype: torch.dtype,
) -> Tensor:
    """x · Wᵀ (forward) or dy · W (backward) [tokens, ...]: codes of activations in 1x128, and of
    the weight in 128x128, with their scales."""
    rows, columns = weight.shape
    if codes.is_meta:  # a plan: allocate what the product would
        turned_weight = weight.new_empty(columns, rows) if phase == "backward" else None
        result = codes.new_empty(len(codes), rows if phase == "forward" else columns, dtype=dtype)
        del turned_weight  # alive during the product
        return result
    if scaled_problem(codes.device) is None:
        if phase == "backward":
            from shardwise.kernels import fp8_codes

            weight, of_weight = fp8_codes.turn(weight, of_weight)
        return scaled_by_blocks(codes, scales, *right_side(weight, of_weight), dtype)
    values = decode_reference(weight, of_weight, SQUARE_128, torch.float32)
    return (_decoded(codes, scales) @ (values.t() if phase == "forward" else values)).to(dtype)


def weight_gradient(
    grad: Tensor, grad_scales: Tensor, x: Tensor, x_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """dyᵀ · x [out, in] of turned codes: dy [out, tokens], and x [in, tokens] in 128x128 blocks."""
    if grad.is_meta or not grad.shape[1]:
        return grad.new_zeros(len(grad), len(x), dtype=dtype)
    if scaled_problem(grad.device) is None:
        return scaled_by_blocks(grad, grad_scales, *right_side(x, x_scales), dtype)
    right = decode_reference(x, x_scales, SQUARE_128, torch.float32)
    return (_decoded(grad, grad_scales) @ right.t()).to(dtype)


def right_side(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, k] and the scales of their blocks as the right side of a product, [k, n]."""
    return codes.view(torch.float8_e4m3fn).t(), scales.t()


def scaled_by_blocks(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[tokens, k] times [k, n], which :func:`right_side` made."""
    left, count = left.view(torch.float8_e4m3fn), len(right_scales)
    if not count % 4 and right_scales.t().is_contiguous():
        return torch._scaled_mm(
            left, right, scale_a=left_scales.t(), scale_b=right_scales, out_dtype=dtype
        )
    # cuBLAS needs rows of scales whose addresses are multiples of 16 bytes.
    scales = F.pad(right_scales.t(), (0, -count % 4)).t()
    rows, squares = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128  # type: ignore[attr-defined]
    return F.scaled_mm(  # type: ignore[attr-defined, no-any-return]
        left, right, left_scales.t(), rows, scales, squares, output_dtype=dtype
    )


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """[n, k] in fp32, from scales [k / 128, n]."""
    return decode_reference(codes, scales.t(), ROW_128, torch.float32)


@functools.cache
def scaled_problem(device: torch.device) -> str | None:
    """The reason why products of fp8 by blocks are made by decoding; None if hardware makes
    them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} multiplies no fp8 in blocks"
    if not uses_kernels(device):
        return "Triton, whose kernels quantise, is not installed: pip install shardwise[triton]"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}, and fp8 products by "
            f"blocks need 9.0"
        )
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if version < (12, 9) or not hasattr(F, "scaled_mm"):
        return (
            f"fp8 products by blocks need torch 2.10 with CUDA 12.9, and this is torch "
            f"{torch.__version__} with CUDA {torch.version.cuda}"
        )
    return None
