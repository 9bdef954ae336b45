# SPDX-License-Identifier: Apache-2.0
"""fp8 in blocks of 128 where sides are no multiples of 128: the last blocks are partial."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.buckets import plan_elements, plan_matrices
from shardwise.core.layout import ELEMENT, ROW, TENSOR, Item, Layout, plan, rows
from shardwise.precision import fp8
from shardwise.precision.fp8 import (
    SQUARE_128,
    FP8Error,
    decode_reference,
    encode_reference,
)
from shardwise.precision.fp8_codec import FP8, share_of
from shardwise.precision.policy import ineligible
from tests.parity.mxfp8_helpers import coded

SIDES = st.integers(8, 30).map(lambda count: 16 * count)  # 128 to 480


def made(*shape: int, seed: int = 0) -> Tensor:
    """Over some powers of two, and none below 2^-20, so that padding would be seen in a scale."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, -4, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(powers)


def block_by_block(x: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
    """Codes and scales by a loop over blocks, each of the elements that exist."""
    values = x.bfloat16().float()
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(math.ceil(len(x) / high), math.ceil(x.shape[1] / wide))
    for band in range(scales.shape[0]):
        for strip in range(scales.shape[1]):
            there = slice(band * high, (band + 1) * high), slice(strip * wide, (strip + 1) * wide)
            block = values[there]
            scale = block.abs().max().clamp(min=2.0**-100) * torch.tensor(1 / 448)
            scales[band, strip] = scale
            codes[there] = (block * scale.reciprocal()).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales


def assert_encoded(x: Tensor, block: fp8.Block) -> None:
    codes, scales = block_by_block(x, *block)
    found, found_scales = encode_reference(x, block)
    assert torch.equal(found_scales, scales), "scales"
    assert torch.equal(found, codes), "codes"
    values = decode_reference(found, found_scales, block, torch.float32)
    assert values.shape == x.shape and values.is_contiguous()
    factors = scales.repeat_interleave(block[0], 0)[: len(x)]
    factors = factors.repeat_interleave(block[1], 1)[:, : x.shape[1]]
    assert torch.equal(values, codes.view(torch.float8_e4m3fn).float() * factors)


@settings(max_examples=15, deadline=None)
@given(SIDES, SIDES)
def test_scales_are_of_the_elements_that_exist(high: int, wide: int) -> None:
    for block in (SQUARE_128, fp8.ROW_128):
        assert_encoded(made(high, wide), block)


def test_padding_with_other_than_zeros_is_noticed() -> None:
    wrong = partial(F.pad, value=1.0)
    with mock.patch.object(fp8.F, "pad", wrong), pytest.raises(AssertionError, match="scales"):
        assert_encoded(made(144, 192), SQUARE_128)


def decoded(x: Tensor, block: fp8.Block) -> Tensor:
    return decode_reference(*block_by_block(x, *block), block, torch.float32)


@pytest.mark.parametrize(("high", "wide"), [(192, 320), (320, 144), (256, 208), (176, 384)])
def test_products_are_those_of_the_decoded_operands(high: int, wide: int) -> None:
    tokens, stored = 150, coded(made(high, wide), "fp8_block").requires_grad_()
    assert stored.scales.shape == (math.ceil(high / 128), math.ceil(wide / 128))
    x = made(tokens, wide, seed=1).bfloat16().requires_grad_()
    grad, bias = made(tokens, high, seed=2).bfloat16(), made(high, seed=3).bfloat16()
    y = F.linear(x, stored, bias)
    y.backward(grad)
    weight, row = decoded(made(high, wide), SQUARE_128), fp8.ROW_128
    flat = x.detach().float()
    assert x.grad is not None and stored.grad is not None
    assert torch.equal(y, (decoded(flat, row) @ weight.t()).bfloat16() + bias)
    assert torch.equal(x.grad, (decoded(grad.float(), row) @ weight).bfloat16())
    whole = F.pad(flat, (0, 0, 0, -tokens % 128)), F.pad(grad.float(), (0, 0, 0, -tokens % 128))
    turned_x, turned_grad = (each.t().contiguous() for each in whole)
    of_weight = decoded(turned_grad, row) @ decoded(turned_x, SQUARE_128).t()
    torch.testing.assert_close(stored.grad, of_weight.bfloat16(), rtol=1e-2, atol=1e-6)


def test_planes_hold_partial_blocks() -> None:
    codes, scales = torch.empty(192, 320, dtype=torch.uint8), torch.ones(2, 2)
    with pytest.raises(FP8Error, match=r"expected \(2, 3\)"):
        fp8.Plane(codes=codes, scales=scales, block=SQUARE_128)


def test_sides_that_hardware_does_not_multiply_are_refused_by_name() -> None:
    precision = sw.Precision(weights="fp8_block")
    stack: Any = type("Stack", (nn.Module,), {"multiplies_decoded": True})
    for shape, owner, words in (
        ((320, 200), nn.Linear, r"shape \(320, 200\): 200 columns are no multiple of 16"),
        ((200, 320), nn.Linear, "200 rows are no multiple of 16"),
        ((320, 112), nn.Linear, "a side of 112 is less than a block of 128"),
        ((16, 320), nn.Linear, "a side of 16 is less than a block of 128"),
        ((4, 192, 128), stack, r"\(4, 192, 128\): experts have no partial blocks of 128"),
    ):
        reason = ineligible("layer.weight", shape, precision, [owner])
        assert reason is not None
        with pytest.raises(ValueError, match=words):
            raise ValueError(reason)
    for shape, owner in (((192, 320), nn.Linear), ((4, 256, 128), stack), ((128, 144), nn.Linear)):
        assert ineligible("layer.weight", shape, precision, [owner]) is None


# ------------------------------------------------------------------------- where the scales lie


def staged(layout: Layout) -> str:
    return FP8("fp8_block", "fp8").staged_because(layout)


def assert_scales_have_places(layout: Layout) -> None:
    """Views of the buffers share no element, and a shard has the scales of its codes."""
    codec = FP8("fp8_block", "fp8")
    buffers = [torch.zeros(layout.num_shards * size, dtype=d) for d, size in codec.room(layout)]
    per_shard, seen = codec.room(layout)[1][1], set()
    for index, item in enumerate(layout.items):
        scales = codec.view(buffers, layout, index).scales
        places = torch.arange(len(buffers[1])).as_strided(
            scales.shape, scales.stride(), scales.storage_offset()
        )
        mine = set(places.flatten().tolist())
        assert len(mine) == scales.numel() and not mine & seen, "an address of two scales"
        seen |= mine
        for shard in layout.holders(index) if not staged(layout) else ():
            low, high = (at // item.shape[1] for at in layout.piece(index, shard))
            there = places[low // 128 : math.ceil(high / 128)]
            assert (there // per_shard == shard).all(), "a rank sends the scales of its codes"


SHAPES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 5), st.sampled_from([rows(128), TENSOR]))
def test_scales_of_partial_blocks_have_places_of_their_own(
    shapes: list[tuple[int, int]], num_shards: int, grain: Any
) -> None:
    items = [Item(f"w{n}", shape, grain, 128) for n, shape in enumerate(shapes)]
    layout = plan(items, num_shards)
    assert not staged(layout)
    assert share_of(layout, SQUARE_128) >= 256
    assert_scales_have_places(layout)
    loose = plan([Item(f"w{n}", s, ELEMENT, 128) for n, s in enumerate(shapes)], num_shards)
    assert_scales_have_places(loose)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 4))
def test_buckets_begin_at_blocks(shapes: list[tuple[int, int]], num_shards: int) -> None:
    items = [Item(f"w{n}", shape, TENSOR, 128) for n, shape in enumerate(shapes)]
    costs = [item.numel for item in items]
    buckets = plan_matrices(items, costs, num_shards, 100_000)
    buckets += plan_elements(items, num_shards, 100_000)
    for bucket in buckets:
        assert_scales_have_places(bucket.layout)
        if staged(bucket.layout):
            cut = any(len(bucket.layout.holders(n)) > 1 for n in range(len(bucket.members)))
            assert cut, "only where a shard cuts a block"


def test_whole_blocks_have_their_scales_where_they_had_them() -> None:
    items = [Item("a", (256, 384), rows(128), 128), Item("b", (128, 128), rows(128), 128)]
    layout = plan(items, 2)
    assert share_of(layout, SQUARE_128) == 128 * 128
    misplaced = Layout(tuple(items), 1, layout.numel + 64, (64, 64 + items[0].numel))
    assert share_of(misplaced, SQUARE_128) == 0, "bf16 is sent, as before"
    assert staged(plan([Item("a", (192, 144), ROW, 128)], 3))
