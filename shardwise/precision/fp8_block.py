# SPDX-License-Identifier: Apache-2.0
"""The three products of a linear layer in fp8 with block scales: of hardware, or by decoding.

::

    x [tokens, in]   --quantise-->  codes  [tokens, in]   scales [in/128, tokens]       y  = x · Wᵀ
                                    turned [in, tokens]   scales [in/128, tokens/128]   dW = dyᵀ · x
    dy [tokens, out] --quantise-->  codes  [tokens, out]  scales [out/128, tokens]      dx = dy · W
                                    turned [out, tokens]  scales [tokens/128, out]      dW = dyᵀ · x

Of the operands of a product the left one is in blocks of 1x128, along what is summed over, and the
right one in blocks of 128x128: weights, and x where it meets dy, because Hopper is faster at that
than at 1x128 by 1x128. It multiplies them (``torch._scaled_mm``, cuBLAS 12.9 and later), and sums a
block of 128 in its own precision, about 14 bits. Elsewhere the operands are decoded and multiplied
in fp32: the same numbers but for that sum. In and out are multiples of 16, and the last blocks
along them may be partial; tokens are padded with zeros to whole blocks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.precision.fp8 import (
    ROW_128,
    SQUARE_128,
    WIDE,
    Plane,
    Rounding,
    decode_reference,
    encode_reference,
    right_side,
    uses_kernels,
)
from shardwise.precision.fp8_tensor import Reads

Quantised = tuple[Tensor, Tensor, Tensor, Tensor]  # codes, scales, turned, turned scales


def padded(tokens: int) -> int:
    """The tokens of quantised activations, up to whole blocks; the tokens added are zeros."""
    return (tokens + WIDE - 1) // WIDE * WIDE


def empty(x: Tensor, rows: bool, turned: int, features: int = 0) -> Quantised:
    """Memory for the planes of x [tokens, features] that are wanted; the others have no element.
    ``features``: where they are others than those of x."""
    tokens, features = padded(x.shape[0]), features or x.shape[1]
    strips, bands = -(-features // WIDE), tokens // WIDE
    codes = scales = others = other_scales = (0, 0)
    if rows:
        codes, scales = (tokens, features), (strips, tokens)
    if turned:
        others = (features, tokens)
        other_scales = (strips, bands) if turned == WIDE else (bands, features)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(scales, dtype=torch.float32),
        x.new_empty(others, dtype=torch.uint8),
        x.new_empty(other_scales, dtype=torch.float32),
    )


class Tally:
    """Counts of values that were quantised: all, those that became zero (underflow), those that
    became NaN with their block. None saturates: a scale is made for its block's largest value."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, x: Tensor, codes: Tensor) -> None:
        """``codes``: of x, in its shape."""
        magnitudes = codes & 0x7F
        lost = ((magnitudes == 0) & (x != 0)).sum()
        found = torch.stack([torch.full_like(lost, x.numel()), lost, (magnitudes == 0x7F).sum()])
        self._counts = found if self._counts is None else self._counts + found

    def figures(self) -> dict[str, int]:
        """The counts so far; empty where nothing was quantised. Waits for the device."""
        if self._counts is None:
            return {}
        names = ("values", "underflows", "undefined")
        return dict(zip(names, map(int, self._counts.tolist()), strict=True))


_tally: Tally | None = None


@contextmanager
def tallied(wanted: bool = True) -> Iterator[Tally]:
    """Count what is quantised inside, in compiled graphs too, by some passes over each tensor."""
    global _tally
    before, tally = _tally, Tally()
    _tally = tally if wanted else before
    try:
        yield tally
    finally:
        _tally = before


def counts() -> bool:
    """Whether what is quantised is counted: then values are made before their codes."""
    return _tally is not None


def note(x: Tensor, codes: Tensor) -> None:
    """Count the codes of x, in its shape, where that is wanted."""
    if _tally is not None and not x.is_meta:
        _tally.add(x, codes)


def quantise(x: Tensor, rows: bool, turned: int, rounding: Rounding) -> Quantised:
    """x [tokens, features] in blocks along features (``rows``) and, turned, along tokens.

    ``turned``: the number of features that share a scale with 128 tokens: 1 or, beside ``rows``,
    128; 0: not wanted.
    """
    codes, scales, others, other_scales = empty(x, rows, turned)
    if uses_kernels(x.device):
        from shardwise.kernels import fp8_codes

        fp8_codes.quantise(
            x.to(torch.bfloat16).contiguous(),
            (codes, scales) if rows else None,
            (others, other_scales) if turned else None,
            square=turned == WIDE,
            rounding=rounding,
        )
    else:
        whole = F.pad(x, (0, 0, 0, padded(x.shape[0]) - x.shape[0]))
        if rows:
            codes, each = encode_reference(whole, ROW_128, rounding)
            scales = each.t().contiguous()
        if turned:
            block = SQUARE_128 if turned == WIDE else ROW_128
            others, other_scales = encode_reference(whole.t().contiguous(), block, rounding)
            if block == ROW_128:
                other_scales = other_scales.t().contiguous()
    note(x, codes[: len(x)] if rows else others[:, : len(x)].t())
    return codes, scales, others, other_scales


