# SPDX-License-Identifier: Apache-2.0
"""Operators that torch.compile puts into its graphs for weights in fp8.

A graph sees no planes, which come and go: it sees the parameter, a leaf without memory of its own,
and hands it to an operator, which finds the weight by the parameter's storage when it runs. So one
graph serves all blocks of a model that are alike.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.precision import fp8_block
from shardwise.precision.fp8 import FP8Error, Plane
from shardwise.precision.fp8_functions import product
from shardwise.precision.fp8_products import Matmul
from shardwise.precision.fp8_tensor import Reads


class Named(Protocol):
    """A weight that operators find."""

    @property
    def matmul(self) -> Matmul | None: ...

    def plane(self, phase: Reads) -> Plane: ...

    def dequantise(
        self, phase: Reads = "forward", *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor: ...


_weights: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def name(parameter: Tensor, weight: Named) -> None:
    """Let operators find ``weight`` by ``parameter``, or by any view of the same storage."""
    _weights[int(parameter.untyped_storage()._cdata)] = weight


def weight_of(parameter: Tensor) -> Any:
    found = _weights.get(int(parameter.untyped_storage()._cdata))
    if found is None:
        raise FP8Error(
            f"a compiled graph was run with a parameter of shape {tuple(parameter.shape)} that no "
            f"group knows: its model was deleted or rebuilt; compile the new one"
        )
    return found


@torch.library.custom_op("shardwise::fp8_quantise", mutates_args=())
def _quantise(
    x: Tensor, rows: bool, columns: bool, rounding: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fp8_block.quantise(x, rows, columns, rounding)  # type: ignore[arg-type]


@_quantise.register_fake
def _(x: Tensor, rows: bool, columns: bool, rounding: str) -> fp8_block.Quantised:
    return fp8_block.empty(x, rows, columns)


@torch.library.custom_op("shardwise::fp8_product", mutates_args=())
def _product(
    x: Tensor,
    scales: Tensor | None,
    parameter: Tensor,
    bias: Tensor | None,
    phase: str,
    dtype: torch.dtype,
) -> Tensor:
    weight = weight_of(parameter)
    return product(x, scales, weight, weight.matmul, bias, phase, dtype)  # type: ignore[arg-type]


@_product.register_fake
def _(
    x: Tensor,
    scales: Tensor | None,
    parameter: Tensor,
    bias: Tensor | None,
    phase: str,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.shape[0], parameter.shape[0 if phase == "forward" else 1], dtype=dtype)


@torch.library.custom_op("shardwise::fp8_weight_gradient", mutates_args=())
def _weight_gradient(
    grad: Tensor, grad_scales: Tensor, x: Tensor, x_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    return fp8_block.weight_gradient(grad, grad_scales, x, x_scales, dtype)


@_weight_gradient.register_fake
def _(grad: Tensor, grad_scales: Tensor, x: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(grad.shape[0], x.shape[0], dtype=dtype)


@torch.library.custom_op("shardwise::fp8_decode", mutates_args=())
def _decode(parameter: Tensor) -> Tensor:
    weight = weight_of(parameter)
    return weight.dequantise("forward", dtype=parameter.dtype)  # type: ignore[no-any-return]


@_decode.register_fake
def _(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
