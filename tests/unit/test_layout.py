# SPDX-License-Identifier: Apache-2.0
"""Layouts: every invariant as a property, small cases by hand, bounds on padding and time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core import layout as layout_module
from shardwise.core.layout import (
    ALIGNMENT,
    CHEAP_PADDING,
    ELEMENT,
    ROW,
    TENSOR,
    Item,
    Layout,
    cut_finer,
    plan,
    plan_groups,
    rows,
    tensor_fraction,
)
from shardwise.planning.shard_map import strip

GRAINS = [ELEMENT, ROW, rows(4), rows(32), TENSOR, tensor_fraction(2), tensor_fraction(3)]
dims = st.one_of(st.integers(1, 9), st.sampled_from([13, 16, 33, 64, 96, 101]))
shapes = st.lists(dims, max_size=3).map(tuple)
shard_counts = st.one_of(st.integers(1, 17), st.sampled_from([64, 257, 1024]))


@st.composite
def item_lists(draw: st.DrawFn, largest: int = 1 << 20) -> list[Item]:
    fitting = shapes.filter(lambda shape: prod(shape) <= largest)
    drawn = draw(st.lists(st.tuples(fitting, st.sampled_from(GRAINS)), min_size=1, max_size=9))
    return [Item(f"p{i}", shape, grain) for i, (shape, grain) in enumerate(drawn)]


def fsdp2_numel(items: list[Item], num_shards: int) -> int:
    """Elements that torch FSDP2 allocates: each parameter is padded to whole rows on every rank."""
    lengths = [item.shape[0] if item.shape else 1 for item in items]
    return sum(
        -(-length // num_shards) * num_shards * prod(item.shape[1:])
        for length, item in zip(lengths, items, strict=True)
    )


def price_of_alignment(items: list[Item], num_shards: int) -> int:
    """Shards round up to 64, and a parameter of odd rows can start at every 64th row only."""
    skipped = sum(min(ALIGNMENT * item.grain_size, item.numel) for item in items)
    return skipped + ALIGNMENT * num_shards * len(items)


def transformer_unit(dim: int = 2048, hidden: int = 5632) -> list[Item]:
    matrices = dict.fromkeys(("wq", "wk", "wv", "wo"), (dim, dim))
    matrices |= {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
    vectors = {"norm1": (dim,), "norm2": (dim,)}
    return [Item(name, shape) for name, shape in (matrices | vectors).items()]


# ------------------------------------------------------------------------------------- invariants


@settings(max_examples=250)
@given(item_lists(), shard_counts)
def test_invariants_hold(items: list[Item], num_shards: int) -> None:
    layout = plan(items, num_shards)
    assert layout.items == tuple(items)
    assert layout.numel == num_shards * layout.shard_size == layout.payload + layout.padding
    assert layout.payload == sum(prod(item.shape) for item in items)
    end = 0
    for start, item in sorted(zip(layout.starts, items, strict=True), key=lambda pair: pair[0]):
        assert start % ALIGNMENT == 0 and start >= end
        end = start + item.numel
        # Written as the definition, boundary by boundary, unlike the check in Layout.
        size, grain = layout.shard_size, item.grain.size(item.shape)
        for boundary in range(start // size * size + size, end, size):
            assert (boundary - start) % grain == 0, (item, start, size)
    assert end <= layout.numel


@settings(max_examples=150)
@given(item_lists(), st.integers(1, 17), st.integers(1, 5))
def test_pieces_cover_each_parameter_once(items: list[Item], count: int, run: int) -> None:
    layout = plan(items, count)
    for index, item in enumerate(items):
        edge = 0
        for first in range(0, count, run):
            lo, hi = layout.piece(index, first, min(run, count - first))
            assert 0 <= lo <= hi <= item.numel
            if lo < hi:
                assert lo == edge
                edge = hi
            assert prod(layout.piece_shape(index, lo, hi)) == hi - lo
        assert edge == item.numel
        holding = [r for r in range(count) if len(range(*layout.piece(index, r)))]
        assert list(layout.holders(index)) == holding != []


@settings(max_examples=150)
@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
def test_chunks_are_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    layout = plan([Item("w", shape, ELEMENT)], 3)
    numel = prod(shape)
    lo = data.draw(st.integers(0, numel))
    hi = data.draw(st.integers(lo, numel))
    seen = []
    boxes = layout.chunks(0, lo, hi)
    for offsets, sizes in boxes:
        assert len(offsets) == len(sizes) == len(shape)
        for place in product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))):
            flat = 0
            for coordinate, extent in zip(place, shape, strict=True):
                assert coordinate < extent
                flat = flat * extent + coordinate
            seen.append(flat)
    assert seen == list(range(lo, hi))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=150)
@given(item_lists(), shard_counts)
def test_groups_partition_and_do_not_explode(items: list[Item], num_shards: int) -> None:
    groups = plan_groups(items, num_shards)
    assert sorted(index for group in groups for index in group) == list(range(len(items)))
    total = sum(plan([items[i] for i in group], num_shards).numel for group in groups)
    alone = sum(plan([item], num_shards).numel for item in items)
    assert total <= alone * 17 // 8 + price_of_alignment(items, num_shards)


# ------------------------------------------------------------------------------------- exact cases


def test_the_picture_in_the_docstring() -> None:
    items = [Item("wq", (4, 64)), Item("wk", (4, 64)), Item("wo", (1, 64), TENSOR)]
    layout = plan(items, 3)
    assert (layout.shard_size, layout.starts, layout.padding) == (192, (0, 256, 512), 0)
    assert [layout.piece(1, r) for r in range(3)] == [(0, 0), (0, 128), (128, 256)]
    assert layout.piece(0, 0, 2) == (0, 256)
    assert [strip(layout, shard, 36) for shard in range(3)] == [
        "| wq rows 0-2                       |",
        "| wq rows 3-| wk rows 0-1           |",
        "| wk rows 2-3           | wo        |",
    ]


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("starts", "shard_size", "message"),
    [
        ((0, 32), 256, "'b' at 32 is not at a multiple of 64"),
        ((0, 64), 256, "'b' at 64 overlaps 'a', which ends at 128"),
        ((0, 960), 256, "'b' at 960 ends outside the buffer of 1024"),
        ((64, 256), 160, "'a' at 64 has a row of 64 elements cut at element 96"),
        ((512, 0), 160, "'b' at 0 has a tensor of 256 elements cut at element 160"),
        ((0,), 256, "1 starts for 2 parameters"),
    ],
)
def test_broken_layouts_are_refused_by_name(
    starts: tuple[int, ...], shard_size: int, message: str
) -> None:
    items = (Item("a", (2, 64)), Item("b", (4, 64), TENSOR))
    with pytest.raises(ValueError, match=message):
        Layout(items, 4, shard_size, starts)


# ------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("num_shards", [2, 8, 24, 60, 64, 128, 240, 256, 448, 512, 768, 1000, 1024])
def test_transformer_unit_pads_little(num_shards: int) -> None:
    items = transformer_unit()
    groups = plan_groups(items, num_shards)
    layouts = [plan([items[i] for i in group], num_shards) for group in groups]
    payload = sum(layout.payload for layout in layouts)
    padding = sum(layout.padding for layout in layouts)
    one_row_each = sum(
        num_shards * max(item.grain_size for item in layout.items) for layout in layouts
    )
    assert padding <= payload // 50 + one_row_each
    assert payload + padding <= fsdp2_numel(items, num_shards) * 1.032
    assert len(groups) <= 2


def test_odd_shapes_do_not_explode() -> None:
    items = [Item("a", (1009, 1009)), Item("b", (1013, 1013))]
    groups = plan_groups(items, 1024)
    assert groups == [(0,), (1,)]
    total = sum(plan([items[i] for i in group], 1024).numel for group in groups)
    assert total == 1024 * (1009 + 1013) == fsdp2_numel(items, 1024)


even_rows = st.tuples(st.integers(1, 3000), st.integers(1, 30).map(lambda width: 64 * width))
odd_rows = st.lists(st.integers(1, 300), min_size=2, max_size=3).map(tuple)


@pytest.mark.parametrize(("matrices", "factor"), [(even_rows, 17 / 16), (odd_rows, 17 / 8)])
@settings(max_examples=150)
@given(data=st.data(), num_shards=shard_counts)
def test_never_far_above_fsdp2(
    matrices: st.SearchStrategy, factor: float, data: st.DataObject, num_shards: int
) -> None:
    shape = st.one_of(st.tuples(st.integers(1, 3000)), matrices)
    some_shapes = data.draw(st.lists(shape, min_size=1, max_size=8))
    items = [Item(str(i), shape) for i, shape in enumerate(some_shapes)]
    groups = plan_groups(items, num_shards)
    total = sum(plan([items[i] for i in group], num_shards).numel for group in groups)
    price = price_of_alignment(items, num_shards)
    # Padding below CHEAP_PADDING is taken for one collective less.
    assert total <= fsdp2_numel(items, num_shards) * factor + max(price, CHEAP_PADDING)


# ------------------------------------------------------------------------------------- planner


def test_names_are_not_part_of_the_cache_key() -> None:
    plan([Item("layer0.w", (48, 80)), Item("layer0.b", (48,))], 5)
    before = layout_module._plan.cache_info()
    plan([Item("layer1.w", (48, 80)), Item("layer1.b", (48,))], 5)
    after = layout_module._plan.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


# The file alone, outside its package: it needs no torch, which the last line proves.
SCRIPT = """
import sys
from layout import *
shapes = [(101, 33), (7, 13), (64,), (), (5, 3, 7), (1009, 96), (33, 101), (12,), (96, 1009)]
items = [Item(f"p{i}", s, [ROW, TENSOR, ELEMENT][i % 3]) for i, s in enumerate(shapes)]
for n in (1, 3, 8, 64):
    print(plan(items, n).shard_size, plan(items, n).starts, plan_groups(items, n))
