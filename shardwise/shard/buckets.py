# SPDX-License-Identifier: Apache-2.0
"""Buckets: the parameters of a model that share a flat buffer, and their places in it.

Pure arithmetic, the same on every rank. Parameters are given in backprop order, and a bucket is
reduced once its last gradient is there, so buckets are listed in the order of their completion.

A matrix optimizer needs whole matrices, and shards are equal. So matrices of one size and one cost
are arranged in *rows*, one matrix for each of the N shards: nothing is padded, and no rank computes
more than another. A matrix that finds its row full waits for the next row; a bucket is full when it
has ``bucket_size`` elements:

    4 shards, backprop order  g0 q0 k0 g1 q1 k1 ..       (gate, query, key of a layer)

    shard 0  | g0    | q0  | k0 |
    shard 1  | g1    | q1  | k1 |        one bucket of 4 layers, three rows
    shard 2  | g2    | q2  | k2 |
    shard 3  | g3    | q3  | k3 |

Where there are fewer than N matrices of a size, or a row of them is more than half of the model and
would leave nothing of backward to overlap with, every matrix is cut in k equal parts (grain
``tensor/k``) and a bucket holds N/k matrices; k is as small as possible. The optimizer brings the
parts of one matrix together.

    8 shards, k = 4           | g0 1/4 | g0 2/4 | g0 3/4 | g0 4/4 | g1 1/4 | g1 2/4 | ..

Matrices that fit in no row (the end of the model, a prime number of ranks) are packed whole where
that pads little, else cut by rows, else by elements. A stack ``[experts, out, in]`` may be cut
between its matrices, which keeps them whole.

``whole=True`` promises that no matrix is cut: buckets are then as large as that takes, and what
fits in no row is packed with padding. The promise is refused where that would pad too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout import (
    ALIGNMENT,
    CHEAP_PADDING,
    ELEMENT,
    ROW,
    Item,
    Layout,
    plan,
    tensor_fraction,
)

# To keep matrices whole, a bucket may exceed ``bucket_size`` while this many buckets remain: the
# first is reduced while backward fills the second.
FEWEST_BUCKETS = 2
# Several rows, or parts of matrices, share a bucket while this many remain ...
MANY_BUCKETS = 8
# ... and up to this many times ``bucket_size``: the gradients of a bucket are alive at once.
LARGEST_BUCKET = 8
# A row of so few elements takes no time to send: its matrices stay whole however small a bucket is.
SMALL_ROW = 1 << 20
WHOLE_PADDING = 64  # leftovers stay whole where that pads at most 1/64 of all matrices
PROMISED_PADDING = 8  # with a promise, where that pads at most 1/8 of them
CUT_PADDING = 128  # parts need not be equal to the row: 1/128 of a bucket may be padding


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
    """Buckets for parameters that may be cut anywhere: neighbours in backprop order, no padding."""
    loose = [Item(item.name, item.shape, ELEMENT) for item in items]
    return [_planned(loose, part, num_shards) for part in _in_order(items, bucket_size)]


def plan_matrices(
    items: Sequence[Item],
    costs: Sequence[int],
    num_shards: int,
    bucket_size: int,
    *,
    whole: bool = False,
) -> list[Bucket]:
    """Buckets for matrices, whose grains say what must stay together for their optimizer.

    Args:
        items: in backprop order, of grain ``tensor``, or ``tensor/E`` for a stack of E matrices.
        costs: the optimizer's work for each matrix; shards are balanced by it.
        bucket_size: number of elements from which a bucket is large enough to be sent.
        whole: raise rather than cut a matrix.
    """
    if len(items) != len(costs) or num_shards < 1 or bucket_size < 1:
        raise ValueError(
            f"{len(items)} matrices with {len(costs)} costs over {num_shards} shards, buckets of "
            f"{bucket_size}: give one cost for each matrix, 1 or more shards and elements"
        )
    total = sum(item.numel for item in items)
    limit = max(bucket_size, min(total // MANY_BUCKETS, LARGEST_BUCKET * bucket_size))
    largest_row = total if whole else max(limit, total // FEWEST_BUCKETS)
    kinds = _kinds(items, costs, num_shards, bucket_size, limit, largest_row)
    if whole:
        kinds = [kind if kind is not None and kind.parts == 1 else None for kind in kinds]
    queues: dict[_Kind, list[int]] = {}
    buckets: list[Bucket] = []
    full: list[list[int]] = []  # full rows of whole matrices in the bucket that is open
    filled = 0  # number of elements in these rows
    loose: list[int] = []

    def size_of(members: Sequence[int]) -> int:
        return sum(items[index].numel for index in members)

    def close() -> None:
        nonlocal filled
        if full:
            buckets.append(_whole_rows(items, full, num_shards))
            full.clear()
            filled = 0

    for index, kind in enumerate(kinds):
        if kind is None:
            loose.append(index)
            continue
        queue = queues.setdefault(kind, [])
        queue.append(index)
        if len(queue) * kind.parts < num_shards:
            continue
        del queues[kind]
        if kind.parts > 1:
            buckets.append(_cut_row(items, queue, kind.parts, num_shards))
            continue
        if filled + num_shards * kind.numel > limit:
            close()
        full.append(queue)
        filled += num_shards * kind.numel
        if filled >= bucket_size:
            close()
    loose = sorted(loose + [index for queue in queues.values() for index in queue])
    budget = max(total // (PROMISED_PADDING if whole else WHOLE_PADDING), CHEAP_PADDING)
    last = sorted([index for row in full for index in row] + loose)
    if whole and loose:
        return _promised(items, costs, buckets, full, loose, num_shards, budget)
    for members in (last, loose) if loose and full else (last,) if loose else ():
        if size_of(members) <= limit and _least_padding(items, members, num_shards) <= budget:
            packed = _packed(items, costs, members, num_shards)
            if packed.layout.padding <= budget:
                buckets.append(packed)
                if members is last:
                    full.clear()
                loose = []
                break
    close()
    for part in _in_order([items[index] for index in loose], bucket_size):
        buckets.append(_cut_anywhere(items, [loose[index] for index in part], num_shards))
    return sorted(buckets, key=lambda bucket: bucket.complete_at)


def _promised(
    items: Sequence[Item],
    costs: Sequence[int],
    buckets: list[Bucket],
    full: Sequence[Sequence[int]],
    loose: Sequence[int],
    num_shards: int,
    budget: int,
) -> list[Bucket]:
    """All matrices whole: those that fit in no row alone, with the rows of the open bucket, or all
    in one bucket. Raises where each of these pads more than the budget."""
    rows = [index for row in full for index in row]
    kept = [*buckets, *([_whole_rows(items, full, num_shards)] if full else [])]
    choices = [(kept, list(loose)), (buckets, sorted([*rows, *loose])), ([], range(len(items)))]
    found = []
    for others, members in choices:
        packed = _packed(items, costs, members, num_shards)
        found.append((sum(one.layout.padding for one in others) + packed.layout.padding, packed))
    # More buckets overlap more: the first choice that pads little, else the one that pads least.
    allowed = max(budget * PROMISED_PADDING // WHOLE_PADDING, CHEAP_PADDING)
    best = min(range(len(found)), key=lambda number: (max(found[number][0], allowed), number))
    padding, packed = found[best]
    if padding > budget:
        total = sum(item.numel for item in items)
        raise ValueError(
            f"grain='tensor': {len(items)} matrices whole on {num_shards} ranks would pad them by "
            f"{100 * padding / total:.0f} %, over {100 // PROMISED_PADDING} %: use fewer ranks, or "
            f"leave grain out, so that matrices may lie on several ranks"
        )
    return sorted([*choices[best][0], packed], key=lambda bucket: bucket.complete_at)


# ------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class _Kind:
    """Matrices that may stand in one row, each in ``parts`` parts."""

    numel: int
    cost: int
    shape: tuple[int, ...]  # () for whole matrices: only sizes and costs matter
    parts: int


def _kinds(
    items: Sequence[Item],
    costs: Sequence[int],
    num_shards: int,
    bucket_size: int,
    limit: int,
    largest_row: int,
) -> list[_Kind | None]:
    """The kind of row that each matrix fits in; None where a matrix fits in no row."""
    sizes = [(item.numel, cost) for item, cost in zip(items, costs, strict=True)]
    found: list[_Kind | None] = [None] * len(items)
    for (numel, cost), members in _grouped(sizes).items():
        fits = num_shards == 1 or num_shards * numel <= max(largest_row, SMALL_ROW)
        if num_shards <= len(members) and fits:
            for index in members:
                found[index] = _Kind(numel, cost, (), 1)
            continue
        for shape, alike in _grouped([items[index].shape for index in members]).items():
            parts = _fewest_parts(items[members[alike[0]]], len(alike), num_shards, limit)
            copies = num_shards // max(parts, 1)
            if parts and 2 * copies * numel >= bucket_size:
                for position in alike:
                    found[members[position]] = _Kind(numel, cost, shape, parts)
    return found


def _grouped(keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """Positions by key, in order of first appearance."""
    found: dict[tuple[int, ...], list[int]] = {}
    for position, key in enumerate(keys):
        found.setdefault(key, []).append(position)
    return found


def _fewest_parts(item: Item, count: int, num_shards: int, limit: int) -> int:
    """The smallest k > 1 for which N/k matrices in k equal parts fill N shards; 0: none."""
    for parts in range(2, num_shards + 1):
        copies = num_shards // parts
        if num_shards % parts or copies > count or (copies > 1 and copies * item.numel > limit):
            continue
        part = tensor_fraction(parts).size(item.shape)
        if part % ALIGNMENT == 0 and (part * parts - item.numel) * CUT_PADDING <= item.numel:
            return parts
    return 0


def _whole_rows(items: Sequence[Item], rows: Sequence[Sequence[int]], num_shards: int) -> Bucket:
    """The bucket of whole rows: member j of every row on shard j, one row after the other."""
    size = sum(_aligned(items[row[0]].numel) for row in rows)
    starts: dict[int, int] = {}
    offset = 0
    for row in rows:
        for shard, index in enumerate(row):
            starts[index] = shard * size + offset
        offset += _aligned(items[row[0]].numel)
    members = tuple(sorted(starts))
    addresses = tuple(starts[index] for index in members)
    return Bucket(members, Layout(tuple(items[i] for i in members), num_shards, size, addresses))


def _cut_row(items: Sequence[Item], members: Sequence[int], parts: int, num_shards: int) -> Bucket:
    """The bucket of one row of cut matrices, each of which fills ``parts`` shards."""
    grain = tensor_fraction(parts)
    cut = tuple(Item(items[index].name, items[index].shape, grain) for index in members)
    size = grain.size(cut[0].shape)
    starts = tuple(place * parts * size for place in range(len(cut)))
    return Bucket(tuple(members), Layout(cut, num_shards, size, starts))


# ------------------------------------------------------------------------------ the rest


def _in_order(items: Sequence[Item], bucket_size: int) -> list[list[int]]:
    """Runs of neighbours; a run ends as soon as it is large enough."""
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


def _least_padding(items: Sequence[Item], members: Sequence[int], num_shards: int) -> int:
    """A lower bound of the padding of whole matrices; cheap, to avoid most attempts to pack."""
    largest = max(items[index].grain_size for index in members)
    return num_shards * largest - sum(items[index].numel for index in members)


def _packed(
    items: Sequence[Item], costs: Sequence[int], members: Sequence[int], num_shards: int
) -> Bucket:
    """The bucket of whole matrices, as balanced in cost as the size of its shards allows."""
    bucket = _planned(items, members, num_shards)
    size, starts = bucket.layout.shard_size, {}
    if any(items[index].grain_size < items[index].numel for index in members) or size % ALIGNMENT:
        return bucket  # stacks span several shards: their costs are as balanced as their bytes
    loads, used = [0] * num_shards, [0] * num_shards
    for index in sorted(members, key=lambda i: (-costs[i], -items[i].numel, i)):
        numel = items[index].numel
        fitting = [shard for shard in range(num_shards) if used[shard] + numel <= size]
        if not fitting:
            return bucket
        shard = min(fitting, key=lambda shard: (loads[shard], used[shard], shard))
        starts[index] = shard * size + used[shard]
        used[shard] += _aligned(numel)
        loads[shard] += costs[index]
    layout = Layout(
        bucket.layout.items, num_shards, size, tuple(starts[index] for index in bucket.members)
    )
    return Bucket(bucket.members, layout)


def _cut_anywhere(items: Sequence[Item], members: Sequence[int], num_shards: int) -> Bucket:
    """The bucket cut by rows, or between matrices of a stack; by elements if that pads too much."""
    by_rows = [
        Item(item.name, item.shape, ROW if len(item.shape) < 3 else item.grain)
        for item in (items[index] for index in members)
    ]
    layout = plan(by_rows, num_shards)
    if layout.padding * CUT_PADDING > layout.payload:
        anywhere = [Item(item.name, item.shape, ELEMENT) for item in by_rows]
        layout = plan(anywhere, num_shards)
    return Bucket(tuple(members), layout)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
