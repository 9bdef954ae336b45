# SPDX-License-Identifier: Apache-2.0
"""Products of fp8 in blocks of 128, by definition: what is rounded, what is read, what is saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.memory import Ledger
from shardwise.planning.activations import Follower
from shardwise.precision import fp8_block
from shardwise.precision.fp8 import (
    ROW_128,
    SQUARE_128,
    Block,
    FP8Error,
    decode_reference,
    encode,
    encode_reference,
)
from tests.contract.helpers import options_for
from tests.parity.mxfp8_helpers import coded
from tests.ranks import on_ranks

ROWS, COLUMNS, TOKENS = 256, 384, 150  # 22 tokens of a second block


def made(*shape: int, seed: int = 0) -> Tensor:
    """Over some powers of two, so that scales matter."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-6, 3, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(powers)


def through(x: Tensor, along: int = 1, block: Block = ROW_128) -> Tensor:
    """x [n, m] in fp32 as blocks of 128 along a dimension hold it; that dimension is padded."""
    turned = x if along == 1 else x.t()
    whole = F.pad(turned, (0, -turned.shape[1] % 128))
    codes, scales = encode_reference(whole, block)
    values = decode_reference(codes, scales, block, torch.float32)[:, : turned.shape[1]]
    return values if along == 1 else values.t()


def test_scales_bring_the_largest_to_448_and_codes_are_the_nearest() -> None:
    x = made(128, 256).bfloat16()
    x[:, 128:] = 0.0
    codes, scales = encode_reference(x, SQUARE_128)
    assert scales.dtype == torch.float32 and scales.shape == (1, 2)
    largest = x[:, :128].abs().max().float()
    assert torch.equal(scales[0, 0], largest * torch.tensor(1 / 448))
    values = decode_reference(codes, scales, SQUARE_128, torch.float32)
    assert not values[:, 128:].any()
    near = (x[:, :128].float() - values[:, :128]).abs()
    step = values[:, :128].abs().clamp(min=2.0**-6 * float(scales[0, 0])) * 2.0**-4
    assert (near <= step * 1.001).all(), "half a unit in the last place of 4 bits"


def test_a_block_with_a_nan_or_an_infinity_is_nan_and_no_other() -> None:
    x = torch.ones(256, 256)
    x[3, 5], x[200, 250] = float("nan"), float("inf")
    (plane,) = encode(x, (SQUARE_128,))
    bad = decode_reference(plane.codes, plane.scales, SQUARE_128, torch.float32).isnan()
    assert bad[:128, :128].all() and bad[128:, 128:].all()
    assert not bad[:128, 128:].any() and not bad[128:, :128].any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("products", ["fp8", "emulated"])
