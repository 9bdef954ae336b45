# SPDX-License-Identifier: Apache-2.0
"""Products with weights in MXFP8: which plane each reads, where gradients go, what is saved."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.precision import fp8_native
from shardwise.precision.fp8 import FP8Error
from shardwise.precision.fp8_linear import weight_gradient
from shardwise.precision.fp8_native import native_problem, swizzle
from shardwise.precision.fp8_weight import Coded
from tests.parity.mxfp8_helpers import Kind, QuantisedAtUse, coded, multiply_decoded
from tests.ranks import on_ranks

ROWS, COLUMNS, TOKENS = 64, 96, 10
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Over many powers of two: else row and column planes decode to the same values."""
    powers = torch.randint(-12, 4, (rows, columns), generator=torch.Generator().manual_seed(9))
    return made(rows, columns) * torch.exp2(powers)


def trained(value: Tensor, kind: Kind = "mxfp8") -> Coded:
    return coded(value, kind).requires_grad_()


# ------------------------------------------------------------------------------- the products


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block"])
def test_results_may_be_changed_in_place(kind: Kind) -> None:
    """``nn.ReLU(inplace=True)`` after a linear."""
    found = []
    for inplace in (True, False):
        weight, x = trained(made(128, 128), kind), made(TOKENS, 128)
        for shape in ((TOKENS, 128), (2, TOKENS // 2, 128)):
            x = F.relu(F.linear(x.view(shape), weight), inplace=inplace)
        x.sum().backward()
        found.append(weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("planes", [1, 2])
@dtypes
def test_forward_and_backward_read_their_planes(dtype: torch.dtype, planes: int) -> None:
    bias = made(ROWS, dtype=dtype, seed=1).requires_grad_()
    weight = trained(spread(), "native" if planes == 2 else "mxfp8")
    weight.products = "emulated"
    x = made(2, TOKENS, COLUMNS, dtype=dtype, seed=2).requires_grad_()
    grad = made(2, TOKENS, ROWS, dtype=dtype, seed=3)
    y = F.linear(x, weight, bias)
    y.backward(grad)
    flat, flat_grad = x.detach().view(-1, COLUMNS), grad.view(-1, ROWS)
    values = weight.decode(dtype=dtype)
    assert torch.equal(y.detach().view(-1, ROWS), F.linear(flat, values, bias.detach()))
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    backward = weight.decode("backward", dtype)
    assert torch.equal(x.grad.view(-1, COLUMNS), flat_grad @ backward)
    assert type(weight.grad) is Tensor
    assert torch.equal(weight.grad, weight_gradient(flat_grad, flat, torch.bfloat16))
    assert torch.equal(bias.grad, flat_grad.float().sum(0).to(dtype))
    assert torch.equal(values, backward) == (planes == 1), "two roundings of the same values"


def test_codes_may_go_and_come_back_between_the_phases() -> None:
    """Backward reads what is in memory then, and says if nothing is there."""
    weight, other = coded(made(ROWS, COLUMNS)), coded(3 * made(ROWS, COLUMNS, seed=1))
    x, grad = made(TOKENS, COLUMNS).requires_grad_(), made(TOKENS, ROWS, seed=4)
    y = F.linear(x, weight)
    weight.codes.copy_(other.codes)
    weight.scales.copy_(other.scales)
    y.backward(grad)
    assert x.grad is not None and torch.equal(x.grad, grad @ other.decode(dtype=torch.float32))
    y = F.linear(x, weight)
    weight.codes.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not gathered"):
        y.backward(grad)
    with pytest.raises(RuntimeError, match="not gathered"):
        weight.sum()


def test_recomputing_gives_the_same() -> None:
    grads = []
    for recompute in (False, True):
        weight, x = trained(made(ROWS, COLUMNS)), made(TOKENS, COLUMNS).requires_grad_()

        def layer(x: Tensor, weight: Tensor = weight) -> Tensor:
            return F.linear(x, weight).square()

        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        y.sum().backward()
        grads.append((x.grad, weight.grad))
    for mine, theirs in zip(*grads, strict=True):
        assert mine is not None and torch.equal(mine, theirs)


def test_a_frozen_weight_passes_gradients_on_and_keeps_no_input() -> None:
    weight, x = coded(made(ROWS, COLUMNS)), made(TOKENS, COLUMNS).requires_grad_()
    y = F.linear(x, weight)
    assert not any(saved is not None for saved in y.grad_fn.saved_tensors)  # type: ignore[union-attr]
    y.sum().backward()
    assert x.grad is not None and weight.grad is None
    assert not F.linear(made(TOKENS, COLUMNS), weight).requires_grad


def test_autocast_casts_what_is_multiplied_before_it_is_checked() -> None:
    weight, x = trained(spread()), made(TOKENS, COLUMNS).requires_grad_()
    bias = nn.Parameter(made(ROWS, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = F.linear(x, weight, bias)
        assert torch.equal(found, F.linear(x, weight.decode(), bias))
        assert F.linear(x, weight, made(ROWS)).dtype == torch.bfloat16
    found.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    ones = torch.ones(TOKENS, ROWS, dtype=torch.bfloat16)
    expected = torch.mm(ones.t(), x.detach().bfloat16())
    assert weight.grad is not None and torch.equal(weight.grad, expected)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(FP8Error, match="float16"):
        F.linear(x, weight)


def test_a_second_derivative_is_refused() -> None:
    x = made(TOKENS, COLUMNS).requires_grad_()
    y = F.linear(x, coded(made(ROWS, COLUMNS)))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_other_functions_of_the_weight_get_decoded_values() -> None:
    weight = trained(made(ROWS, COLUMNS))
    values = weight.decode().requires_grad_()
    results = [(w.t() @ w[:, 3:5]).float().abs().sum() + w.mean() for w in (weight, values)]
    for result in results:
        result.backward()
    assert torch.equal(*results) and weight.grad is not None
    assert torch.equal(weight.grad, values.grad)
    assert isinstance(weight.detach(), Coded) and type(weight.clone()) is Tensor


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_is_rounded_once(into: torch.dtype) -> None:
    x, grad = made(TOKENS, COLUMNS), made(TOKENS, ROWS, seed=1)
    assert torch.equal(weight_gradient(grad, x, into), (grad.t() @ x).to(into))


@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_gathered_parameters_keep_the_protocol(rank: int, world_size: int, level: int) -> None:
    """A linear of the user's own that encodes its weight when it is used."""
    losses: list[list[Tensor]] = []
    weights = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(QuantisedAtUse(ROWS, ROWS), nn.GELU(), QuantisedAtUse(ROWS, ROWS))
        net.bfloat16()
        if wrapped:
            mesh = sw.init_mesh(dp=world_size, device_type="cpu")
            precision = sw.Precision(main="bf16")
            sw.fully_shard(net, mesh=mesh, placements=sw.zero(level), precision=precision)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses.append([])
        for step in range(4):
            # Every rank has the same tokens: the mean over ranks is what one process computes.
            x = made(TOKENS, ROWS, seed=step, dtype=torch.bfloat16)
            loss = net(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
        weights.append([
            p.full_tensor() if isinstance(p, sw.ShardedTensor) else p.detach()
            for p in net.parameters()
        ])  # fmt: skip
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert len(weights[0]) == 4
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*weights, strict=True))


# ------------------------------------------------------------------------------- native products


def offset_of(row: int, block: int, blocks: int) -> int:
    """The place of the scale of (row, block), by the layout's published formula."""
    tile = (row // 128) * -(-blocks // 4) + block // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (96, 3), (256, 8), (160, 5)])
def test_scales_are_swizzled_by_the_published_formula(rows: int, blocks: int) -> None:
    scales = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    found = swizzle(scales)
    assert len(found) == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    for row in range(rows):
        for block in range(blocks):
            assert found[offset_of(row, block, blocks)] == scales[row, block]


TORCHS = inspect.signature(F.scaled_mm)  # type: ignore[attr-defined]  # before it is replaced


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor,
              recipe_b: Any, *, swizzle_a: Any, swizzle_b: Any, bias: Tensor | None,
              output_dtype: torch.dtype) -> Tensor:  # fmt: skip
    """The product that the hardware is asked for, one scale at a time."""
    given = {"swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "bias": bias}
    TORCHS.bind(a, b, scale_a, recipe_a, scale_b, recipe_b, **given, output_dtype=output_dtype)
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.shape[1] == b.shape[0]
    assert a.is_contiguous() and b.t().is_contiguous()  # the layout that fp8 products take
    assert recipe_a == recipe_b == F.ScalingType.BlockWise1x32  # type: ignore[attr-defined]
    assert swizzle_a == swizzle_b == F.SwizzleType.SWIZZLE_32_4_4  # type: ignore[attr-defined]
    operands = []
    for codes, scales in ((a, scale_a), (b.t(), scale_b)):
        assert scales.dtype == torch.float8_e8m0fnu
        rows, blocks = codes.shape[0], codes.shape[1] // 32
        order = [offset_of(row, block, blocks) for row in range(rows) for block in range(blocks)]
        factors = scales.view(torch.uint8)[torch.tensor(order)].view(rows, blocks).double()
        values = codes.double().view(rows, blocks, 32) * torch.exp2(factors - 127)[:, :, None]
        operands.append(values.view(rows, -1))
    result = operands[0] @ operands[1].t()
    return (result if bias is None else result + bias.double()).to(output_dtype)


def test_native_products_hand_the_right_operands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    weight, bias = coded(spread(160), "native"), made(160, seed=5)
    results = []
    for by_decoding in (False, True):
        if by_decoding:
            monkeypatch.setattr(fp8_native, "multiply", multiply_decoded)
        x = made(TOKENS, COLUMNS, seed=6).requires_grad_()
        y = F.linear(x, weight, bias)
        y.backward(made(TOKENS, 160, seed=7))
        results.append((y, x.grad))
    for native, emulated in zip(*results, strict=True):
        assert native is not None and emulated is not None
        torch.testing.assert_close(native, emulated, rtol=1e-5, atol=1e-4)
    weight.products = "emulated"
    plain = F.linear(made(TOKENS, COLUMNS, seed=6), weight, bias)
    assert not torch.allclose(plain, results[0][0], rtol=1e-3, atol=1e-3)  # activations do round


def test_native_products_are_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said = str(native_problem(torch.device("cpu")))
    assert said == "cpu multiplies no MXFP8: use products='emulated'"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "NVIDIA H200 has compute capability 9.0" in str(native_problem(gpu))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert native_problem(gpu) is None
    monkeypatch.delattr(F, "scaled_mm")
    assert "no scaled_mm" in str(native_problem(gpu))


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "x", [made(TOKENS, 64), made(TOKENS, COLUMNS).half()], ids=["width", "fp16"]
)
def test_what_can_not_hold_is_refused_by_name(x: Tensor) -> None:
    with pytest.raises(FP8Error):
        F.linear(x, coded(made(ROWS, COLUMNS)))
