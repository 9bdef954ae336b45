# SPDX-License-Identifier: Apache-2.0
"""The grouped MLP against a loop over experts in float64, in every layout and on every CPU path."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.moe.activation import (
    Activation,
    Form,
    activate,
    activate_backward,
    clamped_quick_geglu,
    clamped_swiglu,
    convert_gate_up,
    join_gate_up,
    split_gate_up,
    squared_relu,
    swiglu,
)
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.moe.grouped_mlp import GroupedMLP
from shardwise.moe.products import GROUPED, LOOP, GroupedProducts, LoopProducts, products_for
from shardwise.moe.weights import as_one, evenly_spaced

HIDDEN, WIDTH = 16, 24
UNEVEN = [5, 0, 61, 1]
ACTIVATIONS = {
    "swiglu": swiglu(),
    "clamped swiglu": clamped_swiglu(limit=0.8),
    "clamped quick geglu": clamped_quick_geglu(alpha=1.702, limit=0.9, offset=1.0),
    "squared relu": squared_relu(),
}


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def make(activation: Activation = ACTIVATIONS["swiglu"], **options: Any) -> GroupedMLP:
    experts, path = options.pop("experts", len(UNEVEN)), options.pop("path", None)
    mlp = GroupedMLP(experts, HIDDEN, WIDTH, activation=activation, **options)
    mlp.products = {"loop": LOOP, "grouped_mm": GROUPED}.get(path)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in mlp.named_parameters():
        std = 1.0 if "bias" in name else parameter.shape[-1] ** -0.5
        parameter.data.normal_(std=std, generator=generator)
    return mlp


def together(mlp: GroupedMLP, name: str, attribute: str) -> Tensor:
    linear, kind = name.split(".")
    experts = getattr(mlp, linear).experts(kind)
    parts = [getattr(parameter, attribute) for parameter in experts.parameters]
    return parts[0] if experts.grouped else torch.stack(parts)


def names_of(mlp: GroupedMLP) -> list[str]:
    kinds = ("weight", "bias") if mlp.fc1.has_bias else ("weight",)
    return [f"{linear}.{kind}" for linear in ("fc1", "fc2") for kind in kinds]


def data(counts: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = sum(counts)
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    p = torch.rand(rows, generator=generator).requires_grad_()
    return x, p, torch.randn(rows, HIDDEN, generator=generator).to(dtype)


def looped(
    mlp: GroupedMLP, counts: list[int], x: Tensor, p: Tensor, dy: Tensor
) -> dict[str, Tensor]:
    """One expert after another, in float64, by autograd."""
    act = mlp.activation
    exact = {n: together(mlp, n, "data").double().requires_grad_() for n in names_of(mlp)}
    x64, p64 = x.detach().double().requires_grad_(), p.detach().double().requires_grad_()
    out = []
    for expert, (rows, chance) in enumerate(zip(x64.split(counts), p64.split(counts), strict=True)):
        z = F.linear(rows, exact["fc1.weight"][expert])
        if "fc1.bias" in exact:
            z = z + exact["fc1.bias"][expert]
        if act.gated:
            gate, up = split_gate_up(z, mlp.gate_up_block)
            if act.limit is not None:
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            h = gate * torch.sigmoid(act.alpha * gate) * (up + act.offset)
        else:
            h = F.relu(z).square()
        y = F.linear(chance[:, None] * h, exact["fc2.weight"][expert])
        if "fc2.bias" in exact:
            y = y + chance[:, None] * exact["fc2.bias"][expert]
        out.append(y)
    y = torch.cat(out)
    y.backward(dy.double())
    assert x64.grad is not None and p64.grad is not None
    found = {"y": y.detach(), "x": x64.grad, "p": p64.grad}
    for name, value in exact.items():
        found[name] = torch.zeros_like(value) if value.grad is None else value.grad
    return found


def relative(value: Tensor, expected: Tensor) -> float:
    if not expected.any():
        return float(value.abs().sum())
    return float((value.double() - expected).norm() / expected.norm())


def compare(mlp: GroupedMLP, counts: list[int], tolerance: float = 2e-6) -> None:
    x, p, dy = data(counts)
    y = mlp(x, ends_of(counts), p)
    y.backward(dy)
    mlp.backward_dw()
    expected = looped(mlp, counts, x, p, dy)
    assert x.grad is not None and p.grad is not None
    got = {"y": y.detach(), "x": x.grad, "p": p.grad}
    got |= {name: together(mlp, name, "grad") for name in names_of(mlp)}
    assert got.keys() == expected.keys() and len(got) >= 5
    errors = {name: relative(got[name], expected[name]) for name in expected}
    assert all(error < tolerance for error in errors.values()), errors


@pytest.mark.parametrize("path", ["loop", "grouped_mm"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_it_equals_a_loop_over_experts(name: str, bias: bool, path: Any) -> None:
    compare(make(ACTIVATIONS[name], bias=bias, path=path), UNEVEN)


@pytest.mark.parametrize("block", [0, 1, 3, 8, 24])
@pytest.mark.parametrize("layouts", [("grouped", "indexed"), ("indexed", "grouped")], ids=str)
def test_every_layout_and_order_of_gate_and_up(layouts: Any, block: int) -> None:
    weight, bias = layouts
    mlp = make(gate_up_block=block, bias=True, weight_layout=weight, bias_layout=bias)
    kinds = {name.rpartition(".")[2] for name, _ in mlp.named_parameters()}
    assert ("weight" in kinds) == (weight == "grouped") and ("bias3" in kinds) == (
        bias == "indexed"
    )
    compare(mlp, UNEVEN)


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 9, 0, 0], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("path", ["loop", "grouped_mm"])
def test_experts_without_rows_have_gradients_of_zero(counts: list[int], path: Any) -> None:
    mlp = make(bias=True, path=path)
    compare(mlp, counts)
    for name in names_of(mlp):
        gradient = together(mlp, name, "grad")
        for expert, count in enumerate(counts):
            assert bool(gradient[expert].any()) == (count > 0), (name, expert)


def test_paths_round_at_the_same_places() -> None:
    """bf16: the loop and the grouped product differ by the order of sums alone."""
    outputs = []
    for path in ("loop", "grouped_mm"):
        mlp = make(bias=True, path=path, dtype=torch.bfloat16)
        x, p, dy = data(UNEVEN, torch.bfloat16)
        y = mlp(x, ends_of(UNEVEN), p)
        y.backward(dy)
        outputs.append([y.detach(), x.grad, p.grad, *(q.grad for q in mlp.parameters())])
    for first, second in zip(*outputs, strict=True):
        assert first.dtype == second.dtype
        assert (first != second).float().mean() < 0.02
        assert relative(first, second.double()) < 2e-3


def test_the_activation_reads_the_rounded_z() -> None:
    """Recomputing from the saved z gives h again, bit for bit: z is rounded before it is read."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(7, 2 * WIDTH, generator=generator).bfloat16()
    p, dh = torch.rand(7, generator=generator), torch.randn(7, WIDTH).bfloat16()
    for activation in ACTIVATIONS.values():
        columns, form = z if activation.gated else z[:, :WIDTH].contiguous(), Form(activation, 0)
        h = activate(columns, p, form)
        assert torch.equal(h, activate_backward(dh, columns, p, form)[1])


