# SPDX-License-Identifier: Apache-2.0
"""The feed-forwards of all experts at once: two grouped products around an activation (``mlp.py``).

The module is one autograd node. Its inputs are the Parameter objects that the two linears have when
forward runs; the linears are not called. In a graph of torch.compile the module is one operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.uncompiled import uncompiled
from shardwise.moe.activation import Activation, Form
from shardwise.moe.delayed import DelayedGradients
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear, LayoutName
from shardwise.moe.mlp import MLP, Work, graph_mlp
from shardwise.moe.products import (
    LoopProducts,
    check_ends,
    check_inputs,
    check_sizes,
    compute_dtype,
    products_for,
)
from shardwise.moe.weights import ExpertTensor, parameters_of


class FullPrecision:
    """Protects a tensor from the precision policy of a wrapped module, which casts plain tensors.
    Router weights must stay fp32, whatever the dtype of the rows."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class GroupedMLP(nn.Module):
    """``num_experts`` feed-forwards of ``hidden -> width -> hidden`` on rows sorted by expert.

    ``gate_up_block``: 0: gate and up are stacked in the first weight; else the size of the blocks
    in which they alternate. ``products``: how products are computed, if not in the fastest way.
    """

    products: LoopProducts | None = None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        *,
        activation: Activation,
        gate_up_block: int = 0,
        bias: bool = False,
        weight_layout: LayoutName = "grouped",
        bias_layout: LayoutName | None = None,
        delay_weight_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(activation, Activation):
            raise ValueError(
                f"activation={activation!r}: give swiglu(), clamped_swiglu(...), "
                f"clamped_quick_geglu(...) or squared_relu() of shardwise.moe"
            )
        if gate_up_block and not activation.gated:
            raise ValueError(f"gate_up_block={gate_up_block}: {activation.kind} has no gate")
        check_sizes("GroupedMLP", num_experts=num_experts, hidden=hidden, width=width)
        self.num_experts, self.hidden, self.width = num_experts, hidden, width
        self.activation, self.gate_up_block = activation, gate_up_block
        options: dict[str, Any] = {
            "bias": bias,
            "weight_layout": weight_layout,
            "bias_layout": bias_layout,
            "device": device,
            "dtype": dtype,
        }
        if activation.gated:
            self.fc1: GroupedLinear = GateUpLinear(
                num_experts, hidden, 2 * width, gate_up_block=gate_up_block, **options
            )
        else:
            self.fc1 = GroupedLinear(num_experts, hidden, width, **options)
        self.fc2 = GroupedLinear(num_experts, width, hidden, **options)
        self.delay_weight_gradient = delay_weight_gradient
        self.delayed = DelayedGradients()

    def forward(
        self, x: Tensor, ends: Tensor, p: Tensor | FullPrecision, *, delay: bool | None = None
    ) -> Tensor:
        """x [rows, hidden] sorted by expert, ends [experts] int32, p [rows] fp32 -> like x.

        ``delay``: whether the weight gradients of this call are delayed; None: as the module's
        ``delay_weight_gradient`` says.
        """
        p = p.value if isinstance(p, FullPrecision) else p
        if not isinstance(p, Tensor):
            raise ValueError(
                f"router weights p={p!r}: give a tensor [{len(x)}] of torch.float32, one per row"
            )
        bundles, form = self._bundles(), Form(self.activation, self.gate_up_block)
        check_inputs(x, ends, self.num_experts, self.hidden)
        sums = torch.promote_types(x.dtype, torch.float32)
        if p.shape != (len(x),) or p.dtype not in (torch.float32, sums):
            raise ValueError(
                f"router weights of shape {list(p.shape)} and {p.dtype}: expected [{len(x)}] of "
                f"torch.float32, one per row (FullPrecision(p), where a policy casts inputs)"
            )
        delays = self.delay_weight_gradient if delay is None else delay
        p, ends = p.contiguous(), ends.contiguous()
        compiling = torch.compiler.is_compiling()
        if compiling and not delays and all(bundle.in_graphs for bundle in bundles):
            return graph_mlp(x.to(compute_dtype(x)).contiguous(), p, ends, form, bundles)
        if not compiling:
            check_ends(ends, len(x))
        return self._compute(x, p, ends, bundles, form, delays)

    @uncompiled
    def _compute(
        self,
        x: Tensor,
        p: Tensor,
        ends: Tensor,
        bundles: list[ExpertTensor],
        form: Form,
        delays: bool,
    ) -> Tensor:
        """The output of the autograd node, which runs between the graphs of torch.compile."""
        parameters = parameters_of(bundles)
        inputs = [self.delayed.anchor(x, parameters)] if delays else parameters
        products = self.products or products_for(x, self.hidden, self.width)
        work = Work(bundles, products, form, self.delayed.delay if delays else None)
        return MLP.apply(x, p, ends, work, *inputs)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def ep(self) -> int:
        """The number of ranks over which the experts are spread."""
        return self.fc1.total_experts // self.num_experts

    def spread(self, first: int, count: int, axis: comm.Axis | None = None) -> None:
        """Keep ``count`` experts, beginning with number ``first``; other ranks of ``axis`` keep the
        other experts."""
        for linear in (self.fc1, self.fc2):
            linear.spread(first, count, axis)
        self.num_experts = count

    def _bundles(self) -> list[ExpertTensor]:
        """W1, W2, and with biases also b1, b2."""
        names = ["weight", "bias"] if self.fc1.has_bias else ["weight"]
        return [linear.experts(name) for name in names for linear in (self.fc1, self.fc2)]

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the backwards so far: those of the second linear,
        then those of the first. Then complete each parameter once."""
        self.delayed.compute()
