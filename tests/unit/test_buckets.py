# SPDX-License-Identifier: Apache-2.0
"""Buckets: arithmetic alone, fuzzed, and the bars for published shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.padding import Weight, buckets_of, llama_3_8b, price
from shardwise.core.buckets import (
    LARGEST_BUCKET,
    LARGEST_WHOLE,
    MANY_BUCKETS,
    WHOLE_PADDING,
    Bucket,
    plan_elements,
    plan_matrices,
)
from shardwise.core.layout import ALIGNMENT, ELEMENT, ROW, TENSOR, Item, tensor_fraction

BUCKET = 1 << 27  # elements: 256 MiB of bf16


def deepseek_v3() -> list[Weight]:
    found = [Weight("embedding", (129280, 7168), matrix=False)]
    for layer in range(61):
        shapes = {
            "q_a": (1536, 7168),
            "q_b": (24576, 1536),
            "kv_a": (576, 7168),
            "kv_b": (32768, 512),
            "o": (7168, 16384),
        }
        if layer < 3:
            shapes |= {"gate": (18432, 7168), "up": (18432, 7168), "down": (7168, 18432)}
        else:
            shapes |= {"router": (256, 7168)}
            shapes |= {"s_gate": (2048, 7168), "s_up": (2048, 7168), "s_down": (7168, 2048)}
        found += [Weight(f"{layer}.{name}", shape) for name, shape in shapes.items()]
        if layer >= 3:
            found += _experts(layer, 256, 2048, 7168)
        norms = (("norm1", 7168), ("norm2", 7168), ("q_norm", 1536), ("kv_norm", 512))
        found += [Weight(f"{layer}.{name}", (size,), matrix=False) for name, size in norms]
    found += [Weight("norm", (7168,), matrix=False), Weight("head", (129280, 7168), matrix=False)]
    return found


def _experts(layer: int, count: int, inner: int, width: int) -> list[Weight]:
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return [Weight(f"{layer}.{n}", (count, *s), expert=True) for n, s in shapes.items()]


def layers(count: int, shapes: Sequence[tuple[int, ...]]) -> list[Item]:
    """In backprop order, whole, or whole experts for stacks."""
    return [
        Item(
            f"{layer}.{number}",
            shape,
            TENSOR if len(shape) == 2 else tensor_fraction(shape[0]),
        )
        for layer in reversed(range(count))
        for number, shape in enumerate(shapes)
    ]


def plan(items: Sequence[Item], num_shards: int, bucket_size: int) -> list[Bucket]:
    return plan_matrices(items, [price(item.shape) for item in items], num_shards, bucket_size)


def padding(buckets: Sequence[Bucket]) -> float:
    payload = sum(bucket.layout.payload for bucket in buckets)
    assert payload > 0, "nothing was planned"
    return sum(bucket.layout.padding for bucket in buckets) / payload


def loads(buckets: Sequence[Bucket], num_shards: int) -> list[int]:
    """Newton-Schulz of every shard, where all matrices are whole."""
    found = [0] * num_shards
    for bucket in buckets:
        for index, item in enumerate(bucket.layout.items):
            (holder,) = bucket.layout.holders(index)
            found[holder] += price(item.shape)
    return found


def holders(buckets: Sequence[Bucket]) -> Counter[int]:
    """How many matrices lie on one shard, on two, ..."""
    return Counter(
        len(bucket.layout.holders(index))
        for bucket in buckets
        for index, item in enumerate(bucket.layout.items)
        if item.name not in ("embedding", "head")  # which fill buckets
    )


# ------------------------------------------------------------------------------ published shapes


def test_llama_pads_little_for_every_number_of_ranks() -> None:
    """The issue's bar is 10 % for dp 2 to 1024, its goal 3 %; buckets do not collapse, and matrices
    are whole where there are enough of them."""
    weights = llama_3_8b()
    matrix = {weight.name: prod(weight.shape) for weight in weights if weight.matrix}
    total = sum(matrix.values())
    assert 6.9e9 < total < 7.0e9, "the matrices of Llama-3-8B"
    for dp in (*range(2, 130), *range(130, 1025, 7), 256, 512, 1024):
        matrices, rest = buckets_of(weights, dp)
        sizes = [
            [matrix[item.name] for item in bucket.layout.items if item.name in matrix]
            for bucket in matrices
        ]
        assert sum(map(len, sizes)) == 7 * 32
        assert padding(matrices) <= 0.03, dp
        assert padding(rest) <= 0.001 or len(rest[0].members) == 65, dp  # norms alone
        assert len(matrices) >= (MANY_BUCKETS if dp <= 16 or dp > 66 else 2), dp
        assert max(map(sum, sizes)) <= LARGEST_WHOLE * total, dp
        if dp <= 65 and dp not in (47, 49, 62):  # these would pad more than 1/32
            assert holders(matrices) == {1: 224}, f"every matrix is whole at {dp}"
            late = sum(sizes[-1])
            assert late <= (0.25 if dp <= 32 else 0.5) * total, f"overlap at {dp}"


@pytest.mark.parametrize("dp", [2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 19, 21, 26, 35])
def test_a_small_model_is_whole_by_default(dp: int) -> None:
    """112 matrices of two sizes, of which the larger is 2.75 of the smaller, and no embedding."""
    shapes = [(5632, 2048), (5632, 2048), (2048, 5632), *[(2048, 2048)] * 4]
    buckets = plan(layers(16, shapes), dp, BUCKET)
    assert holders(buckets) == {1: 112}
    assert padding(buckets) <= 1 / WHOLE_PADDING and len(buckets) >= (4 if dp < 26 else 2)


@pytest.mark.parametrize("dp", [2, 3, 8, 13, 64, 100, 256, 1009, 1024])
def test_mixtures_of_experts_pad_little(dp: int) -> None:
    matrices, rest = buckets_of(deepseek_v3(), dp)
    assert padding(matrices) <= 0.03
    assert padding(rest) <= 0.01
    assert len(matrices) >= MANY_BUCKETS


@pytest.mark.parametrize("dp", [2, 7, 13, 24, 49, 62, 64, 80, 96, 100, 127, 128, 225, 256, 1024])
def test_a_promise_of_whole_matrices_is_kept(dp: int) -> None:
    items = [Item(w.name, w.shape, TENSOR) for w in reversed(llama_3_8b()) if w.matrix]
    costs = [price(item.shape) for item in items]
    buckets = plan_matrices(items, costs, dp, BUCKET, grain="tensor")
    assert holders(buckets) == {1: 224}
    assert padding(buckets) <= (1 / 8 if dp <= 128 and dp != 80 else dp / 30)
    assert sorted(index for bucket in buckets for index in bucket.members) == list(range(224))


def test_small_buckets_instead_of_whole_matrices() -> None:
    items = [Item(w.name, w.shape, TENSOR) for w in reversed(llama_3_8b()) if w.matrix]
    costs = [price(item.shape) for item in items]
    for dp in (16, 64, 128):
        buckets = plan_matrices(items, costs, dp, BUCKET, grain=ROW)
        assert len(buckets) >= MANY_BUCKETS and padding(buckets) < 0.002
        assert max(bucket.layout.numel for bucket in buckets) <= LARGEST_BUCKET * BUCKET


# ------------------------------------------------------------------------------ repeated layers

SHAPES = [(256, 64), (64, 256), (64, 64), (64, 64), (16, 64)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 6])
def test_repeated_layers_are_whole_balanced_and_unpadded(num_shards: int) -> None:
    buckets = plan(layers(24, SHAPES), num_shards, 1 << 14)
    assert padding(buckets) == 0
    assert holders(buckets) == {1: 120}
    assert len(set(loads(buckets, num_shards))) == 1
    assert len(buckets) >= MANY_BUCKETS, "and there is something to overlap"


def test_more_ranks_than_matrices_share_them_by_rows() -> None:
    buckets = plan(layers(4, [(1024, 1024)]), 16, 1 << 20)
    assert padding(buckets) == 0 and holders(buckets) == {16: 4} and len(buckets) == 4
    assert {item.grain for bucket in buckets for item in bucket.layout.items} == {ROW}


def test_stacks_of_experts_are_cut_between_matrices() -> None:
    items = layers(4, [(8, 64, 32), (8, 32, 64)])
    for num_shards in (2, 4, 8, 16):
        for bucket in plan(items, num_shards, 1 << 15):
            for index, item in enumerate(bucket.layout.items):
                assert item.grain.kind == "tensor"
                for shard in bucket.layout.holders(index):
                    lo, hi = bucket.layout.piece(index, shard)
                    assert lo % (64 * 32) == hi % (64 * 32) == 0


def test_costs_balance_what_sizes_cannot_tell_apart() -> None:
    """Leftovers of one size and three costs: 3 shards get one of each."""
    items = [Item(f"{cost}.{copy}", (64, 64), TENSOR) for cost in (9, 5, 1) for copy in range(3)]
    costs = [int(item.name.split(".")[0]) for item in items]
    items.insert(4, Item("odd", (48, 64), TENSOR))
    costs.insert(4, 3)
    (bucket,) = plan_matrices(items, costs, 3, 1 << 20)
    found = [0] * 3
    for index, item in enumerate(bucket.layout.items):
        (holder,) = bucket.layout.holders(index)
        found[holder] += costs[items.index(item)]
    assert sorted(found) == [15, 15, 18]


def test_buckets_come_in_the_order_of_backward() -> None:
    items = layers(12, SHAPES)
    buckets = plan(items, 4, 1 << 14)
    complete = [bucket.complete_at for bucket in buckets]
    assert complete == sorted(complete)
    # The first bucket is complete when the first layers of backward are through, not at the end.
    assert complete[0] <= 4 * len(SHAPES)


# ------------------------------------------------------------------------------ anything at all

shapes = st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.tuples(
    st.integers(1, 6), st.integers(1, 12), st.integers(1, 12)
)


@settings(max_examples=150)
@given(
    st.lists(shapes, min_size=1, max_size=5),
    st.integers(1, 7),
    st.integers(1, 12),
    st.integers(1, 4000),
)
def test_any_matrices(
    kinds: list[tuple[int, ...]], count: int, num_shards: int, bucket_size: int
) -> None:
    items = layers(count, kinds)
    buckets = plan(items, num_shards, bucket_size)
    members = [member for bucket in buckets for member in bucket.members]
    assert sorted(members) == list(range(len(items))), "every matrix once"
    for bucket in buckets:
        assert bucket.layout.num_shards == num_shards
        assert [item.name for item in bucket.layout.items] == [
            items[member].name for member in bucket.members
        ]
        assert [item.shape for item in bucket.layout.items] == [
            items[member].shape for member in bucket.members
        ]
        for index, item in enumerate(bucket.layout.items):  # Layout itself checks the grains
            if item.grain == TENSOR:
                assert len(bucket.layout.holders(index)) == 1
    renamed = [Item(f"other {item.name}", item.shape, item.grain) for item in items]
    for ours, theirs in zip(buckets, plan(renamed, num_shards, bucket_size), strict=True):
        assert ours.members == theirs.members, "a function of shapes and places alone"
        assert ours.layout.starts == theirs.layout.starts


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 1 << 16),
)
def test_any_repeated_layers_are_unpadded(
    widths: list[int], num_shards: int, times: int, bucket_size: int
) -> None:
    """Aligned shapes, a multiple of the ranks of each: whatever is whole is exactly in rows."""
    items = layers(num_shards * times, [(64, 64 * width) for width in widths])
    buckets = plan(items, num_shards, bucket_size)
    whole = [
        bucket for bucket in buckets if all(item.grain == TENSOR for item in bucket.layout.items)
    ]
    assert all(bucket.layout.padding == 0 for bucket in whole)
    payload = sum(bucket.layout.payload for bucket in buckets)
    aligned = ALIGNMENT * num_shards * len(buckets)
    assert sum(bucket.layout.padding for bucket in buckets) <= payload // 64 + aligned


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 3000),
)
def test_any_elements(shapes: list[tuple[int, int]], num_shards: int, bucket_size: int) -> None:
    items = [Item(str(index), shape) for index, shape in enumerate(shapes)]
    buckets = plan_elements(items, num_shards, bucket_size)
    assert [member for bucket in buckets for member in bucket.members] == list(range(len(items)))
    for bucket in buckets:
        assert all(item.grain == ELEMENT for item in bucket.layout.items)
        assert bucket.layout.padding <= ALIGNMENT * (num_shards + len(bucket.members))
        assert sum(item.numel for item in bucket.layout.items[:-1]) < bucket_size
