# SPDX-License-Identifier: Apache-2.0
"""MXFP8Group: a group whose whole weights are MXFP8 planes.

    main      fp32, placements.main     the only truth, as in every group
    planes    uint8, all replicated     | codes of every weight, as main lies |.pad.| scales |
                                        a row and a column plane, or one of squares, or of rows
    whole     bf16, all replicated      scratch: alive inside a gather, where bf16 travels

    zero(3)   forward   main |##| --encode--> |#| --all-gather--> row plane     1.03 bytes
              backward  main |##| --encode--> |#| --all-gather--> column plane  1.03 bytes
              a backward that runs forward again (activation checkpointing) brings both
    zero(1)   main |##| --cast, all-gather--> whole --encode--> both planes, kept; whole given back
    embeddings have a row plane alone: their backward gathers nothing

What is encoded is always main rounded to bf16, never a decoded plane. An optimizer writes no codes:
each plane remembers the version of main that it was made from, and a gather makes it anew. To fuse
the two would spare a read of the shard (4 of the 5.03 bytes that encoding moves for an element and
a phase), and cost codes at rest (up to 2.06) that every other writer of main leaves stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import comm
from shardwise.buffer import Buffer
from shardwise.layout import Layout
from shardwise.memory import CACHING
from shardwise.memory import Block as Memory
from shardwise.precision.mxfp8 import Block, MXFP8Error, Plane, encode, scale_shape
from shardwise.precision.mxfp8_products import Matmul, Native
from shardwise.precision.mxfp8_tensor import FORMATS, NAMES, READS, Format, Reads
from shardwise.shard.call import in_checkpoint
from shardwise.shard.formats import plane_bytes, plane_layout, planes_of, sends_codes
from shardwise.shard.group import Group
from shardwise.shard.mxfp8_parameter import MXFP8Parameter, MXFP8Weight
from shardwise.shard.runtime import Runtime
from shardwise.shard.whole_parameter import WholeParameter


class GroupPlane:
    """One plane of every weight of a group, in one block of bytes: codes, then scales."""

    def __init__(self, block: Block, layout: Layout, parts: int, device: torch.device) -> None:
        self.block, self.layout = block, layout
        self.share = block[0] * block[1]  # elements with one scale
        nbytes = plane_bytes(layout, block, parts)
        self.memory = Memory(nbytes, torch.uint8, device, "compute", lane="gather")
        self.memory.moved = _forget_views(self)
        self.filled: Any = None  # main.state when it was made; None: never, or released since
        self.views: list[Plane] | None = None

    def view(self, index: int, low: int, high: int) -> Plane:
        """Elements [low, high) of one weight, which must be whole blocks; a stack of members as one
        high matrix, in which no block reaches from one to the next."""
        columns = self.layout.items[index].shape[-1]
        shape = ((high - low) // columns, columns)
        first, last = self.layout.starts[index] + low, self.layout.starts[index] + high
        codes, scales = self.ranges(first, last)
        return Plane(
            codes=codes.view(shape),
            scales=scales.view(scale_shape(shape, self.block)),
            block=self.block,
        )

    def ranges(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The codes at addresses [first, last), and their scales."""
        begin = self.layout.numel
        share, memory = self.share, self.memory.tensor
        return memory[first:last], memory[begin + first // share : begin + last // share]

    def whole(self, index: int) -> Plane:
        """One weight."""
        if self.views is None:
            items = enumerate(self.layout.items)
            self.views = [self.view(position, 0, item.numel) for position, item in items]
        return self.views[index]


def encode_planes(planes: Sequence[GroupPlane], source: Buffer) -> None:
    """Encode what ``source`` holds into the same places of each plane; each value is read once."""
    for index, (low, high, _) in enumerate(source.pieces):
        if high > low:
            into = [plane.view(index, low, high) for plane in planes]
            codes = into[0].codes
            value = source.view(index).view(codes.shape)
            if value.device != codes.device:  # offloaded: half the bytes go over
                value = value.to(torch.bfloat16).to(codes.device)
            encode(value, [plane.block for plane in planes], out=into)


class MXFP8Group(Group):
    """A group in MXFP8. Gathers bring what the phase reads; see the picture above."""

    format: Format
    scratch = "staging"

    def _build_compute(self) -> None:
        super()._build_compute()
        self.whole.block.release(CACHING)
        self.direct = sends_codes(self.layout, self.format, self.persistent)
        layout, parts = plane_layout(self.layout, self.direct), self.layout.num_shards
        device = self._whole_device
        self.planes = {
            block: GroupPlane(block, layout, parts, device) for block in FORMATS[self.format]
        }
        self._coming: list[comm.Pending] = []
        self._spent = False  # whether the kept part is on its way back
        self._runtime: Runtime | None = None

    def _whole_parameter(self, index: int, requires_grad: bool) -> WholeParameter:
        weight = MXFP8Weight(weakref.ref(self), index)
        return MXFP8Parameter.of(weight, requires_grad)

    def show_whole(self) -> None:
        """The parameters have a shape and a dtype for autograd, and no memory: see
        :class:`MXFP8Parameter`."""
        device = self._whole_device
        for item, parameter in zip(self.items, self.unsharded, strict=True):
            one = torch.zeros((), dtype=self.whole.dtype, device=device)
            parameter.show(one.expand(item.shape))

    @property
    def blocks(self) -> list[Memory]:
        return [plane.memory for plane in self.planes.values()]

    @property
    def pending(self) -> bool:
        return bool(self._coming) or self._ready is not None

    @property
    def fresh(self) -> bool:
        return not self._missing("forward") and not self._missing("backward")

    def _missing(self, phase: Reads) -> list[GroupPlane]:
        """The planes that ``phase`` reads and that are not there, or are older than main."""
        backward = phase == "backward" or (self._runtime is not None and self._runtime.in_backward)
        everything = self.persistent or (self.reads_again and backward)
        return self._stale(
            self.planes[block] for block in planes_of(self.format, phase, everything)
        )

    def _stale(self, planes: Iterable[GroupPlane]) -> list[GroupPlane]:
        state = self.main.state
        return [plane for plane in planes if not plane.memory.live or plane.filled != state]

    def _plane_of(self, phase: Reads) -> GroupPlane | None:
        block = READS[self.format].get(phase)
        return None if block is None else self.planes[block]

    def gather(self, runtime: Runtime, phase: Reads = "forward") -> None:
        self._runtime = runtime
        self._bring(self._missing(phase), runtime)

    def _bring(self, missing: Sequence[GroupPlane], runtime: Runtime) -> None:
        if not missing:
            return
        self._prepare(runtime)
        comm.purpose = self.label
        with runtime.lanes.on("gather"):
            self._arrive()
            for plane in missing:
                plane.memory.acquire(runtime.source)
            kept = self._plane_of("backward") if self._keeps else None
            rest = [plane for plane in missing if plane is not kept]
            if kept is not None and len(rest) < len(missing):
                assert self._kept is not None and self._kept_axis is not None
                part = self._kept.tensor
                self._coming = [comm.all_gather(kept.memory.tensor, part, self._kept_axis)]
                self._spent = True
            if rest and self.direct:
                self._coming += self._gather_codes(rest, self._source())
            elif rest:
                self._gather_staged(rest, runtime)
        comm.purpose = ""
        for plane in missing:
            plane.filled = self.main.state
        self._issued(runtime)

    def _arrive(self) -> None:
        coming, self._coming = self._coming, []
        try:
            for pending in coming:
                pending.wait()
        except BaseException:
            for plane in self.planes.values():
                plane.filled = None
            raise

    def _gather_codes(self, planes: Sequence[GroupPlane], source: Buffer) -> list[comm.Pending]:
        """Encode what is here; then codes and scales travel, axis by axis."""
        encode_planes(planes, source)
        coming: list[comm.Pending] = []
        for axis, shard, whole in source.gather_steps(self.whole):
            for pending in coming:
                pending.wait()  # the next axis sends what this one brings
            coming = [
                comm.all_gather(into, part, axis)
                for plane in planes
                for part, into in zip(plane.ranges(*shard), plane.ranges(*whole), strict=True)
            ]
        return coming

    def _gather_staged(self, planes: Sequence[GroupPlane], runtime: Runtime) -> None:
        """bf16 travels through scratch that lives from here to the end of this function."""
        self.whole.block.acquire(runtime.source)
        source = self._source()
        if self._plan is None:
            self._plan = source.gather_plan(self.whole)
        self._plan.run().wait()
        encode_planes(planes, self.whole)
        self.whole.block.release(runtime.source)

    def wait(self, runtime: Runtime) -> None:
        if self.pending:
            self._arrive()
            self._computes_next(runtime)
        if self._spent and self._kept is not None:
            self._kept.release(runtime.source)
            self._spent = False

    def release(self, runtime: Runtime) -> None:
        if self.persistent or not any(memory.live for memory in self.blocks):
            return
        self.wait(runtime)
        runtime.lanes.join("gather", "compute")
        with runtime.lanes.on("gather"):
            for plane in self.planes.values():
                plane.memory.release(runtime.source)
                plane.filled = None

    def _rest(self) -> None:
        for memory in () if self.persistent else self.blocks:
            memory.release(CACHING)

    @property
    def _keeps(self) -> bool:
        kept = self._kept
        return kept is not None and kept.live and self._kept_filled == self.main.state

    def keep_part(self, runtime: Runtime, axis: comm.Axis) -> None:
        """1/k of the plane that backward reads. A row plane says nothing about a column plane: that
        one is gathered for this, while forward goes on. One plane of squares is here already."""
        plane = self._plane_of("backward")
        if self.persistent or plane is None:
            return
        self._runtime = runtime
        self._bring(self._stale([plane]), runtime)
        whole = plane.memory.tensor
        length = whole.numel() // axis.size
        runtime.lanes.join("gather", "compute")
        with runtime.lanes.on("gather"):
            self._arrive()
            if self._kept is None:
                self._kept = Memory(length, whole.dtype, whole.device, "compute", lane="gather")
            self._kept.acquire(runtime.source)
            self._kept.tensor.copy_(whole[axis.rank * length : (axis.rank + 1) * length])
        # Nobody computes with what was just gathered: compute need not wait for it.
        self._ready, self._spent = None, False
        self._kept_axis, self._kept_filled = axis, plane.filled

    def plane(self, index: int, phase: Reads) -> Plane:
        """The plane of one weight that ``phase`` reads. A recomputation that nobody saw coming (a
        reentrant checkpoint inside a unit), or whoever else reads in backward what forward read,
        gathers here: every rank does so, or none."""
        plane = self._plane_of(phase)
        if plane is None:
            raise MXFP8Error(
                f"'{self.items[index].name}' is stored as rows to look up: its {phase} reads none"
            )
        runtime = self._runtime
        in_backward = runtime is not None and runtime.in_backward
        if phase == "forward" and not in_backward and in_checkpoint():
            self.reads_again = True
        # What forward left may be older than main, of which backward's hook gathered its own plane:
        # one backward computes with one version.
        stale = in_backward and plane.filled != self.main.state
        if not plane.memory.live or plane.filled is None or stale:
            if runtime is None or not in_backward:
                raise RuntimeError(self._not_here(index, plane))
            self.gather(runtime, phase=phase)
        if self.pending and self._runtime is not None:
            self.wait(self._runtime)
        return plane.whole(index)

    def _not_here(self, index: int, plane: GroupPlane) -> str:
        name, here = self.items[index].name, [NAMES[block] for block in self.planes_here(index)]
        problem = f"the {NAMES[plane.block]} plane of '{name}' is not here"
        if not here:
            return (
                f"{problem}: an MXFP8 weight can be read inside its module's forward and backward, "
                f"or after unshard()"
            )
        return (
            f"{problem}, but its {' and '.join(here)} plane: forward and unshard() bring what "
            f"forward reads, and only backward the other; encode the main weight for both: "
            f"MXFP8Tensor.encode(value, {self.format!r})"
        )

    def planes_here(self, index: int) -> dict[Block, Plane]:
        """The planes that are gathered now."""
        return {
            block: plane.whole(index)
            for block, plane in self.planes.items()
            if plane.memory.live and plane.filled is not None
        }

    @property
    def matmul(self) -> Matmul | None:
        if self.precision.products == "native":
            return Native(self._whole_device)
        return None if self._runtime is None else self._runtime.matmul


class MXFP8RowColumnGroup(MXFP8Group):
    """Row and column planes of 1x32 blocks."""

    format = "mxfp8"


class MXFP8SquareGroup(MXFP8Group):
    """One plane of 32x32 blocks for both directions."""

    format = "mxfp8_2d"


class MXFP8RowGroup(MXFP8Group):
    """Row planes alone, of embeddings."""

    format = "mxfp8_rows"


GROUPS: dict[Format | None, type[Group]] = {
    None: Group,
    "mxfp8": MXFP8RowColumnGroup,
    "mxfp8_2d": MXFP8SquareGroup,
    "mxfp8_rows": MXFP8RowGroup,
}


def _forget_views(plane: GroupPlane) -> Callable[[], None]:
    """The views of a block that moved are made anew; the block must not keep its owner alive."""
    reference = weakref.ref(plane)

    def moved() -> None:
        owner = reference()
        if owner is not None:
            owner.views = None

    return moved
