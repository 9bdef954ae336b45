# SPDX-License-Identifier: Apache-2.0
"""The feed-forwards of all experts at once: two grouped products around an activation (``mlp.py``).

On every path the module is one autograd node, over the Parameter objects that its two linears have
at the time of the forward; in a graph of torch.compile it is one operator.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.moe.activation import Activation, Form
from shardwise.moe.delayed import DelayedGradients
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear, LayoutName
from shardwise.moe.mlp import MLP, Work, described, graph_mlp
from shardwise.moe.products import (
    PathName,
    ProductChoice,
    apply,
    check_ends,
    check_inputs,
    check_sizes,
    compute_dtype,
)
from shardwise.moe.weights import ExpertTensor
from shardwise.notices import warn_once

logger = logging.getLogger(__name__)

# The parameters, the settings and whether codes are kept: of experts in a graph of torch.compile.
Inside = tuple[list[Tensor], str, bool]


class FullPrecision:
    """A tensor that no precision policy casts on its way into a module. Router weights are fp32
    whatever the dtype of the rows, and a wrapped module casts only plain tensors."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class GroupedMLP(nn.Module):
    """``num_experts`` feed-forwards of ``hidden -> width -> hidden`` on rows sorted by expert.

    ``path``: 'fused', 'grouped_mm' or 'loop' (``moe/products.py``); None takes the first possible
    path, which :attr:`path` then names. An impossible path is refused here, with every reason.
    ``gate_up_block``: 0 for gate and up stacked in the first weight, or the size of the blocks in
    which they alternate.
    """

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
        path: PathName | None = None,
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
        weight = self.fc1.experts("weight").parameters[0]
        self.choice = ProductChoice(path, hidden, width, weight)

    @property
    def path(self) -> PathName | None:
        """The path that computes the products; before the first forward, the one asked for."""
        return self.choice.path

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.choice.reset()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(
        self, x: Tensor, ends: Tensor, p: Tensor | FullPrecision, *, delay: bool | None = None
    ) -> Tensor:
        """x [rows, hidden] sorted by expert, ends [experts] int32, p [rows] fp32 -> like x.

        ``delay``: whether this call's weight gradients are delayed; None: the module's
        ``delay_weight_gradient``.
        """
        p = p.value if isinstance(p, FullPrecision) else p
        if not isinstance(p, Tensor):
            raise ValueError(
                f"router weights p={p!r}: give a tensor [{len(x)}] of torch.float32, one per row"
            )
        self._run_inner_hooks()
        bundles = self._bundles()
        check_inputs(x, ends, bundles, self.num_experts, self.hidden)
        sums = torch.promote_types(x.dtype, torch.float32)
        if p.shape != (len(x),) or p.dtype not in (torch.float32, sums):
            raise ValueError(
                f"router weights of shape {list(p.shape)} and {p.dtype}: expected [{len(x)}] of "
                f"torch.float32, one per row (FullPrecision(p), where a policy casts inputs)"
            )
        delays = self.delay_weight_gradient if delay is None else delay
        p, ends = p.contiguous(), ends.contiguous()
        compiling = torch.compiler.is_compiling()
        if compiling and not delays and (inside := self.in_graph()) is not None:
            return graph_mlp(x.to(compute_dtype(x)).contiguous(), p, ends, *inside)
        if not compiling:
            check_ends(ends, len(x))
        delayed = self.delayed if delays else None
        parameters = [parameter for bundle in bundles for parameter in bundle.parameters]
        inputs = parameters if delayed is None else [delayed.anchor(x, self)]
        work = Work(bundles, self.choice.products(x), self._form, delayed)
        return apply(MLP, x, p, ends, work, *inputs)  # type: ignore[no-any-return]

    @property
    def _form(self) -> Form:
        return Form(self.activation, self.gate_up_block)

    def in_graph(self) -> Inside | None:
        """The arguments of an operator in a graph; None where the parameters cannot be in one."""
        bundles = self._bundles()
        if not all(bundle.in_graphs for bundle in bundles):
            return None
        parameters = [parameter for bundle in bundles for parameter in bundle.parameters]
        return parameters, described(self.choice.asked, self._form, bundles), bundles[0].keeps_codes

    @property
    def ep(self) -> int:
        """The number of ranks over which the experts are spread."""
        return self.fc1.total_experts // self.num_experts

    def spread(self, first: int, count: int, axis: comm.Axis | None = None) -> None:
        """Keep ``count`` experts from number ``first`` on; ranks of ``axis`` have the others."""
        for linear in (self.fc1, self.fc2):
            linear.spread(first, count, axis)
        self.num_experts = count

    def _bundles(self) -> list[ExpertTensor]:
        """W1, W2 and, where there are biases, b1, b2."""
        names = ["weight", "bias"] if self.fc1.has_bias else ["weight"]
        return [linear.experts(name) for name in names for linear in (self.fc1, self.fc2)]

    def _run_inner_hooks(self) -> None:
        """Call the forward pre-hooks of the linears, which are read here without being called; tell
        of other hooks, which nothing calls."""
        for linear in (self.fc1, self.fc2):
            for number, hook in list(linear._forward_pre_hooks.items()):
                keywords = number in linear._forward_pre_hooks_with_kwargs
                result = hook(linear, (None,), {}) if keywords else hook(linear, (None,))  # type: ignore[call-arg]
                if result is not None:
                    raise RuntimeError(
                        f"a forward pre-hook on an inner linear of GroupedMLP returned "
                        f"{type(result).__name__}: its inputs exist only inside the grouped MLP "
                        f"and cannot be replaced. Register it on the GroupedMLP (and wrap that, "
                        f"not its linears, with fully_shard)"
                    )
            never = linear._forward_hooks or linear._backward_hooks or linear._backward_pre_hooks
            if never and not torch.compiler.is_compiling():
                warn_once(
                    logger,
                    "hooks after the forward, or on the backward, of an inner linear of GroupedMLP "
                    "are not called: what they would see and change exists only inside the grouped "
                    "MLP. Register them on the GroupedMLP",
                )

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the backwards so far: second linear, then first,
        then each parameter's completion once."""
        self.delayed.compute()
