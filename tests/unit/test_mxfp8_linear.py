# SPDX-License-Identifier: Apache-2.0
"""Products with weights in MXFP8: which plane each reads, where gradients go, what is reused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.memory import ledger
from shardwise.precision import fp8_products
from shardwise.precision.fp8 import COLUMN, FP8Error, Plane, decode, encode
from shardwise.precision.fp8_functions import fp8_embedding, fp8_linear, weight_gradient
from shardwise.precision.fp8_products import (
    Emulated,
    Native,
    Workspace,
    native_problem,
    swizzle,
)
from shardwise.precision.fp8_tensor import Format, FP8Tensor
from tests.ranks import on_ranks

ROWS, COLUMNS, TOKENS = 64, 96, 10
formats = pytest.mark.parametrize("format", ["mxfp8_rowcol", "mxfp8_2d"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Over many powers of two: else row and column planes decode to the same values."""
    powers = torch.randint(-12, 4, (rows, columns), generator=torch.Generator().manual_seed(9))
    return made(rows, columns) * torch.exp2(powers)


# ------------------------------------------------------------------------------- the products


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block"])
def test_results_may_be_changed_in_place(format: Format) -> None:
    """``nn.ReLU(inplace=True)`` after a linear, positions added to what an embedding looked up."""
    stored = FP8Tensor.encode(made(128, 128), format)
    recipe = sw.Precision(weights=format).recipe
    found = []
    for inplace in (True, False):
        parameter = nn.Parameter(made(128, 128))
        x = fp8_embedding(torch.arange(TOKENS), stored, parameter=parameter, dtype=torch.float32)
        x = x.add_(1) if inplace else x + 1
        for shape in ((TOKENS, 128), (2, TOKENS // 2, 128)):
            x = fp8_linear(x.view(shape), stored, parameter=parameter, recipe=recipe)
            x = F.relu(x, inplace=inplace)
        x.sum().backward()
        found.append(parameter.grad)
    assert torch.equal(*found)


@formats
@dtypes
@pytest.mark.parametrize("workspace", [None, "kept"])
def test_forward_and_backward_read_their_planes(
    format: Format, dtype: torch.dtype, workspace: str | None
) -> None:
    weight, bias = spread(), made(ROWS, dtype=dtype, seed=1).requires_grad_()
    stored = FP8Tensor.encode(weight, format)
    x = made(2, TOKENS, COLUMNS, dtype=dtype, seed=2).requires_grad_()
    grad = made(2, TOKENS, ROWS, dtype=dtype, seed=3)
    parameter = nn.Parameter(weight)
    products = Emulated(workspace=Workspace() if workspace else None)
    y = fp8_linear(x, stored, bias, parameter=parameter, matmul=products)
    y.backward(grad)
    flat = x.detach().view(-1, COLUMNS)
    expected = F.linear(flat, stored.dequantise("forward", dtype=dtype), bias)
    assert y.dtype == dtype and torch.equal(y, expected.view(2, TOKENS, ROWS))
    flat_grad = grad.view(-1, ROWS)
    assert x.grad is not None and parameter.grad is not None and bias.grad is not None
    backward = stored.dequantise("backward", dtype=dtype)
    assert torch.equal(x.grad.view(-1, COLUMNS), flat_grad @ backward)
    assert torch.equal(parameter.grad, flat_grad.float().t() @ flat.float())  # fp32, not rounded
    assert torch.equal(bias.grad, flat_grad.float().sum(0).to(dtype))
    if format == "mxfp8_rowcol":  # and the other plane would have given another result
        assert not torch.equal(x.grad.view(-1, COLUMNS), flat_grad @ stored.dequantise(dtype=dtype))


def test_the_gradient_is_that_of_the_decoded_weight() -> None:
    weight = made(ROWS, COLUMNS)
    stored = FP8Tensor.encode(weight, "mxfp8_2d")
    dense = stored.dequantise(dtype=torch.float32).requires_grad_()
    x, plain = made(TOKENS, COLUMNS).requires_grad_(), made(TOKENS, COLUMNS).requires_grad_()
    parameter = nn.Parameter(weight)
    fp8_linear(x, stored, parameter=parameter).square().sum().backward()
    F.linear(plain, dense).square().sum().backward()
    for mine, theirs in ((x, plain), (parameter, dense)):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-4)


def test_planes_may_go_and_come_back_between_the_phases() -> None:
    """zero(3): the row plane is released after forward, the column plane arrives for backward."""
    weight = spread()
    row, column = encode(weight)
    grads = []
    for moved in (False, True):
        stored = FP8Tensor(row) if moved else FP8Tensor(row, column)
        x = made(TOKENS, COLUMNS).requires_grad_()
        y = fp8_linear(x, stored)
        if moved:
            row.codes.fill_(0x7F)  # somebody else's memory by now
            stored.planes = {COLUMN: column}
        y.backward(made(TOKENS, ROWS, seed=4))
        grads.append(x.grad)
    assert grads[0] is not None and torch.equal(grads[0], grads[1])
    with pytest.raises(FP8Error, match="row plane"):
        fp8_linear(made(TOKENS, COLUMNS), FP8Tensor(column))


def test_recomputing_gives_the_same() -> None:
    stored = FP8Tensor.encode(made(ROWS, COLUMNS))
    grads = []
    for recompute in (False, True):
        parameter = nn.Parameter(made(ROWS, COLUMNS))
        x = made(TOKENS, COLUMNS).requires_grad_()

        def layer(x: Tensor, parameter: nn.Parameter = parameter) -> Tensor:
            return fp8_linear(x, stored, parameter=parameter).square()

        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        y.sum().backward()
        grads.append((x.grad, parameter.grad))
    for mine, theirs in zip(*grads, strict=True):
        assert mine is not None and torch.equal(mine, theirs)


def test_a_frozen_weight_passes_gradients_on_and_keeps_no_input() -> None:
    stored = FP8Tensor.encode(made(ROWS, COLUMNS))
    frozen = nn.Parameter(made(ROWS, COLUMNS), requires_grad=False)
    for parameter in (None, frozen):
        x = made(TOKENS, COLUMNS).requires_grad_()
        y = fp8_linear(x, stored, parameter=parameter)
        assert not any(saved is not None for saved in y.grad_fn.saved_tensors)  # type: ignore[union-attr]
        y.sum().backward()
        assert x.grad is not None and frozen.grad is None
    assert not fp8_linear(made(TOKENS, COLUMNS), stored).requires_grad


def test_autocast_casts_what_is_multiplied_before_it_is_checked() -> None:
    weight, x = FP8Tensor.encode(spread()), made(TOKENS, COLUMNS).requires_grad_()
    parameter = nn.Parameter(weight.dequantise())
    bias = nn.Parameter(made(ROWS, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fp8_linear(x, weight, bias, parameter=parameter)
        assert torch.equal(found, F.linear(x, weight.dequantise(), bias))
        assert fp8_linear(x, weight, made(ROWS)).dtype == torch.bfloat16
    found.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    ones = torch.ones(TOKENS, ROWS, dtype=torch.bfloat16)
    expected = torch.mm(ones.t(), x.detach().bfloat16())
    assert parameter.grad is not None and torch.equal(parameter.grad, expected)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(FP8Error, match="float16"):
        fp8_linear(x, weight)


def test_a_second_derivative_is_refused() -> None:
    x = made(TOKENS, COLUMNS).requires_grad_()
    y = fp8_linear(x, FP8Tensor.encode(made(ROWS, COLUMNS)))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ------------------------------------------------------------------------------- weight gradients


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=str)
@dtypes
def test_gradients_add_up_in_the_dtype_of_the_parameter(
    dtype: torch.dtype, into: torch.dtype
) -> None:
    stored = FP8Tensor.encode(made(ROWS, COLUMNS))
    parameter = nn.Parameter(made(ROWS, COLUMNS, dtype=into))
    exact = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for micro in range(3):
        x = made(TOKENS, COLUMNS, dtype=dtype, seed=micro)
        grad = made(TOKENS, ROWS, dtype=dtype, seed=10 + micro)
        fp8_linear(x, stored, parameter=parameter).backward(grad)
        exact += grad.double().t() @ x.double()
    assert parameter.grad is not None and parameter.grad.dtype == into
    error = (parameter.grad.double() - exact).norm() / exact.norm()
    assert error < (1e-6 if into == torch.float32 else 1e-2)


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_is_rounded_once(into: torch.dtype) -> None:
    x, grad = made(TOKENS, COLUMNS), made(TOKENS, ROWS, seed=1)
    assert torch.equal(weight_gradient(grad, x, into), (grad.t() @ x).to(into))


class AtUse(nn.Module):
    """A linear that encodes its weight when it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(made(ROWS, ROWS) / 8)

    def forward(self, x: Tensor) -> Tensor:
        stored = FP8Tensor.encode(self.weight, "mxfp8_rowcol")
        return fp8_linear(x, stored, parameter=self.weight)


@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_gathered_parameters_keep_the_protocol(rank: int, world_size: int, level: int) -> None:
    losses: list[list[Tensor]] = []
    weights = []
    for wrapped in (True, False):
        net = nn.Sequential(AtUse(), nn.GELU(), AtUse())
        if wrapped:
            mesh = sw.init_mesh(dp=world_size, device_type="cpu")
            sw.fully_shard(net, mesh=mesh, placements=sw.zero(level))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses.append([])
        for step in range(4):
            # Every rank has the same tokens: the mean over ranks is what one process computes.
            loss = net(made(TOKENS, ROWS, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
        weights.append([
            p.full_tensor() if isinstance(p, sw.ShardedTensor) else p.detach()
            for p in net.parameters()
        ])  # fmt: skip
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert len(weights[0]) == 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*weights, strict=True))


# ------------------------------------------------------------------------------- workspace


def test_a_workspace_is_reused_grown_counted_and_released() -> None:
    before = ledger.current["workspace"]
    workspace = Workspace()
    products = Emulated(workspace=workspace)
    large = FP8Tensor.encode(made(ROWS, COLUMNS))
    small = FP8Tensor.encode(made(32, 32))
    cpu = torch.device("cpu")
    for weight, columns in ((small, 32), (large, COLUMNS), (small, 32)):
        fp8_linear(made(TOKENS, columns), weight, matmul=products)
    held = workspace.matrix(large.shape, torch.float32, cpu)
    assert ledger.current["workspace"] - before == ROWS * COLUMNS * 4
    assert workspace.matrix(small.shape, torch.float32, cpu).data_ptr() == held.data_ptr()
    workspace.matrix(small.shape, torch.bfloat16, cpu)
    assert ledger.current["workspace"] - before == ROWS * COLUMNS * 4 + 32 * 32 * 2
    del held, workspace, products
    assert ledger.current["workspace"] == before


def test_a_workspace_made_while_inferring_serves_training() -> None:
    weight, how = FP8Tensor.encode(spread()), Emulated(workspace=Workspace())
    x = made(TOKENS, COLUMNS).requires_grad_()
    with torch.inference_mode():
        inferred = fp8_linear(x, weight, matmul=how)
    trained = fp8_linear(x, weight, matmul=how)
    trained.sum().backward()
    assert torch.equal(trained, inferred) and x.grad is not None


def test_a_result_outlives_the_workspace_it_was_made_in() -> None:
    products = Emulated(workspace=Workspace())
    first, second = (
        FP8Tensor.encode(made(ROWS, COLUMNS)),
        FP8Tensor.encode(made(ROWS, COLUMNS) * 3),
    )
    x = made(TOKENS, COLUMNS).requires_grad_()
    y = fp8_linear(x, first, matmul=products)
    fp8_linear(x, second, matmul=products)  # decodes over what the first product read
    assert torch.equal(y, fp8_linear(x, first))
    y.backward(made(TOKENS, ROWS))
    assert x.grad is not None
    assert torch.equal(x.grad, made(TOKENS, ROWS) @ first.dequantise("backward", dtype=x.dtype))


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


def through_mxfp8(activations: Tensor) -> Tensor:
    """[tokens, features] rounded as a native MX product rounds them: blocks of 32 features."""
    plane = fp8_products._encode_rows(activations)
    return decode(plane, dtype=activations.dtype)[: len(activations)]


class Rounding(Emulated):
    def forward(self, x: Tensor, plane: Plane, bias: Tensor | None) -> Tensor:
        return super().forward(through_mxfp8(x), plane, bias)

    def backward(self, grad: Tensor, plane: Plane) -> Tensor:
        return super().backward(through_mxfp8(grad), plane)


@formats
def test_native_products_hand_the_right_operands_over(
    format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(fp8_products, "native_problem", lambda device: None)
    stored, bias = FP8Tensor.encode(spread(160), format), made(160, seed=5)
    results = []
    for products in (Native(torch.device("cpu")), Rounding()):
        x = made(TOKENS, COLUMNS, seed=6).requires_grad_()
        y = fp8_linear(x, stored, bias, matmul=products)
        y.backward(made(TOKENS, 160, seed=7))
        results.append((y, x.grad))
    for native, emulated in zip(*results, strict=True):
        assert native is not None and emulated is not None
        torch.testing.assert_close(native, emulated, rtol=1e-5, atol=1e-4)
    plain = fp8_linear(made(TOKENS, COLUMNS, seed=6), stored, bias)
    assert not torch.allclose(plain, results[0][0], rtol=1e-3, atol=1e-3)  # activations do round


def test_native_products_are_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FP8Error, match="cpu multiplies no MXFP8: use products='emulated'"):
        Native(torch.device("cpu"))
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
    ("options", "words"),
    [
        ({"x": made(TOKENS, 64)}, ["(10, 64)", "must be 96"]),
        ({"x": made(TOKENS, COLUMNS).half()}, ["torch.float16", "bf16 and fp32"]),
        ({"bias": made(COLUMNS)}, ["bias", "(64,)"]),
        ({"parameter": nn.Parameter(made(COLUMNS, ROWS))}, ["(96, 64)", "a weight of (64, 96)"]),
        ({"x": made(TOKENS, 64).half(), "bias": made(3)}, ["must be 96", "float16", "bias"]),
    ],
)
def test_what_can_not_hold_is_refused_by_name(options: dict[str, Any], words: list[str]) -> None:
    x = options.pop("x", made(TOKENS, COLUMNS))
    with pytest.raises(FP8Error) as caught:
        fp8_linear(x, FP8Tensor.encode(made(ROWS, COLUMNS)), **options)
    assert [word for word in words if word not in str(caught.value)] == []
