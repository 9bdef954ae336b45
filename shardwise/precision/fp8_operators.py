# SPDX-License-Identifier: Apache-2.0
"""Operators that torch.compile puts into its graphs for weights in fp8.

A graph sees no planes, which come and go: it sees the parameter, a leaf without memory of its own,
and hands it to an operator, which finds the weight by the parameter's storage when it runs. So one
graph serves all blocks of a model that are alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from shardwise.precision import fp8_block
from shardwise.precision.fp8 import WIDE, FP8Error
from shardwise.precision.fp8_functions import linear_backward, product, products
from shardwise.uncompiled import operator

_weights: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def name(parameter: Tensor, weight: Any) -> None:
    """Let operators find ``weight`` by ``parameter``, or by any view of the same storage."""
    _weights[int(parameter.untyped_storage()._cdata)] = weight


def weight_of(parameter: Tensor) -> Any:
    found = getattr(parameter, "quantised", None)  # a parameter itself, which most graphs bring
    if found is None:
        found = _weights.get(int(parameter.untyped_storage()._cdata))
    if found is None:
        raise FP8Error(
            f"a compiled graph was run with a parameter of shape {tuple(parameter.shape)} that no "
            f"group knows: its model was deleted or rebuilt; compile the new one"
        )
    return found


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
    codes, _, *others = fp8_block.empty(x, True, turned)
    rows = iter([parameter.shape[0] for parameter in parameters])
    widths = [sum(itertools.islice(rows, count)) for count in counts]
    return [*others, *(x.new_empty(codes.shape[0], width, dtype=dtype) for width in widths)]


@operator(
    "fp8_linears(Tensor x, Tensor[] parameters, int[] counts, int turned, str rounding,"
    " ScalarType dtype) -> Tensor[]",
    _fake_linears,
)
def _linears(x, parameters, counts, turned, rounding, dtype) -> Any:
    """x turned, its scales, and the products by weights that lie one after another, ``counts`` of
    them each; see fp8_graphs.py."""
    return _multiplied(fp8_block.quantise(x, True, turned, rounding), parameters, counts, dtype)


def _multiplied(quantised, parameters, counts, dtype) -> Any:
    codes, scales, *results = quantised
    weights = map(weight_of, parameters)
    for count in counts:
        some = list(itertools.islice(weights, count))
        results.append(products(codes, scales, some, "forward", dtype))
    return results


@operator(
    "fp8_swiglu_linears(Tensor gate, Tensor up, Tensor[] parameters, int[] counts, str rounding,"
    " ScalarType dtype) -> Tensor[]",
    lambda gate, up, parameters, counts, *rest: _fake_linears(
        gate, parameters, counts, WIDE, *rest
    ),
)
def _swiglu_linears(gate, up, parameters, counts, rounding, dtype) -> Any:
    """``fp8_linears`` of silu(gate) · up."""
    return _multiplied(fp8_block.quantise_swiglu(gate, up, rounding), parameters, counts, dtype)


def _fake_linear_backward(
    grads, parameters, x, x_scales, wants_x, rounding, dtype, place
) -> tuple[Tensor, Tensor]:
    grad, columns = grads[0], parameters[0].shape[1]
    of_x = grad.new_empty((grad.shape[0], columns) if wants_x else (0,))
    shape = (0,) if x is None else (sum(each.shape[1] for each in grads), columns)
    return of_x, grad.new_empty(shape, dtype=None if x is None else dtype)


@operator(
    "fp8_linear_backward(Tensor[] grads, Tensor[] parameters, Tensor? x, Tensor? x_scales,"
    " bool wants_x, str rounding, ScalarType? dtype, str place) -> (Tensor, Tensor)",
    _fake_linear_backward,
)
def _linear_backward(grads, parameters, x, x_scales, wants_x, rounding, dtype, place) -> Any:
    weights = list(map(weight_of, parameters))
    return linear_backward(grads, weights, x, x_scales, wants_x, rounding, dtype)


@operator(
    "fp8_decode(Tensor parameter) -> Tensor",
    lambda p: torch.empty(p.shape, dtype=p.dtype, device=p.device),
)
def _decode(parameter: Tensor) -> Any:
    return weight_of(parameter).dequantise("forward", dtype=parameter.dtype)
