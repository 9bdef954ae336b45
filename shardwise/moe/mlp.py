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
from shardwise.moe.coded import CodedRows, parts_of, rows_of
from shardwise.moe.grouped_linear import bias_writer, weight_writer
from shardwise.moe.products import (
    LoopProducts,
    PathName,
    Rows,
    check_ends,
    choose_path,
    compute_dtype,
    expert_of,
    make_products,
)
from shardwise.moe.weights import (
    ExpertTensor,
    Pending,
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


def mlp_forward(x: Tensor, p: Tensor, ends: Tensor, work: Work) -> tuple[Tensor, Tensor, Rows]:
    """``y``, ``z``, and ``x`` in the form that backward reads."""
    w1, w2, *biases = (bundle.value(x.dtype) for bundle in work.bundles)
    first, second = (bundle.is_coded for bundle in work.bundles[:2])
    coded: Rows = CodedRows.of(x) if first else x
    if first and second and not biases:
        z = work.products.linear(coded, w1, ends)
        h: Rows = CodedRows.activated(z, p, work.form)
    else:
        b1 = biases[0] if biases else None
        z, h = work.products.activated(coded, w1, b1, p, ends, work.form)
    y = work.products.linear(h, w2, ends)
    if biases:
        y, b2 = wide(y), wide(biases[1][expert_of(ends, len(x))])
        y = torch.addcmul(y, p[:, None].to(y.dtype), b2).to(x.dtype)
    return y, z, coded


def mlp_backward(
    dy: Tensor, saved: list[Any], work: Work, wants_x: bool, wants_p: bool
) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
    """The gradients of x, of p and of each parameter (None: frozen, or added to ``main_grad``).
    With ``work.delay`` one None, for the anchor, replaces those of the parameters. ``saved`` is
    emptied, so that z is freed after its last read."""
    kept, scales, z, p, ends, *_ = saved
    saved.clear()
    products, bundles = work.products, work.bundles
    first, second = (bundle.is_coded for bundle in bundles[:2])
    dy = dy.contiguous()
    dy_rows: Rows = CodedRows.of(dy) if second else dy
    dh = products.input_gradient(dy_rows, bundles[1].value(dy.dtype, "backward"), ends)
    h: Rows
    if first and second and len(bundles) == 2:
        dz_rows, h, dp = CodedRows.activation_backward(dh, z, p, work.form)
        dz: Any = dz_rows
    else:
        dz, h, dp = products.activation_backward(dh, z, p, work.form)
        h = CodedRows.of(h) if second else h
        dz_rows = CodedRows.of(dz) if first else dz
    del dh, z
    if len(bundles) == 4 and wants_p:
        b2 = bundles[3].value(dy.dtype)[expert_of(ends, len(dy))]
        dp = dp + (wide(dy) * wide(b2)).sum(-1)
    dp = dp.to(p.dtype)
    rows = rows_of(kept, scales)
    pending = [
        (bundles[1], weight_writer(products, dy_rows, h, ends, bundles[1].dtype)),
        (bundles[0], weight_writer(products, dz_rows, rows, ends, bundles[0].dtype)),
    ]
    if len(bundles) == 4:
        pending.insert(1, (bundles[3], bias_writer(products, dy, ends, bundles[3].dtype, p)))
        pending.append((bundles[2], bias_writer(products, dz, ends, bundles[2].dtype)))
    gradients: dict[int, list[Tensor | None]] = {}
    if work.delay is None:
        # First the gradients of the second linear: after them dy and h are no longer needed.
        half = len(pending) // 2
        gradients = computed(pending[:half])
        del pending[:half], h
    dx = None
    if wants_x:
        w1 = bundles[0].value(dy.dtype, "backward")
        dx = products.input_gradient(dz_rows, w1, ends)
    if work.delay is not None:
        work.delay(pending)
        return dx, dp, [None]
    return dx, dp, ordered(gradients | computed(pending), bundles)


def computed(pending: Pending) -> dict[int, list[Tensor | None]]:
    """The gradients by the ids of their bundles."""
    return {id(bundle): bundle.gradients(write) for bundle, write in pending}


def ordered(
    gradients: dict[int, list[Tensor | None]], bundles: Sequence[ExpertTensor]
) -> list[Tensor | None]:
    return [gradient for bundle in bundles for gradient in gradients[id(bundle)]]


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, ends: Tensor, work: Work, *inputs: Tensor
    ) -> Tensor:
        y, z, kept = mlp_forward(x.to(compute_dtype(x)).contiguous(), p, ends, work)
        # The parameters are saved only to detect in-place changes; backward reads the bundles.
        ctx.save_for_backward(*parts_of(kept), z, p, ends, *parameters_of(work.bundles))
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


