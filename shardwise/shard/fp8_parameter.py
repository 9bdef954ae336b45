# SPDX-License-Identifier: Apache-2.0
"""``FP8Parameter``: a parameter whose values are fp8 planes, as forward sees it.

    nn.Linear: F.linear(x, weight, bias)    -->  fp8_linear(x, planes, bias)   multiplies by codes
    nn.Embedding: F.embedding(ids, weight)  -->  fp8_embedding(ids, planes)    decodes some rows
    any other function of the weight        -->  the same of decode(planes)    in bf16

Autograd sees an ordinary leaf of the weight's shape in bf16. So the gradient arrives whole, and
once in each backward, however often the weight was used. The leaf has no memory for values.
torch.compile traces the same functions, with operators that find the planes by the leaf
(fp8_operators.py).
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.moe.weights import QuantisedParameter
from shardwise.precision import fp8_operators
from shardwise.precision.fp8 import FP8Error
from shardwise.precision.fp8_functions import (
    DECODED,
    Recipe,
    fp8_embedding,
    fp8_linear,
    lookup_problem,
    traced_linear,
)
from shardwise.precision.fp8_tensor import FP8Tensor
from shardwise.shard.whole_parameter import WholeParameter


class FP8Parameter(WholeParameter, QuantisedParameter):
    """A parameter as forward sees it. Its values are the planes of ``quantised``.

    ``F.linear`` multiplies by the planes, and ``F.embedding`` looks rows up. Any other function
    that reads values gets decoded values in bf16, the values that forward computes with. The
    gradient of the decoded values is the gradient of this parameter. Decoded values (``.data``,
    ``.detach()``, a slice) are a copy. A write to the parameter itself is refused.
    """

    recipe: Recipe | None = DECODED  # None: rows are looked up, and nothing multiplies by them
    # The size of the buffer, the address of the codes and their number. A string, because
    # torch.compile would make variables of numbers.
    place = "0 0 0"

    @staticmethod
    def of(
        weight: Any, requires_grad: bool, recipe: Recipe | None, device: torch.device
    ) -> FP8Parameter:
        parameter = FP8Parameter(torch.empty(0, device=device), requires_grad=requires_grad)
        parameter.quantised, parameter.recipe = weight, recipe
        parameter.codes_in_gradient = weight.coding[1]
        return parameter

    def show(self, memory: Tensor) -> None:
        super().show(memory)
        fp8_operators.name(memory, self.quantised)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return _traced(func, args, kwargs)
        # While compiling without Dynamo, a compiler inspects the parameter.
        if _reads_no_values_cached(func) or torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        # A recomputation of torch's saves parameters as they are: graphs find the planes by them.
        if func is Tensor.detach and _is_saved(sys._getframe(1)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _on_decoded(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the decoded values: no group would gather planes for a copy."""
        copied = nn.Parameter(self.quantised.dequantise(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"FP8Parameter({'x'.join(map(str, self.quantised.shape))}, {self.quantised.format})"


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    input, bias = _decoded(input), _decoded(bias)
    if not isinstance(weight, FP8Parameter) or weight.recipe is None:
        return F.linear(input, _decoded(weight), bias)
    if torch.compiler.is_dynamo_compiling():
        return traced_linear(input, weight, bias, weight.recipe, weight.place)
    return fp8_linear(
        input,
        weight.quantised,
        bias,
        parameter=weight if weight.requires_grad else None,
        matmul=weight.quantised.matmul,
        recipe=weight.recipe,
    )


def _traced(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function while torch.compile traces. The trace never sees the planes."""
    with torch._C.DisableTorchFunctionSubclass():
        if func is F.linear:
            return _linear(*args, **kwargs)
        if _reads_no_values(func):
            return func(*args, **kwargs)
        return _on_decoded(func, args, kwargs)


def _on_decoded(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on decoded values; raise if it writes to a parameter."""
    for written in _written(func, args, kwargs):
        if isinstance(written, FP8Parameter):
            weight = written.quantised
            raise RuntimeError(
                f"{func.__name__} writes to '{weight.name}', which is stored in {weight.format}: "
                f"every gather encodes it from the main weight. Write to the main weight, outside "
                f"of forward and after reshard(): to the parameter in model.parameters() under "
                f"torch.no_grad()"
            )
    args, kwargs = tree_map(_decoded, (args, kwargs))
    return func(*args, **kwargs)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    assert isinstance(weight, FP8Parameter), "ids are integers, which are never stored in fp8"
    problem = lookup_problem(max_norm=max_norm, sparse=sparse)
    if problem is not None:
        raise FP8Error(f"'{weight.quantised.name}' is stored in fp8, which excludes {problem}")
    return fp8_embedding(
        input,
        weight.quantised,
        parameter=weight if weight.requires_grad else None,
        padding_idx=padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
        dtype=weight.dtype,
    )


# The attributes of a tensor that return values. All other attributes describe the tensor.
_VALUES = ("T", "H", "mT", "mH", "real", "imag", "data")
# Methods that read no values.
_FACTS = (
    *("dim", "element_size", "get_device", "ndimension", "nelement", "numel", "size", "stride"),
    *("is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "storage_offset"),
    *("untyped_storage", "__hash__", "__len__", "_is_view"),
)


# Methods that write, beside those whose names end in a single "_".
_WRITES = ("__setitem__", "__idiv__", "__ifloordiv__", "__imod__", "__ipow__", "__itruediv__")


def _written(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that ``func`` writes to: ``out``, and the first argument if torch's rules for
    names say so."""
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__") and name not in _FACTS
    written = [kwargs.get("out")]
    if inplace or name in _WRITES or kwargs.get("inplace"):
        written += [*args, *kwargs.values()][:1]  # a list of tensors for torch._foreach_mul_
    return tree_leaves(written)


def _reads_no_values(func: Callable[..., Any]) -> bool:
    if getattr(func, "namespace", "") == "shardwise":  # our operators find the planes themselves
        return True
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VALUES  # type: ignore[attr-defined]
    return name in ("__set__", "__delete__") or name in _FACTS


# Called for each operator of a graph.
_reads_no_values_cached = functools.lru_cache(maxsize=1024)(_reads_no_values)


def _decoded(value: Any) -> Any:
    if not isinstance(value, FP8Parameter):
        return value
    weight = None if torch.compiler.is_dynamo_compiling() else value.quantised
    if torch.is_grad_enabled() and value.requires_grad:
        return _Decode.apply(value, weight)  # type: ignore[no-untyped-call]
    return _values(value, weight)


def _is_saved(caller: Any) -> bool:
    """Whether a checkpoint of torch, in this frame, saves a tensor that it recomputed."""
    return caller.f_globals is vars(torch.utils.checkpoint) and caller.f_code.co_name == "pack_hook"


def _values(parameter: Tensor, weight: FP8Tensor | None) -> Tensor:
    if weight is None:
        return torch.ops.shardwise.fp8_decode.default(parameter)  # type: ignore[no-any-return]
    return weight.dequantise("forward")


class _Decode(torch.autograd.Function):
    """The values that forward computes with. Their gradient is the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, weight: FP8Tensor | None) -> Tensor:
        return _values(parameter, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
