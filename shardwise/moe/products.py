# SPDX-License-Identifier: Apache-2.0
"""Three implementations of the grouped products: a loop, torch's grouped GEMM, and kernels.

    loop         the definition: one matmul per expert in plain torch; the host waits for counts
    grouped_mm   torch's grouped GEMM and a plain activation: no wait, on any device
    fused        torch's grouped GEMM where it is faster, and our kernels: the activation in the
                 first product's epilogue (or in one pass, where no tile fits), h and dp from one
                 pass over z, weight gradients added in fp32 to the memory that accumulates them

Rows are sorted by expert; ``ends`` [experts] int32 holds the end of each expert's rows. All paths
round at the same places: see ``moe/activation.py``. All checks of inputs run before any kernel.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.uncompiled import uncompiled
from shardwise.kernels import grouped
from shardwise.kernels.grouped import GroupedTile, interpreted
from shardwise.moe import activation as define
from shardwise.moe.activation import Form, wide
from shardwise.moe.coded import ExpertCodes, Into, aligned
from shardwise.moe.weights import ExpertTensor, parameters_of

PathName = Literal["loop", "grouped_mm", "fused"]
Weight = Tensor | ExpertCodes  # of all experts: [experts, out, in], or codes that multiply
Rows = Any  # a Tensor, or CodedRows where the weight is ExpertCodes


class LoopProducts:
    """One expert after another."""

    def linear(self, x: Rows, weight: Weight, ends: Tensor) -> Tensor:
        """``x·Wᵀ`` [rows, out], rounded once; weight [experts, out, in]."""
        if isinstance(weight, ExpertCodes):
            return weight.product(x, ends)
        return self.product(x, weight.transpose(-2, -1), ends)

    def input_gradient(self, dy: Rows, weight: Weight, ends: Tensor) -> Tensor:
        """``dy·W`` [rows, in]."""
        if isinstance(weight, ExpertCodes):
            return weight.product(dy, ends)
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
        self, x: Rows, weight: Weight, bias: Tensor | None, p: Tensor, ends: Tensor, form: Form
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
        if not aligned(into.out) or (into.add and into.dtype != torch.float32):
            return super().weight_gradient(dy, x, ends, into)
        from shardwise.kernels import grouped_weight

        out = into.memory(dy, x, ends)
        grouped_weight.weight_gradient(dy, x, ends, out, add=into.add, tile=self.weight_tile)
        return out

    def activated(
        self, x: Rows, weight: Weight, bias: Tensor | None, p: Tensor, ends: Tensor, form: Form
    ) -> tuple[Tensor, Tensor]:
        if bias is not None:
            bias = bias.contiguous()  # biases in a packed buffer may have gaps between them
        if (tile := _fc1_tile(weight, form, self.fc1_tile)) is not None:
            from shardwise.kernels import grouped_fc1

            assert isinstance(weight, Tensor)
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


def _fc1_tile(weight: Weight, form: Form, tile: GroupedTile | None) -> GroupedTile | None:
    plain = isinstance(weight, Tensor) and weight.is_contiguous() and aligned(weight)
    width = weight.shape[1] // form.activation.inputs_per_output
    gated = form.activation.gated
    return grouped.fc1_tile(width, form.block, gated, tile) if plain and tile else None


def _parts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    if ends.is_meta:  # no counts: one expert gets all rows, which keeps shapes and FLOPs
        sizes = [len(rows)] + [0] * (len(ends) - 1)
    else:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return tuple(rows.split(sizes))


def expert_of(ends: Tensor, num_rows: int) -> Tensor:
    """[rows]: the expert of each row, computed on the device."""
    return torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)


# ------------------------------------------------------------------------------ choice of a path


def path_problems(
    path: PathName,
    *,
    hidden: int,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[str]:
    """The reasons why ``path`` is impossible; an empty list if it is possible."""
    if path == "loop":
        return []
    compute = torch.bfloat16 if device.type == "cuda" and dtype == torch.float32 else dtype
    size = torch.empty((), dtype=compute, device="meta").element_size()
    problems = grouped.size_problems(hidden, width, size)
    if path == "grouped_mm" and compute not in (torch.bfloat16, torch.float16, torch.float32):
        problems.append(f"torch's grouped product does not take {dtype}")
    if path == "fused":
        problems += grouped.device_problems(device, dtype)
    return problems


def make_products(path: PathName) -> LoopProducts:
    kinds: dict[str, type[LoopProducts]] = {
        "loop": LoopProducts,
        "grouped_mm": GroupedProducts,
        "fused": FusedProducts,
    }
    if path == "fused" and grouped.interpreted():
        return FusedProducts(grouped.SMALL_FC1_TILE, grouped.SMALL_WEIGHT_TILE)
    return kinds[path]()


# ------------------------------------------------------------------------------ inputs


def check_sizes(owner: str, **sizes: int) -> None:
    """Raise unless all sizes are positive integers."""
    wrong = [f"{name}={size!r}" for name, size in sizes.items()
             if type(size) is not int or size < 1]  # fmt: skip
    if wrong:
        raise ValueError(f"{owner}({', '.join(wrong)}): give a whole number, 1 or more")


def check_inputs(
    x: Tensor, ends: Tensor, bundles: list[ExpertTensor], num_experts: int, in_features: int
) -> None:
    """Raise for rows, ends or parameters that a forward cannot use; see also :func:`check_ends`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"rows are a {type(x).__name__}: give a tensor [rows, {in_features}]")
    if x.dim() != 2 or x.shape[1] != in_features:
        raise ValueError(
            f"rows of shape {list(x.shape)}: expected [rows, {in_features}], sorted by expert"
        )
    if not isinstance(ends, Tensor):
        raise ValueError(f"ends={ends!r}: give a tensor [{num_experts}] of torch.int32")
    if ends.shape != (num_experts,) or ends.dtype != torch.int32:
        raise ValueError(
            f"ends has shape {list(ends.shape)} and dtype {ends.dtype}; {num_experts} experts need "
            f"[{num_experts}] of torch.int32: the end of each expert's rows"
        )
    _check_parameters(x, bundles, num_experts)


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


