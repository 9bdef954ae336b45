# SPDX-License-Identifier: Apache-2.0
"""The feed-forwards of all experts at once: two grouped products around an activation.

    z = x·W1ᵀ + b1          kept (with x) for backward
    h = act(z)·p            p: the router's weight of each row, fp32
    y = h·W2ᵀ + p·b2

    backward   dh = dy·W2         dz, h, dp  from one pass over dh and z
               dx = dz·W1         dW1 = dzᵀ·x    dW2 = dyᵀ·h    db1 = Σ dz    db2 = Σ p·dy

``h`` is not kept: it is a third of what an unfused MLP keeps, and the pass that reads z computes it
again. On every path the module is one autograd node, over the Parameter objects that its two
linears have at the time of the forward.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise import comm
from shardwise.moe.activation import Activation, wide
from shardwise.moe.delayed import DelayedGradients
from shardwise.moe.grouped_linear import (
    GateUpLinear,
    GroupedLinear,
    LayoutName,
    bias_writer,
    weight_writer,
)
from shardwise.moe.products import (
    Form,
    LoopProducts,
    PathName,
    ProductChoice,
    Rows,
    apply,
    check_inputs,
    check_sizes,
    compute_dtype,
    expert_of,
)
from shardwise.moe.weights import ExpertTensor, coding_of, parts_of, rows_of, saved_by


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
        return super()._apply(fn, recurse)

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
        products = self.choice.products(x)
        delays = self.delay_weight_gradient if delay is None else delay
        delayed = self.delayed if delays else None
        inputs = [parameter for bundle in bundles for parameter in bundle.parameters]
        if delayed is not None:
            inputs = [delayed.anchor(x, self)]
        form = Form(self.activation, self.gate_up_block)
        spec = _Spec(bundles, products, form, delayed)
        return apply(_MLP, x, p.contiguous(), ends.contiguous(), spec, *inputs)  # type: ignore[no-any-return]

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
        """Call the forward pre-hooks of the linears, which are read here without being called."""
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

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the backwards so far: second linear, then first,
        then each parameter's completion once."""
        self.delayed.compute()


@dataclass(frozen=True, eq=False)
class _Spec:
    """The inputs of a node that are not tensors."""

    bundles: list[ExpertTensor]
    products: LoopProducts
    form: Form
    delayed: DelayedGradients | None


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, ends: Tensor, spec: _Spec, *inputs: Tensor
    ) -> Tensor:
        dtype = compute_dtype(x)
        rows = x.to(dtype).contiguous()
        w1, w2, *biases = (bundle.value(dtype) for bundle in spec.bundles)
        first, second = coding_of(w1), coding_of(w2)
        coded: Rows = rows if first[0] is None else first[0].of(rows)
        if first[0] and second[0] and not biases:
            z = spec.products.linear(coded, w1, ends)
            h: Rows = second[0].activated(z, p, spec.form)
        else:
            b1 = biases[0] if biases else None
            z, h = spec.products.activated(coded, w1, b1, p, ends, spec.form)
        y = spec.products.linear(h, w2, ends)
        if biases:
            y, b2 = wide(y), wide(biases[1][expert_of(ends, len(rows))])
            y = torch.addcmul(y, p[:, None].to(y.dtype), b2).to(dtype)
        # The parameters are saved only to detect in-place changes; backward reads the bundles.
        parameters = [parameter for bundle in spec.bundles for parameter in bundle.parameters]
        ctx.save_for_backward(*parts_of(coded if first[1] else rows), z, p, ends, *parameters)
        ctx.spec, ctx.x_dtype, ctx.codings = spec, x.dtype, (first, second)
        return y

    @staticmethod
    @once_differentiable  # a second derivative would be silently incomplete
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        kept, scales, z, p, ends, *_ = saved_by(ctx)
        ctx.maybe_clear_saved_tensors()  # frees z after its last read, unless the graph is retained
        spec: _Spec = ctx.spec
        products, bundles = spec.products, spec.bundles
        first, second = ctx.codings
        dy = dy.contiguous()
        dy_rows = dy if second[0] is None else second[0].of(dy)
        dh = products.input_gradient(dy_rows, bundles[1].value(dy.dtype, "backward"), ends)
        h: Rows
        if first[1] and second[1] and len(bundles) == 2:
            dz_rows, h, dp = first[0].activation_backward(dh, z, p, spec.form)
            dz = dz_rows
        else:
            dz, h, dp = products.activation_backward(dh, z, p, spec.form)
            h = second[0].of(h) if second[1] else h
            dz_rows = dz if first[0] is None else first[0].of(dz)
        del dh, z
        if len(bundles) == 4 and ctx.needs_input_grad[1]:
            b2 = bundles[3].value(dy.dtype)[expert_of(ends, len(dy))]
            dp = dp + (wide(dy) * wide(b2)).sum(-1)
        dp = dp.to(p.dtype)
        rows = rows_of(kept, scales, first)
        left2, left1 = dy_rows if second[1] else dy, dz_rows if first[1] else dz
        pending = [
            (bundles[1], weight_writer(products, left2, h, ends, bundles[1].dtype)),
            (bundles[0], weight_writer(products, left1, rows, ends, bundles[0].dtype)),
        ]
        if len(bundles) == 4:
            pending.insert(1, (bundles[3], bias_writer(products, dy, ends, bundles[3].dtype, p)))
            pending.append((bundles[2], bias_writer(products, dz, ends, bundles[2].dtype)))
        gradients: dict[int, list[Tensor | None]] = {}
        if spec.delayed is None:
            # The second linear's gradients first: then dy and h are no longer needed.
            for bundle, write in pending[: len(pending) // 2]:
                gradients[id(bundle)] = bundle.gradients(write)
            del pending[: len(pending) // 2], h
        dx = None
        if ctx.needs_input_grad[0]:
            w1 = bundles[0].value(dy.dtype, "backward")
            dx = products.input_gradient(dz_rows, w1, ends).to(ctx.x_dtype)
        if spec.delayed is not None:
            spec.delayed.delay(pending)
            return dx, dp, None, None, None
        for bundle, write in pending:
            gradients[id(bundle)] = bundle.gradients(write)
        flat = [gradient for bundle in bundles for gradient in gradients[id(bundle)]]
        return dx, dp, None, None, *flat
