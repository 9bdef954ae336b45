# SPDX-License-Identifier: Apache-2.0
"""Layout: where each parameter lies in one flat buffer, and which shard holds which piece of it.

A buffer is ``num_shards`` ranges of ``shard_size`` elements. Parameters are packed parameter-major:
each one is contiguous, so a gathered buffer *is* the parameters and nothing is copied out. Shards
are cut where ``shard_size`` says, through parameters, but never through a *grain*:

    wq and wk (4 rows of 64), grain row;   wo (1 row of 64), grain tensor;   3 shards

    address  0                192               384               576
             | wq0  wq1  wq2  | wq3  wk0  wk1   | wk2  wk3  wo    |
    shard    |       0        |        1        |        2        |

    rank 0 | wq rows 0-2               |     one all-gather of equal ranges puts
    rank 1 | wq row 3  | wk rows 0-1   |     whole parameters side by side
    rank 2 | wk rows 2-3      | wo     |

The rule behind this: a boundary B inside a parameter that starts at s must satisfy
``(B - s) % grain == 0``. So a parameter that is cut twice needs ``shard_size % grain == 0``:

    shard_size % grain == 0       cut anywhere                  |a0 a1 a2|a3 a4 a5|a6 a7 ..
    else, two shards at most      shifted so a cut is legal     |.. b0 b1|b2 b3 ..|
    else, one shard at most       kept whole, filling a gap     |b4 b5 cc|

If every row size had to divide ``shard_size``, odd shapes would make it huge (1009 and 1013: a
million). So ``plan`` tries a few moduli, packs greedily under each, and keeps the smallest buffer.
``plan_groups`` makes several buffers if a single one would still be mostly padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, lcm, prod
from typing import NamedTuple

ALIGNMENT = 64  # elements; every parameter starts at a multiple, as vector loads and TMA want
_ENDLESS = 1 << 62  # an address after every parameter

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # (offsets, sizes)


@dataclass(frozen=True)
class Grain:
    """The smallest piece of a parameter that may not be cut."""

    kind: str
    count: int = 1  # rows in a piece (kind "rows"), pieces in a tensor (kind "tensor")

    def __post_init__(self) -> None:
        if self.kind not in ("element", "rows", "tensor"):
            raise ValueError(f"grain kind {self.kind!r} is unknown: use element, rows or tensor")
        if self.count < 1 or (self.kind == "element" and self.count != 1):
            raise ValueError(f"a grain {self.kind!r} of count {self.count} cannot exist: use 1")

    def size(self, shape: Shape) -> int:
        """Elements in one grain of a parameter of this shape (its last grain may be smaller)."""
        if self.kind == "element":
            return 1
        length, row = (shape[0], prod(shape[1:])) if shape else (1, 1)
        return row * (self.count if self.kind == "rows" else -(-length // self.count))

    def __str__(self) -> str:
        if self.kind == "rows":
            return "row" if self.count == 1 else f"rows({self.count})"
        return self.kind if self.count == 1 else f"{self.kind}/{self.count}"


ELEMENT, ROW, TENSOR = Grain("element"), Grain("rows"), Grain("tensor")


def rows(count: int) -> Grain:
    """Pieces of ``count`` whole rows: 32 for an MXFP8 block."""
    return Grain("rows", count)


def tensor_fraction(parts: int) -> Grain:
    """Pieces of ``1/parts`` of the parameter, in whole rows."""
    return Grain("tensor", parts)


@dataclass(frozen=True)
class Item:
    """One parameter to be laid out."""

    name: str
    shape: Shape
    grain: Grain = ROW
    side: int = 1  # the side of the square blocks that share a scale (fp8); 1: no blocks

    def __post_init__(self) -> None:
        if self.shape and min(self.shape) <= 0:
            raise ValueError(
                f"parameter {self.name!r} of shape {tuple(self.shape)} holds no elements: "
                "remove it, or exclude it from sharding"
            )

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def step(self) -> int:
        """The elements of a block, or fewer if the last block of a row is partial: a number that
        divides every row of blocks. Scales lie at multiples of it."""
        return self.side * gcd(self.side, self.shape[-1]) if self.side > 1 else 1

    @cached_property
    def room(self) -> int:
        """The elements from the start up to the address where another parameter may start."""
        return _round_up(self.numel, self.step)

    @cached_property
    def grain_size(self) -> int:
        """Elements that stay together; the whole parameter if the grain is larger."""
        return min(self.grain.size(self.shape), self.numel)


class View(NamedTuple):
    """The piece of a parameter that a run of shards holds, as a view of the run's memory."""

    low: int  # the elements [low, high) of the parameter
    high: int
    offset: int  # from the first address of the run
    shape: Shape
    strides: Shape


