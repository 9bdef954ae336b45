# SPDX-License-Identifier: Apache-2.0
"""``F.linear`` over a weight in fp8, and its gradients.

::

    forward    y  = x · Wᵀ         reads the codes of the weight
    backward   dx = dy · W         reads the codes of the weight
               dW = dyᵀ · x        in x's dtype, or from codes of dy and x

    products   "emulated"    the weight is decoded, and multiplied in the dtype of x
               "native"      x and dy become MXFP8, and hardware multiplies: see fp8_native.py
               "fp8"         x and dy become codes in blocks of 128: see fp8_block.py

Codes of weights may be released and gathered again between forward and backward. Autograd would
count the gather as a change of a saved tensor, so nodes keep them as attributes. In graphs of
torch.compile codes are inputs, and each product is an operator: a compiler that saw how values are
decoded would keep the values for backward.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.core.uncompiled import operator
from shardwise.precision import fp8_block, fp8_native
from shardwise.precision.fp8 import WIDE, FP8Error, decode, plane_over

_COMPUTE = (torch.bfloat16, torch.float32)  # decoding to these dtypes is exact; to fp16 it is not


def gathered(codes: Tensor) -> Tensor:
    """``codes``; raises if their memory is released, because reading it would end the process."""
    if not codes.untyped_storage().nbytes() and codes.numel():
        raise RuntimeError(
            f"the codes of a weight in fp8 of shape {tuple(codes.shape)} are not gathered: it can "
            f"be read inside its module's forward and backward, or after unshard()"
        )
    return codes


@operator(
    "fp8_decode(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor",
    lambda codes, scales, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
def decoded(codes, scales, dtype) -> Tensor:
    """The values of codes [rows, columns]."""
    return decode(plane_over(gathered(codes), scales), dtype=dtype)


@operator(
    "fp8_product(Tensor x, Tensor codes, Tensor scales, Tensor? bias, str phase, str products)"
    " -> Tensor",
    lambda x, codes, scales, bias, phase, products: x.new_empty(
        x.shape[0], codes.shape[0 if phase == "forward" else 1]
    ),
)
def product(x, codes, scales, bias, phase, products) -> Tensor:
    """x · Wᵀ + bias (forward), or dy · W (backward), of values [tokens, features]."""
    if products == "native":
        return fp8_native.multiply(x, gathered(codes), scales, bias, phase)
    weight = decode(plane_over(gathered(codes), scales), dtype=x.dtype)
    return F.linear(x, weight, bias) if phase == "forward" else torch.mm(x, weight)


@operator(
    "fp8_quantise(Tensor x, bool rows, int turned) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, rows, turned: fp8_block.empty(x, rows, turned),
)
def _quantise(x, rows, turned) -> fp8_block.Quantised:
    return fp8_block.quantise(x, rows, turned)


def quantise(x: Tensor, turned: int) -> fp8_block.Quantised:
    """The codes of x [..., features], and turned codes. (A compiler finds out that several layers
    quantise one x.)"""
    return _quantise(x.reshape(-1, x.shape[-1]), True, turned)  # type: ignore[no-any-return]


@operator(
    "fp8block_product(Tensor x, Tensor x_scales, Tensor codes, Tensor scales, ScalarType dtype)"
    " -> Tensor",
    lambda x, x_scales, codes, scales, dtype: x.new_empty(len(x), codes.shape[0], dtype=dtype),
)
def block_product(x, x_scales, codes, scales, dtype) -> Tensor:
    return fp8_block.multiply(x, x_scales, gathered(codes), scales, "forward", dtype)


def _fake_backward(grad, codes, scales, x, x_scales, wants_x, dtype) -> tuple[Tensor, Tensor]:
    of_x = grad.new_empty((len(grad), codes.shape[1]) if wants_x else (0,))
    return of_x, grad.new_empty((0,) if x is None else codes.shape, dtype=dtype)


@operator(
    "fp8_block_backward(Tensor grad, Tensor codes, Tensor scales, Tensor? x, Tensor? x_scales,"
    " bool wants_x, ScalarType dtype) -> (Tensor, Tensor)",
    _fake_backward,
)
def block_backward(grad, codes, scales, x, x_scales, wants_x, dtype) -> tuple[Tensor, Tensor]:
    """(dy · W, dyᵀ · x), the second in ``dtype``, of turned codes of x [columns, tokens]; None: no
    gradient of the weight is wanted. A result that is not wanted has no elements."""
    coded, of_coded, turned, of_turned = fp8_block.quantise(grad, wants_x, int(x is not None))
    of_x = of_weight = grad.new_empty(0)
    if wants_x:
        weight = gathered(codes), scales
        of_x = fp8_block.multiply(coded, of_coded, *weight, "backward", grad.dtype)
        of_x = of_x if len(of_x) == len(grad) else of_x[: len(grad)]
    if x is not None:
        of_weight = fp8_block.weight_gradient(turned, of_turned, x, x_scales, dtype)
    return of_x, of_weight


def linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` with a weight in fp8 (``Coded``, [rows, columns]), in the dtype of x.
    ``torch.autocast`` casts x and bias as for ``F.linear``."""
    x, bias = autocast(x), None if bias is None else autocast(bias)
    if x.dtype not in _COMPUTE:
        raise FP8Error(
            f"x of {x.dtype}: weights in fp8 decode to bf16 and fp32; cast x, or autocast to "
            f"torch.bfloat16"
        )
    if x.shape[-1] != weight.shape[1]:
        raise FP8Error(f"x of shape {tuple(x.shape)}: its last dimension must be {weight.shape[1]}")
    return _Linear.apply(x, weight, bias, weight.products)  # type: ignore[no-any-return, no-untyped-call]


