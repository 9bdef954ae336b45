# SPDX-License-Identifier: Apache-2.0
"""Grouped products in fp8: rows that are sorted by expert, times the weights of all experts.

::

    rows [n, in]  --one scale a row-->  codes      y  = x · W[e]ᵀ    of experts' codes as they are
    W [experts, out, in]  codes, one scale         dx = dy · W[e]    of their turned codes
                          for each expert          dW[e] = dyᵀ · x   of turned codes of both

Hopper multiplies the codes in its tensor cores, which sum in about 14 bits. A weight has one scale
for each expert, so the same codes serve both directions. Scales of rows are powers of two. dW sums
over rows, so the scales of rows are divided by the largest scale of the expert and multiplied into
the codes of x; this is exact down to the smallest numbers of e4m3. On other devices the operands
are decoded and multiplied in fp32: only the rounding of the sums differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.kernels.grouped import max_blocks
from shardwise.moe import activation as define
from shardwise.moe.activation import Form
from shardwise.precision.fp8 import WIDE, Reads, decode_reference, encode_reference, uses_kernels
from shardwise.precision.fp8_block import counts, note, scaled_problem
from shardwise.precision.fp8_linear import gathered
from shardwise.precision.fp8_weight import Coded

SMALLEST = 2.0**-126  # lower bound of the scale of an expert's sum over rows


@dataclass(frozen=True)
class Into:
    """The destination of a gradient: a new tensor of ``dtype``, or ``out``, which is overwritten or
    (``add``) added to."""

    dtype: torch.dtype
    out: Tensor | None = None
    add: bool = False

    def memory(self, dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """The tensor [experts, out, in] for a product of transposed ``dy`` and ``x``."""
        if self.out is not None:
            return self.out
        return dy.new_empty(len(ends), dy.shape[1], x.shape[1], dtype=self.dtype)

    def take(self, value: Tensor) -> Tensor:
        """Write or add a finished value."""
        if self.out is None:
            return value.to(self.dtype)
        return self.out.add_(value) if self.add else self.out.copy_(value)


def aligned(value: Tensor | None) -> bool:
    """Whether the copy engine can address ``value``: experts begin at multiples of 16 bytes."""
    if value is None:
        return True
    return (value.data_ptr() | value.stride(0) * value.element_size()) % 16 == 0


@dataclass(frozen=True)
class CodedRows:
    """Rows that are sorted by expert and stored as codes, with one scale each."""

    codes: Tensor  # uint8 [rows, columns]
    scales: Tensor  # fp32 [rows]
    dtype: torch.dtype = torch.bfloat16  # of products

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(cls, x: Tensor) -> Self:
        return cls(*quantise_rows(x), x.dtype)

    @classmethod
    def _planned(cls, like: Tensor) -> Self:
        """Memory of the right size for rows like ``like``, on the meta device."""
        scales = like.new_empty(len(like), dtype=torch.float32)
        return cls(like.new_empty(like.shape, dtype=torch.uint8), scales, like.dtype)

    @classmethod
    def activated(cls, z: Tensor, p: Tensor, form: Form) -> Self:
        """``act(z)·p``."""
        if z.is_meta:
            return cls._planned(z[:, : z.shape[1] // form.activation.inputs_per_output])
        if not _by_kernel(z):
            return cls.of(define.activate(z, p, form))
        from shardwise.kernels import grouped_activation, grouped_codes

        if counts() or z.shape[1] > grouped_codes.WIDEST * form.activation.inputs_per_output:
            return cls.of(grouped_activation.forward(z, p, **form.numbers))
        return cls(*grouped_codes.forward(z, p, **form.numbers), z.dtype)

    @classmethod
    def activation_backward(
        cls, dh: Tensor, z: Tensor, p: Tensor, form: Form
    ) -> tuple[Self, Self, Tensor]:
        """``dz``, the recomputed ``h``, and ``dp``."""
        if z.is_meta:
            return cls._planned(z), cls._planned(dh), z.new_empty(len(z), dtype=torch.float32)
        if not _by_kernel(z):
            dz, h, dp = define.activate_backward(dh, z, p, form)
            return cls.of(dz), cls.of(h), dp
        from shardwise.kernels import grouped_activation, grouped_codes

        if counts() or dh.shape[1] > grouped_codes.WIDEST:
            dz, h, dp = grouped_activation.backward(dh, z, p, **form.numbers)
            return cls.of(dz), cls.of(h), dp
        coded, again, dp = grouped_codes.backward(dh, z, p, **form.numbers)
        return cls(*coded, z.dtype), cls(*again, z.dtype), dp

    def weight_gradient(self, x: Self, ends: Tensor, into: Into) -> Tensor:
        """``dyᵀ·x`` [experts, out, in] of each expert's rows; these rows are ``dy``."""
        out = into.memory(self.codes, x.codes, ends)
        if out.is_meta:  # a plan; kernels read turned codes of both sides
            room = WIDE * max_blocks(len(self), len(ends), WIDE)
            held = [codes.new_empty(codes.shape[1], room) for codes in (self.codes, x.codes)]
            del held
            return out
        if not len(self):
            return out if into.add else out.zero_()
        if scaled_problem(out.device) is not None:
            return into.take(self._gradient_reference(x, ends))
        from shardwise.kernels import grouped_codes, grouped_fp8

        folded = grouped_codes.Folded((self.codes, self.scales), (x.codes, x.scales), ends)
        if aligned(out) and (out.dtype == torch.float32 or not into.add):
            grouped_fp8.weight_gradient(folded, out, add=into.add)
            return out
        fresh = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        grouped_fp8.weight_gradient(folded, fresh, add=False)
        return into.take(fresh)

    def _gradient_reference(self, x: Self, ends: Tensor) -> Tensor:
        """The definition of the gradient, in fp32."""
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = [each.split(sizes) for each in (self.codes, x.codes, self.scales * x.scales)]
        results = []
        for left, right, scales in zip(*parts, strict=True):
            largest = scales.amax().clamp(min=SMALLEST) if len(scales) else scales.new_zeros(())
            one = scales.new_ones(1, 1)
            scaled = _decoded(right, one) * (scales / largest)[:, None]
            codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
            results.append(_decoded(left, one).t() @ _decoded(codes, one) * largest)
        return torch.stack(results)


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of codes; scales: one for each row [rows, 1], or one for all [1, 1]."""
    if not len(codes):
        return codes.float()
    block = len(codes) // len(scales), codes.shape[1]
    return decode_reference(codes, scales, block, torch.float32)


def _by_kernel(z: Tensor) -> bool:
    return z.dtype == torch.bfloat16 and scaled_problem(z.device) is None


@dataclass(frozen=True, kw_only=True)
class ExpertCodes:
    """All experts' weights as the right side of grouped products, as codes."""

    shape: torch.Size  # of the weights: [experts, out, in]
    codes: Tensor  # uint8 [experts, n, k]; k is summed over
    scales: Tensor  # fp32 [experts]

    def product(self, x: Tensor | CodedRows, ends: Tensor) -> Tensor:
        """``x · codesᵀ`` [rows, n] for x [rows, k], in the dtype of x."""
        if isinstance(x, Tensor):
            x = CodedRows.of(x)
        codes, scales = x.codes, x.scales
        if codes.is_meta or not len(codes):
            return codes.new_empty(len(codes), self.codes.shape[1], dtype=x.dtype)
        if scaled_problem(codes.device) is None and x.dtype == torch.bfloat16:
            from shardwise.kernels import grouped_fp8

            return grouped_fp8.product(codes, scales, self.codes, self.scales, ends)
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        left = _decoded(codes, scales[:, None])
        parts = [
            rows @ _decoded(one, scale.view(1, 1)).t()
            for rows, one, scale in zip(left.split(sizes), self.codes, self.scales, strict=True)
        ]
        return torch.cat(parts).to(x.dtype)


