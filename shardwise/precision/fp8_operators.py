# SPDX-License-Identifier: Apache-2.0
"""Operators for weights in fp8 in the graphs of torch.compile.

A graph does not see planes, because they are gathered and released. A graph sees the parameter, a
leaf without memory for values, and passes it to an operator. When the operator runs, it finds the
weight by the parameter. So one graph serves all equal blocks of a model.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from shardwise.precision import fp8_block
from shardwise.precision.fp8 import FP8Error
from shardwise.precision.fp8_functions import linear_backward, product, products
from shardwise.uncompiled import operator

_weights: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def name(parameter: Tensor, weight: Any) -> None:
    """Let operators find ``weight`` by ``parameter``, or by any view of the same storage."""
    _weights[int(parameter.untyped_storage()._cdata)] = weight


def weight_of(parameter: Tensor) -> Any:
    """The weight of a parameter, or of a view of the parameter."""
    weight = getattr(parameter, "quantised", None)  # most graphs pass the parameter itself
    if weight is None:
        weight = _weights.get(int(parameter.untyped_storage()._cdata))
    if weight is None:
        raise FP8Error(
            f"a compiled graph was run with a parameter of shape {tuple(parameter.shape)} that "
            f"belongs to no group: its model was deleted or rebuilt; compile the new model"
        )
    return weight


@operator(
    "fp8_quantise(Tensor x, bool rows, int turned, str rounding)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, rows, turned, rounding: fp8_block.empty(x, rows, turned),
)
def _quantise(x, rows, turned, rounding) -> fp8_block.Quantised:
    return fp8_block.quantise(x, rows, turned, rounding)


def _fake_product(x, scales, parameter, bias, phase, dtype, place) -> Any:
    return x.new_empty(x.shape[0], parameter.shape[0 if phase == "forward" else 1], dtype=dtype)


@operator(
    "fp8_product(Tensor x, Tensor? scales, Tensor parameter, Tensor? bias, str phase,"
    " ScalarType dtype, str place) -> Tensor",
    _fake_product,
)
def _product(x, scales, parameter, bias, phase, dtype, place) -> Tensor:
    weight = weight_of(parameter)
    matmul = weight.matmul if scales is None else None
    return product(x, scales, weight, matmul, bias, phase, dtype)


def _fake_linears(x, parameters, counts, turned, rounding, dtype) -> list[Tensor]:
    codes, _, *others = fp8_block.empty(x[0].reshape(-1, parameters[0].shape[1]), True, turned)
    rows = iter([parameter.shape[0] for parameter in parameters])
    widths = [sum(itertools.islice(rows, count)) for count in counts]
    return [*others, *(x[0].new_empty(codes.shape[0], width, dtype=dtype) for width in widths)]


@operator(
    "fp8_linears(Tensor[] x, Tensor[] parameters, int[] counts, int turned, str rounding,"
    " ScalarType dtype) -> Tensor[]",
    _fake_linears,
)
def _linears(x, parameters, counts, turned, rounding, dtype) -> Any:
    """[x turned, its scales, then one product for each run of weights]; see fp8_graphs.py.

    ``counts``: the number of weights in each run; the weights of a run lie one after another. If
    ``x`` has two tensors, x is silu(gate) · up. If it has three, x is h · factors · weight. If it
    has one tensor of four dimensions, x is its heads, side by side.
    """
    if len(x) == 3:
        codes, scales, *results = fp8_block.quantise_norm(x[0], x[1], x[2], rounding)
    elif len(x) == 2:
        codes, scales, *results = fp8_block.quantise_swiglu(x[0], x[1], rounding)
    elif x[0].dim() == 4:
        codes, scales, *results = fp8_block.quantise_heads(x[0], rounding)
    else:
        codes, scales, *results = fp8_block.quantise(x[0], True, turned, rounding)
    weights = map(weight_of, parameters)
    for count in counts:
        run = list(itertools.islice(weights, count))
        results.append(products(codes, scales, run, "forward", dtype))
    return results


def _fake_linear_backward(
    grads, parameters, x, x_scales, wants_x, rounding, dtype, place, gate_first=None
) -> tuple[Tensor, Tensor]:
    grad, columns = grads[0], parameters[0].shape[1]
    of_x = grad.new_empty((grad.shape[0], columns) if wants_x else (0,))
    shape = (0,) if x is None else (sum(p.shape[0] for p in parameters), columns)
    return of_x, grad.new_empty(shape, dtype=None if x is None else dtype)


@operator(
    "fp8_linear_backward(Tensor[] grads, Tensor[] parameters, Tensor? x, Tensor? x_scales,"
    " bool wants_x, str rounding, ScalarType? dtype, str place, bool? gate_first=None)"
    " -> (Tensor, Tensor)",
    _fake_linear_backward,
)
def _linear_backward(
    grads, parameters, x, x_scales, wants_x, rounding, dtype, place, gate_first=None
) -> Any:
    weights = list(map(weight_of, parameters))
    return linear_backward(grads, weights, x, x_scales, wants_x, rounding, dtype, gate_first)


@operator(
    "fp8_decode(Tensor parameter) -> Tensor",
    lambda p: torch.empty(p.shape, dtype=p.dtype, device=p.device),
)
def _decode(parameter: Tensor) -> Any:
    return weight_of(parameter).dequantise("forward", dtype=parameter.dtype)