def test_each_product_is_that_of_what_its_operands_were_rounded_to(
    products: Any, bias: bool
) -> None:
    weight, shift = made(ROWS, COLUMNS), made(ROWS, seed=1).bfloat16()
    stored = coded(weight, "fp8_block").requires_grad_()
    stored.products = products
    x = made(3, TOKENS // 3, COLUMNS, seed=2).bfloat16().requires_grad_()
    grad = made(3, TOKENS // 3, ROWS, seed=3).bfloat16()
    y = F.linear(x, stored, shift if bias else None)
    y.backward(grad)
    w = stored.decode(dtype=torch.float32)
    flat, g = x.detach().view(-1, COLUMNS).float(), grad.view(-1, ROWS).float()
    if products == "emulated":
        expected = F.linear(x.detach(), w.bfloat16(), shift if bias else None).view(-1, ROWS)
        of_x, of_weight = g.bfloat16() @ w.bfloat16(), g.bfloat16().t() @ flat.bfloat16()
    else:
        expected = (through(flat) @ w.t()).bfloat16()
        expected = expected + shift if bias else expected
        of_x = (through(g) @ w).bfloat16()
        right = through(flat, along=0, block=SQUARE_128)
        of_weight = (through(g, along=0).t() @ right).bfloat16()
    assert x.grad is not None and stored.grad is not None
    assert type(stored.grad) is Tensor and stored.grad.dtype == torch.bfloat16
    assert torch.equal(y.detach().view(-1, ROWS), expected)
    assert torch.equal(x.grad.view(-1, COLUMNS), of_x)
    torch.testing.assert_close(stored.grad, of_weight, rtol=1e-2, atol=1e-3)
    exact = g.double().t() @ flat.double()
    off = float((stored.grad.double() - exact).norm() / exact.norm())
    assert (1e-2 < off < 0.08) == (products == "fp8"), off


def test_x_is_saved_as_codes() -> None:
    x = made(256, COLUMNS).bfloat16().requires_grad_()
    for products, width in (("fp8", 1), ("emulated", 2)):
        stored = coded(made(ROWS, COLUMNS), "fp8_block").requires_grad_()
        stored.products = products  # type: ignore[assignment]
        y: Any = F.linear(x, stored)
        held = [each for each in y.grad_fn.saved_tensors if each is not None]
        nbytes = sum(each.nbytes for each in held)
        assert width <= nbytes / x.numel() < width + 0.04
    frozen: Any = F.linear(x, coded(made(ROWS, COLUMNS), "fp8_block"))
    assert not any(each is not None for each in frozen.grad_fn.saved_tensors)


class Layers(nn.Module):
    """A feed-forward whose weights are codes, as in a unit's forward."""

    def __init__(self, deep: int = 384) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(256, deep, bias=False), nn.Linear(256, deep, bias=False)
        self.down = nn.Linear(deep, 256, bias=False)
        for seed, layer in enumerate((self.gate, self.up, self.down)):
            weight = coded(made(*layer.weight.shape, seed=seed) / 16, "fp8_block")
            layer._parameters["weight"] = weight.requires_grad_()  # type: ignore[assignment]

    def by_layers(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down((F.silu(gate.float()) * up.float()).bfloat16())  # type: ignore[no-any-return]

    def at_once(self, x: Tensor) -> Tensor:
        return sw.swiglu_mlp(x, self.gate, self.up, self.down)


@pytest.mark.parametrize("frozen", [(), ("down",), ("gate", "up"), ("gate", "up", "down"), ("x",)])
def test_a_feed_forward_at_once_is_its_layers(frozen: tuple[str, ...]) -> None:
    """But for the order of operations in the gradients of gate and up, before they are rounded."""
    found: list[dict[str, Tensor]] = []
    for run in (Layers.by_layers, Layers.at_once):
        net, x = Layers(), made(2, 75, 256, seed=5).bfloat16()
        x.requires_grad_("x" not in frozen)
        for name in {"gate", "up", "down"} & set(frozen):
            net.get_submodule(name).weight.requires_grad_(False)
        y = run(net, x)
        assert ("SwiGLU" in y.grad_fn.name()) == (run is Layers.at_once)
        y.backward(made(2, 75, 256, seed=6).bfloat16())
        named = {"x": x} | {name: getattr(net, name).weight for name in ("gate", "up", "down")}
        found.append({name: each.grad for name, each in named.items() if each.grad is not None})
        found[-1]["y"] = y.detach()
    layers, once = found
    assert layers.keys() == once.keys() == {"x", "gate", "up", "down", "y"} - set(frozen)
    for name in layers:
        if name in ("y", "down"):
            assert torch.equal(layers[name], once[name]), name
        else:
            apart = (layers[name] - once[name]).double().norm()
            assert apart < 2e-3 * layers[name].double().norm(), name


def test_a_feed_forward_of_other_layers_calls_them() -> None:
    """Layers with biases, adapters in the place of a layer, plain weights."""
    x = made(40, 256).bfloat16()
    net, plain = Layers(), Layers()
    expected = net.at_once(x)
    net.up.bias = nn.Parameter(torch.ones(384, dtype=torch.bfloat16))
    assert not torch.equal(net.at_once(x), expected)
    net = Layers()
    net.gate = nn.Sequential(net.gate, nn.Tanh())  # type: ignore[assignment]
    assert not torch.equal(net.at_once(x), expected)
    for layer in (plain.gate, plain.up, plain.down):
        layer.weight = nn.Parameter(layer.weight.decode())  # type: ignore[operator]
    assert torch.equal(plain.at_once(x), plain.down(F.silu(plain.gate(x)) * plain.up(x)))
    calls: list[Any] = []
    sw.swiglu_mlp(
        x, plain.gate, plain.up, plain.down, call=lambda f, *args: calls.append(f) or f(*args)
    )
    assert len(calls) == 1


def test_no_tokens() -> None:
    stored = coded(made(ROWS, COLUMNS), "fp8_block").requires_grad_()
    x = torch.empty(0, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    y = F.linear(x, stored)
    y.sum().backward()
    assert y.shape == (0, ROWS) and stored.grad is not None and not stored.grad.any()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.after = nn.MultiheadAttention(128, 4), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.attention(x, x, x)[0])  # type: ignore[no-any-return]


@on_ranks(1)
def test_the_report_says_how_attention_multiplies_by_its_output_weight(
    rank: int, world_size: int
) -> None:
    """torch's function takes the weight, and no layer: codes are decoded for it."""
    net = Attention()
    sw.fully_shard(net, **options_for("zero3", 1), precision=sw.Precision(weights="fp8_block"))
    report = sw.precision_report(net)
    found = {row.name: row.products for row in report.rows if row.format}
    assert found == {
        "attention.out_proj.weight": "decoded",
        "after.weight": "fp8 by decoding",
    }
    assert "nn.MultiheadAttention multiplies by decoded weights" in str(report)
    assert net(made(3, 2, 128).bfloat16()).isfinite().all()


def test_what_a_user_may_say() -> None:
    assert sw.Precision(weights="fp8_block").multiplied == "fp8"
    assert sw.Precision(weights="fp8_block", products="emulated").multiplied == "emulated"
    other = dataclasses.replace(sw.Precision(weights="mxfp8"), weights="fp8_block")
    assert other.multiplied == "fp8", "a default stays one"
    assert sw.Precision(weights="mxfp8", products="native").format == "mxfp8"
    for options, words in (
        ({"weights": "fp8_block", "products": "native"}, "'fp8', 'emulated' for 'fp8_block'"),
        ({"weights": "mxfp8", "products": "fp8"}, "'emulated', 'native' for 'mxfp8'"),
        ({"weights": "fp8_blocks"}, "'fp8_block'"),
        ({"weights": "blockwise"}, "'fp8_block' is that recipe"),
        ({"weights": "mxfp4"}, "multiply no fp4"),
        ({"weights": "float8"}, "one scale for a whole tensor or row"),
    ):
        with pytest.raises(ValueError, match=words):
            sw.Precision(**options)  # type: ignore[arg-type]
    with pytest.raises(FP8Error, match="130 columns"):
        coded(made(128, 130), "fp8_block")
    assert "cpu multiplies no fp8" in str(fp8_block.scaled_problem(torch.device("cpu")))


def test_a_plan_counts_what_kernels_turn() -> None:
    """On the meta device products hold the memory that they hold on a GPU, and no more."""
    rows, out, deep = 512, 256, 128
    dy = torch.empty(rows, deep, device="meta", dtype=torch.bfloat16)

    def peak(work: Callable[[], object]) -> int:
        with Follower(nn.Module(), Ledger()) as follower:
            kept = work()
        del kept
        return follower.peak

    codes, scales, *_ = fp8_block.quantise(dy, True, 0)
    meta = {"device": "meta", "dtype": torch.uint8}
    weight = torch.empty(deep, out, **meta)  # type: ignore[call-overload]
    of_weight = torch.empty(deep // 128, out // 128, device="meta")
    backward = peak(
        lambda: fp8_block.multiply(codes, scales, weight, of_weight, "backward", dy.dtype)
    )
    assert backward == 2 * rows * out + deep * out
