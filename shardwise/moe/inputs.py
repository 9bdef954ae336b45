# SPDX-License-Identifier: Apache-2.0
"""Checks of the inputs of a grouped module, and the choice of its dtype and path.

All checks run before a kernel does, and name what is wrong.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from shardwise.kernels.grouped import interpreted
from shardwise.moe.products import LoopProducts, PathName, make_products, path_problems
from shardwise.moe.weights import ExpertTensor, QuantisedParameter


def check_sizes(owner: str, **sizes: int) -> None:
    """Raise for sizes that are no positive integers, at construction."""
    wrong = [
        f"{name}={size!r}" for name, size in sizes.items() if type(size) is not int or size < 1
    ]
    if wrong:
        raise ValueError(f"{owner}({', '.join(wrong)}): a whole number, 1 or more")


def check_inputs(
    x: Tensor, ends: Tensor, bundles: list[ExpertTensor], num_experts: int, in_features: int
) -> None:
    """Raise for rows, ends or parameters that a forward can't use."""
    _check_rows(x, in_features)
    _check_ends(ends, num_experts, len(x))
    _check_parameters(x, bundles, num_experts)


def _check_rows(x: Tensor, in_features: int) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"rows are a {type(x).__name__}: give a tensor [rows, {in_features}]")
    if x.dim() != 2 or x.shape[1] != in_features:
        raise ValueError(
            f"rows of shape {list(x.shape)}: expected [rows, {in_features}], sorted by expert"
        )


def _check_ends(ends: Tensor, num_experts: int, num_rows: int) -> None:
    """Raise where counts do not add up to the rows; a device checks this without a wait."""
    if not isinstance(ends, Tensor):
        raise ValueError(f"ends={ends!r}: give a tensor [{num_experts}] of torch.int32")
    if ends.shape != (num_experts,) or ends.dtype != torch.int32:
        raise ValueError(
            f"ends has shape {list(ends.shape)} and dtype {ends.dtype}; {num_experts} experts need "
            f"[{num_experts}] of torch.int32, where each expert's rows end"
        )
    if ends.device.type == "cpu":
        values = ends.tolist()
        if values[-1] != num_rows or values != sorted(values) or values[0] < 0:
            raise ValueError(
                f"ends={values} do not add up to the {num_rows} rows: they must not fall, and the "
                f"last must be {num_rows}"
            )
    elif not ends.is_meta:
        torch._assert_async(ends[-1] == num_rows)


def _check_parameters(x: Tensor, bundles: list[ExpertTensor], num_experts: int) -> None:
    """Raise for parameters that kernels, which step from expert to expert, can't address."""
    for bundle in bundles:
        shapes = {tuple(parameter.shape) for parameter in bundle.parameters}
        if len(shapes) > 1 or (bundle.grouped and bundle.parameters[0].shape[0] != num_experts):
            raise ValueError(
                f"parameters of shape {' and '.join(map(str, sorted(map(list, shapes))))} for "
                f"{num_experts} experts: {f'[{num_experts}, ...]' if bundle.grouped else 'one'} is "
                f"needed"
            )
        for parameter in bundle.parameters:
            if not isinstance(parameter, QuantisedParameter) and not parameter.is_contiguous():
                raise ValueError(
                    f"an expert parameter of shape {list(parameter.shape)} has strides "
                    f"{parameter.stride()}: register it as .contiguous()"
                )
    if autocasts(x):
        return
    others = {one.dtype for bundle in bundles for one in bundle.parameters} - {x.dtype}
    if others:
        raise ValueError(
            f"rows are {x.dtype} and parameters {sorted(map(str, others))}: cast one of them, or "
            f"run under torch.autocast"
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


def autocasts(x: Tensor) -> bool:
    """Whether autocast chooses the dtype; it never casts float64."""
    if x.is_meta or x.dtype == torch.float64:
        return False
    return torch.is_autocast_enabled(x.device.type)


def apply(function: type[torch.autograd.Function], x: Tensor, *rest: Any) -> Any:
    """The output of an autograd function. torch.compile does not trace into it on the CPU: there a
    traced grouped product takes only bf16, and the loop reads counts."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return _untraced(function, x, *rest)
    return function.apply(x, *rest)  # type: ignore[no-untyped-call]


@_disable_dynamo
def _untraced(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


class ProductChoice:
    """The products of a grouped module, on the path asked for or on the first possible one.

    The choice is made in the first forward: parameters may be swapped, moved or cast before. An
    impossible path is refused at construction, with every reason.
    """

    def __init__(self, asked: PathName | None, hidden: int, width: int, weight: Tensor) -> None:
        self.asked, self._sizes = asked, (hidden, width)
        self.chosen: tuple[PathName, LoopProducts] | None = None
        self.chosen_for: torch.dtype | None = None
        if asked is not None and asked not in get_args(PathName):
            choices = ", ".join(get_args(PathName))
            raise ValueError(f"path={asked!r}: choose from {choices}, or None")
        if asked is not None:
            problems = path_problems(
                asked, hidden=hidden, width=width, device=weight.device, dtype=weight.dtype
            )
            if problems:
                raise ValueError(f"path={asked!r} is impossible here: " + "; ".join(problems))

    @property
    def path(self) -> PathName | None:
        """The path that computes the products; before the first forward, the one asked for."""
        return self.asked if self.chosen is None else self.chosen[0]

    def products(self, x: Tensor) -> LoopProducts:
        dtype = compute_dtype(x)  # autocast may change the dtype between forwards
        if self.chosen is None or self.chosen_for not in (None, dtype):
            path = choose_path(self.asked, *self._sizes, x)
            self.chosen, self.chosen_for = (path, make_products(path)), dtype
        return self.chosen[1]

    def reset(self) -> None:
        """Choose again in the next forward: another device or dtype may need another path."""
        self.chosen = None


def choose_path(asked: PathName | None, hidden: int, width: int, x: Tensor) -> PathName:
    """The path asked for, or the first possible one; raises for a path that is impossible."""
    if x.is_meta:
        return "loop"  # only shapes are computed
    dtype = compute_dtype(x)
    for path in (asked,) if asked is not None else ("fused", "grouped_mm", "loop"):
        problems = path_problems(path, hidden=hidden, width=width, device=x.device, dtype=dtype)
        if path == "fused" and x.device.type == "cpu" and not problems:
            problems = [] if interpreted() else ["rows are on the CPU"]
        if path == "fused" and x.device.type == "cuda" and dtype != torch.bfloat16:
            problems.append(f"rows are {dtype}: kernels compute in torch.bfloat16")
        if not problems:
            return path
    raise ValueError(f"path={asked!r} is impossible here: " + "; ".join(problems))
