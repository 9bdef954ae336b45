# SPDX-License-Identifier: Apache-2.0
"""``FP8Group``: a group whose whole weights are fp8 planes.

    main      fp32, placements.main     all other values are made from it, as in every group
    planes    uint8, all replicated     | codes of every weight, laid out as main |.pad.| scales |
                                        a row and a column plane, or one of squares, or of rows
    whole     bf16, all replicated      scratch for a gather that sends bf16

    zero(3)   forward   main |##| --encode--> |#| --all-gather--> plane     1.03 bytes in MXFP8
              backward  main |##| --encode--> |#| --all-gather--> plane     1.03 bytes
    zero(1)   main |##| --encode--> |#| --all-gather--> plane, kept         1.03 bytes

With two planes (mxfp8_rowcol) each phase of zero(3) gathers one plane, or both if backward runs
forward again (activation checkpointing). zero(1) gathers bf16 and encodes both planes from it.
Embeddings have only a row plane: their backward gathers nothing.

Planes are always encoded from main rounded to bf16, never from a decoded plane. The optimizer
writes no codes. Each plane remembers the version of main that it was encoded from, and a gather
encodes stale planes again. To encode inside the optimizer would save a read of the shard (4 of the
5.03 bytes that encoding moves for each element and phase). But codes would be kept at rest (up to
2.06 bytes), and every other write to main would leave them stale.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import comm
from shardwise.buffer import Buffer, Gathered
from shardwise.layout import Layout
from shardwise.memory import CACHING
from shardwise.memory import Block as Memory
from shardwise.moe.coded import Coding, expert_codes
from shardwise.precision import fp8_graphs
from shardwise.precision.fp8 import (
    SCALES,
    SQUARE_128,
    Block,
    FP8Error,
    Plane,
    Rounding,
    encode,
    scale_shape,
    uses_kernels,
)
from shardwise.precision.fp8_products import Matmul, Native
from shardwise.precision.fp8_tensor import FORMATS, NAMES, READS, Format, FP8Tensor, Reads, restored
from shardwise.shard.flow import Flow, in_checkpoint
from shardwise.shard.formats import (
    one_scale_each,
    plane_bytes,
    plane_layout,
    planes_of,
    sends_codes,
    share_of,
)
from shardwise.shard.fp8_parameter import FP8Parameter
from shardwise.shard.group import Group
from shardwise.shard.whole_parameter import WholeParameter


class GroupPlane(Gathered):
    """One plane of every weight of a group, in one block of bytes: codes, then scales."""

    def __init__(self, block: Block, layout: Layout, parts: int, device: torch.device) -> None:
        self.block, self.layout = block, layout
        self.share = share_of(layout, block)  # addresses for each scale
        self.width = SCALES[block].itemsize  # bytes of a scale
        nbytes = plane_bytes(layout, block, parts)
        super().__init__(Memory(nbytes, torch.uint8, device, "compute", lane="gather"))
        # Bytes gathered over the outer axes (hfsdp), kept between gathers over the inner axis.
        self.part: Memory | None = None
        self.part_filled: Any = None  # main.state when ``part`` was gathered
        self.views: dict[tuple[int, int], Plane] = {}  # by (first weight, last weight)
        self.memory.moved = self.views.clear  # views are made again at their next use
        self._tiles: Any = None  # the tiles that this rank encodes, as the kernel takes them

    def view(self, index: int, low: int, high: int) -> Plane:
        """The plane of elements [low, high) of one weight, which must be whole blocks. A stack of
        matrices is viewed as one high matrix; no block contains rows of two matrices."""
        columns = self.layout.items[index].shape[-1]
        shape = ((high - low) // columns, columns)
        first, last = self.layout.starts[index] + low, self.layout.starts[index] + high
        codes, _ = self.ranges(first, last)
        _, scales = self.ranges(first, self.layout.numel)
        # The place of a row of scales follows from the place of its codes, so gaps may remain.
        steps = self.block[0] * columns // self.share, 1
        scales = scales.view(SCALES[self.block]).as_strided(scale_shape(shape, self.block), steps)
        return Plane(codes=codes.view(shape), scales=scales, block=self.block)

    def ranges(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The bytes of the codes at addresses [first, last), and of their scales."""
        memory, begin = self.memory.tensor, self.layout.numel
        low, high = (begin + -(-end // self.share) * self.width for end in (first, last))
        return memory[first:last], memory[low:high]

    def encode_all(self, source: Buffer, rounding: Rounding) -> bool:
        """Encode all elements of ``source`` into their places with one kernel. Returns False, and
        does nothing, if there is no kernel for this."""
        values, memory = source.flat, self.memory.tensor
        supported = self.block == SQUARE_128 and values.dtype in (torch.bfloat16, torch.float32)
        if not (supported and values.device == memory.device and uses_kernels(memory.device)):
            return False
        from shardwise.kernels import fp8_codes as kernels

        if self._tiles is None:
            places = zip(self.layout.items, self.layout.starts, source.pieces, strict=True)
            matrices: list[Any] = []
            for item, start, (low, high, offset, *_) in places:
                columns = item.shape[-1]
                matrix = kernels.Matrix(
                    (high - low) // columns, columns, offset, start + low, share=self.share
                )
                members = (high - low) // math.prod(item.shape[-2:])
                matrices += matrix.cut(members) if one_scale_each(item, [self.block]) else [matrix]
            self._tiles = kernels.list_tiles(matrices, memory.device)
        codes, scales = self.ranges(0, self.layout.numel)
        scales = scales.view(SCALES[self.block])
        kernels.encode(values, codes, scales, tiles=self._tiles, rounding=rounding)
        return True

    def make_part(self, first: int, last: int) -> None:
        """Make memory for the bytes gathered over outer axes: addresses [first, last)."""
        nbytes = sum(part.numel() for part in self.ranges(first, last))
        device = self.memory.tensor.device
        self.part = Memory(nbytes, torch.uint8, device, "compute", lane="gather")

    def copy_part(self, first: int, last: int, state: Any) -> None:
        """Copy the bytes gathered over outer axes from the kept part if it is current, else into
        the kept part."""
        assert self.part is not None
        codes, scales = self.ranges(first, last)
        kept = self.part.tensor[: codes.numel()], self.part.tensor[codes.numel() :]
        for part, gathered in zip(kept, (codes, scales), strict=True):
            if self.part_filled == state:
                gathered.copy_(part)
            else:
                part.copy_(gathered)
        self.part_filled = state

    def whole(self, first: int, last: int) -> Plane:
        """The plane of one whole weight, or of the consecutive weights from first to last."""
        plane = self.views.get((first, last))
        if plane is None:
            starts = self.layout.starts
            size = starts[last] + self.layout.items[last].numel - starts[first]
            plane = self.views[first, last] = self.view(first, 0, size)
        return plane


def encode_planes(planes: Sequence[GroupPlane], source: Buffer, rounding: Rounding) -> None:
    """Encode the elements of ``source`` into the same places of each plane, in one read. A kernel
    that supports a plane encodes all its weights in one launch."""
    by_weight = [plane for plane in planes if not plane.encode_all(source, rounding)]
    if not by_weight:
        return
    blocks = [plane.block for plane in by_weight]
    for index, (low, high, *_) in enumerate(source.pieces):
        if high > low:
            out = [plane.view(index, low, high) for plane in by_weight]
            codes, item = out[0].codes, source.layout.items[index]
            value = source.view(index).view(codes.shape)
            if value.device != codes.device:  # offloaded: cast first, to copy half the bytes
                value = value.to(torch.bfloat16).to(codes.device)
            members = (high - low) // math.prod(item.shape[-2:])
            sharing = members if one_scale_each(item, blocks) else 0
            encode(value, blocks, out=out, rounding=rounding, sharing=sharing)


class FP8Weight(FP8Tensor):
    """One weight of a group. Planes are looked up at each read, because they may be released and
    gathered again between two reads."""

    __slots__ = ("_group", "_index")

    def __init__(self, group: weakref.ref[Any], index: int) -> None:
        self._group, self._index = group, index

    @property
    def group(self) -> FP8Group:
        group: FP8Group | None = self._group()
        if group is None:
            raise RuntimeError("this weight's group is gone; the model was deleted or rebuilt")
        return group

    @property
    def planes(self) -> dict[Block, Plane]:  # type: ignore[override]
        """The planes that are gathered now."""
        return self.group.gathered(self._index)

    @property
    def name(self) -> str:
        return self.group.items[self._index].name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.group.items[self._index].shape)

    @property
    def device(self) -> torch.device:
        return self.group.whole_device

    @property
    def format(self) -> Format:
        return self.group.format

    @property
    def matmul(self) -> Matmul | None:
        return self.group.matmul

    def plane(self, phase: Reads) -> Plane:
        return self.group.plane(self._index, phase)

    def joined(self, others: Sequence[FP8Tensor], phase: Reads) -> Plane | None:
        group, last = self.group, self._index
        for other in others:
            if not isinstance(other, FP8Weight) or other.group is not group:
                return None
            if not group.follows(last, other._index):
                return None
            last = other._index
        return group.plane(self._index, phase, last)

    def dequantise(
        self, phase: Reads = "forward", *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        return super().dequantise(phase, dtype=dtype).view(self.shape)

    def operand(self, phase: Reads) -> Any:
        """The operand of grouped products: the codes of a stack if products are in fp8, else
        decoded values."""
        if not self.coding[0]:
            return self.dequantise(phase)
        return expert_codes(self.plane(phase), self.shape, phase)

    @property
    def coding(self) -> Coding:
        """(whether rows are coded when they are multiplied by this stack, whether they are coded in
        the product that makes its gradient)."""
        recipe = self.group.precision.recipe
        if len(self.shape) < 3 or recipe.activations is None:
            return False, False
        return True, recipe.weight_gradient == "fp8"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain ``FP8Tensor`` of the gathered planes, which belongs to no
        group. A stack of matrices becomes one high matrix."""
        self._require_a_plane()
        # Cloned, because pickling a view would save the planes of the whole group.
        return restored, ({name: tensor.clone() for name, tensor in self.state_dict().items()},)

    def to(self, device: torch.device | str) -> FP8Tensor:
        """A plain ``FP8Tensor`` on ``device``; see ``__reduce__``."""
        self._require_a_plane()
        return super().to(device)

    def _require_a_plane(self) -> None:
        if not self.planes:
            raise RuntimeError(
                f"no plane of '{self.name}' is here to copy or save: copy or save the weight "
                f"inside its module's forward or after unshard(), or take the main weights from "
                f"sw.full_state_dict"
            )


class FP8Group(Group):
    """A group in fp8. A gather brings the planes that the phase reads; see the top of this file."""

    format: Format
    scratch, movable = "staging", True

    def _build_compute(self) -> None:
        super()._build_compute()
        self.whole.block.release(CACHING)
        self.rounding = self.precision.rounding
        self.direct = sends_codes(self.layout, self.format, self.persistent)
        # The number of outer axes (hfsdp), which are gathered only once for each change of main. If
        # codes are sent, the planes keep the result instead of the buffer ``compute``.
        self._outer = 0
        if self.direct and self.compute is not None:
            self._outer = len(self.main.gather_steps(self.compute))
            self.compute = None
        self.plane_layout = plane_layout(self.layout, self.direct)
        parts, device = self.layout.num_shards, self.whole_device
        self.planes = {
            block: GroupPlane(block, self.plane_layout, parts, device)
            for block in FORMATS[self.format]
        }
        self.copies = [*self.planes.values()]
        if self._outer:
            part = self.main.gather_steps(self.whole)[self._outer][1]
            for plane in self.planes.values():
                plane.make_part(*part)
        self._runtime: Flow | None = None

    def _whole_parameter(self, index: int, requires_grad: bool) -> WholeParameter:
        weight = FP8Weight(weakref.ref(self), index)
        recipe = self.precision.recipe if "backward" in READS[self.format] else None
        if recipe is not None and recipe.activations is not None:
            fp8_graphs.install()
        parameter = FP8Parameter.of(weight, requires_grad, recipe, self.device)
        layout = self.plane_layout
        item = layout.items[index]
        # After a partial last row of blocks no weight follows directly. So graphs get size 0.
        size = 0 if item.shape[-2] % item.side else item.numel
        parameter.place = f"{layout.numel} {layout.starts[index]} {size}"
        return parameter

    def show_whole(self) -> None:
        """Give the parameters a shape and a dtype for autograd, without memory for values; see
        :class:`FP8Parameter`. Code that bypasses that class reads NaN."""
        device = self.whole_device
        for item, parameter in zip(self.items, self.unsharded, strict=True):
            nan = torch.full((), math.nan, dtype=self.whole.dtype, device=device)
            parameter.show(nan.expand(item.shape))

    def _missing(self, phase: Reads) -> list[Gathered]:
        backward = phase == "backward" or (self._runtime is not None and self._runtime.in_backward)
        everything = self.persistent or (self.reads_again and backward)
        return self._stale(
            self.planes[block] for block in planes_of(self.format, phase, everything)
        )

    def _copy_for(self, phase: Reads) -> GroupPlane | None:
        block = READS[self.format].get(phase)
        return None if block is None else self.planes[block]

    def gather(self, runtime: Flow, phase: Reads = "forward") -> None:
        self._runtime = runtime
        super().gather(runtime, phase)

    def _bring(self, copies: Sequence[Gathered], runtime: Flow) -> list[comm.Pending]:
        planes = [plane for plane in self.planes.values() if plane in copies]
        if self.direct:
            return self._gather_codes(planes)
        self._gather_staged(planes, runtime)
        return []

    def _gather_codes(self, planes: Sequence[GroupPlane]) -> list[comm.Pending]:
        """Encode this rank's shard, then gather codes and scales axis by axis. The bytes gathered
        over outer axes are kept until main changes."""
        state, steps = self.main.state, self.main.gather_steps(self.whole)
        part = steps[self._outer][1] if self._outer else (0, 0)
        stale = [plane for plane in planes if not self._outer or plane.part_filled != state]
        encode_planes(stale, self.main, self.rounding)
        gathers: list[comm.Pending] = []
        for number, (axis, shard, whole) in enumerate(steps):
            for pending in gathers:
                pending.wait()  # the next axis sends what the previous axis received
            if self._outer and number == self._outer:
                for plane in planes:
                    plane.copy_part(*part, state)
            gathers = [
                comm.all_gather_together(
                    list(zip(plane.ranges(*whole), plane.ranges(*shard), strict=True)), axis
                )
                for plane in (stale if number < self._outer else planes)
            ]
        return gathers

    def _gather_staged(self, planes: Sequence[GroupPlane], runtime: Flow) -> None:
        """Gather bf16 into scratch that lives until this function returns, then encode."""
        self.whole.block.acquire(runtime.source)
        for pending in super()._bring(planes, runtime):
            pending.wait()
        encode_planes(planes, self.whole, self.rounding)
        self.whole.block.release(runtime.source)

    def follows(self, index: int, next_index: int) -> bool:
        """Whether two weights lie in memory like one matrix: the second begins where the first
        ends, and no block of the first is partial at its end."""
        layout = self.plane_layout
        first, second = layout.items[index], layout.items[next_index]
        end = layout.starts[index] + first.numel
        whole = not first.shape[-2] % first.side
        return whole and end == layout.starts[next_index] and first.shape[1:] == second.shape[1:]

    def plane(self, index: int, phase: Reads, last: int | None = None) -> Plane:
        """The plane of one weight that ``phase`` reads, or of all weights up to ``last``.

        A backward may read a plane that no hook has gathered, for example when a reentrant
        checkpoint inside a unit recomputes. The plane is then gathered here, on all ranks alike.
        """
        plane = self._copy_for(phase)
        if plane is None:
            raise FP8Error(
                f"'{self.items[index].name}' is stored as rows to look up: no plane serves {phase}"
            )
        runtime = self._runtime
        in_backward = runtime is not None and runtime.in_backward
        if phase == "forward" and not in_backward and in_checkpoint():
            self.reads_again = True
        # The plane of forward may be older than main, and backward's hook gathered its plane from
        # main: gather this one too, so that one backward computes with one version.
        stale = in_backward and plane.filled != self.main.state
        if not plane.memory.live or plane.filled is None or stale:
            if runtime is None or not in_backward:
                raise RuntimeError(self._not_gathered(index, plane))
            self.gather(runtime, phase=phase)
        if self.pending and self._runtime is not None:
            self.wait(self._runtime)
        return plane.whole(index, index if last is None else last)

    def _not_gathered(self, index: int, plane: GroupPlane) -> str:
        name, gathered = self.items[index].name, [NAMES[block] for block in self.gathered(index)]
        problem = f"the {NAMES[plane.block]} plane of '{name}' is not here"
        if not gathered:
            return (
                f"{problem}: a weight in fp8 can be read inside its module's forward and backward, "
                f"or after unshard()"
            )
        return (
            f"{problem}, but its {' and '.join(gathered)} plane is: forward and unshard() gather "
            f"the plane that forward reads, and only backward gathers the other plane. To have "
            f"both, encode the main weight: FP8Tensor.encode(value, {self.format!r})"
        )

    def gathered(self, index: int) -> dict[Block, Plane]:
        """The planes of one weight that are gathered now."""
        return {
            block: plane.whole(index, index)
            for block, plane in self.planes.items()
            if plane.memory.live and plane.filled is not None
        }

    @property
    def matmul(self) -> Matmul | None:
        if self.precision.products == "native":
            return Native(self.whole_device)
        return None if self._runtime is None else self._runtime.matmul


GROUPS: dict[Format | None, type[Group]] = {None: Group}
GROUPS |= {name: type(f"{name}_group", (FP8Group,), {"format": name}) for name in FORMATS}
