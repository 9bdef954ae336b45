# SPDX-License-Identifier: Apache-2.0
"""``F.linear`` and ``F.embedding`` over a weight in fp8, and their gradients.

::

    linear      forward    y  = x · Wᵀ         reads the plane of forward
                backward   dx = dy · W         reads the plane of backward
                           dW = dyᵀ · x        in x's dtype, or from codes of dy and x
    embedding   forward    ids [5, 0, 5]       rows 5, 0, 5 of codes and scales  --decode-->  y
                backward   dW = rows of dy, added up by id: the weight is not read or gathered

A plane is looked up each time that it is read, because its memory may be released and gathered
again between forward and backward. An embedding decodes only the rows that are looked up, to the
same values as in the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.precision import fp8_block
from shardwise.precision.fp8 import (
    COLUMN,
    ROW,
    ROW_128,
    SCALES,
    WIDE,
    FP8Error,
    Plane,
    Rounding,
    decode,
    side_of,
)
from shardwise.precision.fp8_products import Emulated, Matmul
from shardwise.precision.fp8_tensor import FP8Tensor, Reads

ops = torch.ops.shardwise  # see fp8_operators.py

_COMPUTE = (torch.bfloat16, torch.float32)  # decoding to these dtypes is exact; to fp16 it is not


# ----------------------------------------------------------------------------------------- linear


class Recipe(NamedTuple):
    """How the three products of a linear layer are computed. For torch.compile the fields are
    constants."""

    # The rounding of the scales of activations and gradients in fp8, by blocks of 1x128. None:
    # activations and gradients stay in their dtype, and the weight is decoded.
    activations: Rounding | None = None
    weight_gradient: str = "bf16"  # or "fp8", if activations are in fp8


DECODED = Recipe()


def fp8_linear(
    x: Tensor,  # [..., columns], bf16 or fp32
    weight: FP8Tensor,  # [rows, columns]
    bias: Tensor | None = None,  # [rows]
    *,
    parameter: Tensor | None = None,
    matmul: Matmul | None = None,
    recipe: Recipe = DECODED,
) -> Tensor:  # [..., rows], in the dtype of x
    """``F.linear`` with a weight in fp8. ``torch.autocast`` casts x and bias as for ``F.linear``.

    Args:
        parameter: receives the weight's gradient in its dtype, rounded once. None: a frozen weight.
        matmul: computes the products of a decoded weight. Default: ``Emulated()``.
        recipe: which products are in fp8.
    """
    rows, columns = weight.shape
    x, bias = _autocast(x), None if bias is None else _autocast(bias)
    problems = []
    if x.dim() == 0 or x.shape[-1] != columns:
        problems.append(f"x of shape {tuple(x.shape)}: its last dimension must be {columns}")
    if x.dtype not in _COMPUTE:
        problems.append(
            f"x of {x.dtype}: weights in fp8 decode to bf16 and fp32; cast x, or autocast "
            f"to torch.bfloat16"
        )
    if x.device != weight.device:
        problems.append(f"x on {x.device}, the weight on {weight.device}: move x there")
    if bias is not None and (tuple(bias.shape) != (rows,) or bias.dtype != x.dtype):
        problems.append(
            f"bias of shape {tuple(bias.shape)}, {bias.dtype}: expected ({rows},), {x.dtype}"
        )
    problems += _parameter_problems(parameter, weight)
    if problems:
        raise FP8Error("; ".join(problems))
    return _Linear.apply(x, parameter, bias, recipe, weight, matmul or Emulated(), "")  # type: ignore[no-any-return, no-untyped-call]


def traced_linear(
    x: Tensor, parameter: Tensor, bias: Tensor | None, recipe: Recipe, place: str
) -> Tensor:
    """:func:`fp8_linear` inside torch.compile, which sees no planes. Operators find the weight by
    ``parameter``; ``place`` says where its codes lie."""
    x, bias = _autocast(x), None if bias is None else _autocast(bias)
    return _Linear.apply(x, parameter, bias, recipe, None, None, place)  # type: ignore[no-any-return, no-untyped-call]


def _autocast(value: Tensor) -> Tensor:
    """``value`` cast as torch casts operands of ``F.linear``. So checks, decoding and tensors saved
    for backward all use the dtype of the computation."""
    kind = value.device.type
    # autocast does not know the meta device of a dry run.
    if kind == "meta" or not torch.is_autocast_enabled(kind) or value.dtype == torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(kind)) if value.is_floating_point() else value


def _parameter_problems(parameter: Tensor | None, weight: FP8Tensor) -> list[str]:
    if parameter is None or parameter.shape == weight.shape:
        return []
    return [f"a parameter of shape {tuple(parameter.shape)} for a weight of {tuple(weight.shape)}"]


class _Linear(torch.autograd.Function):
    """``F.linear`` with a weight in fp8. Inside torch.compile ``weight`` is None: operators find it
    by the parameter."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor | None,
        bias: Tensor | None,
        recipe: Recipe,
        weight: FP8Tensor | None,
        matmul: Matmul | None,
        place: str,
    ) -> Tensor:
        # Not saved as tensors: planes may be released and gathered again before backward.
        ctx.weight, ctx.matmul, ctx.recipe, ctx.x_shape = weight, matmul, recipe, x.shape
        ctx.place = place
        ctx.weight_dtype = None if parameter is None else parameter.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        tokens, trained = x.shape[:-1].numel(), ctx.needs_input_grad[1]
        named = parameter if weight is None else None
        if recipe.activations is None:
            ctx.save_for_backward(named, x if trained else None, None)
            flat = x.reshape(-1, x.shape[-1])
            y = _product(flat, None, named, weight, matmul, bias, "forward", x.dtype, place)
        else:
            by_codes = trained and recipe.weight_gradient == "fp8"
            # A compiler finds out by itself that several layers quantise the same x.
            quantise = fp8_block.quantise_once if named is None else _traced_quantise
            codes, scales, turned, turned_scales = quantise(
                x, True, WIDE if by_codes else 0, recipe.activations
            )
            kept = (turned, turned_scales) if by_codes else (x if trained else None, None)
            ctx.save_for_backward(named, *kept)
            y = _product(codes, scales, named, weight, matmul, None, "forward", x.dtype, place)
            y = y[:tokens] if bias is None else y[:tokens] + bias
        return shaped(y, *x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        named, kept, kept_scales = ctx.saved_tensors
        recipe, weight = ctx.recipe, ctx.weight
        grad = grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = of_bias = None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        by_codes = wants_weight and recipe.weight_gradient == "fp8"
        if recipe.activations is not None and (wants_x or by_codes):
            kept_codes = (kept, kept_scales) if by_codes else (None, None)
            options = (*kept_codes, wants_x, recipe.activations, ctx.weight_dtype)
            if weight is None:
                of_x, of_weight = ops.fp8_linear_backward.default(
                    [grad], [named], *options, ctx.place
                )
            else:
                of_x, of_weight = linear_backward([grad], [weight], *options)
        elif wants_x:
            of_x = _product(
                grad, None, named, weight, ctx.matmul, None, "backward", grad.dtype, ctx.place
            )
        if wants_bias:
            of_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if wants_weight and not by_codes:
            x = kept.reshape(-1, kept.shape[-1])
            of_weight = weight_gradient(grad, x, ctx.weight_dtype)
        return (
            of_x.view(ctx.x_shape) if wants_x and of_x is not None else None,
            of_weight if wants_weight else None,
            of_bias,
            *(None, None, None, None),
        )


def shaped(result: Tensor, *shape: int) -> Tensor:
    """``result.view(shape)`` of a tensor that is used nowhere else. For autograd this is no view:
    autograd refuses ``relu_`` and ``+=`` on a view that a function returns."""
    return torch.ops.aten._unsafe_view.default(result, shape)  # type: ignore[no-any-return]


def _traced_quantise(x: Tensor, rows: bool, turned: int, rounding: Rounding) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    return ops.fp8_quantise.default(flat, rows, turned, rounding)


def linear_backward(
    grads: Sequence[Tensor],  # [tokens, rows], side by side; or dh, gate and up: see gate_first
    weights: Sequence[FP8Tensor],  # [rows, columns], one below another
    x: Tensor | None,  # [columns, tokens], turned codes; None: no gradient of the weight is wanted
    x_scales: Tensor | None,
    wants_x: bool,
    rounding: Rounding,
    dtype: torch.dtype | None,
    gate_first: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(dy · W, dyᵀ · x) with dy in fp8, the second in ``dtype``. A result that is not wanted has no
    elements.

    ``gate_first`` is given if dy are the gradients of gate and up, with h = silu(gate) · up. It
    says whether the weight of gate is the first of the two. ``grads`` are then dh, gate and up.
    """
    grad = grads[0]
    if gate_first is not None:
        dh, gate, up = grads
        codes, scales, turned, turned_scales = fp8_block.quantise_swiglu_backward(
            dh, gate, up, gate_first, rounding
        )
    elif x is None:
        whole = grad if len(grads) == 1 else torch.cat(list(grads), 1)
        codes, scales, *_ = fp8_block.quantise(whole, wants_x, 0, rounding)
    else:
        codes, scales, turned, turned_scales = fp8_block.quantise_beside(grads, wants_x, rounding)
    if wants_x:
        of_x = products(codes, scales, weights, "backward", grad.dtype)
        of_x = of_x if len(of_x) == len(grad) else of_x[: len(grad)]
    else:
        of_x = grad.new_empty(0)
    if x is None:
        return of_x, grad.new_empty(0)
    assert x_scales is not None
    of_weight = fp8_block.weight_gradient(turned, turned_scales, x, x_scales, dtype or grad.dtype)
    return of_x, of_weight


def _product(
    x: Tensor,
    scales: Tensor | None,
    named: Tensor | None,
    weight: FP8Tensor | None,
    matmul: Matmul | None,
    bias: Tensor | None,
    phase: Reads,
    dtype: torch.dtype,
    place: str,
) -> Tensor:
    if weight is None:
        return ops.fp8_product.default(x, scales, named, bias, phase, dtype, place)  # type: ignore[no-any-return]
    return product(x, scales, weight, matmul, bias, phase, dtype)


def product(
    x: Tensor,  # [tokens, features], values or codes
    scales: Tensor | None,  # the scales of codes; None for values
    weight: FP8Tensor,
    matmul: Matmul | None,
    bias: Tensor | None,
    phase: Reads,
    dtype: torch.dtype,
) -> Tensor:
    """x · Wᵀ in forward, dy · W in backward."""
    plane = weight.plane(phase)
    if scales is not None:
        return fp8_block.multiply(x, scales, plane, phase, dtype)
    matmul = matmul or Emulated()
    return matmul.forward(x, plane, bias) if phase == "forward" else matmul.backward(x, plane)


def products(
    codes: Tensor,
    scales: Tensor,
    weights: Sequence[FP8Tensor],  # one below another
    phase: Reads,
    dtype: torch.dtype,
) -> Tensor:
    """x · Wᵀ or dy · W of codes. W is one weight, or several that share x: one product if their
    codes lie one after another in memory, else one product for each."""
    first, *others = weights
    joined = first.joined(others, phase) if others else first.plane(phase)
    if joined is not None:
        return fp8_block.multiply(codes, scales, joined, phase, dtype)
    planes = [weight.plane(phase) for weight in weights]
    if phase == "forward":
        parts = [fp8_block.multiply(codes, scales, plane, phase, dtype) for plane in planes]
        return torch.cat(parts, 1)
    code_parts = codes.split([len(plane.codes) for plane in planes], 1)
    scale_parts = scales.split([len(plane.scales) for plane in planes])
    return sum(  # type: ignore[return-value]
        fp8_block.multiply(part.contiguous(), part_scales, plane, phase, dtype)
        for part, part_scales, plane in zip(code_parts, scale_parts, planes, strict=True)
    )


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


# -------------------------------------------------------------------------------------- embedding


def fp8_embedding(
    ids: Tensor,  # [...], integers
    weight: FP8Tensor,  # [vocab, columns]
    *,
    parameter: Tensor | None = None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # [..., columns]
    """``F.embedding`` with a weight in fp8.

    Args:
        parameter: receives the weight's gradient in its dtype. None: a frozen weight.
        padding_idx: a row that gets no gradient. A negative number counts from the end.
        scale_grad_by_freq: divide each row's gradient by how often the row was looked up.
        dtype: the dtype of the result if there is no parameter.
    """
    vocab = weight.shape[0]
    problems = []
    if ids.dtype not in (torch.int32, torch.int64):
        problems.append(f"ids of {ids.dtype}: row numbers are int32 or int64")
    if ids.device != weight.device:
        problems.append(f"ids on {ids.device}, the weight on {weight.device}: move the ids there")
    if padding_idx is not None and not -vocab <= padding_idx < vocab:
        problems.append(f"padding_idx={padding_idx}: the weight has {vocab} rows")
    problems += _parameter_problems(parameter, weight)
    if problems:
        raise FP8Error("; ".join(problems))
    if parameter is None:
        return lookup(weight.plane("forward"), ids, dtype=dtype)
    padding = -1 if padding_idx is None else padding_idx % vocab
    return _Embedding.apply(parameter, ids, weight, padding, scale_grad_by_freq)  # type: ignore[no-any-return, no-untyped-call]


def lookup_problem(*, max_norm: float | None, sparse: bool) -> str | None:
    """The option of an embedding that a weight in fp8 does not allow; None if all are allowed."""
    if max_norm is not None:
        return (
            f"max_norm={max_norm} rewrites rows of the weight in forward, and codes are made from "
            f"main weights only: renormalise the main weights after the optimizer's step"
        )
    return "sparse=True: gradients are reduced dense; use sparse=False" if sparse else None


def rows_of(plane: Plane, ids: Tensor) -> Plane:
    """The rows ``ids`` [n] (n whole blocks) of a plane of rows or squares: a plane of rows."""
    high = plane.block[0]
    if plane.block == COLUMN:
        raise FP8Error(f"blocks {plane.block}: rows are looked up in planes of rows or squares")
    return Plane(
        codes=plane.codes.index_select(0, ids),
        scales=plane.scales.index_select(0, ids if high == 1 else ids // high),
        block=ROW if SCALES[plane.block] is torch.uint8 else ROW_128,
    )


def lookup(plane: Plane, ids: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The decoded rows [..., columns] for ids [...]."""
    flat = ids.reshape(-1)
    whole_blocks = F.pad(flat, (0, -flat.numel() % side_of([plane.block])))
    rows = decode(rows_of(plane, whole_blocks), dtype=dtype)[: flat.numel()]
    return shaped(rows, *ids.shape, plane.codes.shape[1])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, ids: Tensor, weight: FP8Tensor, padding_idx: int, scale: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.options = weight.shape[0], padding_idx, scale
        return lookup(weight.plane("forward"), ids, dtype=parameter.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        # The function that the backward of F.embedding calls, so the gradient has the same bits.
        summed = torch.ops.aten.embedding_dense_backward(grad, ids, *ctx.options)
        return summed, None, None, None, None