def _check_parameters(x: Tensor, bundles: list[ExpertTensor], num_experts: int) -> None:
    """Raise for parameters that kernels cannot address: they step from expert to expert."""
    for bundle in bundles:
        shapes = {tuple(parameter.shape) for parameter in bundle.parameters}
        if len(shapes) > 1 or (bundle.grouped and bundle.parameters[0].shape[0] != num_experts):
            given = " and ".join(map(str, sorted(map(list, shapes))))
            needed = f"[{num_experts}, ...]" if bundle.grouped else "the same shape for all"
            raise ValueError(
                f"parameters of shape {given} for {num_experts} experts: {needed} is needed"
            )
        for parameter in bundle.parameters:
            if not parameter.is_contiguous():
                raise ValueError(
                    f"an expert parameter of shape {list(parameter.shape)} has strides "
                    f"{parameter.stride()}: register it as .contiguous()"
                )
    if autocasts(x):
        return
    others = {parameter.dtype for parameter in parameters_of(bundles)} - {x.dtype}
    if others:
        raise ValueError(
            f"rows are {x.dtype} and parameters {sorted(map(str, others))}: cast the rows or the "
            f"parameters, or run under torch.autocast"
        )


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


class ProductChoice:
    """Chooses the path of a grouped module: ``asked``, or the first path that is possible.

    The choice is made in the first forward, because parameters may be swapped, moved or cast until
    then. A path that is impossible raises ValueError at construction, with every reason.
    """

    def __init__(self, asked: PathName | None, hidden: int, width: int, weight: Tensor) -> None:
        self.asked, self._sizes = asked, (hidden, width)
        self.chosen: tuple[PathName, LoopProducts] | None = None
        self.chosen_for: torch.dtype | None = None
        if asked is None:
            return
        if asked not in get_args(PathName):
            choices = ", ".join(get_args(PathName))
            raise ValueError(f"path={asked!r}: choose from {choices}, or None")
        problems = path_problems(
            asked, hidden=hidden, width=width, device=weight.device, dtype=weight.dtype
        )
        if problems:
            raise _impossible(asked, problems)

    @property
    def path(self) -> PathName | None:
        """The chosen path; before the first forward, ``asked``."""
        return self.asked if self.chosen is None else self.chosen[0]

    def products(self, x: Tensor) -> LoopProducts:
        dtype = compute_dtype(x)  # autocast may change the dtype between forwards
        if self.chosen is None or self.chosen_for not in (None, dtype):
            path = choose_path(self.asked, *self._sizes, x)
            self.chosen, self.chosen_for = (path, make_products(path)), dtype
        return self.chosen[1]

    def reset(self) -> None:
        """Choose again in the next forward: the device or the dtype may have changed."""
        self.chosen = None


def choose_path(asked: PathName | None, hidden: int, width: int, x: Tensor) -> PathName:
    """``asked``, or the first path that is possible; raises if ``asked`` is impossible."""
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
    raise _impossible(asked, problems)


def _impossible(path: PathName | None, problems: list[str]) -> ValueError:
    return ValueError(
        f"path={path!r} is impossible: {'; '.join(problems)}. Choose another path, or None"
    )
