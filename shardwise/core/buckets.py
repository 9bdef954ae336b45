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

Beyond the default limits, matrices are cut: in k equal parts (grain ``tensor/k``) if there are
fewer than N matrices of a size, or if a row of them is too large. A bucket then holds N/k matrices,
and k is as small as possible. The optimizer gathers the parts of a matrix.

    8 shards, k = 4           | g0 1/4 | g0 2/4 | g0 3/4 | g0 4/4 | g1 1/4 | g1 2/4 | ..

Matrices that fill no row of parts are packed whole if that pads little, else cut by rows, else by
elements. A stack ``[experts, out, in]`` may be cut between its matrices, which keeps them whole.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
    tensor_fraction,
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
CUT_PADDING = 128  # of a matrix in equal parts, or of a bucket that is cut by rows
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
    promised = num_shards * total  # any padding
    cut = _kinds(items, costs, num_shards, bucket_size, limit, largest)
    uncut = [
        kind if kind is not None and item.grain.count % kind.parts == 0 else None
        for item, kind in zip(items, cut, strict=True)
    ]
    # First with all matrices whole; then with cut rows, and the matrices that fill no row whole.
    for kinds, fillers, allowed, tries in (
        (uncut, filler, promised if grain == "tensor" else modest, MOST_TRIED),
        (cut, [], little, 1),
    ):
        rows, loose = _in_rows(kinds, num_shards)
        best = None
        for kept, members in _choices(rows, loose, tries, bucket_size, limit):
            if not members:
                return _built(items, kept, num_shards)
            size = sum(items[index].numel for index in members)
            padding = num_shards * max(items[index].grain_size for index in members) - size
            if size <= largest and padding - sum(item.numel for item in fillers) <= allowed:
                packed = _packed([*items, *fillers], costs, members, num_shards, little)
                padding = packed.layout.padding
                # Choices come smallest bucket first. Take the first that pads little, else the
                # first that pads modestly, else the one that pads least.
                grade = 0 if padding <= little else max(padding, modest)
                if padding <= allowed and (best is None or grade < best[0]):
                    best = grade, kept, packed
                if grade == 0:
                    break
        if best is not None:
            return _built(items, best[1], num_shards, best[2])
    runs = _in_order([items[index] for index in loose], bucket_size)
    rest = [_cut_anywhere(items, [loose[index] for index in run], num_shards) for run in runs]
    return _built(items, kept, num_shards, *rest)


# ------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class _Kind:
    """Equal matrices, which may be in one row, each in ``parts`` parts."""

    numel: int
    cost: int
    shape: tuple[int, ...]  # () for whole matrices: only sizes and costs matter
    parts: int


_Row: TypeAlias = tuple[_Kind, list[int]]  # (kind, members)


def _in_rows(kinds: Sequence[_Kind | None], num_shards: int) -> tuple[list[_Row], list[int]]:
    """(full rows, in the order in which they become full; the matrices in no full row)."""
    queues: defaultdict[_Kind | None, list[int]] = defaultdict(list)
    rows: list[_Row] = []
    for index, kind in enumerate(kinds):
        queues[kind].append(index)
        if kind is not None and len(queues[kind]) * kind.parts >= num_shards:
            rows.append((kind, queues.pop(kind)))
    return rows, sorted(index for queue in queues.values() for index in queue)


def _choices(
    rows: Sequence[_Row], loose: Sequence[int], tries: int, bucket_size: int, limit: int
) -> Iterator[tuple[list[list[_Row]], list[int]]]:
    """Choices of (buckets of rows, members of one more bucket).

    The one more bucket has the matrices in no row: first alone, then with the last rows of some
    kinds, fewest elements first, at last with all rows. If the last rows do not fill a bucket, they
    join it too, or are a bucket by themselves.
    """
    num_rows = Counter(kind for kind, _ in rows)
    sizes = {kind: _size([(kind, row)]) for kind, row in rows}
    kinds = list(num_rows)
    waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # (elements, kinds) of rows that join
    for _ in range(tries):
        if not waiting:
            return
        size, joined = heapq.heappop(waiting)
        to_keep = num_rows - Counter(kinds[position] for position in joined)
        kept: list[_Row] = []
        members = list(loose)
        for kind, row in rows:
            if to_keep[kind]:
                to_keep[kind] -= 1
                kept.append((kind, row))
            else:
                members += row
        buckets, small = _in_buckets(kept, bucket_size, limit)
        if small and loose:
            yield buckets, sorted(members + [index for _, row in small for index in row])
        yield [*buckets, small] if small else buckets, sorted(members)
        for position in range(joined[-1] if joined else 0, len(kinds)):
            if joined.count(position) < num_rows[kinds[position]]:
                heapq.heappush(waiting, (size + sizes[kinds[position]], (*joined, position)))
    if tries > 1:
        yield [], sorted([*loose, *(index for _, row in rows for index in row)])