assert "torch" not in sys.modules
"""


def test_the_same_on_every_rank_whatever_the_hash_seed() -> None:
    outputs = []
    for seed in ("0", "1", "4242"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.path.dirname(layout_module.__file__),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout)
    assert len(outputs[0]) > 100 and len(set(outputs)) == 1


def trillion_unit(layer: int, expert_hidden: int) -> list[Item]:
    experts = {"gate": (expert_hidden, 7168), "up": (expert_hidden, 7168),
               "down": (7168, expert_hidden)}  # fmt: skip
    rest = {"q_a": (1536, 7168), "q_b": (24576, 1536), "kv_a": (576, 7168), "kv_b": (32768, 512),
            "o": (7168, 16384), "router": (384, 7168), "norm": (7168,)}  # fmt: skip
    return [
        Item(f"{layer}.{expert}.{name}", shape)
        for expert in range(384)
        for name, shape in experts.items()
    ] + [Item(f"{layer}.{name}", shape) for name, shape in rest.items()]


@pytest.mark.parametrize("step", [0, 64], ids=["repeated units", "61 different units"])
def test_a_trillion_parameters_over_1024_ranks(step: int) -> None:
    units = [trillion_unit(layer, 2048 + step * (layer - 30)) for layer in range(61)]
    layout_module._plan.cache_clear()
    began = time.process_time()
    groups = [plan_groups(unit, 1024) for unit in units]
    layouts = [
        plan([unit[i] for i in group], 1024)
        for unit, of_unit in zip(units, groups, strict=True)
        for group in of_unit
    ]
    seconds = time.process_time() - began
    payload = sum(layout.payload for layout in layouts)
    padding = sum(layout.padding for layout in layouts)
    print(f"\n{payload:.3e} parameters, {padding / payload:.2%} padding, {seconds:.2f} s")  # noqa: T201
    assert payload == sum(prod(item.shape) for unit in units for item in unit) > 10**12
    assert padding * 50 < payload
    assert seconds < 10


def test_rows_are_cut_where_whole_ones_would_be_padding() -> None:
    """A block of a GPT: few ranks keep rows, 4096 have twice as many places as matrices rows."""
    shapes = [(2048, 2048)] * 4 + [(5632, 2048)] * 2 + [(2048, 5632), (2048,), (2048,)]
    items = [Item(str(number), shape) for number, shape in enumerate(shapes)]
    for num_shards in (1, 8, 100, 1024):
        assert cut_finer(items, num_shards) == items, num_shards
    groups = [[items[index] for index in group] for group in plan_groups(items, 4096)]
    assert sum(plan(group, 4096).padding for group in groups) * 5 > sum(i.numel for i in items)
    finer = cut_finer(items, 4096)
    assert {item.grain for item in finer} == {ELEMENT}
    assert plan_groups(finer, 4096) == [tuple(range(len(items)))], "one buffer"
    layout = plan(finer, 4096)
    assert layout.padding * 100 < layout.payload
    assert cut_finer([Item("small", (3, 5))], 64) == [Item("small", (3, 5))], "not worth it"
    # In fp8, where twice the bytes are gathered then: not before half of a buffer is padding.
    experts = [Item("experts", (12, 1024, 256), side=128)]
    assert cut_finer(experts, 16) == experts and plan(experts, 16).padding * 3 == experts[0].numel
    assert cut_finer(experts, 64) == [replace(experts[0], grain=ELEMENT)], "64 experts for 12"
