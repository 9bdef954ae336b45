# SPDX-License-Identifier: Apache-2.0
"""Buckets: the parameters of a model that share a flat buffer, and their places in the buffer.

Pure arithmetic, the same on every rank. Parameters are given in backprop order. A bucket is reduced
once its last gradient has come, so buckets are listed in the order of their completion.

A matrix optimizer needs whole matrices, and shards have equal sizes. So matrices of equal size and
cost are arranged in *rows*, one matrix for each of the N shards. Nothing is padded, and all ranks
compute equally much. A matrix for which the row is full starts the next row. A bucket is full when
it has ``bucket_size`` elements:

    4 shards, backprop order  g0 q0 k0 g1 q1 k1 ..       (gate, query, key of a layer)

    shard 0  | g0    | q0  | k0 |
    shard 1  | g1    | q1  | k1 |        one bucket of 4 layers, three rows
    shard 2  | g2    | q2  | k2 |
    shard 3  | g3    | q3  | k3 |

Matrices that fill no row (the end of the model, a prime number of ranks) are packed whole into one
bucket. The last rows of some sizes join them if the padding is then smaller: small matrices fill
the gaps beside large ones. A parameter that may be cut anywhere (an embedding) fills shards that
are still empty:

    shard 0  | g4          |
    shard 1  | q4   | k4 ..|
    shard 2  | embedding   |
    shard 3  | embedding ..|

In this way all matrices are whole, at the price of a large bucket and of padding:

- By default a bucket may have 55 % of all matrices, and padding may be 1/32. A bucket has N shards,
  each as long as its longest matrix, and is reduced once its last gradient has come. With one
  bucket for the whole model no reduction would overlap with backward.
- ``grain="tensor"`` promises whole matrices on any number of ranks. The bucket may have the whole
  model, and padding is what it takes; plans and the layout say how much.

Beyond the default limits, and where there are fewer matrices than ranks, matrices are cut by rows
(by elements, if rows would pad), and the optimizer gathers the parts of a matrix. A stack
``[experts, out, in]`` of which a row would be a large bucket is cut between its matrices, which
keeps them whole.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from shardwise.core.layout import (
    ALIGNMENT,
    CHEAP_PADDING,
    ELEMENT,
    ROW,
    Grain,
    Item,
    Layout,
    plan,
)

# The largest part of all matrices that one bucket may have to keep matrices whole, so that one
# bucket is reduced while backward fills the next.
LARGEST_WHOLE = 0.55
# Rows, or parts of matrices, share a bucket as long as about this many buckets remain ...
MANY_BUCKETS = 8
# ... and up to this many times ``bucket_size``: all gradients of a bucket are in memory at once.
LARGEST_BUCKET = 8
# A row of at most so many elements takes no time to send, so its matrices are never cut.
SMALL_ROW = 1 << 20
# The largest padding, as 1/n of all matrices:
LITTLE_PADDING = 64  # counts as little
WHOLE_PADDING = 32  # to keep matrices whole
CUT_PADDING = 128  # of a bucket that is cut by rows
BLOCK_PADDING = 16  # of a bucket, to keep fp8 blocks whole: cut blocks are sent as bf16
MOST_TRIED = 12  # choices of rows that may join the matrices that fill no row
MOST_FILL = 2  # parameters that fill empty shards of one bucket


@dataclass(frozen=True)
class Bucket:
    """Parameters of one flat buffer: their positions among the planned items, and their layout."""

    members: tuple[int, ...]
    layout: Layout

    @property
    def complete_at(self) -> int:
        """The position, in backprop order, of the last gradient that the bucket waits for."""
        return max(self.members)


def plan_elements(items: Sequence[Item], num_shards: int, bucket_size: int) -> list[Bucket]:
    """Buckets for parameters that may be cut anywhere: neighbours in backprop order, without
    padding, or with a little padding that keeps fp8 blocks whole."""
    by_elements = [replace(item, grain=ELEMENT) for item in items]
    by_blocks = [_cut_between_blocks(item) for item in items]
    buckets = []
    for members in _in_order(items, bucket_size):
        bucket = _planned(by_blocks, members, num_shards)
        if bucket.layout.padding > max(bucket.layout.payload // BLOCK_PADDING, CHEAP_PADDING):
            bucket = _planned(by_elements, members, num_shards)
        buckets.append(bucket)
    return buckets


def _cut_between_blocks(item: Item) -> Item:
    """The parameter with a grain that keeps its fp8 blocks whole, or the matrices of a stack; by
    elements if it has no blocks."""
    rows = Grain("rows", item.side if len(item.shape) < 3 else 1)
    return replace(item, grain=rows if item.side > 1 else ELEMENT)


def plan_matrices(
    items: Sequence[Item],
    costs: Sequence[int],
    num_shards: int,
    bucket_size: int,
    *,
    fill: Sequence[Item] = (),
    grain: Any = None,
) -> list[Bucket]:
    """Buckets for matrices, whose grains say what must stay together for their optimizer.

    Args:
        items: matrices in backprop order, of grain ``tensor``, or ``tensor/E`` for a stack of E
            matrices.
        costs: the optimizer's work for each matrix, by which shards are balanced.
        bucket_size: number of elements from which on a bucket is large enough to be sent.
        fill: parameters that may be cut anywhere, in backprop order. If they fill a bucket, its
            members include them, numbered after the matrices.
        grain: "tensor": cut no matrix, whatever is padded. ROW: cut a matrix instead of making a
            bucket much larger than ``bucket_size``.
    """
    assert len(items) == len(costs) and num_shards > 0 and bucket_size > 0
    total = sum(item.numel for item in items)
    limit = max(bucket_size, min(total // MANY_BUCKETS, LARGEST_BUCKET * bucket_size))
    share = {"tensor": 1.0, ROW: 0.0}.get(grain, LARGEST_WHOLE)
    largest = max(limit, int(total * share))
    filler = [_cut_between_blocks(item) for item in fill]
    little, modest = (
        max(total // fraction, CHEAP_PADDING) for fraction in (LITTLE_PADDING, WHOLE_PADDING)
    )
    allowed = num_shards * total if grain == "tensor" else modest
    # Stacks of which a row would be a large bucket are cut between their matrices.
    stacks = [
        index
        for index, item in enumerate(items)
        if grain != "tensor" and item.grain.count > 1 and num_shards * item.numel > limit
    ]
    cut = _cut_anywhere(items, stacks, num_shards, bucket_size)
    rows, loose = _in_rows(items, costs, num_shards, max(largest, SMALL_ROW), set(stacks))
    best = None
    for kept, members in _choices(items, rows, loose, bucket_size, limit):
        if not members:
            return _built(items, kept, num_shards, cut)
        size = sum(items[index].numel for index in members)
        padding = num_shards * max(items[index].grain_size for index in members) - size
        if size <= largest and padding - sum(item.numel for item in filler) <= allowed:
            packed = _packed([*items, *filler], costs, members, num_shards, little)
            padding = packed.layout.padding
            # Choices come smallest bucket first. Take the first that pads little, else the first
            # that pads modestly, else the one that pads least.
            grade = 0 if padding <= little else max(padding, modest)
            if padding <= allowed and (best is None or grade < best[0]):
                best = grade, kept, packed
            if grade == 0:
                break
    if best is not None:
        return _built(items, best[1], num_shards, [*cut, best[2]])
    cut += _cut_anywhere(items, loose, num_shards, bucket_size)
    buckets, small = _in_buckets(items, rows, bucket_size, limit)
    return _built(items, [*buckets, small] if small else buckets, num_shards, cut)


# ------------------------------------------------------------------------------ rows


_Row: TypeAlias = list[int]  # matrices of equal size and cost, one for each shard


def _in_rows(
    items: Sequence[Item],
    costs: Sequence[int],
    num_shards: int,
    largest: int,
    without: Container[int],
) -> tuple[list[_Row], list[int]]:
    """(full rows, in the order in which they become full; the matrices in no full row)."""
    queues: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    rows: list[_Row] = []
    for index, (item, cost) in enumerate(zip(items, costs, strict=True)):
        if index not in without:
            queue = queues[item.numel, cost]
            queue.append(index)
            if len(queue) == num_shards and (num_shards * item.numel <= largest or len(queue) == 1):
                rows.append(queues.pop((item.numel, cost)))
    return rows, sorted(index for queue in queues.values() for index in queue)


def _choices(
    items: Sequence[Item], rows: Sequence[_Row], loose: list[int], bucket_size: int, limit: int
) -> Iterator[tuple[list[list[_Row]], list[int]]]:
    """Choices of (buckets of rows, members of one more bucket).

    The one more bucket has the matrices in no row: first alone, then with the last rows of some
    sizes, fewest elements first, at last with all rows. If the rows that stay do not fill a bucket,
    they join it too, or are a bucket by themselves.
    """
    rows_of: defaultdict[int, list[_Row]] = defaultdict(list)  # by the size of a matrix
    for row in rows:
        rows_of[items[row[0]].numel].append(row)
    sizes = list(rows_of)
    waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # (elements, sizes) of rows that join
    for _ in range(MOST_TRIED):
        if not waiting:
            return
        elements, joined = heapq.heappop(waiting)
        last = [row for at in set(joined) for row in rows_of[sizes[at]][-joined.count(at) :]]
        members = sorted(sum(last, loose))
        buckets, small = _in_buckets(items, [r for r in rows if r not in last], bucket_size, limit)
        if small and loose:
            yield buckets, sorted(sum(small, members))
        yield [*buckets, small] if small else buckets, members
        for at in range(joined[-1] if joined else 0, len(sizes)):
            if joined.count(at) < len(rows_of[sizes[at]]):
                more = sizes[at] * len(rows[0])
                heapq.heappush(waiting, (elements + more, (*joined, at)))
    yield [], sorted(sum(rows, loose))


def _in_buckets(
    items: Sequence[Item], rows: Sequence[_Row], bucket_size: int, limit: int
) -> tuple[list[list[_Row]], list[_Row]]:
    """(the rows of each bucket, the last rows if they do not fill a bucket)."""
    buckets: list[list[_Row]] = []
    small: list[_Row] = []
    size = 0
    for row in rows:
        more = len(row) * items[row[0]].numel
        if small and size + more > limit:
            buckets.append(small)
            small, size = [], 0
        small, size = [*small, row], size + more
        if size >= bucket_size:
            buckets.append(small)
            small, size = [], 0
    return buckets, small


def _built(
    items: Sequence[Item], kept: Sequence[Sequence[_Row]], num_shards: int, others: Sequence[Bucket]
) -> list[Bucket]:
    """All buckets, in the order of their completion."""
    buckets = [_bucket_of(items, rows, num_shards) for rows in kept]
    return sorted([*buckets, *others], key=lambda bucket: bucket.complete_at)


def _bucket_of(items: Sequence[Item], rows: Sequence[_Row], num_shards: int) -> Bucket:
    """A bucket with these rows, one after the other. Member j of a row lies on shard j."""
    lengths = [_aligned(items[row[0]].room) for row in rows]
    starts: dict[int, int] = {}
    for row, offset in zip(rows, itertools.accumulate(lengths, initial=0), strict=False):
        for shard, index in enumerate(row):
            starts[index] = shard * sum(lengths) + offset
    members = tuple(sorted(starts))
    layout = Layout(
        tuple(items[index] for index in members),
        num_shards,
        sum(lengths),
        tuple(starts[index] for index in members),
    )
    return Bucket(members, layout)


# ------------------------------------------------------------------------------ without rows


def _in_order(items: Sequence[Item], bucket_size: int) -> list[list[int]]:
    """Runs of neighbours. A run ends as soon as it has ``bucket_size`` elements."""
    runs: list[list[int]] = []
    size = bucket_size
    for index, item in enumerate(items):
        if size >= bucket_size:
            runs.append([])
            size = 0
        runs[-1].append(index)
        size += item.numel
    return runs


def _planned(items: Sequence[Item], members: Sequence[int], num_shards: int) -> Bucket:
    return Bucket(tuple(members), plan([items[index] for index in members], num_shards))


def _packed(
    items: Sequence[Item],
    costs: Sequence[int],
    members: Sequence[int],
    num_shards: int,
    budget: int,
) -> Bucket:
    """A bucket of whole matrices, as balanced in cost as the size of its shards allows.

    If the bucket would pad more than the budget, ``items`` behind the matrices fill it: the latest
    in backprop order first, because such a bucket is complete late.
    """
    bucket = _planned(items, members, num_shards)
    filled = list(members)
    for index in reversed(range(len(costs), len(items))):
        gap = bucket.layout.padding
        if gap <= budget or len(filled) == len(members) + MOST_FILL:
            break
        if items[index].numel * 8 > gap:  # small parameters would fill little
            filled.append(index)
            other = _planned(items, sorted(filled), num_shards)
            bucket = min(bucket, other, key=lambda bucket: bucket.layout.padding)
    return _balanced(items, costs, bucket)


def _balanced(items: Sequence[Item], costs: Sequence[int], bucket: Bucket) -> Bucket:
    """The bucket with its matrices moved between shards so that costs are more even, and with other
    parameters in the last shards. The same bucket if its matrices do not fit so."""
    num_shards, size = bucket.layout.num_shards, bucket.layout.shard_size
    matrices = [index for index in bucket.members if index < len(costs)]
    if any(items[index].grain_size < items[index].numel for index in matrices) or size % ALIGNMENT:
        return bucket  # stacks span several shards: costs are as balanced as bytes
    starts, end = {}, num_shards * size
    for index in bucket.members[len(matrices) :]:
        end -= _aligned(items[index].room)
        starts[index] = end
    free = [min(size, end - shard * size) for shard in range(num_shards)]
    # (load, -free elements, shard): the least loaded shard first, among equals the emptiest.
    heap = [(0, -free[shard], shard) for shard in range(num_shards)]
    smallest = min(items[index].numel for index in matrices)
    for index in sorted(matrices, key=lambda i: (-costs[i], -items[i].numel, i)):
        full: list[tuple[int, int, int]] = []
        while heap and -heap[0][1] < items[index].numel:
            full.append(heapq.heappop(heap))
        if not heap:
            return bucket
        load, _, shard = heapq.heappop(heap)
        starts[index] = min((shard + 1) * size, end) - free[shard]
        free[shard] -= _aligned(items[index].room)
        for entry in (*full, (load + costs[index], -free[shard], shard)):
            if -entry[1] >= smallest:
                heapq.heappush(heap, entry)
    addresses = tuple(starts[index] for index in bucket.members)
    return Bucket(bucket.members, Layout(bucket.layout.items, num_shards, size, addresses))


def _cut_anywhere(
    items: Sequence[Item], indices: Sequence[int], num_shards: int, bucket_size: int
) -> list[Bucket]:
    """Buckets that are cut by rows, and between matrices of a stack; by elements if that pads too
    much."""
    buckets = []
    for run in _in_order([items[index] for index in indices], bucket_size):
        members = tuple(indices[position] for position in run)
        chosen = [items[index] for index in members]
        by_rows = [item if len(item.shape) > 2 else replace(item, grain=ROW) for item in chosen]
        layout = plan(by_rows, num_shards)
        if layout.padding * CUT_PADDING > layout.payload:
            layout = plan([replace(item, grain=ELEMENT) for item in chosen], num_shards)
        buckets.append(Bucket(members, layout))
    return buckets


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
