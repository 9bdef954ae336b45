# SPDX-License-Identifier: Apache-2.0
"""Three implementations of the grouped products: a loop, torch's grouped GEMM, and kernels.

    loop         the definition: one matmul per expert in plain torch; the host waits for counts
    grouped_mm   torch's grouped GEMM and a plain activation: no wait, on any device
    fused        torch's grouped GEMM where it is faster, and our kernels: the activation in the
                 first product's epilogue (or in one pass, where no tile fits), h and dp from one
                 pass over z, weight gradients added in fp32 to the memory that accumulates them

Rows are sorted by expert; ``ends`` [experts] int32 holds the end of each expert's rows. All paths
round at the same places: see ``moe/activation.py``. All checks of inputs run before any kernel.
Weights in fp8 are decoded first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.uncompiled import uncompiled
from shardwise.kernels import grouped
from shardwise.kernels.grouped import GroupedTile, interpreted
from shardwise.moe import activation as define
from shardwise.moe.activation import Form, wide


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


class LoopProducts:
    """One expert after another."""

    def linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """``x·Wᵀ`` [rows, out], rounded once; weight [experts, out, in]."""
        return self.product(x, weight.transpose(-2, -1), ends)

    def input_gradient(self, dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """``dy·W`` [rows, in]."""
        return self.product(dy, weight, ends)

    def product(self, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        """Each expert's rows times its matrix, of [experts, in, out]."""
        out = rows.new_empty(len(rows), matrices.shape[2])
        for left, right, into in zip(_parts(rows, ends), matrices, _parts(out, ends), strict=True):
            torch.mm(left, right, out=into)
        return out

    def weight_gradient(self, dy: Tensor, x: Tensor, ends: Tensor, into: Into) -> Tensor:
        """``dyᵀ·x`` [experts, out, in] of each expert's rows; zeros for an expert without rows."""
        out = into.memory(dy, x, ends)
        for left, right, part in zip(_parts(dy, ends), _parts(x, ends), out, strict=True):
            value = wide(left).T @ wide(right)
            part.add_(value) if into.add else part.copy_(value)
        return out

    def activated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor, ends: Tensor, form: Form
    ) -> tuple[Tensor, Tensor]:
        """``z = x·W1ᵀ + b1`` and ``h = act(z)·p``."""
        z = self.linear(x, weight, ends)
        if bias is not None:
            z = (wide(z) + bias[expert_of(ends, len(x))]).to(z.dtype)
        return z, define.activate(z, p, form)

    def activation_backward(
        self, dh: Tensor, z: Tensor, p: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dz``, the recomputed ``h``, and ``dp``. The memory of ``dh`` may be reused."""
        return define.activate_backward(dh, z, p, form)

    def bias_gradient(self, dy: Tensor, ends: Tensor, p: Tensor | None = None) -> Tensor:
        """[experts, out] fp32: the sum of each expert's rows, weighted by p if p is given."""
        values = wide(dy) if p is None else wide(dy) * p[:, None]
        total = values.new_zeros(len(ends), dy.shape[1])
        return total.index_add_(0, expert_of(ends, len(dy)), values)


class GroupedProducts(LoopProducts):
    """torch's grouped GEMM for the products."""

    def product(self, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices, offs=ends)

    def weight_gradient(self, dy: Tensor, x: Tensor, ends: Tensor, into: Into) -> Tensor:
        if dy.device.type == "cpu":  # on CUDA torch computes in bf16 alone, and rounds the sum
            dy, x = dy.float(), x.float()
        return into.take(F.grouped_mm(dy.T, x, offs=ends))


class FusedProducts(GroupedProducts):
    """Kernels where they are faster, torch's grouped GEMM elsewhere."""

    def __init__(
        self,
        fc1_tile: GroupedTile | None = grouped.FC1_TILE,  # None: torch's product, then a kernel
        weight_tile: GroupedTile | None = None,  # None: chosen by the dtype of the gradient
    ) -> None:
        self.fc1_tile, self.weight_tile = fc1_tile, weight_tile

    def weight_gradient(self, dy: Tensor, x: Tensor, ends: Tensor, into: Into) -> Tensor:
        if not _aligned(into.out) or (into.add and into.dtype != torch.float32):
            return super().weight_gradient(dy, x, ends, into)
        from shardwise.kernels import grouped_weight

        out = into.memory(dy, x, ends)
        grouped_weight.weight_gradient(dy, x, ends, out, add=into.add, tile=self.weight_tile)
        return out

    def activated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor, ends: Tensor, form: Form
    ) -> tuple[Tensor, Tensor]:
        if bias is not None:
            bias = bias.contiguous()  # biases in a packed buffer may have gaps between them
        if (tile := _fc1_tile(weight, form, self.fc1_tile)) is not None:
            from shardwise.kernels import grouped_fc1

            return grouped_fc1.fc1(x, weight, bias, p, ends, tile=tile, **form.numbers)
        from shardwise.kernels import grouped_activation

        z = self.linear(x, weight, ends)
        expert = None if bias is None else expert_of(ends, len(x)).int()
        return z, grouped_activation.forward(z, p, bias=bias, expert=expert, **form.numbers)

    def activation_backward(
        self, dh: Tensor, z: Tensor, p: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        from shardwise.kernels import grouped_activation

        return grouped_activation.backward(dh, z, p, **form.numbers)

    def bias_gradient(self, dy: Tensor, ends: Tensor, p: Tensor | None = None) -> Tensor:
        from shardwise.kernels import grouped_weight

        return grouped_weight.bias_gradient(dy, ends, p)


def _fc1_tile(weight: Tensor, form: Form, tile: GroupedTile | None) -> GroupedTile | None:
    plain = weight.is_contiguous() and _aligned(weight)
    width = weight.shape[1] // form.activation.inputs_per_output
    gated = form.activation.gated
    return grouped.fc1_tile(width, form.block, gated, tile) if plain and tile else None


def _aligned(value: Tensor | None) -> bool:
    """Whether the copy engine can address ``value``: experts begin at multiples of 16 bytes."""
    if value is None:
        return True
    return (value.data_ptr() | value.stride(0) * value.element_size()) % 16 == 0


def _parts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    if ends.is_meta:  # no counts: one expert gets all rows, which keeps shapes and FLOPs
        sizes = [len(rows)] + [0] * (len(ends) - 1)
    else:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return tuple(rows.split(sizes))


def expert_of(ends: Tensor, num_rows: int) -> Tensor:
    """[rows]: the expert of each row, computed on the device."""
    return torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)


