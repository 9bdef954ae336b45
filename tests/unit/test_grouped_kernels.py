# SPDX-License-Identifier: Apache-2.0
"""The grouped kernels in Triton's interpreter, against the loop over experts.

Triton decides at import whether it interprets, so test_interpreter.py runs these tests in a process
of their own. (bf16 is wrong in the interpreter; tests/device_moe.py has it.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import INSIDE, inside, loops

pytest.importorskip("triton", reason="the kernels are an extra: pip install shardwise[triton]")


if INSIDE:
    from shardwise.kernels import grouped, grouped_activation, grouped_fc1, grouped_weight
    from shardwise.moe.activation import Form, activate, clamped_quick_geglu, squared_relu, swiglu
    from shardwise.moe.grouped_mlp import GroupedMLP
    from shardwise.moe.products import LOOP, FusedProducts, Into, LoopProducts, products_for
    from tests.unit.test_grouped_mlp import data, ends_of, names_of, relative, together

    ACTIVATIONS = {
        "swiglu": swiglu(),
        "clamped": clamped_quick_geglu(alpha=1.702, limit=0.7, offset=1.0),
        "squared relu": squared_relu(),
        "narrow": swiglu(),
    }

COUNTS = [5, 0, 41, 16, 1]
HIDDEN, WIDTH = 16, 32


pytestmark = loops


def through(mlp: GroupedMLP, path: str, fuse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward; fused, by small tiles, and the first product with its activation."""
    if path == "fused":
        tile = grouped.SMALL_FC1_TILE if fuse else None
        mlp.products = FusedProducts(tile, grouped.SMALL_WEIGHT_TILE)
    else:
        mlp.products = LOOP
    x, p, dy = data(COUNTS)
    y = mlp(x, ends_of(COUNTS), p)
    y.backward(dy)
    return y.detach(), x, p


@inside
@pytest.mark.parametrize(
    ("name", "block", "fuse"),
    [
        ("swiglu", 0, True),
        ("swiglu", 8, True),
        ("swiglu", 4, True),  # the fused product has no tile for it
        ("clamped", 8, True),
        ("clamped", 0, False),
        ("squared relu", 0, True),
        ("squared relu", 0, False),
        ("narrow", 0, True),  # by the other tile
    ],
)
def test_the_fused_path_equals_the_loop(
    name: str, block: int, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 24 if name == "narrow" else WIDTH
    poison(monkeypatch)
    results = []
    for path in ("loop", "fused"):
        options: Any = {"gate_up_block": block, "bias": name != "swiglu"}
        mlp = wide(ACTIVATIONS[name], width, **options)
        for parameter in mlp.parameters():
            parameter.main_grad = torch.ones(parameter.shape)
        y, x, p = through(mlp, path, fuse)
        gradients = [together(mlp, each, "main_grad") - 1 for each in names_of(mlp)]
        results.append([y, x.grad, p.grad, *gradients])
    for number, (loop, fused) in enumerate(zip(*results, strict=True)):
        assert relative(fused, loop.double()) < 2e-6, number


@inside
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["clamped", "squared relu"])
def test_a_clamp_does_not_hide_what_is_not_a_number(name: str, fuse: bool) -> None:
    """A broken weight is seen in the output and in every gradient, as on the other paths."""
    results = []
    for path in ("loop", "fused"):
        mlp = wide(ACTIVATIONS[name])
        with torch.no_grad():  # a gate of one expert, an up of another
            mlp.fc1.weight[2, 3] = mlp.fc1.weight[3, -1] = torch.nan
        y, x, p = through(mlp, path, fuse)
        gradients = [together(mlp, each, "grad") for each in names_of(mlp)]
        results.append([value.isnan() for value in (y, x.grad, p.grad, *gradients)])
    for number, (loop, fused) in enumerate(zip(*results, strict=True)):
        assert loop.any() and torch.equal(fused, loop), number