def _in_buckets(
    rows: Sequence[_Row], bucket_size: int, limit: int
) -> tuple[list[list[_Row]], list[_Row]]:
    """(the rows of each bucket, the last rows if they do not fill a bucket). Each row of cut
    matrices is a bucket."""
    buckets: list[list[_Row]] = []
    small: list[_Row] = []
    for row in rows:
        if row[0].parts > 1:
            buckets.append([row])
            continue
        if small and _size([*small, row]) > limit:
            buckets.append(small)
            small = []
        small = [*small, row]
        if _size(small) >= bucket_size:
            buckets.append(small)
            small = []
    return buckets, small


def _size(rows: Sequence[_Row]) -> int:
    return sum(len(members) * kind.numel for kind, members in rows)


def _kinds(
    items: Sequence[Item],
    costs: Sequence[int],
    num_shards: int,
    bucket_size: int,
    limit: int,
    largest: int,
) -> list[_Kind | None]:
    """The kind of row that each matrix fits in; None for a matrix that fits in no row."""
    sizes = [(item.numel, cost) for item, cost in zip(items, costs, strict=True)]
    kinds: list[_Kind | None] = [None] * len(items)
    for (numel, cost), members in _grouped(sizes).items():
        row_size, first = num_shards * numel, items[members[0]]
        fits = num_shards == 1 or row_size <= max(largest, SMALL_ROW)
        # A stack that is cut between its matrices keeps them whole, and makes a smaller bucket.
        parts = _fewest_parts(first, len(members), num_shards, limit) if row_size > limit else 0
        cut_between = parts > 0 and first.grain.count % parts == 0
        if num_shards <= len(members) and fits and not cut_between:
            for index in members:
                kinds[index] = _Kind(numel, cost, (), 1)
            continue
        for shape, alike in _grouped([items[index].shape for index in members]).items():
            parts = _fewest_parts(items[members[alike[0]]], len(alike), num_shards, limit)
            copies = num_shards // max(parts, 1)
            if parts and 2 * copies * numel >= bucket_size:
                for position in alike:
                    kinds[members[position]] = _Kind(numel, cost, shape, parts)
    return kinds


def _grouped(keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """Positions by key, in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return groups


def _fewest_parts(item: Item, count: int, num_shards: int, limit: int) -> int:
    """The smallest k > 1 for which N/k matrices in k equal parts fill N shards; 0 if there is
    none."""
    for parts in range(2, num_shards + 1):
        copies = num_shards // parts
        if num_shards % parts or copies > count or (copies > 1 and copies * item.numel > limit):
            continue
        part = tensor_fraction(parts).size(item.shape)
        if part % ALIGNMENT == 0 and (part * parts - item.numel) * CUT_PADDING <= item.numel:
            return parts
    return 0


def _built(
    items: Sequence[Item], kept: Sequence[Sequence[_Row]], num_shards: int, *others: Bucket
) -> list[Bucket]:
    """All buckets, in the order of their completion."""
    buckets = [_bucket_of(items, rows, num_shards) for rows in kept]
    return sorted([*buckets, *others], key=lambda bucket: bucket.complete_at)


def _bucket_of(items: Sequence[Item], rows: Sequence[_Row], num_shards: int) -> Bucket:
    """A bucket with these rows, one after the other. Member j of a row lies on shard j, or, if it
    is cut, on ``parts`` shards from ``parts * j`` on."""
    firsts = [(kind, items[row[0]]) for kind, row in rows]
    lengths = [
        _aligned(tensor_fraction(kind.parts).size(item.shape) if kind.parts > 1 else item.room)
        for kind, item in firsts
    ]
    size, offset = sum(lengths), 0
    placed: dict[int, tuple[Item, int]] = {}
    for (kind, row), length in zip(rows, lengths, strict=True):
        for place, index in enumerate(row):
            item = items[index]
            if kind.parts > 1:
                item = replace(item, grain=tensor_fraction(kind.parts))
            placed[index] = item, place * kind.parts * size + offset
        offset += length
    members = tuple(sorted(placed))
    in_order, starts = zip(*(placed[index] for index in members), strict=True)
    return Bucket(members, Layout(in_order, num_shards, size, starts))


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


def _cut_anywhere(items: Sequence[Item], members: Sequence[int], num_shards: int) -> Bucket:
    """A bucket that is cut by rows, and between matrices of a stack; by elements if that pads too
    much."""
    chosen = [items[index] for index in members]
    by_rows = [item if len(item.shape) > 2 else replace(item, grain=ROW) for item in chosen]
    layout = plan(by_rows, num_shards)
    if layout.padding * CUT_PADDING > layout.payload:
        layout = plan([replace(item, grain=ELEMENT) for item in chosen], num_shards)
    return Bucket(tuple(members), layout)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