LOOP, GROUPED = LoopProducts(), GroupedProducts()


def products_for(x: Tensor, hidden: int, width: int) -> LoopProducts:
    """The fastest products that these rows allow. (Autocast may change their dtype.)"""
    return LOOP if x.is_meta else _products(x.device, compute_dtype(x), hidden, width)


@cache
def _products(device: torch.device, dtype: torch.dtype, hidden: int, width: int) -> LoopProducts:
    # torch's grouped product takes these dtypes, and rows of a multiple of 16 bytes.
    known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not known or hidden * dtype.itemsize % 16 or width * dtype.itemsize % 16:
        return LOOP
    if not grouped.kernels_run(device, dtype):
        return GROUPED
    small = grouped.SMALL_FC1_TILE, grouped.SMALL_WEIGHT_TILE
    return FusedProducts(*small) if interpreted() else FusedProducts()


# ------------------------------------------------------------------------------ inputs


def check_sizes(owner: str, **sizes: int) -> None:
    """Raise unless all sizes are positive integers."""
    wrong = [f"{name}={size!r}" for name, size in sizes.items()
             if type(size) is not int or size < 1]  # fmt: skip
    if wrong:
        raise ValueError(f"{owner}({', '.join(wrong)}): give a whole number, 1 or more")


def check_inputs(x: Tensor, ends: Tensor, num_experts: int, in_features: int) -> None:
    """Raise for rows or ends that a forward cannot use; see also :func:`check_ends`."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != in_features:
        given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"rows {given}: give a tensor [rows, {in_features}], sorted by expert")
    if not isinstance(ends, Tensor) or (ends.shape, ends.dtype) != ((num_experts,), torch.int32):
        raise ValueError(
            f"ends={ends!r}: give a tensor [{num_experts}] of torch.int32, the end of each "
            f"expert's rows"
        )


def check_ends(ends: Tensor, num_rows: int) -> None:
    """Raise where the ends do not fit the rows. A GPU checks this without a wait of the host."""
    if ends.device.type == "cpu":
        values = ends.tolist()
        if values[-1] != num_rows or values != sorted(values) or values[0] < 0:
            raise ValueError(
                f"ends={values} do not add up to the {num_rows} rows: the ends must not decrease, "
                f"and the last must be {num_rows}"
            )
    elif not ends.is_meta:
        torch._assert_async(ends[-1] == num_rows)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


def autocasts(x: Tensor) -> bool:
    """Whether autocast chooses the dtype; it never casts float64."""
    if x.is_meta or x.dtype == torch.float64:
        return False
    return torch.is_autocast_enabled(x.device.type)


@uncompiled
def apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """The output of an autograd function, run between the graphs of torch.compile."""
    return function.apply(*inputs)  # type: ignore[no-untyped-call]
