# SPDX-License-Identifier: Apache-2.0
"""Two grouped products around an activation, forward and backward.

    z = x·W1ᵀ + b1          kept (with x) for backward
    h = act(z)·p            p: the router's weight of each row, fp32
    y = h·W2ᵀ + p·b2

    backward   dh = dy·W2         dz, h, dp  from one pass over dh and z
               dx = dz·W1         dW1 = dzᵀ·x    dW2 = dyᵀ·h    db1 = Σ dz    db2 = Σ p·dy

``h`` is not kept: it would be a third of the memory that an unfused MLP keeps, and the pass that
reads z computes it again.

The same two functions are one autograd node, and two operators in graphs of torch.compile. As with
weights in fp8, an operator receives the Parameter objects. It reads their current values when it
runs, and adds gradients to their ``main_grad``. A graph must still return a gradient for each
trained parameter, or torch leaves the parameter out of autograd while its unit waits for the
gradient. So a parameter with a ``main_grad`` gets memory without values.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.core.uncompiled import library, operator
from shardwise.moe.activation import Activation, Form, wide
from shardwise.moe.products import (
    Into,
    LoopProducts,
    check_ends,
    compute_dtype,
    expert_of,
    products_for,
)
from shardwise.moe.weights import (
    ExpertTensor,
    Pending,
    WriteGradient,
    originals,
    parameters_of,
    remember,
    saved_by,
)


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
        saved = list(saved_by(ctx))
        ctx.maybe_clear_saved_tensors()  # frees z after its last read, unless the graph is retained
        dx, dp, gradients = mlp_backward(dy, saved, ctx.work, *ctx.needs_input_grad[:2])
        return None if dx is None else dx.to(ctx.x_dtype), dp, None, None, *gradients


# ------------------------------------------------------------------------------ in graphs


def described(form: Form, bundles: Sequence[ExpertTensor]) -> str:
    """The settings that an operator needs beside its tensors. They are one string, because
    torch.compile may treat numbers as variables."""
    act = form.activation
    layouts = " ".join(str(int(bundle.grouped)) for bundle in bundles)
    return f"{act.kind}, {act.alpha}, {act.limit}, {act.offset}, {form.block}, {layouts}"


@functools.lru_cache
def _settings(text: str) -> tuple[Form, list[bool]]:
    kind, alpha, limit, offset, block, layouts = text.split(", ")
    activation = Activation(
        kind=kind,  # type: ignore[arg-type]
        alpha=float(alpha),
        limit=None if limit == "None" else float(limit),
        offset=float(offset),
    )
    return Form(activation, int(block)), [layout == "1" for layout in layouts.split()]


def _work(x: Tensor, parameters: Sequence[Tensor], num_experts: int, text: str) -> Work:
    form, layouts = _settings(text)
    bundles, rest = [], list(parameters)
    for grouped in layouts:
        count = 1 if grouped else num_experts
        bundles.append(ExpertTensor(parameters=tuple(rest[:count]), grouped=grouped))
        del rest[:count]
    width = bundles[1].parameters[0].shape[-1]
    return Work(bundles, products_for(x, x.shape[1], width), form)


def _fake_forward(x, p, ends, once, parameters, text) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], parameters[0].shape[-2])


@operator(
    "expert_mlp(Tensor x, Tensor p, Tensor ends, Tensor once, Tensor[] parameters, str text)"
    " -> (Tensor, Tensor)",
    _fake_forward,
)
def _graph_forward(x, p, ends, once, parameters, text) -> Any:
    check_ends(ends, len(x))
    remember(parameters)
    return mlp_forward(x, p, ends, _work(x, parameters, len(ends), text))


def _fake_backward(dy, saved, parameters, text, wants_x, wants_p, trained) -> list[Tensor]:
    dx, p = dy.new_empty(dy.shape if wants_x else (0,)), saved[2]
    pairs = zip(parameters, trained, strict=True)
    return [dx, p.new_empty(p.shape), *(_room(p) for p, trains in pairs if trains)]


def _room(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


@operator(
    "expert_mlp_backward(Tensor dy, Tensor[] saved, Tensor[] parameters, str text, bool wants_x,"
    " bool wants_p, bool[] trained) -> Tensor[]",
    _fake_backward,
)
def _graph_backward(dy, saved, parameters, text, wants_x, wants_p, trained) -> list[Tensor]:
    """The gradients of x, of p and of the trained parameters; memory without values for one that
    was added to ``main_grad``."""
    parameters = originals(parameters, trained)
    work = _work(dy, parameters, len(saved[3]), text)
    dx, dp, gradients = mlp_backward(dy, list(saved), work, wants_x, wants_p)
    returned = []
    for parameter, gradient, trains in zip(parameters, gradients, trained, strict=True):
        if gradient is None:
            parameter.others_count = False
        if trains:
            returned.append(_room(parameter) if gradient is None else gradient)
    return [dy.new_empty(0) if dx is None else dx, dp, *returned]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, p, ends, _, parameters, ctx.text = inputs
    _, z = output
    ctx.mark_non_differentiable(z)
    ctx.save_for_backward(x, z, p, ends, *parameters)


def _bring(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    wants_x, wants_p, _, _, trained, *_ = ctx.needs_input_grad
    dx, dp, *gradients = torch.ops.shardwise.expert_mlp_backward.default(
        dy, saved[:4], saved[4:], ctx.text, wants_x, wants_p, trained
    )
    remaining = iter(gradients)
    of_parameters = [next(remaining) if trains else None for trains in trained]
    return dx if wants_x else None, dp if wants_p else None, None, None, of_parameters, None


torch.library.register_autograd("shardwise::expert_mlp", _bring, setup_context=_keep, lib=library)


def graph_mlp(
    x: Tensor, p: Tensor, ends: Tensor, form: Form, bundles: Sequence[ExpertTensor]
) -> Tensor:
    """``y``, while torch.compile traces."""
    # A graph that calls the experts twice with one x must add two gradients to ``main_grad``. This
    # new tensor keeps torch.compile from merging the two calls.
    once, text = torch.empty(0, device=x.device), described(form, bundles)
    node = torch.ops.shardwise.expert_mlp.default
    return node(x, p, ends, once, parameters_of(bundles), text)[0]  # type: ignore[no-any-return]