def autocast(value: Tensor) -> Tensor:
    """``value`` cast as torch casts operands of ``F.linear``. So checks, decoding and tensors saved
    for backward all use the dtype of the computation."""
    kind = value.device.type
    # autocast does not know the meta device of a dry run.
    if kind == "meta" or not torch.is_autocast_enabled(kind) or value.dtype == torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(kind)) if value.is_floating_point() else value


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None, products: str) -> Tensor:
        (codes, scales), ctx.backward_codes = weight.plane("forward"), weight.plane("backward")
        ctx.products, ctx.x_shape, ctx.weight_dtype = products, x.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        trained = ctx.needs_input_grad[1]
        flat = x.reshape(-1, x.shape[-1])
        if products != "fp8":
            ctx.save_for_backward(x if trained else None, None)
            y = product(flat, codes, scales, bias, "forward", products)
            return shaped(y, *x.shape[:-1], y.shape[-1])
        turned = WIDE if trained else 0
        coded, of_coded, *kept = quantise(x, turned)
        ctx.save_for_backward(*(kept if trained else (None, None)))
        y = block_product(coded, of_coded, codes, scales, x.dtype)[: len(flat)]
        y = y if bias is None else y + bias
        return shaped(y, *x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept, of_kept = ctx.saved_tensors
        grad, (codes, scales) = grad.reshape(-1, grad.shape[-1]), ctx.backward_codes
        of_x = of_weight = of_bias = None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if ctx.products == "fp8":
            if wants_x or wants_weight:
                if not wants_weight:
                    kept = of_kept = None
                of_x, of_weight = block_backward(
                    grad, codes, scales, kept, of_kept, wants_x, ctx.weight_dtype
                )
        else:
            if wants_x:
                of_x = product(grad, codes, scales, None, "backward", ctx.products)
            if wants_weight:
                of_weight = weight_gradient(
                    grad, kept.reshape(-1, kept.shape[-1]), ctx.weight_dtype
                )
        if wants_bias:
            of_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (
            of_x.view(ctx.x_shape) if wants_x and of_x is not None else None,
            of_weight if wants_weight else None,
            of_bias,
            None,
        )


def shaped(result: Tensor, *shape: int) -> Tensor:
    """``result.view(shape)`` of a tensor that is used nowhere else. For autograd this is no view:
    autograd refuses ``relu_`` and ``+=`` on a view that a function returns."""
    return torch.ops.aten._unsafe_view.default(result, shape)  # type: ignore[no-any-return]


def weight_gradient(
    grad: Tensor,  # [tokens, rows]
    x: Tensor,  # [tokens, columns]
    dtype: torch.dtype,
) -> Tensor:
    """dyᵀ · x [rows, columns] in ``dtype``, summed in fp32 and rounded once."""
    left = grad.t()
    if dtype == x.dtype:
        return torch.mm(left, x)
    if dtype == torch.float32 and x.is_cuda:
        out = torch.empty(left.shape[0], x.shape[1], dtype=dtype, device=x.device)
        return torch.mm(left, x, out_dtype=dtype, out=out)
    return torch.mm(left.float(), x.float()).to(dtype)
