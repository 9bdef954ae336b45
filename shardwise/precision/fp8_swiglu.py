# SPDX-License-Identifier: Apache-2.0
"""A feed-forward with SwiGLU, whose middle exists as fp8 codes alone.

::

    forward    codes of x  ->  gate, up            two products
               gate, up    ->  codes of h          h = silu(gate) · up
               codes of h  ->  y                   a product

    backward   codes of dy ->  dh                  a product
               dh, gate, up -> codes of dgate, dup
               these codes ->  dx                  two products, added

Layer by layer, h, dgate and dup would be written in bf16 and read again for their codes. Autograd
sees the three layers as one node; it keeps gate and up, and the codes of x and h, as the layers do.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.core.compat import plain_attributes
from shardwise.core.uncompiled import operator
from shardwise.precision import fp8_block
from shardwise.precision.fp8 import WIDE
from shardwise.precision.fp8_linear import (
    autocast,
    block_backward,
    block_product,
    gathered,
    quantise,
    shaped,
)
from shardwise.precision.fp8_weight import Coded


def swiglu_mlp(
    x: Tensor,
    gate: nn.Module,
    up: nn.Module,
    down: nn.Module,
    *,
    call: Callable[..., Tensor] | None = None,
) -> Tensor:
    """``down(silu(gate(x)) * up(x))``.

    If the three are linear layers without biases and ``fp8_block`` stores their weights, this is
    one operation, which is faster, and hooks of the three are not called. (Layers that are wrapped
    or replaced are called.) ``call(function, gate, up)`` replaces the call of the product in
    the middle otherwise, for example by one that computes it again in backward.
    """
    layers = (gate, up, down)
    if all(map(_in_codes, layers)) and x.dtype in (torch.bfloat16, torch.float32):
        weights = [layer.weight for layer in layers]
        with plain_attributes():
            return _SwiGLU.apply(autocast(x), *weights)  # type: ignore[no-any-return, no-untyped-call]
    middle = (gate(x), up(x))
    h = _gated(*middle) if call is None else call(_gated, *middle)
    return down(h)  # type: ignore[no-any-return]


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _in_codes(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear whose weight is multiplied in fp8. (A layer that something
    replaced, such as an adapter, is called.)"""
    weight = layer.weight if type(layer) is nn.Linear else None
    return isinstance(weight, Coded) and weight.products == "fp8" and layer.bias is None


@operator(
    "fp8_swiglu(Tensor gate, Tensor up, Tensor codes, Tensor scales) -> (Tensor, Tensor, Tensor)",
    lambda gate, up, codes, scales: (
        gate.new_empty(len(gate), len(codes)),
        *fp8_block.empty(gate, False, WIDE)[2:],
    ),
)
def _forward(gate, up, codes, scales) -> tuple[Tensor, Tensor, Tensor]:
    """h · Wᵀ, and the turned codes of h."""
    h, of_h, turned, of_turned = fp8_block.quantise_swiglu(gate, up)
    y = fp8_block.multiply(h, of_h, gathered(codes), scales, "forward", gate.dtype)
    return (y if len(y) == len(gate) else y[: len(gate)]), turned, of_turned


def _fake_backward(dh, gate, up, weights, x, x_scales, wants_x, dtype) -> list[Tensor]:
    of_x = dh.new_empty((len(dh), weights[0].shape[1]) if wants_x else (0,))
    shape = weights[0].shape if x is not None else (0,)
    return [of_x, *(dh.new_empty(shape, dtype=dtype) for _ in range(2))]


@operator(
    "fp8_swiglu_backward(Tensor dh, Tensor gate, Tensor up, Tensor[] weights, Tensor? x,"
    " Tensor? x_scales, bool wants_x, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def _backward(dh, gate, up, weights, x, x_scales, wants_x, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and of the weights of gate and up, from the turned codes of x. ``weights``
    are codes and scales of both. A result that is not wanted has no elements."""
    of_x = dh.new_empty(0)
    of_weights = [of_x.to(dtype), of_x.to(dtype)]
    halves = fp8_block.quantise_swiglu_backward(dh, gate, up)
    for number, (codes, scales, turned, of_turned) in enumerate(halves):
        if x is not None:
            gradient = fp8_block.weight_gradient(turned, of_turned, x, x_scales, dtype)
            of_weights[number] = gradient
        if wants_x:
            weight = gathered(weights[2 * number]), weights[2 * number + 1]
            part = fp8_block.multiply(codes, scales, *weight, "backward", dh.dtype)
            of_x = of_x.add_(part) if number else part
    return (of_x if len(of_x) == len(dh) or not wants_x else of_x[: len(dh)]), *of_weights


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Coded, up: Coded, down: Coded) -> Tensor:
        ctx.planes = [each.plane("forward") for each in (gate, up, down)]
        ctx.x_shape, ctx.dtype = x.shape, down.dtype
        _, *trained, down_trained = ctx.needs_input_grad
        tokens = x.numel() // x.shape[-1]
        coded, of_coded, *of_x = quantise(x, WIDE if any(trained) else 0)
        middle = [
            block_product(coded, of_coded, codes, scales, x.dtype)[:tokens]
            for codes, scales in ctx.planes[:2]
        ]
        codes, scales = ctx.planes[2]
        y, *of_h = _forward(middle[0], middle[1], codes, scales)
        nothing = (None, None)
        ctx.save_for_backward(
            *middle, *(of_x if any(trained) else nothing), *(of_h if down_trained else nothing)
        )
        return shaped(y, *x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up, x, of_x, h, of_h = ctx.saved_tensors
        wants_x, *wanted = ctx.needs_input_grad
        inner = wants_x or wanted[0] or wanted[1]
        grad = grad.reshape(-1, grad.shape[-1])
        codes, scales = ctx.planes[2]
        dh, of_down = block_backward(grad, codes, scales, h, of_h, inner, ctx.dtype)
        found: list[Tensor | None] = [None, None, None, of_down]
        if inner:
            weights = [tensor for plane in ctx.planes[:2] for tensor in plane]
            found[:3] = _backward(dh, gate, up, weights, x, of_x, wants_x, ctx.dtype)
            found[0] = found[0].view(ctx.x_shape) if wants_x and found[0] is not None else None
        return tuple(
            each if want else None for each, want in zip(found, (wants_x, *wanted), strict=True)
        )