def quantise_beside(parts: Sequence[Tensor], rows: bool, rounding: Rounding) -> Quantised:
    """:func:`quantise` of the parts [tokens, features] of one x, side by side, turned in 1x128. All
    but the last are whole blocks."""
    first, *others = parts
    if not others:
        return quantise(first, rows, 1, rounding)
    if not uses_kernels(first.device):
        return quantise(torch.cat(list(parts), 1), rows, 1, rounding)
    from shardwise.kernels import fp8_codes

    found = empty(first, rows, 1, sum(part.shape[1] for part in parts))
    codes, scales, turned, turned_scales = found
    low = 0
    for part in parts:
        wide = part.shape[1]
        planes = None
        if rows:
            planes = codes.narrow(1, low, wide), scales.narrow(0, low // WIDE, -(-wide // WIDE))
        fp8_codes.quantise(
            part.to(torch.bfloat16).contiguous(),
            planes,
            (turned.narrow(0, low, wide), turned_scales.narrow(1, low, wide)),
            rounding=rounding,
        )
        note(part, turned.narrow(0, low, wide)[:, : len(part)].t())
        low += wide
    return found


def quantise_swiglu(gate: Tensor, up: Tensor, rounding: Rounding) -> Quantised:
    """:func:`quantise` of silu(gate) · up, turned in 128x128, computed in fp32 and rounded once."""
    if not counts() and uses_kernels(gate.device) and gate.dtype == torch.bfloat16:
        from shardwise.kernels import fp8_fused

        found = empty(gate, True, WIDE)
        fp8_fused.swiglu((gate, up), found, rounding=rounding)
        return found
    return quantise((F.silu(gate.float()) * up.float()).to(gate.dtype), True, WIDE, rounding)


def quantise_norm(h: Tensor, factors: Tensor, weight: Tensor, rounding: Rounding) -> Quantised:
    """:func:`quantise` of h [..., features] · factors [..., 1] · weight [features], turned in
    128x128, computed in fp32 and rounded once."""
    h, factors = h.reshape(-1, h.shape[-1]), factors.reshape(-1, 1)
    if not counts() and uses_kernels(h.device) and h.dtype == weight.dtype == torch.bfloat16:
        from shardwise.kernels import fp8_fused

        found = empty(h, True, WIDE)
        h, factors, weight = h.contiguous(), factors.contiguous(), weight.contiguous()
        fp8_fused.norm(h, factors, weight, found, rounding=rounding)
        return found
    return quantise((h.float() * factors * weight.float()).to(h.dtype), True, WIDE, rounding)


def quantise_heads(x: Tensor, rounding: Rounding) -> Quantised:
    """:func:`quantise` of heads [batch, tokens, heads, features], side by side, turned in 128x128;
    tokens and features are multiples of 128, and features are contiguous."""
    batch, tokens, heads, width = x.shape
    if counts() or not uses_kernels(x.device):
        return quantise(x.reshape(batch * tokens, heads * width), True, WIDE, rounding)
    from shardwise.kernels import fp8_codes

    found = empty(x.new_empty(batch * tokens, 0), True, WIDE, heads * width)
    fp8_codes.quantise(x, found[:2], found[2:], square=True, rounding=rounding)
    return found


def quantise_swiglu_backward(
    dh: Tensor, gate: Tensor, up: Tensor, gate_first: bool, rounding: Rounding
) -> Quantised:
    """:func:`quantise` of the gradients of gate and up, side by side, turned in 1x128."""
    # The kernel needs the shared memory of Hopper.
    if not counts() and scaled_problem(dh.device) is None and dh.dtype == torch.bfloat16:
        from shardwise.kernels import fp8_fused

        found = empty(dh, True, 1, 2 * dh.shape[1])
        sources = (dh.contiguous(), gate, up)
        fp8_fused.swiglu(sources, found, gate_first=gate_first, rounding=rounding)
        return found
    of_h, wide, sigma = dh.float(), gate.float(), torch.sigmoid(gate.float())
    of_gate, of_up = of_h * up.float() * sigma * (1 + wide * (1 - sigma)), of_h * wide * sigma
    both = (of_gate, of_up) if gate_first else (of_up, of_gate)
    return quantise(torch.cat(both, 1).to(dh.dtype), True, 1, rounding)


_last: tuple[weakref.ref[Tensor], tuple[Any, ...], Quantised] | None = None


def quantise_once(x: Tensor, rows: bool, turned: int, rounding: Rounding) -> Quantised:
    """:func:`quantise` of x [..., features], once for layers of one forward that read the same x
    one after another (query, key and value): they save the same codes for backward. Who writes to x
    between them by ways that autograd does not see (``x.data``, a collective in place, a kernel)
    tells it, as torch asks: ``torch.autograd.graph.increment_version(x)``."""
    global _last
    if x.is_inference():  # has no version
        return quantise(x.reshape(-1, x.shape[-1]), rows, turned, rounding)
    place = 0 if x.is_meta else x.data_ptr()  # another after ``x.data = ...``
    key, last = (x._version, place, rows, turned, rounding), _last
    if last is not None and last[0]() is x and last[1] == key:
        return last[2]
    found = quantise(x.reshape(-1, x.shape[-1]), rows, turned, rounding)
    _last = weakref.ref(x, forget), key, found
    return found


def forget(x: weakref.ref[Tensor] | None = None) -> None:
    """Forget the codes of the last x; or of ``x``, which is gone."""
    global _last
    if _last is not None and (x is None or x is _last[0]):
        _last = None


def multiply(
    codes: Tensor, scales: Tensor, plane: Plane, phase: Reads, dtype: torch.dtype
) -> Tensor:
    """x · Wᵀ (forward) or dy · W (backward) [tokens, ...], of activations in 1x128 blocks."""
    rows, columns = plane.codes.shape
    if codes.is_meta:
        held = plane.codes.new_empty(columns, rows) if phase == "backward" else None  # turned
        result = codes.new_empty(len(codes), rows if phase == "forward" else columns, dtype=dtype)
        del held  # after the product
        return result
    if scaled_problem(codes.device) is None:
        if phase == "forward":
            return scaled_by_blocks(codes, scales, *plane.right, dtype)
        from shardwise.kernels import fp8_codes

        turned = fp8_codes.turn(plane.codes, plane.scales)
        return scaled_by_blocks(codes, scales, *right_side(*turned), dtype)
    left = _decoded(codes, scales)
    weight = decode_reference(plane.codes, plane.scales, plane.block, torch.float32)
    return (left @ (weight.t() if phase == "forward" else weight)).to(dtype)


def weight_gradient(
    grad: Tensor, grad_scales: Tensor, x: Tensor, x_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """dyᵀ · x [out, in] of turned codes [out, tokens] and [in, tokens], these in 128x128 blocks."""
    if grad.is_meta or not grad.shape[1]:
        return grad.new_zeros(len(grad), len(x), dtype=dtype)
    if scaled_problem(grad.device) is None:
        return scaled_by_blocks(grad, grad_scales, *right_side(x, x_scales), dtype)
    right = decode_reference(x, x_scales, SQUARE_128, torch.float32)
    return (_decoded(grad, grad_scales) @ right.t()).to(dtype)


def scaled_by_blocks(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[tokens, k] times [k, n] of :func:`right_side`."""
    left, count = left.view(torch.float8_e4m3fn), len(right_scales)
    if not count % 4 and right_scales.t().is_contiguous():
        return torch._scaled_mm(
            left, right, scale_a=left_scales.t(), scale_b=right_scales, out_dtype=dtype
        )
    # cuBLAS reads rows of scales at multiples of 16 bytes.
    scales = F.pad(right_scales.t(), (0, -count % 4)).t()
    one, many = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128  # type: ignore[attr-defined]
    return F.scaled_mm(  # type: ignore[attr-defined, no-any-return]
        left, right, left_scales.t(), one, scales, many, output_dtype=dtype
    )


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """[n, k] in fp32, from scales [k / 128, n]."""
    return decode_reference(codes, scales.t(), ROW_128, torch.float32)


@functools.cache
def scaled_problem(device: torch.device) -> str | None:
    """The reason why products of fp8 by blocks are made by decoding; None where hardware makes
    them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} multiplies no fp8 in blocks"
    if not uses_kernels(device):
        return "Triton is not installed, whose kernels quantise: pip install shardwise[triton]"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}, and these are of 9.0"
        )
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if version < (12, 9) or not hasattr(F, "scaled_mm"):
        found = f"torch {torch.__version__} with CUDA {torch.version.cuda}"
        return f"{found}: they came with 2.10 and 12.9"
    return None