def test_clamps_pass_gradients_at_their_boundary() -> None:
    activation = clamped_quick_geglu(alpha=1.0, limit=1.0, offset=0.5)
    z = torch.tensor([[1.0, 1.5, -9.0, 0.5, 1.0, -1.0, -1.5, 0.5]])  # gates, then ups
    dz, _, _ = activate_backward(torch.ones(1, 4), z, torch.ones(1), Form(activation, 0))
    assert (dz[0] != 0).tolist() == [True, False, True, True, True, True, False, True]


def test_only_x_and_z_are_kept_for_backward() -> None:
    mlp = make(path="grouped_mm")
    x, p, _ = data(UNEVEN)
    kept: list[tuple[int, ...]] = []

    def note(value: Tensor) -> Tensor:
        kept.append(tuple(value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        mlp(x, ends_of(UNEVEN), p)
    rows = len(x)
    floats = [shape for shape in kept if shape and shape[0] == rows and len(shape) == 2]
    assert sorted(floats) == sorted([(rows, HIDDEN), (rows, 2 * WIDTH)])


def test_a_forward_casts_no_rows() -> None:
    mlp, (x, p, _) = make(path="grouped_mm").bfloat16(), data(UNEVEN)
    rows = x.bfloat16()
    with torch.profiler.profile(record_shapes=True) as profiler:
        mlp(rows, ends_of(UNEVEN), p.float())
    casts = [event for event in profiler.events() if event.name == "aten::_to_copy"]
    assert casts and list(rows.shape) not in [event.input_shapes[0] for event in casts]


def test_z_is_given_back_before_the_gradients_of_the_first_linear() -> None:
    """Its gradients are the largest, as z is of the kept tensors; a retained graph keeps z."""
    seen: list[bool] = []

    class Watching(GroupedProducts):
        def activation_backward(self, dh: Tensor, z: Tensor, *args: Any) -> Any:
            self.z = StorageWeakRef(z.untyped_storage())
            return super().activation_backward(dh, z, *args)

        def weight_gradient(self, *args: Any) -> Tensor:
            seen.append(self.z.expired())
            return super().weight_gradient(*args)

    mlp = make()
    mlp.products = Watching()
    x, p, dy = data(UNEVEN)
    y = mlp(x, ends_of(UNEVEN), p)
    asked = [x, p, mlp.fc1.weight, mlp.fc2.weight]
    first = torch.autograd.grad(y, asked, dy, retain_graph=True)
    second = torch.autograd.grad(y, asked, dy)
    assert seen == [False, False, True, True]
    assert all(map(torch.equal, first, second))


# ------------------------------------------------------------------------------ where grads go


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_of_inputs_alone_leave_main_grad_as_it_is(layout: Any, delay: bool) -> None:
    mlp = make(weight_layout=layout, bias=True, delay_weight_gradient=delay)
    for parameter in mlp.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    x, p, dy = data(UNEVEN)
    y = mlp(x, ends_of(UNEVEN), p)
    torch.autograd.grad(y, [x, p], dy, retain_graph=True)
    mlp.backward_dw()
    assert all(parameter.main_grad.abs().max() == 0 for parameter in mlp.parameters())
    y.backward(dy)
    mlp.backward_dw()
    plain = make(weight_layout=layout, bias=True)
    plain(x, ends_of(UNEVEN), p).backward(dy)
    for ours, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.grad)


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_are_added_to_main_grad_in_fp32(layout: Any, delay: bool) -> None:
    plain = make(weight_layout=layout, bias=True)
    mlp = make(weight_layout=layout, bias=True, delay_weight_gradient=delay)
    for parameter in mlp.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
    for _ in range(2):  # two microbatches
        for module in (plain, mlp):
            x, p, dy = data(UNEVEN)
            module(x, ends_of(UNEVEN), p).backward(dy)
    mlp.backward_dw()
    for parameter, reference in zip(mlp.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None and parameter.grad_added_to_main_grad
        torch.testing.assert_close(parameter.main_grad - 1, reference.grad, rtol=1e-4, atol=1e-4)


def test_main_grads_that_lie_apart_are_not_rounded_on_the_way() -> None:
    """Weights in 16 bits: those of experts one by one are as good as those of all together."""
    found = []
    for layout in ("grouped", "indexed"):
        mlp = make(weight_layout=layout).bfloat16()
        for parameter in mlp.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
        x, p, dy = data(UNEVEN)
        mlp(x.bfloat16(), ends_of(UNEVEN), p).backward(dy.bfloat16())
        found.append(torch.cat([one.main_grad.flatten() for one in mlp.parameters()]))
    assert torch.equal(*found)
    assert not torch.equal(found[0], found[0].bfloat16().float())


def test_delayed_gradients_come_second_linear_first_and_complete_once() -> None:
    mlp = make(bias=True, weight_layout="indexed", delay_weight_gradient=True)
    fired: list[str] = []
    for name, parameter in mlp.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    order: list[int] = []
    products = mlp_products(mlp)
    original = products.weight_gradient

    def noted(dy: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        order.append(dy.shape[1])
        return original(dy, x, *args, **kwargs)

    products.weight_gradient = noted  # type: ignore[method-assign]
    for _ in range(2):
        x, p, dy = data(UNEVEN)
        mlp(x, ends_of(UNEVEN), p).backward(dy)
        assert x.grad is not None and p.grad is not None
    assert not fired and not order and len(mlp.delayed._pending) == 2
    assert all(parameter.grad is None for parameter in mlp.parameters())
    mlp.backward_dw()
    assert order == [HIDDEN, HIDDEN, 2 * WIDTH, 2 * WIDTH]
    assert sorted(fired) == sorted(name for name, _ in mlp.named_parameters())
    plain = make(bias=True, weight_layout="indexed")
    x, p, dy = data(UNEVEN)
    plain(x, ends_of(UNEVEN), p).backward(dy)
    for parameter, reference in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * reference.grad, rtol=1e-5, atol=1e-5)
    mlp.backward_dw()  # nothing is pending: nothing happens
    assert len(fired) == len(list(mlp.parameters()))


def mlp_products(mlp: GroupedMLP) -> Any:
    mlp.products = LoopProducts()
    return mlp.products


def test_weights_get_delayed_gradients_though_rows_need_none_and_frozen_ones_get_none() -> None:
    x, p, dy = data(UNEVEN)
    mlp = make(delay_weight_gradient=True)
    mlp(x.detach(), ends_of(UNEVEN), p.detach()).backward(dy)
    mlp.backward_dw()
    assert all(q.grad is not None and q.grad.any() for q in mlp.parameters())
    mlp = make(weight_layout="indexed")
    mlp.fc1.weight2.requires_grad_(False)
    mlp(x, ends_of(UNEVEN), p).backward(dy)
    assert mlp.fc1.weight2.grad is None and mlp.fc1.weight0.grad is not None


def test_autocast_computes_in_bf16_and_returns_gradients_in_fp32() -> None:
    mlp = make(path="grouped_mm")
    x, p, dy = data(UNEVEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x, ends_of(UNEVEN), p)
    assert y.dtype == torch.bfloat16
    y.backward(dy.bfloat16())
    expected = looped(mlp, UNEVEN, x, p, dy)
    for name in names_of(mlp):
        gradient = together(mlp, name, "grad")
        assert gradient.dtype == torch.float32 and relative(gradient, expected[name]) < 2e-2


def test_indexed_weights_are_neighbours_and_stay_so() -> None:
    mlp = make(weight_layout="indexed")
    weights = mlp.fc1.experts("weight").parameters
    view = evenly_spaced(weights)
    assert view is not None and view.data_ptr() == weights[0].data_ptr()
    before = as_one(weights).clone()
    mlp.double().float()
    moved = evenly_spaced(mlp.fc1.experts("weight").parameters)
    assert moved is not None and torch.equal(moved, before)
    apart = [nn.Parameter(weight.detach().clone()) for weight in weights]
    assert evenly_spaced(apart) is None and torch.equal(as_one(apart), before)


def test_the_graph_does_not_outlive_its_output() -> None:
    mlp = make()
    x, p, _ = data(UNEVEN)
    gc.collect()
    y = mlp(x, ends_of(UNEVEN), p)
    node = y.grad_fn
    assert node is not None
    del y, node
    assert gc.collect() >= 0 and not mlp.delayed._pending


# ------------------------------------------------------------------------------ refusals


def refused(call: Any, *parts: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    for part in parts:
        assert part in str(caught.value), caught.value


def test_what_cannot_work_is_refused_by_name() -> None:
    x, p, _ = data(UNEVEN)
    ends, mlp = ends_of(UNEVEN), make()
    refused(lambda: mlp(x, ends_of([5, 0, 61, 0]), p), "do not add up to the 67 rows")
    refused(lambda: mlp(x, [5, 5, 66, 66], p), "ends=[5, 5, 66, 66]")
    refused(lambda: mlp(x, torch.tensor([9, 5, 61, 67]).int(), p), "must not decrease")
    refused(lambda: mlp(x, ends.long(), p), "torch.int32")
    refused(lambda: mlp(x, ends[:3], p), "[4]")
    refused(lambda: mlp(x[:, :8], ends, p), "[67, 8]", "[rows, 16]")
    refused(lambda: mlp(x, ends, p[:5]), "[5]", "one per row")
    refused(lambda: mlp(x, ends, p.double()), "torch.float64")
    refused(lambda: make(gate_up_block=5), "gate_up_block=5", "divisor of 24")
    refused(lambda: make(squared_relu(), gate_up_block=4), "no gate")
    refused(lambda: make(bias_layout="indexed"), "no bias")
    refused(lambda: make(weight_layout="stacked"), "'stacked'", "'grouped' or 'indexed'")
    refused(lambda: mlp(x[None], ends, p), "[1, 67, 16]", "[rows, 16]")
    refused(lambda: make("swiglu"), "activation='swiglu'", "swiglu()")  # type: ignore[arg-type]
    refused(lambda: make(dtype=torch.float8_e4m3fn), "float8_e4m3fn", "MXFP8")
    refused(lambda: GroupedLinear(0, 4, 4), "num_experts=0")
    refused(lambda: clamped_swiglu(limit=-1.0), "limit=-1.0")
    refused(lambda: Activation(kind="squared_relu", alpha=2.0), "takes no alpha")


@pytest.mark.parametrize("bias", [False, True])
def test_the_recomputed_activation_is_freed_before_the_gradient_of_the_rows(bias: bool) -> None:
    activations: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Products(LoopProducts):
        def activation_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            dz, h, dp = super().activation_backward(*args)
            activations.append(weakref.ref(h))
            return dz, h, dp

        def input_gradient(self, *args: Any) -> Tensor:
            alive.extend(reference() is not None for reference in activations)
            return super().input_gradient(*args)

    mlp = make(bias=bias)
    mlp.products = Products()
    x, p, dy = data(UNEVEN)
    mlp(x, ends_of(UNEVEN), p).backward(dy)
    assert alive == [False]


# ------------------------------------------------------------------------------ gate and up


@pytest.mark.parametrize("stored", [0, 1, 4, 12])
@pytest.mark.parametrize("wanted", [0, 3, 6])
def test_orders_of_gate_and_up_convert_both_ways(stored: int, wanted: int) -> None:
    gate, up = torch.arange(12.0), torch.arange(100.0, 112.0)
    value = join_gate_up(gate, up, stored)
    other = convert_gate_up(value, stored, wanted)
    assert torch.equal(other, join_gate_up(gate, up, wanted))
    assert torch.equal(convert_gate_up(other, wanted, stored), value)
    assert all(map(torch.equal, split_gate_up(value, stored), (gate, up)))


def test_products_are_the_fastest_that_rows_allow() -> None:
    """Rows of 12 fp32 values are whole 16-byte words, 12 of bf16 are not; torch's grouped product
    knows no fp64."""
    x = torch.randn(20, 12)
    assert products_for(x, 12, 12) is GROUPED and products_for(x, 5, 12) is LOOP
    assert products_for(x.bfloat16(), 12, 12) is LOOP and products_for(x.double(), 12, 12) is LOOP
    assert products_for(x.to("meta"), 12, 12) is LOOP
    with torch.autocast("cpu", torch.bfloat16):
        assert products_for(x, 12, 12) is LOOP and products_for(x, 16, 8) is GROUPED