def described(asked: PathName | None, form: Form, bundles: Sequence[ExpertTensor]) -> str:
    """The settings that an operator needs beside its tensors. They are one string, because
    torch.compile may treat numbers as variables."""
    act = form.activation
    layouts = " ".join(str(int(bundle.grouped)) for bundle in bundles)
    return f"{asked}, {act.kind}, {act.alpha}, {act.limit}, {act.offset}, {form.block}, {layouts}"


@functools.lru_cache
def _settings(text: str) -> tuple[Any, Form, list[bool]]:
    asked, kind, alpha, limit, offset, block, layouts = text.split(", ")
    activation = Activation(
        kind=kind,  # type: ignore[arg-type]
        alpha=float(alpha),
        limit=None if limit == "None" else float(limit),
        offset=float(offset),
    )
    grouped = [layout == "1" for layout in layouts.split()]
    return None if asked == "None" else asked, Form(activation, int(block)), grouped


def work_of(x: Tensor, parameters: Sequence[Tensor], num_experts: int, text: str) -> Work:
    asked, form, layouts = _settings(text)
    bundles, rest = [], list(parameters)
    for grouped in layouts:
        count = 1 if grouped else num_experts
        bundles.append(ExpertTensor(parameters=tuple(rest[:count]), grouped=grouped))
        del rest[:count]
    key = asked, x.shape[1], bundles[1].parameters[0].shape[-1], x.dtype, x.device
    if key not in _products:
        _products[key] = make_products(choose_path(*key[:3], x))
    return Work(bundles, _products[key], form)


_products: dict[tuple[Any, ...], LoopProducts] = {}


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
    y, z, _ = mlp_forward(x, p, ends, work_of(x, parameters, len(ends), text))
    return y, z


def _fake_backward(dy, saved, parameters, text, wants_x, wants_p, trained) -> list[Tensor]:
    dx, p = dy.new_empty(dy.shape if wants_x else (0,)), saved[3]
    return [dx, p.new_empty(p.shape), *empty_gradients(parameters, trained)]


def _room(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def empty_gradients(parameters, trained) -> list[Tensor]:
    """Memory for the gradients of the trained parameters."""
    return [_room(p) for p, trains in zip(parameters, trained, strict=True) if trains]


def returned_gradients(parameters, gradients, trained) -> list[Tensor]:
    """The gradients of trained parameters that a graph returns; memory without values where the
    gradient is in ``main_grad``."""
    returned = []
    for parameter, gradient, trains in zip(parameters, gradients, trained, strict=True):
        if gradient is None:
            parameter.others_count = False
        if trains:
            returned.append(_room(parameter) if gradient is None else gradient)
    return returned


def by_parameter(gradients, trained) -> list[Tensor | None]:
    """One entry for each parameter: its gradient from a graph, or None if the parameter is
    frozen."""
    remaining = iter(gradients)
    return [next(remaining) if trains else None for trains in trained]


@operator(
    "expert_mlp_backward(Tensor dy, Tensor?[] saved, Tensor[] parameters, str text, bool wants_x,"
    " bool wants_p, bool[] trained) -> Tensor[]",
    _fake_backward,
)
def _graph_backward(dy, saved, parameters, text, wants_x, wants_p, trained) -> list[Tensor]:
    parameters = originals(parameters, trained)
    work = work_of(dy, parameters, len(saved[4]), text)
    dx, dp, gradients = mlp_backward(dy, list(saved), work, wants_x, wants_p)
    dx = dy.new_empty(0) if dx is None else dx
    return [dx, dp, *returned_gradients(parameters, gradients, trained)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, p, ends, _, parameters, ctx.text = inputs
    _, z = output
    ctx.mark_non_differentiable(z)
    ctx.save_for_backward(x, None, z, p, ends, *parameters)


def _bring(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    wants_x, wants_p, _, _, trained, *_ = ctx.needs_input_grad
    dx, dp, *gradients = torch.ops.shardwise.expert_mlp_backward.default(
        dy, saved[:5], saved[5:], ctx.text, wants_x, wants_p, trained
    )
    of_parameters = by_parameter(gradients, trained)
    return dx if wants_x else None, dp if wants_p else None, None, None, of_parameters, None


torch.library.register_autograd("shardwise::expert_mlp", _bring, setup_context=_keep, lib=library)


def graph_mlp(x: Tensor, p: Tensor, ends: Tensor, parameters: list[Tensor], text: str) -> Tensor:
    """``y``, while torch.compile traces."""
    # A graph that calls the experts twice with one x must add two gradients to ``main_grad``. This
    # new tensor keeps torch.compile from merging the two calls.
    once = torch.empty(0, device=x.device)
    node = torch.ops.shardwise.expert_mlp.default
    return node(x, p, ends, once, parameters, text)[0]  # type: ignore[no-any-return]
