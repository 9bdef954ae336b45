# SPDX-License-Identifier: Apache-2.0
"""The feed-forwards of all experts at once: two grouped products around an activation.

    z = x·W1ᵀ + b1          kept (with x) for backward
    h = act(z)·p            p: the router's weight of each row, fp32
    y = h·W2ᵀ + p·b2

    backward   dh = dy·W2         dz, h, dp  from one pass over dh and z
               dx = dz·W1         dW1 = dzᵀ·x    dW2 = dyᵀ·h    db1 = Σ dz    db2 = Σ p·dy

``h`` is not kept: it would be a third of the memory that an unfused MLP keeps, and the pass that
reads z computes it again.

The module is one autograd node, which runs between the graphs of torch.compile. Its inputs are the
Parameter objects that the two linears have when forward runs: the node reads their current values,
and adds gradients to their ``main_grad``. The linears are not called.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.core import comm
from shardwise.core.uncompiled import uncompiled
from shardwise.moe.activation import Activation, Form, wide
from shardwise.moe.delayed import DelayedGradients
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear, LayoutName
from shardwise.moe.products import (
    Into,
    LoopProducts,
    check_ends,
    check_inputs,
    check_sizes,
    compute_dtype,
    expert_of,
    products_for,
)
from shardwise.moe.weights import ExpertTensor, Pending, WriteGradient, parameters_of


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

    @uncompiled
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
        check_ends(ends, len(x))
        delays = self.delay_weight_gradient if delay is None else delay
        parameters = parameters_of(bundles)
        inputs = [self.delayed.anchor(x, parameters)] if delays else parameters
        products = self.products or products_for(x, self.hidden, self.width)
        work = Work(bundles, products, form, self.delayed.delay if delays else None)
        return MLP.apply(x, p.contiguous(), ends.contiguous(), work, *inputs)  # type: ignore[no-any-return, no-untyped-call]

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


# ------------------------------------------------------------------------------ the node


@dataclass(frozen=True, eq=False)
class Work:
    """The parameters, and the inputs that are not tensors."""

    bundles: Sequence[ExpertTensor]  # W1, W2, and with biases also b1, b2
    products: LoopProducts
    form: Form
    delay: Callable[[Pending], None] | None = None  # receives gradients to compute later


def mlp_forward(x: Tensor, p: Tensor, ends: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    """``y`` and ``z``."""
    w1, w2, *biases = (bundle.value(x.dtype) for bundle in work.bundles)
    b1 = biases[0] if biases else None
    z, h = work.products.activated(x, w1, b1, p, ends, work.form)
    y = work.products.linear(h, w2, ends)
    if biases:
        y, b2 = wide(y), wide(biases[1][expert_of(ends, len(x))])
        y = torch.addcmul(y, p[:, None].to(y.dtype), b2).to(x.dtype)
    return y, z


def mlp_backward(
    dy: Tensor, saved: list[Any], work: Work, wants_x: bool, wants_p: bool
) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
    """The gradients of x, of p and of each parameter (None: frozen, or added to ``main_grad``).
    With ``work.delay`` one None, for the anchor, replaces those of the parameters. ``saved`` is
    emptied, so that z is freed after its last read."""
    x, z, p, ends, *_ = saved
    saved.clear()
    products, bundles = work.products, work.bundles
    dy = dy.contiguous()
    dh = products.input_gradient(dy, bundles[1].value(dy.dtype, "backward"), ends)
    dz, h, dp = products.activation_backward(dh, z, p, work.form)
    del dh, z
    if len(bundles) == 4 and wants_p:
        b2 = bundles[3].value(dy.dtype)[expert_of(ends, len(dy))]
        dp = dp + (wide(dy) * wide(b2)).sum(-1)
    dp = dp.to(p.dtype)
    pending = [
        (bundles[1], _weight_writer(products, dy, h, ends, bundles[1].dtype)),
        (bundles[0], _weight_writer(products, dz, x, ends, bundles[0].dtype)),
    ]
    if len(bundles) == 4:
        pending.insert(1, (bundles[3], _bias_writer(products, dy, ends, bundles[3].dtype, p)))
        pending.append((bundles[2], _bias_writer(products, dz, ends, bundles[2].dtype)))
    gradients: dict[int, list[Tensor | None]] = {}
    if work.delay is None:
        # First the gradients of the second linear: after them dy and h are no longer needed.
        half = len(pending) // 2
        gradients = _computed(pending[:half])
        del pending[:half], h
    dx = None
    if wants_x:
        dx = products.input_gradient(dz, bundles[0].value(dy.dtype, "backward"), ends)
    if work.delay is not None:
        work.delay(pending)
        return dx, dp, [None]
    gradients |= _computed(pending)
    return dx, dp, [gradient for bundle in bundles for gradient in gradients[id(bundle)]]


def _weight_writer(
    products: LoopProducts, dy: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype
) -> WriteGradient:
    def write(out: Tensor | None, add: bool) -> Tensor:
        into = Into(dtype if out is None else out.dtype, out, add)
        return products.weight_gradient(dy, x, ends, into)

    return write


def _bias_writer(
    products: LoopProducts, dy: Tensor, ends: Tensor, dtype: torch.dtype, p: Tensor | None = None
) -> WriteGradient:
    def write(out: Tensor | None, add: bool) -> Tensor:
        return Into(dtype, out, add).take(products.bias_gradient(dy, ends, p))

    return write


def _computed(pending: Pending) -> dict[int, list[Tensor | None]]:
    """The gradients by the ids of their bundles."""
    return {id(bundle): bundle.gradients(write) for bundle, write in pending}


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, ends: Tensor, work: Work, *inputs: Tensor
    ) -> Tensor:
        rows = x.to(compute_dtype(x)).contiguous()
        y, z = mlp_forward(rows, p, ends, work)
        # The parameters are saved only to detect in-place changes; backward reads the bundles.
        ctx.save_for_backward(rows, z, p, ends, *parameters_of(work.bundles))
        ctx.work, ctx.x_dtype = work, x.dtype
        return y

    @staticmethod
    @once_differentiable  # a second derivative would be silently incomplete
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # frees z after its last read, unless the graph is retained
        dx, dp, gradients = mlp_backward(dy, saved, ctx.work, *ctx.needs_input_grad[:2])
        return None if dx is None else dx.to(ctx.x_dtype), dp, None, None, *gradients
