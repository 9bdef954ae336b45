# SPDX-License-Identifier: Apache-2.0
"""A linear layer for each of many experts, applied to rows that are sorted by expert.

    rows   | expert 0 .... | expert 1 .. | expert 3 ........ |        ends = [14, 26, 26, 44]
    times     weight[0]ᵀ      weight[1]ᵀ     weight[3]ᵀ

Weights and biases have a layout each:

    grouped    weight [experts, out, in]         bias [experts, out]
    indexed    weight0, weight1, ... [out, in]   bias0, bias1, ... [out]

A state dict in the other layout is converted on loading (``moe/keys.py``). The state dict of a
first linear holds the order of gate and up in its rows. Another order is converted on loading, and
a state dict without an order is refused.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.core import comm
from shardwise.moe import keys
from shardwise.moe.activation import check_block, convert_gate_up, wide
from shardwise.moe.coded import CodedRows, Into, parts_of, rows_of
from shardwise.moe.delayed import DelayedGradients
from shardwise.moe.products import (
    LoopProducts,
    PathName,
    ProductChoice,
    Rows,
    apply,
    check_ends,
    check_inputs,
    check_sizes,
    compute_dtype,
    expert_of,
)
from shardwise.moe.weights import (
    ExpertShare,
    ExpertTensor,
    WriteGradient,
    as_neighbours,
    as_one,
    declare_matrices,
    parameters_of,
    saved_by,
)

LayoutName = Literal["grouped", "indexed"]


class GroupedLinear(nn.Module):
    """``y = x·W[e]ᵀ + b[e]`` for the rows of each expert ``e``."""

    writes_main_grad = True  # gradients are added to ``main_grad`` of parameters that have one
    multiplies_decoded = True  # weights may be stored in fp8: they are decoded, or codes multiply

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        weight_layout: LayoutName = "grouped",
        bias_layout: LayoutName | None = None,  # None: the layout of the weight
        path: PathName | None = None,  # None: the fastest possible path
        delay_weight_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bias_layout is not None and not bias:
            raise ValueError(f"bias_layout={bias_layout!r}, but there is no bias: pass bias=True")
        for layout in (weight_layout, bias_layout or weight_layout):
            if layout not in get_args(LayoutName):
                raise ValueError(f"layout {layout!r}: choose 'grouped' or 'indexed'")
        check_sizes(
            "GroupedLinear",
            num_experts=num_experts,
            in_features=in_features,
            out_features=out_features,
        )
        if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
            raise ValueError(
                f"dtype={dtype}: expert parameters are floating point of 16 bits or more "
                f"(for MXFP8, wrap with sw.Precision(weights='mxfp8'))"
            )
        self.num_experts = num_experts
        self.in_features, self.out_features = in_features, out_features
        # Where experts are spread over ranks: the number of the first expert on this rank, the
        # number of all experts, and the ranks that exchange tokens.
        self.first_expert, self.total_experts = 0, num_experts
        self.axis: comm.Axis | None = None
        self.has_bias = bias
        self.layouts: dict[str, LayoutName] = {"weight": weight_layout}
        if bias:
            self.layouts["bias"] = bias_layout or weight_layout
        options = {"device": device, "dtype": dtype}
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        for name in self.layouts:
            self._register(name, torch.empty(num_experts, *shapes[name], **options))  # type: ignore[arg-type]
        self._declare()
        self.delay_weight_gradient = delay_weight_gradient
        self.delayed = DelayedGradients()
        weight = self.experts("weight").parameters[0]
        self.choice = ProductChoice(path, in_features, out_features, weight)
        self.reset_parameters()

    def _register(self, name: str, values: Tensor) -> None:
        if self.layouts[name] == "grouped":
            self.register_parameter(name, nn.Parameter(values))
        else:
            for index, value in enumerate(values):  # views of one storage
                self.register_parameter(f"{name}{index}", nn.Parameter(value))

    def _declare(self) -> None:
        """Declare to optimizers which parameters are matrices: grouped biases [experts, out] are
        not."""
        for name, blocks in (("weight", self.row_blocks), ("bias", ())):
            for parameter in self.experts(name).parameters if name in self.layouts else ():
                if name == "bias" or blocks:
                    declare_matrices(parameter, blocks)

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks of rows that are separate matrices; (): all rows form one matrix."""
        return ()

    def reset_parameters(self) -> None:
        self.draw(self.in_features**-0.5)

    @torch.no_grad()
    def draw(self, deviation: float, seed: int | None = None) -> None:
        """Draw fresh weights and zero the biases. With a seed, the values of an expert depend on
        its number alone, not on its rank or on the layout. Without a seed, torch's generator is
        used."""
        weights = self.experts("weight")
        device = weights.parameters[0].device
        if device.type == "meta":
            return  # torch would take a third of a millisecond for each expert
        values = torch.empty(
            self.num_experts,
            self.out_features,
            self.in_features,
            device=device,
            dtype=weights.dtype,
        )
        for index, value in enumerate(values):
            generator = None
            if seed is not None:
                number = seed * self.total_experts + self.first_expert + index
                generator = torch.Generator(device).manual_seed(number)
            nn.init.normal_(value, std=deviation, generator=generator)
        parts = [values] if weights.grouped else list(values)
        for parameter, part in zip(weights.parameters, parts, strict=True):
            parameter.copy_(part)
        for parameter in self.experts("bias").parameters if self.has_bias else ():
            parameter.zero_()

    @property
    def is_spread(self) -> bool:
        """Whether other ranks have other experts."""
        return self.num_experts < self.total_experts

    def spread(self, first: int, count: int, axis: comm.Axis | None = None) -> None:
        """Keep ``count`` experts, beginning with number ``first``; other ranks of ``axis`` keep the
        other experts."""
        if self.is_spread:
            raise ValueError(
                f"this rank has {self.num_experts} of {self.total_experts} experts, from number "
                f"{self.first_expert} on: they are spread already (axis=, spread or keep_share). "
                f"Spread a module once, while it has all experts"
            )
        if first < 0 or count < 1 or first + count > self.total_experts:
            raise ValueError(
                f"spread(first={first}, count={count}): the module has experts 0 to "
                f"{self.total_experts - 1}, and at least one must stay. Choose a range of these"
            )
        kept = {}
        for name in self.layouts:
            bundle = self.experts(name)
            whole = bundle.parameters[0].detach() if bundle.grouped else as_one(bundle.parameters)
            trained = [parameter.requires_grad for parameter in bundle.parameters]
            trained = trained if bundle.grouped else trained[first : first + count]
            kept[name] = whole[first : first + count].clone(), trained
        for name in list(self._parameters):
            delattr(self, name)
        self.num_experts, self.first_expert, self.axis = count, first, axis
        for name, (values, trained) in kept.items():
            self._register(name, values)
            for parameter, trains in zip(self.experts(name).parameters, trained, strict=True):
                parameter.requires_grad_(trains)
        self._declare()

    def experts(self, name: str) -> ExpertTensor:
        """The parameters ``name`` that are registered now. A wrapper may swap parameters."""
        if self.layouts[name] == "grouped":
            return ExpertTensor(parameters=(getattr(self, name),), grouped=True)
        members = tuple(getattr(self, f"{name}{index}") for index in range(self.num_experts))
        return ExpertTensor(parameters=members, grouped=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.choice.reset()
        if any(parameter is None for parameter in self._parameters.values()):
            return self  # a unit moves the parameters, and they stay the same objects
        self._declare()  # on parameters that torch has replaced
        for name, layout in self.layouts.items():
            if layout == "indexed":
                as_neighbours(self.experts(name).parameters)  # type: ignore[arg-type]
        return self

    # ------------------------------------------------------------------ forward and backward

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [rows, in] sorted by expert, ends [experts] int32 -> [rows, out]."""
        bundles = [self.experts(name) for name in self.layouts]
        check_inputs(x, ends, bundles, self.num_experts, self.in_features)
        if not torch.compiler.is_compiling():
            check_ends(ends, len(x))
        delayed = self.delayed if self.delay_weight_gradient else None
        inputs = parameters_of(bundles) if delayed is None else [delayed.anchor(x, self)]
        products = self.choice.products(x)
        return apply(_Linear, x, ends.contiguous(), bundles, products, delayed, *inputs)  # type: ignore[no-any-return]

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the backwards so far."""
        self.delayed.compute()

    def extra_repr(self) -> str:
        layouts = ", ".join(f"{name} {layout}" for name, layout in self.layouts.items())
        return f"{self.num_experts} x {self.in_features} -> {self.out_features}, {layouts}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._declare()  # a copied parameter has lost its declaration

    # ------------------------------------------------------------------ state dicts

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters if self.is_spread and not keep_vars else ():
            destination[f"{prefix}{name}"] = ExpertShare.of(destination[f"{prefix}{name}"])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        problem = self._other_experts(state_dict, prefix)
        if problem is not None and strict:
            errors.append(problem)
            return
        for key, value in state_dict.items():
            if isinstance(value, ExpertShare) and key.startswith(prefix):
                state_dict[key] = value.as_subclass(Tensor)  # ``assign=True`` keeps the type
        self._normalise(state_dict, prefix)
        self._load_normal(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self._declare()  # ``assign=True`` replaces parameters

    def _load_normal(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load from keys in the layout of this module."""
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _other_experts(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """An error message where a state dict has another number of experts; else None."""
        here = str(self.num_experts)
        if self.is_spread:
            here += f" of {self.total_experts} (from number {self.first_expert} on)"
        for name in self.layouts:
            bundle = self.experts(name)
            ndim = bundle.parameters[0].dim() - (1 if bundle.grouped else 0)
            count = keys.num_experts(state_dict, prefix, name, ndim)
            if count not in (None, self.num_experts, self.total_experts):
                return f"'{prefix}{name}' has {count} experts, this module has {here}"
        return None

    def _normalise(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert the keys to this layout, and keep only this rank's experts."""
        for name, layout in self.layouts.items():
            if self.is_spread and keys.holds(state_dict, prefix, name, self.total_experts):
                keys.to_indexed(state_dict, prefix, name, self.total_experts)
                keys.from_one_by_one(
                    state_dict, prefix, name, self.num_experts,
                    first_expert=self.first_expert, layout=layout,
                )  # fmt: skip
            else:
                keys.normalise(state_dict, prefix, name, self.num_experts, layout)


class GateUpLinear(GroupedLinear):
    """A first linear whose rows are gates and ups; its state dict holds their order."""

    gate_up_block: int = 0

    def __init__(self, *args: Any, gate_up_block: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.out_features % 2:
            raise ValueError(f"out_features={self.out_features}: gate and up need an even number")
        check_block(gate_up_block, self.out_features // 2)
        self.gate_up_block = gate_up_block
        self._declare()

    @property
    def row_blocks(self) -> tuple[int, ...]:
        return (self.gate_up_block or self.out_features // 2,) * 2

    def extra_repr(self) -> str:
        return super().extra_repr() + f", gate_up_block={self.gate_up_block}"

    def get_extra_state(self) -> dict[str, int]:
        return {"gate_up_block": self.gate_up_block}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Raise where the loaded tensors have another order. ``load_state_dict`` converts tensors
        before it calls this method."""
        stored = state["gate_up_block"]
        if stored != self.gate_up_block:
            raise ValueError(
                f"gate and up are stored in blocks of {stored} (0: stacked), and this module has "
                f"gate_up_block={self.gate_up_block}: build it with gate_up_block={stored}, or "
                f"convert weights and optimizer states with shardwise.moe.convert_gate_up"
            )

    def _load_normal(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        names = {f"{prefix}{name}" for name, _ in self.named_parameters(recurse=False)}
        given = [key for key in state_dict if key in names]
        extra = state_dict.get(f"{prefix}_extra_state")
        stored = extra.get("gate_up_block") if isinstance(extra, dict) else None
        if given and stored is None:
            errors.append(
                f"'{prefix}_extra_state' does not hold the order of gate and up in "
                f"'{given[0]}': add it with shardwise.moe.declare_gate_up(state_dict, "
                f"'{prefix}', block) (0: stacked)"
            )
            return
        if given and stored != self.gate_up_block:
            assert stored is not None
            state_dict = dict(state_dict)  # the caller's tensors stay as they are
            for key in given:
                dim = -1 if key.removeprefix(prefix).startswith("bias") else -2
                value = state_dict[key]
                if value.shape[dim] != self.out_features:
                    continue  # torch reports the shape
                state_dict[key] = convert_gate_up(value, stored, self.gate_up_block, dim)
            state_dict[f"{prefix}_extra_state"] = self.get_extra_state()
        super()._load_normal(state_dict, prefix, *rest)


class _Linear(torch.autograd.Function):
    """One grouped product. Of its tensors, only the input is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        bundles: list[ExpertTensor],
        products: LoopProducts,
        delayed: DelayedGradients | None,
        *inputs: Tensor,
    ) -> Tensor:
        dtype = compute_dtype(x)
        rows = x.to(dtype).contiguous()
        weight = bundles[0].value(dtype)
        coded: Rows = CodedRows.of(rows) if bundles[0].is_coded else rows
        y = products.linear(coded, weight, ends)
        if len(bundles) > 1:
            y = (wide(y) + bundles[1].value(dtype)[expert_of(ends, len(rows))]).to(dtype)
        kept = parts_of(coded)
        # The parameters are saved only to detect in-place changes.
        ctx.save_for_backward(*kept, ends, *parameters_of(bundles))
        ctx.bundles, ctx.products, ctx.delayed, ctx.x_dtype = bundles, products, delayed, x.dtype
        return y

    @staticmethod
    @once_differentiable  # a second derivative would be silently incomplete
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        kept, scales, ends, *_ = saved_by(ctx)
        bundles, products = ctx.bundles, ctx.products
        dy = dy.contiguous()
        coded = CodedRows.of(dy) if bundles[0].is_coded else dy
        dx = None
        if ctx.needs_input_grad[0]:
            value = bundles[0].value(dy.dtype, "backward")
            dx = products.input_gradient(coded, value, ends).to(ctx.x_dtype)
        rows = rows_of(kept, scales)
        pending = [(bundles[0], weight_writer(products, coded, rows, ends, bundles[0].dtype))]
        if len(bundles) > 1:
            pending.append((bundles[1], bias_writer(products, dy, ends, bundles[1].dtype)))
        if ctx.delayed is not None:
            ctx.delayed.delay(pending)
            return dx, None, None, None, None, None
        gradients = [gradient for bundle, write in pending for gradient in bundle.gradients(write)]
        return dx, None, None, None, None, *gradients


# ------------------------------------------------------------------------------ gradients


def weight_writer(
    products: LoopProducts, dy: Rows, x: Any, ends: Tensor, dtype: torch.dtype
) -> WriteGradient:
    def write(out: Tensor | None, add: bool) -> Tensor:
        into = Into(dtype if out is None else out.dtype, out, add)
        if isinstance(dy, CodedRows):
            return dy.weight_gradient(x, ends, into)
        return products.weight_gradient(dy, x, ends, into)

    return write


def bias_writer(
    products: LoopProducts, dy: Tensor, ends: Tensor, dtype: torch.dtype, p: Tensor | None = None
) -> WriteGradient:
    def write(out: Tensor | None, add: bool) -> Tensor:
        return Into(dtype, out, add).take(products.bias_gradient(dy, ends, p))

    return write