@dataclass(frozen=True)
class Layout:
    """Parameters packed in a buffer of ``num_shards * shard_size`` elements. See ``plan``."""

    items: tuple[Item, ...]
    num_shards: int
    shard_size: int
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.shard_size < 1 or len(self.starts) != len(self.items):
            raise ValueError(
                f"{self.num_shards} shards of {self.shard_size}, {len(self.starts)} starts for "
                f"{len(self.items)} parameters: need 1 or more shards and a start for each"
            )
        if len({item.name for item in self.items}) < len(self.items):
            name = Counter(item.name for item in self.items).most_common(1)[0][0]
            raise ValueError(f"two parameters are named {name!r}: give each its own name")
        size, end, before = self.shard_size, 0, ""
        for start, item in sorted(zip(self.starts, self.items, strict=True), key=lambda x: x[0]):
            numel, grain = item.numel, item.grain_size
            first_cut = size - start % size  # elements before the first boundary
            if start % ALIGNMENT:
                problem = f"is not at a multiple of {ALIGNMENT}"
            elif start < end:
                problem = f"overlaps {before!r}, which ends at {end}"
            elif start + numel > self.numel:
                problem = f"ends outside the buffer of {self.numel} elements"
            elif first_cut < numel and first_cut % grain:
                problem = f"has a {item.grain} of {grain} elements cut at element {first_cut}"
            elif first_cut + size < numel and size % grain:
                problem = f"has a {item.grain} of {grain} elements cut every {size} elements"
            else:
                end, before = start + numel, item.name
                continue
            raise ValueError(f"parameter {item.name!r} at {start} {problem}: use plan()")

    @property
    def numel(self) -> int:
        return self.num_shards * self.shard_size

    @cached_property
    def payload(self) -> int:
        return sum(item.numel for item in self.items)

    @property
    def padding(self) -> int:
        return self.numel - self.payload

    def piece(self, index: int, first_shard: int, num_shards: int = 1) -> tuple[int, int]:
        """The elements [lo, hi) of a parameter that lie in a run of shards; lo == hi for none."""
        if not 0 <= first_shard <= first_shard + num_shards <= self.num_shards:
            raise ValueError(
                f"shards {first_shard} to {first_shard + num_shards} of a layout of "
                f"{self.num_shards}: ask for shards that exist"
            )
        numel, low = self.items[index].numel, first_shard * self.shard_size - self.starts[index]
        high = low + num_shards * self.shard_size
        return min(max(low, 0), numel), min(max(high, 0), numel)

    def piece_shape(self, index: int, lo: int, hi: int) -> Shape:
        """``(rows, *rest)`` if [lo, hi) is whole rows, else flat; ``()`` for a whole scalar."""
        shape = self.items[index].shape
        if not shape:
            return () if hi > lo else (0,)
        row = prod(shape[1:])
        if lo < hi and (lo % row or hi % row):
            return (hi - lo,)
        return ((hi - lo) // row, *shape[1:])

    def pieces(self, first_shard: int, num_shards: int) -> tuple[View, ...]:
        """The piece of each parameter that lies in a run of shards."""
        run = first_shard, num_shards
        if run not in self._pieces:
            indices = range(len(self.items))
            self._pieces[run] = tuple(self._view_of(index, *run) for index in indices)
        return self._pieces[run]

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], tuple[View, ...]]:
        return {}  # by run, for each run that was needed: buffers that are alike share a layout

    def _view_of(self, index: int, first_shard: int, num_shards: int) -> View:
        low, high = self.piece(index, first_shard, num_shards)
        offset = self.starts[index] + low - first_shard * self.shard_size if high > low else 0
        shape = self.piece_shape(index, low, high)
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return View(low, high, offset, shape, strides)

    def holders(self, index: int) -> range:
        """The shards that hold elements of a parameter."""
        start, numel = self.starts[index], self.items[index].numel
        return range(start // self.shard_size, (start + numel - 1) // self.shard_size + 1)

    def chunks(self, index: int, lo: int, hi: int) -> tuple[Box, ...]:
        """The elements [lo, hi) as boxes, in order, as checkpoints describe them.

        row 1    . . a a a        if lo and hi are inside rows, up to three boxes in 2-D:
        row 2    b b b b b        the end of a row, whole rows, the beginning of a row
        row 3    c c . . .
        """
        return tuple(boxes_of(self.items[index].shape, lo, hi))


def boxes_of(shape: Shape, lo: int, hi: int) -> Iterator[Box]:
    """The elements [lo, hi) of a tensor as boxes, in order."""
    if lo >= hi:
        return
    if not shape:
        yield (), ()
        return
    rest, row = shape[1:], prod(shape[1:])
    at = lo
    while at < hi:
        first, skip = divmod(at, row)
        if skip or hi - at < row:  # a part of one row
            end = min(hi, (first + 1) * row)
            for offsets, sizes in boxes_of(rest, skip, end - first * row):
                yield (first, *offsets), (1, *sizes)
        else:
            end = hi // row * row
            yield (first, *(0 for _ in rest)), (end // row - first, *rest)
        at = end


# -- Planning. It uses (numel, grain) only, and equal parameters are placed together: hundreds of
# -- experts cost as much as one, and a repeated layer is found in the cache under any names.

_Kind = tuple[int, int]  # (room, grain)


def plan(items: Sequence[Item], num_shards: int) -> Layout:
    """Pack parameters into equal shards with little padding, alike on every rank.

    If parameters are made of blocks and no grain cuts blocks, starts and shards are at multiples of
    the parameters' ``step``, so that scales can be cut in the same way.
    """
    if not items or num_shards < 1:
        raise ValueError(f"{len(items)} parameters over {num_shards} shards: need 1 or more each")
    kinds = _kinds(items)
    unit = min(item.step for item in items) // ALIGNMENT or 1  # planning counts in this unit
    if any(room % unit or grain % unit for room, grain in kinds):
        unit = 1
    units = tuple((room // unit, grain // unit) for room, grain in kinds)
    shard_size, starts = _plan(units, num_shards)
    return Layout(tuple(items), num_shards, shard_size * unit, tuple(unit * at for at in starts))


CHEAP_PADDING = 1 << 17  # elements over all shards; one more collective would cost more


def plan_groups(items: Sequence[Item], num_shards: int) -> list[tuple[int, ...]]:
    """The indices for each of one or several buffers, to be planned separately, so that padding is
    never large.

    One more buffer is one more collective. So parameters of different grain sizes share a buffer if
    that pads less than ``CHEAP_PADDING``, or costs at most a sixteenth more than separate buffers
    (or 2 % and one grain per shard, if that is less).
    """
    everything = tuple(range(len(items)))
    whole, kinds = plan(items, num_shards), _kinds(items)
    if whole.padding * 50 <= whole.payload or whole.padding <= CHEAP_PADDING:
        return [everything]
    by_grain: dict[int, list[int]] = {}
    for index, (numel, grain) in enumerate(kinds):  # whole tensors allow any shard size
        by_grain.setdefault(grain if grain < numel else 0, []).append(index)

    def payload(group: Sequence[int]) -> int:
        return sum(kinds[index][0] for index in group)

    def cost(group: Sequence[int]) -> int:
        return num_shards * _plan(tuple(kinds[index] for index in group), num_shards)[0]

    families: list[list[int]] = []
    for family in by_grain.values():
        # Few and short parameters of odd rows: no aligned start of a second parameter allows a cut.
        explodes = cost(family) > 2 * sum(cost([index]) for index in family)
        families += [[index] for index in family] if explodes else [family]
    groups: list[tuple[list[int], int]] = []  # each with the sum of its families' separate costs
    for family in sorted(families, key=payload, reverse=True):
        alone = cost(family)
        for position, (members, members_alone) in enumerate(groups):
            joint, joint_alone = sorted(members + family), members_alone + alone
            one_grain_more = num_shards * max(kinds[index][1] for index in joint)
            bound = min(joint_alone * 17 // 16, payload(joint) * 51 // 50 + one_grain_more)
            if cost(joint) <= max(joint_alone, bound):
                groups[position] = (joint, joint_alone)
                break
        else:
            groups.append((family, alone))
    return sorted(tuple(group) for group, _ in groups)


def cut_finer(items: Sequence[Item], num_shards: int) -> list[Item]:
    """The items, with grain ELEMENT if their own grains would pad the buffers too much (there are
    about as many shards as rows). Too much is more than a sixteenth. For items of blocks it is more
    than half, because if blocks are cut, not their codes are gathered but twice the bytes."""
    groups = [[items[index] for index in group] for group in plan_groups(items, num_shards)]
    layouts = [plan(group, num_shards) for group in groups]
    padding = sum(layout.padding for layout in layouts)
    share = 16 if items[0].side == 1 else 2
    if padding <= max(CHEAP_PADDING, sum(layout.payload for layout in layouts) // share):
        return list(items)
    return [replace(item, grain=ELEMENT) for item in items]


def _kinds(items: Sequence[Item]) -> tuple[_Kind, ...]:
    return tuple(
        (item.room, item.grain_size if item.grain_size < item.numel else item.room)
        for item in items
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@lru_cache(maxsize=1024)
def _plan(kinds: tuple[_Kind, ...], num_shards: int) -> tuple[int, tuple[int, ...]]:
    """The shard size and every start."""
    # Coarse grains first: few starts fit them, and fine grains fill the gaps afterwards.
    counts = sorted(Counter(kinds).items(), key=lambda entry: (-entry[0][1], -entry[0][0]))
    size = _search(counts, num_shards, ALIGNMENT, _ENDLESS)
    if any(1 < grain < numel and grain % ALIGNMENT for numel, grain in kinds):
        # Shards that start unaligned make slower kernels: they have to save over a percent.
        size = _search(counts, num_shards, 1, size - ALIGNMENT - size // 100) or size
    found: dict[_Kind, list[int]] = {kind: [] for kind, _ in counts}
    for kind, start, count in _place(counts, size)[1]:
        stride = _round_up(kind[0], ALIGNMENT)
        found[kind].extend(range(start, start + count * stride, stride))
    starts = {kind: iter(sorted(addresses)) for kind, addresses in found.items()}
    return size, tuple(next(starts[kind]) for kind in kinds)


def _search(counts: list[tuple[_Kind, int]], num_shards: int, unit: int, limit: int) -> int:
    """The smallest shard size found, a multiple of ``unit`` below ``limit``, or 0.

    Each modulus that is tried lets the j largest parameters be cut anywhere. A shard must then hold
    half of the next parameter, which is cut once at most. If these pad by over a percent, the grain
    of most elements is tried by itself.
    """
    payload = sum(numel * count for (numel, _), count in counts)
    floor = max(-(-payload // num_shards), max(grain for (_, grain), _ in counts))
    cuttable = [kind for kind, _ in counts if kind[1] < kind[0] and num_shards > 1]
    lows, modulus = {}, unit
    for numel, grain in sorted(cuttable, reverse=True):
        lows[modulus] = max(floor, numel // 2)
        if (modulus := lcm(modulus, grain)) > 2 * payload:
            break
    else:
        lows[modulus] = floor
    shares = Counter({unit: 0})
    for (numel, grain), count in counts:
        shares[grain] += numel * count * (grain < numel)
    most = lcm(unit, shares.most_common(1)[0][0])
    whole = max((numel for numel, grain in cuttable if most % grain), default=0)
    best = 0
    for modulus, low in [*sorted(lows.items(), reverse=True), (most, max(floor, whole // 2))]:
        size, failed = _round_up(low, modulus), 0
        while size < limit and (end := _place(counts, size)[0]) > num_shards * size:
            failed = size
            needed = -(-end // num_shards) if end < _ENDLESS else size + size // 32
            size = max(size + modulus, _round_up(needed, modulus))
        if size >= limit:
            continue
        best = limit = size
        while failed and best - failed > max(modulus, best >> 8):  # bisect the last jump
            size = failed + _round_up((best - failed) // 2, modulus)
            if _place(counts, size)[0] <= num_shards * size:
                best = limit = size
            else:
                failed = size
        if best - floor <= floor >> 7:
            break  # within a percent of no padding at all
    return best


def _place(counts: list[tuple[_Kind, int]], size: int) -> tuple[int, list[tuple[_Kind, int, int]]]:
    """First fit under one shard size: the end address, and (kind, start, number in a row)."""
    free, placed = [(0, _ENDLESS)], []
    for kind, count in counts:
        numel, grain = kind
        stride = _round_up(numel, ALIGNMENT)
        regular = size % grain == 0 == stride % grain
        spaces, free = free, []
        for low, high in spaces:
            while count and high - low >= numel:
                start = _first_start(low, numel, grain, size)
                if start + numel > high:
                    break
                # Copies follow each other to the shard's end, or beyond it if cuts stay legal.
                edge = high if regular and start % grain == 0 else (start // size + 1) * size
                copies = (min(edge, high) - start + stride - numel) // stride
                copies = min(count, max(copies, 1))
                placed.append((kind, start, copies))
                if start - low >= ALIGNMENT:
                    free.append((low, start))
                low = start + (copies - 1) * stride + numel
                count -= copies
            if high - low >= ALIGNMENT:
                free.append((low, high))
        if count:
            return _ENDLESS, placed
    return free[-1][0], placed


def _first_start(low: int, numel: int, grain: int, size: int) -> int:
    """The first address from ``low`` on at which a parameter may start, or ``_ENDLESS``.

    low       start           boundary
    |.........| grain | grain | grain | grain ..      (boundary - start) % grain == 0
    """
    start = _round_up(low, ALIGNMENT)
    # The alignment of boundaries repeats with the first period, that of grains with the second.
    for _ in range(ALIGNMENT // gcd(size, ALIGNMENT) + 1):
        boundary = (start // size + 1) * size
        if start + numel <= boundary:
            return start
        most = (boundary - start) // grain
        for before in range(most, max(most - ALIGNMENT // gcd(grain, ALIGNMENT), -1), -1):
            if size % grain and numel - before * grain > size:
                break
            if (boundary - before * grain) % ALIGNMENT == 0:
                return boundary - before * grain
        start = _round_up(boundary, ALIGNMENT)
    return _ENDLESS