def wide(activation: Any, width: int = WIDTH, **options: Any) -> GroupedMLP:
    mlp = GroupedMLP(len(COUNTS), HIDDEN, width, activation=activation, **options)
    generator = torch.Generator().manual_seed(5)
    for parameter in mlp.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return mlp


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote is NaN."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poisoned(*args: Any, original: Any = original, **kwargs: Any) -> Tensor:
            made = original(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(torch, name, poisoned)


@inside
def test_a_fused_path_is_taken_where_it_is_possible() -> None:
    assert isinstance(products_for(torch.randn(4, 16), 16, 24), FusedProducts)
    assert not isinstance(products_for(torch.randn(4, 16).bfloat16(), 16, 24), FusedProducts)


@inside
def test_views_are_read_as_they_are() -> None:
    """Router weights and ends that are columns of something; biases that lie apart."""
    mlp = wide(ACTIVATIONS["swiglu"], bias=True, weight_layout="indexed")
    x, p, _ = data(COUNTS)
    expected = mlp(x, ends_of(COUNTS), p)
    for index, bias in enumerate(mlp.fc1.experts("bias").parameters):
        if index == 0:
            apart = torch.full((len(COUNTS), 2, bias.numel()), float("nan"))
        bias.data = apart[index, 0].copy_(bias.data)
    strided = [torch.stack([t, -t], 1)[:, 0] for t in (ends_of(COUNTS), p.detach())]
    found = mlp(x, *strided)
    assert not strided[0].is_contiguous()
    assert torch.equal(found, expected)


@inside
@pytest.mark.parametrize("band", [1, 3])
@pytest.mark.parametrize("flatten", [True, False])
def test_the_walk_over_tiles_does_not_change_the_result(band: int, flatten: bool) -> None:
    tile = grouped.GroupedTile(
        rows=16, columns=32, step=16, warps=4, stages=2, band=band, flatten=flatten
    )
    mlp = wide(ACTIVATIONS["swiglu"])
    x, p, _ = data(COUNTS)
    w1 = mlp.fc1.experts("weight").value(torch.float32)
    numbers: Any = {"gated": True, "alpha": 1.0, "limit": None, "offset": 0.0, "block": 0}
    found = grouped_fc1.fc1(x.detach(), w1, None, p.detach(), ends_of(COUNTS), tile=tile, **numbers)
    expected = LoopProducts().activated(
        x.detach(), w1, None, p.detach(), ends_of(COUNTS), Form(ACTIVATIONS["swiglu"], 0)
    )
    assert all(relative(a, b.double()) < 1e-6 for a, b in zip(found, expected, strict=True))


@inside
def test_the_pass_covers_every_row_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 rows of 24 columns, 2 and 16 at a time: the last of each are not whole."""
    poison(monkeypatch)
    z, p = torch.randn(7, 48), torch.rand(7)
    form = Form(ACTIVATIONS["swiglu"], 8)
    found = grouped_activation.forward(z, p, chunk=16, elements=32, **form.numbers)
    torch.testing.assert_close(found, activate(z, p, form))


@inside
@pytest.mark.parametrize("counts", [[0, 0, 0], [33, 0, 0], [0, 16, 17]], ids=str)
def test_the_schedule_lists_every_block_once(counts: list[int]) -> None:
    blocks, number = grouped_fc1.schedule(ends_of(counts), sum(counts), 16)
    found = [(entry & 0xFFFF, entry >> 16) for entry in blocks[: int(number)].tolist()]
    assert found == [(e, b) for e, n in enumerate(counts) for b in range(-(-n // 16))]


@inside
def test_weight_gradients_overwrite_add_and_round() -> None:
    a, b = torch.randn(63, 40), torch.randn(63, 24)
    tile = grouped.SMALL_WEIGHT_TILE
    ends = ends_of(COUNTS)
    expected = LoopProducts().weight_gradient(a, b, ends, Into(torch.float32))
    spaced = torch.full((5, 2, 40, 24), float("nan"))[:, 0]  # experts at even distances
    grouped_weight.weight_gradient(a, b, ends, spaced, add=False, tile=tile)
    torch.testing.assert_close(spaced, expected)
    grouped_weight.weight_gradient(a, b, ends, spaced, add=True, tile=tile)
    torch.testing.assert_close(spaced, 2 * expected)
    half = torch.full((5, 40, 24), float("nan"), dtype=torch.float16)
    grouped_weight.weight_gradient(a.half(), b.half(), ends, half, add=False, tile=tile)
    assert relative(half, expected.double()) < 1e-3