def is_coded(weight: Tensor) -> bool:
    """Whether a weight is a stack whose codes are multiplied without decoding."""
    return isinstance(weight, Coded) and weight.dim() == 3 and weight.products == "fp8"


def operand(weight: Coded, phase: Reads) -> Any:
    """The operand of the products of ``phase``: the codes of a stack, else decoded values."""
    if not is_coded(weight):
        return weight.decode(phase)
    codes, scales = weight.plane(phase)
    return expert_codes(gathered(codes), scales, weight.shape, phase)


def expert_codes(codes: Tensor, scales: Tensor, shape: torch.Size, phase: Reads) -> ExpertCodes:
    """The weights of a stack of shape [experts, out, in], for the product of ``phase``."""
    experts, rows, columns = shape
    codes = codes.view(shape)
    scales = scales.view(experts, rows // WIDE, columns // WIDE)
    if phase == "backward" and uses_kernels(codes.device):
        from shardwise.kernels import fp8_codes

        codes, _ = fp8_codes.turn(codes, scales)
    elif phase == "backward":
        codes = codes.transpose(-2, -1).contiguous()
    return ExpertCodes(shape=shape, codes=codes, scales=scales[:, 0, 0].contiguous())


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and one scale for each row, a power of two."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if uses_kernels(x.device):
        from shardwise.kernels import fp8_codes

        source = x.to(torch.bfloat16).contiguous()
        fp8_codes.quantise_rows(source, codes, scales, rounding="rceil")
    elif not x.is_meta:
        codes, each = encode_reference(x, (1, x.shape[1]), "rceil")
        scales = each.view(-1)
    note(x, codes)
    return codes, scales


def parts_of(rows: Tensor | CodedRows) -> tuple[Tensor, Tensor | None]:
    """The tensors of rows, for an autograd node to save; see :func:`rows_of`."""
    return (rows.codes, rows.scales) if isinstance(rows, CodedRows) else (rows, None)


def rows_of(kept: Tensor, scales: Tensor | None) -> Any:
    """The inverse of :func:`parts_of`."""
    return kept if scales is None else CodedRows(kept, scales)
