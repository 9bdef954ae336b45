# SPDX-License-Identifier: Apache-2.0
"""Footprint: the bytes of one group's buffers on one rank, and the collectives between them.

    main    --refresh-->  compute  --gather-->  whole          weights, on their way to forward
    packed  --reduce--->  inner    --reduce-->  grad           gradients, on their way to main

Arithmetic alone: a layout, placements, axis sizes and dtypes go in; no process group, no tensor.
``shard/group.py`` and ``shard/gradient.py`` do for real what is written down here, and the tests
of both hold one against the other, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwise.comm import _ONE_ROUND_BYTES, Call
from shardwise.layout import Layout
from shardwise.mesh import DATA_AXES
from shardwise.placements import PARTIAL, REPLICATE, SHARD, Placement, Placements, shard_range
from shardwise.precision import Precision
from shardwise.precision.mxfp8_tensor import FORMATS, Format, Reads
from shardwise.shard.formats import plane_bytes, plane_layout, planes_of, sends_codes

Calls = tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The data-parallel axes, outer to inner: names and sizes, and nobody behind them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Mapping[str, int] | Sequence[int]) -> Mesh:
        if isinstance(shape, Sequence) and len(shape) <= len(DATA_AXES):
            shape = dict(zip(DATA_AXES[-len(shape) :], shape, strict=False))
        named = shape if isinstance(shape, Mapping) else {"mesh_shape": shape}
        wrong = [f"{n}={s!r}" for n, s in named.items() if not isinstance(s, int) or s < 1]
        if wrong or not isinstance(shape, Mapping) or not shape:
            raise ValueError(
                f"a mesh of {', '.join(wrong) or 'no axes'}: name each axis with 1 or more ranks, "
                'outer to inner, as in {"dp_outer": 2, "dp": 4}'
            )
        return cls(names=tuple(shape), sizes=tuple(shape.values()))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def num_shards(self, placements: Sequence[Placement]) -> int:
        pairs = zip(placements, self.sizes, strict=True)
        return math.prod(size for placement, size in pairs if placement == SHARD)

    def without(self, ep: int) -> Mesh:
        """Of every ``ep`` neighbours on the inner axis, which hold different experts, one: those
        that hold the same. Rank r of this mesh is rank r // ep of that."""
        return replace(self, sizes=(*self.sizes[:-1], self.sizes[-1] // ep))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        found = []
        for size in reversed(self.sizes):
            rank, position = divmod(rank, size)
            found.append(position)
        return tuple(reversed(found))

    def joint(self, placements: Sequence[Placement], rank: int) -> tuple[int, int]:
        """(replica, rank) on the joint axes of replicas and of shards; inner ones count fastest."""
        joint = {REPLICATE: 0, SHARD: 0}
        for position, size, placement in zip(
            self.coordinate(rank), self.sizes, placements, strict=True
        ):
            joint[placement] = joint[placement] * size + position
        return joint[REPLICATE], joint[SHARD]

    def shard(self, placements: Sequence[Placement], rank: int) -> int:
        """The one shard that a rank holds."""
        shards = self.num_shards(placements)
        return shard_range(placements, self.sizes, self.coordinate(rank), shards)[0]

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One group on one rank. Bytes are 0 for buffers that never exist."""

    main: int  # the truth
    planes: tuple[int, ...]  # gathered compute weights; none where main itself serves
    reads: dict[Reads, tuple[int, ...]] = field(hash=False)  # which of them a gather brings
    staging: int  # whole bf16 weights, inside a gather, where those travel instead of codes
    workspace: int  # the largest matrix, decoded
    compute: int  # compute weights kept sharded between gathers (hfsdp)
    kept: int  # 1/k of the whole weights, between forward and backward
    packed: int  # one microbatch's gradients, whole, as they travel
    partial: int  # gradients of earlier microbatches, whole and unreduced
    inner: int  # the same, reduced over the inner axes
    aliased: bool
    persistent: bool  # whole weights stay between steps
    trainable: bool
    in_place: bool  # gradients are summed in the main grad itself, nothing is packed
    recast: bool  # accumulated in another dtype than they travel in
    alone: bool  # one rank: nothing is ever sent, and nothing divided
    waits: tuple[bool, ...]  # per axis: do gradients wait there for the last microbatch?
    refresh: Calls
    gather: tuple[Calls, ...]  # for each of the planes; staged: for all of them at once
    regather: Calls  # from the parts kept by k neighbours
    reduce: dict[bool, Calls] = field(hash=False)  # by whether it is the last microbatch
    room: dict[bool, tuple[int, ...]] = field(hash=False)  # for each: gloo's, for peers' messages
    # for each: what is packed for it, on any backend; nothing where no replicas take turns
    packing: dict[bool, tuple[int, ...]] = field(hash=False)
    opens_early: bool = False  # a kernel writes gradients where they are summed, inside backward
    reads_again: bool = False  # backward runs forward once more: it reads what that read, too

    @property
    def grad(self) -> int:
        return self.main


def footprint(
    layout: Layout,
    mesh: Mesh,
    placements: Placements,
    precision: Precision,
    dtype: torch.dtype,
    *,
    format: Format | None = None,
    trainable: bool = True,
    kept_ranks: int | None = None,
    divided: bool = False,
) -> Footprint:
    """What a group of this layout holds and sends under these placements.

    ``kept_ranks``: the k of ``reshard_after_forward=k``, where it keeps a part; ``divided``:
    whether gradients have a divisor of their own, that of experts that are spread.
    """
    coded = coded_planes(layout, format, SHARD not in placements.compute)
    compute, wire = precision.compute_dtype(dtype), precision.wire_dtype(dtype)
    main = precision.main_dtype(dtype, trainable)
    numel, shards = layout.numel, mesh.num_shards(placements.main)
    aliased = shards == 1 and compute == main and coded is None
    persistent = SHARD not in placements.compute
    staged = not aliased and not persistent and placements.compute != placements.main
    everywhere: tuple[Placement, ...] = (REPLICATE,) * len(mesh.sizes)
    begin = placements.compute if staged else placements.main
    keeps = kept_ranks is not None and not (persistent or aliased)

    def gathers(
        here: Sequence[Placement], there: Sequence[Placement], share: int | None = None
    ) -> Calls:
        """Of the weights themselves; of codes, ``share`` of which have one scale."""
        found, now = [], list(here)
        for axis, (old, new) in enumerate(zip(here, there, strict=True)):
            if old == SHARD and new != SHARD:  # outermost first: a gather joins neighbours
                now[axis] = REPLICATE
                there_now = numel // mesh.num_shards(now)
                sizes = [there_now * compute.itemsize]
                if share is not None:
                    sizes = [there_now, there_now // share]
                found += [_call("all_gather", mesh, axis, nbytes) for nbytes in sizes]
        return tuple(call for call in found if call.size > 1)

    held: tuple[int, ...] = ()
    gather: tuple[Calls, ...] = ()
    if coded is None and not aliased:
        held, gather = (numel * compute.itemsize,), (gathers(begin, everywhere),)
    elif coded is not None:
        held = coded.held
        shares: Sequence[int | None] = coded.shares if coded.direct else [None]
        gather = tuple(gathers(begin, everywhere, share) for share in shares)
    every = tuple(range(len(held)))
    reads: dict[Reads, tuple[int, ...]] = {"forward": every, "backward": every}
    if coded is not None:
        reads = coded.reads
    regather: Calls = ()
    kept = sum(held[number] for number in reads["backward"]) if keeps else 0
    if keeps:
        assert kept_ranks is not None
        regather = (Call("all_gather", f"{mesh.names[-1]}/{kept_ranks}", kept_ranks, kept),)
    reductions = {
        last: _reductions(mesh, placements, numel * wire.itemsize, last) for last in (False, True)
    }
    return Footprint(
        main=numel // shards * main.itemsize,
        planes=held,
        reads=reads,
        staging=0 if coded is None or coded.direct else numel * compute.itemsize,
        workspace=0 if coded is None else compute.itemsize * coded.largest,
        compute=numel // mesh.num_shards(placements.compute) * compute.itemsize if staged else 0,
        kept=kept // (kept_ranks or 1),
        packed=numel * wire.itemsize,
        partial=numel * main.itemsize,
        inner=numel // mesh.num_shards(placements.grad) * main.itemsize,
        aliased=aliased,
        persistent=persistent,
        trainable=trainable,
        in_place=shards == 1 and wire == main,
        recast=wire != main,
        alone=mesh.num_ranks == 1 and not divided,
        waits=tuple(placement == PARTIAL for placement in placements.grad),
        refresh=gathers(placements.main, placements.compute) if staged else (),
        gather=gather,
        regather=regather,
        reduce=reductions,
        room={
            last: tuple(room_of(call, wire.itemsize) for call in calls)
            for last, calls in reductions.items()
        },
        packing={False: (), True: ()},
    )


@dataclass(frozen=True, kw_only=True)
class CodedPlanes:
    """What ``shard/mxfp8_group.py`` holds instead of whole weights."""

    held: tuple[int, ...]  # bytes of each plane
    shares: tuple[int, ...]  # of each: elements with one scale
    reads: dict[Reads, tuple[int, ...]]
    direct: bool  # codes travel
    largest: int  # elements of the largest matrix


def coded_planes(layout: Layout, format: Format | None, persistent: bool) -> CodedPlanes | None:
    if format is None:
        return None
    blocks = FORMATS[format]
    shares = tuple(math.prod(block) for block in blocks)
    direct = sends_codes(layout, format, persistent)
    where, parts = plane_layout(layout, direct), layout.num_shards
    phases: tuple[Reads, Reads] = ("forward", "backward")
    # Experts are decoded all at once, and rows that are looked up: in memory of the moment.
    multiplied = format != "mxfp8_rows"
    matrices = [item.numel for item in layout.items if multiplied and len(item.shape) == 2]
    return CodedPlanes(
        held=tuple(plane_bytes(where, block, parts) for block in blocks),
        shares=shares,
        reads={
            phase: tuple(blocks.index(block) for block in planes_of(format, phase, persistent))
            for phase in phases
        },
        direct=direct,
        largest=max(matrices, default=0),
    )


def _reductions(mesh: Mesh, placements: Placements, nbytes: int, last: bool) -> Calls:
    """Inner axes with every microbatch, outer ones with the last; innermost first."""
    calls = []
    axes = range(len(mesh.sizes))
    inside = [axis for axis in reversed(axes) if placements.grad[axis] == SHARD]
    outside = [axis for axis in reversed(axes) if placements.grad[axis] == PARTIAL]
    for axis in inside + (outside if last else []):
        if mesh.sizes[axis] == 1:
            continue
        scatters = placements.main[axis] == SHARD
        calls.append(_call("reduce_scatter" if scatters else "all_reduce", mesh, axis, nbytes))
        nbytes = nbytes // mesh.sizes[axis] if scatters else nbytes
    return tuple(calls)


def room_of(call: Call, itemsize: int) -> int:
    """Bytes that a reduction over gloo's messages receives, on the rank that receives most."""
    part = -(-(call.nbytes // itemsize) // call.size) * itemsize
    if call.operation == "all_reduce" and call.nbytes <= _ONE_ROUND_BYTES:
        part = call.nbytes  # everything to everybody, in one round
    return (call.size - 1) * part


def _call(operation: str, mesh: Mesh, axis: int, nbytes: int) -> Call:
    return Call(operation, mesh.names[axis], mesh.sizes[axis], nbytes)
