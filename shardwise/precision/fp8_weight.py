# SPDX-License-Identifier: Apache-2.0
"""``Coded``: a weight whose memory is fp8 codes and scales, as modules see it.

    F.linear(x, weight, bias)         multiplies by the codes (fp8_linear.py)
    any other function of the weight  the same function of the decoded values, a copy in bf16
    a function that writes to it      refused: every gather encodes the codes from the main weight

For autograd a ``Coded`` is a leaf of the weight's shape in bf16, so the gradient arrives whole, and
once in each backward. torch.compile takes it apart: graphs have codes and scales as inputs, and
equal blocks of a model share one graph.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.compat import make_wrapper, plain_attributes, tree_leaves, tree_map_only
from shardwise.precision.fp8 import Reads
from shardwise.precision.fp8_linear import decoded, linear

Products = Literal["emulated", "native", "fp8"]
Codes = tuple[Tensor, Tensor]  # codes [rows, columns] and scales, both as matrices

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.view.default)
# Writes that would go to a copy, and be lost: ``weight[i] = ...``, ``weight.data = ...``.
_LOST: Any = (Tensor.__setitem__, Tensor.data.__set__)  # type: ignore[attr-defined]
_NAMES = ("codes", "scales", "back_codes", "back_scales")


class Coded(Tensor):
    """A matrix, or a stack of matrices, of bf16 values in fp8."""

    codes: Tensor  # a stack [experts, rows, columns] is one high matrix
    scales: Tensor
    back_codes: Tensor | None  # the plane that backward reads, if it is another one
    back_scales: Tensor | None
    products: Products  # how linear layers multiply by this weight
    called = "a weight"  # in messages

    @classmethod
    def of(
        cls,
        shape: Any,
        forward: Codes,
        backward: Codes | None,
        products: Products,
        requires_grad: bool = False,
    ) -> Self:
        made: Any = make_wrapper(
            cls, shape, dtype=torch.bfloat16, device=forward[0].device, requires_grad=requires_grad
        )
        made.codes, made.scales = forward
        made.back_codes, made.back_scales = backward or (None, None)
        made.products = products
        return made  # type: ignore[no-any-return]

    @classmethod
    def like(cls, other: Coded, requires_grad: bool = False) -> Self:
        """Another tensor over the same codes."""
        backward = None if other.back_codes is None else other.plane("backward")
        forward = other.plane("forward")
        return cls.of(other.shape, forward, backward, other.products, requires_grad)

    def plane(self, phase: Reads) -> Codes:
        """The codes and scales that ``phase`` reads."""
        if phase == "backward" and self.back_codes is not None:
            assert self.back_scales is not None
            return self.back_codes, self.back_scales
        return self.codes, self.scales

    def decode(self, phase: Reads = "forward", dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The values that ``phase`` computes with, in new memory."""
        return decoded(*self.plane(phase), dtype).view(self.shape)

    # ------------------------------------------------------------------ torch

    # No name and no number of a weight is metadata: equal blocks would have a graph each.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(_NAMES[: 2 if self.back_codes is None else 4]), self.products

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, metadata: Any, size: Any, stride: Any) -> Coded:
        tensors = [inner[name] for name in _NAMES if name in inner]
        backward = (tensors[2], tensors[3]) if len(tensors) == 4 else None
        return cls.of(size, (tensors[0], tensors[1]), backward, metadata)

    def _stable_hash_for_caching(self) -> str:  # of compiled graphs on disk
        return f"Coded {tuple(self.shape)} {self.requires_grad} {self.__tensor_flatten__()}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with plain_attributes():
            if func is F.linear:
                return _linear(*args, **kwargs)
            if func in _LOST and isinstance(args[0], Coded):
                raise _refusal(func.__name__, args[0])
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME and (len(args) < 2 or tuple(args[1]) == tuple(args[0].shape)):
            return Coded.like(args[0])
        if func._schema.is_mutable:
            written = [
                kwargs.get(argument.name, args[place] if place < len(args) else None)
                for place, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in tree_leaves(written):
                if isinstance(tensor, Coded):
                    raise _refusal(func._schema.name.removeprefix("aten::"), tensor)
        args, kwargs = tree_map_only(Coded, Coded.decode, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the decoded values: no group would gather codes for a copy."""
        copied = nn.Parameter(self.decode(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({'x'.join(map(str, self.shape))})"  # codes may be released


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Coded) and not isinstance(input, Coded) and weight.dim() == 2:
        return linear(input, weight, bias)
    return F.linear(input, weight, bias)  # of decoded values


def _refusal(operation: str, weight: Coded) -> RuntimeError:
    return RuntimeError(
        f"{operation} writes to {weight.called}, stored in fp8: every gather encodes it from main "
        f"weights. Write to the main weight, outside of forward and after reshard(): to the "
        f"parameter in model.parameters() under torch.no_grad()"
    )
